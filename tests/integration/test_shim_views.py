# SPDX-License-Identifier: Apache-2.0
"""What a container sees of a GPU is its share: by the driver's own queries, by NVML, by nvidia-ml-py."""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from agent.core import region_layout
from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from tests.fakes.container import MIB, SOURCE_TREE, Node, make_container
from tests.fakes.pid_namespaces import unshare_or_skip
from tests.fakes.small_stack import SmallStack

LIMIT_MIB = 4096
CONTEXT_MIB = 530
NOT_FOUND = 6
PROGRAM = "from tests.fakes.cuda import *\nimport ctypes, os\nimport pynvml as n\n"
NVML = "n.nvmlInit()\nh = n.nvmlDeviceGetHandleByIndex(0)\n"


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture(params=["front", "preload"])
def container(request, node):
    return node.container(LIMIT_MIB, interposition=request.param)


def facts(answer):
    assert answer.status == 0, answer
    return answer.last


# --- CUDA -------------------------------------------------------------------------------------------------------


def test_total_memory_is_limit_and_free_memory_its_rest(container):
    script = """
start()
total = out(0)
must("cuDeviceTotalMem_v2", ctypes.byref(total), 0)
before = info()
alloc(100 * MIB)
tell(device=total.value, total=before[1], free=before[0], taken=before[0] - info()[0])
"""
    reported = facts(container.python(PROGRAM + script))
    assert reported == {"device": LIMIT_MIB * MIB, "total": LIMIT_MIB * MIB, "free": (LIMIT_MIB - CONTEXT_MIB) * MIB, "taken": 100 * MIB}


def test_a_limit_above_the_device_shows_the_device(node):
    bare = facts(node.container(LIMIT_MIB, interposition="none").client("info"))
    wide = facts(node.container(1024 * 1024).client("info"))
    assert (wide["total_bytes"], wide["free_bytes"]) == (bare["total_bytes"], bare["free_bytes"])


def test_free_memory_is_never_more_than_the_device_has_left(node):
    neighbour, container = node.container(1024 * 1024), node.container(140 * 1024)
    with neighbour.repl() as other, container.repl() as program:
        assert other.ask(f"alloc alloc {100 * 1024 * MIB}")["result"] == 0
        assert program.ask("info")["free_bytes"] < 45 * 1024 * MIB


def test_asking_without_a_context_is_answered_by_the_driver(node):
    script = "must('cuInit', 0)\na, b = out(), out()\ntell(result=call('cuMemGetInfo_v2', ctypes.byref(a), ctypes.byref(b)))"
    bare = facts(node.container(LIMIT_MIB, interposition="none").python(PROGRAM + script))
    assert facts(node.container(LIMIT_MIB).python(PROGRAM + script)) == bare


@pytest.mark.parametrize("asked", [("total",), ("free",), ()], ids=["total alone", "free alone", "neither"])
@pytest.mark.parametrize("name", ["cuMemGetInfo_v2", "cuMemGetInfo"])
def test_a_program_may_ask_for_one_of_the_two_alone(node, container, name, asked):
    """As OptiX and llama.cpp do, with NULL for the other; with NULL for both the driver itself is the example."""
    script = f"""
start()
both = {{"free": ctypes.c_uint64(0), "total": ctypes.c_uint64(0)}}
result = call({name!r}, *(ctypes.byref(value) if what in {asked} else None for what, value in both.items()))
tell(result=result, reported={{what: value.value for what, value in both.items() if value.value}})
"""
    bare = facts(node.container(LIMIT_MIB, interposition="none").python(PROGRAM + script))
    wide = {"free": (LIMIT_MIB - CONTEXT_MIB) * MIB, "total": LIMIT_MIB * MIB}
    most = 2**32 - 1 if name == "cuMemGetInfo" else 2**64
    assert facts(container.python(PROGRAM + script)) == {
        "result": bare["result"],
        "reported": {what: min(wide[what], most) for what in asked},
    }


# --- NVML -------------------------------------------------------------------------------------------------------


def test_nvml_shows_the_share(container):
    with container.repl() as program:
        assert program.ask(f"alloc alloc {100 * MIB}")["result"] == 0
        script = """
v1, v2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
tell(v1=[v1.total, v1.used, v1.free], v2=[v2.total, v2.used, v2.free, v2.reserved])
"""
        reported = facts(container.python(PROGRAM + NVML + script))
    used = (100 + CONTEXT_MIB) * MIB
    assert reported["v1"] == [LIMIT_MIB * MIB, used, LIMIT_MIB * MIB - used]
    assert reported["v2"] == [*reported["v1"], 0]


