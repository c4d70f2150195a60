# SPDX-License-Identifier: Apache-2.0
"""Which GPUs pods get, on the real kube-scheduler: linked ones together, and no GPU with too little compute left."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.fleet import Fleet, pod, running_fleet
from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.scale import GPU_MEMORY_MIB, GPUS_PER_NODE

NODES = ("choice-1", "choice-2")
PAIRS = [" ".join("X" if a == b else "NV18" if a // 2 == b // 2 else "SYS" for b in range(GPUS_PER_NODE)) for a in range(GPUS_PER_NODE)]
"""NVLinks between GPUs 0 and 1, 2 and 3, and so on."""
PAIR, APART = (4, 5), (3, 4)


@pytest.fixture(scope="module")
def nodes(without_product: None, node: Cluster) -> Iterator[Fleet]:
    """Two nodes of eight GPUs, linked in pairs."""
    del without_product
    with running_fleet(node, dict.fromkeys(NODES, "a")) as running:
        for name in NODES:
            running.write_inventory(name, links=PAIRS)
        yield running


@pytest.fixture
def fleet(nodes: Fleet, kubectl: Kubectl) -> Iterator[Fleet]:
    """The nodes, for pods in a namespace of the test's own."""
    nodes.wait_until_it_answers()
    yield replace(nodes, kubectl=kubectl)
    kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("paired", "other"), [NODES, NODES[::-1]])
def test_two_gpus_are_taken_on_the_node_where_they_are_linked(fleet: Fleet, paired: str, other: str) -> None:
    leave(fleet, paired, PAIR)
    leave(fleet, other, APART)
    fleet.create(pod("two", gpus=2))
    fleet.wait_until_bound("two")
    assert fleet.devices_of("two") == [gpu(paired, minor) for minor in PAIR]


def test_single_pods_break_no_second_pair(fleet: Fleet) -> None:
    fleet.fill({NODES[0]: GPUS_PER_NODE, NODES[1]: 0})
    for name in ("first", "second"):
        fleet.create(pod(name))
        fleet.wait_until_bound(name)
    taken = {uuid for name in ("first", "second") for uuid in fleet.devices_of(name)}
    assert taken in [{gpu(NODES[0], minor), gpu(NODES[0], minor + 1)} for minor in range(0, GPUS_PER_NODE, 2)]


def test_compute_of_a_gpu_is_promised_once(fleet: Fleet) -> None:
    leave(fleet, NODES[0], PAIR[:1])
    leave(fleet, NODES[1], ())
    fleet.create(pod("most", mib=1000, cores=60))
    fleet.wait_until_bound("most")
    fleet.create(pod("too-much", mib=1000, cores=41))
    eventually(lambda: fleet.kubectl.events("too-much"), "the refusal")
    fleet.create(pod("rest", mib=1000, cores=40))
    fleet.wait_until_bound("rest")
    assert fleet.devices_of("most") == fleet.devices_of("rest") == [gpu(NODES[0], PAIR[0])]
    assert "too-much" not in fleet.nodes_of()


def leave(fleet: Fleet, node: str, free: tuple[int, ...]) -> None:
    """Have whole GPUs of a node taken, except those with these minor numbers."""
    taken = [minor for minor in range(GPUS_PER_NODE) if minor not in free]
    pods = {minor: f"taken-{node}-{minor}" for minor in taken}
    fleet.create(
        *(pod(name, mib=GPU_MEMORY_MIB, node=node, annotations={contract.ANNOTATION_GPU_UUID: gpu(node, m)}) for m, name in pods.items())
    )
    eventually(lambda: set(pods.values()) <= fleet.nodes_of().keys(), "the other pods to be bound")


def gpu(node: str, minor: int) -> str:
    return f"GPU-{node}-{minor}"
