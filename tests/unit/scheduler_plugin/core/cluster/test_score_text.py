# SPDX-License-Identifier: Apache-2.0
"""prioritize's answer is rewritten in place and always says what the scores are."""

import json

import numpy as np
import pytest

from scheduler_plugin.core.cluster.score_text import MAX_SCORE_SHOWN, ScoreText, Skeleton


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def shown(text: ScoreText, asked: list[bool], winner: int, score: int, rest: list[bytes] = []) -> dict[str, int]:  # noqa: B006 - read only
    entries = json.loads(text.answer(np.array(asked) & text.skeleton.named, winner, score, rest))
    assert all(set(entry) == {"Host", "Score"} for entry in entries)
    return {entry["Host"]: entry["Score"] for entry in entries}


@pytest.mark.parametrize("count", [3, 40], ids=["one by one", "by arrays"])
def test_scores_of_any_length_are_shown_and_overwritten(count):
    text = ScoreText(Skeleton([f"n{row}" for row in range(count)]))
    scores = np.array([[0, 7, MAX_SCORE_SHOWN][row % 3] for row in range(count)])
    for written in (scores, scores[::-1].copy()):
        text.write(np.arange(count), written)
        assert shown(text, [True] * count, 0, int(written[0])) == {f"n{row}": written[row] for row in range(count)}


def test_the_winner_s_score_is_for_one_answer_only():
    text = ScoreText(Skeleton(["a", "b"]))
    text.write(rows(0, 1), rows(5, 5))
    assert shown(text, [True, True], 1, 6) == {"a": 5, "b": 6}
    assert shown(text, [True, True], 0, 6) == {"a": 6, "b": 5}


def test_further_entries_come_after_them():
    text = ScoreText(Skeleton(["a", "b"]))
    text.write(rows(0, 1), rows(5, 5))
    assert shown(text, [True, False], 0, 5, [b'{"Host":"x","Score":0}']) == {"a": 5, "x": 0}


def test_only_queried_rows_with_node_are_present():
    text = ScoreText(Skeleton(["a", "", 'odd "name"', "d"]))
    text.write(rows(0, 2, 3), rows(1, 2, 3))
    assert shown(text, [True, True, True, True], 0, 1) == {"a": 1, 'odd "name"': 2, "d": 3}
    assert shown(text, [True, False, False, True], 0, 1) == {"a": 1, "d": 3}
    assert shown(text, [False, False, True, False], 2, 9) == {'odd "name"': 9}
