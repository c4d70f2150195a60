# SPDX-License-Identifier: Apache-2.0
import asyncio
from itertools import pairwise

import pytest

from agent.core.health import HealthRules, HealthState
from agent.core.inventory import DeviceEvent, DeviceReading, DriverReading, FailedDevice, OverdueCall
from agent.errors import DriverError, DriverMissingError, DriverTimeoutError
from agent.services import driver_watch as module
from agent.services.driver_watch import ENTERING_SECONDS, FIRST_SEARCH_POLLS, LAST_SEARCH_POLLS, DriverWatch
from aliquot.contract.gpunode import Cordon
from tests.unit.agent.builders import gpu, reading
from tests.unit.agent.fakes import AT_ONCE, FakeClock, FakeDriver, until

BOTH = reading(gpu(0), gpu(1))
ALL = frozenset({"GPU-0", "GPU-1"})
ONE_LOST = reading(gpu(0), failed=(FailedDevice(1, "GPU-1", "GPU is lost", lost=True),))
RULES = HealthRules(recovery_seconds=30, quarantine_seconds=300)


async def polled(driver: FakeDriver, *answers) -> DriverWatch:
    watch = DriverWatch(driver, 1.0, AT_ONCE)
    for answer in answers:
        driver.answer = answer
        await watch.poll()
        await asyncio.sleep(0)  # a search that was begun ends
    return watch


def health(watch: DriverWatch) -> dict[str, bool]:
    return {entry.device.uuid: entry.healthy for entry in watch.inventory.devices}


async def test_devices_and_links_are_in_inventory_after_first_reading():
    driver = FakeDriver(BOTH)
    watch = await polled(driver, BOTH, BOTH)
    assert health(watch) == {"GPU-0": True, "GPU-1": True}
    assert driver.link_reads == 1
    assert watch.trouble == ""


async def test_a_missing_driver_is_waited_for_and_then_found(caplog):
    missing = DriverMissingError("libnvidia-ml.so.1 was not found")
    watch = await polled(FakeDriver(missing), missing, missing, BOTH)
    assert len(watch.inventory.devices) == 2
    assert len([record for record in caplog.records if "libnvidia-ml" in record.getMessage()]) == 1


async def test_lost_device_becomes_unhealthy_and_recovers():
    driver = FakeDriver(BOTH)
    watch = await polled(driver, BOTH, ONE_LOST)
    assert health(watch) == {"GPU-0": True, "GPU-1": False}
    driver.answer = BOTH
    await watch.poll()
    assert health(watch) == {"GPU-0": True, "GPU-1": True}


async def test_driver_is_reopened_once_new_session_finds_lost_device():
    driver = FakeDriver(BOTH)
    driver.in_new_session = ALL
    await polled(driver, BOTH, *[ONE_LOST] * FIRST_SEARCH_POLLS)
    assert driver.restarts == 0
    await polled(driver, BOTH, *[ONE_LOST] * (FIRST_SEARCH_POLLS + 1))
    assert driver.restarts == 1


@pytest.mark.parametrize(
    "in_new_session",
    [
        pytest.param({"GPU-0"}, id="no more than this one"),
        pytest.param({"GPU-1"}, id="the lost one alone"),
        pytest.param(DriverError("nvmlInit: unknown error"), id="none works"),
    ],
)
async def test_working_session_is_kept_when_new_one_is_no_better(in_new_session):
    driver = FakeDriver(BOTH)
    driver.in_new_session = in_new_session
    watch = await polled(driver, BOTH, *[ONE_LOST] * 100)
    assert driver.restarts == 0
    assert health(watch) == {"GPU-0": True, "GPU-1": False}