def test_a_program_that_opens_nvml_after_cuda_is_shown_the_share_too(node, container):
    """The shim has opened the driver's NVML for itself by then, and the loader knows that by the same name."""
    look = "tell(total=n.nvmlDeviceGetMemoryInfo(h).total, pids=[p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(h)], me=os.getpid())"
    script = f"start()\n{NVML}{look}"
    with node.container(LIMIT_MIB).repl():
        reported = facts(container.python(PROGRAM + script))
    assert reported == {"total": LIMIT_MIB * MIB, "pids": [reported["me"]], "me": reported["me"]}


def test_nvml_lists_the_containers_own_processes_and_no_others(node, container):
    stranger = node.container(LIMIT_MIB)
    with container.repl() as first, container.repl() as second, stranger.repl():
        first.ask(f"alloc alloc {100 * MIB}")
        script = """
tell(lists=[[[p.pid, p.usedGpuMemory] for p in get(h)] for get in (
    n.nvmlDeviceGetComputeRunningProcesses, n.nvmlDeviceGetComputeRunningProcesses_v2, n.nvmlDeviceGetComputeRunningProcesses_v3,
    n.nvmlDeviceGetGraphicsRunningProcesses, n.nvmlDeviceGetMPSComputeRunningProcesses)])
"""
        reported = facts(container.python(PROGRAM + NVML + script))
        own = sorted([[first.process.pid, (100 + CONTEXT_MIB) * MIB], [second.process.pid, CONTEXT_MIB * MIB]])
    assert [sorted(processes) for processes in reported["lists"]] == [own, own, own, [], []]


def test_nvml_shows_what_the_driver_took_as_used(node):
    """It is part of the limit, though no process of the container holds it."""
    limit = DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, overhead_bytes=64 * MIB)
    container = node.container_with(Limits((limit,)))
    with container.repl():
        reported = facts(
            container.python(PROGRAM + NVML + "m = n.nvmlDeviceGetMemoryInfo(h)\ntell(total=m.total, used=m.used, free=m.free)")
        )
    used = (CONTEXT_MIB + 64) * MIB
    assert reported == {"total": LIMIT_MIB * MIB, "used": used, "free": LIMIT_MIB * MIB - used}


NEWER_LISTS = """
details = n.nvmlDeviceGetRunningProcessDetailList(h, n.nvmlProcessDetailList_v1, n.NVML_PROCESS_MODE_ALL)
graphics = n.nvmlDeviceGetRunningProcessDetailList(h, n.nvmlProcessDetailList_v1, n.NVML_PROCESS_MODE_GRAPHICS)
uses = n.nvmlDeviceGetProcessesUtilizationInfo(h, 0)
tell(details=[[p.pid, p.usedGpuMemory] for p in details], graphics=len(graphics), uses=[use.pid for use in uses])
"""


def test_the_newer_lists_too_show_the_containers_own_processes_and_no_others(node, container):
    stranger, kernels = node.container(LIMIT_MIB), ["work", "--seconds", "20", "--kernel-us", "2000"]
    command = [node.build / "bin/aliquot-cuda-client", *kernels]
    with container.start(command) as own, stranger.start(command) as other:
        own.listen()
        other.listen()
        reported, held = facts(container.python(PROGRAM + NVML + NEWER_LISTS)), container.used_bytes()
    assert reported == {"details": [[own.process.pid, held]], "graphics": 0, "uses": [own.process.pid]}


