# SPDX-License-Identifier: Apache-2.0
"""``aliquot demo``: creates a node, runs the scenario on it, checks and shows the result, and removes everything at the end.

Exit status: 0 when every check passed, 1 when a check failed, 2 when the demo could not run, 128 + n when signal n ended it early.
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

from aliquot import contract
from aliquot.paths import NotBuiltError, built
from aliquot_lab.demo.checks import Check, evaluate
from aliquot_lab.demo.evidence import Evidence
from aliquot_lab.demo.plan import REAL_UNIT_LIMIT_BYTES, Plan, PlanError, make_plan, with_torch
from aliquot_lab.demo.scenario import LISTING, Scenario, ScenarioError, evidence_rows
from aliquot_lab.demo.screen import AnyScreen, LiveScreen, PlainScreen, SilentScreen
from aliquot_lab.demo.torch_wheel import NoTorchError, program_command
from aliquot_lab.standin.agentprocess import AgentError
from aliquot_lab.standin.hardware import Hardware, HardwareError, RealHardware, SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions

AGENT_FLAGS = ("--reconcile-seconds=0.5", "--driver-poll-seconds=0.5")
"""Short periods, so that the demo is fast."""
OPEN_NOTE = "without root, NVML in the containers also lists GPUs that the container does not have; the checks ignore those"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILURES = (AgentError, HardwareError, NoTorchError, NotBuiltError, PlanError, ScenarioError, TimeoutError)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line."""

    topology: str
    real: bool
    as_json: bool
    keep: bool
    torch: bool
    seconds: float


def run(options: DemoOptions) -> int:
    """Run the demo; return the exit status."""
    try:
        return asyncio.run(_run_until_signal(options))
    except FAILURES as exc:
        print(f"aliquot demo: {exc}", file=sys.stderr)
        return 2


async def _run_until_signal(options: DemoOptions) -> int:
    """Run the demo. The first signal ends it in order; later signals do not interrupt the cleanup."""
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
    torch = program_command(simulated=not options.real) if options.torch else None
    hardware: Hardware = RealHardware() if options.real else SimulatedHardware(options.topology)
    with _screen(options, hardware.title) as screen:
        screen.say(f"Starting the agent on {hardware.title}, with stand-ins for kubelet, container runtime and API server.")
        async with Node(hardware, NodeOptions(agent_flags=AGENT_FLAGS)) as node:
            screen.say(f"Registered with the kubelet: {', '.join(node.kubelet.devices.registrations)}.")
            plan = _plan(node, real=options.real)
            plan = with_torch(plan, torch) if torch else plan
            scenario = Scenario(node, plan, screen, seconds=options.seconds, keep=options.keep)
            evidence = await scenario.run()
            checks = evaluate(evidence)
            screen.metrics(evidence.scrape)
            screen.result(checks, plan.notes)
            if options.as_json:
                report = _report(node, plan, evidence, checks)
                print(msgspec.json.encode({**report, "seconds": round(time.monotonic() - started, 3)}).decode(), flush=True)
            if options.keep:
                screen.quote("The node stays until Ctrl-C. Commands for another terminal:", await _commands_for_users(node))
                with suppress(asyncio.CancelledError):
                    await scenario.watch()
    return 0 if all(check.passed for check in checks) else 1


def _screen(options: DemoOptions, title: str) -> AnyScreen:
    if options.as_json:
        return SilentScreen()
    return LiveScreen(title) if sys.stdout.isatty() else PlainScreen()


def _plan(node: Node, *, real: bool) -> Plan:
    """Choose the pods. On real hardware shares are small and MIG is not used, because the administrator owns its device nodes."""
    if real:
        plan = make_plan(node.inventory, {}, unit_limit_bytes=REAL_UNIT_LIMIT_BYTES)
        return replace(plan, notes=(*plan.notes, OPEN_NOTE)) if len(node.inventory.gpus) > 1 else plan
    offered = {name: node.allocatable(name) for name in node.status["allocatable"] if name.startswith(contract.RESOURCE_MIG_PREFIX)}
    return make_plan(node.inventory, offered)


def _report(node: Node, plan: Plan, evidence: Evidence, checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "hardware": node.hardware.title,
        "inventory": node.inventory,
        "directory": str(node.layout.base),
        "pods": [asdict(row) for row in evidence_rows(evidence, node.inventory)],
        "inside": evidence.inside,
        "fill": evidence.fill,
        "checks": checks,
        "notes": plan.notes,
        "metrics": evidence.scrape.text,
        "passed": all(check.passed for check in checks),
    }


async def _commands_for_users(node: Node) -> str:
    """Return commands for another terminal. A script enters a container with its environment."""
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
