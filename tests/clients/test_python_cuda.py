# SPDX-License-Identifier: Apache-2.0
"""Python packages that compile kernels and allocate: each launches a kernel, fills its share, is refused, and shares it with a process."""

import pytest

from tests.clients import harness
from tests.clients.harness import run_python, start_python
from tests.fakes.container import MIB

pytestmark = [pytest.mark.timeout(300)]

CODE_MIB = 64
"""More than the code of a small kernel takes."""

PTX = """
PTX = b'''
.version 7.0
.target sm_70
.address_size 64
.visible .entry add_one(.param .u64 cells)
{
  .reg .u64 %cells, %at;
  .reg .u32 %i, %value;
  ld.param.u64 %cells, [cells];
  mov.u32 %i, %tid.x;
  mul.wide.u32 %at, %i, 4;
  add.u64 %cells, %cells, %at;
  ld.global.u32 %value, [%cells];
  add.u32 %value, %value, 1;
  st.global.u32 [%cells], %value;
  ret;
}
'''
"""

CUDA_CORE = f"""
{PTX}
import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, launch
device = Device(0)
device.set_current()
stream = device.create_stream()
kept = []
def work():
    kernel = ObjectCode.from_ptx(PTX).get_kernel("add_one")
    kept.append(kernel)
    launch(stream, LaunchConfig(grid=1, block=32), kernel, np.uint64(take(4096)))
    stream.sync()
def take(size):
    result, address = driver.cuMemAlloc(size)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(result.name)
    return int(address)
def info():
    return tuple(map(int, driver.cuMemGetInfo()[1:]))
"""

NUMBA = """
import numpy as np
from numba import cuda
@cuda.jit
def add_one(cells):
    cells[cuda.grid(1)] += 1
kept = []
def work():
    add_one[1, 32](cuda.device_array(1024, np.int32))
    cuda.synchronize()
def take(size):
    kept.append(cuda.current_context().memalloc(size))
def info():
    return tuple(cuda.current_context().get_memory_info())
cuda.current_context()
"""

PYCUDA = f"""
{PTX}
import numpy as np
import atexit
import pycuda.driver as drv
drv.init()
context = drv.Device(0).retain_primary_context()
context.push()
atexit.register(context.pop)
kept = []
def work():
    module = drv.module_from_buffer(PTX)
    kept.append(module)
    module.get_function("add_one")(drv.mem_alloc(4096), block=(32, 1, 1))
    context.synchronize()
def take(size):
    kept.append(drv.mem_alloc(size))
def info():
    return drv.mem_get_info()
"""

PROGRAMS = {"cuda-core": CUDA_CORE, "numba-cuda": NUMBA, "pycuda": PYCUDA}
OUT_OF_MEMORY = {
    "cuda-core": "CUDA_ERROR_OUT_OF_MEMORY",
    "numba-cuda": "CUDA_ERROR_OUT_OF_MEMORY",
    "pycuda": "cuMemAlloc failed: out of memory",
}
"""What the client's own error says."""

START = f"""
{harness.FIT}
import json, sys, warnings
warnings.simplefilter("ignore")
def tell(**facts):
    print(json.dumps(facts), flush=True)
def tried(size):
    try:
        take(size)
    except Exception as error:
        return str(error)
    return ""
"""
FILL = """
work()
free, total = info()
size, too_much = fit(free, *map(int, sys.argv[1:]))
tell(free=free, total=total, size=size, first=tried(size), more=tried(too_much))
"""
REPL = """
for line in sys.stdin:
    word, *rest = line.split()
    if word == "info":
        tell(free=info()[0])
    else:
        tell(said=tried(int(rest[0]) if word == "alloc" else fit(info()[0], *map(int, rest))[0]))
"""


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.client(name)) for name in PROGRAMS])
def name(request) -> str:
    return request.param


@pytest.mark.shows("limit", "view", "refusal")
def test_kernel_runs_and_limit_holds_to_the_byte(name, client, container, record_property):
    """a kernel, then memory to the last byte; one more is refused, in the client's own words"""
    reported = run_python(client, container, START + PROGRAMS[name] + FILL, harness.fill_step(container)).last
    assert reported["total"] == harness.total_bytes(container)
    if harness.knows_sizes(container):
        code = reported["total"] - harness.context_bytes(container) - reported["free"]
        assert 0 < code < CODE_MIB * MIB
    assert reported["first"] == ""
    assert OUT_OF_MEMORY[name] in reported["more"]
    record_property("found", harness.in_mib(reported["size"]))


@pytest.mark.shows("processes", "kill")
def test_two_processes_share_limit_and_kill_returns_memory(name, client, container):
    """two processes under one limit; kill -9 returns the memory"""
    block, kept = harness.fill_step(container)
    program = START + PROGRAMS[name] + REPL
    with start_python(client, container, program) as first, start_python(client, container, program) as second:
        first.ask("info")  # its context counts already
        before = second.ask("info")["free"]
        assert first.ask(f"fill {block} {kept}")["said"] == ""
        assert OUT_OF_MEMORY[name] in second.ask(f"alloc {block + kept}")["said"]
        first.kill()
        harness.wait_for(lambda: harness.is_given_back(container, before, second.ask("info")["free"]))


POOL = """
step, buffers, said = 64 << 20, [], ""
while not said:
    try:
        buffers.append(device.allocate(step, stream=stream))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
stream.sync()
tell(held=len(buffers) * step, total=info()[1], said=said)
for line in sys.stdin:
    pass
"""


@pytest.mark.client("cuda-core")
def test_memory_resource_stops_at_the_limit(client, node, container, record_property):
    """its own memory resource, a pool of the driver: until it is refused"""
    with start_python(client, container, START + CUDA_CORE + POOL) as program:
        reported = program.listen()
        held = node.physical_used_bytes(node.uuids[0])
    assert "OUT_OF_MEMORY" in reported["said"]
    assert reported["held"] <= held <= harness.total_bytes(container)
    assert reported["held"] > 0.9 * harness.total_bytes(container) - harness.context_bytes(container)
    record_property("found", harness.in_mib(reported["held"]))
