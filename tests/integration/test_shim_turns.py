# SPDX-License-Identifier: Apache-2.0
"""Containers that together do not fit the device use it in time slots, seconds long; one that fits, or has gone, delays no other.

They share the node's page of turns, as the agent mounts it for containers that may hold more than they are guaranteed. The order in which
containers run, for any number of seconds, is in cuda_shim/tests/test_turns.c, where time is an argument; how memory is allocated is in
test_shim_oversubscription.py.
"""

import itertools
import os
import struct
import time

import pytest

from agent.adapters.node_files import PageFile
from agent.core.node_pages import TURNS
from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.container import MIB, Container, Node

GUARANTEE_MIB, CEILING_MIB = 2048, 12288
HELD_MIB = 9216  # of the 14.6 GiB of a T4, by each
MAY_LEAVE = 8  # blocks of a GiB: the guarantee has room for one and a context
LINE = 2
TURNS_OWNER_OFFSET = 72
TURN_SECONDS = 2.0
FETCH_SECONDS = MAY_LEAVE * 2**30 / 25e9
"""What the simulated bus takes for the memory that may leave, at the start of each time slot."""
WAITED_SECONDS = 0.3
"""A piece of work that took longer than this waited for its turn."""
MOST_TOGETHER = 0.2
"""Of what both run, the part that may be at the same time; without turns it is half.

After a write to the page that a busy machine delayed, a container writes nothing for twenty times as long, and runs meanwhile outside its
time slot."""

PROGRAM = f"""
from tests.fakes.cuda import *
from tests.fakes.kernels import *
import ctypes, select, sys, time
start()
function = load()
IS_MANAGED, PREFERRED_LOCATION, LAST_PREFETCH_LOCATION, CPU = 8, 2, 4, -1
def of_range(attribute, address):
    value = ctypes.c_int32(-99)
    must("cuMemRangeGetAttribute", ctypes.byref(value), 4, attribute, address, MIB)
    return value.value
def is_managed(address):
    value = ctypes.c_uint32(0)
    must("cuPointerGetAttribute", ctypes.byref(value), IS_MANAGED, address)
    return bool(value.value)
held = [alloc(1023 * MIB + 1) for _ in range({HELD_MIB // 1024})]  # the last page is charged whole
assert not any(result for result, _ in held), held
may_leave = [address for _, address in held if is_managed(address)]
_, elsewhere = into("cuMemAllocManaged", 64 * MIB, 1)  # the program wants it in host memory
must("cuMemAdvise", elsewhere, 64 * MIB, 3, CPU)
work_for(0.2, 1000, lambda: spin(function, 1000))
tell(ready=True, may_leave=len(may_leave))
while True:
    if select.select([sys.stdin], [], [], 0)[0]:
        sys.stdin.readline()
        for _, address in held[1:]:
            must("cuMemFree_v2", address)
        may_leave = []
    begin = time.monotonic()
    work_for(0.02, 1000, lambda: spin(function, 1000), at_once=4)
    end = time.monotonic()
    fetched = sum(of_range(LAST_PREFETCH_LOCATION, address) == 0 for address in may_leave)
    tell(begin=begin, end=end, fetched=fetched, elsewhere=of_range(LAST_PREFETCH_LOCATION, elsewhere) == 0)
"""
"""Holds memory and works in pieces of 20 ms, and reports each one; at a word on stdin it frees nearly all."""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("t4x2"), tmp_path)


@pytest.fixture
def page(tmp_path):
    return PageFile(tmp_path / "shared", TURNS).make()


def tenant(node: Node, page, *, line: int = LINE) -> Container:
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], GUARANTEE_MIB * MIB, CEILING_MIB * MIB, priority_line=line),)))
    (container.root / "run/aliquot/turns").hardlink_to(page)
    return container


def started(container: Container):
    program = container.start_python(PROGRAM)
    assert program.listen() == {"ready": True, "may_leave": MAY_LEAVE}
    return program


def pieces_until(program, moment: float) -> list[tuple[float, float]]:
    """What a program reports, to the first piece that ended at ``moment`` or later."""
    pieces: list[tuple[float, float]] = []
    while not pieces or pieces[-1][1] < moment:
        report = program.listen()
        pieces.append((report["begin"], report["end"]))
    return pieces


