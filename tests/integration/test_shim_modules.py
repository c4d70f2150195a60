# SPDX-License-Identifier: Apache-2.0
"""Modules are charged what the driver was measured to use for them, and credited when they go.

The shim as front on the simulated driver, where small modules share a page of device memory and one of a page's size takes one of its own.
Other memory is in test_shim_memory.py.
"""

import pytest

from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from cuda_shim.coverage.tables import read_classes
from tests.fakes.container import MIB, Container, Node
from tests.fakes.cuda import OUT_OF_MEMORY, SUCCESS

LIMIT_MIB = 2048
CONTEXT_MIB = 530  # of an H200 in the profile
CODE_BYTES = 2 * MIB

PROGRAM = """
from tests.fakes.cuda import *
import ctypes, os, sys, tempfile, threading
IMAGE = b".version 8.0\\n.visible .entry work()\\n{ ret; }\\n//".ljust(2 * MIB, b"-")  # its code fills a page of device memory
def load(name="cuModuleLoadData", *rest):
    return into(name, IMAGE, *rest)
def file():
    path = tempfile.NamedTemporaryFile(suffix=".ptx", delete=False)
    path.write(IMAGE)
    path.close()
    return path.name.encode()
def taken(before):
    return before - info()[0]
"""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node: Node) -> Container:
    return node.container(LIMIT_MIB)


def reported(container: Container, script: str) -> dict:
    answer = container.python(PROGRAM + script)
    assert answer.status == 0, answer
    return answer.last


@pytest.mark.parametrize(
    "load",
    [
        pytest.param('load("cuModuleLoadData")', id="data"),
        pytest.param('load("cuModuleLoadDataEx", 0, 0, 0)', id="data with options"),
        pytest.param('load("cuModuleLoadFatBinary")', id="fat binary"),
        pytest.param('into("cuModuleLoad", file())', id="file"),
    ],
)
def test_module_is_charged_at_load_and_credited_at_unload(container, load):
    script = f"""
start()
before = info()[0]
result, module = {load}
loaded = taken(before)
must("cuModuleUnload", module)
tell(result=result, loaded=loaded, left=taken(before))
"""
    assert reported(container, script) == {"result": SUCCESS, "loaded": CODE_BYTES, "left": 0}


def test_region_separates_modules_and_agrees_with_driver(node, container):
    script = "start()\nfor _ in range(3): load()\ntell(ready=True)\nsys.stdin.read()"
    with container.start_python(PROGRAM + script) as program:
        program.listen()
        (slot,) = container.snapshot().slots
        assert slot.devices[0].module_bytes == 3 * CODE_BYTES
        assert container.line_bytes() == CONTEXT_MIB * MIB + 3 * CODE_BYTES == node.physical_used_bytes(node.uuids[0])


def test_a_full_container_loads_no_module(container):
    script = """
start()
must("cuMemAlloc_v2", ctypes.byref(out()), info()[0])
result, module = load()
tell(result=result, untouched=module == UNTOUCHED, free=info()[0])
"""
    assert reported(container, script) == {"result": OUT_OF_MEMORY, "untouched": True, "free": 0}
    (slot,) = container.snapshot().slots
    assert slot.devices[0].refusals == 1


def test_a_module_that_turns_out_not_to_fit_is_unloaded_again(node, container):
    script = """
start()
must("cuMemAlloc_v2", ctypes.byref(out()), info()[0] - 2 * MIB)
must("cuMemAlloc_v2", ctypes.byref(out()), MIB)
result, module = load()
tell(result=result, untouched=module == UNTOUCHED, free=info()[0])
sys.stdin.read()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"result": OUT_OF_MEMORY, "untouched": True, "free": MIB}
        assert node.physical_used_bytes(node.uuids[0]) <= LIMIT_MIB * MIB
        assert container.snapshot().slots[0].devices[0].module_bytes == 0


@pytest.mark.parametrize("mode", [0, 1], ids=["global", "thread-local"])
def test_a_module_that_turns_out_not_to_fit_leaves_a_capture_valid(node, container, mode):
    """To unload it is of the calls that end a capture, and the capturing thread may load."""
    script = f"""
from tests.fakes.kernels import capture, make_stream
start()
alloc(info()[0] - 2 * MIB)
memory = alloc(MIB)[1]
stream, results = make_stream(), []
def body():
    must("cuMemsetD32Async", memory, 0, 1, stream)
    results.append(load()[0])