ARRAYS = """
ROOM, UNTOUCHED = 16, 0xA5
def filled(entry):
    array = (entry * ROOM)()
    ctypes.memset(array, UNTOUCHED, ctypes.sizeof(array))
    return array
def answer(name, array, reported, *words):
    result = n._nvmlGetFunctionPointer(name)(h, *words)
    count = reported() if result == 0 else 0
    return [result, [entry.pid for entry in array[:count]], set(bytes(array)[count * ctypes.sizeof(array._type_):]) == {UNTOUCHED}]
def processes(version):
    array, count = filled(n.c_nvmlProcessInfo_v2_t), ctypes.c_uint(ROOM)
    return answer(f"nvmlDeviceGetComputeRunningProcesses{version}", array, lambda: count.value, ctypes.byref(count), array)
def details():
    array = filled(n.c_nvmlProcessDetail_v1_t)
    reported = n.c_nvmlProcessDetailList_v1_t(n.nvmlProcessDetailList_v1, n.NVML_PROCESS_MODE_ALL, ROOM, array)
    return answer("nvmlDeviceGetRunningProcessDetailList", array, lambda: reported.numProcArrayEntries, ctypes.byref(reported))
def samples():
    array, count = filled(n.c_nvmlProcessUtilizationSample_t), ctypes.c_uint(ROOM)
    return answer("nvmlDeviceGetProcessUtilization", array, lambda: count.value, array, ctypes.byref(count), ctypes.c_ulonglong(0))
def uses():
    array = filled(n.c_nvmlProcessUtilizationInfo_v1_t)
    reported = n.c_nvmlProcessesUtilizationInfo_v1_t(n.ProcessesUtilizationInfo_v1, ROOM, 0, array)
    return answer("nvmlDeviceGetProcessesUtilizationInfo", array, lambda: reported.processSamplesCount, ctypes.byref(reported))
tell(lists=[processes("_v2"), processes("_v3"), details()], samples=[samples(), uses()])
"""


def test_entries_after_reported_ones_contain_no_neighbour_data(node, container):
    """In the array that the caller gives; the driver would fill it with the processes of all."""
    stranger, idle = node.container(LIMIT_MIB), node.container(LIMIT_MIB)
    work = [node.build / "bin/aliquot-cuda-client", "work", "--seconds", "20", "--kernel-us", "2000"]
    with container.start(work) as own, stranger.start(work) as other:
        own.listen()
        other.listen()
        reported, nothing = facts(container.python(PROGRAM + NVML + ARRAYS)), facts(idle.python(PROGRAM + NVML + ARRAYS))
    assert reported == {"lists": [[0, [own.process.pid], True]] * 3, "samples": [[0, [own.process.pid], True]] * 2}
    assert nothing == {"lists": [[0, [], True]] * 3, "samples": [[NOT_FOUND, [], True]] * 2}


def test_a_list_with_too_little_room_says_how_much_it_takes(container):
    with container.repl(), container.repl():
        script = """
get = n._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses_v3")
answers = []
for room in (0, 1, 2):
    count, array = ctypes.c_uint(room), (n.c_nvmlProcessInfo_v2_t * 2)()
    answers.append([get(h, ctypes.byref(count), array if room else None), count.value])
tell(answers=answers)
"""
        reported = facts(container.python(PROGRAM + NVML + script))
    assert reported["answers"] == [[7, 2], [7, 2], [0, 2]]


def test_list_without_entry_array_is_refused_and_writes_nothing(container):
    """Also where the list would be empty: the driver refuses it for any list."""
    script = """
answers = []
for name in ("ComputeRunningProcesses_v3", "MPSComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3"):
    count = ctypes.c_uint(5)
    answers.append([n._nvmlGetFunctionPointer("nvmlDeviceGet" + name)(h, ctypes.byref(count), None), count.value])
tell(answers=answers)
"""
    with container.repl():
        assert facts(container.python(PROGRAM + NVML + script))["answers"] == [[2, 5]] * 3


@pytest.mark.parametrize("call", ["processes", "samples"])
def test_a_thread_that_asks_needs_little_more_stack_than_the_driver_does(node, container, tmp_path, call):
    bare = node.container(LIMIT_MIB, interposition="none")
    asker = SmallStack(tmp_path, bare)
    with container.start([node.build / "bin/aliquot-cuda-client", "work", "--seconds", "20", "--kernel-us", "2000"]) as client:
        client.listen()
        client.listen()  # a second later: there are samples
        assert asker.needed_kib(container, call) <= asker.needed_kib(bare, call) + 6


TABLE = """
SMI = bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
class Named(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_uint64), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint),
                ("protected", ctypes.c_uint64), ("name", ctypes.c_char * 4096)]
def table_of(identity):
    table = ctypes.c_void_p()
    library = ctypes.CDLL("libnvidia-ml.so.1")
    return library.nvmlInternalGetExportTable(ctypes.byref(table), identity), ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
def named(table, entry, device, room=8):
    count, array = ctypes.c_uint(room), (Named * 8)()
    ctypes.memset(array, 0xEE, ctypes.sizeof(array))
    result = ENTRY(table[entry])(device, ctypes.addressof(count), ctypes.addressof(array) if room else None)
    shown = [[p.pid, p.used, p.gi == 2**32 - 1, p.protected, p.name.decode()] for p in array[: count.value]] if not result else []
    clean = all(byte == 0xEE for byte in bytes(array)[len(shown) * ctypes.sizeof(Named):])
    return [result, count.value, shown, clean]
"""


