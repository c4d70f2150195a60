# SPDX-License-Identifier: Apache-2.0
"""Compute ceilings: what tenants get of a device, what counts as work, and that changes act while programs run.

Figures to the point are the benchmark's (tests/bench/bench_shim.py), on a quiet machine; here the bounds are wide, for a busy one.
The mathematics of the limiter is in cuda_shim/tests/test_limit.c, where time is an argument.
"""

import contextlib
import itertools
import json
import os
import select
import statistics
import struct
import subprocess
import time
from dataclasses import replace

import pytest

from agent.core import region_layout
from agent.core.region_layout import DeviceLimit, Limits
from tests.bench.bench_shim import SHARE_CASES
from tests.fakes.behaviours import MIX, ONE_PROCESS_EACH, Behaviour, every_behaviour, script
from tests.fakes.container import MIB, Container, Node
from tests.fakes.wall_clock import WallClock

LIMIT_MIB = 8192
ERROR_POINTS = 6
"""What a share may be off, in percent of the device."""
WAITING_OFFSET = 108  # in struct aq_slot_device

PROGRAM = "from tests.fakes.cuda import *\nfrom tests.fakes.kernels import *\nimport ctypes, os, sys, time\n"


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


def test_the_benchmark_has_the_20_rows_that_the_aim_is_over():
    aimed = [case for case in SHARE_CASES if case.in_research]
    assert len(set(aimed)) == len(aimed) == 20
    assert {case.blocks for case in aimed} == {132, 1024, 16_384}


def tenant(node: Node, sm_percent: int) -> Container:
    return node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, sm_percent=sm_percent),)))


def change(container: Container, **fields) -> None:
    """Rewrite the first device's limits, as the agent does."""
    limits = container.limits()
    container.set_limits(replace(limits, devices=(replace(limits.devices[0], **fields),)))


def work(container: Container, seconds: float, *arguments: str):
    command = ["work", "--seconds", str(seconds), "--kernel-us", "1000", *arguments]
    return container.start([container.build / "bin/aliquot-cuda-client", *command])


def seconds_of(program) -> list[float]:
    """Percent of the device in each second of a worker's life, to its end."""
    events = [json.loads(line) for line in program.process.stdout]
    assert events[-1]["event"] == "work", events[-1:]
    progress = [event for event in events if event["event"] == "progress"]
    times = [0.0, *(event["seconds"] for event in progress)]
    return [100 * event["gpu_seconds"] / (event["seconds"] - since) for event, since in zip(progress, times, strict=False)]


def assert_held(shares: list[float], ceiling: float, error: float = ERROR_POINTS) -> None:
    """A busy machine lowers some samples and raises no sample: the median is not above the SM limit, and the best is not below."""
    assert statistics.median(shares) <= ceiling + error, shares
    assert max(shares) >= ceiling - error, shares


# --- ceilings -------------------------------------------------------------------------------------------------------


def test_two_tenants_each_get_their_ceiling_of_one_device(node):
    with work(tenant(node, 20), 7) as small, work(tenant(node, 50), 7) as large:
        shares = {20: seconds_of(small)[1:], 50: seconds_of(large)[1:]}
    for ceiling, seconds in shares.items():  # a machine that is busy takes from both, and leaves to each more than half
        assert statistics.median(seconds) <= ceiling + ERROR_POINTS, shares
        assert max(seconds) >= ceiling / 2, shares
    assert max(shares[50]) >= 1.5 * max(shares[20]), shares


def test_two_processes_of_a_container_share_its_ceiling(node):
    container = tenant(node, 40)
    with work(container, 6) as first, work(container, 6) as second:
        shares = [seconds_of(program)[1:] for program in (first, second)]
    assert_held([sum(both) for both in zip(*shares, strict=False)], 40)
    assert min(statistics.median(one) for one in shares) > 5, shares


@pytest.mark.parametrize("launch", ["kernel", "ex", "cooperative", "graph"])
def test_every_kind_of_launch_is_paced(node, launch):
    with work(tenant(node, 25), 5, "--launch", launch) as program:
        assert_held(seconds_of(program)[1:], 25)


