# SPDX-License-Identifier: Apache-2.0
"""A busy pod joins the calmer of two GPUs, by what the agents report, on the real kube-scheduler.

The test writes the reports: the nodes have no agents. The product reads them once a minute, here four times a second.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import pytest
import yaml

from tests.e2e.cluster.cluster import Cluster
from tests.e2e.fleet import Fleet, pod, running_fleet
from tests.e2e.kubectl import Kubectl, eventually

NODES = {"pair-1": "a", "pair-2": "a"}
RESIDENTS = {"pair-1": ("first-0", 30_000), "pair-2": ("second-0", 31_000)}
"""On each node the pod on the only GPU that has room, and its MiB. A template is known by its requests."""
NEW_MIB = 32_000
"""Of no report, so such a pod counts as busy as most."""
BUSY, CALM = {"smPercent": 90, "dramPercent": 60}, {"smPercent": 10, "dramPercent": 5}
IN_A_ROW = 3
SETTINGS = {"featureGates": "Interference=true", "weights": {"frag": {"interference": 1.0}}}
PROGRAM = """
import sys
from scheduler_plugin import __main__ as program
from scheduler_plugin.services import utilization_reader
utilization_reader.PERIOD_SECONDS = 0.25
sys.exit(program.main())
"""


@pytest.fixture
def fleet(without_product: None, node: Cluster, kubectl: Kubectl) -> Iterator[Fleet]:
    """Two nodes with room on one GPU each, and an extender that avoids busy partners."""
    del without_product
    file = node.config / "interference.yaml"
    file.write_text(yaml.safe_dump(SETTINGS))
    with running_fleet(node, NODES) as running:
        running.replace_extender(PROGRAM, f"--config={file}")
        yield replace(running, kubectl=kubectl)
        kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0")


@pytest.mark.timeout(300)
def test_busy_pod_joins_calmer_partner_wherever_that_runs(fleet: Fleet) -> None:
    fleet.fill(dict.fromkeys(NODES, 1))
    fleet.create(*(pod(name, mib=mib, node=at) for at, (name, mib) in RESIDENTS.items()))
    for name, _ in RESIDENTS.values():
        fleet.wait_until_bound(name)
    for calm, busy in (("pair-1", "pair-2"), ("pair-2", "pair-1")):  # only the reports differ
        report(fleet, {calm: CALM, busy: BUSY})
        eventually(partial(joins, fleet, calm), "a pod to join the calm one", seconds=60)
        assert [node_of_new_pod(fleet) for _ in range(IN_A_ROW)] == [calm] * IN_A_ROW


def report(fleet: Fleet, used: Mapping[str, Mapping[str, int]]) -> None:
    """Write what the agents would say of the use of the GPUs, by node."""
    for at, amounts in used.items():
        uid = fleet.kubectl.get("pod", RESIDENTS[at][0])["metadata"]["uid"]
        fleet.write_inventory(at, utilization=[{"podUid": uid, **amounts}])


def joins(fleet: Fleet, node: str) -> bool:
    """Whether a pod that comes now goes to this node."""
    return node_of_new_pod(fleet) == node


def node_of_new_pod(fleet: Fleet) -> str:
    """Let a pod come, and return its node. It is gone afterwards."""
    fleet.create(pod("new-0", mib=NEW_MIB))
    fleet.wait_until_bound("new-0")
    found = fleet.nodes_of(prefix="new")["new-0"]
    fleet.end("new-0")
    return found
