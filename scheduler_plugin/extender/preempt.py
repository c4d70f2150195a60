# SPDX-License-Identifier: Apache-2.0
"""preempt: the proposed nodes on which ending pods really helps, and the pods that must end there.

kube-scheduler chose its victims by CPU, RAM, sums of GPU amounts and its other counts. This module adds pods only if no right GPU is free
after that (the search of ``core.gang.preempt``), and drops nodes where that does not help. An empty list of victims is an ordinary case:
everything that kube-scheduler counts is free, but no single GPU is.

Pods that are ending already free what they hold by themselves. kube-scheduler does not prefer them: it may choose a running pod while the
pods that a queue has just evicted are still ending. If they make room on a node soon, no other pod ends.

If pods are added, a victim of kube-scheduler may have become needless. It is dropped if the state shows this (``_fewest``). kube-scheduler
takes the reply as it is: it ends those pods and retries once they are gone. If it counts something unknown here and refuses the node, it
proposes victims again. The right GPU is free by then, so no pod is added or dropped, and its own choice ends one attempt later. If no pod
is added, kube-scheduler's choice stays, because it is the smallest by its own counts.

A running gang is not broken. If kube-scheduler's victims leave it with less than its minimum, its other members end too if all of them are
on that node; otherwise the node is dropped. For a member of a gang that does not run yet, a node helps only if all missing members can
start once these pods have ended. This verb frees one node; our own evictions can free several (``gang_evictions``).
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from typing import Final

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, PodRequest
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.budgets import BudgetKey
from scheduler_plugin.core.cluster.durations import may_end_from, may_preempt_from
from scheduler_plugin.core.cluster.gang import Gang, gang_of_pod
from scheduler_plugin.core.cluster.hold_uids import is_of_claim
from scheduler_plugin.core.cluster.plan import not_offered
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.gang.preempt import Cost, Preemption, Victim, cheapest_victims, cost_of
from scheduler_plugin.core.gang.standing import is_placed, nodes_near, outside
from scheduler_plugin.core.gang.victims import ending_on, is_extra
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.gang import gang_or_error

ENOUGH_NODES = 50
"""kube-scheduler proposes a tenth of all nodes. Once this many help, the others are skipped."""
ENOUGH_SECONDS = 1.0
"""After this time the nodes that help so far are enough."""
LAST_SECONDS = 3.0
"""kube-scheduler waits 5 s for a reply. After this time and one node at least, the search ends without help; kube-scheduler retries."""
SOON_SECONDS = 60.0
"""How long a pod waits at most for pods that end anyway. If that takes longer, other pods end for it."""
UNTIL_BOUND_SECONDS = 5.0
"""Time for kubelet to end a pod whose grace period is over, and for kube-scheduler to bind the next pod."""
MAX_FREED_NODES = 8
"""At most this many nodes with ending pods are checked in one call, those with the earliest end first."""
MAX_GANG_NODES = 8
"""For a gang this many nodes are tried in one call, those with the fewest victims first: each try plans the whole gang."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The pods that must end to make room on a node."""

    node: str
    ended: frozenset[str]
    """UIDs; empty if pods that are ending already make enough room."""
    cost: Cost


@dataclass(frozen=True, slots=True)
class MayEnd:
    """Which pods may end, beside those that kube-scheduler chose: less important ones that ran for their minimum and are not ending yet.

    An idle pod counts as less important (``ExtenderContext.is_less_important``).
    """

    spared: frozenset[str] = frozenset()
    """UIDs of pods that stay."""
    elsewhere: bool = False
    """Whether members of a gang on other nodes may end with those on the node, so that the gang ends whole."""

    def evictable(self, context: ExtenderContext, node: str, preemptor: PodFacts) -> list[PodFacts]:
        """Return the pods that may end for room on a node."""
        here = [pod for pod in map(context.annotated, context.state.pods_on(node)) if not _is_planned_member(pod, context)]
        mates = self._mates(context, here, node) if self.elsewhere else ()
        now = context.clock.now()
        others = [pod for pod in (*here, *mates) if context.is_less_important(pod, preemptor) and pod.uid != preemptor.uid]
        return [pod for pod in others if self._covers(pod) and may_end_from(pod) <= now]

    def _covers(self, pod: PodFacts) -> bool:
        return not pod.deletion_requested and pod.uid not in self.spared

    def _mates(self, context: ExtenderContext, here: Iterable[PodFacts], node: str) -> Iterator[PodFacts]:
        keys = dict.fromkeys(gang.key for pod in here if (gang := gang_of_pod(pod)) is not None)
        members = (pod for key in keys for pod in context.state.gang_members(key))
        return (pod for pod in members if pod.node_name and pod.node_name != node)


