# SPDX-License-Identifier: Apache-2.0
"""A replica decides on pods with vGPUs only when it knows what claims have of the same GPUs."""

from unittest import mock

import msgspec
import pytest

from aliquot.contract.model import Allocation
from scheduler_plugin.core.cluster.nodes import CORDONED, NodeFacts
from scheduler_plugin.errors import NotReadyError
from scheduler_plugin.services.cluster_watch import Source
from scheduler_plugin.services.explainer import Explainer
from scheduler_plugin.settings import Settings
from scheduler_plugin.wiring.cluster import Cluster, decode_full_host, make_cluster
from scheduler_plugin.wiring.leaders import Leaders, make_leaders
from tests.unit.scheduler_plugin.builders import make_node
from tests.unit.scheduler_plugin.claim_builders import slice_of

GATE = "--feature-gates=DynamicResourceAllocation=true"


@pytest.mark.parametrize("gate", ["AdmissionCheck", "Backfill", "Consolidation", "DynamicResourceAllocation"])
def test_labels_and_taints_of_nodes_are_read_for_what_needs_them(gate: str):
    node = msgspec.Raw(b'{"metadata":{"name":"n","labels":{"pool":"a"}}}')

    def reads_facts(*flags: str) -> bool:
        with mock.patch("scheduler_plugin.wiring.cluster.Stream") as stream:
            make_cluster(Settings.load(["--webhook-address=", *flags], {}), mock.Mock())
        (decode,) = (call.args[2] for call in stream.call_args_list if call.args[0] == "nodes")
        return decode(node).facts is not None

    assert (reads_facts(), reads_facts(f"--feature-gates={gate}=true")) == (False, True)


def test_labels_that_the_watch_receives_are_in_snapshots():
    node = msgspec.Raw(b'{"metadata":{"name":"n","labels":{"pool":"a"}},"spec":{"unschedulable":true}}')
    with mock.patch("scheduler_plugin.wiring.cluster.Stream"):
        cluster = make_cluster(Settings.load(["--webhook-address="], {}), mock.Mock())
    cluster.watch.hosts.changed(decode_full_host(node))
    taken = Explainer(cluster.context, cluster.rules, lambda: 0.0).full_snapshot()
    assert taken.node_facts == (NodeFacts("n", {"pool": "a"}, (CORDONED,)),)
    assert taken.closed_nodes == ("n",)


def replica(allocation: Allocation, *flags: str) -> tuple[Cluster, Leaders]:
    """A replica that has listed everything but slices and claims."""
    settings = Settings.load(["--webhook-address=", *flags], {})
    connection = mock.Mock()
    cluster = make_cluster(settings, connection)
    cluster.context.state.set_gpu_node(make_node(allocation=allocation))
    for source in Source:
        cluster.watch.note_listing(source)
        cluster.watch.note_listed(source)
    return cluster, make_leaders(settings, connection, cluster)


@pytest.mark.parametrize(
    ("allocation", "flags", "decides"),
    [
        pytest.param(Allocation.BOTH, (GATE,), False, id="claims are not known"),
        pytest.param(Allocation.PLANNED, (GATE,), True, id="no vGPUs on these GPUs"),
        pytest.param(Allocation.BOTH, (), True, id="no claims are allocated"),
    ],
)
def test_replica_waits_for_claims_only_where_they_share_gpus(allocation: Allocation, flags: tuple[str, ...], decides: bool) -> None:
    _, leaders = replica(allocation, *flags)
    assert leaders.decides is decides


def test_replica_decides_when_slices_and_claims_are_listed() -> None:
    cluster, leaders = replica(Allocation.BOTH, GATE)
    with pytest.raises(NotReadyError, match="the ResourceClaims are being listed"):
        leaders.check_decides()
    assert cluster.claims is not None
    cluster.claims.watch.claims.listing()
    cluster.claims.watch.claims.listed([])
    assert not leaders.decides
    cluster.claims.watch.slices.listed([slice_of(make_node())])
    leaders.check_decides()


def test_claims_from_before_the_term_do_not_count() -> None:
    cluster, leaders = replica(Allocation.BOTH, GATE)
    assert cluster.claims is not None
    cluster.claims.watch.slices.listed([])
    cluster.claims.watch.claims.listing()
    cluster.claims.watch.claims.listed([])
    assert leaders.decides
    assert not leaders.knows_claims(cluster.clock.monotonic() + 1)
