# SPDX-License-Identifier: Apache-2.0
"""A refusal of the shim is CUDA_ERROR_OUT_OF_MEMORY and nothing else: what the program passed for the answer holds what it held before.

Every way of allocating, as front and as preload, on the simulated driver, which clears what it may write even where it succeeds. How much
each way may take is in test_shim_memory.py. Some calls are refused only when the shim has no host memory for its records: a preloaded
library then returns no memory for the shim's own requests (``starve``).
"""

import subprocess

import pytest

from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from tests.fakes.container import LIBRARY_DIR, MIB, Container, Node
from tests.fakes.cuda import OUT_OF_MEMORY

LIMIT_MIB = 6144

FRAME = f"""
from tests.fakes.cuda import *
import ctypes, os
TOO_MUCH = {LIMIT_MIB} * MIB
IMAGE = b".version 8.0\\n.visible .entry work()\\n{{ ret; }}\\n//".ljust(2 * MIB, b"-")  # its code fills a page of device memory

class Shape(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t), ("format", ctypes.c_int),
                ("channels", ctypes.c_uint), ("flags", ctypes.c_uint))

class Shape2D(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("format", ctypes.c_int), ("channels", ctypes.c_uint))

class AllocationNode(ctypes.Structure):
    _fields_ = (("pool", PoolProps), ("access", ctypes.c_void_p), ("accesses", ctypes.c_size_t), ("bytes", ctypes.c_size_t),
                ("address", ctypes.c_uint64))

class Instantiation(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("stream", ctypes.c_void_p), ("error_node", ctypes.c_uint64), ("result", ctypes.c_int))

def graph(size, device):
    made, node = out(), out()
    must("cuGraphCreate", ctypes.byref(made), 0)
    params = AllocationNode(pool=PoolProps(type=1, location_type=DEVICE, location_id=device), bytes=size)
    must("cuGraphAddMemAllocNode", ctypes.byref(node), made, None, 0, ctypes.byref(params))
    return made

def starve(on):
    ctypes.CDLL(None).starve(on)

def fill(rest=0):
    large = (info()[0] - rest) // (2 * MIB) * 2 * MIB
    must("cuMemAlloc_v2", ctypes.byref(out()), large)
    if info()[0] > rest:
        must("cuMemAlloc_v2", ctypes.byref(out()), info()[0] - rest)

def current():
    context = out()
    must("cuCtxGetCurrent", ctypes.byref(context))
    return context.value

def made(name, *arguments):
    result, handle = into(name, *arguments)
    assert result == 0, (name, result)
    return handle

start()
here = ctypes.byref(answer := out())
more = ctypes.byref(second := out())
log = ctypes.create_string_buffer(b"\\xa5" * 64, 64)
watched = [answer, second, log]
"""
"""``here``, ``more`` and ``log`` are for the call to write; other things that it may write are added to ``watched``."""

PROPS = "ctypes.byref(AllocationProp(type=1, handle_types=1, location_type=DEVICE, location_id=0))"
POOL_PROPS = "ctypes.byref(PoolProps(type=1, location_type=DEVICE, location_id=0))"
OWN_POOL = f'pool = made("cuMemPoolCreate", {POOL_PROPS})'
WIDE = "Shape(65536, 16384, 0, 0x20, 4, 0)"
WIDE_2D = "ctypes.byref(Shape2D(65536, 16384, 0x20, 4))"
JIT = """
options = (ctypes.c_int * 3)(2, 3, 4)  # CU_JIT_WALL_TIME, CU_JIT_INFO_LOG_BUFFER and its size
values = (ctypes.c_uint64 * 3)(UNTOUCHED, ctypes.addressof(log), 64)
watched += [values]
fill(rest=MIB)
"""
UPLOADED = """
ready, params = graph(TOO_MUCH, 0), Instantiation(2, None, UNTOUCHED, -7)  # CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
watched += [params]
"""
ELSEWHERE = """
ready, params = graph(MIB, 2), Instantiation(0, None, UNTOUCHED, -7)  # on a device that is visible and not granted
watched += [params]
"""
SHARED = f"""
handle, file = made("cuMemCreate", 2 * MIB, {PROPS}, 0), ctypes.c_int()
must("cuMemExportToShareableHandle", ctypes.byref(file), handle, 1, 0)
must("cuMemMap", reserve(2 * MIB), 2 * MIB, 0, handle, 0)
must("cuMemRelease", handle)
starve(1)
"""
MAPPED = f"""
places = []
for _ in range(2048):  # one after the other, so that the books have the room of their first handles, which is less than so many need
    handle = made("cuMemCreate", 2 * MIB, {PROPS}, 0)
    places.append(reserve(2 * MIB))
    must("cuMemMap", places[-1], 2 * MIB, 0, handle, 0)
    must("cuMemRelease", handle)
def retain():
    for place in places:
        answer.value = UNTOUCHED
        result = call("cuMemRetainAllocationHandle", here, ctypes.c_void_p(place))
        if result:
            return result
    return 0
starve(1)
"""