FROM_THE_NODE: Final = MayEnd()


@dataclass(slots=True)
class _Search:
    """The search for victims of one call."""

    pod: PodFacts
    members: Sequence[PodFacts]
    """The pods that need a place at the same time, the pod of the call first."""
    gang: Gang | None
    """The gang of the pod, if it must start together with others."""
    begun: float
    """Monotonic time."""
    chosen: Mapping[str, frozenset[str]]
    """By node, the UIDs that kube-scheduler chose."""
    tried: int = 0
    """How many nodes were tried."""


async def choose_victims(context: ExtenderContext, body: bytes) -> bytes:
    """Reply to one preempt call; other calls are served between two nodes. Raises WireError."""
    begun = context.clock.monotonic()
    args = wire.decode(body, wire.PreemptionArgs)
    pod = context.calls.pods.read(args.pod).pod
    proposed = _proposed(args)
    wire.check_count(len(proposed))
    now = context.clock.now()
    if (from_then := may_preempt_from(pod)) > now:
        context.put_off.until(pod.uid, from_then, proposed)
        return wire.preempt_result({})
    members, chosen = members_with(context, pod), {node: frozenset(_uids(victims)) for node, victims in proposed.items()}
    own = gang_of_pod(pod)
    gang = own if len(members) > 1 else None
    if gang is not None:
        context.gangs.note_unhelped(pod.uid, frozenset(chosen))
        proposed = {node: proposed[node] for node in context.gangs.nodes_to_search(pod, gang, chosen)}
        if not proposed:
            return wire.preempt_result({})
    is_planned = own is not None and context.gangs.standing(own).planned  # there is room, but not for this member
    if not is_planned and _others_end_for(context, members):
        if gang is not None:
            context.gangs.back_off_searching(gang, begun)
        return wire.preempt_result({})
    search = _Search(pod, members, gang, begun, chosen)
    reply = await _freed_anyway(context, search, proposed) or await _search_nodes(context, search, proposed)
    if reply:
        context.gangs.unhelped.pop(pod.uid, None)
    else:
        _put_off(context, pod, {node: _known(context, victims) for node, victims in chosen.items()}, now)
    return wire.preempt_result(reply)


def _put_off(context: ExtenderContext, pod: PodFacts, proposed: Mapping[str, Sequence[PodFacts]], now: float) -> None:
    """Leave a pod to our own evictions: at once for nodes where a gang ends that reaches other nodes, and when the victims may end.

    kube-scheduler calls no filter for a pod that its own filters refuse everywhere, so the preemptor does not learn of it otherwise.
    """
    context.put_off.until_victims_may_end(pod.uid, proposed, now)
    if not pod.is_picky:
        context.put_off.at_once(pod.uid, [node for node, pods in proposed.items() if _reach_elsewhere(context, pods, node)])


def _reach_elsewhere(context: ExtenderContext, pods: Iterable[PodFacts], node: str) -> bool:
    """Whether a gang of these pods has members on other nodes."""
    gangs = [gang for pod in pods if (gang := gang_of_pod(pod)) is not None]
    return any(other.node_name not in ("", node) for gang in gangs for other in context.state.gang_members(gang.key))


async def _freed_anyway(context: ExtenderContext, search: _Search, nodes: Iterable[str]) -> dict[str, wire.MetaVictims]:
    """Return the node on which ending pods make enough room earliest, and reserve that room; empty if there is none.

    One of these pods is named as the victim, because kube-scheduler accepts no node without a victim.
    """
    now = context.clock.now()
    freed = [(last.ends_by or now, node, last.uid) for node in nodes if (last := _last_to_end(context, node, now)) is not None]
    for ends_by, node, uid in sorted(freed)[:MAX_FREED_NODES]:
        await asyncio.sleep(0)
        expires_at = context.clock.monotonic() + ends_by - now + UNTIL_BOUND_SECONDS
        if _suffice_alone(context, search, node) and reserve_room(context, search.pod, node, (), expires_at):
            if search.gang is not None:
                context.gangs.note_search(search.pod, search.gang, search.begun, helps=True, goes_on=False)
            return {node: wire.MetaVictims([wire.MetaPod(uid)], 0)}
    return {}


