# SPDX-License-Identifier: Apache-2.0
"""The real nvidia-ml-py on the simulated driver. One process can load one NVML, so every test runs its driver in a child."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHILD = """
import asyncio, json, sys, threading, time
from types import SimpleNamespace
from agent.adapters.nvml.driver import NvmlDriver
from agent.errors import DriverError
import pynvml

def fails(name, code, index=None):
    real = getattr(pynvml, name)
    def failing(*arguments):
        if index is None or pynvml.nvmlDeviceGetIndex(arguments[0]) == int(index):
            raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
        return real(*arguments)
    setattr(pynvml, name, failing)

def garbles(name, index):
    real = getattr(pynvml, name)
    @pynvml.convertStrBytes
    def garbled(handle):
        return b"\\xff" if pynvml.nvmlDeviceGetIndex(handle) == int(index) else real(handle)
    setattr(pynvml, name, garbled)

def lacks(name):
    library = pynvml.nvmlLib
    class Lacking:
        def __getattr__(self, asked):
            if asked == name:
                raise AttributeError(asked)
            return getattr(library, asked)
    pynvml.nvmlLib = Lacking()

def lists(name, index, *processes):
    pairs = [map(int, one.split(":")) for one in processes]
    found = [SimpleNamespace(pid=pid, usedGpuMemory=mib * 2**20) for pid, mib in pairs]
    setattr(pynvml, name, lambda handle: found if pynvml.nvmlDeviceGetIndex(handle) == int(index) else [])

def samples(index, *entries):
    now_us = time.time_ns() // 1000
    known = [[int(part) for part in entry.split(":")] for entry in entries]
    made = lambda pid, at_us, sm: SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=sm, memUtil=sm // 2)
    found = [made(pid, now_us - ago_ms * 1000, percent) for pid, ago_ms, percent in known]
    growing = [pynvml.NVML_ERROR_INSUFFICIENT_SIZE]
    def answer(handle, since_us):
        if growing:
            raise pynvml.NVMLError(growing.pop())
        return found if pynvml.nvmlDeviceGetIndex(handle) == int(index) else []
    pynvml.nvmlDeviceGetProcessUtilization = answer

async def main():
    errors = []
    driver = NvmlDriver(sys.argv[1], float(sys.argv[2]), lambda call, code: errors.append(call))
    for command in sys.stdin:
        try:
            answer = await do(driver, command.strip(), errors)
        except DriverError as exc:
            answer = {"error": type(exc).__name__, "message": str(exc), "hung": getattr(exc, "device_uuid", None)}
        print(json.dumps(answer), flush=True)

async def do(driver, command, errors):
    if command == "restart":
        return await driver.restart()
    if command == "new-session":
        return sorted(await driver.found_in_new_session())
    if command == "errors":
        return errors
    if command.startswith("fails "):
        return fails(*command.split()[1:])
    if command.startswith("garbles "):
        return garbles(*command.split()[1:])
    if command.startswith("lists "):
        return lists(*command.split()[1:])
    if command.startswith("samples "):
        return samples(*command.split()[1:])
    if command.startswith("lacks "):
        return lacks(*command.split()[1:])
    if command == "threads":
        return sum(thread.name.startswith("nvml") for thread in threading.enumerate())
    if command == "begin to read":
        driver.begun = asyncio.ensure_future(driver.read())
        return await asyncio.sleep(0.2)
    if command == "events":
        return [[one.device_uuid, one.xid] for one in await driver.events()]
    if command == "links":
        return [[link.kind, link.lanes, link.pcie] for link in await driver.links()]
    if command == "processes":
        return [[one.device_uuid, one.pid, one.used_bytes] for one in (await driver.processes()).listed]
    if command == "unknown":
        return sorted((await driver.processes()).unknown)
    if command == "memory":
        return {one.pid: one.memory_ratio for one in (await driver.processes()).listed}
    if command == "utilization":
        return {one.pid: one.utilization_ratio for one in (await driver.processes()).listed}
    if command.startswith("busy "):
        return {uuid: ratios for uuid, ratios in (await driver.busy(set(command.split()[2:]), float(command.split()[1]))).items()}
    reading = await driver.read()
    return {
        "driver": reading.driver_version, "limits": reading.has_cgroup_limits, "cuda": reading.cuda_version,
        "devices": [
            {"uuid": one.device.uuid, "model": one.device.model, "minor": one.device.minor, "mib": one.device.memory_bytes / 2**20,
             "numa": one.device.numa_node, "capability": one.device.compute_capability, "mig": one.device.mig_enabled,
             "instances": [[mig.profile, mig.uuid, mig.placement_start, mig.placement_size] for mig in one.device.mig_instances],
             "instances_used": dict(one.instances_used_bytes), "instances_busy": dict(one.instances_utilization),
             "used": one.memory_used_bytes, "utilization": one.utilization_ratio, "bus": one.device.pci_bus_id,
             "faults": one.faults, "clique": one.fabric_clique, "root": one.pcie_root, "kind": [one.architecture, one.brand]}
            for one in reading.devices
        ],
        "failed": [[one.uuid, one.trouble] for one in reading.failed],
        "lost": [one.uuid for one in reading.failed if one.lost],
    }

