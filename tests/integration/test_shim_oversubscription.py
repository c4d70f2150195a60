# SPDX-License-Identifier: Apache-2.0
"""Oversubscription: what the guarantee does not hold becomes managed memory, up to the ceiling and no byte further.

A container with ``burst_bytes`` above its ``memory_bytes``. Device memory, and all that cannot leave the device, stays within the
guarantee.
"""

import contextlib
from dataclasses import replace

import pytest

from agent.core import region_layout
from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes import regions
from tests.fakes.container import MIB, Container, Node
from tests.fakes.cuda import OUT_OF_MEMORY, SUCCESS

GUARANTEE_MIB, CEILING_MIB = 1024, 3072
CONTEXT_MIB = 530  # of an H200 in the profile
NOT_SUPPORTED = 801

PROGRAM = """
from tests.fakes.cuda import *
import ctypes, sys
IS_MANAGED, PREFERRED_LOCATION = 8, 2
def is_managed(address):
    value = ctypes.c_uint32(UNTOUCHED)
    must("cuPointerGetAttribute", ctypes.byref(value), IS_MANAGED, address)
    return bool(value.value)
def preferred(address, size):
    value = ctypes.c_int32(-99)
    must("cuMemRangeGetAttribute", ctypes.byref(value), 4, PREFERRED_LOCATION, address, size)
    return value.value
"""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


def limits(node: Node, *, ceiling_mib: int = CEILING_MIB, guarantee_mib: int = GUARANTEE_MIB, overhead_mib: int = 0) -> Limits:
    return Limits((DeviceLimit(node.uuids[0], guarantee_mib * MIB, ceiling_mib * MIB, overhead_bytes=overhead_mib * MIB),))


@pytest.fixture
def container(node: Node) -> Container:
    return node.container_with(limits(node))


def virtual_bytes(container: Container) -> int:
    """The word that virtual memory is judged by."""
    return container.snapshot().line_virtual_bytes[0]


def reported(container: Container, script: str) -> dict:
    answer = container.python(PROGRAM + script)
    assert answer.status == 0, answer
    return answer.last


# --- allocating -------------------------------------------------------------------------------------------------


def test_device_memory_first_then_managed_memory_and_nothing_past_the_ceiling(node, container):
    with container.start([container.build / "bin/aliquot-cuda-client", "fill", "--hold"]) as program:
        filled = program.listen()
        assert (filled["event"], filled["result_name"]) == ("fill", "CUDA_ERROR_OUT_OF_MEMORY")
        assert filled["held_bytes"] == (CEILING_MIB - CONTEXT_MIB) * MIB
        assert (container.line_bytes(), virtual_bytes(container)) == (GUARANTEE_MIB * MIB, (CEILING_MIB - GUARANTEE_MIB) * MIB)
        device = container.snapshot().slots[0].devices[0]
        assert (device.used_bytes, device.virtual_bytes) == (GUARANTEE_MIB * MIB, (CEILING_MIB - GUARANTEE_MIB) * MIB)
        assert node.physical_used_bytes(node.uuids[0]) <= GUARANTEE_MIB * MIB
        assert device.refusals > 0


def test_memory_is_device_memory_within_guarantee_and_managed_beyond_it(container):
    script = """
start()
small, large = alloc(64 * MIB)[1], alloc(1024 * MIB)[1]
tell(small=is_managed(small), large=is_managed(large), preferred=preferred(large, 1024 * MIB))
"""
    assert reported(container, script) == {"small": False, "large": True, "preferred": 0}


def test_block_above_guarantee_may_use_rest_of_whole_limit(container):
    script = """
start()
result, address = alloc(info()[0])
tell(result=result, managed=is_managed(address), free=info()[0], next=alloc(1)[0])
"""
    assert reported(container, script) == {"result": SUCCESS, "managed": True, "free": 0, "next": OUT_OF_MEMORY}


def test_a_refusal_leaves_the_output_untouched_and_charges_nothing(container):
    script = f"""
start()
result, address = alloc({CEILING_MIB} * MIB)
tell(result=result, untouched=address == UNTOUCHED, huge=alloc(2**64 - 1)[0], free=info()[0])
"""
    free = (CEILING_MIB - CONTEXT_MIB) * MIB
    assert reported(container, script) == {"result": OUT_OF_MEMORY, "untouched": True, "huge": OUT_OF_MEMORY, "free": free}


