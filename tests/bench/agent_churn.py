"""Hours of a busy node in a minute each, to see whether anything in the agent grows with what it has served.

A real agent process meets as many pods, makes as many passes of the reconciler and readings of the driver, and answers as many scrapes, as
in an hour of a node; only the time between them is left out.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from aliquot.standin.hardware import SimulatedHardware
from aliquot.standin.node import Node, NodeOptions
from proto import contract
from tests.integration.agent_nodes import container, eventually, grants, manifest, running

PODS, PASSES, READINGS, SCRAPES = 60, 360, 720, 240
"""What an hour has: a pod a minute, and the default periods of 10 and 5 seconds and a scrape every 15."""
TOGETHER = 12
"""Pods at a time."""
LEAST_SECONDS = 0.05
"""The shortest period that can be set."""
PATIENCE_SECONDS = 300.0
"""How long pods may take on a machine that has other things to do: what is asked here is what the agent holds, not how fast it is."""
LOOKS = 5
"""At what the agent holds after an hour, of which the least counts: a scrape that has just ended still has its thread and its socket."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the agent's process holds of the machine."""

    resident_kib: int
    threads: int
    files: int


def held(pid: int) -> Held:
    """Ask the kernel what the process holds at this moment."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(int(status["VmRSS"].split()[0]), int(status["Threads"]), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))


@asynccontextmanager
async def hurried_node(profile: str = "t4x2") -> AsyncIterator[Node]:
    """A node whose agent does in a second what it otherwise does in minutes."""
    flags = ("--log-level=error", f"--reconcile-seconds={LEAST_SECONDS}", f"--driver-poll-seconds={LEAST_SECONDS}")
    async with Node(SimulatedHardware(profile), NodeOptions(agent_flags=flags)) as node:
        yield node


async def live_hours(node: Node, hours: int) -> list[Held]:
    """Let the node live; return what the agent holds after each hour, with nothing granted."""
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
    """What the agent's loops have done since it started."""

    passes: float
    """Of the reconciler."""
    passes_seconds: float
    readings: float
    """Of the driver."""


async def work_done(node: Node) -> WorkDone:
    """Ask the agent."""
    found = {sample.name: sample.value for family in text_string_to_metric_families(await node.metrics()) for sample in family.samples}
    names = ("reconcile_duration_seconds_count", "reconcile_duration_seconds_sum", "driver_read_duration_seconds_count")
    return WorkDone(*(found[contract.METRIC_PREFIX + name] for name in names))
