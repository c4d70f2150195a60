# SPDX-License-Identifier: Apache-2.0
"""A container's memory limit holds over every way of allocating, to the byte, and every way of freeing gives back what was taken.

The shim as front, under real CUDA programs, on the simulated driver. Who finds the driver how is in test_shim_lookup.py, kills are in
test_shim_chaos.py, what a container sees in test_shim_views.py.
"""

import contextlib
import json
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.region_layout import LOG_WARN, DeviceLimit, Limits
from aliquot import contract
from cuda_shim.coverage.tables import read_abi
from tests.fakes.container import MIB, Node, make_container
from tests.fakes.cuda import INVALID_VALUE, OUT_OF_MEMORY, SUCCESS
from tests.fakes.recording_driver import build_recording_driver

LIMIT_MIB = 2048
CONTEXT_MIB = 530  # of an H200 in the profile
PAGE_MIB = 2
PIECE_MIB = 32  # what a pool takes at a time

KINDS_AND_REST_MIB = {
    "alloc": 0,
    "pitch": 0,
    "managed": 0,
    "async": PIECE_MIB,
    "pool": PIECE_MIB,
    "vmm": 0,
    "vmm-release": 0,
    "array": 0,
    "mipmap": 0,
    "graph": 0,
    "ctx": CONTEXT_MIB,
}
"""Every way of allocating, and less than how much of the limit its smallest piece leaves unused. 0: nothing."""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node):
    return node.container(LIMIT_MIB)


def facts(answer):
    """What the program reported, when it came to its end."""
    assert answer.status == 0, answer
    return answer.last


PROGRAM = "from tests.fakes.cuda import *\nimport ctypes, os\n"


def driver_path(container):
    """The real driver, for what a program does past the shim. Opened after the front; it has the front's name."""
    return container.root / "run/aliquot/driver" / contract.CUDA_DRIVER_SONAME


# --- the limit holds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rest_mib"), KINDS_AND_REST_MIB.items())
def test_every_kind_fills_the_limit_and_takes_no_byte_more(node, container, kind, rest_mib):
    program = container.start([container.build / "bin/aliquot-cuda-client", "fill", "--kind", kind, "--hold"])
    with program:
        filled = program.listen()
        assert filled["event"] == "fill", filled
        assert filled["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"
        used = container.line_bytes()
        assert LIMIT_MIB * MIB - rest_mib * MIB <= used <= LIMIT_MIB * MIB
        assert container.used_bytes() == used
        assert filled["free_bytes"] == LIMIT_MIB * MIB - used
        assert node.physical_used_bytes(node.uuids[0]) <= LIMIT_MIB * MIB
    assert container.snapshot().slots[0].devices[0].refusals > 0


def test_limit_below_whole_page_is_filled_to_last_unit(node):
    container = node.container(1001)
    filled = facts(container.client("fill"))
    assert filled["held_bytes"] + CONTEXT_MIB * MIB == 1001 * MIB
    assert filled["smallest_refused_bytes"] == 1


def test_one_byte_takes_the_unit_that_the_device_loses(container):
    script = "start()\nprint(alloc(1)[0])\nbefore=info()[0]\nalloc(1)\ntell(taken=before-info()[0])"
    assert facts(container.python(PROGRAM + script))["taken"] == 512


@pytest.mark.parametrize(
    "allocate",
    [
        'into("cuMemAlloc_v2", MIB + 1)',
        'into("cuMemAllocPitch_v2", ctypes.byref(out()), 512, 2049, 4)',
        'into("cuArray3DCreate_v2", ctypes.byref(Shape(512, 2049, 0, 1, 1, 0)))',
    ],
)
def test_pieces_slightly_above_megabyte_are_charged_whole_page(node, container, allocate):
    script = f"""
class Shape(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t), ("format", ctypes.c_int),
                ("channels", ctypes.c_uint), ("flags", ctypes.c_uint))
start()
count = 0
while {allocate}[0] == SUCCESS:
    count += 1
tell(count=count)
input()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"count": (LIMIT_MIB - CONTEXT_MIB) // PAGE_MIB}
        assert container.line_bytes() == node.physical_used_bytes(node.uuids[0]) == LIMIT_MIB * MIB


@pytest.mark.parametrize(("name", "flags"), [("cuMemAlloc_v2", ""), ("cuMemAllocManaged", ", 1")])
def test_all_free_memory_is_granted_to_byte_even_below_whole_page(node, name, flags):
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], (LIMIT_MIB + 1) * MIB + 512),)))
    script = f"""
start()
free = info()[0]
results = [into("{name}", free + 1{flags})[0], into("{name}", free{flags})[0]]
tell(free=free, results=results, left=info()[0])
"""
    reported = facts(container.python(PROGRAM + script))
    assert reported == {"free": (LIMIT_MIB + 1 - CONTEXT_MIB) * MIB + 512, "results": [OUT_OF_MEMORY, SUCCESS], "left": 0}


def test_a_refusal_leaves_the_output_untouched_and_does_not_reach_the_driver(node, container):
    script = f"""
start()
result, address = alloc({LIMIT_MIB} * MIB)
tell(result=result, address=address, untouched=UNTOUCHED, next=alloc(MIB)[0])
"""
    reported = facts(container.python(PROGRAM + script))
    assert (reported["result"], reported["address"], reported["next"]) == (OUT_OF_MEMORY, reported["untouched"], SUCCESS)
    (slot,) = container.snapshot().slots
    assert (slot.devices[0].refusals, slot.devices[0].last_refused_bytes) == (1, LIMIT_MIB * MIB)


@pytest.mark.parametrize("texel_format", [pytest.param(0x10, id="half"), pytest.param(0xC5, id="unorm")])
def test_array_of_16_bit_texels_is_checked_by_full_size_before_creation(container, texel_format):
    script = f"""
class Shape(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("format", ctypes.c_int), ("channels", ctypes.c_uint))

start()
shape = Shape(65536, 8192, {texel_format}, 4)
tell(result=into("cuArrayCreate_v2", ctypes.byref(shape))[0])
"""
    assert facts(container.python(PROGRAM + script))["result"] == OUT_OF_MEMORY
    (slot,) = container.snapshot().slots
    assert slot.devices[0].last_refused_bytes == 65536 * 8192 * 4 * 2


def test_an_absurd_size_is_refused_and_counts_nothing(container):
    script = "start()\nfree=info()[0]\ntell(results=[alloc(2**64-1)[0], alloc(2**63)[0]], same=free==info()[0])"
    assert facts(container.python(PROGRAM + script)) == {"results": [OUT_OF_MEMORY, OUT_OF_MEMORY], "same": True}


def test_thin_rows_are_charged_the_pitch_that_the_driver_gives_them(container):
    script = """
start()
before = info()[0]
pitch, address = out(), out()
must("cuMemAllocPitch_v2", ctypes.byref(address), ctypes.byref(pitch), 4, 10000, 4)
taken = before - info()[0]
must("cuMemFree_v2", address.value)
tell(taken=taken, rows=pitch.value * 10000, left=before - info()[0])
"""
    reported = facts(container.python(PROGRAM + script))
    assert reported["rows"] > 40000
    assert reported["taken"] == -(-reported["rows"] // (PAGE_MIB * MIB)) * PAGE_MIB * MIB
    assert reported["left"] == 0


def test_rows_that_turn_out_wider_than_expected_are_charged_so_or_refused(node, tmp_path):
    driver = tmp_path / "driver.so"
    build_recording_driver(read_abi(), driver)
    files = {contract.CUDA_SONAME: driver, contract.NVML_SONAME: node.build / "lib/sim" / contract.NVML_SONAME}
    limits = [DeviceLimit(node.uuids[0], LIMIT_MIB * MIB)]
    container = make_container(tmp_path / "wide", node.build, node.directory, limits, driver=files)
    script = """
def rows():
    pitch, address = out(), out()
    result = call("cuMemAllocPitch_v2", ctypes.byref(address), ctypes.byref(pitch), 512, 4096, 4)  # 2 MiB, if no row takes more
    return result, pitch.value
start()
before = info()[0]
steps = [(*rows(), before - info()[0])]
must("cuMemAlloc_v2", ctypes.byref(out()), info()[0] - 2 * MIB)
steps.append((*rows(), info()[0]))
tell(steps=steps)
input()
"""
    env = {"RECORDED_DRIVER": str(container.build / "lib/sim" / contract.CUDA_SONAME), "RECORDED_WIDE_ROWS": "1"}
    with container.start_python(PROGRAM + script, env=env) as program:
        assert program.listen() == {"steps": [[SUCCESS, 1024, 4 * MIB], [OUT_OF_MEMORY, 0xDEADBEEF, 2 * MIB]]}
        assert node.physical_used_bytes(node.uuids[0]) == (LIMIT_MIB - 2) * MIB


@pytest.mark.parametrize("name", ["cuMemAllocPitch_v2", "cuMemAllocPitch"])
def test_rows_without_pitch_pointer_are_checked_before_driver_call(container, name):
    script = f"""
start()
before = info()[0]
refused = into({name!r}, None, MIB, {LIMIT_MIB}, 4)[0]
tell(refused=refused, drivers=into({name!r}, None, MIB, 1, 4)[0], taken=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"refused": OUT_OF_MEMORY, "drivers": INVALID_VALUE, "taken": 0}


def test_a_context_that_does_not_fit_is_refused_and_leaves_nothing(node):
    container = node.container(CONTEXT_MIB - 1)
    answer = container.client("info")
    assert answer.status == 1
    assert answer.last["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert container.line_bytes() == 0
    assert node.physical_used_bytes(node.uuids[0]) == 0


@pytest.mark.parametrize("known", [False, True], ids=["measured", "as the agent says"])
def test_contexts_are_part_of_the_limit(node, known):
    limits = Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, context_bytes=600 * MIB if known else 0),))
    container = node.container_with(limits)
    with container.repl() as program:
        assert program.ask("info")["free_bytes"] == (LIMIT_MIB - (600 if known else CONTEXT_MIB)) * MIB
        (slot,) = container.snapshot().slots
        assert slot.devices[0].context_bytes == (600 if known else CONTEXT_MIB) * MIB
        assert slot.devices[0].contexts == 1


