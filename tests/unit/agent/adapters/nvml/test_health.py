# SPDX-License-Identifier: Apache-2.0
"""Events, standing faults and places through the real nvidia-ml-py on the simulated driver, one child process per test."""

import asyncio
import ctypes
import shutil
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from agent.adapters.nvml.health import NvmlEvents, read_faults
from agent.adapters.nvml.location import pcie_root
from agent.adapters.nvml.thread import HeldCalls
from agent.core.health import HealthState
from agent.core.inventory import DeviceEvent
from agent.services import driver_watch
from agent.services.driver_watch import DriverWatch
from aliquot.paths import SOURCE_ROOT
from tests.unit.agent.adapters.nvml.test_driver import child
from tests.unit.agent.builders import gpu, reading
from tests.unit.agent.fakes import FakeDriver, until

__all__ = ["child"]


def uuids(node) -> list[str]:
    return [device["uuid"] for device in node.ask()["devices"]]


def test_xids_are_reported_once_in_order_with_gpu(child):
    node = child("t4x2")
    node.inject("xid", "13", "--gpu", "0")  # before the first look: over
    first, second = uuids(node)
    assert node.ask("events") == []
    for minor, xid in (("1", "62"), ("0", "31"), ("1", "92")):
        node.inject("xid", xid, "--gpu", minor)
    assert sorted(node.ask("events")) == sorted([[first, 31], [second, 62], [second, 92]])
    assert node.ask("events") == []


def test_taking_events_never_waits(child):
    node = child("t4x2")
    uuids(node)
    node.ask("events")
    begun = time.monotonic()
    for _ in range(20):
        assert node.ask("events") == []
    assert time.monotonic() - begun < 1


def test_a_storm_of_xids_keeps_the_newest(child):
    node = child("t4x2")
    first, _ = uuids(node)
    node.ask("events")
    for xid in range(200, 300):
        node.inject("xid", str(xid), "--gpu", "0")
    events = node.ask("events")
    assert events[-1] == [first, 299]
    assert len(events) >= 32


class LongQueue:
    """An event set that has more to tell than is taken at one time: XIDs, each with the number of its GPU, which is its handle."""

    def __init__(self, *xids: tuple[int, int]) -> None:
        self.left = deque(xids)

    def call(self, name, *arguments, of=None, expected=()):
        if name == "nvmlEventSetWait_v2":
            if not self.left:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            handle, xid = self.left.popleft()
            return SimpleNamespace(device=ctypes.c_void_p(handle), eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)
        if name == "nvmlEventSetFree":
            self.left.clear()
        return pynvml.nvmlEventTypeXidCriticalError if name == "nvmlDeviceGetSupportedEventTypes" else object()


async def test_event_storm_beyond_one_batch_loses_no_event_and_no_fault(monkeypatch):
    class Stormy(FakeDriver):
        async def events(self):
            taken.append(events.take())
            return taken[-1]

    taken: list[tuple[DeviceEvent, ...]] = []
    harmless = 5000
    events = NvmlEvents(LongQueue(*[(1, 31)] * harmless, (2, 62)).call, HeldCalls())
    events.watch({"GPU-0": ctypes.c_void_p(1), "GPU-1": ctypes.c_void_p(2)})
    monkeypatch.setattr(driver_watch, "EVENTS_SECONDS", 0.01)
    watch = DriverWatch(Stormy(reading(gpu(0), gpu(1))), 5.0)
    heard: Counter[DeviceEvent] = Counter()
    watch.on_event = lambda event: heard.update([event])
    running = asyncio.ensure_future(watch.run())
    await until(lambda: not watch.health.of("GPU-1").state.usable)
    running.cancel()
    assert heard == {DeviceEvent("GPU-0", 31): harmless, DeviceEvent("GPU-1", 62): 1}
    assert watch.health.of("GPU-0").state is HealthState.HEALTHY
    assert 1 < len(taken) < harmless, "no storm keeps the thread of the driver to itself"


def test_lost_gpu_is_reported_and_events_of_others_continue(child):
    node = child("t4x2")
    first, second = uuids(node)
    node.ask("events")
    node.inject("lost", "--gpu", "1")
    assert node.ask("events") == [[second, 79]]
    assert node.ask()["lost"] == [second]
    node.ask("events")
    node.inject("xid", "31", "--gpu", "0")
    assert node.ask("events") == [[first, 31]]
    node.inject("recover", "--gpu", "1")
    node.inject("clear")
    node.ask("restart")
    assert uuids(node) == [first, second]
    node.ask("events")
    node.inject("xid", "31", "--gpu", "1")
    assert node.ask("events") == [[second, 31]]


def test_an_uncorrectable_error_is_a_fault_until_the_gpu_is_reset(child):
    node = child("h200x8")
    node.ask()
    node.ask("events")
    node.inject("ecc", "uncorrected", "--gpu", "3")
    devices = node.ask()["devices"]
    assert devices[3]["faults"] == ["a row remap waits for a reset of the GPU", "the driver requests a reset of the GPU"]
    assert not any(device["faults"] for device in devices if device["minor"] != 3)
    assert [devices[3]["uuid"], 48] in node.ask("events")
    node.inject("clear", "--gpu", "3")
    assert not any(device["faults"] for device in node.ask()["devices"])


def test_gpus_without_row_remapping_report_pages_that_wait_for_retirement(child):
    node = child("t4x2")
    node.ask()
    node.inject("ecc", "uncorrected", "--gpu", "1")
    assert "a page retirement waits for a reset of the GPU" in node.ask()["devices"][1]["faults"]


