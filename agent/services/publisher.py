# SPDX-License-Identifier: Apache-2.0
"""Publishes this node's GPUs in the Kubernetes API: capacity, a condition, and the gpunodes object.

Each is compared with what the watch returned, and written when it differs, also after a change by another program. For example, a kubelet
that lost its checkpoint sets unknown extended resources to zero. ``core.publishing`` decides how soon to write. Kubelet counts device IDs
only; MiB and percent are in the node's status, which the scheduler and quotas use.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agent.core.inventory import DeviceInventory, node_capacity
from agent.core.publishing import (
    NodeCondition,
    NodeFacts,
    gpu_node,
    gpus_healthy,
    is_urgent,
    status_of,
    status_without_driver,
    write_after,
)
from agent.ports.clock import Clock
from agent.ports.kube import KubeApi, NodeState
from agent.services.changes import Changes
from agent.services.state import AgentState
from aliquot.contract.errors import ContractError
from aliquot.contract.gpunode import IdlePod, PodUtilization
from aliquot.contract.model import Isolation
from aliquot.kube.errors import KubeApiError

logger = logging.getLogger(__name__)

ECHO_SECONDS = 10.0
"""How long a write may take to appear in the watch before it is repeated. A broken watch must not cause a write each time."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 30.0


class Target(Protocol):
    """An object in the API that shows the state of the GPUs."""

    name: str

    def due_seconds(self, now: float) -> float | None:
        """Return in how many seconds to write it; None while it is right, or cannot be compared yet."""
        ...

    def write(self) -> Callable[[], object]:
        """Return the request that corrects it, to run in a thread. The request raises KubeApiError."""
        ...

    def written(self, outcome: Any, now: float) -> None:
        """Note that the request succeeded. Args: outcome: its return value."""
        ...


class NodePublisher:
    """Writes each target when it is due."""

    def __init__(
        self,
        node_name: str,
        targets: Sequence[Target],
        *,
        state: AgentState,
        clock: Clock,
        further: Sequence[Changes] = (),
    ) -> None:
        """Args: further: other changes that affect the published objects."""
        self._node_name = node_name
        self._targets = targets
        self._sources = (state.watch.changes, state.manager.changes, state.pods.node_changes, state.pods.gpu_node_changes, *further)
        self._clock = clock
        self._wake = Changes()

    async def run(self) -> None:
        """Publish until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._wake.follow(source))
            for target in self._targets:
                group.create_task(self._keep(target))

    async def _keep(self, target: Target) -> None:
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            seen = self._wake.count
            due_seconds = target.due_seconds(self._clock.monotonic())
            if due_seconds is None or due_seconds > 0:
                await self._wake.after(seen, due_seconds)
                continue
            try:
                outcome = await asyncio.to_thread(target.write())
            except KubeApiError as exc:
                logger.warning("%s not published: %s", target.name, exc, extra={"node": self._node_name})
                await asyncio.sleep(random.uniform(retry_seconds / 2, retry_seconds))  # noqa: S311 - spreads load
                retry_seconds = min(2 * retry_seconds, LAST_RETRY_SECONDS)
            else:
                logger.info("%s published", target.name, extra={"node": self._node_name})
                target.written(outcome, self._clock.monotonic())
                retry_seconds = FIRST_RETRY_SECONDS


class Pace:
    """When a target may be written: when its change is due, and not twice before the first write appears in the watch."""

    def __init__(self, echo: Changes, chance: Callable[[], float]) -> None:
        """Args: echo: counts the watch events of the object. chance: draws from 0 to 1."""
        self._echo = echo
        self._chance = chance
        self._last_write: float | None = None
        self._writing: tuple[object, int] | None = None
        self._wrote: tuple[object, int] | None = None
        """What was written last, and the count of watch events before."""
        self._change: tuple[float, float] | None = None
        """When the difference was first found, and the chance drawn for it."""

    def settled(self) -> None:
        """Note that the API has the right value."""
        self._change = None

    def due_seconds(self, wanted: object, now: float, *, urgent: bool) -> float:
        """Return in how many seconds ``wanted`` may be written, which differs from the API."""
        if self._change is None:
            self._change = (now, self._chance())
        since, chance = self._change
        due = write_after(self._last_write, since, urgent=urgent, chance=chance)
        if self._last_write is not None and self._wrote == (wanted, self._echo.count):
            due = max(due, self._last_write + ECHO_SECONDS)
        return due - now

    def written(self, now: float) -> None:
        """Note that it was written."""
        self._last_write, self._wrote, self._change = now, self._writing, None

    def writing(self, wanted: object) -> None:
        """Note that it is about to be written: from here on, the watch may report it."""
        self._writing = (wanted, self._echo.count)


class CapacityTarget:
    """The node's extended resources."""

    name = "node capacity"

    def __init__(self, node_name: str, *, api: KubeApi, state: AgentState, offered: bool = True) -> None:
        """Args: offered: whether the device plugin gives out GPUs, as in ``node_capacity``."""
        self._node_name = node_name
        self._api = api
        self._watch = state.watch
        self._manager = state.manager
        self._pods = state.pods
        self._offered = offered
        self._pace = Pace(state.pods.node_changes, lambda: 0.0)

    def due_seconds(self, now: float) -> float | None:
        """See ``Target``."""
        missing = self._missing()
        if not missing:
            self._pace.settled()
            return None
        return self._pace.due_seconds(missing, now, urgent=True)

    def write(self) -> Callable[[], object]:
        """See ``Target``."""
        missing = self._missing()
        self._pace.writing(missing)
        return lambda: self._api.publish_capacity(self._node_name, missing)

    def written(self, outcome: Any, now: float) -> None:
        """See ``Target``."""
        del outcome
        self._pace.written(now)

    def _missing(self) -> Mapping[str, int]:
        """Return the resources to change in the node's status; empty before both the node and its GPUs are known."""
        if self._pods.node is None or not self._watch.inventory.devices:
            return {}
        capacity = self._pods.node.capacity
        promised = (share for grant in self._manager.ledger.with_ids for share in grant.shares)
        wanted = node_capacity(self._watch.inventory, promised, offered=self._offered)
        return {name: value for name, value in wanted.items() if capacity.get(name) not in _spellings(value)}


