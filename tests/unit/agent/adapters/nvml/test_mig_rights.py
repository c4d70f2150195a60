# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.adapters.nvml.mig_rights import MIG_RIGHTS, mig_rights


@pytest.mark.parametrize(
    ("there", "lacking"),
    [
        pytest.param([], "nvidia-cap1 and ", id="the toolkit passed both over"),
        pytest.param(["nvidia-cap2"], "nvidia-cap1;", id="it may look and not make"),
    ],
)
def test_device_nodes_missing_from_container_toolkit_are_named_with_fixing_version(tmp_path, there, lacking):
    for name in there:
        (tmp_path / name).touch()
    cure = mig_rights(tmp_path)
    assert lacking in cure
    assert "1.20.1" in cure
    assert cure.startswith(MIG_RIGHTS)


def test_with_both_nodes_the_toolkit_is_not_named(tmp_path):
    for name in ("nvidia-cap1", "nvidia-cap2"):
        (tmp_path / name).touch()
    assert mig_rights(tmp_path) == MIG_RIGHTS
