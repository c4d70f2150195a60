# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import Sequence

import pytest

from scheduler_plugin.dashboard.history import KEPT_SECONDS, MAX_KEPT, POINTS, SPANS, History, queries
from scheduler_plugin.errors import HistoryError, WireError


class FakeStore:
    def __init__(self) -> None:
        self.asked: list[tuple[str, float, float, float]] = []
        self.points: Sequence[tuple[float, float]] = ((0.0, 1.0),)
        self.fails = False

    async def query_range(self, query: str, start: float, end: float, step_seconds: float) -> Sequence[tuple[float, float]]:
        self.asked.append((query, start, end, step_seconds))
        await asyncio.sleep(0)
        if self.fails:
            raise HistoryError("gone")
        return self.points


class Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.mark.parametrize("span", SPANS)
async def test_every_span_is_as_many_points_and_ends_now(store, span):
    past = await History(store, Clock()).ask({"span": span})
    (_, start, end, step) = store.asked[0]
    assert end - start == SPANS[span] == step * POINTS
    assert 0 <= Clock.now - end < KEPT_SECONDS
    assert (past.start, past.end, past.step_seconds) == (start, end, step)


async def test_many_pages_ask_as_often_as_one(store):
    clock = Clock()
    history = History(store, clock)
    await asyncio.gather(*(history.ask({"pod": "a/b"}) for _ in range(20)))
    once = len(store.asked)
    clock.now += KEPT_SECONDS - 1
    await history.ask({"pod": "a/b"})
    assert len(store.asked) == once == len(queries({"pod": "a/b"}, 3600))
    clock.now += 1
    await history.ask({"pod": "a/b"})
    assert len(store.asked) == 2 * once


async def test_a_page_that_goes_away_takes_nothing_from_another(store):
    history = History(store, Clock())
    first = asyncio.create_task(history.ask({"pod": "a/b"}))
    second = asyncio.create_task(history.ask({"pod": "a/b"}))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).lines


async def test_a_failure_is_not_kept(store):
    history = History(store, Clock())
    store.fails = True
    with pytest.raises(HistoryError):
        await history.ask({})
    store.fails = False
    assert (await history.ask({})).lines


async def test_what_is_kept_is_bounded(store):
    history = History(store, Clock())
    for number in range(MAX_KEPT + 50):
        await history.ask({"gpu": f"GPU-{number}"})
    assert len(history._kept) == MAX_KEPT


async def test_values_that_are_no_numbers_are_left_out(store):
    store.points = ((1.0, float("nan")), (2.0, float("inf")), (3.0, 4.0))
    assert (await History(store, Clock()).ask({})).lines[0].points == [(3.0, 4.0)]


@pytest.mark.parametrize(
    "subject", [{"gpu": 'x"} or up'}, {"pod": "a"}, {"pod": "a/b/c"}, {"pod": "a/"}, {"gpu": "x", "pod": "a/b"}, {"x": "y"}]
)
def test_invalid_subject_is_refused(subject):
    with pytest.raises(WireError):
        queries(subject, 3600)