def faults_with(field: int, value: int) -> tuple[str, ...]:
    """How a GPU is judged when one field has this value and all others are 0."""

    def ask(_name, _handle, fields, of):
        return [SimpleNamespace(fieldId=one, nvmlReturn=0, value=SimpleNamespace(uiVal=value if one == field else 0)) for one in fields]

    return read_faults(ask, None, "GPU-0")


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        (pynvml.NVML_FI_DEV_REMAPPED_PENDING, "a row remap waits for a reset of the GPU"),
        (pynvml.NVML_FI_DEV_REMAPPED_FAILURE, "a memory row could not be remapped: the GPU must be replaced"),
        (pynvml.NVML_FI_DEV_RETIRED_PENDING, "a page retirement waits for a reset of the GPU"),
    ],
)
def test_each_field_with_a_pending_repair_is_a_fault(field, fault):
    assert faults_with(field, 1) == (fault,)
    assert faults_with(field, 0) == ()


def faults_of_recovery_action(action: int) -> tuple[str, ...]:
    """What is made of a GPU that asks for this and has no other fault."""
    return faults_with(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, action)


def test_each_recovery_action_except_nvml_none_is_fault_with_own_text():
    actions = {getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_GPU_RECOVERY_ACTION_")}
    faults = [faults_of_recovery_action(action) for action in actions - {pynvml.NVML_GPU_RECOVERY_ACTION_NONE}]
    assert faults_of_recovery_action(pynvml.NVML_GPU_RECOVERY_ACTION_NONE) == ()
    assert len({fault for (fault,) in faults}) == len(actions) - 1
    assert not any("recovery action" in fault for (fault,) in faults)


def test_a_recovery_action_of_a_newer_driver_is_a_fault():
    assert faults_of_recovery_action(99) == ("the driver requests recovery action 99",)


def test_events_go_on_after_the_driver_was_reloaded(child):
    node = child("t4x2")
    first, _ = uuids(node)
    node.ask("events")
    node.inject("mismatch", "on")
    assert node.ask()["error"] == "DriverMismatchError"
    assert node.ask("events") == []
    node.inject("mismatch", "off")
    uuids(node)
    node.ask("events")
    node.inject("xid", "31", "--gpu", "0")
    assert node.ask("events") == [[first, 31]]


@pytest.fixture
def installed(tmp_path, build_dir):
    """A driver package's way of installing its library: a link to a file that has the version in its name."""
    link = tmp_path / "libnvidia-ml.so.1"

    def install(version: str) -> None:
        file = tmp_path / f"libnvidia-ml.so.{version}"
        file.unlink(missing_ok=True)
        shutil.copy(build_dir / "lib/sim/libnvidia-ml.so.1", file)
        for old in tmp_path.glob("libnvidia-ml.so.*"):
            if old not in (file, link):
                old.unlink()
        link.unlink(missing_ok=True)
        link.symlink_to(file)

    install("580.1")
    return link, install


def mapped(node) -> set[str]:
    lines = Path(f"/proc/{node.process.pid}/maps").read_text().splitlines()
    return {line.rpartition("/")[2] for line in lines if "libnvidia-ml" in line}


def mapped_inodes(node) -> set[int]:
    lines = Path(f"/proc/{node.process.pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "libnvidia-ml" in line and not line.endswith("(deleted)")}


def test_an_upgraded_driver_package_is_used_without_a_new_process(child, installed):
    link, install = installed
    node = child("t4x2", library=link)
    before = uuids(node)
    install("590.2")
    node.inject("mismatch", "on")
    assert node.ask()["error"] == "DriverMismatchError"
    assert node.ask()["error"] == "DriverMismatchError"
    node.inject("mismatch", "off")
    assert uuids(node) == before
    assert mapped(node) == {"libnvidia-ml.so.580.1 (deleted)", "libnvidia-ml.so.590.2"}
    node.ask("restart")
    assert uuids(node) == before
    assert mapped(node) == {"libnvidia-ml.so.580.1 (deleted)", "libnvidia-ml.so.590.2"}


def test_replaced_library_is_loaded_each_time_it_changes(child, installed):
    link, install = installed
    node = child("t4x2", library=link)
    before = uuids(node)
    for _ in range(2):
        install("580.1")
        here = link.stat().st_ino
        node.ask("restart")
        assert uuids(node) == before
        assert here in mapped_inodes(node)


def test_fabric_clique_is_reported_when_present(child, tmp_path):
    cluster = "0f8fad5b-d9cb-469f-a165-70867728950e"
    topology = (SOURCE_ROOT / "simulated_driver/profiles/h200x8").read_text()
    multi_node = tmp_path / "multi-node"
    multi_node.write_text(topology.replace("clique=0", f"clique=3 cluster={cluster}"))
    assert {device["clique"] for device in child(str(multi_node)).ask()["devices"]} == {f"{cluster}.3"}
    assert {device["clique"] for device in child("h200x8").ask()["devices"]} == {""}  # a fabric of one node
    assert {device["clique"] for device in child("t4x2").ask()["devices"]} == {""}


def test_pcie_root_is_read_from_sysfs(tmp_path):
    real = tmp_path / "sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0"
    real.mkdir(parents=True)
    devices = tmp_path / "bus"
    devices.mkdir()
    (devices / "0000:18:00.0").symlink_to(real)
    assert pcie_root("00000000:18:00.0", devices) == "pci0000:17"
    assert pcie_root("00000000:C1:00.0", devices) == ""
