# SPDX-License-Identifier: Apache-2.0
"""GPUs fall off the bus and come back, a kubelet restarts meanwhile, a node is deleted; running containers notice nothing."""

from collections.abc import Callable, Iterator

import pytest

from aliquot import contract
from aliquot.contract import units
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.invariants import LIMIT_MIB, Invariants, on_gpu
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    GPU_MEMORY_MIB,
    GPUS,
    SHARES_PER_GPU,
    SIMULATED_DRIVER,
    Slice,
    agent_pod,
    slice_pod,
)
from tests.e2e.test_cluster import busybox_pod

MEMORY = contract.RESOURCE_VGPU_MEMORY
WHOLE_NODE_MIB = GPUS * GPU_MEMORY_MIB
RECOVERY_SECONDS = 180
"""A GPU that fell once is given out again 30 s after it is back; one that fell before waits twice as long."""

Inject = Callable[..., None]


@pytest.fixture
def inject(product: Kubectl, node_name: str) -> Iterator[Inject]:
    """Break a simulated GPU: a fault of ``aliquot-sim inject``, a UUID, and the values of the fault. It is whole again afterwards."""
    broken: set[str] = set()

    def run(fault: str, uuid: str, *values: str) -> None:
        agent = agent_pod(product, node_name)["metadata"]["name"]
        command = (f"{SIMULATED_DRIVER}/bin/aliquot-sim", "inject", fault, *values, "--gpu", uuid)
        product.within(AGENT_NAMESPACE).exec(agent, *command, container="agent")
        broken.add(uuid)

    yield run
    for uuid in broken:
        run("clear", uuid)
        wait_for_state(product, node_name, uuid, "healthy")


@pytest.mark.timeout(4 * RECOVERY_SECONDS + 100)
def test_lost_gpu_gets_no_new_work_and_keeps_its_containers(
    invariants: Invariants, kubectl: Kubectl, product: Kubectl, node_name: str, inject: Inject
) -> None:
    lost = invariants.gpu
    inject("lost", lost)
    wait_for_state(product, node_name, lost, "lost")
    wait_for_capacity(product, node_name, WHOLE_NODE_MIB - GPU_MEMORY_MIB + sum(LIMIT_MIB.values()))
    eventually(
        lambda: product.get("node", node_name)["status"]["allocatable"][contract.RESOURCE_VGPU] == str((GPUS - 1) * SHARES_PER_GPU),
        "the kubelet to count its shares out",
    )
    eventually(lambda: condition(product, node_name)["status"] == "False", "the node to say that a GPU is not healthy")
    eventually(lambda: reported(kubectl, "holder", contract.EVENT_REASON_GPU_UNHEALTHY), "an event on its pod")
    kubectl.apply(slice_pod("waiter", Slice(1024), annotations=on_gpu(lost)), slice_pod("elsewhere", Slice(1024)))
    kubectl.wait_for_phase("elsewhere", "Running")
    eventually(lambda: "unhealthy" in "".join(reported(kubectl, "waiter", "FailedScheduling")), "an event on the waiting pod")
    invariants.untouched(gpu_answers=False)

    inject("recover", lost)
    kubectl.wait_for_phase("waiter", "Running", seconds=RECOVERY_SECONDS)
    wait_for_capacity(product, node_name, WHOLE_NODE_MIB)
    eventually(lambda: condition(product, node_name)["status"] == "True", "the node to say that its GPUs are healthy")
    eventually(lambda: reported(kubectl, "holder", contract.EVENT_REASON_GPU_HEALTHY), "an event on its pod")
    invariants.hold(gpu_answers=False)  # what programs had on the GPU went with it: its owner has to restart each