def test_what_one_process_measured_another_need_not_measure(container):
    container.client("info")
    assert container.snapshot().measured_context_bytes[0] == CONTEXT_MIB * MIB
    facts(container.client("fill"))
    assert container.snapshot().measured_context_bytes[0] == CONTEXT_MIB * MIB


NVML_THAT_CANNOT_NAME_US = r"""
static unsigned long long looks;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)uuid; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{
    (void)device;
    memory[0] = 144ull << 30;
    memory[2] = looks++ * (8ull << 30);
    memory[1] = memory[0] - memory[2];
    return 0;
}
"""
"""Lists no processes; the device loses 8 GiB between any two looks, as when a neighbour loads a model."""


def test_memory_taken_by_neighbour_during_context_creation_is_not_context_cost(node, tmp_path):
    library, source = tmp_path / contract.NVML_SONAME, tmp_path / "nvml.c"
    source.write_text(NVML_THAT_CANNOT_NAME_US)
    subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{contract.NVML_SONAME}", "-o", library, source], check=True)
    driver = {contract.CUDA_SONAME: node.build / "lib/sim" / contract.CUDA_SONAME, contract.NVML_SONAME: library}
    devices = [DeviceLimit(node.uuids[0], 16384 * MIB)]
    container = make_container(tmp_path / "unnamed", node.build, node.directory, devices, driver=driver)
    with container.repl():
        assert container.snapshot().slots[0].devices[0].context_bytes == 1024 * MIB
    assert container.snapshot().measured_context_bytes[0] == 0


def test_stacks_heap_and_print_buffer_of_a_context_are_device_memory(container):
    script = f"""
start()
before = info()[0]
grown = call("cuCtxSetLimit", 2, 264 * MIB)
taken = before - info()[0]
too_much = call("cuCtxSetLimit", 2, {LIMIT_MIB} * MIB)
shrunk = call("cuCtxSetLimit", 2, 8 * MIB)
tell(results=[grown, too_much, shrunk], taken=taken, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"results": [0, OUT_OF_MEMORY, 0], "taken": 256 * MIB, "left": 0}


@pytest.mark.parametrize("context", ["primary", "own"])
def test_limit_rounded_by_driver_is_charged_as_kept_and_credited_equally(node, container, context):
    script = f"""
start()
if {context!r} == "own":
    into("cuCtxCreate_v2", 0, 0)
before = info()[0]
results, taken = [], []
for value in (1025, 1024) * 3:
    results.append(call("cuCtxSetLimit", 0, value))
    taken.append(before - info()[0])
tell(results=results, taken=taken)
input()
"""
    with container.start_python(PROGRAM + script) as program:
        reported = program.listen()
        assert (reported["results"], reported["taken"]) == ([0] * 6, [6 * MIB, 0] * 3)  # 16 bytes for each thread that can be resident
        assert container.used_bytes() == node.physical_used_bytes(node.uuids[0])


def test_overhead_that_the_agent_observed_is_taken_off_the_limit(node):
    limits = Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, overhead_bytes=100 * MIB),))
    container = node.container_with(limits)
    filled = facts(container.client("fill"))
    assert filled["held_bytes"] == (LIMIT_MIB - 100 - CONTEXT_MIB) * MIB
    assert (filled["total_bytes"], filled["free_bytes"]) == (LIMIT_MIB * MIB, 0)


# --- memory of another process ----------------------------------------------------------------------------------

IMPORTER = """
import subprocess, sys
def imported(script, *arguments, files=()):
    command = [sys.executable, "-c", "from tests.fakes.cuda import *\\nimport ctypes, sys\\n" + script, *map(str, arguments)]
    return json.loads(subprocess.run(command, pass_fds=files, stdout=subprocess.PIPE, text=True, check=True).stdout)
"""
"""In an exporting program: run another program in the same container, and return what it reported."""


def test_memory_opened_by_ipc_is_charged_to_who_allocated_it_alone(container):
    opening = """
class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)
start()
before = info()[0]
result, address = into("cuIpcOpenMemHandle_v2", Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), 1)
opened = info()[0]
closed = call("cuIpcCloseMemHandle", address)
tell(result=result, closed=closed, free=[before, opened, info()[0]])
"""
    script = f"""
start()
result, address = alloc(256 * MIB)
handle = (ctypes.c_ubyte * 64)()
must("cuIpcGetMemHandle", handle, address)
before = info()[0]
reported = imported({opening!r}, bytes(handle).hex())
tell(reported=reported, left=before - info()[0])
"""
    answer = facts(container.python(PROGRAM + IMPORTER + script))
    reported = answer["reported"]
    assert (reported["result"], reported["closed"]) == (SUCCESS, SUCCESS)
    assert set(reported["free"]) == {(LIMIT_MIB - 256 - 2 * CONTEXT_MIB) * MIB}
    assert answer["left"] == 0


def test_imported_physical_memory_is_charged_only_to_its_creator(container):
    importing = """
