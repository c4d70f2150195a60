# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from agent.core.region_layout import MAX_DEVICES, RegionSnapshot, Slot, SlotDevice
from agent.core.tally import Tally
from agent.core.usage import BusySample, usage_of, utilization_between


def slot(index: int, used: int) -> Slot:
    one = SlotDevice(used, 1, 0, 0, 0, 1, 2, 0, 0, 3, 0, module_bytes=4, virtual_bytes=5)
    return Slot(index, 10 + index, 0, 0, (one,) * MAX_DEVICES)


SNAPSHOT = RegionSnapshot(
    line_used_bytes=(0,) * MAX_DEVICES,
    measured_context_bytes=(0,) * MAX_DEVICES,
    slots=(slot(0, 100), slot(1, 50), slot(2, 25)),
    reaped_slots=0,
    repaired_bytes=0,
)


def test_dead_processes_hold_nothing_but_stay_counted():
    usage = usage_of(SNAPSHOT, (1,), Tally.empty(2).after(SNAPSHOT))
    assert usage.processes == 2
    assert [device.used_bytes for device in usage.devices] == [125, 125]
    assert [device.counts.refusals for device in usage.devices] == [6, 6]
    first = usage.devices[0]
    assert (first.context_bytes, first.module_bytes, first.virtual_bytes) == (2, 8, 10)


def test_waiting_launches_of_living_processes_add_up_and_recent_wait_counts_one():
    used = [SlotDevice(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, waiting=waiting) for waiting in (3, 2, 4)]
    slots = tuple(Slot(index, 10 + index, 0, 0, (one, SNAPSHOT.slots[0].devices[0])) for index, one in enumerate(used))
    usage = usage_of(replace(SNAPSHOT, slots=slots), (1,), Tally.empty(2), starved=(0, 1))
    assert [device.waiting for device in usage.devices] == [7, 1]
    assert [device.waiting for device in usage_of(SNAPSHOT, (), Tally.empty(2)).devices] == [0, 0]


class TestUtilization:
    def test_it_is_busy_time_over_elapsed_time(self):
        assert utilization_between(BusySample(10.0, (0, 0)), BusySample(12.0, (1_000_000_000, 0))) == (0.5, 0.0)

    def test_it_stays_between_zero_and_one(self):
        assert utilization_between(BusySample(0.0, (5, 0)), BusySample(1.0, (0, 3_000_000_000))) == (0.0, 1.0)
