# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.overhead import STEP_BYTES, HostProcess, Reading, bare_context_bytes, host_pids, next_overhead, read_device
from agent.core.region_layout import MAX_DEVICES, Slot, SlotDevice
from aliquot.contract.units import MIB

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
ID = "ab" * 32
SYSTEMD = (
    f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-containerd-{'ab' * 32}.scope"
)
CGROUPFS = f"0::/kubepods/burstable/pod{UID}/{'ab' * 32}"


def slot(index: int = 0, *, pid: int = 7, ticks: int = 500, used: int = 0, context: int = 0, contexts: int = 1) -> Slot:
    one = SlotDevice(used * MIB, context * MIB, 0, 0, 0, contexts, 0, 0, 0, 0, 0)
    return Slot(index, pid, 0, ticks, (one,) * MAX_DEVICES)


def process(pid: int = 4007, *, inner: int = 7, ticks: int = 500, cgroup: str = SYSTEMD) -> HostProcess:
    return HostProcess(pid, (pid, inner), ticks, cgroup)


class TestHostPids:
    @pytest.mark.parametrize("cgroup", [SYSTEMD, CGROUPFS, "0::/user.slice/session-1.scope"])
    def test_process_matches_slot_by_pid_start_time_and_pod_cgroup(self, cgroup):
        assert host_pids([slot()], [process(cgroup=cgroup), process(4008, inner=8)], {UID}) == {0: 4007}

    def test_process_of_other_pod_with_same_pid_and_start_differs(self):
        assert host_pids([slot()], [process(cgroup=SYSTEMD.replace("0f1e2d3c", "11111111"))], {UID}) == {}

    def test_later_process_with_same_pid_is_ignored(self):
        assert host_pids([slot()], [process(ticks=501)], {UID}) == {}

    def test_a_slot_without_a_start_time_is_found_by_its_pid(self):
        assert host_pids([slot(ticks=0)], [process()], {UID}) == {0: 4007}

    def test_slot_that_matches_two_processes_is_omitted(self):
        assert host_pids([slot()], [process(4007), process(5007)], {UID}) == {}


class TestReading:
    def read(self, before, after, used):
        return read_device(0, "GPU-0", before, after, {0: 4007, 1: 4008}, {("GPU-0", pid): mib * MIB for pid, mib in used.items()})

    def test_the_difference_is_over_all_processes(self):
        slots = [slot(0, used=100), slot(1, pid=8, used=50)]
        assert self.read(slots, slots, {4007: 110, 4008: 55}) == Reading(165 * MIB, 150 * MIB, steady=True)

    def test_process_allocating_meanwhile_is_unsteady_and_counts_its_maximum(self):
        assert self.read([slot(used=100)], [slot(used=160)], {4007: 165}) == Reading(165 * MIB, 160 * MIB, steady=False)
        assert self.read([slot(used=160)], [slot(used=100)], {4007: 165}) == Reading(165 * MIB, 160 * MIB, steady=False)

    def test_process_not_yet_listed_by_driver_is_excluded_on_both_sides(self):
        slots = [slot(0, used=100), slot(1, pid=8, used=50)]
        assert self.read(slots, slots, {4007: 110}) == Reading(110 * MIB, 100 * MIB, steady=False)

    def test_process_without_memory_may_be_unlisted(self):
        assert self.read([slot()], [slot()], {}) == Reading(0, 0, steady=True)

    def test_another_process_in_the_same_slot_is_not_the_one_from_before(self):
        assert not self.read([slot(pid=3, used=100)], [slot(used=100)], {4007: 100}).steady


class TestNextOverhead:
    @pytest.mark.parametrize(
        ("current", "driver", "counted", "steady", "want"),
        [
            pytest.param(0, 110, 100, True, 10, id="up"),
            pytest.param(0, 110, 100, False, 10, id="up while it allocates: what is found is the least it can be"),
            pytest.param(10, 105, 100, True, 5, id="down"),
            pytest.param(10, 105, 100, False, 10, id="not down while it allocates"),
            pytest.param(10, 111, 100, True, 10, id="less than a page up is noise"),
            pytest.param(10, 109, 100, True, 10, id="less than a page down is noise"),
            pytest.param(0, 90, 100, True, 0, id="the shim counts more than the driver"),
            pytest.param(0, 900, 100, True, 500, id="never more than the limit"),
        ],
    )
    def test_it_follows_the_driver_with_hysteresis(self, current, driver, counted, steady, want):
        assert STEP_BYTES == 2 * MIB
        assert next_overhead(current * MIB, Reading(driver * MIB, counted * MIB, steady), 500 * MIB) == want * MIB


class TestContextCost:
    def test_it_is_the_smallest_use_of_a_process_with_only_a_context(self):
        slots = [slot(0, used=300, context=300), slot(1, pid=8, used=300, context=300), slot(2, pid=9, used=400, context=300)]
        used = {("GPU-0", 10): 310 * MIB, ("GPU-0", 11): 305 * MIB, ("GPU-0", 12): 1 * MIB}
        assert bare_context_bytes(0, "GPU-0", slots, {0: 10, 1: 11, 2: 12}, used) == 305 * MIB

    def test_process_with_more_than_context_gives_no_measurement(self):
        two = slot(used=600, context=600, contexts=2)
        assert bare_context_bytes(0, "GPU-0", [two], {0: 10}, {("GPU-0", 10): 600 * MIB}) is None
