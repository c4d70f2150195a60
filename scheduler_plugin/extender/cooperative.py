# SPDX-License-Identifier: Apache-2.0
"""Long work in one event loop with the verbs: it is cut into pieces, and calls of kube-scheduler are served between two pieces.

- ``IdleWorker`` prepares what coming calls probably need while kube-scheduler does its own work between two calls.
- ``in_batches`` goes through thousands of pods.
- ``plan_ahead`` plans a large gang before filter replies. To plan hundreds of members takes a second, and filter itself never pauses. The
  steps are those of filter, so filter finds the gang planned, or the plan known to fail. What changed between two steps is seen by filter,
  which plans again what is no longer there. One gang is planned at a time, so two gangs never each hold a part of what both need.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from aliquot.contract.model import PodRequest
from scheduler_plugin.core.cluster.gang import Gang
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.gang.plan import Steps
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.gang import gang_or_error
from scheduler_plugin.extender.pod_query import PodQuery
from scheduler_plugin.extender.wire import CallArgs

MAX_PER_BATCH: Final = 1000
"""Pods handled without a pause when each takes one look-up: a millisecond."""
SMALL_GANG: Final = 3
"""Up to this many members filter plans itself: four milliseconds."""
_Item = TypeVar("_Item")
_T = TypeVar("_T")


class IdleWorker:
    """Works when the event loop has time, one piece per round.

    A call that comes early waits for one piece. It would have had to do most of that work itself.
    """

    def __init__(self, prepare: Callable[[], bool]) -> None:
        """Args: prepare: does one piece and returns whether there was work."""
        self._prepare = prepare
        self._is_scheduled = False

    def wake(self) -> None:
        """Start to work, because a call changed something. It goes on until no work is left."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        self._is_scheduled = False
        if self._prepare():
            self.wake()


async def in_batches(items: Sequence[_Item], size: int) -> AsyncIterator[_Item]:
    """Yield items, and serve calls after each batch: the state may have changed before the next item."""
    for number, item in enumerate(items, 1):
        yield item
        if number % size == 0:
            await asyncio.sleep(0)


async def in_steps(steps: Steps[_T]) -> _T:
    """Serve calls between two steps, and return the result. A cancelled call undoes what its steps did."""
    try:
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: _T = stop.value
                return result
            await asyncio.sleep(0)
    finally:
        steps.close()


async def plan_ahead(context: ExtenderContext, args: CallArgs) -> None:
    """Plan the gang of a filter call's pod if that call would plan it. Raises WireError."""
    if not context.state.has_gangs:
        return
    query = context.calls.pods.read(args.pod)
    context.groups.end_for(query.pod)  # the plan may use the room of a group that failed
    gang = gang_or_error(query.pod)
    if not isinstance(gang, Gang) or not isinstance(query.request, PodRequest):
        return
    async with context.gangs.planning:
        nodes = context.calls.nodes.read(args.node_names)
        is_large = len(context.gangs.planner.needed(query.pod, gang)) > SMALL_GANG
        if nodes is not None and is_large and context.reservations.binding_row(query.pod) is None:
            await _plan(context, query, gang, frozenset(context.calls.nodes.names_of(nodes)))


async def _plan(context: ExtenderContext, query: PodQuery, gang: Gang, offered: frozenset[str]) -> None:
    gangs, decisions = context.gangs, context.decisions
    begun, latest, standing = context.clock.monotonic(), decisions.latest, gangs.standing_for(query.pod, gang, offered)
    node = await in_steps(gangs.placing(query.pod, gang, offered, _reserved_if_fitting(context, query) & offered, standing))
    if node is None and standing.makes_plans and decisions.latest is not latest:
        context.state.freed_count += 1  # a pod may have been refused because of room that the failed plan held
        gangs.back_off_planning(gang, begun)


def _reserved_if_fitting(context: ExtenderContext, query: PodQuery) -> frozenset[str]:
    """Return the node of the pod's reservation, if the pod fits there."""
    known = context.state.reservations.get(query.pod.uid)
    row = None if known is None else context.state.row_of(known.node)
    if known is None or row is None:
        return frozenset()
    fits = context.verdicts.of(query.pod, query.shape).reason[row] == NodeReason.FITS.value
    return frozenset({known.node} if fits else ())