start()
before = info()[0]
result, handle = into("cuMemImportFromShareableHandle", ctypes.c_void_p(int(sys.argv[1])), 1)
address = reserve(256 * MIB)
mapped = call("cuMemMap", address, 256 * MIB, 0, handle, 0)
held = info()[0]
undone = [call("cuMemUnmap", address, 256 * MIB), call("cuMemRelease", handle)]
tell(results=[result, mapped, *undone], free=[before, held, info()[0]])
"""
    script = f"""
start()
prop = AllocationProp(type=1, handle_types=1, location_type=DEVICE, location_id=0)
result, handle = into("cuMemCreate", 256 * MIB, ctypes.byref(prop), 0)
file = ctypes.c_int()
must("cuMemExportToShareableHandle", ctypes.byref(file), handle, 1, 0)
before = info()[0]
reported = imported({importing!r}, file.value, files=[file.value])
must("cuMemRelease", handle)
tell(reported=reported, given_back=info()[0] - before)
"""
    answer = facts(container.python(PROGRAM + IMPORTER + script))
    assert answer["reported"]["results"] == [SUCCESS] * 4
    assert set(answer["reported"]["free"]) == {(LIMIT_MIB - 256 - 2 * CONTEXT_MIB) * MIB}
    assert answer["given_back"] == 256 * MIB


# --- freeing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["alloc", "pitch", "managed", "vmm", "vmm-release", "array", "mipmap", "ctx", "async", "graph"])
def test_freeing_gives_back_exactly_what_was_taken(container, kind):
    with container.repl() as program:
        before = program.ask("info")["free_bytes"]
        for _ in range(3):
            taken = program.ask(f"alloc {kind} {64 * MIB}")
            assert taken["result"] == SUCCESS
            assert program.ask("info")["free_bytes"] < before
            assert program.ask(f"free {kind} {taken['id']}")["result"] == SUCCESS
            assert program.ask("sync")["result"] == SUCCESS
        if kind == "graph":  # the driver keeps graph memory until it is asked for it, as it is before a refusal
            assert program.ask(f"alloc alloc {before}")["result"] == SUCCESS
        else:
            assert program.ask("info")["free_bytes"] == before


def test_a_pool_keeps_its_memory_until_it_would_be_refused_to_others(container):
    with container.repl() as program:
        before = program.ask("info")["free_bytes"]
        taken = program.ask(f"alloc pool {1024 * MIB}")
        assert program.ask(f"free pool {taken['id']}")["result"] == SUCCESS
        assert program.ask(f"alloc alloc {before}")["result"] == SUCCESS
        assert program.ask("info")["free_bytes"] == 0


def test_a_pool_at_the_limit_serves_what_it_holds_idle(container):
    script = """
start()
pool = out()
props = PoolProps(type=1, location_type=DEVICE)
must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
threshold = ctypes.c_uint64(2**63)
must("cuMemPoolSetAttribute", pool.value, 4, ctypes.byref(threshold))
result, address = into("cuMemAllocFromPoolAsync", 1024 * MIB, pool.value, 0)
must("cuMemFreeAsync", address, 0)
must("cuStreamSynchronize", 0)
held = alloc(info()[0])[0]
again, address = into("cuMemAllocFromPoolAsync", 512 * MIB, pool.value, 0)
more, _ = into("cuMemAllocFromPoolAsync", 1024 * MIB, pool.value, 0)
tell(results=[result, held, again, more], free=info()[0])
"""
    reported = facts(container.python(PROGRAM + script))
    assert reported == {"results": [0, 0, 0, OUT_OF_MEMORY], "free": 512 * MIB}, "the idle half serves, the other half goes back"


def test_a_request_larger_than_a_piece_does_not_make_the_pieces_larger(node):
    container = node.container(2400)
    script = """
start()
large, _ = into("cuMemAllocAsync", 1025 * MIB, 0)
small = 0
while into("cuMemAllocAsync", 40 * MIB, 0)[0] == SUCCESS:
    small += 1
tell(large=large, small=small)
"""
    left = 2400 - CONTEXT_MIB - 33 * PIECE_MIB
    assert facts(container.python(PROGRAM + script)) == {"large": SUCCESS, "small": left // 40}


@pytest.mark.parametrize("kind", ["async", "pool"])
@pytest.mark.parametrize("mib", [1, 3, 20, 33, 48, 65, 127, 200, 257, 340, 512])
def test_pool_fills_the_limit_in_blocks_of_any_size(container, kind, mib):
    with container.repl() as program:
        free, count = program.ask("info")["free_bytes"], 0
        while program.ask(f"alloc {kind} {mib * MIB}")["result"] == SUCCESS:
            count += 1
        assert int(0.95 * free / (mib * MIB)) <= count <= free // (mib * MIB)
        assert container.line_bytes() <= LIMIT_MIB * MIB


A_POOL_AT_A_TIME = """
start()
for line in sys.stdin:
    pool, props, held, reported = out(), PoolProps(type=1, location_type=DEVICE), [], []
    must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
    for size, freed in json.loads(line):
        free = info()[0]
        result, address = into("cuMemAllocFromPoolAsync", size, pool.value, 0)
        reported.append([result, size, free])
        held += [address] if result == SUCCESS else []
        if freed and held:
            must("cuMemFreeAsync", held.pop(freed % len(held)), 0)
    for address in held:
        must("cuMemFreeAsync", address, 0)
    must("cuStreamSynchronize", 0)
    must("cuMemPoolDestroy", pool.value)
    tell(reported=reported)
"""
"""For each line, a list of sizes and of what is freed after each (0: nothing), what a new pool answered and what was free before that."""

sizes = st.one_of(st.integers(1, 3 * PIECE_MIB * MIB), st.integers(1, 1600).map(lambda mib: mib * MIB))


def test_pool_refuses_only_when_whole_pieces_exceed_limit(container):
    with container.start_python(PROGRAM + "import json, sys\n" + A_POOL_AT_A_TIME) as program:

        @given(st.lists(st.tuples(sizes, st.integers(0, 7)), max_size=25))
        def check(requests):
            piece = PIECE_MIB * MIB
            for result, size, free in program.ask(json.dumps(requests))["reported"]:
                assert result in (SUCCESS, OUT_OF_MEMORY)
                assert result == SUCCESS or free < -(-size // piece) * piece, (size, free)
            assert container.line_bytes() <= LIMIT_MIB * MIB

        check()
        assert container.line_bytes() == CONTEXT_MIB * MIB


IN_PIECES = """
start()
driver = ctypes.CDLL(DRIVER)
function, busy = load(), make_stream()

def device_lost():
    free, total = out(), out()
    if driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
        raise SystemExit("the driver does not say what is free")
    return total.value - free.value

