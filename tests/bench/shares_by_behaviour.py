# SPDX-License-Identifier: Apache-2.0
"""What a tenant gets of a device by its way to launch (``tests/fakes/behaviours.py``), beside a neighbour that launches one known kernel.

The tenant has a low SM limit and the neighbour the rest, and both work all the time.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.behaviours import Behaviour, script
from tests.fakes.container import CLIENT, MIB, Container, Node, Program

TENANT_PERCENT = 10
NEIGHBOUR_PERCENT = 90
MEMORY_MIB = 16_384


@dataclass(frozen=True)
class Result:
    """Percent of the device's time."""

    behaviour: Behaviour
    tenant: float
    first_second: float
    """Of the tenant, with the time until the work of that second was done."""
    neighbour: float

    @property
    def tenant_error(self) -> float:
        """Points by which the tenant is above its limit. Below it is a matter of the behaviour: new processes and modules take time."""
        return max(0.0, self.tenant - TENANT_PERCENT)

    @property
    def neighbour_error(self) -> float:
        """Points by which the neighbour is below its limit."""
        return max(0.0, NEIGHBOUR_PERCENT - self.neighbour)


def measure(node: Node, behaviours: Iterable[Behaviour], seconds: float) -> Iterator[Result]:
    """Run each behaviour for so long, one after the other, each in a new container."""
    neighbour = _container(node, NEIGHBOUR_PERCENT)
    for behaviour in behaviours:
        with ExitStack() as stack:
            tenant = stack.enter_context(_container(node, TENANT_PERCENT).start_python(script(behaviour, seconds)))
            assert tenant.listen() == {"ready": True}
            command = [node.build / CLIENT, "work", "--seconds", str(seconds), "--kernel-us", "1000"]
            beside = stack.enter_context(neighbour.start([str(word) for word in command]))
            found = tenant.listen()
            yield Result(behaviour, _percent(found["all"]), _percent(found["first"]), _settled(beside))


def summary(results: Sequence[Result]) -> str:
    """Return worst and mean of the errors."""
    tenants, neighbours = [one.tenant_error for one in results], [one.neighbour_error for one in results]
    return (
        f"above: worst {max(tenants):.1f}, mean {statistics.mean(tenants):.1f}; "
        f"neighbour below: worst {max(neighbours):.1f}, mean {statistics.mean(neighbours):.1f} points"
    )


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
