# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own Python bindings of the driver API and of NVML."""

import pytest

from tests.clients import harness
from tests.clients.harness import run_python, start_python
from tests.fakes.container import MIB

pytestmark = [pytest.mark.client("cuda-bindings"), pytest.mark.timeout(240)]

START = """
import json, sys
from cuda.bindings import driver as cu

def must(answer):
    result, *values = answer
    if result != cu.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"failed with {result}")
    return values[0] if len(values) == 1 else values

def tell(**facts):
    print(json.dumps(facts), flush=True)

def alloc(size):
    return cu.cuMemAlloc(size)[0].name

must(cu.cuInit(0))
device = must(cu.cuDeviceGet(0))
must(cu.cuCtxSetCurrent(must(cu.cuDevicePrimaryCtxRetain(device))))
"""

FILL = """
free, total = must(cu.cuMemGetInfo())
size, too_much = fit(free, *map(int, sys.argv[1:]))
first, more = alloc(size), alloc(too_much)
tell(free=free, total=total, device=must(cu.cuDeviceTotalMem(device)), size=size, first=first, more=more)
"""


@pytest.mark.shows("limit", "view", "refusal")
def test_limit_holds_to_the_byte(client, container, record_property):
    """cuMemAlloc to the last byte; one more is refused"""
    reported = run_python(client, container, START + harness.FIT + FILL, harness.fill_step(container)).last
    total = harness.total_bytes(container)
    assert reported["total"] == total
    if harness.knows_sizes(container):
        assert (reported["device"], reported["free"]) == (total, total - harness.context_bytes(container))
    assert (reported["first"], reported["more"]) == ("CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY")
    record_property("found", harness.in_mib(reported["size"]))


NVML = """
import json
from cuda.bindings import nvml
nvml.init_v2()
handle = nvml.device_get_handle_by_index_v2(0)
memory = nvml.device_get_memory_info_v2(handle)
processes = nvml.device_get_compute_running_processes_v3(handle)
print(json.dumps(dict(count=nvml.device_get_count_v2(), total=memory.total, used=memory.used, pids=[int(p.pid) for p in processes])))
"""


def test_nvml_shows_limit_and_own_processes(client, node, container, record_property):
    """NVML: devices, memory, processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        reported = run_python(client, container, NVML).last
        pids = harness.visible_pids(node, container, own, foreign)
    assert reported["count"] == harness.visible_gpus(node, container)
    assert set(reported["pids"]) == pids
    if harness.is_limited(container):
        assert reported["total"] == harness.LIMIT_MIB * MIB
        assert reported["used"] // MIB == harness.used_mib(container)
    record_property("found", harness.in_mib(reported["total"]))


REPL = """
for line in sys.stdin:
    word, *rest = line.split()
    free = must(cu.cuMemGetInfo())[0]
    if word == "info":
        tell(free=free)
    else:
        tell(result=alloc(int(rest[0]) if word == "alloc" else fit(free, *map(int, rest))[0]))
"""


@pytest.mark.shows("processes", "kill")
def test_two_processes_share_limit_and_kill_returns_memory(client, container):
    """two processes under one limit; kill -9 returns the memory"""
    block, kept = harness.fill_step(container)
    program = START + harness.FIT + REPL
    with start_python(client, container, program) as first, start_python(client, container, program) as second:
        first.ask("info")  # its context counts already
        before = second.ask("info")["free"]
        assert first.ask(f"fill {block} {kept}")["result"] == "CUDA_SUCCESS"
        assert second.ask(f"alloc {block + kept}")["result"] == "CUDA_ERROR_OUT_OF_MEMORY"
        first.kill()
        harness.wait_for(lambda: harness.is_given_back(container, before, second.ask("info")["free"]))
