# SPDX-License-Identifier: Apache-2.0
"""Small pods move from one node to two others, within their budget, so that a pod of a whole node starts on the real kube-scheduler."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.fleet import Fleet, pod, running_fleet
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.scale import GPUS_PER_NODE
from tests.e2e.test_consolidation import budget

NODES = {"moves-1": "a", "moves-2": "a", "moves-3": "a"}
SMALL_ON_EACH = 3
SMALL = SMALL_ON_EACH * len(NODES)
START_SECONDS = 60
MOVES_SECONDS = 180
"""Three moves, each until its replacement is ready; before that, the wait and the search."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * START_SECONDS + MOVES_SECONDS + 120)]


@pytest.fixture
def fleet(without_product: None, node: Cluster, kubectl: Kubectl) -> Iterator[Fleet]:
    """Three nodes, and a scheduler that consolidates."""
    del without_product
    with running_fleet(node, NODES, "--feature-gates=Consolidation=true", "--consolidation=on", pods_run=True) as running:
        running.wait_until_it_answers()
        yield replace(running, kubectl=kubectl)
        kubectl.run("delete", "deployments,pods", "--all", "--cascade=foreground", "--force", "--grace-period=0")


@pytest.mark.parametrize("is_killed", [False, True])
def test_node_with_pods_that_may_move_is_freed_for_large_pod(fleet: Fleet, is_killed: bool) -> None:
    """M1. Without is_killed nothing disturbs the moves; with it, the extender is killed after the first one."""
    fleet.kubectl.apply(small("small", SMALL, movable="true"), budget("small", minAvailable=SMALL - 1))
    started(fleet, "small", SMALL)
    fleet.kubectl.apply(small("never", 1, movable="false"))
    started(fleet, "never", 1)
    fleet.kubectl.apply(small("young", 1, movable="true", min_runtime="1h"))
    started(fleet, "young", 1)
    before = fleet.nodes_of()
    assert sorted(Counter(before.values()).values()) == [SMALL_ON_EACH, SMALL_ON_EACH + 1, SMALL_ON_EACH + 1]
    [freed] = set(NODES) - {at for name, at in before.items() if not name.startswith("small")}
    ready: list[int] = []

    def moved(count: int) -> bool:
        ready.append(fleet.kubectl.get("pdb", "small")["status"]["currentHealthy"])
        return len(before.keys() - fleet.nodes_of().keys()) >= count

    fleet.create(pod("large", gpus=GPUS_PER_NODE))
    if is_killed:
        eventually(lambda: moved(1), "the first move", seconds=MOVES_SECONDS, otherwise=lambda: fleet.kubectl.explain("large"))
        fleet.cluster.kill(fleet.processes[0])
    eventually(lambda: moved(SMALL_ON_EACH) and "large" in fleet.nodes_of(), "the large pod to start", seconds=MOVES_SECONDS,
               otherwise=lambda: f"{fleet.kubectl.explain('large')}\n{fleet.nodes_of()}")  # fmt: skip
    started(fleet, "small", SMALL)
    after = fleet.nodes_of()
    assert after["large"] == freed
    assert before.keys() - after.keys() == {name for name, at in before.items() if at == freed}, "no pod moved in vain"
    assert min(ready) >= SMALL - 1, "the budget allows one at a time"
    devices = [device for name in after for device in fleet.devices_of(name)]
    assert len(set(devices)) == len(devices) == SMALL + 2 + GPUS_PER_NODE


def small(name: str, replicas: int, *, movable: str, min_runtime: str = "0s") -> Object:
    """A Deployment of pods with a whole GPU each, on the emptiest nodes."""
    annotations = {
        contract.ANNOTATION_PLACEMENT: "spread",
        contract.ANNOTATION_MOVABLE: movable,
        contract.ANNOTATION_MIN_RUNTIME: min_runtime,
    }
    labels = {"app": name}
    template = {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod(name)["spec"]}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def started(fleet: Fleet, deployment: str, count: int) -> None:
    """Wait until this many pods of a Deployment are ready."""
    eventually(
        lambda: fleet.kubectl.get("deployment", deployment).get("status", {}).get("readyReplicas") == count,
        f"{count} pods of {deployment} to be ready",
        seconds=START_SECONDS,
        otherwise=lambda: str(fleet.kubectl.all("pods"))[-3000:],
    )