CASES = {
    "linear": ("", 'call("cuMemAlloc_v2", here, TOO_MUCH)'),
    "linear, 32 bits": ("fill()", 'call("cuMemAlloc", here, 2**30)'),
    "pitched": ("", 'call("cuMemAllocPitch_v2", here, more, 2**20, 8192, 4)'),
    "pitched, 32 bits": ("fill()", 'call("cuMemAllocPitch", here, more, 2**20, 1024, 4)'),
    "managed": ("", 'call("cuMemAllocManaged", here, TOO_MUCH, 1)'),
    "async": ("", 'call("cuMemAllocAsync", here, TOO_MUCH, 0)'),
    "async, per thread": ("", 'call("cuMemAllocAsync_ptsz", here, TOO_MUCH, 0)'),
    "own pool": (OWN_POOL, 'call("cuMemAllocFromPoolAsync", here, TOO_MUCH, pool, 0)'),
    "own pool, per thread": (OWN_POOL, 'call("cuMemAllocFromPoolAsync_ptsz", here, TOO_MUCH, pool, 0)'),
    "own pool that cannot be counted": ("starve(1)", f'call("cuMemPoolCreate", here, {POOL_PROPS})'),
    "VMM": ("", f'call("cuMemCreate", here, TOO_MUCH, {PROPS}, 0)'),
    "VMM that cannot be counted": ("starve(1)", f'call("cuMemCreate", here, 2 * MIB, {PROPS}, 0)'),
    "VMM import": (SHARED, 'call("cuMemImportFromShareableHandle", here, ctypes.c_void_p(file.value), 1)'),
    "VMM retain": (MAPPED, "retain()"),
    "array": ("", f'call("cuArrayCreate_v2", here, {WIDE_2D})'),
    "array 3D": ("", f'call("cuArray3DCreate_v2", here, ctypes.byref({WIDE}))'),
    "mipmapped": ("", f'call("cuMipmappedArrayCreate", here, ctypes.byref({WIDE}), 2)'),
    "graph": (ELSEWHERE, 'call("cuGraphInstantiate", here, ready, more, log, 64)'),
    "graph v2": (ELSEWHERE, 'call("cuGraphInstantiate_v2", here, ready, more, log, 64)'),
    "graph with flags": (ELSEWHERE, 'call("cuGraphInstantiateWithFlags", here, ready, 0)'),
    "graph with params": (ELSEWHERE, 'call("cuGraphInstantiateWithParams", here, ready, ctypes.byref(params))'),
    "graph with params, per thread": (ELSEWHERE, 'call("cuGraphInstantiateWithParams_ptsz", here, ready, ctypes.byref(params))'),
    "graph uploaded": (UPLOADED, 'call("cuGraphInstantiateWithParams", here, ready, ctypes.byref(params))'),
    "primary context": ("", 'call("cuDevicePrimaryCtxRetain", here, 1)'),
    "context v2": ("", 'call("cuCtxCreate_v2", here, 0, 1)'),
    "context v3": ("", 'call("cuCtxCreate_v3", here, None, 0, 0, 1)'),
    "context v4": ("", 'call("cuCtxCreate_v4", here, None, 0, 1)'),
    "second context": ("fill()", 'call("cuCtxCreate_v2", here, 0, 0)'),
    "context limit": ("", 'call("cuCtxSetLimit", 2, TOO_MUCH)'),
    "module in a full container": ("fill()", 'call("cuModuleLoadData", here, IMAGE)'),
    "module": ("fill(rest=MIB)", 'call("cuModuleLoadData", here, IMAGE)'),
    "module with options": (JIT, 'call("cuModuleLoadDataEx", here, IMAGE, 3, options, values)'),
    "library in a full container": ("fill()", 'call("cuLibraryLoadData", here, IMAGE, None, None, 0, None, None, 0)'),
}  # fmt: skip
"""What comes before, and the call that is refused. Device 1 is granted less than a context takes; device 2 is visible and not granted."""

STARVE = r"""
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_memalign(size_t, size_t);
static _Thread_local int starving;
void starve(int on) { starving = on; }
static int is_refused(void *caller)
{
    Dl_info info;
    return starving && dladdr(caller, &info) && !strcmp(info.dli_fname, getenv("STARVED"));
}
void *malloc(size_t bytes) { return is_refused(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { return is_refused(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes); }
void *aligned_alloc(size_t part, size_t bytes) { return is_refused(__builtin_return_address(0)) ? NULL : __libc_memalign(part, bytes); }
"""


@pytest.fixture(scope="module")
def starving(tmp_path_factory):
    library = tmp_path_factory.mktemp("starve") / "starve.so"
    library.with_suffix(".c").write_text(STARVE)
    subprocess.run(["cc", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-o", library, library.with_suffix(".c"), "-ldl"], check=True)
    return library


@pytest.fixture(params=["front", "preload"])
def container(request, build_dir, sim_node, tmp_path) -> Container:
    node = Node(build_dir, sim_node("h200x8"), tmp_path)
    limits = Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB), DeviceLimit(node.uuids[1], 100 * MIB)))
    return node.container_with(limits, interposition=request.param, uuids=node.uuids[:3])


def preloading(container: Container, library) -> dict[str, str]:
    own = container.environment().get("LD_PRELOAD")
    shim = own or str(container.root / LIBRARY_DIR / contract.CUDA_SONAME)
    return {"LD_PRELOAD": f"{own}:{library}" if own else str(library), "STARVED": shim}


@pytest.mark.parametrize("kind", CASES)
def test_a_refusal_leaves_every_output_as_it_was_and_takes_nothing(container, starving, kind):
    setup, refused = CASES[kind]
    script = f"""{FRAME}
{setup}
def seen():
    return [bytes(one) for one in watched]
before, free, context = seen(), info()[0], current()
result = {refused}
starve(0)
changed = [number for number, (was, now) in enumerate(zip(before, seen())) if was != now]
tell(result=result, changed=changed, taken=free - info()[0], current=current() == context)
"""
    answer = container.python(script, env=preloading(container, starving))
    assert answer.status == 0, answer
    assert answer.last == {"result": OUT_OF_MEMORY, "changed": [], "taken": 0, "current": True}
