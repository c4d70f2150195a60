"""Plans a gang before filter does, in steps: to plan hundreds of members takes a second, and filter answers without a pause.

It is planned by the steps that filter would take, so that filter finds it planned, or planned in vain. Between two members others work:
watches are followed, pods bound and admitted. What changed then is seen by filter, which plans anew what is not there any more. One gang is
planned at a time, so that two never each hold a part of what both need.
"""

import asyncio
from typing import Final, TypeVar

from proto.model import PodRequest
from scheduler_plugin.core.gang import Gang
from scheduler_plugin.core.gang_plan import Steps
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Asked, Desk
from scheduler_plugin.extender.gang import gang_asked

FEW: Final = 3
"""Members that filter plans itself: four milliseconds."""
_T = TypeVar("_T")


async def plan_ahead(desk: Desk, body: bytes) -> None:
    """Plan the gang of a filter call's pod if that call would. Raises WireError."""
    if not desk.state.has_gangs:
        return
    args = wire.decode_args(body)
    asked = desk.asked(args.pod)
    gang = gang_asked(asked.pod)
    if not isinstance(gang, Gang) or not isinstance(asked.request, PodRequest):
        return
    async with desk.gangs.planning:
        named = desk.named(args.node_names)
        if named is not None and len(desk.gangs.planner.needed(asked.pod, gang)) > FEW and desk.binding_row(asked.pod) is None:
            await _plan(desk, asked, gang, frozenset(desk.names_of(named)))


async def _plan(desk: Desk, asked: Asked, gang: Gang, offered: frozenset[str]) -> None:
    begun, decided, standing = desk.monotonic(), desk.decisions.latest, desk.gangs.standing_for(asked.pod, gang, offered)
    node = await _in_steps(desk.gangs.placing(asked.pod, gang, offered, _fitting_where_expected(desk, asked) & offered, standing))
    if node is None and standing.makes_plans and desk.decisions.latest is not decided:
        desk.state.freed_count += 1  # somebody may have been refused for the sake of what was planned in vain
        desk.gangs.rest_from_planning(gang, begun)


def _fitting_where_expected(desk: Desk, asked: Asked) -> frozenset[str]:
    """Return the node where a pod is expected, if it fits there."""
    known = desk.state.reservations.get(asked.pod.uid)
    row = None if known is None else desk.state.row_of(known.node)
    if known is None or row is None:
        return frozenset()
    fits = desk.verdict_for(asked.pod, asked.shape).reason[row] == NodeReason.FITS.value
    return frozenset({known.node} if fits else ())


async def _in_steps(steps: Steps[_T]) -> _T:
    """Let others work between two steps; what was begun is undone when nobody waits for it any more."""
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