def test_private_table_lists_the_containers_own_processes_and_no_others(node, container):
    """The way of nvidia-smi: its lists of compute, graphics and MPS are entries of a table that no header declares."""
    script = """
status, table = table_of(SMI)
tell(status=status, lists=[named(table, entry, h) for entry in (213, 214, 215)], short=named(table, 213, h, 0)[:2],
     none=named(table, 213, None)[0], other=table_of(bytes(16))[0])
"""
    stranger, bare = node.container(LIMIT_MIB), node.container(LIMIT_MIB, interposition="none")
    with container.repl() as program, stranger.repl():
        program.ask(f"alloc alloc {100 * MIB}")
        reported = facts(container.python(PROGRAM + NVML + TABLE + script))
        assert facts(bare.python(PROGRAM + NVML + TABLE + script))["lists"][0][1] == 2, "the driver lists both"
        own = [program.process.pid, (100 + CONTEXT_MIB) * MIB, True, 0, str(node.build / "bin/aliquot-cuda-client")]
    assert reported["lists"] == [[0, 1, [own], True], [0, 0, [], True], [0, 0, [], True]]
    assert (reported["status"], reported["short"], reported["none"], reported["other"]) == (0, [7, 1], 2, 3)


FAKE_TABLE = r"""
#include <stdlib.h>
#include <string.h>
typedef int (*entry_t)(void *, void *, void *);
static const void *table[ENTRIES];
#define ENTRY(n) static int entry_##n(void *a, void *b, void *c) { (void)a, (void)b, (void)c; return 1000 + n; }
EACH
#undef ENTRY
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) { (void)device; strncpy(uuid, getenv("FAKE_UUID"), length); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *list) { (void)device, (void)list; *count = 0; return 0; }
int nvmlInternalGetExportTable(const void **out, const unsigned char *id)
{
	(void)id;
#define ENTRY(n) table[n] = (const void *)entry_##n;
EACH
	table[0] = (const void *)strtoul(getenv("FAKE_SIZE"), 0, 0);
	*out = table;
	return 0;
}
"""
FAKE_ENTRIES = 320


@pytest.mark.parametrize(
    ("size", "passed", "listed"),
    [(FAKE_ENTRIES * 8, {23, 26, 81}, {213, 214, 215}), (100 * 8, {23, 26, 81}, set()), (2**40, {23, 26, 81}, {213, 214, 215})],
    ids=["as a newer driver", "shorter", "without a size"],
)
def test_private_table_passes_only_entries_that_are_known(node, tmp_path, size, passed, listed):
    """Each other entry, of whatever driver, may show a neighbour or change the GPU."""
    each = " ".join(f"ENTRY({n})" for n in range(1, FAKE_ENTRIES))
    source = FAKE_TABLE.replace("ENTRIES]", f"{FAKE_ENTRIES}]").replace("EACH", each)
    files = {contract.CUDA_SONAME: node.build / "lib/sim" / contract.CUDA_SONAME, contract.NVML_SONAME: tmp_path / "fake.so"}
    (tmp_path / "fake.c").write_text(source)
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{contract.NVML_SONAME}"]
    subprocess.run(["cc", *flags, "-o", tmp_path / "fake.so", tmp_path / "fake.c"], check=True)
    limit = DeviceLimit(node.uuids[0], LIMIT_MIB * MIB)
    container = make_container(tmp_path / "container", node.build, node.directory, [limit], driver=files)
    script = f"""
status, table = table_of(SMI)
reported = {{entry: named(table, entry, 1)[0] for entry in range(1, {FAKE_ENTRIES})}}
tell(status=status, size=table[0], reported=reported)
"""
    reported = facts(container.python(PROGRAM + TABLE + script, env={"FAKE_UUID": node.uuids[0], "FAKE_SIZE": str(size)}))
    assert (reported["status"], reported["size"]) == (0, size)
    want = {n: 1000 + n if n in passed else 0 if n in listed else 3 for n in range(1, FAKE_ENTRIES)}
    assert {int(n): result for n, result in reported["reported"].items()} == want


def test_a_killed_process_is_not_listed_and_its_memory_not_shown(container):
    with container.repl() as program:
        program.ask(f"alloc alloc {100 * MIB}")
        program.kill()
        script = "tell(processes=len(n.nvmlDeviceGetComputeRunningProcesses(h)), used=n.nvmlDeviceGetMemoryInfo(h).used)"
        assert facts(container.python(PROGRAM + NVML + script)) == {"processes": 0, "used": 0}


