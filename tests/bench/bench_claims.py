# SPDX-License-Identifier: Apache-2.0
"""Measures the agent as a DRA driver: time to prepare a claim, one after another and many at once.

    python -m tests.bench.bench_claims [--claims 330] [--json FILE]

A stand-in node with eight simulated H200 and a real agent process. Calls go over the agent's Unix socket, as kubelet's do: each reads a
claim from the API, writes ledger row, limits, region and CDI spec, and waits until a container runtime can see the spec. Each round has
claims of its own, which are released at its end; one of several claims begins when the agent is idle. The memory with both interfaces is
that of an agent with 110 pods of the device plugin and 110 claims on the same GPUs. Ends with 1 when a figure misses its target.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import grpc.aio

from agent.adapters.dra_grpc import DRIVER_PACKAGES
from aliquot import contract
from aliquot.kubelet_api import dra_pb2
from aliquot.paths import built
from aliquot_lab.standin.node import Node
from tests.bench.bench_agent import GPUS, Figure, cpu_seconds, resident_mib
from tests.bench.report import table
from tests.integration.agent_nodes import container, manifest, running
from tests.integration.dra_nodes import FakeKubelet, allocate, dra_node

AT_ONCE = (1, 16, 110)
TARGETS_SECONDS = {1: 0.050, 110: 0.250}
"""99th percentile of a call, by the number of calls at once."""
CLAIM_MIB = 1024
IDLE_SECONDS = 0.5
IDLE_PART = 0.1
"""An agent is idle when it used less than this part of one core for ``IDLE_SECONDS``."""
MOST_IDLE_SECONDS = 60.0
"""Raises TimeoutError when an agent is not idle after this time."""
SHIM = built(f"lib/shim/{contract.CUDA_SONAME}").parent
IN_MEMORY = ("run", "run-cdi")
"""What is below ``/run`` on a node, which is in memory. The ledger is on a disk."""
PREPARE = f"/{DRIVER_PACKAGES[0]}.DRAPlugin/NodePrepareResources"
UNPREPARE = f"/{DRIVER_PACKAGES[0]}.DRAPlugin/NodeUnprepareResources"


async def measure(claims: int) -> list[Figure]:
    """Prepare and release as many claims with each number of calls at once."""
    figures = []
    async with measured_node() as (node, kubelet), grpc.aio.insecure_channel(f"unix:{kubelet.endpoint}") as channel:
        for at_once in AT_ONCE:
            figures += await measure_rounds(node, channel, at_once, claims)
    return [*figures, await measure_memory()]


@asynccontextmanager
async def measured_node(*flags: str) -> AsyncIterator[tuple[Node, FakeKubelet]]:
    """A node with what is below ``/run`` in memory, and the shim as the image has it."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for name in IN_MEMORY:
            (Path(memory) / name).mkdir()
            (Path(directory) / name).symlink_to(Path(memory) / name)
        own = "--log-level=warning", f"--shim-dir={stripped_shim(Path(memory))}", *flags
        async with dra_node(Path(directory), *own) as found:
            yield found


async def measure_memory() -> Figure:
    """Fill a node through both interfaces."""
    most = max(AT_ONCE)
    async with measured_node("--allocation=both", f"--shares-per-gpu={2 * most // GPUS + 1}") as (node, kubelet):
        names = [f"pod-{number}" for number in range(most)]
        for name in names:
            node.create_pod(manifest(name, container(mib=CLAIM_MIB)))
        await running(node, *names, timeout_seconds=120)
        async with grpc.aio.insecure_channel(f"unix:{kubelet.endpoint}") as channel:
            claims = [allocate(node, f"claim-{number}", f"gpu-{number % GPUS}", CLAIM_MIB) for number in range(most)]
            await asyncio.gather(*(prepare(channel, claim) for claim in claims))
        await idle(node)
        return Figure(f"resident memory with {most} pods and {most} claims", resident_mib(node.agent.pid), "MiB", 70.0)