FORMS = """
from tests.fakes import kernels
start()
function, stream = load(), make_stream()
arguments = kernels.arguments(1000)
class Launch(ctypes.Structure):  # CUDA_LAUNCH_PARAMS
    _fields_ = [("function", ctypes.c_void_p), ("shape", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("arguments", ctypes.c_void_p)]
launch = Launch(function, (ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, 0), stream, ctypes.addressof(arguments))
must("cuFuncSetBlockShape", function, 1, 1, 1)
must("cuParamSetSize", function, 8)
must("cuParamSetv", function, 0, ctypes.byref(ctypes.c_uint64(1000)), 8)
ready = instantiate(capture(stream, lambda: spin(function, 1000, stream)))
submit = {
    "multi-device": lambda: must("cuLaunchCooperativeKernelMultiDevice", ctypes.byref(launch), 1, 0),
    "cuLaunch": lambda: must("cuLaunch", function),
    "cuLaunchGrid": lambda: must("cuLaunchGrid", function, 1, 1),
    "cuLaunchGridAsync": lambda: must("cuLaunchGridAsync", function, 1, 1, stream),
    "kernel, per thread": lambda: spin(function, 1000, suffix=PER_THREAD),
    "ex, per thread": lambda: spin_ex(function, 1000, suffix=PER_THREAD),
    "cooperative, per thread": lambda: spin_cooperative(function, 1000, suffix=PER_THREAD),
    "graph, per thread": lambda: must(f"cuGraphLaunch{PER_THREAD}", ready, None),
}[FORM]
for _ in range(5):
    tell(share=100 * work_for(1, 1000, submit) / 1e6)
"""


@pytest.mark.parametrize(
    "form",
    [
        "multi-device", "cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync",
        "kernel, per thread", "ex, per thread", "cooperative, per thread", "graph, per thread",
    ],
)  # fmt: skip
def test_the_rarer_forms_of_a_launch_are_paced_too(node, form):
    answer = tenant(node, 25).python(PROGRAM + f"FORM = {form!r}\n" + FORMS)
    assert answer.status == 0, answer.stderr
    assert_held([event["share"] for event in answer.events[1:]], 25)


UNEVEN = """
start()
function, stream = load(), make_stream()
def launch():
    for microseconds in LENGTHS:
        spin(function, microseconds, stream)
    must("cuStreamSynchronize", stream)
for _ in range(8):
    tell(share=100 * work_for(1, sum(LENGTHS), launch) / 1e6)
LENGTHS = [10_000]
for _ in range(5):
    tell(share=100 * work_for(1, 10_000, launch) / 1e6)
"""


@pytest.mark.parametrize("lengths", [[100, 2000], [10, 10_000]], ids=str)
def test_launches_of_one_shape_alternating_long_and_short_are_throttled(node, lengths):
    """What is paid at first is a part of what is used, so small that it would never make the program wait."""
    answer = tenant(node, 25).start_python(PROGRAM + f"LENGTHS = {lengths}\n" + UNEVEN)
    with answer as program:
        shares = [json.loads(line)["share"] for line in program.process.stdout]
    assert_held(shares[5:8], 25, 2 * ERROR_POINTS)
    assert_held(shares[10:], 25, 2 * ERROR_POINTS)


EVER_NEW = """
from tests.fakes import kernels
start()
function, stream, arguments, launched = load(), make_stream(), kernels.arguments(1000), 0
def launch():
    global launched
    launched += 1
    must("cuLaunchKernel", function, launched, 1, 1, 1, 1, 1, 0, stream, arguments, None)
for _ in range(5):
    tell(share=100 * work_for(1, 1000, launch) / 1e6)
"""


def test_launches_of_ever_new_shapes_are_held(node):
    """As those of a model that is given a text of another length each time."""
    answer = tenant(node, 25).python(PROGRAM + EVER_NEW)
    assert answer.status == 0, answer.stderr
    assert_held([event["share"] for event in answer.events[1:]], 25)


LOW_LIMIT = 10
FORMS_OF_LAUNCH = ("one function", "cooperative", "cuLaunchKernelEx", "device set", "per thread")
"""They differ in the call alone, and each is paced within closer bounds above."""
EVERY_KIND = [
    pytest.param(one, marks=pytest.mark.soak if one.kind in FORMS_OF_LAUNCH or one.seed else (), id=str(one))
    for one in every_behaviour(seeds=2)
    if one.size == "long" or one.kind == MIX
]
"""The wide form is the benchmark's (tests/bench/shares_by_behaviour.py)."""


@pytest.mark.parametrize("behaviour", EVERY_KIND)
def test_no_way_to_launch_gets_more_than_the_ceiling(node, behaviour):
    """Launches of up to 50 ms, each of which may be one that the shim has never seen."""
    answer = tenant(node, LOW_LIMIT).python(script(behaviour, 3))
    assert answer.status == 0, answer.stderr
    seconds, used_seconds = answer.last["all"]
    assert 100 * used_seconds / seconds < LOW_LIMIT + ERROR_POINTS
    seconds, used_seconds = answer.last["first"]
    assert used_seconds <= 0.1 * seconds + 3 * 0.05, "the first second: the ceiling, and three of the longest launches"


