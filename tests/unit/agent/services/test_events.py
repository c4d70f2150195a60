import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from agent.ports import PodEvent
from agent.services.events import QUEUE_LENGTH, REPEAT_AFTER_SECONDS, EventRecorder
from tests.unit.agent.fakes import FakeClock, FakeKubeApi, until

EVENT = PodEvent("default", "train", "uid", "main", "AliquotRefused", "no room", warning=True)


@asynccontextmanager
async def posting(recorder: EventRecorder) -> AsyncIterator[None]:
    running = asyncio.ensure_future(recorder.run())
    yield
    running.cancel()


async def test_a_repeated_sentence_is_posted_once_in_a_while():
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


async def test_what_happened_again_is_told_again():
    api = FakeKubeApi()
    recorder = EventRecorder(api, FakeClock())
    for _ in range(2):
        recorder.record(EVENT, happened=True)
    recorder.record(EVENT)
    recorder.record(replace(EVENT, message="other"))
    async with posting(recorder):
        await until(lambda: len(api.events) >= 3)
    assert [event.message for event in api.events] == ["no room", "no room", "other"]


async def test_a_refusal_that_tells_how_long_a_call_has_hung_is_the_same_a_moment_later():
    api = FakeKubeApi()
    recorder = EventRecorder(api, FakeClock())
    for seconds in (6, 16):
        recorder.record(replace(EVENT, message=f"nvmlInit has not returned for {seconds}.0 s. It is tried again"))
    recorder.record(replace(EVENT, message="other"))
    async with posting(recorder):
        await until(lambda: len(api.events) >= 2)
    assert [event.message for event in api.events] == ["nvmlInit has not returned for 6.0 s. It is tried again", "other"]


async def test_an_outage_loses_events_and_nothing_else(caplog):
    api = FakeKubeApi()
    api.outage = True
    recorder = EventRecorder(api, FakeClock())
    async with posting(recorder):
        recorder.record(EVENT)
        await until(lambda: "event not posted" in caplog.text)
        api.outage = False
        recorder.record(replace(EVENT, message="later"))
        await until(lambda: api.events)
    assert [event.message for event in api.events] == ["later"]


def test_the_queue_is_bounded(caplog):
    recorder = EventRecorder(FakeKubeApi(), FakeClock())
    for number in range(QUEUE_LENGTH + 3):
        recorder.record(replace(EVENT, message=str(number)))
    assert caplog.text.count("event dropped") == 3
