import pytest

from agent.adapters.mig_rights import MIG_RIGHTS, mig_rights


@pytest.mark.parametrize(
    ("there", "lacking"),
    [
        pytest.param([], "nvidia-cap1 and ", id="the toolkit passed both over"),
        pytest.param(["nvidia-cap2"], "nvidia-cap1;", id="it may look and not make"),
    ],
)
def test_the_nodes_that_the_container_toolkit_left_out_are_named_with_the_version_that_has_them(tmp_path, there, lacking):
    for name in there:
        (tmp_path / name).touch()
    cure = mig_rights(tmp_path)
    assert lacking in cure
    assert "1.20.1" in cure
    assert cure.startswith(MIG_RIGHTS)


def test_with_both_nodes_it_is_no_matter_of_the_toolkit(tmp_path):
    for name in ("nvidia-cap1", "nvidia-cap2"):
        (tmp_path / name).touch()
    assert mig_rights(tmp_path) == MIG_RIGHTS