def test_the_limit_that_the_kernel_keeps_is_shown_as_the_share(build_dir, sim_node, tmp_path):
    """Drivers from R615 on report it for a control group; the value there may be more than the share, and is never below it."""
    profile, cgroup = tmp_path / "t4x2-615", tmp_path / "cgroup"
    profile.write_text((SOURCE_TREE / "simulated_driver/profiles/t4x2").read_text().replace("version=580.159.03", "version=615.10.01"))
    cgroup.mkdir()
    (cgroup / "cgroup.procs").touch()
    (tmp_path / "roots").mkdir()
    node = Node(build_dir, sim_node(str(profile)), tmp_path / "roots")
    set_limits = "n.nvmlDeviceSetMemoryLimits_v1(n.nvmlDeviceGetHandleByIndex(0), n.c_nvmlSetMemoryLimits_v1_t(where, 5 << 30, 6 << 30))"
    node.host(f"import pynvml as n; n.nvmlInit(); where = {os.fsencode(cgroup)!r}; {set_limits}")
    container = node.container(LIMIT_MIB)
    script = f"""
limits = n.c_nvmlGetMemoryLimits_v1_t({os.fsencode(cgroup)!r}, 0, 0, 0)
n.nvmlDeviceGetMemoryLimits_v1(h, limits)
tell(soft=limits.softLimit, hard=limits.hardLimit, used=limits.currentUsed, alike=limits.currentUsed == n.nvmlDeviceGetMemoryInfo(h).used)
"""
    with container.repl() as program:
        assert program.ask(f"alloc alloc {100 * MIB}")["result"] == 0
        reported = facts(container.python(PROGRAM + NVML + script))
    assert reported.pop("used") > 100 * MIB
    assert reported == {"soft": LIMIT_MIB * MIB, "hard": LIMIT_MIB * MIB, "alike": True}


def test_utilisation_is_the_containers_own(node):
    busy, idle = node.container(LIMIT_MIB), node.container(LIMIT_MIB)
    script = "tell(gpu=n.nvmlDeviceGetUtilizationRates(h).gpu)"
    with busy.start([busy.build / "bin/aliquot-cuda-client", "work", "--seconds", "4", "--kernel-us", "2000"]) as program:
        program.listen()
        assert facts(busy.python(PROGRAM + NVML + script))["gpu"] > 50
        assert facts(idle.python(PROGRAM + NVML + script))["gpu"] == 0
        samples = "tell(pids=[s.pid for s in n.nvmlDeviceGetProcessUtilization(h, 0)])"
        assert facts(busy.python(PROGRAM + NVML + samples))["pids"] == [program.process.pid]


NAMING_LOCK = 1
"""AQ_NAMING_LOCK_OFFSET of cuda_shim/region/layout.h."""


@contextlib.contextmanager
def known_by_their_slots_alone(container) -> Iterator[None]:
    """The container's processes that start meanwhile cannot take the lock by which the kernel names them, as earlier shims did not."""
    geometry = container.snapshot().geometry
    with container.region_path.open("r+b") as region:
        for index in range(geometry.slot_count):
            lock = struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, geometry.slot(index) + NAMING_LOCK, 1, 0)
            fcntl.fcntl(region, fcntl.F_OFD_SETLK, lock)
        yield


def write_slot(container, slot, *, pid=None, host_pid=None):
    """Write into a slot: the host pid as the agent does, the pid as a process in a namespace of its own would have."""
    snapshot = container.snapshot()
    write = region_layout.host_pid_write(snapshot.geometry, slot.index, host_pid)
    with container.region_path.open("r+b") as region:
        region.seek(write.offset)
        region.write(write.data)
        if pid is not None:
            region.seek(write.offset - 4)
            region.write(struct.pack("<I", pid))


def test_neighbour_with_host_pid_equal_to_container_pid_is_distinguished(node):
    busy, idle = node.container(LIMIT_MIB), node.container(LIMIT_MIB)
    work = [busy.build / "bin/aliquot-cuda-client", "work", "--seconds", "4", "--kernel-us", "2000"]
    with busy.start(work) as neighbour, known_by_their_slots_alone(idle), idle.repl() as program:
        neighbour.listen()
        write_slot(idle, idle.snapshot().slots[0], pid=neighbour.process.pid, host_pid=program.process.pid)
        time.sleep(0.5)  # the driver's figures are that old
        assert facts(idle.python(PROGRAM + NVML + "tell(gpu=n.nvmlDeviceGetUtilizationRates(h).gpu)"))["gpu"] == 0


