# SPDX-License-Identifier: Apache-2.0
"""Room is held for a pod of all GPUs on the real kube-scheduler: short pods use it meanwhile, others do not, and the pod starts."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial

import pytest
from click.testing import CliRunner

from aliquot import contract
from aliquot_cli.__main__ import main
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    GPU_MEMORY_MIB,
    GPUS,
    HOLD_OPEN,
    RESERVATIONS,
    Slice,
    Variant,
    assigned_uuids,
    scheduler_metric,
    schedulers_with,
    slice_pod,
)

START_SECONDS = 90
ON_TIME_SECONDS = 30
RUNTIME_SECONDS = 30
"""Of pods that end by themselves: twice as long as a pod waits before room is held for it."""
TOO_FEW_SECONDS = 8
"""What one of them states."""
VARIANT = Variant(patches=(schedulers_with(ALIQUOT_FEATURE_GATES="Backfill=true"),))


@pytest.fixture(scope="module")
def holding(product: Kubectl) -> Kubectl:
    """kubectl in the product's namespace, with schedulers that hold room."""
    return product.within(AGENT_NAMESPACE)


def whole(name: str, gpus: int, runtime: str = "", command: Sequence[str] = HOLD_OPEN) -> Object:
    """A pod of whole GPUs, which states its runtime or does not."""
    annotations = {contract.ANNOTATION_EXPECTED_RUNTIME: runtime} if runtime else {}
    return slice_pod(name, Slice(gpus * GPU_MEMORY_MIB, vgpus=gpus), command, annotations)


def why(kubectl: Kubectl, pod: str) -> dict:
    """What ``aliquot why`` shows of a pod, as a document."""
    found = CliRunner().invoke(main, ["why", f"{kubectl.namespace}/{pod}", "--kubeconfig", str(kubectl.kubeconfig), "-o", "json"])
    document: dict = json.loads(found.output) if found.output.startswith("{") else {}
    return document


def promised(kubectl: Kubectl, pod: str) -> dict:
    """When ``aliquot why`` says that a waiting pod starts, once it says so."""

    def start() -> dict | None:
        found: dict = why(kubectl, pod).get("start") or {}
        return found if found.get("expected_at") else None

    found: dict = eventually(start, f"a time for pod {pod}", seconds=START_SECONDS, otherwise=lambda: str(why(kubectl, pod)))
    return found


def seconds_of(time: str) -> float:
    """A time of the API, in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


def container_of(pod: Object) -> Object:
    """The status of a pod's container."""
    [status] = pod["status"]["containerStatuses"]
    return status


def held_from(kubectl: Kubectl, pod: str) -> str:
    """Why a pod does not get room that is held."""
    return str(why(kubectl, pod).get("held", ""))


@pytest.mark.timeout(6 * START_SECONDS + 400)
def test_held_room_is_for_its_owner_and_for_short_pods(kubectl: Kubectl, holding: Kubectl) -> None:
    del holding
    kubectl.apply(whole("runs", GPUS - 2, "1h"))
    kubectl.wait_for_phase("runs", "Running", seconds=START_SECONDS)
    kubectl.apply(whole("large", GPUS))
    start = promised(kubectl, "large")
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


@pytest.mark.timeout(2 * RUNTIME_SECONDS + 5 * START_SECONDS + 400)
def test_pods_start_as_promised_and_one_that_overstays_runs_on(kubectl: Kubectl, holding: Kubectl) -> None:
    ends = ("sleep", str(RUNTIME_SECONDS))
    kubectl.apply(whole("punctual", GPUS, f"{RUNTIME_SECONDS}s", ends))
    punctual = kubectl.wait_for_phase("punctual", "Running", seconds=START_SECONDS)
    kubectl.apply(whole("overstays", GPUS, f"{TOO_FEW_SECONDS}s", ends))
    promise = promised(kubectl, "overstays")
    assert promise["earliest_at"] <= seconds_of(punctual["status"]["startTime"]) + RUNTIME_SECONDS <= promise["latest_at"]
    kubectl.apply(whole("last", GPUS))
    overstays = kubectl.wait_for_phase("overstays", "Running", seconds=RUNTIME_SECONDS + START_SECONDS)
    started_at = seconds_of(container_of(overstays)["state"]["running"]["startedAt"])
    assert abs(started_at - promise["expected_at"]) <= ON_TIME_SECONDS, "it starts when it was promised"

    # This one runs longer than it states: the time of the pod behind it moves, and it runs to its end.
    promise = promised(kubectl, "last")
    later = eventually(
        lambda: (now := promised(kubectl, "last"))["overdue"] and now["expected_at"] > promise["expected_at"] and now,
        "a later time",
        seconds=START_SECONDS,
        otherwise=lambda: f"{promise}, then {why(kubectl, 'last')}",
    )
    assert later["expected_at"] > started_at + TOO_FEW_SECONDS
    still = kubectl.get("pod", "overstays")
    assert still["status"]["phase"] == "Running"
    assert container_of(still)["restartCount"] == 0
    assert container_of(still)["containerID"] == container_of(overstays)["containerID"]
    kubectl.wait_for_phase("overstays", "Succeeded", seconds=RUNTIME_SECONDS + START_SECONDS)
    kubectl.wait_for_phase("last", "Running", seconds=START_SECONDS)
    eventually(lambda: scheduler_metric(holding, RESERVATIONS) == 0, "all reservations to end")
