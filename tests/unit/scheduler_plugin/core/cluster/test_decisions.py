# SPDX-License-Identifier: Apache-2.0
"""What is kept of decisions."""

import numpy as np

from scheduler_plugin.core.cluster import decisions as module
from scheduler_plugin.core.cluster.decisions import Decision, Decisions, QueriedNodes, Queue
from tests.unit.scheduler_plugin.builders import make_pod, request_of


def test_recorded_rows_are_in_query_order_with_one_bit_each():
    asked = QueriedNodes.of(np.array([4001, 4002, 7, 3, 5]), naming=1)
    assert asked is not None
    assert asked.rows().tolist() == [4001, 4002, 3, 5, 7]
    assert len(asked.bits) < 4003 / 8 + 1
    assert QueriedNodes.of(np.array([], dtype=np.int64), naming=1) is None


def test_row_is_included_if_queried_for_pod_or_node_was_replaced():
    asked = QueriedNodes.of(np.array([1, 3]), naming=7)
    rows = np.array([0, 1, 2, 3, 30])
    assert asked.among(rows, np.array([5, 5, 8, 8, 6])).tolist() == [False, True, True, True, False]


def decision(uid: str, priority: int = 0, *, fitting: int = 0) -> Decision:
    pod = make_pod(uid, priority=priority, vgpu="1")
    return Decision(pod, request_of(pod), 0.0, 0, fitting, {})


def order(decisions: list[Decision]) -> list[str]:
    return [one.pod.uid for one in decisions]


def test_pods_wait_in_order_of_priority_and_then_of_their_latest_refusal():
    decisions = Decisions()
    for uid, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5)):
        decisions.record(decision(uid, priority))
    assert order(decisions.waiting()) == ["b", "e", "a", "c", "d"]
    decisions.record(decision("a"))
    assert order(decisions.waiting()) == ["b", "e", "c", "a", "d"]
    decisions.record(decision("c", fitting=1))
    decisions.forget("b")
    decisions.record(decision("e", -2))
    assert order(decisions.waiting()) == ["a", "d", "e"]
    assert len(decisions.queue) == 3
    assert decisions.queue.get("c") is None


def test_merged_queues_put_first_queue_first_among_equals():
    first, second = Queue(), Queue()
    for queue, uid, priority in ((second, "a", 1), (first, "b", 1), (first, "c", 0), (second, "d", 2)):
        queue.put(decision(uid, priority))
    assert order(first.and_then(second)) == ["d", "b", "a", "c"]


def test_the_oldest_decisions_are_dropped_with_their_place_in_the_queue(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    decisions = Decisions()
    for uid in ("a", "b", "c"):
        decisions.record(decision(uid))
    assert order(decisions.waiting()) == ["b", "c"]
    assert decisions.by_uid.keys() == {"b", "c"}