OWN_PID = 77
"""By which a container in a PID namespace of its own knows a process; the driver names it by the host's."""


def test_use_reported_by_host_pid_is_shown_by_container_pid(node, container):
    work = [container.build / "bin/aliquot-cuda-client", "work", "--seconds", "20", "--kernel-us", "2000"]
    with known_by_their_slots_alone(container), container.start(work) as program:
        program.listen()
        write_slot(container, container.snapshot().slots[0], pid=OWN_PID, host_pid=program.process.pid)
        script = """
tell(gpu=n.nvmlDeviceGetUtilizationRates(h).gpu, samples=[s.pid for s in n.nvmlDeviceGetProcessUtilization(h, 0)],
     uses=[use.pid for use in n.nvmlDeviceGetProcessesUtilizationInfo(h, 0)],
     lists=[[p.pid for p in get(h)] for get in (n.nvmlDeviceGetComputeRunningProcesses_v2, n.nvmlDeviceGetComputeRunningProcesses_v3)])
"""
        reported = facts(container.python(PROGRAM + NVML + script))
    assert reported.pop("gpu") > 50
    assert reported == {"samples": [OWN_PID], "uses": [OWN_PID], "lists": [[OWN_PID], [OWN_PID]]}


def test_driver_that_translates_pids_works_when_agent_wrote_host_pids(node):
    unshare = unshare_or_skip()
    container = node.container(LIMIT_MIB)
    script = """
import subprocess, sys, time
work = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
work.stdout.readline()
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
tell(pid=work.pid)
sys.stdin.readline()
time.sleep(0.7)
tell(gpu=n.nvmlDeviceGetUtilizationRates(h).gpu, pids=[s.pid for s in n.nvmlDeviceGetProcessUtilization(h, 0)])
work.kill()
"""
    work = [container.build / "bin/aliquot-cuda-client", "work", "--seconds", "20", "--kernel-us", "2000"]
    with container.start([*unshare, sys.executable, "-c", PROGRAM + script, *work], {"PYTHONPATH": str(SOURCE_TREE)}) as program:
        pid = program.listen()["pid"]
        write_slot(container, container.snapshot().slots[0], host_pid=4000000)
        reported = program.ask("go")
    assert reported["pids"] == [pid]
    assert reported["gpu"] > 50


def test_settings_of_the_card_are_not_the_containers_to_change(container):
    script = """
def refused(change):
    try:
        change()
    except n.NVMLError as error:
        return error.value
    return 0
tell(results=[refused(change) for change in (
    lambda: n.nvmlDeviceSetPowerManagementLimit(h, 300000), lambda: n.nvmlDeviceSetPersistenceMode(h, 1),
    lambda: n.nvmlDeviceSetMigMode(h, 1), lambda: n.nvmlDeviceCreateGpuInstance(h, 19), lambda: n.nvmlDeviceSetComputeMode(h, 3))])
"""
    assert facts(container.python(PROGRAM + NVML + script)) == {"results": [4] * 5}


def test_whole_card_figures_that_have_no_share_are_not_shown(container):
    script = """
def answer(ask):
    try:
        ask()
    except n.NVMLError as error:
        return error.value
    return 0
tell(results=[answer(lambda: n.nvmlDeviceGetSamples(h, n.NVML_GPU_UTILIZATION_SAMPLES, 0)),
              answer(lambda: n.nvmlDeviceGetAccountingPids(h)), answer(lambda: n.nvmlDeviceGetEncoderSessions(h))])
"""
    assert facts(container.python(PROGRAM + NVML + script)) == {"results": [3, 3, 3]}


GPM = """
MMA_STALL_PERCENT = 297
def code(ask):
    try:
        ask()
    except n.NVMLError as error:
        return error.value
    return 0
def supported(gpu):
    return bool(n.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice)
sample = n.nvmlGpmSampleAlloc()
"""


def whole_bytes(node, number: int = 0) -> int:
    """What the agent grants to who asks for a whole GPU: its memory less the driver's reserve, in whole MiB."""
    ask = f"n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex({number}), version=n.nvmlMemory_v2)"
    reported = node.host(f"import pynvml as n; n.nvmlInit(); m = {ask}; print(m.total - m.reserved)")
    return int(reported) // MIB * MIB