@pytest.mark.parametrize("behaviour", [Behaviour(kind, "long") for kind in ("new function", "new graph", "new process")], ids=str)
def test_neighbour_keeps_its_part_beside_launches_that_are_always_new(node, behaviour):
    with tenant(node, LOW_LIMIT).start_python(script(behaviour, 8)) as program:
        assert program.listen() == {"ready": True}
        with work(tenant(node, 90), 6) as neighbour:
            assert_held(seconds_of(neighbour)[1:], 90)


def percent_of(time: list[float]) -> float:
    """Return the share of a behaviour's answer: seconds, and device seconds used."""
    seconds, used_seconds = time
    return 100 * used_seconds / seconds


@pytest.mark.parametrize("kind", ONE_PROCESS_EACH)
def test_processes_that_end_beside_a_living_sibling_are_held(node, kind):
    """The driver reports only the sibling: what the ended ones paid neither comes back nor pays for the sibling."""
    container = tenant(node, LOW_LIMIT)
    with work(container, 6) as sibling, container.start_python(script(Behaviour(kind, "long"), 6)) as program:
        assert program.listen() == {"ready": True}
        share = percent_of(program.listen()["all"])
        *_, last = map(json.loads, sibling.process.stdout)
    assert share + 100 * last["share"] < LOW_LIMIT + ERROR_POINTS


OWED_OFFSET = region_layout.REGION_DEVICE_OFFSET + 40
"""Of the first device's settlement.owed_ns: below zero, the container will get that back."""


def paid_seconds(container: Container) -> float:
    """Return the GPU time that the container has paid on its first device, without what it will get back."""
    region = container.region_path.read_bytes()
    (owed_ns,) = struct.unpack_from("<q", region, OWED_OFFSET)
    return (region_layout.decode_compute(region)[0].paid_ns + min(0, owed_ns)) / 1e9


def paid_per_used_second(node: Node, kind: str) -> float:
    """Run processes that end, under a low ceiling and beside a neighbour that stretches each of their launches to twice its length."""
    container = tenant(node, LOW_LIMIT)
    with work(tenant(node, 90), 12), container.start_python(script(Behaviour(kind, "long"), 8)) as program:
        assert program.listen() == {"ready": True}
        seconds, used_seconds = program.listen()["all"]
    assert used_seconds < (LOW_LIMIT + 3) / 100 * seconds
    return paid_seconds(container) / used_seconds


@pytest.mark.parametrize("kind", ONE_PROCESS_EACH)
def test_processes_that_end_pay_what_they_used_beside_a_busy_neighbour(node, kind):
    """The share itself depends on how fast processes start. The driver's figure comes when the program ends, or after it was killed."""
    assert 0.9 < paid_per_used_second(node, kind) < 1.5


def test_killed_processes_gain_nothing_from_a_driver_that_names_only_living_ones(node):
    """What NVIDIA's library reports of ended processes is not known. Without a report they have used all that they paid."""
    command = [node.build / "bin/aliquot-sim", "inject", "living-samples", "on", "--dir", node.directory]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert paid_per_used_second(node, "killed process") > 1.3


ONE_LAUNCH = """
start()
spin(load(), MICROSECONDS)
must("cuCtxSynchronize")
tell(done=time.monotonic())
"""


@pytest.mark.parametrize(("microseconds", "least", "most"), [(1000, 0, 0.25), (50_000, 0.25, 1)], ids=["little", "much"])
def test_program_ends_later_only_with_much_to_settle(node, microseconds, least, most):
    """It waits for the driver's figure if the container would have to wait longer without it."""
    with tenant(node, LOW_LIMIT).start_python(PROGRAM + f"MICROSECONDS = {microseconds}\n" + ONE_LAUNCH) as program:
        done = program.listen()["done"]
        assert program.process.wait(10) == 0
        assert least <= time.monotonic() - done < most


HOSTILE_WORDS = range(24, 128, 8)
"""Of the device's line: the settlement and the bucket."""
HOSTILE_VALUES = (-(2**63), -(2**62), -1, 0, 1, 2**16, 2**32, 2**62, 2**63 - 1)
LAUNCHES = """
start()
function = load()
tell(ready=True)
for line in sys.stdin:
    begin = time.monotonic()
    for _ in range(4):
        spin(function, 500)
        must("cuCtxSynchronize")
    tell(seconds=time.monotonic() - begin)
"""


def test_any_value_in_any_word_of_own_region_stops_no_launch(node):
    container = tenant(node, 50)
    with container.start_python(PROGRAM + LAUNCHES) as program, container.region_path.open("r+b", buffering=0) as region:
        assert program.listen() == {"ready": True}
        program.ask("")
        line = region_layout.REGION_DEVICE_OFFSET
        usual = os.pread(region.fileno(), region_layout.REGION_DEVICE.size, line)
        for offset, value in itertools.product(HOSTILE_WORDS, HOSTILE_VALUES):
            os.pwrite(region.fileno(), usual[24:], line + 24)
            os.pwrite(region.fileno(), struct.pack("<q", value), line + offset)
            assert program.ask("")["seconds"] < 2, (offset, value)


