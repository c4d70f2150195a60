# SPDX-License-Identifier: Apache-2.0
"""The examples ask in words that the webhook takes, cover what users can write, and are all listed."""

import re
from pathlib import Path

import pytest
import yaml

from aliquot import contract
from aliquot.contract.model import Isolation
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.draft import GROUPS
from scheduler_plugin.webhook.normalise import Normaliser
from tests.rendering import EXAMPLES, Object, pods_of

FILES = sorted(EXAMPLES.glob("*.yaml"))
GPU_SIZES_MIB = {143151}
"""Of an H200, without the driver's reserve."""
NOT_FOR_USERS = {
    contract.ANNOTATION_PREFIX,
    contract.ANNOTATION_ASSIGNMENT,
    contract.ANNOTATION_CONSOLIDATION,
    contract.ANNOTATION_HOLD,
    contract.ANNOTATION_LAST_USED,
    contract.ANNOTATION_RETRY,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_webhook_takes_every_pod_of_an_example(path: Path) -> None:
    outcomes = [Normaliser(Options(lambda _: GPU_SIZES_MIB)).admit(pod) for pod in pods_of(path)]
    assert outcomes
    assert all(outcome.is_gpu_pod for outcome in outcomes)
    assert [outcome.refusal for outcome in outcomes if outcome.refusal] == []


@pytest.mark.parametrize("path", [path for path in FILES if not path.stem.startswith("from-")], ids=lambda path: path.stem)
def test_own_vocabulary_gives_no_warnings(path: Path) -> None:
    assert [warning for pod in pods_of(path) for warning in Normaliser(Options(lambda _: GPU_SIZES_MIB)).admit(pod).warnings] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_served_in_a_namespace_that_is_not_adopted(path: Path) -> None:
    assert all(Normaliser(Options(lambda _: GPU_SIZES_MIB), adopts=False).serves(pod) for pod in pods_of(path))


SHOWN_WITH_A_UNIT = "memory"


@pytest.mark.parametrize("path", [path for path in FILES if not path.stem.startswith("from-")], ids=lambda path: path.stem)
def test_a_pod_by_itself_can_be_applied_a_second_time(path: Path) -> None:
    """kubectl would change back what the webhook wrote in place of something else, and a pod cannot be changed."""
    for pod in yaml.safe_load_all(path.read_text()):
        if pod["kind"] == "Pod":
            patch = Normaliser(Options(lambda _: GPU_SIZES_MIB)).admit(pod).patch
            becomes = {operation["path"]: operation["value"].get("limits", {}) for operation in patch if "resources" in operation["path"]}
            written = {f"/spec/{group}/{place}/resources": one for group in GROUPS for place, one in enumerate(pod["spec"].get(group, ()))}
            kept = all(limits.items() >= limits_of(written[place]).items() for place, limits in becomes.items())
            assert kept == (path.stem != SHOWN_WITH_A_UNIT)


def limits_of(container: Object) -> Object:
    return {name: str(amount) for name, amount in container.get("resources", {}).get("limits", {}).items()}


def test_every_annotation_and_resource_has_an_example() -> None:
    words = {value for name, value in vars(contract).items() if name.startswith(("ANNOTATION_", "RESOURCE_V", "RESOURCE_MIG"))}
    written = "".join(re.sub(r"#.*", "", path.read_text()) for path in FILES)
    missing = {word for word in words - NOT_FOR_USERS if word not in written}
    assert missing == set()


def test_every_isolation_has_example() -> None:
    asked = {pod["metadata"].get("annotations", {}).get(contract.ANNOTATION_ISOLATION) for path in FILES for pod in pods_of(path)}
    by_itself = {Isolation.SHIM, Isolation.MIG}  # the default, and what is asked for as a resource
    assert asked - {None} == set(map(str, set(Isolation) - by_itself))


def test_every_example_explains_itself_and_is_listed() -> None:
    listed = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in listed} == {path.name for path in FILES}
    assert all(name == link for name, link in listed)
    assert all(path.read_text().startswith("# ") for path in FILES)