@pytest.mark.parametrize("interposition", ["front", "preload"])
@pytest.mark.parametrize(
    ("short_bytes", "sm_percent", "whole"),
    [
        pytest.param(0, 0, True, id="the whole GPU"),
        pytest.param(0, 100, True, id="all of its compute"),
        pytest.param(1, 0, False, id="a byte less"),
        pytest.param(0, 99, False, id="a ceiling on compute"),
    ],
)
def test_figures_of_whole_gpu_are_shown_only_to_its_sole_owner(node, interposition, short_bytes, sm_percent, whole):
    limit = DeviceLimit(node.uuids[0], whole_bytes(node) - short_bytes, overhead_bytes=64 * MIB, sm_percent=sm_percent)
    container = node.container_with(Limits((limit,)), interposition=interposition)
    script = """
tell(sample=code(lambda: n.nvmlGpmSampleGet(h, sample)), supported=supported(h), pstates=code(lambda: n.nvmlDeviceGetDynamicPstatesInfo(h)),
     samples=code(lambda: n.nvmlDeviceGetSamples(h, n.NVML_GPU_UTILIZATION_SAMPLES, 0)),
     fields=[value.nvmlReturn for value in n.nvmlDeviceGetFieldValues(h, [MMA_STALL_PERCENT, n.NVML_FI_DEV_POWER_INSTANT])],
     metrics=code(lambda: n.nvmlDevicePerfMetricsGetSamples_v1(h, n.c_nvmlPerfMetricsSamples_v1_t())))
"""
    reported = facts(container.python(PROGRAM + NVML + GPM + script))
    if whole:
        assert reported["samples"] in (0, 6), "an idle GPU may have none"
        assert reported == {"sample": 0, "supported": True, "pstates": 0, "samples": reported["samples"], "fields": [0, 0], "metrics": 0}
    else:
        assert reported == {"sample": 3, "supported": False, "pstates": 3, "samples": 3, "fields": [3, 0], "metrics": 3}


def without_process_samples(node, root, interposition, limit):
    """A container on a driver that lacks the samples of processes: in the copy, no symbol has their name."""
    driver = root / "libnvidia-ml-older.so.1"
    name = b"nvmlDeviceGetProcessUtilization\0"
    content = (node.build / "lib/sim" / contract.NVML_SONAME).read_bytes()
    assert name in content
    driver.write_bytes(content.replace(name, b"-" + name[1:]))
    files = {contract.CUDA_SONAME: node.build / "lib/sim" / contract.CUDA_SONAME, contract.NVML_SONAME: driver}
    return make_container(root / "older", node.build, node.directory, [limit], driver=files, interposition=interposition)


@pytest.mark.parametrize("interposition", ["front", "preload"])
@pytest.mark.parametrize("whole", [True, False], ids=["the whole GPU", "a share"])
def test_without_process_samples_share_shows_no_utilization(node, tmp_path, interposition, whole):
    limit = DeviceLimit(node.uuids[0], whole_bytes(node) if whole else LIMIT_MIB * MIB)
    container = without_process_samples(node, tmp_path, interposition, limit)
    busy = node.container(LIMIT_MIB)
    script = """
rates = n.c_nvmlUtilization_t(77, 77)
result = n._nvmlGetFunctionPointer("nvmlDeviceGetUtilizationRates")(h, ctypes.byref(rates))
tell(result=result, gpu=rates.gpu)
"""
    with busy.start([busy.build / "bin/aliquot-cuda-client", "work", "--seconds", "10", "--kernel-us", "2000"]) as neighbour:
        neighbour.listen()
        reported = facts(container.python(PROGRAM + NVML + script))
    assert reported["result"] == (0 if whole else 3)
    assert whole or reported["gpu"] == 77, "an error writes nothing"


def test_what_is_no_share_of_anything_is_the_drivers(node, container):
    script = "tell(name=n.nvmlDeviceGetName(h), uuid=n.nvmlDeviceGetUUID(h), count=n.nvmlDeviceGetCount())"
    assert facts(container.python(PROGRAM + NVML + script)) == {"name": "NVIDIA H200", "uuid": node.uuids[0], "count": 1}


def test_monitoring_takes_no_slot(container):
    assert container.python(PROGRAM + NVML + "n.nvmlDeviceGetMemoryInfo(h)").status == 0
    assert container.snapshot().slots == ()


# --- MIG --------------------------------------------------------------------------------------------------------

MIG_UUIDS = """
import pynvml as n; n.nvmlInit()
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    for m in range(n.nvmlDeviceGetMaxMigDeviceCount(h)):
        try:
            print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(h, m)), n.nvmlDeviceGetUUID(h))
        except n.NVMLError:
            pass
"""