@pytest.mark.parametrize("kernel_us", [5000, 10_000])
def test_kernels_longer_than_in_flight_limit_are_throttled_too(node, kernel_us):
    with work(tenant(node, 60), 5, "--kernel-us", str(kernel_us)) as program:
        assert_held(seconds_of(program)[1:], 60, 10)


def test_without_a_ceiling_work_gets_the_device(node):
    with work(tenant(node, 0), 3) as program:
        assert max(seconds_of(program)[1:]) > 60


COUNTED = """
import threading
start()
function, context = load(), out()
must("cuCtxGetCurrent", ctypes.byref(context))
def launch(count, wait):
    must("cuCtxSetCurrent", context.value)
    for _ in range(count):
        spin(function, 1)
    if wait:
        must("cuCtxSynchronize")
for line in sys.stdin:
    count, wait = map(int, line.split())
    thread = threading.Thread(target=launch, args=(count, wait))
    thread.start()
    thread.join()
    tell(done=True)
"""
"""Launches the given number of kernels, each time in a thread of their own, which then waits for the device or not."""


def test_unlimited_launches_are_counted_when_thread_waits_or_made_many(node):
    container = tenant(node, 0)

    def counted() -> int:
        return container.snapshot().slots[0].devices[0].launches

    with container.start_python(PROGRAM + COUNTED) as program:
        program.ask("1 0")
        assert counted() == 1, "a thread's first, at once"
        program.ask("100 1")
        assert counted() == 101
        program.ask("5000 0")
        assert 101 + 5000 - 1024 <= counted() < 101 + 5000
        program.ask("5000 1")
        assert counted() >= 101 + 5000 - 1024 + 5000
        change(container, sm_percent=99)
        before = counted()
        program.ask("2000 1")
        assert before + 1000 < counted() <= before + 2000, "those of the last batch are reported with the next"
        used = container.snapshot().slots[0].devices[0]
    assert used.busy_ns > 0


def test_free_launches_take_no_paid_time(node):
    container = tenant(node, 0)
    with container.start_python(PROGRAM + COUNTED) as program:
        program.ask("2000 1")
        used = container.snapshot().slots[0].devices[0]
    assert (used.launches, used.busy_ns, used.throttled_ns) == (2000, 0, 0)


# --- changes while programs run -------------------------------------------------------------------------------------

STEADY = """
start()
function = load()
tell(ready=True)
done = 0
began = time.monotonic()
while True:
    share = 100 * work_for(0.25, 1000, lambda: spin(function, 1000)) / 1e6 / 0.25
    tell(share=share, at=time.monotonic(), wall=time.time())
"""
"""Reports its share of the device every quarter of a second, for ever."""


def steady(container: Container):
    return container.start_python(PROGRAM + STEADY)


def shares_after(program, since: float, samples: int = 6) -> list[float]:
    """Shares of reports that began later than ``since``; a report says what happened in the 0.25 s before it."""
    shares: list[float] = []
    while len(shares) < samples:
        report = program.listen()
        if report["at"] > since + 0.3:
            shares.append(report["share"])
    return shares


def test_a_wall_clock_that_is_set_changes_no_share(node, tmp_path):
    clock, container, day = WallClock(tmp_path), tenant(node, 40), 86_400
    container.settings.update(clock.environment)
    with steady(container) as program:
        assert program.listen() == {"ready": True}
        for seconds in (day, -day):
            clock.jump(seconds)
            assert_held(shares_after(program, time.monotonic() + 1), 40, 2 * ERROR_POINTS)
            assert program.listen()["wall"] - time.time() == pytest.approx(seconds, abs=day / 2), "the program sees the clock that was set"


def test_a_ceiling_that_is_raised_and_lowered_acts_within_a_second(node):
    container = tenant(node, 60)
    with steady(container) as program:
        assert program.listen() == {"ready": True}
        assert_held(shares_after(program, time.monotonic() + 1), 60, 2 * ERROR_POINTS)
        change(container, sm_percent=20)
        assert_held(shares_after(program, time.monotonic() + 1), 20, 2 * ERROR_POINTS)
        change(container, sm_percent=80)
        assert_held(shares_after(program, time.monotonic() + 1), 80, 2 * ERROR_POINTS)


def test_limit_given_to_unlimited_program_and_removed_takes_effect(node):
    container = tenant(node, 0)
    with steady(container) as program:
        assert program.listen() == {"ready": True}
        free = shares_after(program, time.monotonic())
        change(container, sm_percent=20)
        limited = shares_after(program, time.monotonic() + 1)
        change(container, sm_percent=0)
        free_again = shares_after(program, time.monotonic() + 1)
    assert_held(limited, 20, 2 * ERROR_POINTS)
    assert max(free) > 40 < max(free_again)


