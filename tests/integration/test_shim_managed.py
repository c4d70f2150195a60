# SPDX-License-Identifier: Apache-2.0
"""Managed memory is charged on each device where it may lie, whatever moves it there by a call.

The shim as front on the simulated driver, which charges managed pages where the last prefetch put them. What faults alone move has no call
that could be refused; the agent takes it from the limit (test_agent_imports.py).
"""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.container import MIB, Container, Node
from tests.fakes.cuda import OUT_OF_MEMORY, SUCCESS

LIMIT_MIB = 2048
CONTEXT_MIB = 530  # of an H200 in the profile

PROGRAM = """
from tests.fakes.cuda import *
import ctypes, json, sys
class Location(ctypes.Structure):  # CUmemLocation
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))
def managed(size):
    return into("cuMemAllocManaged", size, 1)
def prefetch(address, size, device, suffix="", stream=0):
    if "_v2" in suffix:
        return call("cuMemPrefetchAsync" + suffix, address, size, Location(DEVICE, device), 0, stream)
    return call("cuMemPrefetchAsync" + suffix, address, size, device, stream)
def advise(address, size, advice, device, suffix=""):
    return call("cuMemAdvise" + suffix, address, size, advice, Location(DEVICE, device) if suffix else device)
def free(*devices):
    found = []
    for device in devices:
        use(device)
        must("cuCtxSynchronize")
        found.append(info()[0])
    return found
start()
use(1)
use(0)
"""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node: Node) -> Container:
    return node.container(LIMIT_MIB, LIMIT_MIB)


def reported(container: Container, script: str) -> dict:
    answer = container.python(PROGRAM + script)
    assert answer.status == 0, answer
    return answer.last


def charged_and_held(node: Node, container: Container) -> list[tuple[int, int]]:
    """Of each device, what is charged and what the driver says."""
    return [(container.line_bytes(device), node.physical_used_bytes(node.uuids[device])) for device in range(2)]


@pytest.mark.parametrize("suffix", ["", "_ptsz", "_v2", "_v2_ptsz"])
def test_prefetch_moves_charge_with_bytes(node, container, suffix):
    script = f"""
before = free(0, 1)
use(0)
result, address = managed(600 * MIB)
moved = prefetch(address, 600 * MIB, 1, {suffix!r})
after = free(0, 1)
tell(results=[result, moved], taken=[was - now for was, now in zip(before, after)])
sys.stdin.readline()
must("cuMemFree_v2", address)
tell(left=[was - now for was, now in zip(before, free(0, 1))])
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"results": [SUCCESS, SUCCESS], "taken": [0, 600 * MIB]}
        assert charged_and_held(node, container) == [(CONTEXT_MIB * MIB,) * 2, ((CONTEXT_MIB + 600) * MIB,) * 2]
        program.tell("")
        assert program.listen() == {"left": [0, 0]}


@pytest.mark.parametrize("suffix", ["", "_ptsz", "_v2", "_v2_ptsz"])
def test_prefetch_to_device_without_room_is_refused(node, container, suffix):
    """Memory of each device's limit, all moved to one."""
    script = f"""
blocks = []
for device in (0, 1):
    use(device)
    blocks.append(managed(1400 * MIB)[1])
results = [prefetch(block, 1400 * MIB, 0, {suffix!r}) for block in blocks]
tell(results=results)
sys.stdin.readline()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"results": [SUCCESS, OUT_OF_MEMORY]}
        for charged, held in charged_and_held(node, container):
            assert held <= charged <= LIMIT_MIB * MIB


def test_part_of_block_is_charged_where_it_goes(container):
    script = """