def test_without_host_memory_allocation_fails_and_nothing_stays_charged(node):
    container = node.container_with(limits(node, ceiling_mib=2**42))
    script = """
start()
before = info()[0]
results = [alloc(2**50), into("cuMemAllocManaged", 2**50, 1)]
small, _ = alloc(MIB)
tell(results=results, left=before - info()[0], small=small)
"""
    told_of = reported(container, script)
    assert told_of == {"results": [[OUT_OF_MEMORY, 0xDEADBEEF]] * 2, "left": MIB, "small": SUCCESS}
    assert virtual_bytes(container) == 0


def test_managed_memory_that_the_program_asks_for_leaves_the_guarantee_alone(container):
    script = """
start()
must("cuMemAllocManaged", ctypes.byref(out()), 1024 * MIB, 1)
tell(managed=is_managed(alloc(256 * MIB)[1]))
"""
    assert reported(container, script) == {"managed": False}


@pytest.mark.parametrize("kind", ["pitch", "async", "pool", "vmm", "array", "mipmap", "graph", "ctx"])
def test_what_cannot_leave_the_device_stays_within_the_guarantee(node, container, kind):
    with container.start([container.build / "bin/aliquot-cuda-client", "fill", "--kind", kind, "--hold"]) as program:
        filled = program.listen()
        assert filled["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY", filled
        assert container.line_bytes() <= GUARANTEE_MIB * MIB
        assert virtual_bytes(container) == 0
        assert node.physical_used_bytes(node.uuids[0]) <= GUARANTEE_MIB * MIB


# --- freeing ----------------------------------------------------------------------------------------------------


def test_freeing_credits_the_ledger_that_was_charged(container):
    script = """
start()
device, managed = alloc(256 * MIB)[1], alloc(1024 * MIB)[1]
before = info()[0]
must("cuMemFree_v2", managed)
after_managed = info()[0] - before
must("cuMemFree_v2", device)
tell(after_managed=after_managed, after_both=info()[0] - before)
sys.stdin.read()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"after_managed": 1024 * MIB, "after_both": 1280 * MIB}
        assert (container.line_bytes(), virtual_bytes(container)) == (CONTEXT_MIB * MIB, 0)


def test_the_end_of_a_context_credits_both_ledgers(container):
    script = """
must("cuInit", 0)
context = out()
must("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
results = [alloc(256 * MIB)[0], alloc(1024 * MIB)[0]]
must("cuCtxDestroy_v2", context.value)
tell(results=results)
sys.stdin.read()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"results": [SUCCESS, SUCCESS]}
        assert (container.line_bytes(), virtual_bytes(container)) == (0, 0)


def test_what_a_killed_process_held_in_either_ledger_serves_the_next(container):
    with container.start([container.build / "bin/aliquot-cuda-client", "fill", "--hold"]) as program:
        program.listen()
        program.kill()
    assert virtual_bytes(container) > 0
    filled = container.client("fill").last
    assert filled["held_bytes"] == (CEILING_MIB - CONTEXT_MIB) * MIB


def test_a_process_at_the_ceiling_takes_over_what_a_killed_sibling_held(node):
    container = node.container_with(limits(node, guarantee_mib=1200))
    script = f"""
start()
tell(ready=True)
sys.stdin.readline()
tell(result=alloc({CEILING_MIB - CONTEXT_MIB} * MIB)[0])
"""
    with container.start_python(PROGRAM + script) as waiting:
        waiting.listen()
        with container.start_python(PROGRAM + "start()\ntell(r=alloc(1500 * MIB)[0])\nsys.stdin.read()") as sibling:
            assert sibling.listen() == {"r": SUCCESS}
            sibling.kill()
        assert waiting.ask("") == {"result": SUCCESS}


def test_processes_that_fill_at_once_never_pass_the_ceiling_together(node):
    container = node.container_with(limits(node, guarantee_mib=5 * CONTEXT_MIB, ceiling_mib=5 * CONTEXT_MIB + 512))
    script = """
start()
tell(ready=True)
sys.stdin.readline()
held = []
for _ in range(400):
    while True:
        result, address = alloc(MIB)
        if result:
            break
        held.append(address)
    for address in held[-3:]:
        must("cuMemFree_v2", address)
    del held[-3:]
while alloc(MIB)[0] == 0: pass
tell(done=True)
sys.stdin.read()
"""
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(container.start_python(PROGRAM + script)) for _ in range(4)]
        for program in programs:
            program.listen()
        for program in programs:
            program.tell("")
        for program in programs:
            program.listen()
        total = container.line_bytes() + virtual_bytes(container)
        ceiling = (5 * CONTEXT_MIB + 512) * MIB
        assert ceiling - MIB < total <= ceiling
        assert container.line_bytes() <= 5 * CONTEXT_MIB * MIB
        devices = [slot.devices[0] for slot in container.snapshot().slots]
        assert sum(device.used_bytes + device.virtual_bytes for device in devices) == total


