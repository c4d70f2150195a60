# SPDX-License-Identifier: Apache-2.0
"""Priority between containers of one device: low ones fall to a trickle while a high one launches, come back after it, and never starve.

The containers share one page, as the agent mounts it: writable for those of high priority, read-only for those of low. The arithmetic is in
cuda_shim/tests/test_limit.c.
"""

import contextlib
import itertools
import os
import select
import statistics
import struct
import time
from typing import Any

import pytest

from agent.adapters.node_files import PageFile
from agent.core.node_pages import PRIORITY
from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.behaviours import MIX, STEADY, Behaviour, script
from tests.fakes.container import MIB, Container, Node

LIMIT_MIB = 16_384
PAGE_BYTES = 4096
MAGIC = 0x3149525051414C41
TRICKLE_PERCENT = 5
LINE = 3
HIGH, LOW = 10, -10

PROGRAM = "from tests.fakes.cuda import *\nfrom tests.fakes.kernels import *\nimport ctypes, os, sys, time\n"

BURSTS = """
start()
function = load()
work_for(0.2, 1000, lambda: spin(function, 1000))
tell(ready=True)
for line in sys.stdin:
    begin = time.monotonic()
    work_for(float(line), 1000, lambda: spin(function, 1000))
    tell(begin=begin, end=time.monotonic())
"""
"""Works for the given number of seconds."""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def page(tmp_path):
    return PageFile(tmp_path / "shared", PRIORITY).make()


def wanted_until_ns(page) -> int:
    return struct.unpack_from("<q", page.read_bytes(), 64 * LINE)[0]


def want(page, until_ns: int) -> None:
    """What a container of high priority writes when it launches."""
    with page.open("r+b") as file:
        file.seek(64 * LINE)
        file.write(struct.pack("<q", until_ns))


def tenant(node: Node, page, priority: int, sm_percent: int = 0, line: int = LINE) -> Container:
    device = DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, sm_percent=sm_percent, priority=priority, priority_line=line)
    container = node.container_with(Limits((device,)))
    (container.root / "run/aliquot/priority").hardlink_to(page)
    return container


def ready(program):
    assert program.listen() == {"ready": True}
    return program


def reports_until(program, moment: float) -> list[dict[str, float]]:
    """What a steady program reports, to the first report that began at ``moment`` or later."""
    reports = [program.listen()]
    while reports[-1]["begin"] < moment:
        reports.append(program.listen())
    return reports


def test_low_falls_to_the_trickle_while_high_works_and_comes_back_after(node, page):
    low, high = tenant(node, page, LOW), tenant(node, page, HIGH)
    with low.start_python(PROGRAM + STEADY) as background, high.start_python(PROGRAM + BURSTS) as foreground:
        ready(background)
        ready(foreground)
        alone = statistics.median(report["share"] for report in reports_until(background, time.monotonic() + 0.7)[5:])
        burst = foreground.ask("2")
        reports = reports_until(background, burst["end"] + 1.5)
    during = share_between(reports, burst["begin"] + 0.1, burst["end"] - 0.2)
    after = [report["share"] for report in reports if report["begin"] > burst["end"] + 0.3]
    assert alone > 4 * TRICKLE_PERCENT
    assert during < 3 * TRICKLE_PERCENT
    assert statistics.median(after) > 0.6 * alone


def share_between(reports: list[dict[str, float]], begin: float, end: float) -> float:
    """The mean share over a time. A report lasts until the next: one is long while what was in flight before is worked off."""
    spans = [(max(begin, one["begin"]), min(end, after["begin"]), one["share"]) for one, after in itertools.pairwise(reports)]
    return sum(share * max(0.0, until - since) for since, until, share in spans) / (end - begin)


NEW_EACH_TIME = [Behaviour(kind, "long") for kind in ("new function", "new graph", "new module", "new process", "device set")]


@pytest.mark.parametrize("behaviour", [*NEW_EACH_TIME, Behaviour(MIX, "changing")], ids=str)
def test_low_gets_the_trickle_by_every_way_to_launch(node, page, behaviour):
    """Containers of high priority want the device all the time."""
    want(page, until_ns=time.monotonic_ns() + 900_000_000)
    with tenant(node, page, LOW).start_python(script(behaviour, 4)) as program:
        pipe = program.process.stdout
        events: list[dict[str, Any]] = []
        while not events or "all" not in events[-1]:
            want(page, until_ns=time.monotonic_ns() + 900_000_000)
            if select.select([pipe], [], [], 0.1)[0]:
                events.append(program.listen())
    seconds, used_seconds = events[-1]["all"]
    assert 100 * used_seconds / seconds < TRICKLE_PERCENT + 3