pool = out()
must("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
threshold = ctypes.c_uint64(2**63)
must("cuMemPoolSetAttribute", pool.value, 4, ctypes.byref(threshold))
blocks = [into("cuMemAllocAsync", 20 * MIB, busy) for _ in range(6)]  # in four pieces of 32 MiB, 8 MiB lie idle
must("cuMemFreeAsync", blocks[1][1], busy)  # now 28, and 24 in a row nowhere
must("cuStreamSynchronize", busy)
rest = alloc(info()[0])
before = device_lost()
"""


def in_pieces(container, script: str):
    prelude = PROGRAM + "from tests.fakes.kernels import *\nimport threading, time\n" + f"DRIVER = {str(driver_path(container))!r}\n"
    return facts(container.python(prelude + IN_PIECES + script))


@pytest.mark.parametrize("kernel_us", [0, 200_000], ids=["idle stream", "busy stream"])
def test_pool_memory_for_refused_allocation_is_returned_before_reply(container, kernel_us):
    reported = in_pieces(
        container,
        f"""
if {kernel_us}:
    spin(function, {kernel_us}, busy)
result, address = into("cuMemAllocAsync", 24 * MIB, busy)
after = device_lost()
tell(results=[result for result, _ in blocks + [rest]], refused=result, untouched=address == UNTOUCHED, more=after - before, free=info()[0])
""",
    )
    idle = 28 * MIB
    assert reported == {"results": [0] * 7, "refused": OUT_OF_MEMORY, "untouched": True, "more": -idle, "free": idle}


def test_refusal_does_not_wait_for_stream_waiting_for_program(container):
    reported = in_pieces(
        container,
        """
gate = threading.Event()
wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait())
must("cuLaunchHostFunc", busy, wait, None)
begin = time.monotonic()
result, _ = into("cuMemAllocAsync", 24 * MIB, busy)
took, free = time.monotonic() - begin, info()[0]
gate.set()
must("cuStreamSynchronize", busy)
again = info()[0]
tell(refused=result, took=took, free=free, again=again, more=device_lost() - before)
""",
    )
    assert reported["refused"] == OUT_OF_MEMORY
    assert reported["took"] < 5
    idle = 28 * MIB
    assert (reported["free"], reported["again"], reported["more"]) == (0, idle, -idle), "back at the next call that looks"


def test_idle_pool_pieces_are_released_before_allocation_is_refused(container):
    reported = in_pieces(
        container,
        """
for _, address in blocks[3::2]:
    must("cuMemFreeAsync", address, busy)  # 68 MiB lie idle then, and no 40 in a row
result, address = into("cuMemAllocAsync", 40 * MIB, busy)
tell(result=result, kept=device_lost() - before + info()[0])
""",
    )
    assert reported == {"result": SUCCESS, "kept": 0}


def test_memory_freed_in_stream_order_is_credited_when_stream_gets_there(container):
    script = """
start()
before = info()[0]
result, address = alloc(64 * MIB)
must("cuMemFreeAsync", address, 0)
must("cuStreamSynchronize", 0)
tell(result=result, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"result": 0, "left": 0}


SYNCHRONISATIONS = {
    "stream": 'must("cuStreamSynchronize", stream)',
    "stream, per thread": 'must("cuStreamSynchronize_ptsz", stream)',
    "event": 'must("cuEventSynchronize", event)',
    "context": 'must("cuCtxSynchronize")',
    "context, CUDA 13": 'must("cuCtxSynchronize_v2", 0)',
    "two streams": 'must("cuStreamSynchronize", stream)\nmust("cuStreamSynchronize", busy)',
}


@pytest.mark.parametrize("synchronise", SYNCHRONISATIONS.values(), ids=SYNCHRONISATIONS.keys())
@pytest.mark.parametrize("allocate", ['into("cuMemAllocAsync", 768 * MIB, stream)', "alloc(768 * MIB)"], ids=["pool", "linear"])
def test_what_a_process_freed_before_it_waited_and_slept_is_its_siblings(container, allocate, synchronise):
    script = f"""
from tests.fakes.kernels import *
start()
stream, busy, event, context, kernel = make_stream(), make_stream(), into("cuEventCreate", 2)[1], out(), load()
result, address = {allocate}
other = into("cuMemAllocAsync", 32 * MIB, busy)[1]
if {"busy" in synchronise}:
    spin(kernel, 300_000, busy)
must("cuMemFreeAsync", other, busy)
must("cuMemFreeAsync", address, stream)
must("cuEventRecord", event, stream)
{synchronise}
tell(result=result)
input()
"""
    with container.start_python(PROGRAM + script) as idle, container.repl() as sibling:
        assert idle.listen() == {"result": SUCCESS}
        assert container.line_bytes() == (2 * CONTEXT_MIB + PAGE_MIB) * MIB, "contexts, and the kernel"
        assert sibling.ask(f"alloc alloc {(LIMIT_MIB - 2 * CONTEXT_MIB - PAGE_MIB) * MIB}")["result"] == SUCCESS


def test_pool_that_keeps_memory_is_charged_for_it_after_wait(container):
    script = """
start()
before, threshold = info()[0], ctypes.c_uint64(256 * MIB)
must("cuMemPoolSetAttribute", into("cuDeviceGetDefaultMemPool", 0)[1], 4, ctypes.byref(threshold))
for address in [into("cuMemAllocAsync", 64 * MIB, 0)[1] for _ in range(8)]:
    must("cuMemFreeAsync", address, 0)
must("cuStreamSynchronize", 0)
tell(ready=True)
input()
tell(kept=before - info()[0])
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"ready": True}
        assert container.line_bytes() == (CONTEXT_MIB + 256) * MIB
        assert program.ask("go") == {"kept": 256 * MIB}


def test_pool_memory_may_be_freed_by_the_plain_call(container):
    script = """
start()
before = info()[0]
result, address = into("cuMemAllocAsync", 64 * MIB, 0)
taken = before - info()[0]
must("cuMemFree_v2", address)
must("cuCtxSynchronize")
tell(result=result, taken=taken, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"result": 0, "taken": 64 * MIB, "left": 0}


@pytest.mark.parametrize("ends", ["nothing", "the stream's context", "the memory's context"])
def test_linear_memory_freed_in_a_stream_of_another_context_is_credited_once(container, ends):
    script = f"""
start()
primary, other, stream = out(), out(), out()
must("cuCtxGetCurrent", ctypes.byref(primary))
must("cuCtxCreate_v2", ctypes.byref(other), 0, 0)
must("cuStreamCreate", ctypes.byref(stream), 1)
must("cuCtxSetCurrent", primary.value)
before = info()[0]
must("cuMemFreeAsync", alloc(64 * MIB)[1], stream.value)
own = {CONTEXT_MIB} * MIB
if {ends!r} == "the stream's context":
    must("cuCtxDestroy_v2", other.value)
    before += own
elif {ends!r} == "the memory's context":
    must("cuCtxSetCurrent", other.value)
    must("cuDevicePrimaryCtxReset_v2", 0)
    before += own
tell(left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script))["left"] == 0


LOCALITY_DOMAIN, INVISIBLE = 6, 5


def test_memory_of_a_devices_locality_domain_is_the_devices(container):
    script = f"""
start()
before = info()[0]
taken = lambda: before - info()[0]
prop = AllocationProp(type=1, location_type={LOCALITY_DOMAIN}, location_id=0)
_, handle = into("cuMemCreate", 64 * MIB, ctypes.byref(prop), 0)
steps = [taken()]
must("cuMemRelease", handle)
pool = out()
props = PoolProps(type=1, location_type={LOCALITY_DOMAIN}, location_id=0)
must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
_, address = into("cuMemAllocFromPoolAsync", 64 * MIB, pool.value, 0)
steps.append(taken())
must("cuMemFree_v2", address)
must("cuMemPoolDestroy", pool.value)
steps.append(taken())
refused = into("cuMemCreate", {LIMIT_MIB} * MIB, ctypes.byref(prop), 0)[0]
prop.location_id = 1 << 8  # the device's second domain, which it has not
tell(steps=steps, refused=refused, missing=into("cuMemCreate", 64 * MIB, ctypes.byref(prop), 0)[0])
"""
    reported = facts(container.python(PROGRAM + script))
    assert reported == {"steps": [64 * MIB, 64 * MIB, 0], "refused": OUT_OF_MEMORY, "missing": INVALID_VALUE}


def test_a_managed_pool_without_a_place_is_the_current_devices(container):
    script = """
