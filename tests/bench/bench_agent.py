# SPDX-License-Identifier: Apache-2.0
"""Measures the agent as a process: time to register and to answer kubelet, cost while idle, and growth.

    python -m tests.bench.bench_agent [--pods 110] [--churn-hours 2] [--json FILE]

A stand-in node with eight simulated H200 and a real agent process. Calls go over the agent's Unix socket, as kubelet's do. An hour of
churn takes half a minute; 24 are a day. Ends with 1 when a figure misses its target.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio
from google.protobuf.message import Message

from aliquot import contract
from aliquot.kubelet_api import deviceplugin_pb2 as pb
from aliquot.kubelet_api.deviceplugin_pb2_grpc import DevicePluginStub
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions
from tests.bench.agent_churn import held, hurried_node, live_hours, work_done
from tests.integration.agent_nodes import VGPU, container, eventually, grants, manifest, running

SHARES_PER_GPU = 16
GPUS = 8
STARTS = 5
ALLOCATE_CALLS = 3000
EMPTY_CALLS = [b""] * ALLOCATE_CALLS
"""Empty calls measure gRPC alone on this machine, for comparison."""
PRESTART_CALLS = 1000
ROUNDS = 5
IDLE_SECONDS = 20.0
FULL = GPUS * SHARES_PER_GPU
"""Containers of one share each that fill the node."""
LOOP_SECONDS = 10.0
"""Time over which the loops are measured."""
GROWTH_TARGET_MIB = 2.0
POD_MIB = 4096
FORMS: dict[str, type[Message]] = {
    "Allocate": pb.AllocateRequest,
    "GetDevicePluginOptions": pb.Empty,
    "PreStartContainer": pb.PreStartContainerRequest,
}


@dataclass(frozen=True)
class Figure:
    """One measured number. ``target`` None: for information."""

    name: str
    value: float
    unit: str
    target: float | None = None

    @property
    def met(self) -> bool:
        return self.target is None or self.value < self.target


async def measure(pods: int) -> list[Figure]:
    """Run all measurements on one node, in the order of an agent's life."""
    options = NodeOptions(agent_flags=("--log-level=warning",), start_agent=False)
    async with Node(SimulatedHardware("h200x8"), options) as node:
        figures = [Figure("process start to registered, median", statistics.median(await start_seconds(node)), "s", 2.0)]
        first_starts = time.monotonic()
        names = [f"bench-{number}" for number in range(pods)]
        for name in names:
            node.create_pod(manifest(name, container(mib=POD_MIB)))
        await running(node, *names, timeout_seconds=120)
        figures.append(Figure(f"{pods} pods created to running", time.monotonic() - first_starts, "s"))
        socket = str(plugin_socket(node))
        figures += figures_of("empty call (GetDevicePluginOptions)", await in_a_client(socket, "GetDevicePluginOptions", EMPTY_CALLS))
        figures += figures_of("Allocate", await in_a_client(socket, "Allocate", allocate_requests()), 0.002)
        figures += figures_of(
            f"PreStartContainer with {pods} pods", await in_a_client(socket, "PreStartContainer", prestart_requests(node)), 0.050
        )
        figures.append(Figure(f"scrape with {pods} pods", await scrape_seconds(node) * 1e3, "ms"))
        figures.append(Figure("idle CPU", await idle_cpu_percent(node.agent.pid), "% of a core", 0.5))
        figures.append(Figure("resident memory", resident_mib(node.agent.pid), "MiB", 60.0))
        figures += await measure_loops(node, pods)
        return figures


async def measure_loops(node: Node, pods: int) -> list[Figure]:
    """Fill the node, and measure the cost of the loops: the time of a reconciler pass, and the part of a core for driver readings."""
    names = [f"full-{number}" for number in range(FULL - pods)]
    for name in names:
        node.create_pod(manifest(name, container(mib=POD_MIB)))
    await running(node, *names, timeout_seconds=120)
    often, seldom = "--driver-poll-seconds=0.1", "--driver-poll-seconds=600"
    passes, readings, busy_seconds = await watch_loops(node, "--reconcile-seconds=0.5", often)
    _, few_readings, idle_seconds = await watch_loops(node, "--reconcile-seconds=0.5", seldom)
    reading_seconds = (busy_seconds - idle_seconds) / (readings - few_readings)
    return [
        Figure(f"reconciler, one pass with {FULL} containers", passes * 1e3, "ms"),
        Figure(f"CPU of one reading of {GPUS} GPUs", reading_seconds * 1e3, "ms"),
        Figure("CPU of the readings at the default period of 5 s", reading_seconds / 5 * 100, "% of a core", 0.5),
    ]


async def watch_loops(node: Node, *flags: str) -> tuple[float, float, float]:
    """Restart the agent with these flags; return the mean seconds of a pass, and the readings and CPU seconds in ``LOOP_SECONDS``."""
    await node.agent.stop()
    node.agent.flags += flags
    await node.agent.start()
    await node.wait_ready()
    await asyncio.sleep(2.0)  # what a start brings with it is over
    before, cpu_before = await work_done(node), cpu_seconds(node.agent.pid)
    await asyncio.sleep(LOOP_SECONDS)
    cpu = cpu_seconds(node.agent.pid) - cpu_before
    after = await work_done(node)
    return (after.passes_seconds - before.passes_seconds) / (after.passes - before.passes), after.readings - before.readings, cpu


