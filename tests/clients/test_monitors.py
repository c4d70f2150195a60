# SPDX-License-Identifier: Apache-2.0
"""Monitors: what each shows in a container is the container's share and its own processes."""

import re
from collections.abc import Callable

import pytest

from tests.clients import harness
from tests.clients.harness import LIMIT_MIB, run_python
from tests.clients.installing import Client
from tests.fakes.container import MIB, Container, Node

pytestmark = [pytest.mark.timeout(240)]

NVITOP = """
import json
from nvitop import Device
device, *others = Device.all()
print(json.dumps(dict(total=device.memory_total(), used=device.memory_used(), pids=list(device.processes()), count=1 + len(others))))
"""

PY3NVML = """
import json
from py3nvml import py3nvml as n
n.nvmlInit()
handle = n.nvmlDeviceGetHandleByIndex(0)
memory = n.nvmlDeviceGetMemoryInfo(handle)
pids = [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(handle)]
print(json.dumps(dict(total=memory.total, used=memory.used, pids=pids, count=n.nvmlDeviceGetCount())))
"""


def check_view(node: Node, container: Container, own: int, foreign: int, reported: dict) -> str:
    """Check what a library tells; return the text for the page."""
    assert reported["count"] == harness.visible_gpus(node, container)
    assert set(reported["pids"]) == harness.visible_pids(node, container, own, foreign)
    if harness.is_limited(container):
        assert (reported["total"], reported["used"] // MIB) == (LIMIT_MIB * MIB, harness.used_mib(container))
    return harness.in_mib(reported["total"])


def nvtop_screen(client: Client, container: Container) -> str:
    """Return what nvtop shows."""
    return harness.on_terminal(client, container, [client.program("nvtop"), "-C", "-p"], harness.QUIT)


def go_nvml_processes(client: Client, container: Container) -> dict[int, int]:
    """Return the bytes of each process that go-nvml's example lists."""
    printed = harness.run(client, container, [client.program("compute-processes")]).stdout
    return {int(pid): int(used) for pid, used in re.findall(r"Pid:(\d+) UsedGpuMemory:(\d+)", printed)}


@pytest.mark.client("nvitop")
@pytest.mark.shows("view", "processes")
def test_nvitop_library_shows_limit_and_own_processes(client, node: Node, container: Container, record_property):
    """library: devices, memory, processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        reported = run_python(client, container, NVITOP).last
        found = check_view(node, container, own, foreign, reported)
    record_property("found", found)


@pytest.mark.client("nvitop")
def test_nvitop_program_shows_limit_and_own_processes(client, node: Node, container: Container):
    """`nvitop -1`: the screen of devices and processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        screen = harness.on_terminal(client, container, [client.program("nvitop"), "-1"], None)
    shown = {pid for pid in (own, foreign) if re.search(rf"\b{pid}\b", screen)}
    assert shown == ({own} if harness.is_limited(container) else {own, foreign})
    if harness.is_limited(container):
        assert f"{harness.used_mib(container)}.0MiB / {LIMIT_MIB}MiB" in screen.replace(",", "")


@pytest.mark.client("py3nvml")
@pytest.mark.shows("view", "processes")
def test_py3nvml_shows_limit_and_own_processes(client, node: Node, container: Container, record_property):
    """library: devices, memory, processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        reported = run_python(client, container, PY3NVML).last
        found = check_view(node, container, own, foreign, reported)
    record_property("found", found)


@pytest.mark.client("nvtop")
@pytest.mark.shows("view", "processes")
def test_nvtop_shows_limit_and_own_processes(client, node: Node, container: Container, record_property):
    """on a terminal: memory and processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        screen = nvtop_screen(client, container)
    shown = {pid for pid in (own, foreign) if re.search(rf"\b{pid}\b", screen)}
    assert shown == ({own} if harness.is_limited(container) else {own, foreign})
    used, total = re.search(r"MEM\[[| ]*([\d.]+)Gi/\s*([\d.]+)Gi\]", screen).groups()
    if harness.is_limited(container):
        assert (used, total) == (f"{harness.used_mib(container) / 1024:.3f}", f"{LIMIT_MIB / 1024:.3f}")
    record_property("found", f"{used} of {total} GiB")


@pytest.mark.client("go-nvml")
def test_go_nvml_lists_devices(client, node: Node, container: Container):
    """`examples/devices`: the visible GPU"""
    printed = harness.run(client, container, [client.program("devices")]).stdout
    shown = re.findall(r"uuid=(\S+)", printed)
    assert (shown[0], len(shown)) == (node.uuids[0], harness.visible_gpus(node, container))


@pytest.mark.client("go-nvml")
@pytest.mark.shows("view", "processes")
def test_go_nvml_lists_own_processes(client, node: Node, container: Container):
    """`examples/compute-processes`: processes"""
    with harness.own_and_foreign(node, container) as (own, foreign):
        shown = go_nvml_processes(client, container)
        pids = harness.visible_pids(node, container, own, foreign)
    assert set(shown) == pids
    assert harness.is_own_memory(container, shown[own] // MIB)


@pytest.mark.client("go-nvml")
def test_go_nvml_reads_no_counters_of_neighbours(client, container: Container, record_property):
    """`examples/gpm-metrics`: figures of the whole GPU, which a share does not have"""
    answer = container.run([client.program("gpm-metrics")], harness.environment(client))
    refused = "GPM queries are not supported" in answer.stderr
    assert refused == harness.is_limited(container), answer
    record_property("found", "not supported" if refused else "figures")


LISTS: dict[str, Callable[[Client, Container, int], bool]] = {
    "nvitop": lambda client, container, pid: pid in run_python(client, container, NVITOP).last["pids"],
    "py3nvml": lambda client, container, pid: pid in run_python(client, container, PY3NVML).last["pids"],
    "nvtop": lambda client, container, pid: re.search(rf"\b{pid}\b", nvtop_screen(client, container)) is not None,
    "go-nvml": lambda client, container, pid: pid in go_nvml_processes(client, container),
}
"""Whether a monitor lists a process."""


@pytest.mark.shows("kill")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.client(name)) for name in LISTS])
def test_kill_removes_process_from_view(name: str, client: Client, container: Container):
    """kill -9 removes the process and its memory"""
    with container.repl() as program:
        pid = program.process.pid
        assert LISTS[name](client, container, pid)
        program.kill()
        harness.wait_for(lambda: not LISTS[name](client, container, pid), seconds=60)