graph, count = capture(stream, body, mode={mode}), out(0)
must("cuGraphGetNodes", graph, None, ctypes.byref(count))
tell(results=results, nodes=count.value)
sys.stdin.read()
"""
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"results": [OUT_OF_MEMORY], "nodes": 1}
        assert node.physical_used_bytes(node.uuids[0]) <= LIMIT_MIB * MIB


@pytest.mark.parametrize(
    "make",
    [
        'call("cuCtxCreate_v2", None, 0, 0)',
        'call("cuCtxCreate_v4", None, None, 0, 0)',
        'call("cuDevicePrimaryCtxRetain", None, 0)',
        'call("cuModuleLoadData", None, IMAGE)',
        'call("cuMemAllocAsync", None, MIB, 0)',
        'call("cuMemAllocFromPoolAsync", None, MIB, into("cuDeviceGetDefaultMemPool", 0)[1], 0)',
    ],
)
def test_without_output_pointer_no_uncharged_object_is_created(node, make):
    container = node.container(LIMIT_MIB)
    script = f"start()\nresult = {make}\ntell(result=result)\nsys.stdin.read()"
    bare = reported(node.container(LIMIT_MIB, interposition="none"), script.replace("sys.stdin.read()", ""))
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == bare
        assert container.line_bytes() == node.physical_used_bytes(node.uuids[0]) == CONTEXT_MIB * MIB


def test_an_image_that_the_driver_refuses_is_not_charged(container):
    script = """
start()
before = info()[0]
tell(result=into("cuModuleLoadData", b"no code here")[0], taken=taken(before))
"""
    assert reported(container, script) == {"result": 218, "taken": 0}  # CUDA_ERROR_INVALID_PTX


def test_modules_end_with_their_context(container):
    script = """