asyncio.run(main())
"""


class Child:
    """A process with the real adapter over the simulated driver of one node.

    Beyond what that can do, ``fails CALL CODE [INDEX]`` makes a call fail, of all GPUs or of one, ``garbles CALL INDEX`` has one GPU
    answer it with what is no text, and ``lists CALL INDEX PID:MIB ...`` makes up a list of processes of one GPU, ``samples INDEX
    PID:AGE_MS:PERCENT ...`` how busy they were.
    """

    def __init__(self, library: Path | str, sim: Path, build: Path, timeout_seconds: float) -> None:
        self.sim = sim
        self.build = build
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(library), str(timeout_seconds)],
            env={**os.environ, "ALIQUOT_SIM_DIR": str(sim)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, command: str = "read"):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def inject(self, *fault: str) -> None:
        subprocess.run([self.build / "bin/aliquot-sim", "inject", *fault, "--dir", self.sim], check=True)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


PATIENT_SECONDS = 60.0
"""No call takes so long, even on a busy machine."""
SOON_SECONDS = 1.0
"""For scenarios in which a call hangs."""


@pytest.fixture
def child(build_dir, sim_node) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(profile: str = "h200x8", library: Path | str | None = None, timeout_seconds: float = PATIENT_SECONDS) -> Child:
        library = library if library is not None else build_dir / "lib/sim/libnvidia-ml.so.1"
        children.append(Child(library, sim_node(profile), build_dir, timeout_seconds))
        return children[-1]

    yield start
    for one in children:
        one.close()


def test_a_dgx_h200_is_read_as_it_is(child):
    node = child("h200x8")
    reading = node.ask()
    assert (reading["driver"], reading["cuda"]) == ("580.159.03", 13000)
    devices = reading["devices"]
    assert [device["minor"] for device in devices] == list(range(8))
    assert {device["model"] for device in devices} == {"NVIDIA H200"}
    assert {tuple(device["capability"]) for device in devices} == {(9, 0)}
    assert {device["numa"] for device in devices} == {0, 1}
    assert len({device["uuid"] for device in devices}) == 8
    mib = {device["mib"] for device in devices}.pop()
    assert mib == int(mib)
    assert 140_000 < mib <= 143_771
    assert devices[0]["used"] is not None
    assert devices[0]["utilization"] == 0.0
    links = node.ask("links")
    assert [link[:2] for link in links] == [["nvlink", 18]] * 28
    assert [pcie for _, _, pcie in links].count("system") == 16
    assert node.ask("errors") == []


def test_mig_instances_are_read_with_profile_and_place(child):
    devices = child("a100x8-mig").ask()["devices"]
    partitioned = [device for device in devices if device["instances"]]
    assert partitioned
    for device in partitioned:
        assert device["mig"]
        assert device["utilization"] is None
        for profile, uuid, start, size in device["instances"]:
            assert uuid.startswith("MIG-")
            assert "g." in profile
            assert 0 <= start < start + size <= 8
    assert any(not device["mig"] for device in devices)


def test_pcie_gpus_have_links_by_topology(child):
    node = child("l40sx4")
    node.ask()
    links = node.ask("links")
    assert len(links) == 6
    assert {kind for kind, *_ in links} == {"pcie-switch", "system"}
    assert {(lanes, pcie) for _, lanes, pcie in links} == {(0, None)}


def test_gpus_without_mig_and_nvlink_have_no_fault(child):
    node = child("t4x2")
    assert [device["model"] for device in node.ask()["devices"]] == ["Tesla T4"] * 2
    node.ask("links")
    assert node.ask("errors") == []


def test_a_lost_gpu_is_named_and_the_others_are_read(child):
    node = child("h200x8")
    uuid = node.ask()["devices"][3]["uuid"]
    node.inject("lost", "--gpu", "3")
    reading = node.ask()
    assert len(reading["devices"]) == 7
    assert [failed[0] for failed in reading["failed"]] == [uuid]
    assert "lost" in reading["failed"][0][1].lower()
    assert node.ask("errors")
    node.inject("recover", "--gpu", "3")
    node.ask("restart")
    assert len(node.ask()["devices"]) == 8


def test_new_session_is_tried_next_to_current_one(child):
    node = child("t4x2")
    first, second = (device["uuid"] for device in node.ask()["devices"])
    assert node.ask("new-session") == sorted([first, second])
    node.inject("lost", "--gpu", "1")
    assert node.ask("new-session") == [first]
    node.inject("no-driver", "on")
    answer = node.ask("new-session")
    assert (answer["error"], "Driver Not Loaded" in answer["message"]) == ("DriverError", True)


def test_a_hanging_gpu_is_named_by_its_uuid_and_comes_back(child):
    node = child("t4x2", timeout_seconds=SOON_SECONDS)
    uuid = node.ask()["devices"][1]["uuid"]
    node.inject("hang", "1500", "--gpu", "1")
    answer = node.ask()
    assert (answer["error"], answer["hung"]) == ("DriverTimeoutError", uuid)
    node.inject("hang", "0", "--gpu", "1")
    assert eventually_read(node, 2)


def test_hanging_gpu_call_costs_one_thread_and_no_delay_for_others(child):
    node = child("t4x2", timeout_seconds=SOON_SECONDS)
    other, stuck = (device["uuid"] for device in node.ask()["devices"])
    before = node.ask("threads")
    node.inject("hang", "86400000", "--gpu", "1")
    assert node.ask()["hung"] == stuck
    node.inject("xid", "62", "--gpu", "0")
    assert node.ask("events") == [[other, 62]]
    node.ask(f"lists {COMPUTE} 0 44:70")
    for _ in range(5):
        reading = node.ask()
        assert [device["uuid"] for device in reading["devices"]] == [other]
        ((uuid, trouble),) = reading["failed"]
        assert (uuid, "does not answer in time" in trouble) == (stuck, True)
        assert (node.ask("processes"), node.ask("unknown")) == ([[other, 44, 70 << 20]], [stuck])
        assert node.ask("links") == []
    assert node.ask("threads") == before + 1
    answer = node.ask("restart")
    assert (answer["error"], "cannot be left" in answer["message"]) == ("DriverTimeoutError", True)
    node.inject("xid", "63", "--gpu", "0")
    assert node.ask("events") == [[other, 63]], "the session that could not be left goes on"
    node.inject("hang", "0", "--gpu", "1")
    eventually_read(node, 2)
    assert node.ask("threads") == before
    assert node.ask("restart") is None
    assert len(node.ask()["devices"]) == 2


def test_events_are_taken_while_a_reading_is_in_a_call_that_hangs(child):
    node = child("t4x2", timeout_seconds=3600)
    other, _ = (device["uuid"] for device in node.ask()["devices"])
    node.inject("hang", "86400000", "--gpu", "1")
    node.ask("begin to read")
    node.inject("xid", "62", "--gpu", "0")
    assert node.ask("events") == [[other, 62]]


def test_hang_outside_reading_is_known_to_next_reading(child):
    node = child("t4x2", timeout_seconds=SOON_SECONDS)
    other, stuck = (device["uuid"] for device in node.ask()["devices"])
    node.inject("hang", "86400000", "--gpu", "1")
    assert node.ask("processes")["hung"] == stuck
    assert node.ask("unknown") == [stuck]
    assert [device["uuid"] for device in node.ask()["devices"]] == [other]


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def eventually_read(node: Child, gpus: int) -> dict:
    """What is read once so many GPUs answer."""
    deadline = time.monotonic() + 60
    while len((answer := node.ask()).get("devices", ())) != gpus:
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer


def test_slow_gpu_delays_others_once_and_is_then_skipped(child):
    node = child("t4x2", timeout_seconds=SOON_SECONDS)
    slow, other = (device["uuid"] for device in node.ask()["devices"])
    before = node.ask("threads")
    node.inject("hang", "3000", "--gpu", "0")
    assert node.ask()["hung"] == slow
    late = eventually_read(node, 1)
    eventually(lambda: node.ask("threads") == before, "the call has returned")
    assert [device["uuid"] for device in late["devices"]] == [other]
    node.ask(f"lists {COMPUTE} 1 44:70")
    node.inject("xid", "48", "--gpu", "1")
    answer = node.ask()
    assert [device["uuid"] for device in answer.get("devices", ())] == [other], "the slow one was not asked"
    assert answer["failed"] == late["failed"]
    ((uuid, trouble),) = answer["failed"]
    assert (uuid, trouble.endswith(f"takes longer than {SOON_SECONDS:g} s")) == (slow, True)
    assert node.ask("processes") == [[other, 44, 70 << 20]]
    assert node.ask("unknown") == [slow]
    assert node.ask("events") == [[other, 48]]
    node.inject("hang", "0", "--gpu", "0")
    eventually_read(node, 2)


@pytest.mark.parametrize(
    ("fault", "error", "sentence"),
    [("no-driver", "DriverMissingError", "kernel module is not loaded"), ("mismatch", "DriverMismatchError", "different versions")],
)
def test_a_driver_that_is_not_usable_is_missing_until_it_is(child, fault, error, sentence):
    node = child("t4x2")
    node.inject(fault, "on")
    answer = node.ask()
    assert answer["error"] == error
    assert sentence in answer["message"]
    node.inject(fault, "off")
    assert len(node.ask()["devices"]) == 2


def test_driver_that_vanishes_is_noticed_and_found_again(child):
    node = child("t4x2")
    node.ask()
    node.inject("no-driver", "on")
    assert "error" in node.ask()
    node.inject("no-driver", "off")
    assert len(node.ask()["devices"]) == 2


def test_missing_library_is_reported_by_name(child):
    answer = child("t4x2", library="/no/such/libnvidia-ml.so.1").ask()
    assert answer["error"] == "DriverMissingError"
    assert "/no/such/libnvidia-ml.so.1" in answer["message"]


COMPUTE, GRAPHICS, MPS = (f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute"))


def hold(node: Child, uuid: str, mib: int) -> subprocess.Popen:
    """A process that holds memory on a device, once it does."""
    process = client(node, uuid, "hold", "--mib", str(mib))
    assert '"holding"' in process.stdout.readline()
    return process


def client(node: Child, uuid: str, *arguments: str) -> subprocess.Popen:
    """The CUDA program on one device."""
    env = {**os.environ, "ALIQUOT_SIM_DIR": str(node.sim), "ALIQUOT_SIM_DEVICE_0": uuid, "LD_LIBRARY_PATH": str(node.build / "lib/sim")}
    return subprocess.Popen([node.build / "bin/aliquot-cuda-client", *arguments], env=env, stdout=subprocess.PIPE, text=True)


def test_processes_are_listed_with_what_they_use(child):
    node = child("t4x2")
    uuid = node.ask()["devices"][1]["uuid"]
    assert node.ask("processes") == []
    with hold(node, uuid, 256) as process:
        ((device, pid, used),) = node.ask("processes")
        assert (device, pid) == (uuid, process.pid)
        assert used > 256 << 20
        process.kill()
        process.wait()
    assert node.ask("processes") == []


def test_how_busy_each_process_is_comes_from_the_driver(child):
    node = child("t4x2")
    uuid = node.ask()["devices"][0]["uuid"]
    with hold(node, uuid, 64) as idle, client(node, uuid, "work", "--mib", "64", "--seconds", "60", "--kernel-us", "1000") as busy:
        try:
            deadline = time.monotonic() + 60
            while (found := node.ask("utilization")).get(str(busy.pid), 0) < 0.3:
                assert time.monotonic() < deadline, found
                time.sleep(0.2)
            assert found[str(idle.pid)] == 0.0
            node.ask("fails nvmlDeviceGetProcessUtilization NOT_SUPPORTED")
            assert node.ask("utilization") == {str(idle.pid): None, str(busy.pid): None}
            assert node.ask("errors") == []
        finally:
            idle.kill()
            busy.kill()


def test_old_samples_are_ignored(child):
    node = child("t4x2")
    node.ask()
    node.ask(f"lists {COMPUTE} 0 41:100 42:100 43:100")
    node.ask("samples 0 41:500:80 41:1500:40 42:60000:90 43:500:4000000000 0:0:0")
    assert node.ask("utilization") == {"41": pytest.approx(0.6), "42": 0.0, "43": 0.0}
    assert node.ask("memory") == {"41": pytest.approx(0.3), "42": 0.0, "43": 0.0}
    assert node.ask("errors") == [], "room for one more is asked for again"


def test_busy_processes_are_those_of_the_lookback_on_the_given_gpus(child):
    node = child("t4x2")
    first, second = (device["uuid"] for device in node.ask()["devices"])
    node.ask("samples 0 41:500:80 41:1500:40 42:60000:90")
    assert node.ask(f"busy 2 {first}") == {first: {"41": pytest.approx(0.6)}}
    assert node.ask(f"busy 1 {first}") == {first: {"41": pytest.approx(0.8)}}
    assert node.ask(f"busy 2 {first} {second} GPU-of-another-node") == {first: {"41": pytest.approx(0.6)}, second: {}}
    node.ask("fails nvmlDeviceGetProcessUtilization NOT_SUPPORTED")
    assert node.ask(f"busy 2 {first}") == {}


def test_the_use_of_each_mig_instance_is_read(child):
    node = child("a100x8-mig")
    device = next(device for device in node.ask()["devices"] if device["instances"])
    uuid = device["instances"][0][1]
    before = device["instances_used"]
    assert before.keys() == {instance[1] for instance in device["instances"]}
    with hold(node, uuid, 256) as process:
        after = next(one for one in node.ask()["devices"] if one["uuid"] == device["uuid"])["instances_used"]
        process.kill()
    assert after[uuid] - before[uuid] > 256 << 20
    assert {name: used for name, used in after.items() if name != uuid} == {name: used for name, used in before.items() if name != uuid}


def test_graphics_contexts_and_mps_clients_are_listed_each_process_once(child):
    node = child("t4x2")
    first, second = (device["uuid"] for device in node.ask()["devices"])
    node.ask(f"lists {COMPUTE} 0 41:100 42:300")
    node.ask(f"lists {GRAPHICS} 0 41:200 42:200 43:50")
    node.ask(f"lists {MPS} 1 44:70")
    found = {(device, pid): used >> 20 for device, pid, used in node.ask("processes")}
    assert found == {(first, 41): 200, (first, 42): 300, (first, 43): 50, (second, 44): 70}


@pytest.mark.parametrize("code", ["NOT_SUPPORTED", "FUNCTION_NOT_FOUND"])
def test_a_driver_without_the_other_lists_has_the_compute_list(child, code):
    node = child("t4x2")
    node.ask()
    for name in (GRAPHICS, MPS):
        node.ask(f"fails {name} {code}")
    node.ask(f"lists {COMPUTE} 1 44:70")
    assert [pid for _, pid, _ in node.ask("processes")] == [44]
    assert node.ask("errors") == []


def test_gpu_that_cannot_list_processes_does_not_hide_those_of_others(child):
    node = child("t4x2")
    node.ask()
    node.ask(f"lists {COMPUTE} 1 44:70")
    node.ask(f"fails {COMPUTE} UNKNOWN 0")
    assert [pid for _, pid, _ in node.ask("processes")] == [44]
    assert node.ask("errors") == [COMPUTE]
    assert node.ask("unknown") == [node.ask()["devices"][0]["uuid"]]
    node.ask(f"fails {GRAPHICS} NOT_SUPPORTED 1")
    assert len(node.ask("unknown")) == 1, "what a GPU does not have is no list that fails"


def test_while_one_gpu_is_lost_others_are_read_and_its_processes_unknown(child):
    node = child("h200x8")
    before = node.ask()["devices"]
    node.ask(f"lists {COMPUTE} 5 44:70")
    node.ask("fails nvmlDeviceGetHandleByUUID GPU_IS_LOST")  # as nvml.h has it for any GPU while one is lost
    node.inject("lost", "--gpu", "3")
    node.ask()
    assert node.ask("processes") == [[before[5]["uuid"], 44, 70 << 20]]
    assert node.ask("unknown") == [before[3]["uuid"]]
    assert len(node.ask("links")) == 7 * 6 / 2


def test_unknown_pair_or_link_does_not_remove_others(child):
    node = child("h200x8")
    node.ask()
    sound = node.ask("links")
    node.ask("fails nvmlDeviceGetTopologyCommonAncestor UNKNOWN 6")  # of the pair 6 and 7
    node.ask("fails nvmlDeviceGetNvLinkRemoteDeviceType UNKNOWN 0")
    links = node.ask("links")
    assert links[7:-1] == sound[7:-1]
    assert links[-1] == ["nvlink", 18, None]
    assert all(kind != "nvlink" for kind, _, _ in links[:7])


def test_after_restart_processes_are_unknown_until_gpus_are_read(child):
    node = child("t4x2")
    node.ask()
    node.ask("lists nvmlDeviceGetComputeRunningProcesses 0 41:100")
    assert [pid for _, pid, _ in node.ask("processes")] == [41]
    node.ask("restart")
    assert node.ask("processes")["error"] == "DriverError"
    node.ask()
    assert [pid for _, pid, _ in node.ask("processes")] == [41]


def test_missing_driver_gives_no_process_list_rather_than_empty_one(child):
    node = child("t4x2")
    node.ask()
    node.ask(f"fails {COMPUTE} DRIVER_NOT_LOADED")
    assert node.ask("processes")["error"] == "DriverMissingError"


OPTIONAL = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetBrand",
)


def test_gpu_stays_in_service_when_optional_query_fails(child):
    node = child("t4x2")
    for name in OPTIONAL:
        node.ask(f"fails {name} UNKNOWN 1")
    reading = node.ask()
    assert reading["failed"] == []
    assert reading["devices"][1]["utilization"] is None
    assert set(node.ask("errors")) == set(OPTIONAL)


@pytest.mark.parametrize("code", ["GPU_IS_LOST", "RESET_REQUIRED"])
@pytest.mark.parametrize("name", OPTIONAL[:2])
def test_optional_query_that_shows_a_lost_gpu_counts(child, name, code):
    node = child("t4x2")
    uuid = node.ask()["devices"][1]["uuid"]
    node.ask(f"fails {name} {code} 1")
    assert [failed for failed, _ in node.ask()["failed"]] == [uuid]


@pytest.mark.parametrize("name", ["nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"])
def test_memory_limits_of_control_groups_are_there_when_nvml_has_both_calls(child, name):
    node = child("t4x2")
    assert node.ask()["limits"]
    node.ask(f"lacks {name}")
    assert not node.ask()["limits"]


@pytest.mark.parametrize("name", ["nvmlDeviceGetArchitecture", "nvmlDeviceGetBrand"])
def test_architecture_and_brand_are_queried_until_both_are_there(child, name):
    node = child("l40sx4")
    node.ask(f"fails {name} UNKNOWN 1")
    first = [one["kind"] for one in node.ask()["devices"]]
    assert ["Unknown" in kind for kind in first] == [False, True, False, False]
    assert first[0] == ["Ada Lovelace", "Nvidia"]
    node.ask(f"fails {name} UNKNOWN")
    assert [one["kind"] for one in node.ask()["devices"]] == first
    assert node.ask("errors").count(name) == 2


def test_unreadable_fabric_clique_is_queried_again(child):
    node = child("t4x2")
    node.ask("fails nvmlDeviceGetGpuFabricInfoV UNKNOWN 1")
    node.ask()
    node.ask()
    assert node.ask("errors").count("nvmlDeviceGetGpuFabricInfoV") == 2


@pytest.mark.parametrize("code", ["NOT_FOUND", "INVALID_ARGUMENT"])
def test_empty_mig_slot_is_none_in_every_driver_form(child, code):
    node = child("a100x8-mig")
    node.ask(f"fails nvmlDeviceGetMigDeviceHandleByIndex {code}")
    reading = node.ask()
    assert (reading["failed"], len(reading["devices"])) == ([], 8)
    assert node.ask("errors") == []


@pytest.mark.parametrize("code", ["NOT_FOUND", "INVALID_ARGUMENT"])
def test_mig_instance_removed_during_reading_is_omitted(child, code):
    node = child("a100x8-mig")
    before = node.ask()["devices"]
    node.ask(f"fails nvmlDeviceGetComputeInstanceId {code}")
    reading = node.ask()
    assert reading["failed"] == []
    assert [device["uuid"] for device in reading["devices"]] == [device["uuid"] for device in before]
    assert not any(device["instances"] for device in reading["devices"])
    assert all(device["mig"] for device, known in zip(reading["devices"], before, strict=True) if known["instances"])
    assert node.ask("errors") == []


def test_unreadable_mig_gpu_states_which_permission_is_missing(child):
    node = child("a100x8-mig")
    node.ask("fails nvmlDeviceGetGpuInstanceById NO_PERMISSION")
    troubles = {trouble for _, trouble in node.ask()["failed"]}
    (trouble,) = troubles
    assert all(word in trouble for word in ("SYS_ADMIN", "NVIDIA_MIG_MONITOR_DEVICES=all", "components/mig"))


def test_damaged_name_affects_only_its_gpu(child):
    node = child("t4x2")
    node.ask("garbles nvmlDeviceGetName 1")
    reading = node.ask()
    assert [device["minor"] for device in reading["devices"]] == [0]
    ((_, trouble),) = reading["failed"]
    assert "infoROM" in trouble
    assert node.ask("errors") == ["nvmlDeviceGetName"]


def test_gpu_without_own_memory_is_unsupported_and_not_unhealthy(child):
    node = child("t4x2")
    node.ask("fails nvmlDeviceGetMemoryInfo NOT_SUPPORTED 0")
    reading = node.ask()
    assert len(reading["devices"]) == 1
    ((uuid, trouble),) = reading["failed"]
    assert uuid is None
    assert "no memory of its own" in trouble
    assert "not supported" in trouble
    assert node.ask("errors") == []
