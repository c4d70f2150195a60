"""Keeps what the Kubernetes API says of this node's GPUs equal to the board: capacity, a condition, and the gpunodes object.

Each is compared with what the watch shows, and written when it differs: also when somebody else changed it, such as a kubelet that lost
its checkpoint and sets extended resources it does not know to zero. How soon is decided in ``core.publishing``. Kubelet counts device IDs
only; MiB and percent are the node's status, which the scheduler and quotas count with.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from agent.core.inventory import node_capacity
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
from agent.errors import KubeApiError
from agent.ports import Clock, KubeApi, NodeState
from agent.services.changes import Changes
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from proto.errors import ContractError
from proto.model import Isolation

logger = logging.getLogger(__name__)

ECHO_SECONDS = 10.0
"""How long a write may take to come back by the watch before it is doubted: a watch that is broken must not make us write all the time."""
FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 30.0


class Target(Protocol):
    """Something in the API that follows the board."""

    name: str

    def due_seconds(self, now: float) -> float | None:
        """Return in how many seconds it is to be written; None while it says the right thing, or cannot be compared yet."""
        ...

    def write(self) -> Callable[[], object]:
        """Return the request that makes it right, to be run in a thread. The request raises KubeApiError."""
        ...

    def written(self, outcome: Any, now: float) -> None:
        """Take in that the request succeeded, with what it returned."""
        ...


class NodePublisher:
    """Writes whatever target is due."""

    def __init__(
        self,
        node_name: str,
        targets: Sequence[Target],
        *,
        watch: DriverWatch,
        book: GrantBook,
        pods: PodCache,
        clock: Clock,
        further: Sequence[Changes] = (),
    ) -> None:
        """Args: further: what else changes what is published."""
        self._node_name = node_name
        self._targets = targets
        self._sources = (watch.changes, book.changes, pods.node_changes, pods.gpu_node_changes, *further)
        self._clock = clock
        self._wake = Changes()

    async def run(self) -> None:
        """Publish for ever."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._forward(source))
            for target in self._targets:
                group.create_task(self._keep(target))

    async def _forward(self, changes: Changes) -> None:
        seen = changes.count
        while True:
            seen = await changes.after(seen)
            self._wake.notify()

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


class _Pace:
    """When one target may be written: when its change is due, and not again what has yet to come back by the watch."""

    def __init__(self, echo: Changes, chance: Callable[[], float]) -> None:
        """Args: echo: counts what the watch tells of the object. chance: draws from 0 to 1."""
        self._echo = echo
        self._chance = chance
        self._last_write: float | None = None
        self._writing: tuple[object, int] | None = None
        self._wrote: tuple[object, int] | None = None
        """What was written last, and the echoes counted before."""
        self._change: tuple[float, float] | None = None
        """When it was first found that the API says something else, and the chance drawn for it."""

    def settled(self) -> None:
        """Take in that the API says what it should."""
        self._change = None

    def due_seconds(self, wanted: object, now: float, *, urgent: bool) -> float:
        """Return in how many seconds ``wanted`` may be written, which is not what the API says."""
        if self._change is None:
            self._change = (now, self._chance())
        since, chance = self._change
        due = write_after(self._last_write, since, urgent=urgent, chance=chance)
        if self._last_write is not None and self._wrote == (wanted, self._echo.count):
            due = max(due, self._last_write + ECHO_SECONDS)
        return due - now

    def written(self, now: float) -> None:
        """Take in that it was written."""
        self._last_write, self._wrote, self._change = now, self._writing, None

    def writing(self, wanted: object) -> None:
        """Take in that it is about to be written: from here on the watch may tell of it."""
        self._writing = (wanted, self._echo.count)


class Capacity:
    """The node's extended resources."""

    name = "node capacity"

    def __init__(self, node_name: str, *, api: KubeApi, watch: DriverWatch, book: GrantBook, pods: PodCache) -> None:
        self._node_name = node_name
        self._api = api
        self._watch = watch
        self._book = book
        self._pods = pods
        self._pace = _Pace(pods.node_changes, lambda: 0.0)

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
        """Return what the node's status must be changed to; nothing before both the node and its GPUs are known."""
        if self._pods.node is None or not self._watch.board.devices:
            return {}
        capacity = self._pods.node.capacity
        promised = (share for grant in self._book.ledger.grants.values() for share in grant.shares)
        wanted = node_capacity(self._watch.board, promised)
        return {name: value for name, value in wanted.items() if capacity.get(name) not in _spellings(value)}


class Condition:
    """The node's condition that all its GPUs are healthy. That it turns is urgent, another reason for it is not."""

    name = "node condition"

    def __init__(
        self, node_name: str, *, api: KubeApi, watch: DriverWatch, pods: PodCache, chance: Callable[[], float] = random.random
    ) -> None:
        """Args: chance: draws from 0 to 1."""
        self._node_name = node_name
        self._api = api
        self._watch = watch
        self._pods = pods
        self._pace = _Pace(pods.node_changes, chance)

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
        return gpus_healthy(self._watch.board, self._watch.lasting_trouble)

    def _turned(self, node: NodeState) -> bool:
        return node.gpus_healthy is None or node.gpus_healthy.holds != self._wanted().holds


class Inventory:
    """The node's gpunodes object: created when there is none, its status replaced when it differs."""

    name = "gpunode"

    def __init__(
        self,
        facts: NodeFacts,
        isolation: Callable[[], Sequence[Isolation]],
        *,
        api: KubeApi,
        watch: DriverWatch,
        pods: PodCache,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Args: isolation: the enforcement backends that pods may ask for. chance: draws from 0 to 1."""
        self._facts = facts
        self._isolation = isolation
        self._api = api
        self._watch = watch
        self._pods = pods
        self._pace = _Pace(pods.gpu_node_changes, chance)
        self._kept: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        """What was written last, and what the API made of it: a definition that lacks a field of ours drops it."""
        self._refused = ""

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
            if wanted is None or node is None:  # no longer to be said
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
        """Return the status that stands in the API; None before that, and the node, are known."""
        if self._pods.node is None or not self._pods.gpu_node_known:
            return None
        return self._pods.gpu_node.status if self._pods.gpu_node is not None else {}

    def _wanted(self, published: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the status that should stand there; None when that cannot be said."""
        board = self._watch.board
        if not self._watch.looked:
            return None
        if not board.devices and self._watch.trouble:
            return status_without_driver(published, self._watch.lasting_trouble)
        try:
            return status_of(gpu_node(self._facts, board, self._isolation()))
        except ContractError as exc:
            if self._refused != str(exc):
                self._refused = str(exc)
                logger.error("gpunode not published: %s", exc)  # noqa: TRY400 - the sentence says it all
            return None


def _spellings(value: int) -> tuple[str, ...]:
    """Return the forms in which the API may give a number back: it shortens thousands (``16000`` becomes ``16k``)."""
    forms = [str(value)]
    for exponent, suffix in ((3, "k"), (6, "M"), (9, "G")):
        if value and value % 10**exponent == 0:
            forms.append(f"{value // 10**exponent}{suffix}")
    return tuple(forms)