async def test_lost_device_is_searched_less_often_over_time():
    driver = FakeDriver(BOTH)
    searched_after = []
    watch = await polled(driver, BOTH)
    driver.answer = ONE_LOST
    for count in range(1, 700):
        before = driver.searches
        await watch.poll()
        await asyncio.sleep(0)
        if driver.searches > before:
            searched_after.append(count)
    waits = [after - before for before, after in pairwise([0, *searched_after])]
    assert waits[:6] == [6, 12, 24, 48, 96, LAST_SEARCH_POLLS]
    driver.answer = BOTH
    await watch.poll()
    driver.answer = ONE_LOST
    before = driver.searches
    for _ in range(FIRST_SEARCH_POLLS):
        await watch.poll()
        await asyncio.sleep(0)
    assert driver.searches == before + 1


@pytest.mark.parametrize("trouble", [DriverTimeoutError("nvmlInit has not returned for 6.0 s"), DriverError("nvmlInit: unknown error")])
async def test_devices_count_as_silent_only_when_reopening_driver_takes_too_long(trouble):
    class SlowToEnter(FakeDriver):
        async def read(self):
            if self.restarts:
                raise trouble
            return await super().read()

    clock, driver = FakeClock(), SlowToEnter(BOTH)
    driver.in_new_session = ALL
    watch = DriverWatch(driver, 5.0, RULES, clock.monotonic)
    await watch.poll()
    driver.answer = ONE_LOST
    while not driver.restarts:
        await watch.poll()
        await asyncio.sleep(0)
    clock.seconds += ENTERING_SECONDS
    await watch.poll()
    assert (health(watch)["GPU-0"], watch.trouble) == (True, "")
    clock.seconds += 1
    await watch.poll()
    assert (health(watch)["GPU-0"], watch.trouble) == (False, str(trouble))


async def test_reopened_driver_is_read_first_and_earlier_events_are_delivered():
    driver = FakeDriver(BOTH)
    order: list[str] = []
    for name in ("read", "restart"):
        method = getattr(driver, name)

        async def reports(name=name, method=method):
            order.append(name)
            return await method()

        setattr(driver, name, reports)
    driver.in_new_session = ALL
    watch = await polled(driver, BOTH, *[ONE_LOST] * FIRST_SEARCH_POLLS)
    heard: list[DeviceEvent] = []
    watch.on_event = heard.append
    driver.reported = [DeviceEvent("GPU-0", 31)]
    await watch.poll()
    assert order[-3:] == ["read", "restart", "read"]
    assert [event.xid for event in heard] == [31]


async def test_a_hung_device_is_marked_and_the_others_are_left():
    watch = await polled(FakeDriver(BOTH), BOTH, DriverTimeoutError("nvmlDeviceGetMemoryInfo has not returned for 6.0 s", "GPU-1"))
    assert health(watch) == {"GPU-0": True, "GPU-1": False}


async def test_a_driver_that_hangs_as_a_whole_marks_every_device():
    watch = await polled(FakeDriver(BOTH), BOTH, DriverTimeoutError("nvmlInit has not returned for 6.0 s"))
    assert not any(health(watch).values())


async def test_while_driver_hangs_another_process_probes_it_periodically():
    hang = DriverTimeoutError("nvmlInit has not returned for 6.0 s")
    driver = FakeDriver(BOTH)
    driver.out, driver.in_new_session = [OverdueCall("nvmlInit", None, 6.0)], ALL
    watch = await polled(driver, BOTH, *[hang] * FIRST_SEARCH_POLLS)
    assert (driver.searches, watch.locked_out) == (1, "")
    driver.answer = hang
    await watch.poll()
    assert watch.locked_out == "nvmlInit has not returned"
    driver.in_new_session = frozenset()  # by now it hangs for others, too
    for _ in range(2 * FIRST_SEARCH_POLLS):
        await watch.poll()
        await asyncio.sleep(0)
    assert (driver.searches, watch.locked_out) == (2, "")
    driver.answer = BOTH
    await watch.poll()
    assert health(watch) == {"GPU-0": True, "GPU-1": True}