start()
before = info()[0]
pool, props = out(), PoolProps(type=2, location_type=0)
must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
_, address = into("cuMemAllocFromPoolAsync", 64 * MIB, pool.value, 0)
tell(taken=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script))["taken"] == 64 * MIB


def test_memory_at_a_place_that_the_shim_does_not_know_is_refused(node):
    container = node.container(LIMIT_MIB, log_level=LOG_WARN)
    script = """
start()
results = []
for place in (PLACES):
    prop, props = AllocationProp(type=1, location_type=place), PoolProps(type=1, location_type=place)
    location = (ctypes.c_int * 2)(place, 0)
    results.append([into("cuMemCreate", 2 * MIB, ctypes.byref(prop), 0)[0], into("cuMemPoolCreate", ctypes.byref(props))[0],
                    into("cuMemGetDefaultMemPool", ctypes.byref(location), 1)[0]])
tell(results=results)
""".replace("PLACES", f"{INVISIBLE}, 77")
    answer = container.python(PROGRAM + script)
    assert facts(answer)["results"] == [[801] * 3] * 2
    assert "location of type 77 is refused" in answer.stderr, "by the shim, before a driver that knows it is asked"


def test_a_destroyed_pool_pays_until_its_last_allocation_is_freed(container):
    script = """
start()
before = info()[0]
pool = out()
props = PoolProps(type=1, location_type=DEVICE)
must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
result, address = into("cuMemAllocFromPoolAsync", 64 * MIB, pool.value, 0)
must("cuMemPoolDestroy", pool.value)
held = before - info()[0]
must("cuMemFree_v2", address)
must("cuCtxSynchronize")
tell(result=result, held=held, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"result": 0, "held": 64 * MIB, "left": 0}


@pytest.mark.parametrize("destroyed_first", [True, False], ids=["destroyed, then freed", "freed, then destroyed"])
def test_a_destroyed_pool_pays_until_the_stream_has_come_to_its_frees(node, container, destroyed_first):
    script = f"""
from tests.fakes.kernels import *
start()
fn, stream, before, steps = load(), make_stream(), info()[0], []
def destroy(pool):
    must("cuMemPoolDestroy", pool.value)
def free(address):
    must("cuMemFreeAsync", address, stream)
for turn in range(6):
    pool, props = out(), PoolProps(type=1, location_type=DEVICE)
    must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
    must("cuDeviceSetMemPool", 0, pool.value)
    result, address = into("cuMemAllocFromPoolAsync", 640 * MIB, pool.value, stream)
    if turn == 0:
        spin(fn, 2_000_000, stream)
    if result == SUCCESS and {destroyed_first}:
        destroy(pool), free(address)
    elif result == SUCCESS:
        free(address), destroy(pool)
    else:
        destroy(pool)
    steps.append([result, (before - info()[0]) // MIB])
dead = [into("cuMemAllocFromPoolAsync", MIB, pool.value, stream)[0], call("cuMemPoolDestroy", pool.value)]
tell(steps=steps, dead=dead, busy=call("cuStreamQuery", stream))
must("cuStreamSynchronize", stream)
tell(left=before - info()[0])
input()
"""
    with container.start_python(PROGRAM + script) as program:
        reported = program.listen()
        taken = [step for step in reported["steps"] if step[0] == SUCCESS]
        assert taken[0] == [SUCCESS, 640]
        assert {step[0] for step in reported["steps"]} <= {SUCCESS, OUT_OF_MEMORY}
        assert node.physical_used_bytes(node.uuids[0]) <= LIMIT_MIB * MIB
        assert reported["dead"] == [INVALID_VALUE, INVALID_VALUE]
        assert program.listen() == {"left": 0}


def test_thin_arrays_are_charged_the_rows_that_the_device_loses(node, container):
    script = """
class Shape(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("format", ctypes.c_int), ("channels", ctypes.c_uint))

start()
shape, made, result = Shape(1, 65536, 1, 1), 0, 0
while not result and made < 1000:
    result, _ = into("cuArrayCreate_v2", ctypes.byref(shape))
    made += not result
tell(made=made, result=result)
input()
"""
    with container.start_python(PROGRAM + script) as program:
        reported = program.listen()
        assert reported["result"] == OUT_OF_MEMORY
        assert node.physical_used_bytes(node.uuids[0]) == container.line_bytes() <= LIMIT_MIB * MIB


@pytest.mark.parametrize("mipmapped", [False, True], ids=["array", "mipmapped"])
def test_array_of_unknown_size_is_charged_in_tiles(node, container, tmp_path, mipmapped):
    simulated, driver = container.build / "lib/sim" / contract.CUDA_SONAME, tmp_path / "driver.so"
    build_recording_driver(read_abi(), driver)
    files = {contract.CUDA_SONAME: driver, contract.NVML_SONAME: container.build / "lib/sim" / contract.NVML_SONAME}
    limits = [DeviceLimit(node.uuids[0], LIMIT_MIB * MIB)]
    silent = make_container(tmp_path / "silent", container.build, node.directory, limits, driver=files)
    script = f"""
class Shape(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t), ("format", ctypes.c_int),
                ("channels", ctypes.c_uint), ("flags", ctypes.c_uint))

start()
before, shape = info()[0], Shape(100, 100, 0, 0x20, 4, 0)
if {mipmapped}:
    result, _ = into("cuMipmappedArrayCreate", ctypes.byref(shape), 2)
else:
    result, _ = into("cuArray3DCreate_v2", ctypes.byref(shape))
tell(result=result, taken=before - info()[0])
"""
    refused = " cuArrayGetMemoryRequirements cuMipmappedArrayGetMemoryRequirements "
    reported = facts(silent.python(PROGRAM + script, env={"RECORDED_DRIVER": str(simulated), "RECORDED_REFUSES": refused}))
    first, second = 2048 * 104, 1024 * 56
    assert reported == {"result": SUCCESS, "taken": first + (second if mipmapped else 0)}


def test_an_address_that_was_never_charged_is_the_drivers_to_judge(container):
    script = "start()\nfree=info()[0]\ntell(results=[call('cuMemFree_v2', 4096), call('cuMemFree_v2', 0)], same=free==info()[0])"
    reported = facts(container.python(PROGRAM + script))
    assert reported == {"results": [INVALID_VALUE, SUCCESS], "same": True}


def test_physical_memory_stays_charged_while_any_handle_or_mapping_of_it_lives(container):
    script = """
start()
before = info()[0]
used = lambda: before - info()[0]
_, handle = create_physical(64 * MIB)
first, second = reserve(64 * MIB), reserve(64 * MIB)
must("cuMemMap", first, 64 * MIB, 0, handle, 0)
must("cuMemMap", second, 64 * MIB, 0, handle, 0)
steps = [used()]
must("cuMemRelease", handle)
must("cuMemUnmap", first, 64 * MIB)
steps.append(used())
_, retained = into("cuMemRetainAllocationHandle", second + 4096)
must("cuMemUnmap", second, 64 * MIB)
steps.append(used())
must("cuMemRelease", retained)
steps.append(used())
tell(steps=steps)
"""
    assert facts(container.python(PROGRAM + script))["steps"] == [64 * MIB, 64 * MIB, 64 * MIB, 0]


def test_one_unmap_may_take_several_mappings_away(container):
    script = """
start()
before = info()[0]
address = reserve(8 * MIB)
for at in range(4):
    _, handle = create_physical(2 * MIB)
    must("cuMemMap", address + at * 2 * MIB, 2 * MIB, 0, handle, 0)
    must("cuMemRelease", handle)
held = before - info()[0]
must("cuMemUnmap", address, 8 * MIB)
tell(held=held, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"held": 8 * MIB, "left": 0}


def test_one_unmap_releases_memory_on_both_sides_of_uncounted_one(container):
    """Not counted is memory of the host, and here what was made past the shim."""
    script = f"""
start()
before = info()[0]
driver = ctypes.CDLL({str(driver_path(container))!r})
prop, past_us = AllocationProp(type=1, location_type=DEVICE), out()
if driver.cuMemCreate(ctypes.byref(past_us), ctypes.c_size_t(2 * MIB), ctypes.byref(prop), ctypes.c_uint64(0)):
    raise SystemExit("cuMemCreate of the driver")
handles = [create_physical(2 * MIB)[1], past_us.value, create_physical(2 * MIB)[1]]
address = reserve(6 * MIB)
for at, handle in enumerate(handles):
    must("cuMemMap", address + at * 2 * MIB, 2 * MIB, 0, handle, 0)
    must("cuMemRelease", handle)
held = before - info()[0]
must("cuMemUnmap", address, 6 * MIB)
must("cuMemAddressFree", address, 6 * MIB)
tell(held=held, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"held": 4 * MIB, "left": 0}


def test_an_unmap_that_waits_for_the_device_holds_up_no_other_thread(container):
    script = """
import threading, time
from tests.fakes.kernels import load, make_stream, spin
start()
kernel, stream, context = load(), make_stream(), out()
must("cuCtxGetCurrent", ctypes.byref(context))
source, address = alloc(2 * MIB)[1], reserve(2 * MIB)
must("cuMemMap", address, 2 * MIB, 0, create_physical(2 * MIB)[1], 0)
spin(kernel, 2000000, stream)
must("cuMemcpyDtoDAsync_v2", source, source, 4096, stream)
def unmap():
    must("cuCtxSetCurrent", context.value)
    must("cuMemUnmap", address, 2 * MIB)
thread = threading.Thread(target=unmap)
thread.start()
time.sleep(0.2)
waits, before = thread.is_alive(), info()[0]
other, handle = reserve(2 * MIB), create_physical(2 * MIB)[1]
must("cuMemMap", other, 2 * MIB, 0, handle, 0)
must("cuMemRelease", handle)
tell(waits=waits, still=thread.is_alive(), taken=before - info()[0])
thread.join()
tell(left=before - info()[0])
"""
    answer = container.python(PROGRAM + script)
    assert answer.status == 0, answer
    assert answer.events == ({"waits": True, "still": True, "taken": 2 * MIB}, {"left": 2 * MIB})


def test_an_unmap_or_release_that_the_driver_refuses_changes_nothing(container):
    script = """
start()
before = info()[0]
address, handle = reserve(4 * MIB), create_physical(4 * MIB)[1]
must("cuMemMap", address, 4 * MIB, 0, handle, 0)
results = [call("cuMemUnmap", address, 2 * MIB), call("cuMemUnmap", address, 6 * MIB), call("cuMemRelease", 12345)]
must("cuMemRelease", handle)
held = before - info()[0]
must("cuMemUnmap", address, 4 * MIB)
tell(results=results, held=held, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"results": [INVALID_VALUE] * 3, "held": 4 * MIB, "left": 0}


# --- contexts that end ------------------------------------------------------------------------------------------


def test_a_destroyed_context_gives_back_itself_and_what_lived_in_it(container):
    script = """
start()
before = info()[0]
result, context = into("cuCtxCreate_v2", 0, 0)
alloc(64 * MIB)
inside = before - info()[0]
must("cuCtxDestroy_v2", context)
use(0)
tell(inside=inside, left=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"inside": (64 + CONTEXT_MIB) * MIB, "left": 0}


@pytest.mark.parametrize("end", ["cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxRelease_v2"])
def test_the_end_of_the_primary_context_gives_back_all_of_it(container, end):
    script = f"""
start()
alloc(64 * MIB)
must("{end}", 0)
tell(ended=True)
input()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"ended": True}
        assert container.line_bytes() == 0
        assert container.snapshot().slots[0].devices[0].contexts == 0