def waiting(container: Container) -> int:
    """Threads of the container's first process that wait for the right to launch."""
    return container.snapshot().slots[0].devices[0].waiting


def await_waiting(container: Container, count: int) -> None:
    deadline = time.monotonic() + 60
    while waiting(container) != count:
        assert time.monotonic() < deadline, container.snapshot()
        time.sleep(0.01)


LAUNCHER = """
start()
function = load()
work_for(0.3, MICROSECONDS, lambda: spin(function, MICROSECONDS))
tell(ready=True)
for line in sys.stdin:
    begin = time.monotonic()
    spin(function, MICROSECONDS)
    must("cuCtxSynchronize")
    tell(took=time.monotonic() - begin)
"""


@pytest.mark.parametrize("kernel_us", [1000, 10], ids=["paid one by one", "paid in advance"])
@pytest.mark.parametrize("sm_percent", [0, 50])
def test_paused_program_waits_at_next_launch_and_continues_when_resumed(node, sm_percent, kernel_us):
    container = tenant(node, sm_percent)
    with container.start_python(PROGRAM + f"MICROSECONDS = {kernel_us}\n" + LAUNCHER) as program:
        assert program.listen() == {"ready": True}
        assert program.ask("launch")["took"] < 5
        change(container, paused=True)
        program.tell("launch")
        await_waiting(container, 1)
        time.sleep(0.7)
        change(container, paused=False)
        resumed_at = time.monotonic()
        assert program.listen()["took"] > 0.6
        assert time.monotonic() - resumed_at < 5
        assert container.snapshot().slots[0].devices[0].throttled_ns > 0.6e9


THREADS_THAT_LAUNCH = """
import threading
start()
function, context = load(), out()
must("cuCtxGetCurrent", ctypes.byref(context))
def launch():
    must("cuCtxSetCurrent", context.value)
    spin(function, 1000)
    must("cuCtxSynchronize")
launch()
tell(ready=True)
sys.stdin.readline()
threads = [threading.Thread(target=launch) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
tell(done=True)
sys.stdin.read()
"""


def test_the_threads_that_wait_to_launch_are_counted_while_they_do(node):
    container = tenant(node, 50)
    with container.start_python(PROGRAM + THREADS_THAT_LAUNCH) as program:
        assert program.listen() == {"ready": True}
        assert waiting(container) == 0
        change(container, paused=True)
        program.tell("")
        await_waiting(container, 3)
        change(container, paused=False)
        assert program.listen() == {"done": True}
        assert waiting(container) == 0


def test_the_waiting_threads_of_a_killed_program_are_not_its_successors(node):
    """The one before was of a version that knew the count; the process that buried it did not."""
    container = tenant(node, 50)
    with container.repl():
        pass
    offset = region_layout.OWN_GEOMETRY.slot(0)
    with container.region_path.open("r+b") as region:
        region.seek(offset)
        region.write(bytes(4))  # a free slot
        region.seek(offset + region_layout.SLOT_HEADER.size + WAITING_OFFSET)
        region.write(b"\x09")
    with container.repl():
        assert container.snapshot().slots[0].devices[0].waiting == 0


@pytest.mark.parametrize("launch", ["kernel", "ex", "cooperative", "graph"])
def test_every_launch_kind_without_limits_waits_while_container_is_paused(node, launch):
    container = tenant(node, 0)
    with work(container, 600, "--launch", launch) as program:
        pipe = program.process.stdout.fileno()

        def said(seconds: float) -> bytes:
            """What the worker, which reports every second, says next; nothing if that takes longer."""
            return os.read(pipe, 65536) if select.select([pipe], [], [], seconds)[0] else b""

        assert said(20)
        change(container, paused=True)
        await_waiting(container, 1)
        said(0)
        assert said(2.5) == b""
        assert waiting(container) == 1
        change(container, paused=False)
        assert said(20)


PAUSED_PROGRAM = """
import threading
start()
function, context, pointer, host = load(), out(), out(), (ctypes.c_char * 4096)(7)
must("cuCtxGetCurrent", ctypes.byref(context))
spin(function, 300_000)
tell(ready=True)
sys.stdin.readline()
must("cuCtxSynchronize")  # what was launched before ends
def launch():
    must("cuCtxSetCurrent", context.value)
    spin(function, 10)
    tell(launched=True)
threading.Thread(target=launch).start()
sys.stdin.readline()
must("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(4096))
must("cuMemcpyHtoD_v2", pointer, host, ctypes.c_size_t(4096))
must("cuMemsetD8_v2", pointer, ctypes.c_ubyte(1), ctypes.c_size_t(4096))
must("cuMemcpyDtoH_v2", host, pointer, ctypes.c_size_t(4096))
must("cuCtxSynchronize")
must("cuMemFree_v2", pointer)
tell(went_on=True)
"""


