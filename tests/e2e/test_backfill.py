# SPDX-License-Identifier: Apache-2.0
"""Room is held for a pod of all GPUs on the real kube-scheduler: short pods use it meanwhile, others do not, and the pod starts."""

import json
from collections.abc import Iterator
from functools import partial

import pytest
from click.testing import CliRunner

from aliquot import contract
from aliquot_cli.__main__ import main
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, GPU_MEMORY_MIB, GPUS, Slice, assigned_uuids, slice_pod, wait_until_rolled_out

START_SECONDS = 90
GATE = "ALIQUOT_FEATURE_GATES"


@pytest.fixture
def holding(product: Kubectl) -> Iterator[Kubectl]:
    """kubectl in the product's namespace, with schedulers that hold room; as before afterwards."""
    system = product.within(AGENT_NAMESPACE)
    for setting in (f"{GATE}=Backfill=true", f"{GATE}-"):
        system.run("set", "env", "deployment/aliquot-scheduler", "--containers=extender", setting)
        system.run("rollout", "status", "deployment/aliquot-scheduler", "--timeout=120s", timeout_seconds=150)
        wait_until_rolled_out(system)
        if not setting.endswith("-"):
            yield system


def whole(name: str, gpus: int, runtime: str = "") -> Object:
    """A pod of whole GPUs, which states its runtime or does not."""
    annotations = {contract.ANNOTATION_EXPECTED_RUNTIME: runtime} if runtime else {}
    return slice_pod(name, Slice(gpus * GPU_MEMORY_MIB, vgpus=gpus), annotations=annotations)


def why(kubectl: Kubectl, pod: str) -> dict:
    """What ``aliquot why`` shows of a pod, as a document."""
    found = CliRunner().invoke(main, ["why", f"{kubectl.namespace}/{pod}", "--kubeconfig", str(kubectl.kubeconfig), "-o", "json"])
    document: dict = json.loads(found.output) if found.output.startswith("{") else {}
    return document


def held_from(kubectl: Kubectl, pod: str) -> str:
    """Why a pod does not get room that is held."""
    return str(why(kubectl, pod).get("held", ""))


@pytest.mark.timeout(6 * START_SECONDS + 400)
def test_held_room_is_for_its_owner_and_for_short_pods(kubectl: Kubectl, holding: Kubectl) -> None:
    del holding
    kubectl.apply(whole("runs", GPUS - 2, "1h"))
    kubectl.wait_for_phase("runs", "Running", seconds=START_SECONDS)
    kubectl.apply(whole("large", GPUS))
    start = eventually(lambda: why(kubectl, "large").get("start"), "room for the large pod", seconds=START_SECONDS)
    assert start["earliest_at"] <= start["expected_at"] <= start["latest_at"]

    # Two GPUs are free. A pod without a runtime and one that runs for too long wait; a short one starts.
    kubectl.apply(whole("unknown", 1), whole("long", 1, "2h"), whole("short", 1, "5m"))
    kubectl.wait_for_phase("short", "Running", seconds=START_SECONDS)
    for name in ("unknown", "long"):
        eventually(partial(held_from, kubectl, name), f"the reason of pod {name}", seconds=START_SECONDS)
        assert not kubectl.get("pod", name)["spec"].get("nodeName")

    # The pods on its GPUs end earlier than they stated: the large pod starts at once, before those that wait beside it.
    kubectl.run("delete", "pod", "runs", "short", "--wait=true", timeout_seconds=START_SECONDS)
    kubectl.wait_for_phase("large", "Running", seconds=START_SECONDS)
    assert len(set(assigned_uuids(kubectl.get("pod", "large")))) == GPUS
    assert not any(kubectl.get("pod", name)["spec"].get("nodeName") for name in ("unknown", "long"))