ENDS = ["cuCtxDestroy_v2", "cuCtxDestroy", "cuCtxDetach", "cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("end", ENDS)
def test_context_ending_with_earlier_fault_gives_back_all_memory(node, end):
    """The driver ends it all the same. Timed launches and a free in stream order have events in it, which go with it."""
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, sm_percent=90),)))
    make = ("cuCtxCreate_v2", 0, 0) if "Primary" not in end else ("cuDevicePrimaryCtxRetain", 0)
    script = f"""
from tests.fakes.kernels import *
import sys
must("cuInit", 0)
def work():
    result, context = into(*{make})
    must("cuCtxSetCurrent", context)
    spin(load(), 1000)
    must("cuMemFreeAsync", alloc(64 * MIB)[1], 0)
    must("cuMemAlloc_v2", ctypes.byref(out()), 1200 * MIB)
    return context
context = work()
tell(works=True)
sys.stdin.readline()
tell(fault=call("cuCtxSynchronize"), end=call({end!r}, {"0" if "Primary" in end else "context"}))
sys.stdin.readline()
work()
tell(rest=alloc(info()[0])[0])
sys.stdin.readline()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"works": True}
        inject = [node.build / "bin/aliquot-sim", "inject", "ecc", "uncorrected", "1", "--gpu", "0", "--dir", node.directory]
        subprocess.run(inject, check=True, stdout=subprocess.DEVNULL)
        reported = program.ask("end")
        assert reported["fault"] == reported["end"] != SUCCESS
        assert container.line_bytes() == 0
        assert container.snapshot().slots[0].devices[0].contexts == 0
        assert program.ask("again") == {"rest": SUCCESS}
        assert container.line_bytes() == LIMIT_MIB * MIB


@pytest.mark.parametrize("end", ENDS[:3])
def test_a_context_that_the_driver_refuses_to_end_stays_charged(node, tmp_path, end):
    simulated, driver = node.build / "lib/sim" / contract.CUDA_SONAME, tmp_path / "driver.so"
    build_recording_driver(read_abi(), driver)
    files = {contract.CUDA_SONAME: driver, contract.NVML_SONAME: node.build / "lib/sim" / contract.NVML_SONAME}
    container = make_container(
        tmp_path / "refusing", node.build, node.directory, [DeviceLimit(node.uuids[0], LIMIT_MIB * MIB)], driver=files
    )
    script = f"""
must("cuInit", 0)
result, context = into("cuCtxCreate_v2", 0, 0)
before = info()[0]
refused = call({end!r}, context)
tell(refused=refused != SUCCESS, left=before - info()[0])
"""
    reported = facts(container.python(PROGRAM + script, env={"RECORDED_DRIVER": str(simulated), "RECORDED_REFUSES": f" {end} "}))
    assert reported == {"refused": True, "left": 0}


def test_releasing_one_of_two_references_keeps_the_primary_context(container):
    script = """
start()
before = info()[0]
into("cuDevicePrimaryCtxRetain", 0)
alloc(64 * MIB)
must("cuDevicePrimaryCtxRelease_v2", 0)
tell(held=before - info()[0])
"""
    assert facts(container.python(PROGRAM + script)) == {"held": 64 * MIB}


# --- primary contexts that are made or end past the shim ------------------------------------------------------------

PAST_US = """
def past_us(name, *arguments):
    result = getattr(driver, name)(*arguments)
    if result:
        raise SystemExit(f"{name} past the shim: {result}")