@pytest.mark.parametrize("sm_percent", [0, 50])
def test_all_but_launches_goes_on_while_a_program_is_paused(node, sm_percent):
    container = tenant(node, sm_percent)
    with container.start_python(PROGRAM + PAUSED_PROGRAM) as program:
        assert program.listen() == {"ready": True}
        change(container, paused=True)
        program.tell("")
        await_waiting(container, 1)
        assert program.ask("") == {"went_on": True}
        assert waiting(container) == 1
        change(container, paused=False)
        assert program.listen() == {"launched": True}


# --- kills ------------------------------------------------------------------------------------------------------------


def test_memory_of_killed_throttled_program_is_returned_and_siblings_continue(node):
    container = tenant(node, 10)
    with container.repl() as survivor:
        before = survivor.ask("info")["free_bytes"]
        for _ in range(5):
            with work(container, 60, "--mib", "1000") as victim:
                deadline = time.monotonic() + 60
                while container.line_bytes() < 1500 * MIB:
                    assert time.monotonic() < deadline, "the victim takes its memory"
                    time.sleep(0.005)
                time.sleep(0.1)  # into the launches
                victim.kill()
            deadline = time.monotonic() + 60
            while survivor.ask("info")["free_bytes"] != before:
                assert time.monotonic() < deadline, container.snapshot()
                time.sleep(0.05)
        begin = time.monotonic()
        assert survivor.ask("launch 1000 5")["result"] == 0
        assert time.monotonic() - begin < 5


def test_launches_of_one_thread_on_two_devices_are_charged_separately(node):
    """By the current context, and by the stream's where that is another."""
    script = """
start()
function, stream = load(), make_stream()
for _ in range(20):
    spin(function, 1000)
use(1)
other = load()
for _ in range(60):
    spin(other, 1000)
    spin(function, 1000, stream)
must("cuCtxSynchronize")
must("cuStreamSynchronize", stream)
tell(done=True)
input()
"""
    devices = (DeviceLimit(uuid, LIMIT_MIB * MIB, sm_percent=90) for uuid in node.uuids[:2])
    container = node.container_with(Limits(tuple(devices)))
    with container.start_python(PROGRAM + script) as program:
        program.listen()
        first, second = container.snapshot().slots[0].devices[:2]
    assert 70 < first.launches <= 80, "those of the last batch are reported with the next"
    assert 50 < second.launches <= 60


@pytest.mark.parametrize("current", ["own", "primary"])
def test_launches_in_stream_of_other_context_are_timed(node, current):
    """Events live in the context that is current when they are made, and are recorded in its streams only."""
    script = f"""
start()
primary, other = out(), out()
must("cuCtxGetCurrent", ctypes.byref(primary))
must("cuCtxCreate_v2", ctypes.byref(other), 0, 0)
function, stream = load(), make_stream()
must("cuCtxSetCurrent", {"primary" if current == "primary" else "other"}.value)
for _ in range(50):
    spin(function, 10000, stream)
    must("cuStreamSynchronize", stream)
tell(pid=os.getpid())
input()
"""
    container = tenant(node, 60)
    with container.start_python(PROGRAM + script) as program:
        program.listen()
        used = container.snapshot().slots[0].devices[0]
    assert used.busy_ns == pytest.approx(50 * 10_000_000, rel=0.4)


def test_a_context_is_timed_also_after_another_one_had_every_sample(node):
    """Kernels that are new, of many shapes and long: all that a process can time at once lies in the first context's stream."""
    script = """
from tests.fakes import kernels
start()
function = load()
for blocks in range(1, 101):
    must("cuLaunchKernel", function, blocks, 1, 1, 1, 1, 1, 0, 0, kernels.arguments(10000), None)
must("cuCtxSynchronize")
primary, other = out(), out()
must("cuCtxGetCurrent", ctypes.byref(primary))
must("cuCtxCreate_v2", ctypes.byref(other), 0, 0)
function = load()
tell(ready=True)
input()
for _ in range(50):
    spin(function, 10000)
    must("cuCtxSynchronize")
tell(worked=True)
input()
must("cuCtxDestroy_v2", other.value)
must("cuCtxSetCurrent", primary.value)
function = load()
spin(function, 1000)
tell(result=call("cuCtxSynchronize"))
"""
    container = tenant(node, 90)
    with container.start_python(PROGRAM + script) as program:
        program.listen()
        before = container.snapshot().slots[0].devices[0].busy_ns
        program.ask("work")
        busy_ns = container.snapshot().slots[0].devices[0].busy_ns - before
        assert program.ask("end") == {"result": 0}
    assert busy_ns == pytest.approx(50 * 10_000_000, rel=0.4)