@pytest.mark.soak
@pytest.mark.timeout(RECOVERY_SECONDS + GPUS * 60 + 350)
def test_kubelet_restart_with_failed_gpu_ends_no_container_of_full_node(
    invariants: Invariants, kubectl: Kubectl, product: Kubectl, node: Cluster, node_name: str, inject: Inject
) -> None:
    """The kubelet admits its pods again when it starts: if the node offered less than they have, some of them would be ended."""
    others = [uuid for uuid in devices(product, node_name) if uuid != invariants.gpu]
    rest = GPU_MEMORY_MIB - sum(LIMIT_MIB.values())
    kubectl.apply(
        slice_pod("rest", Slice(rest), annotations=on_gpu(invariants.gpu)),
        *(slice_pod(f"whole-{number}", Slice(GPU_MEMORY_MIB, cores=100), annotations=on_gpu(uuid)) for number, uuid in enumerate(others)),
    )
    for name in ("rest", *(f"whole-{number}" for number in range(len(others)))):
        kubectl.wait_for_phase(name, "Running", seconds=60)
    invariants.note()
    inject("lost", others[-1])
    wait_for_state(product, node_name, others[-1], "lost")
    node.restart("kubelet")
    kubectl.apply(busybox_pod("after", "true"))
    kubectl.wait_for_phase("after", "Succeeded", seconds=60)
    invariants.untouched()
    assert offered(product, node_name) == WHOLE_NODE_MIB

    kubectl.delete("pod", f"whole-{len(others) - 1}", "whole-0")
    wait_for_capacity(product, node_name, WHOLE_NODE_MIB - GPU_MEMORY_MIB)  # what nobody holds of the lost GPU is not on offer
    invariants.note()
    invariants.hold()


@pytest.mark.timeout(400)
def test_deleted_node_that_registers_again_keeps_gpus_and_containers(
    invariants: Invariants, product: Kubectl, node: Cluster, node_name: str
) -> None:
    before = product.get("node", node_name)["metadata"]["uid"]
    node.stop("kubelet")
    product.delete("node", node_name)
    node.start("kubelet")
    eventually(lambda: registered(product, node_name) not in ("", before), "the node to register again", seconds=60)
    wait_for_capacity(product, node_name, WHOLE_NODE_MIB, seconds=60)
    eventually(lambda: owner(product, node_name) == registered(product, node_name), "an inventory that belongs to the new node", seconds=90)
    invariants.hold(newcomer_seconds=90)


def devices(product: Kubectl, node_name: str) -> list[str]:
    """The UUIDs of a node's GPUs."""
    return [device["uuid"] for device in product.get("gpunode", node_name)["status"]["devices"]]


def wait_for_state(product: Kubectl, node_name: str, uuid: str, state: str) -> None:
    """Wait until the inventory reports this of a GPU."""

    def said() -> str:
        return next(one["state"] for one in product.get("gpunode", node_name)["status"]["devices"] if one["uuid"] == uuid)

    eventually(lambda: said() == state, f"GPU {uuid} to be {state}", seconds=RECOVERY_SECONDS, otherwise=lambda: f"it is {said()}")


def offered(product: Kubectl, node_name: str) -> int:
    """The memory that a node offers, in MiB."""
    return int(units.parse_quantity(product.get("node", node_name)["status"]["allocatable"].get(MEMORY, "0")))


def wait_for_capacity(product: Kubectl, node_name: str, mib: int, seconds: float = 45) -> None:
    """Wait until a node offers so much memory; the kubelet copies what the agent says of capacity to allocatable within 10 s."""
    eventually(
        lambda: offered(product, node_name) == mib,
        f"{mib} MiB to be offered",
        seconds=seconds,
        otherwise=lambda: f"{offered(product, node_name)} MiB are",
    )


def condition(product: Kubectl, node_name: str) -> Object:
    """What the node says of all its GPUs."""
    conditions = product.get("node", node_name)["status"]["conditions"]
    return next(one for one in conditions if one["type"] == contract.NODE_CONDITION_GPUS_HEALTHY)


def reported(kubectl: Kubectl, pod: str, reason: str) -> list[str]:
    """The events of a pod that have a reason."""
    return [event for event in kubectl.events(pod) if event.startswith(f"{reason}:")]


def registered(product: Kubectl, node_name: str) -> str:
    """The UID of the node's object; empty while it does not exist."""
    return next((node["metadata"]["uid"] for node in product.all("nodes") if node["metadata"]["name"] == node_name), "")


def owner(product: Kubectl, node_name: str) -> str:
    """The UID of the node that an inventory goes with; empty while it does not exist."""
    found = [one for one in product.all("gpunodes") if one["metadata"]["name"] == node_name]
    return found[0]["metadata"]["ownerReferences"][0]["uid"] if found else ""
