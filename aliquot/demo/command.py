"""``aliquot demo``: makes a node, lets the story run on it, judges and shows the outcome, and leaves nothing behind.

Exit status: 0 when every promise held, 1 when one did not, 2 when the demo could not run, 128 + n when signal n ended it early.
"""

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from aliquot.demo.evidence import Evidence
from aliquot.demo.plan import REAL_UNIT_LIMIT_BYTES, Plan, PlanError, make_plan
from aliquot.demo.promises import Promise, judge
from aliquot.demo.screen import AnyScreen, LiveScreen, PlainScreen, SilentScreen
from aliquot.demo.story import LISTING, Story, StoryError, evidence_rows
from aliquot.paths import NotBuiltError, built
from aliquot.standin.agentprocess import AgentError
from aliquot.standin.hardware import Hardware, HardwareError, RealHardware, SimulatedHardware
from aliquot.standin.node import Node, NodeOptions
from proto import contract

AGENT_FLAGS = ("--reconcile-seconds=0.5", "--driver-poll-seconds=0.5")
"""Quick to notice changes, because nobody wants to wait in a demo."""
OPEN_NOTE = "without root nothing hides a GPU's device node: NVML in the containers also lists other GPUs, which were left out of account"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILURES = (AgentError, HardwareError, NotBuiltError, PlanError, StoryError, TimeoutError)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for."""

    topology: str
    real: bool
    as_json: bool
    keep: bool
    seconds: float


def run(options: DemoOptions) -> int:
    """Run the demo; return the exit status."""
    try:
        return asyncio.run(_run_until_signal(options))
    except FAILURES as exc:
        print(f"aliquot demo: {exc}", file=sys.stderr)
        return 2


async def _run_until_signal(options: DemoOptions) -> int:
    """Run, and turn the first signal into an orderly end; later ones cannot interrupt the cleaning up."""
    loop = asyncio.get_running_loop()
    received: list[int] = []
    task = asyncio.create_task(_run(options))

    def end(signal_number: int) -> None:
        if not received:
            received.append(signal_number)
            task.cancel()

    for signal_number in ENDING_SIGNALS:
        loop.add_signal_handler(signal_number, end, signal_number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


async def _run(options: DemoOptions) -> int:
    started = time.monotonic()
    hardware: Hardware = RealHardware() if options.real else SimulatedHardware(options.topology)
    with _screen(options, hardware.title) as screen:
        screen.say(f"Starting the agent on {hardware.title}, with stand-ins for kubelet, container runtime and API server.")
        async with Node(hardware, NodeOptions(agent_flags=AGENT_FLAGS)) as node:
            screen.say(f"Registered with the kubelet: {', '.join(node.kubelet.devices.registrations)}.")
            plan = _plan(node, real=options.real)
            story = Story(node, plan, screen, seconds=options.seconds, keep=options.keep)
            evidence = await story.play()
            promises = judge(evidence)
            screen.metrics(evidence.scrape)
            screen.judge(promises, plan.notes)
            if options.as_json:
                report = _report(node, plan, evidence, promises)
                print(msgspec.json.encode({**report, "seconds": round(time.monotonic() - started, 3)}).decode(), flush=True)
            if options.keep:
                screen.quote("The node stays until Ctrl-C. Look around with:", await _how_to_look(node))
                with suppress(asyncio.CancelledError):
                    await story.watch()
    return 0 if all(promise.held for promise in promises) else 1


def _screen(options: DemoOptions, title: str) -> AnyScreen:
    if options.as_json:
        return SilentScreen()
    return LiveScreen(title) if sys.stdout.isatty() else PlainScreen()


def _plan(node: Node, *, real: bool) -> Plan:
    """On real hardware slices are small and MIG is left alone: its device nodes are the administrator's to hand out."""
    if real:
        plan = make_plan(node.inventory, {}, unit_limit_bytes=REAL_UNIT_LIMIT_BYTES)
        return replace(plan, notes=(*plan.notes, OPEN_NOTE)) if len(node.inventory.gpus) > 1 else plan
    offered = {name: node.allocatable(name) for name in node.status["allocatable"] if name.startswith(contract.RESOURCE_MIG_PREFIX)}
    return make_plan(node.inventory, offered)


def _report(node: Node, plan: Plan, evidence: Evidence, promises: Sequence[Promise]) -> dict[str, Any]:
    return {
        "hardware": node.hardware.title,
        "inventory": node.inventory,
        "directory": str(node.layout.base),
        "pods": [asdict(row) for row in evidence_rows(evidence, node.inventory)],
        "inside": evidence.inside,
        "fill": evidence.fill,
        "promises": promises,
        "notes": plan.notes,
        "metrics": evidence.scrape.text,
        "held": all(promise.held for promise in promises),
    }


async def _how_to_look(node: Node) -> str:
    """Commands for another terminal: a container is entered through a script that sets its environment."""
    enter = shlex.quote(str(node.container("train").enter_path))
    url = await node.agent.metrics_url(1.0)
    return "\n".join(
        (
            f"  {enter} {built('bin/aliquot-cuda-client')} info      # or a CUDA program of your own",
            f"  {enter} {shlex.join(LISTING[:-1])}",
            f"  curl {url}/metrics",
            f"  tail -f {node.layout.agent_log}",
            f"  ls {node.layout.containers} {node.layout.cdi_dynamic}",
        )
    )