async def test_calls_that_have_not_come_back_are_metrics():
    driver = FakeDriver(BOTH)
    driver.out = [OverdueCall("nvmlInit", None, 6.0), OverdueCall("nvmlInit", None, 7.0), OverdueCall("nvmlDeviceGetName", "GPU-1", 5.0)]
    (family,) = (await polled(driver)).families()
    assert family.samples == ((("nvmlInit", ""), 7.0), (("nvmlDeviceGetName", "GPU-1"), 5.0))


async def test_long_hang_is_logged_once(caplog):
    hangs = [DriverTimeoutError(f"nvmlInit has not returned for {seconds}.0 s") for seconds in range(5, 9)]
    await polled(FakeDriver(BOTH), BOTH, *hangs)
    assert len([record for record in caplog.records if "nvmlInit" in record.getMessage() and record.name.endswith("driver_watch")]) == 3
    # one line for the driver, one for each of the two devices


async def test_listeners_hear_of_changes_of_health_and_of_nothing_else():
    driver = FakeDriver(BOTH)
    watch = await polled(driver, BOTH)
    before = watch.changes.count
    for answer in (reading(gpu(0), gpu(1), used_mib=500), BOTH):
        driver.answer = answer
        await watch.poll()
    assert watch.changes.count == before
    assert watch.inventory.devices[0].memory_used_bytes == 0
    driver.answer = DriverError("unknown error")
    await watch.poll()
    assert watch.changes.count > before


class NoLinks(FakeDriver):
    async def links(self):
        raise DriverError("NVLink state: unknown error")


async def test_link_fault_leaves_devices_healthy_and_is_logged_once(caplog):
    assert health(await polled(NoLinks(BOTH), BOTH, BOTH, BOTH)) == {"GPU-0": True, "GPU-1": True}
    assert len([record for record in caplog.records if "NVLink state" in record.getMessage()]) == 1


async def test_lost_gpu_is_searched_in_new_session_while_links_are_unreadable():
    driver = NoLinks(BOTH)
    await polled(driver, BOTH, *[ONE_LOST] * FIRST_SEARCH_POLLS)
    assert driver.searches == 1