def _last_to_end(context: ExtenderContext, node: str, now: float) -> PodFacts | None:
    """Return the pod that ends last of those that are ending on a node; None if it does not end soon, or if one ends for another pod."""
    ending = [context.state.pods[uid] for uid in ending_already(context, node)]
    if not ending or any(pod.is_preempted for pod in ending):
        return None
    last = max(ending, key=lambda pod: (inf if pod.ends_by is None else pod.ends_by, pod.uid))
    return last if last.ends_by is not None and -UNTIL_BOUND_SECONDS <= last.ends_by - now <= SOON_SECONDS else None


def _suffice_alone(context: ExtenderContext, search: _Search, node: str) -> bool:
    """Whether the pod lacks only what the ending pods of a node hold, so that kube-scheduler's victims there need not end."""
    pod, state, planner = search.pod, context.state, context.gangs.planner
    if pod.is_picky or not _adds_up(context, node):
        return False
    if any(uid not in state.pods or state.pods[uid].repels for uid in search.chosen[node]):
        return False
    with planner.trying(search.members):
        if _host_has_place(context, pod, node, ()) and planner.expect(pod, (node,), inf):
            return False  # kube-scheduler refuses the node for a reason that is not known here
    return len(search.members) > 1 or _suffices(context, pod, node, frozenset())


async def _search_nodes(context: ExtenderContext, search: _Search, proposed: Mapping[str, wire.MetaVictims]) -> dict[str, wire.MetaVictims]:
    """Try the proposed nodes, cheapest first, until enough of them help or the time is over."""
    pod, gang = search.pod, search.gang
    reply: dict[str, wire.MetaVictims] = {}
    worth_trying = _worth_trying(context, search.members, proposed)
    if gang is not None:
        too_small = proposed.keys() - {node for node, _ in worth_trying}
        context.gangs.note_failed_nodes(pod, gang, search.members, {node: search.chosen[node] for node in too_small})
    for node, victims in worth_trying:
        if _is_enough(context, search, len(reply)):
            break
        await asyncio.sleep(0)
        search.tried += 1
        ended = _ended_on(context, search, node)
        if ended is not None:
            reply[node] = _reply_on(context, victims, ended)
    if gang is not None:
        context.gangs.note_search(pod, gang, search.begun, helps=bool(reply), goes_on=search.tried < len(worth_trying))
    return reply


def _is_enough(context: ExtenderContext, search: _Search, helpful: int) -> bool:
    """Whether to stop before the next node. Args: helpful: how many nodes help so far."""
    if (helpful == ENOUGH_NODES and search.pod.gpu is not None) or (search.tried == MAX_GANG_NODES and search.gang is not None):
        return True
    seconds = context.clock.monotonic() - search.begun
    return search.tried > 0 and seconds > (ENOUGH_SECONDS if helpful else LAST_SECONDS)


def _ended_on(context: ExtenderContext, search: _Search, node: str) -> frozenset[str] | None:
    """Return all pods that end on a node, None if that does not help; for a gang the failure is remembered."""
    chosen = search.chosen[node]
    added = _victims_for(context, search.members, node, chosen)
    if added is not None:
        return _fewest(context, search.members, node, chosen, added)
    if search.gang is not None:
        context.gangs.note_failed_nodes(search.pod, search.gang, search.members, {node: chosen})
    return None


def _reply_on(context: ExtenderContext, proposed: wire.MetaVictims, ended: frozenset[str]) -> wire.MetaVictims:
    """List the pods that end on a node, with kube-scheduler's count of budget violations, or ours if some of its victims were dropped."""
    chosen, pods = frozenset(_uids(proposed)), [wire.MetaPod(uid) for uid in _important_first(context, ended)]
    if not chosen <= ended:
        return wire.MetaVictims(pods, ending_cost(context, (), ended)[0])
    return wire.MetaVictims(pods, proposed.num_pdb_violations + ending_cost(context, chosen, ended - chosen)[0])