class ConditionTarget:
    """The node's condition that all its GPUs are healthy. A change of its value is urgent, a new reason is not."""

    name = "node condition"

    def __init__(self, node_name: str, *, api: KubeApi, state: AgentState, chance: Callable[[], float] = random.random) -> None:
        """Args: chance: draws from 0 to 1."""
        self._node_name = node_name
        self._api = api
        self._watch = state.watch
        self._pods = state.pods
        self._pace = Pace(state.pods.node_changes, chance)

    def due_seconds(self, now: float) -> float | None:
        """See ``Target``."""
        wanted = self._wanted()
        if self._pods.node is None or not self._watch.looked or wanted == self._pods.node.gpus_healthy:
            self._pace.settled()
            return None
        return self._pace.due_seconds(wanted, now, urgent=self._turned(self._pods.node))

    def write(self) -> Callable[[], object]:
        """See ``Target``."""
        wanted, turned = self._wanted(), self._pods.node is None or self._turned(self._pods.node)
        self._pace.writing(wanted)
        return lambda: self._api.publish_condition(self._node_name, wanted, turned=turned)

    def written(self, outcome: Any, now: float) -> None:
        """See ``Target``."""
        del outcome
        self._pace.written(now)

    def _wanted(self) -> NodeCondition:
        return gpus_healthy(self._watch.inventory, self._watch.trouble_without_duration)

    def _turned(self, node: NodeState) -> bool:
        return node.gpus_healthy is None or node.gpus_healthy.holds != self._wanted().holds


class GpuNodeTarget:
    """The node's gpunodes object: created when missing, its status replaced when it differs."""

    name = "gpunode"

    def __init__(
        self,
        facts: NodeFacts,
        isolation: Callable[[], Sequence[Isolation]],
        *,
        api: KubeApi,
        state: AgentState,
        utilization: Callable[[], Sequence[PodUtilization]] = tuple,
        idle: Callable[[], Sequence[IdlePod]] = tuple,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Args: isolation: the enforcement backends that pods may request. utilization: what pods use. chance: draws from 0 to 1."""
        self._utilization = utilization
        self._facts = facts
        self._isolation = isolation
        self._idle = idle
        self._api = api
        self._watch = state.watch
        self._pods = state.pods
        self._pace = Pace(state.pods.gpu_node_changes, chance)
        self._kept: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        """What was written last, and what the API stored: a definition without one of our fields drops it."""
        self._refused = ""
        self._made: (
            tuple[DeviceInventory, tuple[Isolation, ...], tuple[PodUtilization, ...], tuple[IdlePod, ...], Mapping[str, Any]] | None
        ) = None
        """What the last status was made from, and the status. Pods come more often than GPUs change."""

    def due_seconds(self, now: float) -> float | None:
        """See ``Target``."""
        published = self._published()
        wanted = self._wanted(published) if published is not None else None
        if published is None or wanted is None or published == wanted or self._kept == (wanted, published):
            self._pace.settled()
            return None
        return self._pace.due_seconds(wanted, now, urgent=is_urgent(published, wanted))

    def write(self) -> Callable[[], object]:
        """See ``Target``."""
        node, exists = self._pods.node, self._pods.gpu_node is not None
        wanted = self._wanted(self._published() or {})
        self._pace.writing(wanted)

        def request() -> object:
            if wanted is None or node is None:  # nothing to publish any more
                return None
            if not exists:
                self._api.create_gpu_node(self._facts.name, node.uid)
            return wanted, self._api.publish_gpu_node(self._facts.name, wanted)

        return request

    def written(self, outcome: Any, now: float) -> None:
        """See ``Target``."""
        self._kept = outcome
        self._pace.written(now)

    def _published(self) -> Mapping[str, Any] | None:
        """Return the status in the API; None before it and the node are known."""
        if self._pods.node is None or not self._pods.gpu_node_known:
            return None
        return self._pods.gpu_node.status if self._pods.gpu_node is not None else {}

    def _wanted(self, published: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the status to publish; None when it cannot be determined."""
        inventory = self._watch.inventory
        if not self._watch.looked:
            return None
        if not inventory.devices and self._watch.trouble:
            return status_without_driver(published, self._watch.trouble_without_duration)
        try:
            made_from = inventory, tuple(self._isolation()), tuple(self._utilization()), tuple(self._idle())
            if self._made is None or self._made[0] is not inventory or self._made[:-1] != made_from:
                self._made = *made_from, status_of(gpu_node(self._facts, *made_from))
            return self._made[-1]
        except ContractError as exc:
            if self._refused != str(exc):
                self._refused = str(exc)
                logger.error("gpunode not published: %s", exc)  # noqa: TRY400 - the sentence says it all
            return None


def _spellings(value: int) -> tuple[str, ...]:
    """Return the forms in which the API may return a number. It shortens thousands: ``16000`` becomes ``16k``."""
    forms = [str(value)]
    for exponent, suffix in ((3, "k"), (6, "M"), (9, "G")):
        if value and value % 10**exponent == 0:
            forms.append(f"{value // 10**exponent}{suffix}")
    return tuple(forms)