class Timed:
    """A watch with a clock that the test moves, and what it reports."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.driver = FakeDriver(BOTH)
        self.watch = DriverWatch(self.driver, 5.0, RULES, self.clock.monotonic)
        self.transitions: list[tuple[str, HealthState]] = []
        self.watch.on_transition = lambda one: self.transitions.append((one.device_uuid, one.after))

    async def poll(self, answer=BOTH, *, after_seconds: float = 0.0) -> None:
        self.clock.seconds += after_seconds
        self.driver.answer = answer
        await self.watch.poll()

    @property
    def states(self) -> list[HealthState]:
        return [entry.state for entry in self.watch.inventory.devices]


async def test_what_gpus_report_is_heard_also_while_the_driver_is_in_trouble(monkeypatch):
    monkeypatch.setattr(module, "EVENTS_SECONDS", 0.01)
    driver = FakeDriver(BOTH)
    watch = DriverWatch(driver, 60.0, RULES)
    await watch.poll()
    driver.answer = DriverTimeoutError("nvmlDeviceGetMemoryInfo has not returned for 6.0 s", "GPU-0")
    heard: list[DeviceEvent] = []
    watch.on_event = heard.append
    running = asyncio.ensure_future(watch.run())
    driver.reported = [DeviceEvent("GPU-1", 62)]
    await until(lambda: heard)
    running.cancel()
    assert [event.xid for event in heard] == [62]
    assert [entry.state for entry in watch.inventory.devices] == [HealthState.QUARANTINED, HealthState.QUARANTINED]


async def test_gpu_events_are_received_while_reading_hangs(monkeypatch):
    monkeypatch.setattr(module, "EVENTS_SECONDS", 0.01)
    driver = FakeDriver(BOTH)
    watch = DriverWatch(driver, 60.0, RULES)
    await watch.poll()
    released = asyncio.Event()

    async def hangs():
        await released.wait()
        raise DriverTimeoutError("nvmlDeviceGetMemoryInfo has not returned for 6.0 s", "GPU-1")

    driver.read = hangs
    polling = asyncio.ensure_future(watch.poll())
    driver.reported = [DeviceEvent("GPU-0", 62)]
    await until(lambda: not health(watch)["GPU-0"])
    assert (health(watch), polling.done()) == ({"GPU-0": False, "GPU-1": True}, False)
    released.set()
    await polling
    assert health(watch) == {"GPU-0": False, "GPU-1": False}


async def test_lost_gpu_is_offered_again_after_answering_long_enough():
    node = Timed()
    await node.poll()
    await node.poll(ONE_LOST)
    await node.poll(after_seconds=5)
    await node.poll(after_seconds=29)
    assert node.watch.inventory.devices[1].trouble == "recovering from: GPU is lost"
    await node.poll(after_seconds=1)
    assert node.transitions == [("GPU-1", HealthState.LOST), ("GPU-1", HealthState.RECOVERING), ("GPU-1", HealthState.HEALTHY)]


async def test_hard_xid_removes_only_its_gpu_and_application_xid_removes_no_gpu():
    node = Timed()
    await node.poll()
    before = node.watch.changes.count
    node.watch.take_events([DeviceEvent("GPU-0", 31), DeviceEvent("GPU-1", None)])
    assert node.watch.changes.count == before
    node.watch.take_events([DeviceEvent("GPU-1", 62)])
    assert node.states == [HealthState.HEALTHY, HealthState.QUARANTINED]
    assert node.watch.changes.count == before + 1


async def test_gpu_with_lasting_fault_is_withheld_until_fault_ends():
    node = Timed()
    await node.poll()
    due = DriverReading("580", 13000, (DeviceReading(gpu(0)), DeviceReading(gpu(1), faults=("a row remap waits for a reset of the GPU",))))
    for _ in range(3):
        await node.poll(due, after_seconds=4000)
        assert node.watch.inventory.devices[1].trouble == "a row remap waits for a reset of the GPU"
    await node.poll(after_seconds=5)
    await node.poll(after_seconds=30)
    assert node.states == [HealthState.HEALTHY, HealthState.HEALTHY]
    assert node.driver.restarts == 0


async def test_cordon_withholds_gpu_and_keeps_its_health():
    node = Timed()
    await node.poll()
    before = node.watch.changes.count
    node.watch.set_cordon(Cordon(devices=("GPU-0",)))
    assert [(entry.usable, entry.healthy) for entry in node.watch.inventory.devices] == [(False, True), (True, True)]
    node.watch.set_cordon(Cordon(devices=("GPU-0",)))
    assert node.watch.changes.count == before + 1
    await node.poll(after_seconds=5)
    assert not node.watch.inventory.devices[0].usable
    node.watch.set_cordon(Cordon())
    assert [entry.usable for entry in node.watch.inventory.devices] == [True, True]


async def test_what_a_gpu_reports_makes_the_next_reading_come_at_once(monkeypatch):
    monkeypatch.setattr(module, "EVENTS_SECONDS", 0.01)
    driver = FakeDriver(BOTH)
    watch = DriverWatch(driver, 60.0, RULES)
    running = asyncio.ensure_future(watch.run())
    await until(lambda: driver.link_reads)
    driver.answer = ONE_LOST
    driver.reported = [DeviceEvent("GPU-1", 79)]
    await until(lambda: not watch.inventory.devices[1].healthy)
    running.cancel()
    assert [entry.state for entry in watch.inventory.devices] == [HealthState.HEALTHY, HealthState.LOST]
    assert watch.inventory.devices[1].trouble == "XID 79 (fallen off the bus)"
    assert driver.link_reads == 1