def running(pieces: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pieces that did not wait."""
    return [(begin, end) for begin, end in pieces if end - begin < WAITED_SECONDS]


def total(pieces: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in pieces)


def together(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Seconds in which both ran."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in itertools.product(one, other))


def test_what_does_not_fit_takes_turns_and_what_fits_again_does_not(node, page):
    with started(tenant(node, page)) as first, started(tenant(node, page)) as second:
        begin = time.monotonic() + 0.2
        apart = [[piece for piece in pieces_until(program, begin + 5.5) if piece[0] > begin] for program in (first, second)]
        one, other = map(running, apart)
        assert together(one, other) < MOST_TOGETHER * (total(one) + total(other))
        assert min(total(one), total(other)) > TURN_SECONDS - FETCH_SECONDS - WAITED_SECONDS
        assert total(one) + total(other) > 3.5, "the device is not idle"
        second.tell("free")
        begin = time.monotonic() + 2.8
        one, other = ([piece for piece in running(pieces_until(program, begin + 1)) if piece[0] > begin] for program in (first, second))
        assert together(one, other) > 0.5


def test_a_launch_that_waits_for_its_turn_is_counted_as_waiting(node, page):
    """As the metric aliquot_container_launches_waiting has it."""
    containers = [tenant(node, page), tenant(node, page)]
    with started(containers[0]), started(containers[1]):
        deadline = time.monotonic() + 60
        while not any(device.waiting for container in containers for slot in container.snapshot().slots for device in slot.devices):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_memory_that_left_is_sent_for_when_a_turn_begins(node, page):
    with started(tenant(node, page)) as first:
        alone = first.listen()
        assert (alone["fetched"], alone["elsewhere"]) == (0, False)
        with started(tenant(node, page)) as second:
            for program in (first, second):
                deadline = time.monotonic() + 60
                while (report := program.listen())["fetched"] < MAY_LEAVE:
                    assert time.monotonic() < deadline, report
                assert not report["elsewhere"], "what the program wants in host memory stays there"


def test_no_more_is_sent_for_than_fits_the_device(node, page):
    held_mib, ceiling_mib = 16384, 20480
    device_bytes = node.container(1, interposition="none").client("info").last["total_bytes"]  # later there is no room for a context
    program = PROGRAM.replace(f"range({HELD_MIB // 1024})", f"range({held_mib // 1024})")
    large = node.container_with(Limits((DeviceLimit(node.uuids[0], GUARANTEE_MIB * MIB, ceiling_mib * MIB, priority_line=LINE),)))
    (large.root / "run/aliquot/turns").hardlink_to(page)
    with large.start_python(program) as first:
        may_leave = first.listen()["may_leave"]
        assert may_leave == held_mib // 1024 - 1
        assert first.listen()["fetched"] == 0, "alone, it knows best itself"
        with started(tenant(node, page)):
            deadline = time.monotonic() + 60
            while (report := first.listen())["fetched"] == 0:
                assert time.monotonic() < deadline, report
            assert report["fetched"] == (device_bytes - large.line_bytes()) // 2**30 < may_leave


def holder(page, containers: list[Container]) -> Container:
    """The container that has the time slot, by the page and the containers' regions."""
    line = page.read_bytes()[1024 * LINE :][:1024]
    (turn,) = struct.unpack_from("<Q", line)
    (owner,) = struct.unpack_from("<Q", line, 64 + 32 * ((turn & 0xFF) - 1))
    (found,) = (item for item in containers if struct.unpack_from("<Q", item.region_path.read_bytes(), TURNS_OWNER_OFFSET)[0] == owner)
    return found


def test_the_turn_of_a_container_that_is_killed_is_soon_anothers(node, page):
    containers = [tenant(node, page), tenant(node, page)]
    with started(containers[0]) as first, started(containers[1]) as second:
        time.sleep(0.5)
        killed, other = (first, second) if holder(page, containers) is containers[0] else (second, first)
        killed.kill()
        killed_at = time.monotonic()
        pieces = running(pieces_until(other, killed_at + 1.8))
        assert total([piece for piece in pieces if piece[0] > killed_at]) > 0.6, "half a second to be sure, and what a busy machine adds"


def test_page_truncated_by_neighbour_ends_no_process_and_works_after_repair(node, page):
    """A mapping of it would end both with SIGBUS."""
    with started(tenant(node, page)) as first, started(tenant(node, page)) as second:
        time.sleep(0.3)
        os.truncate(page, 0)
        begin = time.monotonic() + 0.2
        one, other = (running(pieces_until(program, begin + 1)) for program in (first, second))
        assert together(one, other) > 0.3, "there are no turns meanwhile"
        assert page.stat().st_size == 0, "and nobody writes to what is no page"
        assert PageFile(page.parent, TURNS).repair()
        begin = time.monotonic() + 0.2
        apart = [[piece for piece in pieces_until(program, begin + 3) if piece[0] > begin] for program in (first, second)]
        one, other = map(running, apart)
        assert together(one, other) < MOST_TOGETHER * (total(one) + total(other))
        assert total(one) + total(other) > 1


def test_without_page_or_on_other_device_no_process_waits(node, page):
    other_line = tenant(node, page, line=LINE + 1)
    without = tenant(node, page)
    (without.root / "run/aliquot/turns").unlink()
    with started(tenant(node, page)) as first, started(other_line) as second, started(without) as third:
        begin = time.monotonic() + 0.2
        pieces = [pieces_until(program, begin + 1) for program in (first, second, third)]
        assert all(running(some) == some for some in pieces)


def test_memory_within_the_guarantee_takes_no_part(node, page):
    """What a container holds as device memory takes pages only from containers that hold more than they are guaranteed."""
    modest = tenant(node, page)
    with started(tenant(node, page)), modest.repl() as program:
        assert program.ask(f"alloc alloc {1024 * MIB}")["result"] == 0
        answer = modest.client("work", "--seconds", "1", "--kernel-us", "1000")
        assert answer.status == 0, answer.stderr
        assert answer.last["share"] > 0.2
