# SPDX-License-Identifier: Apache-2.0
"""When a running pod ends for a more important one: not before its minimal run time, and not before the waiting pod's delay."""

from datetime import datetime

from aliquot import contract
from tests.e2e.kubectl import Kubectl, Object
from tests.e2e.product import GPU_MEMORY_MIB, GPUS, Slice, slice_pod

LOW, HIGH = "aliquot-best-effort", "aliquot-production"
MIN_RUNTIME_SECONDS = 12
DELAY_SECONDS = 8
START_SECONDS = 120


def test_running_pod_ends_after_min_runtime_and_delay_of_waiting_pod(kubectl: Kubectl, product: Kubectl) -> None:
    del product
    kubectl.apply(whole_node("first", LOW, {contract.ANNOTATION_MIN_RUNTIME: f"{MIN_RUNTIME_SECONDS}s"}))
    began = moment(kubectl.wait_for_phase("first", "Running")["status"]["startTime"])
    kubectl.apply(whole_node("second", HIGH))
    bound = bound_at(kubectl.wait_for_phase("second", "Running", seconds=START_SECONDS))
    assert (bound - began).total_seconds() >= MIN_RUNTIME_SECONDS
    kubectl.delete("pod", "second")

    kubectl.apply(whole_node("third", LOW))
    kubectl.wait_for_phase("third", "Running")
    kubectl.apply(whole_node("fourth", HIGH, {contract.ANNOTATION_PREEMPTION_DELAY: f"{DELAY_SECONDS}s"}))
    fourth = kubectl.wait_for_phase("fourth", "Running", seconds=START_SECONDS)
    waited = bound_at(fourth) - moment(fourth["metadata"]["creationTimestamp"])
    assert waited.total_seconds() >= DELAY_SECONDS


def whole_node(name: str, priority: str, annotations: dict[str, str] | None = None) -> Object:
    """Return a pod with all GPUs of the node."""
    pod = slice_pod(name, Slice(GPUS * GPU_MEMORY_MIB, vgpus=GPUS), annotations=annotations)
    pod["spec"]["priorityClassName"] = priority
    return pod


def bound_at(pod: Object) -> datetime:
    """Return when a pod was bound, to the second."""
    [scheduled] = [one for one in pod["status"]["conditions"] if one["type"] == "PodScheduled"]
    return moment(scheduled["lastTransitionTime"])


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