# --- streams that are full --------------------------------------------------------------------------------------------

QUEUE_DEPTH = 1024  # SIM_QUEUE_DEPTH
TIMED_LAUNCH = 3  # items in the stream: the kernel between two events
FULL_STREAM = """
import threading
from tests.fakes import kernels
start()
function, full, other, context = load(), make_stream(), make_stream(), out()
must("cuCtxGetCurrent", ctypes.byref(context))
memory, opened, launched, passed = alloc(MIB)[1], threading.Event(), [], []
wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: opened.wait())
must("cuLaunchHostFunc", full, wait, None)

def fill():
    must("cuCtxSetCurrent", context.value)
    for _ in range(AHEAD):
        must("cuMemsetD32Async", memory, 0, 1, full)
    for blocks in range(1, LAUNCHES + 1):  # each of a shape of its own, so that it is timed
        must("cuLaunchKernel", function, blocks, 1, 1, 1, 1, 1, 0, full, kernels.arguments(5), None)
        launched.append(blocks)

def launch_beside():
    must("cuCtxSetCurrent", context.value)
    while len(launched) < FITTING:
        time.sleep(0.001)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        spin(function, 5, other)
    into("cuDevicePrimaryCtxRetain", 0)
    must("cuDevicePrimaryCtxRelease_v2", 0)
    passed.append(len(launched))

threads = [threading.Thread(target=work, daemon=True) for work in (fill, launch_beside)]
[thread.start() for thread in threads]
threads[1].join(20)
if not passed:
    os._exit(1)
opened.set()
threads[0].join()
must("cuCtxSynchronize")
tell(launched_then=passed[0], launched=len(launched))
"""
"""One thread fills a stream that waits for another thread, which launches meanwhile."""


@pytest.mark.parametrize("fills", range(TIMED_LAUNCH), ids=["first event", "kernel", "second event"])
def test_launch_waiting_for_stream_room_delays_no_other_thread(node, fills):
    fitting, launches = 20, 40
    ahead = QUEUE_DEPTH - 1 - fitting * TIMED_LAUNCH - fills
    settings = f"AHEAD, FITTING, LAUNCHES = {ahead}, {fitting}, {launches}\n"
    answer = tenant(node, 50).python(PROGRAM + settings + FULL_STREAM)
    assert answer.status == 0, answer.stderr or "the other thread hangs"
    assert fitting <= answer.last["launched_then"] < launches, "the stream was not full"
    assert answer.last["launched"] == launches


def test_timing_launch_in_per_thread_stream_waits_for_no_other_stream(node):
    """It would, with events in the legacy stream: that one waits for all that block."""
    script = """
start()
function, blocking = load(), into("cuStreamCreate", 0)[1]
sleep = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(1.5))
must("cuLaunchHostFunc", blocking, sleep, None)
begin = time.monotonic()
spin(function, 100, suffix=PER_THREAD)
must(f"cuStreamSynchronize{PER_THREAD}", None)
tell(seconds=time.monotonic() - begin)
must("cuStreamSynchronize", blocking)
"""
    answer = tenant(node, 50).python(PROGRAM + script)
    assert answer.status == 0, answer.stderr
    assert answer.last["seconds"] < 1


# --- captures ---------------------------------------------------------------------------------------------------------

CAPTURE = """
start()
function = load()
stream = make_stream()
for _ in range(20):  # until the kernel's cost is known
    spin(function, 20000)
    must("cuCtxSynchronize")
begin = time.monotonic()
def body():
    for _ in range(200):
        spin(function, 20000, stream)
graph = capture(stream, body)
captured = time.monotonic() - begin
count = out(0)
must("cuGraphGetNodes", graph, None, ctypes.byref(count))
tell(captured=captured, nodes=count.value)
"""


def test_launches_inside_a_capture_are_neither_paid_nor_timed(node):
    """200 kernels of 20 ms under a ceiling of 10 would take 40 s to pay; and no event of ours may end up in the graph."""
    answer = tenant(node, 10).python(PROGRAM + CAPTURE)
    assert answer.status == 0, answer.stderr
    assert answer.last["nodes"] == 200
    assert answer.last["captured"] < 2


BESIDE = """
import threading
start()
function = load()
context = out()
must("cuCtxGetCurrent", ctypes.byref(context))
stop, failures, rounds = threading.Event(), [], []

def launch():
    must("cuCtxSetCurrent", context.value)
    other = make_stream()
    while not stop.is_set():
        spin(function, 200, other)
        must("cuStreamSynchronize", other)

def record():
    must("cuCtxSetCurrent", context.value)
    mine = make_stream()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        graph = capture(mine, lambda: [spin(function, 100, mine) for _ in range(5)], mode=MODE)
        count = out(0)
        must("cuGraphGetNodes", graph, None, ctypes.byref(count))
        if count.value != 5:
            failures.append(count.value)
        ready = instantiate(graph)
        must("cuGraphLaunch", ready, mine)
        must("cuStreamSynchronize", mine)
        must("cuGraphExecDestroy", ready)
        must("cuGraphDestroy", graph)
        rounds.append(1)
    stop.set()

threads = [threading.Thread(target=launch), threading.Thread(target=launch), threading.Thread(target=record)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
tell(failures=failures, rounds=len(rounds))
"""


