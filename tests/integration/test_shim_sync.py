# SPDX-License-Identifier: Apache-2.0
"""What programs synchronise with, under the shim: stream memory operations and events of two containers.

They cost no memory and no SM time, so they must work as without the shim, and must not change what others get. The operations themselves
are tested in simulated_driver/tests (test_cuda_values.c, test_cuda_ipc.c).
"""

import statistics
import time
from collections.abc import Sequence

import pytest

from agent.adapters.node_files import PageFile
from agent.core.node_pages import PRIORITY
from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.behaviours import STEADY
from tests.fakes.container import MIB, Container, Node
from tests.fakes.pid_namespaces import unshare_or_skip

LIMIT_MIB = 8192
LINE = 3
HIGH, LOW = 10, -10
NOT_READY = 600

PROGRAM = "from tests.fakes.cuda import *\nfrom tests.fakes.kernels import *\nimport ctypes, os, sys, threading, time\n"

WAYS = pytest.mark.parametrize("interposition", ["none", "front", "preload"])


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


def facts(answer) -> dict:
    assert answer.status == 0, answer.stderr
    return answer.last


# --- stream memory operations -----------------------------------------------------------------------------------


@WAYS
def test_values_are_written_and_waited_for_without_a_charge(node, interposition):
    script = """
start()
result, word = alloc(MIB)
must("cuMemsetD8_v2", word, 0, MIB)
stream, before = make_stream(), info()[0]
must("cuStreamWaitValue32_v2", stream, word, 5, 1)
must("cuStreamWriteValue64_v2", stream, word + 8, 7, 0)
waiting = call("cuStreamQuery", stream)
must("cuStreamWriteValue32_v2", 0, word, 5, 0)
must("cuStreamSynchronize", stream)
found = out()
must("cuMemcpyDtoH_v2", ctypes.byref(found), word + 8, 8)
for _ in range(5000):
    must("cuStreamWriteValue32_v2", stream, word, 6, 0)
must("cuStreamSynchronize", stream)
tell(result=result, waiting=waiting, found=found.value, taken=before - info()[0])
"""
    container = node.container(LIMIT_MIB, interposition=interposition)
    assert facts(container.python(PROGRAM + script)) == {"result": 0, "waiting": NOT_READY, "found": 7, "taken": 0}


PACED = """
start()
function, stream = load(), make_stream()
_, word = alloc(MIB)
must("cuMemsetD8_v2", word, 0, MIB)
count = 0
def submit():
    global count
    count += 1
    must("cuStreamWriteValue32_v2", stream, word, count, 0)
    must("cuStreamWaitValue32_v2", stream, word, count, 1)
    spin(function, 1000, stream)
for _ in range(5):
    begin = time.monotonic()
    done = work_for(1, 1000, submit)
    tell(share=100 * done / 1e6 / (time.monotonic() - begin))
"""


def test_values_between_launches_change_nothing_of_the_ceiling(node):
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, sm_percent=25),)))
    answer = container.python(PROGRAM + PACED)
    assert answer.status == 0, answer.stderr
    shares = [event["share"] for event in answer.events[1:]]
    assert statistics.median(shares) <= 25 + 6, shares
    assert max(shares) >= 25 - 6, shares


LATE = """
start()
function, stream, host = load(), make_stream(), out()
must("cuMemHostAlloc", ctypes.byref(host), 4096, 0)
word = ctypes.c_uint32.from_address(host.value)
word.value = 0
begin, count = time.monotonic(), 0
while time.monotonic() < begin + 3:
    count += 1
    must("cuStreamWaitValue32_v2", stream, host.value, count, 0)
    spin(function, 2000, stream)
    time.sleep(0.02)
    word.value = count
    must("cuStreamSynchronize", stream)
tell(share=100 * count * 2000 / 1e6 / (time.monotonic() - begin))
"""
"""Launches a tenth of the time, each behind a wait of ten times its length."""


def test_time_spent_waiting_for_a_value_is_not_paid(node):
    shares = {}
    for ceiling in (100, 20):
        container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, sm_percent=ceiling),)))
        shares[ceiling] = facts(container.python(PROGRAM + LATE))["share"]
    assert shares[20] > 0.6 * shares[100], shares