def stripped_shim(folder: Path) -> Path:
    """Make the shim's libraries as the image has them: a container's copy of what the build leaves would take five times as long."""
    made = folder / "shim"
    shutil.copytree(SHIM, made)
    subprocess.run(["strip", "--strip-unneeded", *made.iterdir()], check=True)
    return made


async def measure_rounds(node: Node, channel: grpc.aio.Channel, at_once: int, count: int) -> list[Figure]:
    """Prepare claims at once and release them, until ``count`` were prepared."""
    seconds: list[float] = []
    busy_seconds = cpu = 0.0
    while len(seconds) < count:
        first = len(seconds)
        claims = [allocate(node, f"claim-{at_once}-{first + number}", f"gpu-{number % GPUS}", CLAIM_MIB) for number in range(at_once)]
        if at_once > 1:
            await idle(node)
        begun, cpu_before = time.monotonic(), cpu_seconds(node.agent.pid)
        seconds += await asyncio.gather(*(prepare(channel, claim) for claim in claims))
        busy_seconds += time.monotonic() - begun
        cpu += cpu_seconds(node.agent.pid) - cpu_before
        await asyncio.gather(*(release(channel, claim) for claim in claims))
    percentiles = statistics.quantiles(seconds, n=100)
    name, target = f"Prepare, {at_once} at once", TARGETS_SECONDS.get(at_once)
    return [
        Figure(f"{name}, median", percentiles[49] * 1e3, "ms"),
        Figure(f"{name}, 99th percentile", percentiles[98] * 1e3, "ms", target * 1e3 if target is not None else None),
        Figure(f"{name}, claims a second", len(seconds) / busy_seconds, "1/s"),
        Figure(f"{name}, CPU of the agent for each claim", cpu / len(seconds) * 1e3, "ms"),
    ]


async def idle(node: Node) -> None:
    """Wait until the agent has done what the last round left it to do: status of claims, checks of files."""
    used = IDLE_SECONDS
    async with asyncio.timeout(MOST_IDLE_SECONDS):
        while used > IDLE_PART * IDLE_SECONDS:
            before = cpu_seconds(node.agent.pid)
            await asyncio.sleep(IDLE_SECONDS)
            used = cpu_seconds(node.agent.pid) - before


async def prepare(channel: grpc.aio.Channel, claim: dra_pb2.Claim) -> float:
    """Prepare one claim; return the seconds of the call."""
    call = channel.unary_unary(
        PREPARE,
        request_serializer=dra_pb2.NodePrepareResourcesRequest.SerializeToString,
        response_deserializer=dra_pb2.NodePrepareResourcesResponse.FromString,
    )
    begun = time.monotonic()
    reply = await call(dra_pb2.NodePrepareResourcesRequest(claims=[claim]))
    took = time.monotonic() - begun
    if error := reply.claims[claim.uid].error:
        raise RuntimeError(error)
    return took


async def release(channel: grpc.aio.Channel, claim: dra_pb2.Claim) -> None:
    """Release one claim."""
    call = channel.unary_unary(
        UNPREPARE,
        request_serializer=dra_pb2.NodeUnprepareResourcesRequest.SerializeToString,
        response_deserializer=dra_pb2.NodeUnprepareResourcesResponse.FromString,
    )
    reply = await call(dra_pb2.NodeUnprepareResourcesRequest(claims=[claim]))
    if error := reply.claims[claim.uid].error:
        raise RuntimeError(error)


def main() -> int:
    """Measure, print a table, and return 1 when a figure misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=330, help="claims to prepare with each number of calls at once")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.claims))
    rows = [(one.name, f"{one.value:.1f} {one.unit}", f"< {one.target:g} {one.unit}" if one.target is not None else "") for one in figures]
    table("Agent as a DRA driver", ("what", "measured", "target"), rows)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in figures], indent=2) + "\n")
    return 0 if all(one.met for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