def make_past_us():
    context = out()
    past_us("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    past_us("cuCtxSetCurrent", context)
    return context.value
must("cuDriverGetVersion", ctypes.byref(out()))  # opens the front, and does not begin to limit yet
driver = ctypes.CDLL(DRIVER)
"""
"""As old runtimes make primary contexts, through a private table of the driver's, and as those are that are older than the limits."""


def past_us(container, script: str):
    return container.start_python(f"{PROGRAM}DRIVER = {str(driver_path(container))!r}\n{PAST_US}{script}")


def contexts_and_bytes(container):
    device = container.snapshot().slots[0].devices[0]
    return device.contexts, device.context_bytes, container.line_bytes()


@pytest.mark.parametrize("known_mib", [0, 600], ids=["measured", "as the agent says"])
@pytest.mark.parametrize("first", ["cuInit of the shim", "cuInit of the driver"])
@pytest.mark.parametrize("version", ["", "_v2"])
@pytest.mark.parametrize("end", ["cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxRelease"])
def test_primary_context_made_past_shim_is_charged_while_alive_then_fully_credited(node, end, version, first, known_mib):
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, context_bytes=known_mib * MIB),)))
    script = f"""
must("cuInit", 0) if {first!r} == "cuInit of the shim" else past_us("cuInit", 0)
make_past_us()
tell(made=alloc(64 * MIB)[0])
input()
tell(ended=call({end + version!r}, 0))
input()
"""
    own = (known_mib or CONTEXT_MIB) * MIB
    with past_us(container, script) as program:
        assert program.listen() == {"made": SUCCESS}
        assert contexts_and_bytes(container) == (1, own, own + 64 * MIB)
        assert program.ask("end") == {"ended": SUCCESS}
        assert contexts_and_bytes(container) == (0, 0, 0)
    assert container.snapshot().measured_context_bytes[0] == 0, "modules may be in what was measured"


@pytest.mark.parametrize("known_mib", [0, 600], ids=["measured", "as the agent says"])
@pytest.mark.parametrize("seen_first", [True, False], ids=["used, then retained", "retained, then used"])
def test_primary_context_made_past_shim_and_retained_through_it_is_charged_once(node, seen_first, known_mib):
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, context_bytes=known_mib * MIB),)))
    script = f"""
must("cuInit", 0)
make_past_us()
if {seen_first}:
    alloc(64 * MIB)
    use(0)
else:
    use(0)
    alloc(64 * MIB)
tell(made=True)
input()
must("cuDevicePrimaryCtxRelease_v2", 0)
tell(released=True)
input()
must("cuDevicePrimaryCtxRelease_v2", 0)
tell(ended=True)
input()
"""
    held = (1, (known_mib or CONTEXT_MIB) * MIB, ((known_mib or CONTEXT_MIB) + 64) * MIB)
    with past_us(container, script) as program:
        assert program.listen() == {"made": True}
        assert contexts_and_bytes(container) == held
        assert program.ask("release") == {"released": True}
        assert contexts_and_bytes(container) == held
        assert program.ask("release") == {"ended": True}
        assert contexts_and_bytes(container) == (0, 0, 0)


def test_primary_context_made_past_shim_is_charged_at_first_launch(node):
    """The thread has launched the same in a context of its own before, on the same device, until no launch was timed."""
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, context_bytes=600 * MIB, sm_percent=90),)))
    script = """
from tests.fakes.kernels import load, spin
must("cuInit", 0)
into("cuCtxCreate_v2", 0, 0)
function = load()
for _ in range(20):
    spin(function, 1)
    must("cuCtxSynchronize")
make_past_us()
spin(function, 1)
tell(launched=True)
input()
"""
    with past_us(container, script) as program:
        assert program.listen() == {"launched": True}
        assert contexts_and_bytes(container)[:2] == (2, 1200 * MIB)


def test_primary_context_made_past_shim_can_fill_limit_completely(node):
    container = node.container(CONTEXT_MIB)
    with past_us(container, 'must("cuInit", 0)\nmake_past_us()\ntell(free=info()[0], refused=alloc(1)[0])') as program:
        assert program.listen() == {"free": 0, "refused": OUT_OF_MEMORY}


def test_primary_context_ended_past_shim_is_credited_when_next_is_made(container):
    script = """
start()
alloc(64 * MIB)
past_us("cuDevicePrimaryCtxReset_v2", 0)
use(0)
tell(made=True)
input()
"""
    with past_us(container, script) as program:
        assert program.listen() == {"made": True}
        assert contexts_and_bytes(container) == (1, CONTEXT_MIB * MIB, CONTEXT_MIB * MIB)


def test_primary_context_replaced_past_shim_is_charged(container):
    """The driver gives an address out again, and a thread may remember it as the one that ended."""
    script = """
must("cuInit", 0)
use(0)
was = out()
must("cuCtxGetCurrent", ctypes.byref(was))
first, _ = alloc(MIB)
must("cuDevicePrimaryCtxReset_v2", 0)
now = make_past_us()
while now != was.value:
    past_us("cuDevicePrimaryCtxReset_v2", 0)
    now = make_past_us()
tell(first=first, again=alloc(64 * MIB)[0])
input()
"""
    with past_us(container, script) as program:
        assert program.listen() == {"first": SUCCESS, "again": SUCCESS}
        assert contexts_and_bytes(container) == (1, CONTEXT_MIB * MIB, (CONTEXT_MIB + 64) * MIB)


# --- graphs -----------------------------------------------------------------------------------------------------

GRAPH = """
import sys, threading, time
from tests.fakes.kernels import capture, instantiate, make_stream
start()
stream = make_stream()
def graph_of(size):
    def work():
        result, address = into("cuMemAllocAsync", size, stream)
        assert result == 0
        must("cuMemFreeAsync", address, stream)
    return capture(stream, work)
def launch(ready):
    return call("cuGraphLaunch", ready, stream) or call("cuStreamSynchronize", stream)
"""


def test_graph_without_new_memory_runs_although_limit_fell_below_use(container):
    script = """
ready = instantiate(graph_of(512 * MIB))
first = launch(ready)
must("cuMemAlloc_v2", ctypes.byref(out()), 256 * MIB)
tell(first=first)
sys.stdin.readline()
other, another = into("cuGraphInstantiateWithFlags", graph_of(512 * MIB), 0)
tell(again=launch(ready), instantiate=other, other=launch(another))
"""
    with container.start_python(PROGRAM + GRAPH + script) as program:
        assert program.listen() == {"first": SUCCESS}
        container.set_memory(container.line_bytes() - 4 * MIB)
        assert program.ask("go") == {"again": SUCCESS, "instantiate": SUCCESS, "other": SUCCESS}


def test_what_a_child_graph_allocates_counts_for_the_graph_around_it(container):
    """A child that is given away to its node (CUDA 12.9) may allocate."""
    script = """
NODE_TYPE_GRAPH, OWNERSHIP_MOVE = 4, 1
def around(child):
    graph, node, params = into("cuGraphCreate", 0)[1], out(), (ctypes.c_uint64 * 32)()
    params[0], params[2], params[3] = NODE_TYPE_GRAPH, child, OWNERSHIP_MOVE
    must("cuGraphAddNode", ctypes.byref(node), graph, None, 0, params)
    return graph
fits, too_large = (instantiate(around(graph_of(size))) for size in (512 * MIB, SIZE))
tell(fits=launch(fits), too_large=launch(too_large))
"""
    program = PROGRAM + GRAPH + script.replace("SIZE", f"{LIMIT_MIB} * MIB")
    assert facts(container.python(program)) == {"fits": SUCCESS, "too_large": OUT_OF_MEMORY}


