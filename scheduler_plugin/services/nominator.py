# SPDX-License-Identifier: Apache-2.0
"""Names a node for pods that wait in a burst, so that kube-scheduler tries that node alone.

kube-scheduler first tries the node in ``status.nominatedNodeName``: it filters one node instead of all, and the extender's call carries one
name. The field keeps no room, so the room is reserved here. Pods get their room in kube-scheduler's order, and the first pod that cannot be
nominated ends the work: no pod is overtaken. A pod of higher priority that comes later finds all of that room free.

The first pods of the queue are not written, because kube-scheduler comes to them before a write arrives. So a pod that waits behind few
others costs no write. The nomination is a hint. If the node cannot take the pod after all, kube-scheduler tries all nodes in the same
attempt. If no node can, kube-scheduler clears the field of a pod that may preempt others. The field of another pod is cleared here, because
elsewhere it means that pods end on the node.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np

from aliquot import contract
from aliquot.contract.model import PodRequest
from aliquot.kube.errors import KubeApiError, KubeRefusedError
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import Stage
from scheduler_plugin.core.fit.judge import best_row
from scheduler_plugin.core.fit.kube_filters import host_has_room
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.gang import gang_or_error
from scheduler_plugin.ports import NominationApi

logger = logging.getLogger(__name__)

FIRST: Final = 2
"""Pods at the head of the queue without a write."""
LAST: Final = 64
"""Pods of the queue that get room ahead of their call."""
MIN_NODES: Final = 500
"""With fewer nodes the write costs more than kube-scheduler saves (docs/measurements/benchmarks.md)."""


_PERIOD_SECONDS: Final = 1.0
"""Between two looks without a change of the queue: a node joins, or this replica becomes the leader."""


class Nominator:
    """The loop. ``wake`` it when the queue changes."""

    def __init__(
        self,
        context: ExtenderContext,
        api: NominationApi,
        may_nominate: Callable[[], bool],
        directory: NodeDirectory,
        scheduler_name: str = contract.SCHEDULER_NAME,
        min_nodes: int = MIN_NODES,
    ) -> None:
        """Join the parts.

        Args: may_nominate: whether this replica decides, and decides alone which node is best. scheduler_name: of the pods to nominate.
              min_nodes: smaller clusters are left to kube-scheduler.
        """
        self._context = context
        self._api = api
        self._may_nominate = may_nominate
        self._directory = directory
        self._scheduler_name = scheduler_name
        self._min_nodes = min_nodes
        self._placed: dict[str, PodFacts] = {}
        """By UID, the pods of the queue that got room."""
        self._to_clear: dict[str, PodFacts] = {}
        """By UID, nominated pods that cannot preempt others and had no decision yet."""
        self._changed = asyncio.Event()
        self._writes: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Look at the queue soon."""
        self._changed.set()

    def expect(self, pod: PodFacts) -> None:
        """Note a new pod that waits for a node, and give it the room of pods with a lower priority."""
        for uid in [uid for uid, placed in self._placed.items() if placed.priority < pod.priority]:
            known = self._context.state.reservations.get(uid)
            if known is not None and known.stage is Stage.SOFT:
                self._context.state.release(uid)
            del self._placed[uid]
        self.wake()

    def note(self, decision: Decision) -> None:
        """Note a decision of filter: a nomination that led nowhere is cleared."""
        pod = self._to_clear.pop(decision.pod.uid, None)
        if pod is not None and not decision.fitting:
            self._start(pod, "")

    async def run(self) -> None:
        """Nominate until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            await self.step()

    async def step(self) -> None:
        """Look at the queue once; calls are served between two pods."""
        if len(self._context.state.rows_by_name) < self._min_nodes or not self._may_nominate():
            return
        for position, pod in enumerate(self._next_pods()):
            if pod.uid in self._placed:
                continue
            if not self._nominate(pod, is_written=position >= FIRST):
                return
            await asyncio.sleep(0)

    def _next_pods(self) -> list[PodFacts]:
        """Return the pods at the head of the queue, and forget those that left it."""
        pods = [pod for pod in self._context.verdicts.next_pods(LAST) if self._waits(pod)]
        uids = {pod.uid for pod in pods}
        self._placed = {uid: pod for uid, pod in self._placed.items() if uid in uids}
        self._to_clear = {uid: pod for uid, pod in self._to_clear.items() if uid in self._context.state.pods}
        return pods

    def _nominate(self, pod: PodFacts, *, is_written: bool) -> bool:
        """Give a pod room, and begin to write its node. Returns: whether the pod behind it may get room."""
        if not self._waits(pod):  # it was called since
            return True
        node = self._place(pod)
        if node is None:
            return False
        self._placed[pod.uid] = pod
        if is_written:
            self._start(pod, node)
        return True

    def _waits(self, pod: PodFacts) -> bool:
        """Whether a pod waits for a node from this scheduler."""
        known = self._context.state.pods.get(pod.uid)
        return known is not None and not known.node_name and pod.gpu is not None and pod.gpu.scheduler_name == self._scheduler_name

    def _place(self, pod: PodFacts) -> str | None:
        """Reserve room for a pod on the node that kube-scheduler would choose, and return it; None if no node fits or that is unknown."""
        context = self._context
        request = context.verdicts.requests.of(pod)
        if not isinstance(request, PodRequest) or self._has_place(pod) or not self._is_plain(pod):
            return None
        shape = context.verdicts.shape_of(pod, request)
        with context.state.without(pod.uid):
            verdict = context.verdicts.shapes.verdict(shape)
        fits = verdict.reason == NodeReason.FITS.value
        fits[[row for node in context.state.closed_nodes if (row := context.state.row_of(node)) is not None]] = False
        fitting = np.flatnonzero(fits)
        fitting = fitting[host_has_room(context.state.columns, fitting, shape.demand)]
        if len(fitting) and (allowed := self._required_by(pod)) is not None:
            fitting = fitting[[context.state.names[row] in allowed for row in fitting.tolist()]]
        if not len(fitting):
            return None
        row = best_row(context.verdicts.shapes, verdict, fitting, pod.uid)
        context.reservations.make(pod, request, verdict, row, is_bound_next=False)
        return context.state.names[row]

    def _required_by(self, pod: PodFacts) -> frozenset[str] | None:
        """Return the names of the nodes that a pod may use by what it requires; None if it requires nothing."""
        return None if pod.nodes is None or not pod.nodes.selects else self._directory.allowed(pod.nodes)

    def _has_place(self, pod: PodFacts) -> bool:
        """Whether a pod has a place already, or may have a seat."""
        state = self._context.state
        return bool(state.pods[pod.uid].nominated_node) or pod.uid in state.reservations or self._context.seats.wait_for(pod)

    def _is_plain(self, pod: PodFacts) -> bool:
        """Whether kube-scheduler checks and weighs nothing for a pod that is not known here, and the pod is in no group."""
        soft = self._context.state.soft
        if gang_or_error(pod) is not None or pod.scheduling_group or soft.tainted or soft.concern(pod):
            return False
        return not (pod.is_picky or pod.tolerates or pod.prefers or pod.needs_preparing)

    def _start(self, pod: PodFacts, node: str) -> None:
        if node and not pod.preempts:
            self._to_clear[pod.uid] = pod
        task = asyncio.create_task(self._write(pod, node))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(self, pod: PodFacts, node: str) -> None:
        try:
            await self._api.nominate(pod.namespace, pod.name, pod.uid, node)
        except KubeRefusedError as exc:
            logger.debug("no nomination, because the pod is bound or gone: %s", exc)
        except KubeApiError as exc:
            logger.warning("a nomination was not written: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}", "node": node})
