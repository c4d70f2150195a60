"""What is kept of decisions."""

import numpy as np

from scheduler_plugin.core.decisions import AskedNodes


def test_asked_rows_come_back_from_the_first_on_and_take_a_bit_each():
    asked = AskedNodes.of(np.array([4001, 4002, 7, 3, 5]), naming=1)
    assert asked is not None
    assert asked.rows().tolist() == [4001, 4002, 3, 5, 7]
    assert len(asked.bits) < 4003 / 8 + 1
    assert AskedNodes.of(np.array([], dtype=np.int64), naming=1) is None


def test_a_row_is_for_the_pod_if_it_was_asked_about_or_is_another_node_by_now():
    asked = AskedNodes.of(np.array([1, 3]), naming=7)
    rows = np.array([0, 1, 2, 3, 30])
    assert asked.among(rows, np.array([5, 5, 8, 8, 6])).tolist() == [False, True, True, True, False]