@pytest.mark.parametrize("by_gpu", [False, True], ids=["its own uuid", "its GPU's, for a share of a GPU in MIG mode"])
def test_a_mig_instance_is_limited_by(build_dir, sim_node, tmp_path, by_gpu):
    node = Node(build_dir, sim_node("a100x8-mig"), tmp_path)
    uuid, of_gpu, *_ = node.host(MIG_UUIDS).split()
    container = node.container_with(Limits((DeviceLimit(of_gpu if by_gpu else uuid, 2048 * MIB),)), uuids=[uuid])
    with container.repl(env={"CUDA_VISIBLE_DEVICES": uuid}) as program:
        assert program.ask(f"alloc alloc {2048 * MIB}")["result"] == 2
        assert program.ask(f"alloc alloc {100 * MIB}")["result"] == 0
        script = """
n.nvmlInit()
m = n.nvmlDeviceGetMigDeviceHandleByIndex(n.nvmlDeviceGetHandleByIndex(0), 0)
[process] = n.nvmlDeviceGetComputeRunningProcesses(m)
tell(total=n.nvmlDeviceGetMemoryInfo(m).total, pid=process.pid, instance=process.gpuInstanceId == n.nvmlDeviceGetGpuInstanceId(m))
"""
        reported = facts(container.python(PROGRAM + script))
        assert reported == {"total": 2048 * MIB, "pid": program.process.pid, "instance": True}


@pytest.mark.parametrize(
    ("whole", "by_gpu"), [(True, False), (False, False), (False, True)], ids=["the whole instance", "a share of it", "a share of its GPU"]
)
def test_performance_of_mig_instance_is_shown_to_its_sole_owner(build_dir, sim_node, tmp_path, whole, by_gpu):
    (tmp_path / "roots").mkdir()
    node = Node(build_dir, sim_node("h200x8"), tmp_path / "roots")
    make = """
import pynvml as n; n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
n.nvmlDeviceSetMigMode(h, n.NVML_DEVICE_MIG_ENABLE)
for _ in range(2):
    profile = n.nvmlDeviceGetGpuInstanceProfileInfo(h, n.NVML_GPU_INSTANCE_PROFILE_1_SLICE)
    instance = n.nvmlDeviceCreateGpuInstance(h, profile.id)
    slices = n.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, n.NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE, 0)
    n.nvmlGpuInstanceCreateComputeInstance(instance, slices.id)
m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, 0)
memory = n.nvmlDeviceGetMemoryInfo(m, version=n.nvmlMemory_v2)
print(n.nvmlDeviceGetUUID(m), n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetGpuInstanceId(m), memory.total - memory.reserved)
"""
    uuid, gpu, own, total = node.host(make).split()
    limit = int(total) // MIB * MIB if whole else 1024 * MIB
    container = node.container_with(Limits((DeviceLimit(gpu if by_gpu else uuid, limit),)), uuids=[uuid])
    script = f"""
tell(own=code(lambda: n.nvmlGpmMigSampleGet(h, {own}, sample)), gpu=code(lambda: n.nvmlGpmSampleGet(h, sample)),
     others=[code(lambda: n.nvmlGpmMigSampleGet(h, other, sample)) for other in range(16) if other != {own}], supported=supported(h))
"""
    reported = facts(container.python(PROGRAM + NVML + GPM + script))
    assert reported == {"own": 0 if whole else 3, "gpu": 3, "others": [3] * 15, "supported": whole}


def test_nvitop_shows_the_slice_and_the_containers_process(container):
    watch = """
import nvitop
[device] = nvitop.Device.all()
processes = {pid: process.gpu_memory() for pid, process in device.processes().items()}
print(device.memory_total(), device.memory_used(), device.memory_free(), processes)
"""
    script = f"""
import subprocess, sys
start()
alloc(256 * MIB)
def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
tell(pid=os.getpid(), asked=run("-c", {watch!r}), shown=run("-m", "nvitop", "--once", "--ascii"))
"""
    reported = facts(container.python(PROGRAM + script))
    used = (CONTEXT_MIB + 256) * MIB
    assert reported["asked"].strip() == f"{LIMIT_MIB * MIB} {used} {LIMIT_MIB * MIB - used} {{{reported['pid']}: {used}}}"
    assert f"{CONTEXT_MIB + 256}.0MiB / {LIMIT_MIB}MiB" in reported["shown"]
