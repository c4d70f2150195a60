# SPDX-License-Identifier: Apache-2.0
from agent.core.region_layout import MAX_DEVICES, RegionSnapshot, Slot, SlotDevice
from agent.core.tally import Counts, Tally


def slot(index: int = 0, *, pid: int = 10, start: int = 1, busy: int = 0, launches: int = 0) -> Slot:
    device = SlotDevice(0, 0, 0, 0, 0, 1, refusals=0, last_refused_bytes=0, launches=launches, busy_ns=busy, throttled_ns=2 * busy)
    return Slot(index, pid, 0, start, (device,) * MAX_DEVICES)


def region(*slots: Slot) -> RegionSnapshot:
    return RegionSnapshot((0,) * MAX_DEVICES, (0,) * MAX_DEVICES, slots, 0, 0)


def counted(*looks: RegionSnapshot, devices: int = 1) -> Tally:
    tally = Tally.empty(devices)
    for look in looks:
        tally = tally.after(look)
    return tally


def test_processes_add_up_on_every_device():
    tally = counted(region(slot(0, busy=3, launches=1), slot(1, pid=11, busy=4, launches=2)), devices=2)
    assert tally.totals == (Counts(7, 14, 3, 0),) * 2


def test_what_was_counted_is_not_counted_again():
    assert counted(region(slot(busy=3)), region(slot(busy=5))).totals[0].busy_ns == 5


def test_a_process_that_ended_stays_counted():
    assert counted(region(slot(0, busy=3), slot(1, pid=11, busy=4)), region(slot(1, pid=11, busy=6))).totals[0].busy_ns == 9


def test_a_later_process_in_the_same_slot_is_another_one():
    assert counted(region(slot(pid=10, busy=3)), region(slot(pid=12, busy=2))).totals[0].busy_ns == 5
    assert counted(region(slot(start=1, busy=3)), region(slot(start=2, busy=2))).totals[0].busy_ns == 5


def test_counter_lowered_by_a_program_reduces_no_total():
    assert counted(region(slot(busy=9)), region(slot(busy=1)), region(slot(busy=3))).totals[0].busy_ns == 11
