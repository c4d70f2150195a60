# SPDX-License-Identifier: Apache-2.0
"""Work in flight: processes of low priority that share a device keep together no more unfinished there than one of them does alone.

They cannot count each other; the arithmetic is in cuda_shim/tests/test_limit.c. How soon high priority has the device for that:
test_shim_priority.py.
"""

import contextlib
import statistics
import time
from pathlib import Path

import pytest

from agent.adapters.node_files import PageFile
from agent.core.node_pages import PRIORITY
from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.container import MIB, Container, Node

LIMIT_MIB = 16_384
ROUNDS = 7
FLOOD_SECONDS = 0.4
"""Longer than they take to learn what part of the device each of them has."""

FLOOD = """
from tests.fakes.cuda import *
from tests.fakes import kernels
import itertools, sys, time
start()
function, shapes, arguments = kernels.load(), itertools.count(1), kernels.arguments(100)
tell(ready=True)
for line in sys.stdin:
    end = float(line)
    while time.monotonic() < end:
        must("cuLaunchKernel", function, next(shapes), 1, 1, 1, 1, 1, 0, 0, arguments, None)
    must("cuCtxSynchronize")
    tell(left=time.monotonic() - end)
"""
"""Launches until it gets the signal, and then reports how long the device takes for what is left.

Each launch has a shape of its own, so that its cost is not learned: a simulated device does the work of all at the same time, and what it
measures of a launch has the others in it. Real ones do the work of processes in turns, and a launch mostly takes what it takes alone.
"""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def page(tmp_path) -> Path:
    return PageFile(tmp_path / "shared", PRIORITY).make()


def low(node: Node, page: Path) -> Container:
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, priority=-1, priority_line=1),)))
    (container.root / "run/aliquot/priority").hardlink_to(page)
    return container


def seconds_left(containers: list[Container], processes: int) -> float:
    """What all together have in flight when they stop launching at one moment; the median of some such moments."""
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(container.start_python(FLOOD)) for container in containers for _ in range(processes)]
        assert all(program.listen() == {"ready": True} for program in programs)
        moments = []
        for _ in range(ROUNDS):
            end = time.monotonic() + FLOOD_SECONDS
            for program in programs:
                program.tell(str(end))
            moments.append(max(program.listen()["left"] for program in programs))
    return statistics.median(moments)


@pytest.mark.parametrize(("containers", "processes"), [(1, 8), (4, 2)], ids=["one container", "four containers"])
def test_many_processes_have_together_in_flight_what_one_has(node, page, containers, processes):
    together = seconds_left([low(node, page) for _ in range(containers)], processes)
    assert together < 2 * seconds_left([low(node, page)], 1)