def eviction_plans(context: ExtenderContext, pod: PodFacts, nodes: Iterable[str], spared: Collection[str]) -> Iterator[EvictionPlan | None]:
    """Try one node after the other on which a pod lacks only GPUs; None for a node where ending pods makes no room.

    The caller may serve other calls between two nodes, and must then check the best node again with ``plan_eviction``.
    Args: spared: UIDs of pods that must not end.
    """
    members, no_victims = members_with(context, pod), wire.MetaVictims([], 0)
    worth_trying = _worth_trying(context, members, dict.fromkeys(nodes, no_victims))
    for node, _ in worth_trying[:MAX_GANG_NODES] if len(members) > 1 else worth_trying:
        yield plan_eviction(context, pod, node, spared)


def plan_eviction(context: ExtenderContext, pod: PodFacts, node: str, spared: Collection[str]) -> EvictionPlan | None:
    """Return the pods that must end on a node so that a pod fits there; None if that does not help or disruption budgets forbid it.

    CPU and RAM are checked too: they were free when kube-scheduler called filter, which may be minutes ago.
    """
    members = members_with(context, pod)
    unevictable = not_evictable(context, context.state.pods_on(node))
    with context.gangs.planner.trying(members):
        ended = _victims_for(context, members, node, frozenset(), MayEnd(frozenset((*spared, *unevictable)), elsewhere=True))
        suffices = ended is not None and _host_has_room(context, pod, node, ended)
    if ended is None or not suffices:
        return None
    cost = ending_cost(context, (), ended)
    return EvictionPlan(node, ended, cost) if not cost[0] else None


def not_evictable(context: ExtenderContext, pods: Iterable[PodFacts]) -> list[str]:
    """Return the UIDs of pods that the API server refuses to evict, because several disruption budgets cover them."""
    return [pod.uid for pod in pods if len(context.budgets.covering(pod)) > 1]


def would_help(context: ExtenderContext, pod: PodFacts, node: str) -> bool:
    """Whether ending pods on a node makes room on its GPUs for a pod. Budgets, CPU, RAM and other members of its gang are ignored."""
    return bool(_victims_for(context, [pod], node, frozenset()))


def reserve_room(context: ExtenderContext, pod: PodFacts, node: str, ended: Iterable[str], expires_at: float) -> bool:
    """Reserve room on a node for a pod and the members that must start with it, as if ``ended`` and all ending pods were gone.

    Returns: whether they fit; without room, and for a pod that is being bound, no reservation is made.
    """
    if is_placed(context.state, pod):
        return False
    members = members_with(context, pod)
    with without(context, [*ended, *ending_already(context, node)], node):
        return bool(members) and context.gangs.planner.reserve_all(members, (node,), expires_at)


def renew_room(context: ExtenderContext, pod: PodFacts, node: str, expires_at: float) -> bool:
    """Extend the reservations of a pod on a node and of the members that must start with it.

    Returns: whether all of them had one.
    """
    members, reservations = members_with(context, pod), context.state.reservations
    known = reservations.get(pod.uid)
    if known is None or known.node != node or known.stage.is_firm or not all(member.uid in reservations for member in members):
        return False
    for member in members:
        context.state.renew(member.uid, expires_at)
    return bool(members)


def members_with(context: ExtenderContext, pod: PodFacts) -> list[PodFacts]:
    """Return the pods that need a place at the same time, this pod first; no pod if it cannot start."""
    request, gang = context.verdicts.requests.of(pod), gang_or_error(pod)
    if isinstance(request, RequestError) or isinstance(gang, RequestError):
        return []
    return [pod] if gang is None else context.gangs.needed_with(pod, gang)


def _others_end_for(context: ExtenderContext, members: Sequence[PodFacts]) -> bool:
    """Whether all of these pods have a place once the pods end that are ending on their reserved or nominated nodes."""
    all_reserved = all(member.uid in context.state.reservations for member in members)
    if all_reserved and len(members) > 1:
        return True  # our own evictions free it: some of those pods are gone already, others are evicted next
    nodes = _nodes_being_freed(context, members)
    ending = [uid for node in nodes for uid in ending_already(context, node)]
    if not ending or len(members) == 1:
        return bool(ending) and all_reserved
    planner = context.gangs.planner
    with planner.trying(members), without(context, ending, *nodes):
        return all(planner.expect(member, None, inf) for member in members)


def _nodes_being_freed(context: ExtenderContext, members: Iterable[PodFacts]) -> set[str]:
    """Return the nodes on which these pods have a reservation or are nominated."""
    nodes, state = set[str](), context.state
    for member in members:
        if (reservation := state.reservations.get(member.uid)) is not None:
            nodes.add(reservation.node)
        if nominated := state.pods.get(member.uid, member).nominated_node:
            nodes.add(nominated)
    return nodes