start()
before = info()[0]
context = out()
must("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
for _ in range(4):
    load()
must("cuCtxDestroy_v2", context.value)
use(0)
tell(left=taken(before))
"""
    assert reported(container, script) == {"left": 0}
    assert container.snapshot().slots[0].devices[0].module_bytes == 0


def test_threads_that_load_at_once_are_charged_each_module_once(container):
    script = """
start()
before = info()[0]
context = out()
must("cuCtxGetCurrent", ctypes.byref(context))
def loads():
    must("cuCtxSetCurrent", context.value)
    for _ in range(5):
        load()
threads = [threading.Thread(target=loads) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tell(taken=taken(before))
"""
    assert reported(container, script) == {"taken": 4 * 5 * CODE_BYTES}


def test_memory_taken_by_others_meanwhile_is_not_charged_to_modules(node, container):
    busy = "start()\ntell(ready=True)\nwhile True:\n    result, address = alloc(64 * MIB)\n    must('cuMemFree_v2', address)\n"
    script = """
start()
before = info()[0]
modules = [load()[1] for _ in range(200)]
loaded = taken(before)
for module in modules:
    must("cuModuleUnload", module)
tell(loaded=loaded, left=taken(before))
"""
    with node.container(LIMIT_MIB).start_python(PROGRAM + busy) as neighbour:
        neighbour.listen()
        answer = reported(container, script)
    assert answer["left"] == 0
    assert answer["loaded"] <= 200 * CODE_BYTES
    # What a neighbour frees in the same instant can hide the last few modules, until the agent's overhead figure has them.
    assert answer["loaded"] >= 100 * CODE_BYTES


def test_managed_memory_that_is_not_on_the_device_hides_no_module(container):
    script = """
start()
must("cuMemAllocManaged", ctypes.byref(out()), 256 * MIB, 1)
before = info()[0]
load()
first = taken(before)
load()
tell(first=first, both=taken(before))
"""
    assert reported(container, script) == {"first": CODE_BYTES, "both": 2 * CODE_BYTES}


def without_nvml(node):
    """A container that has no NVML to ask."""
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, context_bytes=CONTEXT_MIB * MIB),)))
    (container.root / "run/aliquot/driver" / contract.NVML_DRIVER_SONAME).unlink()
    (container.root / "usr/lib/x86_64-linux-gnu" / contract.NVML_SONAME).unlink()
    return container


def test_without_nvml_free_memory_of_device_is_used(node):
    container = without_nvml(node)
    script = """
start()
before = info()[0]
module = load()[1]
loaded = taken(before)
must("cuModuleUnload", module)
tell(loaded=loaded, left=taken(before))
"""
    assert reported(container, script) == {"loaded": CODE_BYTES, "left": 0}


@pytest.mark.parametrize(("mib", "result"), [(900, SUCCESS), (3000, OUT_OF_MEMORY)])
def test_without_nvml_variables_of_module_are_charged(node, mib, result):
    container = without_nvml(node)
    script = f"""
image = b".version 8.0\\n.visible .entry work()\\n{{ ret; }}\\n.visible .global .align 4 .b8 large[%d];\\n" % ({mib} * MIB)
start()
before = info()[0]
result, module = into("cuModuleLoadData", image)
loaded = taken(before)
if not result:
    must("cuModuleUnload", module)
tell(result=result, loaded=loaded, left=taken(before))
"""
    answer = reported(container, script)
    assert answer.pop("loaded") in ([mib * MIB + code for code in WITH_CODE] if result == SUCCESS else [0])
    assert answer == {"result": result, "left": 0}


def test_memory_taken_by_neighbour_does_not_count_as_modules(node):
    container = without_nvml(node)
    grow = """
import time
start()
tell(ready=True)
sys.stdin.readline()
for _ in range(600):
    must("cuMemAlloc_v2", ctypes.byref(out()), 64 * MIB)
    time.sleep(0.001)
sys.stdin.read()
"""
    script = """
small = b".version 8.0\\n.visible .entry work()\\n{ ret; }\\n//"
start()
tell(ready=True)
sys.stdin.readline()
before = info()[0]
for _ in range(60):
    load()
large = taken(before)
for _ in range(200):
    must("cuModuleLoadData", ctypes.byref(out()), small)
tell(large=large, all=taken(before))
"""
    with node.container(100 * 1024).start_python(PROGRAM + grow) as neighbour, container.start_python(PROGRAM + script) as program:
        neighbour.listen()
        program.listen()
        neighbour.tell("go")
        answer = program.ask("go")
    assert answer["large"] == 60 * CODE_BYTES
    assert answer["all"] <= answer["large"] + CODE_BYTES


@pytest.mark.parametrize("load", ['load("cuLibraryLoadData", 0, 0, 0, 0, 0, 0)', 'into("cuLibraryLoadFromFile", file(), 0, 0, 0, 0, 0, 0)'])
def test_a_library_that_takes_nothing_when_it_is_loaded_is_charged_nothing(container, load):
    script = f"""
must("cuInit", 0)
early = {load}[0]
use(0)
before = info()[0]
result, library = {load}
loaded = taken(before)
tell(early=early, result=result, loaded=loaded, unloaded=call("cuLibraryUnload", library), left=taken(before))
"""
    assert reported(container, script) == {"early": SUCCESS, "result": SUCCESS, "loaded": 0, "unloaded": SUCCESS, "left": 0}


# --- what is loaded later -----------------------------------------------------------------------------------------

LIBRARY = """
def library(mib):
    image = b".version 8.0\\n.visible .entry work()\\n{ ret; }\\n.visible .global .align 4 .b8 large[%d];\\n" % (mib * MIB)
    image += b".visible .global .attribute(.managed) .align 4 .b8 shared[4];\\n"
    result, handle = into("cuLibraryLoadData", image, 0, 0, 0, 0, 0, 0)
    assert not result, result
    return handle
def variable(handle, bytes=None):
    address = out()
    return call("cuLibraryGetGlobal", ctypes.byref(address), bytes, handle, b"large"), address.value
start()
before = info()[0]
"""
"""A library takes its variable's memory when the program first asks for it."""
WITH_CODE = (0, CODE_BYTES)
"""The code may be loaded with it, into a page of its own."""


def test_variable_of_library_is_charged_when_first_asked_for(node, container):
    script = """
handle = library(900)
loaded = taken(before)
results = [variable(handle)[0] for _ in range(2)]
asked = taken(before)
must("cuLibraryUnload", handle)
tell(results=results, loaded=loaded, asked=asked - 900 * MIB, left=taken(before))
"""
    answer = reported(container, LIBRARY + script)
    assert answer.pop("asked") in WITH_CODE
    assert answer == {"results": [SUCCESS] * 2, "loaded": 0, "left": 0}


def test_variable_that_does_not_fit_is_refused_and_counted_at_once(node, container):
    """CUDA has no way to give it back but to unload the library, which is the program's."""
    script = """
handle, small = library(3000), library(4)
size = out()
first, address = variable(handle, ctypes.byref(size))
tell(first=first, untouched=[address == UNTOUCHED, size.value == UNTOUCHED], again=variable(handle)[0], other=variable(small)[0],
     more=alloc(MIB)[0], free=info()[0])
sys.stdin.readline()
must("cuLibraryUnload", handle)
tell(left=taken(before), small=variable(small)[0], more=alloc(MIB)[0])
"""
    refused = {"first": OUT_OF_MEMORY, "again": OUT_OF_MEMORY, "other": OUT_OF_MEMORY, "more": OUT_OF_MEMORY}
    with container.start_python(PROGRAM + LIBRARY + script) as program:
        assert program.listen() == {**refused, "untouched": [True, True], "free": 0}
        assert container.line_bytes() >= node.physical_used_bytes(node.uuids[0]) > 3000 * MIB, "the agent's audit finds it"
        program.tell("")
        left = program.listen()
    assert left["left"] <= 3 * CODE_BYTES, "nothing of the large one but a page that both share"
    assert (left["small"], left["more"]) == (SUCCESS, SUCCESS)


@pytest.mark.parametrize(
    "ask",
    [
        'call("cuModuleGetFunction", ctypes.byref(out()), module, b"work")',
        'call("cuModuleGetGlobal_v2", ctypes.byref(out()), 0, module, b"large")',
        'call("cuLibraryGetGlobal", ctypes.byref(out()), 0, handle, b"large")',
        'call("cuLibraryGetModule", ctypes.byref(out()), handle)',
        'call("cuKernelGetFunction", ctypes.byref(out()), kernel)',
        'call("cuFuncLoad", function)',
    ],
)
def test_full_container_still_gets_what_is_loaded(container, ask):
    script = f"""
handle = library(1)
module, kernel = into("cuLibraryGetModule", handle)[1], into("cuLibraryGetKernel", handle, b"work")[1]
function = into("cuKernelGetFunction", kernel)[1]
def ask(): return {ask}
first = [variable(handle)[0], ask()]
alloc(info()[0])
tell(first=first, full=info()[0], again=ask())
"""
    assert reported(container, LIBRARY + script) == {"first": [SUCCESS, SUCCESS], "full": 0, "again": SUCCESS}


LATE = {
    "cuModuleGetGlobal_v2": "ctypes.byref(out()), 0, module, b'large'",
    "cuModuleEnumerateFunctions": "(ctypes.c_void_p * 4)(), 4, module",
    "cuLibraryGetGlobal": "ctypes.byref(out()), 0, handle, b'large'",
    "cuLibraryGetManaged": "ctypes.byref(out()), 0, handle, b'shared'",
    "cuLibraryGetModule": "ctypes.byref(out()), handle",
    "cuLibraryGetKernel": "ctypes.byref(out()), handle, b'work'",
    "cuLibraryEnumerateKernels": "(ctypes.c_void_p * 4)(), 4, handle",
    "cuKernelGetFunction": "ctypes.byref(out()), kernel",
    "cuFuncLoad": "kernel",
}
"""Calls that load code and variables, with their arguments."""
LOADS_NOTHING = {"cuModuleGetFunction", "cuLibraryGetUnifiedFunction"}
"""On the simulated driver: it loads a module's functions with the module, and no device has unified functions."""
SECOND_DEVICE = """
handle = library(MIB_OF_LIBRARY)
module, kernel = into("cuLibraryGetModule", handle)[1], into("cuLibraryGetKernel", handle, b"work")[1]
before = info()[0]
use(1)
other = info()[0]
result = call(ASKED)
"""
"""Asks for it on another device than the one where the library is loaded already."""


def second_device(name: str, mib: int) -> str:
    return LIBRARY + SECOND_DEVICE.replace("MIB_OF_LIBRARY", str(mib)).replace("ASKED", f'"{name}", {LATE[name]}')


def test_every_call_of_the_table_that_loads_late_is_tried():
    rows = read_classes("cuda").values()
    late = {row.base for row in rows if row.reason.startswith(("loads lazily", "its kernels are loaded"))}
    assert late == {name.removesuffix("_v2") for name in LATE} | LOADS_NOTHING


@pytest.mark.parametrize("name", LATE)
def test_library_of_two_devices_is_charged_on_each(node, name):
    container = node.container(LIMIT_MIB, LIMIT_MIB)
    script = """
second = other - info()[0]
use(0)
tell(result=result, second=second - 64 * MIB, first=taken(before))
"""
    answer = reported(container, second_device(name, 64) + script)
    assert answer.pop("second") in WITH_CODE
    assert answer == {"result": SUCCESS, "first": 0}


@pytest.mark.parametrize("name", LATE)
def test_library_that_does_not_fit_second_device_is_refused_and_counted(node, name):
    container = node.container(2 * LIMIT_MIB, LIMIT_MIB)
    script = """
tell(result=result, more=alloc(MIB)[0], free=info()[0])
sys.stdin.readline()
"""
    with container.start_python(PROGRAM + second_device(name, LIMIT_MIB) + script) as program:
        assert program.listen() == {"result": OUT_OF_MEMORY, "more": OUT_OF_MEMORY, "free": 0}
        assert container.line_bytes(1) >= node.physical_used_bytes(node.uuids[1]) > LIMIT_MIB * MIB, "the agent's audit finds it"