@pytest.mark.parametrize("mode", ["THREAD_LOCAL", "GLOBAL"])
def test_a_capture_stays_valid_while_other_threads_are_paced(node, mode):
    answer = tenant(node, 50).python(PROGRAM + BESIDE.replace("MODE", mode))
    assert answer.status == 0, answer.stderr
    assert answer.last["failures"] == []
    assert answer.last["rounds"] > 3


def test_the_end_of_a_capture_that_never_was_does_not_end_another(node):
    """Else the launches that follow are treated as work: paid for and timed, with our events in the graph."""
    twice = CAPTURE.replace(
        "def body():\n", "idle = make_stream()\ndef body():\n    call('cuStreamEndCapture', idle, ctypes.byref(out()))\n"
    )
    answer = tenant(node, 10).python(PROGRAM + twice)
    assert answer.status == 0, answer.stderr
    assert answer.last["nodes"] == 200
    assert answer.last["captured"] < 2


MODES = {"GLOBAL": 0, "THREAD_LOCAL": 1}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("asked", ["free memory", "more than fits", "a wait"])
def test_what_the_shim_asks_the_driver_during_a_capture_leaves_it_valid(node, mode, asked):
    """A free in stream order is pending, and a pool holds idle memory: both are checked in these calls."""
    calls = {
        "free memory": "info()",
        "more than fits": f"into('cuMemAllocAsync', {LIMIT_MIB + 1} * MIB, other)",
        "a wait": "must('cuStreamSynchronize', other)",
    }
    script = f"""
start()
function, stream, other = load(), make_stream(), make_stream()
pooled, plain = into("cuMemAllocAsync", 64 * MIB, other)[1], alloc(64 * MIB)[1]
must("cuMemFreeAsync", pooled, other)
must("cuMemFreeAsync", plain, other)
def body():
    spin(function, 100, stream)
    {calls[asked]}
graph = capture(stream, body, mode={mode})
count = out(0)
must("cuGraphGetNodes", graph, None, ctypes.byref(count))
tell(nodes=count.value)
"""
    answer = tenant(node, 0).python(PROGRAM + script)
    assert answer.status == 0, answer.stderr
    assert answer.last["nodes"] == 1


LEFT_CAPTURES = {
    "its stream is destroyed": "must('cuStreamDestroy_v2', left)",
    "its context is destroyed": "must('cuCtxDestroy_v2', other)",
    "its primary context is reset": "must('cuDevicePrimaryCtxReset_v2', 0)",
    "never": "",
}
ENDLESS = """
start()
other = out()
if OTHER:
    must("cuCtxCreate_v2", ctypes.byref(other), 0, 0)
left = make_stream()
must("cuStreamBeginCapture_v2", left, THREAD_LOCAL)
END
use(0)
function, stream = load(), make_stream()
for _ in range(4):
    second, done = time.monotonic() + 1, 0
    while time.monotonic() < second:
        spin(function, 4000, stream)
        must("cuStreamSynchronize", stream)
        done += 4000
    tell(share=100 * done / 1e6)
"""


@pytest.mark.parametrize("end", LEFT_CAPTURES.values(), ids=LEFT_CAPTURES.keys())
def test_unfinished_capture_leaves_limit_in_force(node, end):
    """Kernels that cost eighty times what unknown ones are charged: without timing them the SM limit is exceeded."""
    script = ENDLESS.replace("END\n", end + "\n").replace("OTHER", str("other" in end))
    answer = tenant(node, 25).python(PROGRAM + script)
    assert answer.status == 0, answer.stderr
    assert_held([event["share"] for event in answer.events[-3:]], 25)


def test_container_sees_usage_it_is_charged_for(node):
    """busy_ns of the region is close to the work done, and launches are counted to within what a thread keeps for itself."""
    container = tenant(node, 50)
    program = work(container, 60)
    with program, contextlib.ExitStack() as stack:
        stack.callback(program.kill)
        done = [program.listen() for _ in range(3)]
        used = container.snapshot().slots[0].devices[0]
    assert used.busy_ns == pytest.approx(1e9 * sum(one["gpu_seconds"] for one in done), rel=0.4)
    assert used.launches == pytest.approx(sum(one["kernels"] for one in done), rel=0.4)
    assert used.throttled_ns > 0