# --- views, sharing, changes ------------------------------------------------------------------------------------


def test_the_container_sees_its_ceiling(node):
    container = node.container_with(limits(node, overhead_mib=24))
    script = """
start()
total = out()
must("cuDeviceTotalMem_v2", ctypes.byref(total), 0)
alloc(1024 * MIB)
tell(info=info(), total=total.value)
"""
    answer = reported(container, script)
    assert answer == {"info": [(CEILING_MIB - 24 - CONTEXT_MIB - 1024) * MIB, CEILING_MIB * MIB], "total": CEILING_MIB * MIB}


def test_nvml_shows_the_ceiling_and_all_that_is_held(container):
    with container.repl() as program:
        assert program.ask(f"alloc alloc {1024 * MIB}")["result"] == SUCCESS
        script = """
import json, pynvml as n
n.nvmlInit()
device = n.nvmlDeviceGetHandleByIndex(0)
memory = n.nvmlDeviceGetMemoryInfo(device)
print(json.dumps({"total": memory.total, "used": memory.used, "free": memory.free,
                  "each": [process.usedGpuMemory for process in n.nvmlDeviceGetComputeRunningProcesses(device)]}))
"""
        used = (CONTEXT_MIB + 1024) * MIB
        answer = container.python(script)
        assert answer.last == {"total": CEILING_MIB * MIB, "used": used, "free": CEILING_MIB * MIB - used, "each": [used]}


def test_managed_memory_has_no_handle_for_other_processes(container):
    script = """
start()
device, managed = alloc(64 * MIB)[1], alloc(1024 * MIB)[1]
handle = (ctypes.c_ubyte * 64)()
before = bytes(handle)
refused = call("cuIpcGetMemHandle", handle, managed)
tell(refused=refused, untouched=bytes(handle) == before, device=call("cuIpcGetMemHandle", handle, device))
"""
    assert reported(container, script) == {"refused": NOT_SUPPORTED, "untouched": True, "device": SUCCESS}


@pytest.mark.parametrize("ceiling_mib", [0, GUARANTEE_MIB], ids=["none", "no higher than the guarantee"])
def test_without_a_ceiling_above_the_guarantee_nothing_becomes_managed(node, ceiling_mib):
    container = node.container_with(limits(node, ceiling_mib=ceiling_mib))
    filled = container.client("fill").last
    assert (filled["held_bytes"], filled["total_bytes"]) == ((GUARANTEE_MIB - CONTEXT_MIB) * MIB, GUARANTEE_MIB * MIB)


def test_the_ceiling_can_be_raised_and_lowered_while_a_program_runs(node, container):
    with container.repl() as program:
        first = program.ask(f"alloc alloc {1024 * MIB}")
        assert first["result"] == SUCCESS
        container.set_limits(limits(node, ceiling_mib=1600))
        assert program.ask(f"alloc alloc {256 * MIB}")["result"] == OUT_OF_MEMORY
        assert program.ask("info")["free_bytes"] == (1600 - CONTEXT_MIB - 1024) * MIB
        container.set_limits(limits(node, ceiling_mib=0))
        assert program.ask(f"free alloc {first['id']}")["result"] == SUCCESS
        assert virtual_bytes(container) == 0
        container.set_limits(limits(node, ceiling_mib=4096))
        assert program.ask(f"alloc alloc {3000 * MIB}")["result"] == SUCCESS


def test_a_region_of_an_older_agent_holds_the_guarantee_and_no_more(container):
    region = bytearray(regions.empty_region()[: region_layout.REGION_VIRTUAL_OFFSET])
    region[64:72] = bytes(8)  # virtual_offset and virtual_stride
    container.region_path.write_bytes(region)
    filled = container.client("fill").last
    assert (filled["held_bytes"], filled["total_bytes"]) == ((GUARANTEE_MIB - CONTEXT_MIB) * MIB, GUARANTEE_MIB * MIB)


def test_devices_of_one_container_may_differ(node):
    both = Limits((*limits(node).devices, replace(limits(node).devices[0], uuid=node.uuids[1], burst_bytes=0)))
    container = node.container_with(both)
    script = "start()\nfirst = alloc(1024 * MIB)[0]\nuse(1)\ntell(first=first, second=alloc(1024 * MIB)[0])"
    assert reported(container, script) == {"first": SUCCESS, "second": OUT_OF_MEMORY}