def _uids(victims: wire.MetaVictims) -> list[str]:
    return [meta.uid for meta in victims.pods or ()]


def _proposed(args: wire.PreemptionArgs) -> dict[str, wire.MetaVictims]:
    if args.node_name_to_meta_victims is not None:
        return {node: victims or wire.MetaVictims() for node, victims in args.node_name_to_meta_victims.items()}
    full = {node: victims or wire.Victims() for node, victims in (args.node_name_to_victims or {}).items()}
    return {
        node: wire.MetaVictims([wire.MetaPod(pod.metadata.uid) for pod in victims.pods or ()], victims.num_pdb_violations)
        for node, victims in full.items()
    }


def _worth_trying(
    context: ExtenderContext, members: Sequence[PodFacts], proposed: Mapping[str, wire.MetaVictims]
) -> list[tuple[str, wire.MetaVictims]]:
    """Return the nodes, the least costly first; for a gang only those large enough for the members without a place elsewhere."""
    if len(members) < 2:
        return sorted(proposed.items(), key=lambda proposal: (proposal[1].num_pdb_violations, len(proposal[1].pods or ())))
    planner = context.gangs.planner
    with planner.trying(members):
        lacking = sum(not planner.expect(member, None, inf) for member in members)
    enough = [(node, victims) for node, victims in proposed.items() if _most_members(context, members, node) >= lacking]
    return sorted(enough, key=lambda proposal: len(proposal[1].pods or ()))


def _fewest(
    context: ExtenderContext, members: Sequence[PodFacts], node: str, chosen: frozenset[str], added: frozenset[str]
) -> frozenset[str]:
    """Return the pods that end on a node: the chosen and the added pods, or fewer if these are certainly enough.

    A chosen pod is dropped only if pods were added and it is known, in no gang, and without a required anti-affinity. All of them stay for
    members of a gang, for a pod with scheduling constraints unknown here (``is_picky``), and on a node with GPU sums that differ from its
    devices.
    """
    pod, spare = members[0], frozenset(uid for uid in chosen if _may_be_dropped(context, uid))
    if len(members) > 1 or not added or not spare or pod.is_picky or not _adds_up(context, node):
        return chosen | added
    # Try both: victims beside all chosen pods, and victims without any chosen pod, because a chosen one may free a GPU too.
    options = (added, _victims_for(context, members, node, chosen - spare))
    found = [_reduced(context, pod, node, chosen, spare, for_gpu) for for_gpu in options if for_gpu is not None]
    return min(found, key=lambda ended: ending_cost(context, (), ended))


def _may_be_dropped(context: ExtenderContext, uid: str) -> bool:
    """Whether a victim of kube-scheduler may run on as far as it alone is concerned."""
    pod = context.state.pods.get(uid)
    return pod is not None and not pod.repels and gang_of_pod(pod) is None


def _reduced(
    context: ExtenderContext, pod: PodFacts, node: str, chosen: frozenset[str], spare: frozenset[str], for_gpu: frozenset[str]
) -> frozenset[str]:
    """Return the chosen pods and those that end for a GPU, without the pods that need not end; the costliest are dropped first."""
    known, ended = context.state.pods, chosen | for_gpu
    for uid in (*_costly_first(context, spare - for_gpu), *_costly_first(context, for_gpu)):
        if gang_of_pod(known[uid]) is None and _suffices(context, pod, node, ended - {uid}):
            ended -= {uid}
    return ended


def _costly_first(context: ExtenderContext, uids: Iterable[str]) -> list[str]:
    return sorted(uids, key=lambda uid: (ending_cost(context, (), (uid,)), uid), reverse=True)


def _adds_up(context: ExtenderContext, node: str) -> bool:
    """Whether the node's sums, which kube-scheduler counts, contain all its devices, so what is free on one is free in the sums."""
    states = context.state.device_states(node)
    sound = all(state.healthy and not state.cordoned and not state.device.mig_enabled for state in states)
    return sound and not any(other.uid in context.state.unaccounted for other in context.state.pods_on(node))


