# SPDX-License-Identifier: Apache-2.0
"""Simulates hours of a busy node in about a minute each, to check whether the agent's resources grow with its work.

A real agent process handles as many pods, reconciler passes, driver readings and scrapes as in an hour on a node, without the time between
them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions
from tests.integration.agent_nodes import container, eventually, grants, manifest, running

PODS, PASSES, READINGS, SCRAPES = 60, 360, 720, 240
"""Work of an hour: a pod each minute, the default periods of 10 and 5 seconds, and a scrape every 15 seconds."""
TOGETHER = 12
"""Pods at the same time."""
LEAST_SECONDS = 0.05
"""The shortest allowed period."""
PATIENCE_SECONDS = 300.0
"""Time limit for pods on a busy machine: the benchmark measures resources and not speed."""
LOOKS = 5
"""Samples of the agent's resources after an hour. The smallest counts, because a finished scrape still has its thread and socket."""


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of the agent's process."""

    resident_kib: int
    threads: int
    files: int


def held(pid: int) -> Held:
    """Read the current resources of the process from the kernel."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(int(status["VmRSS"].split()[0]), int(status["Threads"]), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))


@asynccontextmanager
async def hurried_node(profile: str = "t4x2") -> AsyncIterator[Node]:
    """Run a node with an agent that has the shortest periods."""
    flags = ("--log-level=error", f"--reconcile-seconds={LEAST_SECONDS}", f"--driver-poll-seconds={LEAST_SECONDS}")
    async with Node(SimulatedHardware(profile), NodeOptions(agent_flags=flags)) as node:
        yield node


async def live_hours(node: Node, hours: int) -> list[Held]:
    """Simulate hours; return the agent's resources after each hour, without grants."""
    return [await _live_an_hour(node, hour) for hour in range(hours)]


async def _live_an_hour(node: Node, hour: int) -> Held:
    before = await work_done(node)
    for first in range(0, PODS, TOGETHER):
        names = [f"h{hour}-{number}" for number in range(first, first + TOGETHER)]
        for name in names:
            node.create_pod(manifest(name, container(mib=1000)))
        await running(node, *names, timeout_seconds=PATIENCE_SECONDS)
        for _ in range(SCRAPES * TOGETHER // PODS):
            await node.metrics()
        for name in names:
            node.delete_pod(name)
        for name in names:
            await node.wait_gone(name, timeout_seconds=PATIENCE_SECONDS)
    while True:
        done = await work_done(node)
        if done.passes - before.passes >= PASSES and done.readings - before.readings >= READINGS:
            break
        await asyncio.sleep(0.5)
    await eventually(lambda: not grants(node), "nothing is held", PATIENCE_SECONDS)
    return await _held_at_rest(node.agent.pid)


async def _held_at_rest(pid: int) -> Held:
    looks = []
    for _ in range(LOOKS):
        await asyncio.sleep(0.2)
        looks.append(held(pid))
    return Held(*(min(getattr(look, field.name) for look in looks) for field in fields(Held)))


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work of the agent's loops since its start."""

    passes: float
    """Passes of the reconciler."""
    passes_seconds: float
    readings: float
    """Readings of the driver."""


async def work_done(node: Node) -> WorkDone:
    """Read the agent's metrics."""
    samples = [sample for family in text_string_to_metric_families(await node.metrics()) for sample in family.samples]
    seconds = f"{contract.METRIC_PREFIX}operation_duration_seconds"
    found = {(sample.name.removeprefix(seconds), sample.labels["operation"]): sample.value for sample in samples if seconds in sample.name}
    return WorkDone(found["_count", "reconcile"], found["_sum", "reconcile"], found["_count", "read-driver"])