before = free(0, 1)
use(0)
address = managed(64 * MIB)[1]
def taken():
    now = free(0, 1)
    use(0)
    return [(was - is_now) // MIB for was, is_now in zip(before, now)]
def move(first, size, device):
    assert not prefetch(address + first, size, device)
    return taken()
tell(whole_pages=move(0, 16 * MIB, 1), again=move(0, 16 * MIB, 1), half_a_page=move(17 * MIB, MIB, 1), rest=move(16 * MIB, 48 * MIB, 1),
     back=move(0, 64 * MIB, 0))
"""
    assert reported(container, script) == {
        "whole_pages": [48, 16], "again": [48, 16], "half_a_page": [48, 18], "rest": [0, 64], "back": [64, 0],
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["", "_v2"])
def test_preferred_device_is_charged_when_advised(container, suffix):
    script = f"""
PREFERRED, READ_MOSTLY = 3, 1
before = free(0, 1)
use(0)
address = managed(600 * MIB)[1]
results = [advise(address, 600 * MIB, PREFERRED, 1, {suffix!r}), advise(address, 600 * MIB, PREFERRED, 0, {suffix!r})]
both = [was - now for was, now in zip(before, free(0, 1))]
use(0)
results.append(prefetch(address, 600 * MIB, 0))
kept = [was - now for was, now in zip(before, free(0, 1))]
use(1)
large = managed(1400 * MIB)
results.append(large[0])
must("cuMemFree_v2", address)
use(0)
large = managed(1400 * MIB)[1]
alloc(info()[0])
use(1)
must("cuMemAlloc_v2", ctypes.byref(out()), info()[0])
results.append(advise(large, 1400 * MIB, PREFERRED, 1, {suffix!r}))
tell(results=results, both=both, kept=kept)
"""
    got = reported(container, script)
    assert got["results"] == [SUCCESS, SUCCESS, SUCCESS, OUT_OF_MEMORY, OUT_OF_MEMORY]
    assert got["both"] == got["kept"] == [600 * MIB, 600 * MIB], "a fault brings it back to the preferred device"


def test_device_it_leaves_is_credited_when_stream_has_passed(container):
    script = """
from tests.fakes.kernels import *
before = free(0, 1)
use(0)
address, stream, function = managed(600 * MIB)[1], make_stream(), load()
code = before[0] - info()[0] - 600 * MIB
spin(function, 500_000, stream)
assert not prefetch(address, 600 * MIB, 1, stream=stream)
waiting = info()[0]
must("cuStreamSynchronize", stream)
tell(waiting=before[0] - waiting - code, passed=before[0] - info()[0] - code)
"""
    assert reported(container, script) == {"waiting": 600 * MIB, "passed": 0}


def test_failed_prefetch_leaves_charges_as_they_were(container):
    script = """
before = free(0, 1)
use(0)
address = managed(64 * MIB)[1]
result = call("cuMemPrefetchAsync_v2", address, 64 * MIB, Location(DEVICE, 1), 77, 0)
tell(result=result, taken=[was - now for was, now in zip(before, free(0, 1))])
"""
    answer = reported(container, script)
    assert answer["result"] != SUCCESS
    assert answer["taken"] == [64 * MIB, 0]


MOVES = """
KIB, blocks = 1024, []
def step(kind, which, device, first, size):
    use(device)
    if kind == "make":
        result, address = managed(size * KIB)
        if not result:
            blocks.append((address, size))
        return
    if not blocks:
        return
    address, total = blocks[which % len(blocks)]
    first, size = first % total, min(size, total - first % total)
    if kind == "free":
        must("cuMemFree_v2", address)
        blocks.remove((address, total))
    elif kind == "advise":
        advise(address + first * KIB, size * KIB, 3, device)
    else:
        prefetch(address + first * KIB, size * KIB, device)
for line in sys.stdin:
    if line == "end\\n":
        for address, _ in blocks:
            must("cuMemFree_v2", address)
        blocks.clear()
    else:
        step(*json.loads(line))
    for device in (0, 1):
        use(device)
        must("cuCtxSynchronize")
        info()
    tell(done=True)
"""


# Below a MiB a block shares its page; between that and a page, and with a part of a page at the end, it takes whole pages.
KIBS = st.one_of(st.integers(1, 5000), st.integers(1, 900).map(lambda mib: mib * 1024))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["make", "prefetch", "prefetch", "advise", "free"]), st.integers(0, 9), st.integers(0, 1),
            st.one_of(st.just(0), KIBS), KIBS,
        ),
        min_size=5, max_size=20,
    )
)  # fmt: skip
def test_no_order_of_moves_holds_more_than_is_charged(node, steps):
    container = node.container(LIMIT_MIB, LIMIT_MIB)
    with container.start_python(PROGRAM + MOVES) as program:
        for step in steps:
            program.ask(json.dumps(step))
        for charged, held in charged_and_held(node, container):
            assert held <= charged <= LIMIT_MIB * MIB
        program.ask("end")
        assert charged_and_held(node, container) == [(CONTEXT_MIB * MIB,) * 2] * 2