def _suffices(context: ExtenderContext, pod: PodFacts, node: str, ended: frozenset[str]) -> bool:
    """Whether a pod fits on a node once these pods have ended: on its GPUs, by CPU and RAM, and by the number of pods."""
    state, row = context.state, context.state.row_of(node)
    if row is None or not state.columns.cpu_milli[row] or not state.columns.ram_mib[row]:
        return False
    gone = {pod.uid, *ended, *ending_already(context, node)}
    if not _host_has_place(context, pod, node, gone):
        return False
    staying = frozenset(other.uid for other in state.pods_on(node) if other.uid not in gone)
    return added_victims(context, pod, node, ended, MayEnd(staying)) == frozenset()


def _host_has_place(context: ExtenderContext, pod: PodFacts, node: str, gone: Collection[str]) -> bool:
    """Whether a node has the CPU and RAM for a pod, and takes one more, when these pods are gone."""
    state, gone = context.state, {pod.uid, *gone}
    staying = sum(other.uid not in gone for other in state.pods_on(node))
    reserved = sum(one.node == node and uid not in gone and not is_of_claim(uid) for uid, one in state.reservations.items())
    return staying + reserved < state.pod_capacity_of(node) and _host_fits(context, pod, node, gone)


def _host_has_room(context: ExtenderContext, pod: PodFacts, node: str, ended: Iterable[str]) -> bool:
    """Whether a node has the CPU and RAM that a pod requests once these pods and the ending ones have ended."""
    return _host_fits(context, pod, node, {*ended, *ending_already(context, node)})


def _host_fits(context: ExtenderContext, pod: PodFacts, node: str, gone: Collection[str]) -> bool:
    """Whether a node has the CPU and RAM that a pod requests when these pods are gone."""
    state, row = context.state, context.state.row_of(node)
    if row is None:
        return False
    columns = state.columns
    with state.without_all([pod.uid, *gone]):
        cpu_free = int(columns.cpu_milli[row]) - int(columns.cpu_used_milli[row])
        ram_free = int(columns.ram_mib[row]) - int(columns.ram_used_mib[row])
    return (not pod.cpu_milli or pod.cpu_milli <= cpu_free) and (not pod.memory_mib or pod.memory_mib <= ram_free)


