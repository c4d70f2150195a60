# SPDX-License-Identifier: Apache-2.0
"""Pods that wait in a burst are nominated, on the real kube-scheduler.

The product does this on large clusters only. Here it has the same code with a lower limit.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from aliquot import contract
from scheduler_plugin.services.nominator import FIRST
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.fleet import Fleet, pod, running_fleet
from tests.e2e.kubectl import Kubectl, eventually
from tests.e2e.scale import schedulers

NODES = {"burst-1": "a", "burst-2": "a", "burst-3": "a", "burst-4": "a"}
PODS = 20
"""Whole GPUs, of 32. Without one of the nodes they still fit."""
PROGRAM = """
import functools, sys
from scheduler_plugin import __main__ as program
from scheduler_plugin.wiring import scheduling
scheduling.Nominator = functools.partial(scheduling.Nominator, min_nodes=1)
sys.exit(program.main())
"""


@pytest.fixture
def fleet(without_product: None, node: Cluster, kubectl: Kubectl) -> Iterator[Fleet]:
    """Four nodes, and an extender that nominates on them."""
    del without_product
    with running_fleet(node, NODES) as running:
        running.replace_extender(PROGRAM)
        yield replace(running, kubectl=kubectl)
        kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0")


def test_burst_is_bound_where_nominated_or_elsewhere_if_a_node_closed(fleet: Fleet) -> None:
    _, kube_scheduler = fleet.processes
    fleet.cluster.stop(kube_scheduler)
    fleet.create(*(pod(f"burst-{number:02}") for number in range(PODS)))
    eventually(lambda: len(nominated(fleet)) == PODS - FIRST, "the pods behind the first to be nominated")
    hints = nominated(fleet)
    closed = hints[f"burst-{PODS - 1}"]
    fleet.cluster.kubectl().run("cordon", closed)
    fleet.cluster.start(kube_scheduler, schedulers(fleet.cluster)[contract.SCHEDULER_NAME][kube_scheduler])
    eventually(lambda: len(fleet.nodes_of()) == PODS, "all pods to be bound", seconds=60, otherwise=lambda: str(fleet.nodes_of()))
    places = fleet.nodes_of()
    assert closed not in places.values()
    assert {name: places[name] for name, node in hints.items() if node != closed} == {n: at for n, at in hints.items() if at != closed}
    devices = [device for name in places for device in fleet.devices_of(name)]
    assert len(set(devices)) == len(devices) == PODS


def nominated(fleet: Fleet) -> dict[str, str]:
    """Return the nominated node of each pod that has one."""
    pods = fleet.kubectl.all("pods")
    return {one["metadata"]["name"]: node for one in pods if (node := one["status"].get("nominatedNodeName"))}