VALUES = """
start()
stream, (_, word) = make_stream(), alloc(MIB)
tell(ready=True)
for line in sys.stdin:
    begin = time.monotonic()
    while time.monotonic() < begin + float(line):
        for _ in range(20):
            must("cuStreamWriteValue32_v2", stream, word, 1, 0)
        must("cuStreamWaitValue32_v2", stream, word, 1, 1)
        must("cuStreamSynchronize", stream)
        time.sleep(0.001)
    tell(begin=begin, end=time.monotonic())
"""


def prioritised(node: Node, page, priority: int) -> Container:
    device = DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, priority=priority, priority_line=LINE)
    container = node.container_with(Limits((device,)))
    (container.root / "run/aliquot/priority").hardlink_to(page)
    return container


def shares_until(program, moment: float) -> list[dict]:
    reports = [program.listen()]
    while reports[-1]["begin"] < moment:
        reports.append(program.listen())
    return reports


def test_values_of_high_priority_take_nothing_from_low(node, tmp_path):
    page = PageFile(tmp_path / "shared", PRIORITY).make()
    low, high = prioritised(node, page, LOW), prioritised(node, page, HIGH)
    with low.start_python(PROGRAM + STEADY) as background, high.start_python(PROGRAM + VALUES) as foreground:
        assert background.listen() == foreground.listen() == {"ready": True}
        alone = statistics.median(report["share"] for report in shares_until(background, time.monotonic() + 0.7)[3:])
        values = foreground.ask("1.5")
        reports = shares_until(background, values["end"])
    during = [report["share"] for report in reports if values["begin"] < report["begin"] < values["end"] - 0.1]
    assert statistics.median(during) > 0.5 * alone, (alone, during)


# --- events between processes -----------------------------------------------------------------------------------

RECORDER = """
start()
function = load()
event, handle = out(), (ctypes.c_ubyte * 64)()
must("cuEventCreate", ctypes.byref(event), 6)  # INTERPROCESS | DISABLE_TIMING
must("cuIpcGetEventHandle", handle, event.value)
tell(handle=bytes(handle).hex())
for line in sys.stdin:
    spin(function, int(line))
    must("cuEventRecord", event.value, 0)
    tell(recorded=True)
"""

WAITER = """
class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)
start()
function, stream, event = load(), make_stream(), out()
result = call("cuIpcOpenEventHandle", ctypes.byref(event), Handle.from_buffer_copy(bytes.fromhex(sys.stdin.readline())))
tell(result=result)
for line in sys.stdin:
    must("cuStreamWaitEvent", stream, event.value, 0)
    spin(function, 100, stream)
    queried = call("cuEventQuery", event.value), call("cuStreamQuery", stream)
    begin = time.monotonic()
    must("cuEventSynchronize", event.value)
    must("cuStreamSynchronize", stream)
    tell(queried=queried, took=time.monotonic() - begin, after=call("cuEventQuery", event.value))
"""


def check_events(recorder: Container, waiter: Container, behind: Sequence[str] = ()) -> None:
    """The first records work that the second waits for, also when the first is killed meanwhile."""
    with recorder.start_python(PROGRAM + RECORDER, behind=behind) as first, waiter.start_python(PROGRAM + WAITER, behind=behind) as second:
        assert second.ask(first.listen()["handle"]) == {"result": 0}
        assert first.ask("400000") == {"recorded": True}
        seen = second.ask("wait")
        assert (seen["queried"], seen["after"]) == ([NOT_READY, NOT_READY], 0)
        assert first.ask("60000000") == {"recorded": True}
        second.tell("wait")
        time.sleep(0.3)
        first.kill()
        seen = second.listen()
        assert (seen["queried"], seen["after"]) == ([NOT_READY, NOT_READY], 0), "a dead process keeps no other one waiting"
        assert seen["took"] < 10


@WAYS
def test_events_of_one_container_are_waited_for_in_another(node, interposition):
    check_events(*(node.container(LIMIT_MIB, interposition=interposition) for _ in range(2)))


def test_events_pass_between_pid_namespaces(node):
    check_events(node.container(LIMIT_MIB), node.container(LIMIT_MIB), behind=unshare_or_skip())
