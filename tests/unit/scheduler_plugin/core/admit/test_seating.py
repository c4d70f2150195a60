# SPDX-License-Identifier: Apache-2.0
"""Seats for all pods of a workload, or for no pod; and their text form."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugin.core.admit.kueue import Domain
from scheduler_plugin.core.admit.seating import Demand, Lacking, Seat, Seating, SeatRecord, decode_seats, encode_seats
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeFacts, NodeRules
from scheduler_plugin.core.cluster.state import ClusterState
from tests.unit.scheduler_plugin.builders import make_context, make_device, make_node, make_pod

HOST = "kubernetes.io/hostname"


class Cluster:
    """Nodes with two GPUs of 1000 MiB each."""

    def __init__(self, *names: str, instances: int = 0) -> None:
        self.state = ClusterState()
        nodes = [make_node(name, [make_device(name, minor, instances=instances) for minor in range(2)]) for name in names]
        self.state.replace_gpu_nodes(nodes)
        self.state.replace_hosts(dict.fromkeys(names, (8_000, 64_000, 110)))
        self.nodes = NodeDirectory()
        for name in names:
            self.nodes.put(NodeFacts(name, {HOST: name}))
        self.seating = Seating(make_context(self.state).gangs.planner, self.nodes)

    def seat(self, *demands: Demand) -> list[Seat]:
        seats = self.seating.seat("w", demands)
        assert isinstance(seats, list), seats
        return seats

    def places(self, seats: list[Seat]) -> list[tuple[str, str]]:
        return [(seat.node, uuid) for seat in seats for uuid in self.state.footprint_of(seat.holder)]


def demand(count: int, mib: int = 600, name: str = "main", cpu_milli: int = 0, **limits: Any) -> Demand:
    wanted: dict[str, Any] = limits or {"vgpu": "1", "vgpu_memory": str(mib)}
    return Demand(name, make_pod("", cpu_milli=cpu_milli, **wanted), count, NodeRules())


def test_all_seats_are_reserved_or_none() -> None:
    cluster = Cluster("n1")
    assert len(cluster.seat(demand(2))) == 2
    before = dict(cluster.state.reservations)
    freed = cluster.state.freed_count
    lacking = cluster.seating.seat("v", [demand(1, 400), demand(3, 300, "more")])
    assert isinstance(lacking, Lacking)
    assert "1 of 3 pods of pod set more fit now" in lacking.sentence
    assert dict(cluster.state.reservations) == before
    assert cluster.state.freed_count == freed, "a plan that failed wakes no other pod"


def test_largest_pods_are_planned_first() -> None:
    cluster = Cluster("n1")
    seats = cluster.seat(demand(2, 400, "small"), demand(1, 1000, "large"))
    assert len({uuid for _, uuid in cluster.places(seats)}) == 2


def test_seats_keep_to_the_nodes_of_the_topology_assignment() -> None:
    cluster = Cluster("n1", "n2", "n3")
    wanted = replace(demand(3, 900), domains=(Domain({HOST: "n3"}, 1), Domain({HOST: "n1"}, 2)))
    assert [seat.node for seat in cluster.seat(wanted)] == ["n3", "n1", "n1"]
    assert isinstance(cluster.seating.seat("v", [replace(demand(2, 900), domains=(Domain({HOST: "n3"}, 2),))]), Lacking)


def test_host_without_cpu_or_pods_has_no_seat() -> None:
    cluster = Cluster("n1", "n2")
    cluster.state.set_host("n1", 8_000, 64_000, 1)
    seats = cluster.seat(demand(3, 100, cpu_milli=3_000))
    assert sorted(seat.node for seat in seats) == ["n1", "n2", "n2"]
    assert isinstance(cluster.seating.seat("v", [demand(1, 100, cpu_milli=3_000)]), Lacking)


def test_reason_is_left_out_when_it_is_not_asked_for() -> None:
    cluster = Cluster("n1")
    lacking = cluster.seating.seat("v", [demand(9, 900)], explain=False)
    assert lacking == Lacking("")


@pytest.mark.parametrize("limits", [{}, {"mig_1g.10gb": "1"}], ids=["shares", "mig"])
def test_seats_are_the_same_after_a_restart(limits: dict[str, Any]) -> None:
    cluster, wanted = Cluster("n1", "n2", instances=2 if limits else 0), demand(4, 500, **limits)
    text = encode_seats(cluster.state, seats := cluster.seat(wanted))
    held = sorted((node, uuid.rpartition("-")[0] if limits else uuid) for node, uuid in cluster.places(seats))

    again = Cluster("n1", "n2", instances=2 if limits else 0)
    restored = again.seating.seat_again("w", [wanted], decode_seats(text))
    assert isinstance(restored, list)
    found = sorted((node, uuid.rpartition("-")[0] if limits else uuid) for node, uuid in again.places(restored))
    assert found == held


def test_recorded_place_without_room_is_replaced() -> None:
    cluster = Cluster("n1", "n2")
    cluster.seat(replace(demand(2, 900), domains=(Domain({HOST: "n1"}, 2),)))
    restored = cluster.seating.seat_again("v", [demand(1, 900)], [SeatRecord("main", "n1", (0,)), SeatRecord("main", "gone", (0,))])
    assert isinstance(restored, list)
    assert [seat.node for seat in restored] == ["n2"]


@given(st.text(max_size=80))
def test_any_message_is_read_without_an_error(text: str) -> None:
    decode_seats(text)
    decode_seats(f"Seats are held: {text}")


def test_message_of_a_workload_without_gpus_names_no_seat() -> None:
    assert decode_seats(encode_seats(ClusterState(), [])) == []