def test_launching_a_graph_again_takes_no_room_from_other_threads(container):
    script = """
ready, context = instantiate(graph_of(600 * MIB)), out()
must("cuCtxGetCurrent", ctypes.byref(context))
first, stop, launches = launch(ready), [], []
def keep_launching():
    must("cuCtxSetCurrent", context.value)
    while not stop:
        launches.append(launch(ready))
thread = threading.Thread(target=keep_launching)
thread.start()
end, results = time.monotonic() + 1, set()
while time.monotonic() < end:
    result, address = alloc(500 * MIB)
    results.add(result)
    if not result:
        must("cuMemFree_v2", address)
stop.append(True)
thread.join()
tell(first=first, again=sorted(set(launches)), results=sorted(results))
"""
    assert facts(container.python(PROGRAM + GRAPH + script)) == {"first": SUCCESS, "again": [SUCCESS], "results": [SUCCESS]}


def test_graph_with_trimmed_memory_needs_room_again(container):
    script = """
ready, other = instantiate(graph_of(600 * MIB)), instantiate(graph_of(1200 * MIB))
first = launch(ready)
must("cuDeviceGraphMemTrim", 0)
address = alloc(1000 * MIB)[1]
trimmed = launch(ready)
must("cuMemFree_v2", address)
freed, larger = launch(ready), launch(other)
must("cuMemAlloc_v2", ctypes.byref(out()), 300 * MIB)
tell(first=first, trimmed=trimmed, freed=freed, larger=larger, again=launch(other))
"""
    assert facts(container.python(PROGRAM + GRAPH + script)) == {
        "first": SUCCESS, "trimmed": OUT_OF_MEMORY, "freed": SUCCESS, "larger": SUCCESS, "again": SUCCESS,
    }  # fmt: skip


@pytest.mark.parametrize("allocate", ["cuMemAlloc_v2", "cuMemAllocAsync"])
def test_memory_with_free_refused_by_capture_stays_charged_until_freed(container, allocate):
    script = f"""
result, address = into({allocate!r}, 64 * MIB, *([stream] if "Async" in {allocate!r} else []))
must("cuStreamBeginCapture_v2", stream, 0)
refused = call("cuMemFreeAsync", address, stream)
call("cuStreamEndCapture", stream, ctypes.byref(out()))
tell(result=result, is_refused=refused != SUCCESS)
sys.stdin.readline()
tell(freed=call("cuMemFreeAsync", address, stream), waited=call("cuStreamSynchronize", stream), asked=info() is not None)
sys.stdin.readline()
"""
    with container.start_python(PROGRAM + GRAPH + script) as program:
        assert program.listen() == {"result": SUCCESS, "is_refused": True}
        charged = container.line_bytes()
        assert program.ask("free") == {"freed": SUCCESS, "waited": SUCCESS, "asked": True}
        assert container.line_bytes() == charged - 64 * MIB


# --- limits that change, devices, processes -----------------------------------------------------------------------


def test_limits_are_raised_and_lowered_while_the_program_runs(container):
    with container.repl() as program:
        assert program.ask(f"alloc alloc {1024 * MIB}")["result"] == SUCCESS
        assert program.ask(f"alloc alloc {1024 * MIB}")["result"] == OUT_OF_MEMORY
        container.set_memory(4096 * MIB)
        assert program.ask(f"alloc alloc {1024 * MIB}")["result"] == SUCCESS
        assert program.ask("info")["total_bytes"] == 4096 * MIB
        container.set_memory(1024 * MIB)
        lowered = program.ask("info")
        assert (lowered["total_bytes"], lowered["free_bytes"]) == (1024 * MIB, 0)
        assert program.ask("alloc alloc 1")["result"] == OUT_OF_MEMORY
        assert program.ask("free alloc 0")["result"] == SUCCESS


def test_a_device_that_is_visible_but_not_granted_gives_no_memory(node):
    limits = Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB),))
    container = node.container_with(limits, uuids=node.uuids[:2])
    refused = container.client("fill", "--device", "1")
    assert refused.last["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert facts(container.client("fill"))["total_bytes"] == LIMIT_MIB * MIB
    assert node.physical_used_bytes(node.uuids[1]) == 0


def test_a_device_that_is_granted_later_can_be_used_then(node):
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB),)), uuids=node.uuids[:2])
    script = """
start()
refused = into("cuDevicePrimaryCtxRetain", 1)[0]
tell(refused=refused)
input()
use(1)
tell(free=info()[0])
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"refused": OUT_OF_MEMORY}
        limits = container.limits()
        container.set_limits(replace(limits, devices=(*limits.devices, DeviceLimit(node.uuids[1], 1024 * MIB))))
        assert program.ask("go") == {"free": (1024 - CONTEXT_MIB) * MIB}


@pytest.mark.parametrize("order", ["0,1,2", "2,0,1", "1"])
def test_limits_follow_uuid_in_any_device_order(node, order):
    amounts = (1024, 2048, 4096)
    container = node.container(*amounts, first=2)
    answer = container.client("info", env={"CUDA_VISIBLE_DEVICES": order})
    devices = [event for event in answer.events if event["event"] == "device"]
    assert [device["device_total_bytes"] // MIB for device in devices] == [amounts[int(index)] for index in order.split(",")]
    by_uuid = dict(zip((uuid.removeprefix("GPU-") for uuid in node.uuids[2:5]), amounts, strict=True))
    assert [by_uuid[device["uuid"]] for device in devices] == [device["total_bytes"] // MIB for device in devices]


def test_each_device_has_a_limit_of_its_own(node):
    container = node.container(1024, 2048)
    for device, amount in enumerate((1024, 2048)):
        filled = facts(container.client("fill", "--device", str(device)))
        assert filled["held_bytes"] == (amount - CONTEXT_MIB) * MIB


def test_two_processes_share_one_limit(container):
    with container.repl() as first, container.repl() as second:
        rest = first.ask("info")["free_bytes"]
        assert rest == (LIMIT_MIB - 2 * CONTEXT_MIB) * MIB
        assert first.ask(f"alloc alloc {rest // 2}")["result"] == SUCCESS
        assert second.ask(f"alloc alloc {rest // 2 + 512}")["result"] == OUT_OF_MEMORY
        assert second.ask(f"alloc alloc {rest // 2}")["result"] == SUCCESS
        assert first.ask("info")["free_bytes"] == 0


@pytest.mark.parametrize("processes", [2, 8])
def test_processes_racing_for_memory_take_exactly_limit(node, processes):
    limit_mib = processes * CONTEXT_MIB + 1000
    container = node.container(limit_mib)
    script = """
start()
tell(ready=True)
input()
step, held = 16 * MIB, 0
while step >= 512:
    if alloc(step)[0] == SUCCESS:
        held += step
    else:
        step //= 2
tell(held=held)
input()
"""
    with contextlib.ExitStack() as stack:
        racers = [stack.enter_context(container.start_python(PROGRAM + script)) for _ in range(processes)]
        assert [racer.listen() for racer in racers] == [{"ready": True}] * processes
        for racer in racers:
            racer.tell("go")
        assert sum(racer.listen()["held"] for racer in racers) == 1000 * MIB
        assert container.line_bytes() == container.used_bytes() == limit_mib * MIB