def test_low_never_starves(node, page):
    low, high = tenant(node, page, LOW), tenant(node, page, HIGH)
    with low.start_python(PROGRAM + STEADY) as background, high.start_python(PROGRAM + BURSTS) as foreground:
        ready(background)
        ready(foreground)
        burst = foreground.ask("2.5")
        reports = reports_until(background, burst["end"])
    during = [report for report in reports if burst["begin"] < report["begin"] < burst["end"]]
    assert len(during) >= 3, "it goes on launching"
    assert statistics.mean(report["share"] for report in during) > 1


def test_trickle_has_documented_rate(node, page):
    """Containers that do not use the device request it all the time: low then gets the floor, and not less for what it had before."""
    with tenant(node, page, LOW).start_python(PROGRAM + STEADY) as background:
        ready(background)
        reports_until(background, time.monotonic() + 0.5)
        wanted_from, reports = time.monotonic(), []
        while time.monotonic() < wanted_from + 4:
            want(page, until_ns=time.monotonic_ns() + 900_000_000)
            reports.append(background.listen())
    trickled = [report for report in reports if report["begin"] > wanted_from + 0.5]
    seconds = [after["begin"] - before["begin"] for before, after in itertools.pairwise(trickled)]
    shares = [report["share"] for report in trickled[:-1]]
    mean = sum(share * length for share, length in zip(shares, seconds, strict=True)) / sum(seconds)
    assert mean == pytest.approx(TRICKLE_PERCENT, abs=1)


REACTION = """
start()
function = load()
work_for(0.2, 1000, lambda: spin(function, 1000))
tell(ready=True)
for line in sys.stdin:
    spin(function, 1000)
    must("cuCtxSynchronize")
    took = []
    for _ in range(40):
        begin = time.monotonic()
        spin(function, 1000)
        must("cuCtxSynchronize")
        took.append(time.monotonic() - begin)
    tell(first=took[0], median=sorted(took)[20])
"""


def test_high_soon_has_the_device_almost_to_itself(node, page):
    """Sharing with a free neighbour a kernel takes twice as long; once the neighbour has fallen back, about its own time."""
    low, high = tenant(node, page, LOW), tenant(node, page, HIGH)
    with low.start_python(PROGRAM + STEADY) as background, high.start_python(PROGRAM + REACTION) as foreground:
        ready(background)
        ready(foreground)
        reports_until(background, time.monotonic() + 0.3)
        bursts = [foreground.ask("go") for _ in range(5)]
    assert statistics.median(burst["median"] for burst in bursts) < 0.004
    assert min(burst["first"] for burst in bursts) < 0.015


FLOOD = """
import itertools
from tests.fakes import kernels
start()
function, shapes, arguments = load(), itertools.count(1), kernels.arguments(100)
tell(ready=True)
while True:
    must("cuLaunchKernel", function, next(shapes), 1, 1, 1, 1, 1, 0, 0, arguments, None)
"""
"""Launches without end, each time in another shape: see test_shim_in_flight.py."""

AFTER_A_REST = """
start()
function = load()
spin(function, 1000)
must("cuCtxSynchronize")
tell(ready=True)
for line in sys.stdin:
    time.sleep(0.4)
    took = []
    for _ in range(10):
        begin = time.monotonic()
        spin(function, 1000)
        must("cuCtxSynchronize")
        took.append(time.monotonic() - begin)
    tell(first=took[0], median=sorted(took)[5])
"""
"""Rests until low has the device again, and each process of it its part; then works."""


@pytest.mark.parametrize(("containers", "processes"), [(1, 16), (4, 4)], ids=["one container", "four containers"])
def test_high_priority_wait_does_not_grow_with_low_priority_processes(node, page, containers, processes):
    """Sixteen that have the device all the time leave a seventeenth of it to another one."""
    with contextlib.ExitStack() as stack:
        foreground = ready(stack.enter_context(tenant(node, page, HIGH).start_python(PROGRAM + AFTER_A_REST)))
        alone = statistics.median(foreground.ask("go")["first"] for _ in range(5))
        lows = [tenant(node, page, LOW) for _ in range(containers)]
        programs = [stack.enter_context(low.start_python(PROGRAM + FLOOD)) for low in lows for _ in range(processes)]
        for program in programs:
            ready(program)
        bursts = [foreground.ask("go") for _ in range(9)]
    assert statistics.median(burst["first"] for burst in bursts) < 10 * alone
    assert statistics.median(burst["median"] for burst in bursts) < 4 * alone