async def measure_growth(hours: int) -> list[Figure]:
    """Simulate hours of a node, and compare the agent's resources after the first hour with those at the end."""
    async with hurried_node() as node:
        fresh = held(node.agent.pid)
        first, *_, last = await live_hours(node, hours)
    grown = f"after {hours} hours of churn, beside the first"
    return [
        Figure("memory after the first hour of churn, beside none", (first.resident_kib - fresh.resident_kib) / 1024, "MiB"),
        Figure(f"memory {grown}", (last.resident_kib - first.resident_kib) / 1024, "MiB", GROWTH_TARGET_MIB),
        Figure(f"threads {grown}", last.threads - first.threads, "more", 1),
        Figure(f"open files {grown}", last.files - first.files, "more", 3),
    ]


async def start_seconds(node: Node) -> list[float]:
    """Measure cold starts until kubelet has every device. The last agent continues."""
    took = []
    for start in range(STARTS):
        begun = time.monotonic()
        await node.agent.start()
        await until(node, lambda: node.allocatable(VGPU) == GPUS * SHARES_PER_GPU)
        took.append(time.monotonic() - begun)
        await node.wait_ready()
        if start < STARTS - 1:
            await node.agent.kill()
            await eventually(lambda: node.allocatable(VGPU) == 0, "kubelet notices that the agent is gone")
    return took


async def until(node: Node, condition: Callable[[], bool]) -> None:
    """Poll the condition every two milliseconds; fail when the agent ends."""
    while True:
        if condition():
            return
        node.agent.check()
        await asyncio.sleep(0.002)


def allocate_requests() -> list[bytes]:
    """Measure Allocate for one to four devices."""
    requests = []
    for number in range(ALLOCATE_CALLS):
        ids = [f"GPU-{device}-bench::{number % SHARES_PER_GPU}" for device in range(1 + number % 4)]
        requests.append(pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]).SerializeToString())
    return requests


def prestart_requests(node: Node) -> list[bytes]:
    """Measure PreStartContainer as for restarted containers: identity, decision, ledger row, files, CDI spec."""
    known = [pb.PreStartContainerRequest(devices_ids=grant["device_ids"]).SerializeToString() for grant in grants(node)]
    return [known[number % len(known)] for number in range(PRESTART_CALLS)]


async def in_a_client(socket: str, method: str, requests: list[bytes]) -> list[float]:
    """Measure calls one after another from a separate process, like kubelet."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as client:
        return await asyncio.get_running_loop().run_in_executor(client, run_client, socket, method, requests)


def run_client(socket: str, method: str, requests: list[bytes]) -> list[float]:
    """Run as the client process."""
    return asyncio.run(timed(socket, method, requests))


async def timed(socket: str, method: str, requests: list[bytes]) -> list[float]:
    """Return the seconds of each call."""
    messages = [FORMS[method].FromString(request) for request in requests]
    took = []
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        call = getattr(DevicePluginStub(channel), method)
        for message in messages:
            begun = time.perf_counter()
            await call(message)
            took.append(time.perf_counter() - begun)
    return took


def figures_of(name: str, seconds: list[float], p99_target: float | None = None) -> list[Figure]:
    """Summarise call times, in milliseconds. The p99 is the median over rounds, so that a short disturbance has no effect."""
    size = len(seconds) // ROUNDS
    p99 = statistics.median(statistics.quantiles(seconds[at : at + size], n=100)[98] for at in range(0, size * ROUNDS, size))
    return [
        Figure(f"{name}, p50", statistics.median(seconds) * 1e3, "ms"),
        Figure(f"{name}, p99", p99 * 1e3, "ms", None if p99_target is None else p99_target * 1e3),
        Figure(f"{name}, slowest of {len(seconds)}", max(seconds) * 1e3, "ms"),
    ]


async def scrape_seconds(node: Node) -> float:
    """Return the median time of a scrape of /metrics."""
    took = []
    for _ in range(10):
        begun = time.perf_counter()
        text = await node.metrics()
        took.append(time.perf_counter() - begun)
    assert f"{contract.METRIC_PREFIX}container_info{{" in text
    return statistics.median(took)


async def idle_cpu_percent(pid: int) -> float:
    """Measure CPU time while the agent gets no calls."""
    before = cpu_seconds(pid)
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu_seconds(pid) - before) / IDLE_SECONDS * 100


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024


def plugin_socket(node: Node) -> Path:
    """Return the socket of the agent's plugin for vGPUs."""
    (path,) = node.layout.plugin_dir.glob("aliquot-vgpu-*.sock")
    return path


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as aligned text."""
    width = max(len(figure.name) for figure in figures)
    lines = []
    for figure in figures:
        verdict = "" if figure.target is None else f"  target < {figure.target:g}  {'met' if figure.met else 'MISSED'}"
        lines.append(f"{figure.name:<{width}}  {figure.value:>9.3f} {figure.unit}{verdict}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and compare with the targets."""
    parser = argparse.ArgumentParser(description="Benchmark of the node agent.")
    parser.add_argument("--pods", type=int, default=110, help="pods on the node")
    parser.add_argument("--churn-hours", type=int, default=2, help="hours of a node's life to see whether the agent grows, 2 at least")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.churn_hours < 2:
        parser.error(f"--churn-hours {arguments.churn_hours}: want 2 or more, as the first is what the last is compared with")
    figures = [*asyncio.run(measure(arguments.pods)), *asyncio.run(measure_growth(arguments.churn_hours))]
    figures.append(Figure("load of this machine, per core", os.getloadavg()[0] / (os.cpu_count() or 1), "runnable"))
    print(table(figures))
    document = json.dumps([{**asdict(figure), "met": figure.met} for figure in figures])
    print(document)
    if arguments.json is not None:
        arguments.json.write_text(document + "\n")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