def _most_members(context: ExtenderContext, members: Sequence[PodFacts], node: str) -> int:
    """Return an upper bound for the members that fit on a node when it is empty."""
    containers = _gpu_containers(context, members)
    states = context.state.device_states(node)
    if any(container.mig for container in containers):
        return sum(len(state.device.mig_instances) + state.max_shares for state in states)
    most = 0
    for state in states:
        capacity_mib = state.capacity_bytes // units.MIB
        least = min(container.memory_mib_on(capacity_mib) for container in containers)
        most += min(state.max_shares, capacity_mib // max(1, least))
    return most


def _gpu_containers(context: ExtenderContext, members: Iterable[PodFacts]) -> list[ContainerRequest]:
    """Return the containers of all members that request GPUs."""
    requests = map(context.verdicts.requests.of, members)
    return [container for request in requests if isinstance(request, PodRequest) for container in request.containers]


def _victims_for(
    context: ExtenderContext, members: Sequence[PodFacts], node: str, chosen: frozenset[str], may_end: MayEnd = FROM_THE_NODE
) -> frozenset[str] | None:
    """Return further pods to end on a node, so that the first member fits there and the others anywhere; None if that is impossible."""
    if not members:
        return None
    pod, others, gang = members[0], members[1:], gang_of_pod(members[0])
    if gang is not None and outside(context.state, pod, gang, (node,)):
        return None
    now = context.clock.now()
    if any(may_end_from(other) > now for other in _known(context, chosen)):
        return None
    ending = ending_on(context.state, chosen, may_end.evictable(context, node, pod), pod)
    if ending is None or pod.gpu is None:
        return None if ending is None else ending.also
    added = added_victims(context, pod, node, chosen | ending.also, may_end)
    if added is None:
        return None
    added |= ending.also
    return added if not others else _victims_for_gang(context, members, node, chosen, added, may_end)


def _victims_for_gang(
    context: ExtenderContext, members: Sequence[PodFacts], node: str, chosen: frozenset[str], added: frozenset[str], may_end: MayEnd
) -> frozenset[str] | None:
    """Add to the pods that end for the first member those that must end for the others; None if the others do not fit even then."""
    pod, others = members[0], members[1:]
    with context.gangs.planner.trying(members):
        if not _expect(context, pod, node, chosen | added, (node,)):
            return None
        near = nodes_near(context.state, pod, node)
        for other in others:
            if _expect(context, other, node, chosen | added, near):
                continue
            more = added_victims(context, other, node, chosen | added, may_end) if other.preempts else None
            if more is None or not _expect(context, other, node, chosen | added | more, (node,)):
                return None
            added |= more
    return added


def _expect(context: ExtenderContext, pod: PodFacts, node: str, ending: frozenset[str], allowed: Collection[str] | None) -> bool:
    """Reserve a place for a member on one of the allowed nodes, as if pods of a node had ended; return whether there is one."""
    with without(context, [*ending, *ending_already(context, node)], node):
        return context.gangs.planner.expect(pod, allowed, inf)


def added_victims(context: ExtenderContext, pod: PodFacts, node: str, chosen: frozenset[str], may_end: MayEnd) -> frozenset[str] | None:
    """Return further pods to end on a node, or None if ending pods does not make the pod fit."""
    state, gpu, request = context.state, context.state.gpu_node(node), context.verdicts.requests.of(pod)
    if gpu is None or not isinstance(request, PodRequest) or not_offered(gpu, request):
        return None
    evictable = [other for other in may_end.evictable(context, node, pod) if other.uid not in chosen]
    ending = ending_on(state, chosen, evictable, pod)
    if ending is None:
        return None
    with without(context, [pod.uid, *chosen, *ending_already(context, node)], node):
        states = state.device_states(node)
    candidates = candidates_of(context, evictable, {uid for band in ending.bands for uid in band.members})
    policy = request.preferences.policy or context.verdicts.default_policy
    allowed = allowed_after(context, chosen, candidates)
    return cheapest_victims(Preemption(states, gpu.links, request, policy, candidates, ending.bands, allowed))


def candidates_of(context: ExtenderContext, evictable: Iterable[PodFacts], in_gangs: Collection[str]) -> tuple[Victim, ...]:
    """Return the pods that may end: those that hold a part of a GPU, and members of gangs that end as a whole."""
    return tuple(_victim(context, other) for other in evictable if context.claims.holds.footprint_of(other) or other.uid in in_gangs)


def _important_first(context: ExtenderContext, uids: Iterable[str]) -> list[str]:
    """Order pods as kube-scheduler expects: it compares nodes by the priority of the first one."""
    pods = context.state.pods
    return sorted(uids, key=lambda uid: (-pods[uid].priority if uid in pods else 0, uid))


def ending_cost(context: ExtenderContext, chosen: Iterable[str], added: Iterable[str]) -> Cost:
    """Rate the added pods, after the end of those that kube-scheduler chose and rated itself."""
    victims = [_victim(context, pod) for pod in _known(context, added)]
    return cost_of(victims, allowed_after(context, chosen, victims))


def allowed_after(context: ExtenderContext, chosen: Iterable[str], victims: Iterable[Victim]) -> Mapping[BudgetKey, int]:
    """Return how many more of these victims their disruption budgets allow once the chosen pods have ended."""
    return context.budgets.allowed_after(_known(context, chosen), [key for victim in victims for key in victim.budgets])


def _victim(context: ExtenderContext, pod: PodFacts) -> Victim:
    footprint, budgets = context.claims.holds.footprint_of(pod), context.budgets.covering(pod)
    return Victim(pod.uid, context.cost_of(pod), footprint, budgets, is_extra(context.state, pod))


def _known(context: ExtenderContext, uids: Iterable[str]) -> list[PodFacts]:
    return [context.annotated(pod) for uid in uids if (pod := context.state.pods.get(uid)) is not None]


def without(context: ExtenderContext, uids: Iterable[str], *nodes: str) -> AbstractContextManager[None]:
    """Do not count pods inside the block, nor the claims that end with them. Args: nodes: on which claims without a user do not count."""
    gone, pods = set(uids), context.state.pods
    looked = {*nodes, *(pods[uid].node_name for uid in gone if uid in pods)}
    return context.state.without_all([*gone, *(claim for node in looked for claim in context.claims.holds.freed_on(node, gone))])


def _is_planned_member(pod: PodFacts, context: ExtenderContext) -> bool:
    """Whether a pod is in a gang that is known here by its claims only, so that it is unknown how many of its members run."""
    return pod.uid in context.planned and gang_of_pod(pod) is not None


def ending_already(context: ExtenderContext, node: str) -> list[str]:
    """Return the UIDs of the pods of a node that are ending already."""
    now = context.clock.now()
    return [pod.uid for pod in context.state.pods_on(node) if pod.is_ending(now)]