BESIDE_LONG = """
start()
first, second = make_stream(), make_stream()
functions = [load() for _ in range(8)]
spin(functions[0], 4_000_000, first)
begin = time.monotonic()
for function in functions[1:]:
    spin(function, 10, second)
tell(seconds=time.monotonic() - begin)
os._exit(0)
"""


def test_new_functions_wait_for_a_very_long_kernel_only_once(node, page):
    """It may be one that ends with the program."""
    answer = tenant(node, page, LOW).python(PROGRAM + BESIDE_LONG)
    assert answer.status == 0, answer.stderr
    assert answer.last["seconds"] < 2


def assert_low_never_waits(node: Node, page) -> None:
    """By the shim's own count, which a busy machine does not change; and it works."""
    low = tenant(node, page, LOW)
    with low.start_python(PROGRAM + STEADY) as background:
        ready(background)
        shares = [report["share"] for report in reports_until(background, time.monotonic() + 1)]
        used = low.snapshot().slots[0].devices[0]
    assert (used.throttled_ns, used.waiting) == (0, 0)
    assert used.launches > 0
    assert max(shares) > 2 * TRICKLE_PERCENT


def test_page_without_writer_slows_no_process(node, page):
    assert_low_never_waits(node, page)


def test_lines_of_other_devices_do_not_matter(node, page):
    low, high = tenant(node, page, LOW, line=LINE + 1), tenant(node, page, HIGH)
    with low.start_python(PROGRAM + STEADY) as background, high.start_python(PROGRAM + BURSTS) as foreground:
        ready(background)
        ready(foreground)
        burst = foreground.ask("1")
        reports = reports_until(background, burst["end"])
        throttled_ns = low.snapshot().slots[0].devices[0].throttled_ns
    during = [report["share"] for report in reports if burst["begin"] + 0.1 < report["begin"]]
    assert throttled_ns == 0
    assert max(during) > 2 * TRICKLE_PERCENT


@pytest.mark.parametrize("nonsense", [2**63 - 1, -(2**63), -1, 10**9])
def test_invalid_page_content_delays_no_process(node, page, nonsense):
    data = bytearray(page.read_bytes())
    struct.pack_into("<q", data, 64 * LINE, nonsense)
    page.write_bytes(data)
    assert_low_never_waits(node, page)


@pytest.mark.parametrize("damage", ["other magic", "short", "missing"])
def test_a_damaged_page_is_no_priority(node, page, damage):
    container = tenant(node, page, LOW)
    mounted = container.root / "run/aliquot/priority"
    if damage == "missing":
        mounted.unlink()
    else:
        page.write_bytes(b"\1" * PAGE_BYTES if damage == "other magic" else struct.pack("<Q", MAGIC))
    answer = container.client("work", "--seconds", "1", "--kernel-us", "1000")
    assert answer.status == 0, answer.stderr
    assert answer.last["share"] > 2 * TRICKLE_PERCENT / 100


def test_page_truncated_by_neighbour_ends_no_process_and_works_after_repair(node, page):
    """A mapping of it would end both with SIGBUS."""
    low, high = tenant(node, page, LOW), tenant(node, page, HIGH)
    with low.start_python(PROGRAM + STEADY) as background, high.start_python(PROGRAM + BURSTS) as foreground:
        ready(background)
        ready(foreground)
        os.truncate(page, 0)
        burst = foreground.ask("0.5")
        reports = reports_until(background, burst["end"])
        without = [report["share"] for report in reports if burst["begin"] + 0.1 < report["begin"]]
        assert max(without) > 2 * TRICKLE_PERCENT, "there is no priority meanwhile"
        assert page.stat().st_size == 0, "and nobody writes to what is no page"
        assert PageFile(page.parent, PRIORITY).repair()
        burst = foreground.ask("2")
        reports = reports_until(background, burst["end"] + 0.3)
    assert share_between(reports, burst["begin"] + 0.1, burst["end"] - 0.2) < 3 * TRICKLE_PERCENT


def test_only_work_of_high_priority_is_announced(node, page):
    for priority, announced in ((0, False), (LOW, False), (HIGH, True)):
        before = wanted_until_ns(page)
        assert tenant(node, page, priority).client("work", "--seconds", "0.3", "--kernel-us", "1000").status == 0
        assert (wanted_until_ns(page) != before) == announced
    assert abs(wanted_until_ns(page) - time.monotonic_ns()) < 5e9, "the time is CLOCK_MONOTONIC's"
