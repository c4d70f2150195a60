# SPDX-License-Identifier: Apache-2.0
"""Under an MPS daemon that a container's programs find: limits hold, and views tell who is its client."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.container import MIB, Node

LIMIT_MIB = 4096
CONTEXT_MIB = 530
OUT_OF_MEMORY = 2
MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"

LISTS = """
from tests.fakes.cuda import tell
import ctypes
import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
def reported(processes):
    return sorted([p.pid, p.usedGpuMemory] for p in processes)
def of(kind):
    return [reported(getattr(n, f"nvmlDeviceGet{kind}RunningProcesses{version}")(h)) for version in ("", "_v2", "_v3")]
def details(mode):
    return reported(n.nvmlDeviceGetRunningProcessDetailList(h, n.nvmlProcessDetailList_v1, mode))
tell(compute=of("Compute"), mps=of("MPSCompute"), details={mode: details(getattr(n, f"NVML_PROCESS_MODE_{mode}")) for mode in (
    "COMPUTE", "GRAPHICS", "MPS", "ALL")})
"""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture(params=["front", "preload"])
def container(request, node):
    return node.container(LIMIT_MIB, interposition=request.param)


@pytest.fixture
def daemon() -> Iterator[dict[str, str]]:
    """The environment by which programs find an MPS control daemon; all it does is to listen."""
    with tempfile.TemporaryDirectory(prefix="mps") as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(directory, "control")))
        listener.listen(64)
        yield {MPS_VARIABLE: directory}


def test_memory_limit_holds_for_client_and_its_memory_counts_once(node, container, daemon):
    with container.repl(env=daemon) as client:
        assert client.ask(f"alloc alloc {1024 * MIB}")["result"] == 0
        assert client.ask(f"alloc alloc {LIMIT_MIB * MIB}")["result"] == OUT_OF_MEMORY
        used = (1024 + CONTEXT_MIB) * MIB
        assert container.used_bytes() == container.line_bytes() == node.physical_used_bytes(node.uuids[0]) == used
        assert client.ask(f"alloc alloc {LIMIT_MIB * MIB - used}")["result"] == 0
        assert client.ask("alloc alloc 1")["result"] == OUT_OF_MEMORY


def as_a_driver_lists(client, other):
    """Figures of a client that has allocated 100 MiB, and of a process that is no client."""
    of_client = [client.process.pid, (100 + CONTEXT_MIB) * MIB]
    both = sorted([of_client, [other.process.pid, CONTEXT_MIB * MIB]])
    details = {"COMPUTE": both, "GRAPHICS": [], "MPS": [of_client], "ALL": both}
    return {"compute": [both] * 3, "mps": [[of_client]] * 3, "details": details}


def test_the_simulated_driver_lists_clients_in_both_lists(node, daemon):
    bare = node.container(LIMIT_MIB, interposition="none")
    with bare.repl(env=daemon) as client, bare.repl() as other:
        assert client.ask(f"alloc alloc {100 * MIB}")["result"] == 0
        assert bare.python(LISTS).last == as_a_driver_lists(client, other)


def test_mps_views_show_container_without_its_neighbours(node, container, daemon):
    stranger = node.container(LIMIT_MIB)
    with container.repl(env=daemon) as client, container.repl() as other, stranger.repl(env=daemon):
        assert client.ask(f"alloc alloc {100 * MIB}")["result"] == 0
        assert container.python(LISTS).last == as_a_driver_lists(client, other)


def test_a_variable_that_names_no_daemon_makes_no_client(container):
    with container.repl(env={MPS_VARIABLE: "/nonexistent"}):
        shown = container.python(LISTS).last
    assert shown["mps"] == [[]] * 3
    assert len(shown["compute"][0]) == 1


def test_compute_limit_holds_for_client_and_its_use_is_separate(node, daemon):
    limits = Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, sm_percent=30),))
    container, stranger = node.container_with(limits), node.container(LIMIT_MIB)
    work = [node.build / "bin/aliquot-cuda-client", "work", "--seconds", "4", "--kernel-us", "1000"]
    look = """
from tests.fakes.cuda import tell
import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
tell(gpu=n.nvmlDeviceGetUtilizationRates(h).gpu, pids=[s.pid for s in n.nvmlDeviceGetProcessUtilization(h, 0)])
"""
    with container.start(work, daemon) as client:
        client.listen()
        for _ in range(2):
            client.listen()
        reported, pid = container.python(look).last, client.process.pid
        assert stranger.python(look).status != 0, "no samples of its own"
    assert reported["pids"] == [pid]
    assert 15 < reported["gpu"] < 45
