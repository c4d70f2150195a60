# SPDX-License-Identifier: Apache-2.0
"""What a tenant gets of a device by its way to launch (``tests/fakes/behaviours.py``), next to a neighbour that launches one known kernel.

The tenant has a low SM limit and the neighbour the rest, and both work all the time. Each behaviour is measured without a limit too: new
processes and threads take time of their own, and on a busy machine some use less than the limit.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.behaviours import Behaviour, script
from tests.fakes.container import CLIENT, MIB, Container, Node, Program

TENANT_PERCENT = 10
NEIGHBOUR_PERCENT = 90
MEMORY_MIB = 16_384
NO_LIMIT_SECONDS = 4
"""Without a limit, a behaviour is measured for so long."""


@dataclass(frozen=True)
class Result:
    """Percent of the device's time."""

    behaviour: Behaviour
    tenant: float
    first_second: float
    """Of the tenant, with the time until the work of that second was done."""
    neighbour: float
    unlimited: float
    """Of the tenant without a limit."""

    @property
    def tenant_error(self) -> float:
        """Points by which the tenant is above its limit."""
        return max(0.0, self.tenant - TENANT_PERCENT)

    @property
    def tenant_shortfall(self) -> float:
        """Points by which the tenant is below its limit, or below what it uses without a limit if that is less."""
        return max(0.0, min(TENANT_PERCENT, self.unlimited) - self.tenant)

    @property
    def neighbour_error(self) -> float:
        """Points by which the neighbour is below its limit."""
        return max(0.0, NEIGHBOUR_PERCENT - self.neighbour)


def measure(node: Node, behaviours: Iterable[Behaviour], seconds: float) -> Iterator[Result]:
    """Run each behaviour for so long, one after the other, each in a new container."""
    neighbour = _container(node, NEIGHBOUR_PERCENT)
    for behaviour in behaviours:
        found, beside = _beside(neighbour, _container(node, TENANT_PERCENT), behaviour, seconds)
        free, _ = _beside(neighbour, _container(node, 0), behaviour, NO_LIMIT_SECONDS)
        yield Result(behaviour, _percent(found["all"]), _percent(found["first"]), beside, _percent(free["all"]))


def _beside(neighbour: Container, tenant: Container, behaviour: Behaviour, seconds: float) -> tuple[dict[str, Any], float]:
    """Return what the tenant reports, and the neighbour's share."""
    with ExitStack() as stack:
        program = stack.enter_context(tenant.start_python(script(behaviour, seconds)))
        assert program.listen() == {"ready": True}
        command = [neighbour.build / CLIENT, "work", "--seconds", str(seconds), "--kernel-us", "1000"]
        beside = stack.enter_context(neighbour.start([str(word) for word in command]))
        return program.listen(), _settled(beside)


def summary(results: Sequence[Result]) -> str:
    """Return worst and mean of the errors."""
    errors = {
        "above": [one.tenant_error for one in results],
        "below": [one.tenant_shortfall for one in results],
        "neighbour below": [one.neighbour_error for one in results],
    }
    return "; ".join(f"{what}: worst {max(points):.1f}, mean {statistics.mean(points):.1f}" for what, points in errors.items()) + " points"


def _container(node: Node, sm_percent: int) -> Container:
    return node.container_with(Limits((DeviceLimit(node.uuids[0], MEMORY_MIB * MIB, sm_percent=sm_percent),)))


def _percent(time: Sequence[float]) -> float:
    seconds, used_seconds = time
    return 100 * used_seconds / seconds


def _settled(program: Program) -> float:
    """Return a worker's share after its first second."""
    stdout = program.process.stdout
    assert stdout is not None
    progress = [event for line in stdout if (event := json.loads(line))["event"] == "progress"]
    first, *later = progress
    return float(100 * sum(event["gpu_seconds"] for event in later) / (later[-1]["seconds"] - first["seconds"]))
