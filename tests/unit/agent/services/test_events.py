# SPDX-License-Identifier: Apache-2.0
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from agent.ports.kube import PodEvent
from agent.services.events import (
    FIRST_RETRY_SECONDS,
    GIVE_UP_AFTER_SECONDS,
    LAST_RETRY_SECONDS,
    QUEUE_LENGTH,
    REPEAT_AFTER_SECONDS,
    EventRecorder,
)
from aliquot.kube.errors import KubeApiError, KubeNotFoundError, KubeRefusedError
from tests.unit.agent.fakes import FakeClock, FakeKubeApi, until

EVENT = PodEvent("default", "train", "uid", "main", "AliquotRefused", "no room", warning=True)


class Pauses:
    """The waits between tries; each ends when the test ends it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._ends: list[asyncio.Future[None]] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._ends.append(asyncio.get_running_loop().create_future())
        await self._ends[-1]

    async def begun(self) -> None:
        """Wait until a try has failed."""
        await until(lambda: self._ends)

    async def pass_one(self, clock: FakeClock, seconds: float) -> None:
        """Wait until a try has failed, and end its wait after so many seconds."""
        await self.begun()
        clock.seconds += seconds
        self._ends.pop().set_result(None)


def dropped(recorder: EventRecorder) -> dict[str, float]:
    (family,) = recorder.families()
    return {reason: count for (reason,), count in family.samples}


@asynccontextmanager
async def posting(recorder: EventRecorder) -> AsyncIterator[None]:
    running = asyncio.ensure_future(recorder.run())
    yield
    running.cancel()


async def test_repeated_event_is_posted_once_per_period():
    api, clock = FakeKubeApi(), FakeClock()
    recorder = EventRecorder(api, clock)
    for _ in range(5):
        recorder.record(EVENT)
    recorder.record(replace(EVENT, message="other"))
    clock.seconds += REPEAT_AFTER_SECONDS
    recorder.record(EVENT)
    async with posting(recorder):
        await until(lambda: len(api.events) >= 3)
    assert [event.message for event in api.events] == ["no room", "other", "no room"]


async def test_repeated_event_is_sent_again():
    api = FakeKubeApi()
    recorder = EventRecorder(api, FakeClock())
    for _ in range(2):
        recorder.record(EVENT, happened=True)
    recorder.record(EVENT)
    recorder.record(replace(EVENT, message="other"))
    async with posting(recorder):
        await until(lambda: len(api.events) >= 3)
    assert [event.message for event in api.events] == ["no room", "no room", "other"]


async def test_period_of_one_event_is_not_that_of_another():
    api, clock = FakeKubeApi(), FakeClock()
    recorder = EventRecorder(api, clock)
    other = replace(EVENT, message="other")
    recorder.record(EVENT)
    recorder.record(other)
    clock.seconds += REPEAT_AFTER_SECONDS / 2
    recorder.record(EVENT, happened=True)
    clock.seconds += REPEAT_AFTER_SECONDS / 2
    recorder.record(EVENT)
    recorder.record(other)
    async with posting(recorder):
        await until(lambda: len(api.events) >= 4)
    assert [event.message for event in api.events] == ["no room", "other", "no room", "other"]


async def test_refusal_with_age_of_hanging_call_equals_later_one():
    api = FakeKubeApi()
    recorder = EventRecorder(api, FakeClock())
    for seconds in (6, 16):
        recorder.record(replace(EVENT, message=f"nvmlInit has not returned for {seconds}.0 s. It is tried again"))
    recorder.record(replace(EVENT, message="other"))
    async with posting(recorder):
        await until(lambda: len(api.events) >= 2)
    assert [event.message for event in api.events] == ["nvmlInit has not returned for 6.0 s. It is tried again", "other"]


async def test_events_during_outage_are_sent_afterwards_in_order_with_own_time():
    api, clock, pauses = FakeKubeApi(), FakeClock(), Pauses()
    api.outage = True
    recorder = EventRecorder(api, clock, pause=pauses)
    began = clock.now()
    async with posting(recorder):
        recorder.record(EVENT)
        await pauses.pass_one(clock, 100.0)
        recorder.record(replace(EVENT, message="later"))
        await pauses.pass_one(clock, 200.0)
        await pauses.begun()
        api.outage = False
        await pauses.pass_one(clock, 1.0)
        await until(lambda: len(api.events) >= 2)
    assert [event.message for event in api.events] == ["no room", "later"]
    assert api.event_times == [began, began + 100.0]
    assert dropped(recorder) == {"full": 0, "old": 0, "refused": 0}


async def test_waits_grow_during_an_outage_and_are_short_again_after_it():
    api, clock, pauses = FakeKubeApi(), FakeClock(), Pauses()
    api.outage = True
    recorder = EventRecorder(api, clock, pause=pauses)
    async with posting(recorder):
        recorder.record(EVENT)
        for _ in range(8):
            await pauses.pass_one(clock, 0.0)
        grown = pauses.seconds[-1]
        await pauses.begun()
        api.outage = False
        await pauses.pass_one(clock, 0.0)
        await until(lambda: api.events)
        api.outage = True
        recorder.record(replace(EVENT, message="later"))
        await pauses.pass_one(clock, 0.0)
    assert LAST_RETRY_SECONDS / 2 <= grown <= LAST_RETRY_SECONDS
    assert pauses.seconds[-1] <= FIRST_RETRY_SECONDS


async def test_api_with_retry_after_is_not_called_before_that():
    api, clock, pauses = FakeKubeApi(), FakeClock(), Pauses()
    api.answers = [KubeApiError("HTTP 429", 7.0)]
    recorder = EventRecorder(api, clock, pause=pauses)
    async with posting(recorder):
        recorder.record(EVENT)
        await pauses.pass_one(clock, 7.0)
        await until(lambda: api.events)
    assert pauses.seconds == [7.0]


async def test_events_expired_during_outage_are_dropped_without_single_tries(caplog):
    api, clock, pauses = FakeKubeApi(), FakeClock(), Pauses()
    api.outage = True
    recorder = EventRecorder(api, clock, pause=pauses)
    async with posting(recorder):
        for number in range(3):
            recorder.record(replace(EVENT, message=str(number)))
        await pauses.pass_one(clock, GIVE_UP_AFTER_SECONDS)
        await until(lambda: dropped(recorder)["old"] == 3)
        api.outage = False
        recorder.record(EVENT)
        await until(lambda: api.events)
    assert [event.message for event in api.events] == ["no room"]
    assert caplog.text.count("event not posted yet") == 1


@pytest.mark.parametrize("answer", [KubeNotFoundError("HTTP 404"), KubeRefusedError("HTTP 403")], ids=["404", "403"])
async def test_an_event_that_the_api_will_never_take_holds_up_no_other(answer, caplog):
    api = FakeKubeApi()
    api.answers = [answer]
    recorder = EventRecorder(api, FakeClock(), pause=Pauses())
    async with posting(recorder):
        recorder.record(EVENT)
        recorder.record(replace(EVENT, message="later"))
        await until(lambda: api.events)
    assert [event.message for event in api.events] == ["later"]
    assert dropped(recorder) == {"full": 0, "old": 0, "refused": 1}
    assert f"event dropped: {answer}" in caplog.text


def test_the_queue_is_bounded(caplog):
    recorder = EventRecorder(FakeKubeApi(), FakeClock())
    for number in range(QUEUE_LENGTH + 3):
        recorder.record(replace(EVENT, message=str(number)))
    assert caplog.text.count("event dropped") == 3
    assert dropped(recorder) == {"full": 3, "old": 0, "refused": 0}
