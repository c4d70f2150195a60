"""preempt: of the nodes that kube-scheduler would free, which really help, and whose end is needed there.

It chose its victims for CPU, RAM, sums of GPU amounts and whatever else it counts. Pods are added only where the right GPU is not free
then, with core.preempt's search, and nodes where nothing helps are dropped. An empty list of victims is an ordinary case: all that
kube-scheduler counts is free, and one GPU is not. Pods that are ending already free what they hold by themselves.

Where pods are added, a victim that kube-scheduler chose may have become needless, and is let go as far as the state shows it (``_fewest``).
kube-scheduler takes the answer as it is: it ends those, and tries the pod again once they are gone. Should it count something that we do
not see, and refuse the node, it proposes victims anew. The right GPU is free by then, so nothing is added and nobody let go: its own choice
ends, one attempt later. Where nothing is added its choice stays, because it is the least of what it counts.

A gang that runs is not broken: where kube-scheduler's victims leave it with less than its minimum, the rest of it ends too if it is all on
that node, and the node is dropped if not. For a member of a gang that does not run yet, a node helps only if all members that are missing
can start once these pods have ended: pods of one node end for a gang, never some here and some there in the hope of more.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from placement.request import RequestError
from proto.model import PodRequest
from scheduler_plugin.core.budgets import BudgetKey
from scheduler_plugin.core.gang import gang_of_pod
from scheduler_plugin.core.gang_plan import is_placed
from scheduler_plugin.core.gang_victims import ending_on
from scheduler_plugin.core.plan import not_offered
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.preempt import Cost, Preemption, Victim, cheapest_victims, cost_of
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Desk, request_of
from scheduler_plugin.extender.gang import gang_asked

ENOUGH_NODES = 50
"""kube-scheduler proposes a tenth of all nodes; once so many help, the others are left out."""
ENOUGH_SECONDS = 1.0
"""After so long the nodes that help already will do."""
LAST_SECONDS = 3.0
"""kube-scheduler waits 5 s for an answer: after so long, and one node at least, it learns that nobody's end helps, and asks again later."""
MAX_GANG_NODES = 8
"""For a gang so many nodes are tried at once, those with the fewest victims: for each the whole gang is planned."""


@dataclass(frozen=True, slots=True)
class Way:
    """Whose end makes room on a node."""

    node: str
    ended: frozenset[str]
    """UIDs; none when those suffice that are ending already."""
    cost: Cost


async def choose_victims(desk: Desk, body: bytes) -> bytes:
    """Answer one preempt call; other calls are answered between two nodes. Raises WireError."""
    begun = desk.monotonic()
    args = wire.decode(body, wire.PreemptionArgs)
    pod = wire.decode_pod(args.pod)
    proposed = _proposed(args)
    wire.check_count(len(proposed))
    members, uids = _members(desk, pod), {node: frozenset(_uids(victims)) for node, victims in proposed.items()}
    own = gang_of_pod(pod)
    gang = own if len(members) > 1 else None
    if gang is not None:
        proposed = {node: proposed[node] for node in desk.gangs.worth_searching(pod, gang, uids)}
        if not proposed:
            return wire.preempt_result({})
    is_planned = own is not None and desk.gangs.standing(own).planned  # where there is room, which this member may not use
    if not is_planned and _others_end_for(desk, members):
        if gang is not None:
            desk.gangs.rest_from_searching(gang, begun)
        return wire.preempt_result({})
    answer: dict[str, wire.MetaVictims] = {}
    more = tried = 0
    worth_trying = _worth_trying(desk, members, proposed)
    if gang is not None:
        too_small = proposed.keys() - {node for node, _ in worth_trying}
        desk.gangs.note_in_vain(pod, gang, members, {node: uids[node] for node in too_small})
    for node, victims in worth_trying:
        if (len(answer) == ENOUGH_NODES and pod.gpu is not None) or (tried == MAX_GANG_NODES and gang is not None):
            break
        if desk.monotonic() - begun > (ENOUGH_SECONDS if answer else LAST_SECONDS) and tried:
            break
        await asyncio.sleep(0)
        tried += 1
        chosen = uids[node]
        added = _victims_for(desk, members, node, chosen)
        if added is None and gang is not None:
            desk.gangs.note_in_vain(pod, gang, members, {node: chosen})
        elif added is not None:
            ended = _fewest(desk, members, node, chosen, added)
            more += len(ended - chosen)
            answer[node] = _answer_on(desk, victims, ended)
    if gang is not None:
        desk.gangs.note_search(pod, gang, begun, helps=bool(answer), goes_on=tried < len(worth_trying))
    desk.on_preemption(len(answer), tried - len(answer), more)
    return wire.preempt_result(answer)


def _answer_on(desk: Desk, proposed: wire.MetaVictims, ended: frozenset[str]) -> wire.MetaVictims:
    """Write down who ends on a node, with the violations that kube-scheduler counted, or ours where we let some of its victims go."""
    chosen, pods = frozenset(_uids(proposed)), [wire.MetaPod(uid) for uid in _important_first(desk, ended)]
    if not chosen <= ended:
        return wire.MetaVictims(pods, _cost(desk, (), ended)[0])
    return wire.MetaVictims(pods, proposed.num_pdb_violations + _cost(desk, chosen, ended - chosen)[0])


def ways(desk: Desk, pod: PodFacts, nodes: Iterable[str], spared: Collection[str]) -> Iterator[Way | None]:
    """Look at one node after the other on which kube-scheduler finds nothing missing; None where nobody's end makes room for a pod.

    Whoever asks may let others work between two nodes, and then looks at the chosen node once more with ``way_on``.
    Args: spared: UIDs of pods that must not end.
    """
    members, nobody = _members(desk, pod), wire.MetaVictims([], 0)
    worth_trying = _worth_trying(desk, members, dict.fromkeys(nodes, nobody))
    for node, _ in worth_trying[:MAX_GANG_NODES] if len(members) > 1 else worth_trying:
        yield way_on(desk, pod, node, spared)


def way_on(desk: Desk, pod: PodFacts, node: str, spared: Collection[str]) -> Way | None:
    """Say who must end on a node so that a pod fits there; None when nobody's end helps, or budgets keep those whose end would.

    CPU and RAM were free when kube-scheduler asked about the node, maybe minutes ago, so they are looked at too.
    """
    members = _members(desk, pod)
    unevictable = [other.uid for other in desk.state.pods_on(node) if len(desk.budgets.covering(other)) > 1]
    with desk.gangs.planner.trying(members):
        ended = _victims_for(desk, members, node, frozenset(), frozenset((*spared, *unevictable)))
        suffices = ended is not None and _host_has_room(desk, pod, node, ended)
    if ended is None or not suffices:
        return None
    cost = _cost(desk, (), ended)
    return Way(node, ended, cost) if not cost[0] else None


def would_help(desk: Desk, pod: PodFacts, node: str) -> bool:
    """Whether others' end on a node would make room on its GPUs for a pod, budgets, CPU and RAM aside; of a gang for this member alone."""
    return bool(_victims_for(desk, [pod], node, frozenset()))


def hold(desk: Desk, pod: PodFacts, node: str, ended: Iterable[str], expires_at: float) -> bool:
    """Expect a pod on a node, and whoever of its gang must start with it, as if these and all who are ending there had ended.

    Returns: whether they fit then; nothing is expected anew where they do not, nor for a pod that is being bound.
    """
    if is_placed(desk.state, pod):
        return False
    members = _members(desk, pod)
    with desk.state.without_all([*ended, *ending_already(desk, node)]):
        return bool(members) and desk.gangs.planner.expect_all(members, (node,), expires_at)


def renew(desk: Desk, pod: PodFacts, node: str, expires_at: float) -> bool:
    """Expect a pod on a node, and whoever of its gang must start with it, for longer where they are expected already.

    Returns: whether they are.
    """
    members, reservations = _members(desk, pod), desk.state.reservations
    known = reservations.get(pod.uid)
    if known is None or known.node != node or known.stage.is_firm or not all(member.uid in reservations for member in members):
        return False
    for member in members:
        desk.state.renew(member.uid, expires_at)
    return bool(members)


def _members(desk: Desk, pod: PodFacts) -> list[PodFacts]:
    """Return who must have a place at once, the pod first; nobody when the pod cannot start at all."""
    request, gang = request_of(pod), gang_asked(pod)
    if isinstance(request, RequestError) or isinstance(gang, RequestError):
        return []
    return [pod] if gang is None else desk.gangs.needed_with(pod, gang)


def _others_end_for(desk: Desk, members: Sequence[PodFacts]) -> bool:
    """Whether all of these pods have a place once those are gone that are ending where one of them is expected or nominated."""
    state, reservations = desk.state, desk.state.reservations
    expected = {reservations[member.uid].node for member in members if member.uid in reservations}
    nominated = {facts.nominated_node for member in members if (facts := state.pods.get(member.uid, member)).nominated_node}
    ending = [uid for node in expected | nominated for uid in ending_already(desk, node)]
    if not ending:
        return False
    if len(members) == 1 or all(member.uid in reservations for member in members):
        return all(member.uid in reservations for member in members)
    planner = desk.gangs.planner
    with planner.trying(members), state.without_all(ending):
        return all(planner.expect(member, None, inf) for member in members)


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


def _worth_trying(desk: Desk, members: Sequence[PodFacts], proposed: Mapping[str, wire.MetaVictims]) -> list[tuple[str, wire.MetaVictims]]:
    """Return the nodes, the least costly first; for a gang those that are large enough for the members without a place elsewhere."""
    if len(members) < 2:
        return sorted(proposed.items(), key=lambda proposal: (proposal[1].num_pdb_violations, len(proposal[1].pods or ())))
    planner = desk.gangs.planner
    with planner.trying(members):
        lacking = sum(not planner.expect(member, None, inf) for member in members)
    enough = [(node, victims) for node, victims in proposed.items() if _most_members(desk, members, node) >= lacking]
    return sorted(enough, key=lambda proposal: len(proposal[1].pods or ()))


def _fewest(desk: Desk, members: Sequence[PodFacts], node: str, chosen: frozenset[str], added: frozenset[str]) -> frozenset[str]:
    """Return who ends on a node: the chosen and the added pods, or fewer where it is sure that those suffice.

    Nobody is let go unless pods were added, for a gang's missing members, for a pod that kube-scheduler looks at more for than we know
    (``is_picky``), on a node whose sums of GPU amounts are not those of its devices, or if he keeps others away, is in a gang or unknown.
    """
    pod, known = members[0], desk.state.pods
    spare = frozenset(uid for uid in chosen if uid in known and not known[uid].repels and gang_of_pod(known[uid]) is None)
    if len(members) > 1 or not added or not spare or pod.is_picky or not _adds_up(desk, node):
        return chosen | added
    found = []  # whoever stays for the sums may free a GPU too: what is cheapest beside all the chosen, and what is without any of them
    for for_gpu in (added, _victims_for(desk, members, node, chosen - spare)):
        if for_gpu is None:
            continue
        ended = chosen | for_gpu
        for uid in (*_costly_first(desk, spare - for_gpu), *_costly_first(desk, for_gpu)):
            if gang_of_pod(known[uid]) is None and _suffices(desk, pod, node, ended - {uid}):
                ended -= {uid}
        found.append(ended)
    return min(found, key=lambda ended: _cost(desk, (), ended))


def _costly_first(desk: Desk, uids: Iterable[str]) -> list[str]:
    return sorted(uids, key=lambda uid: (_cost(desk, (), (uid,)), uid), reverse=True)


def _adds_up(desk: Desk, node: str) -> bool:
    """Whether what is free on one device is free in the node's sums too, which kube-scheduler counts: no device is left out of them."""
    states = desk.state.device_states(node)
    sound = all(state.healthy and not state.cordoned and not state.device.mig_enabled for state in states)
    return sound and not any(other.uid in desk.state.unaccounted for other in desk.state.pods_on(node))


def _suffices(desk: Desk, pod: PodFacts, node: str, ended: frozenset[str]) -> bool:
    """Whether a pod fits on a node once these pods have ended: on its GPUs, by CPU and RAM, and by the number of pods."""
    state, row = desk.state, desk.state.row_of(node)
    if row is None or not state.columns.cpu_milli[row] or not state.columns.ram_mib[row]:
        return False
    gone = {pod.uid, *ended, *ending_already(desk, node)}
    expected = [uid for uid, one in state.reservations.items() if one.node == node and uid not in gone]
    staying = [other for other in state.pods_on(node) if other.uid not in gone]
    if len(staying) + len(expected) >= state.most_pods_of(node) or not _host_has_room(desk, pod, node, ended):
        return False
    return _added_victims(desk, pod, node, ended, frozenset(other.uid for other in staying)) == frozenset()


def _host_has_room(desk: Desk, pod: PodFacts, node: str, ended: Iterable[str]) -> bool:
    """Whether a node has the CPU and RAM that a pod requests once these pods, and those that are ending there, have ended."""
    state, row = desk.state, desk.state.row_of(node)
    if row is None:
        return False
    columns = state.columns
    with state.without_all([pod.uid, *ended, *ending_already(desk, node)]):
        cpu_free = int(columns.cpu_milli[row]) - int(columns.cpu_used_milli[row])
        ram_free = int(columns.ram_mib[row]) - int(columns.ram_used_mib[row])
    return (not pod.cpu_milli or pod.cpu_milli <= cpu_free) and (not pod.memory_mib or pod.memory_mib <= ram_free)


def _most_members(desk: Desk, members: Sequence[PodFacts], node: str) -> int:
    """Return a number of members that a node cannot exceed, even when it is empty."""
    requests = [request for member in members if isinstance(request := request_of(member), PodRequest)]
    containers = [container for request in requests for container in request.containers]
    states = desk.state.device_states(node)
    if any(container.mig for container in containers):
        return sum(len(state.device.mig_instances) + state.max_shares for state in states)
    least = min((amount for container in containers if (amount := container.memory_bytes_per_vgpu) is not None), default=None)
    return sum(1 if least is None else min(state.max_shares, state.capacity_bytes // least) for state in states)


def _victims_for(
    desk: Desk, members: Sequence[PodFacts], node: str, chosen: frozenset[str], spared: frozenset[str] = frozenset()
) -> frozenset[str] | None:
    """Return whom else to end on a node, so that the first of these pods fits there and the others anywhere; None when nothing helps."""
    if not members:
        return None
    pod, others = members[0], members[1:]
    ending = ending_on(desk.state, chosen, _evictable(desk, node, pod, spared), pod)
    if ending is None or pod.gpu is None:
        return None if ending is None else ending.also
    added = _added_victims(desk, pod, node, chosen | ending.also, spared)
    if added is None:
        return None
    added |= ending.also
    return added if not others else _victims_for_gang(desk, members, node, chosen, added, spared)


def _victims_for_gang(
    desk: Desk, members: Sequence[PodFacts], node: str, chosen: frozenset[str], added: frozenset[str], spared: frozenset[str]
) -> frozenset[str] | None:
    """Add to those who end for the first member whoever else must end there for the others; None when they do not fit even then."""
    pod, others = members[0], members[1:]
    with desk.gangs.planner.trying(members):
        if not _expect(desk, pod, node, chosen | added, (node,)):
            return None
        for other in others:
            if _expect(desk, other, node, chosen | added, None):
                continue
            more = _added_victims(desk, other, node, chosen | added, spared) if other.preempts else None
            if more is None or not _expect(desk, other, node, chosen | added | more, (node,)):
                return None
            added |= more
    return added


def _expect(desk: Desk, pod: PodFacts, node: str, ending: frozenset[str], allowed: Collection[str] | None) -> bool:
    """Expect a member of a gang on one of the allowed nodes, as if pods of a node had ended; return whether it has a place there."""
    with desk.state.without_all([*ending, *ending_already(desk, node)]):
        return desk.gangs.planner.expect(pod, allowed, inf)


def _added_victims(desk: Desk, pod: PodFacts, node: str, chosen: frozenset[str], spared: frozenset[str]) -> frozenset[str] | None:
    """Return whom else to end on a node, or None when nobody's end makes the pod fit."""
    state, gpu, request = desk.state, desk.state.gpu_node(node), request_of(pod)
    if gpu is None or not isinstance(request, PodRequest) or not_offered(gpu, request):
        return None
    evictable = [other for other in _evictable(desk, node, pod, spared) if other.uid not in chosen]
    ending = ending_on(state, chosen, evictable, pod)
    if ending is None:
        return None
    with state.without_all([pod.uid, *chosen, *ending_already(desk, node)]):
        states = state.device_states(node)
    in_gangs = {uid for band in ending.bands for uid in band.members}
    candidates = tuple(_victim(desk, other) for other in evictable if state.footprint_of(other.uid) or other.uid in in_gangs)
    policy = request.preferences.policy or desk.default_policy
    allowed = _allowed_after(desk, chosen, candidates)
    return cheapest_victims(Preemption(states, gpu.links, request, policy, candidates, ending.bands, allowed))


def _important_first(desk: Desk, uids: Iterable[str]) -> list[str]:
    """Order pods as kube-scheduler reads them: it compares nodes by the priority of the first."""
    pods = desk.state.pods
    return sorted(uids, key=lambda uid: (-pods[uid].priority if uid in pods else 0, uid))


def _cost(desk: Desk, chosen: Iterable[str], added: Iterable[str]) -> Cost:
    """Rate the pods that we add, once those have ended that kube-scheduler chose and rated itself."""
    victims = [_victim(desk, pod) for pod in _known(desk, added)]
    return cost_of(victims, _allowed_after(desk, chosen, victims))


def _allowed_after(desk: Desk, chosen: Iterable[str], victims: Iterable[Victim]) -> Mapping[BudgetKey, int]:
    """Return how many more of these victims their budgets let go once the chosen pods have ended."""
    return desk.budgets.allowed_after(_known(desk, chosen), [key for victim in victims for key in victim.budgets])


def _victim(desk: Desk, pod: PodFacts) -> Victim:
    return Victim(pod.uid, pod.priority, desk.state.footprint_of(pod.uid), desk.budgets.covering(pod))


def _known(desk: Desk, uids: Iterable[str]) -> list[PodFacts]:
    return [pod for uid in uids if (pod := desk.state.pods.get(uid)) is not None]


def _evictable(desk: Desk, node: str, preemptor: PodFacts, spared: frozenset[str]) -> list[PodFacts]:
    pods = (pod for pod in desk.state.pods_on(node) if pod.uid != preemptor.uid and pod.uid not in spared)
    return [pod for pod in pods if pod.priority < preemptor.priority and not pod.deletion_requested]


def ending_already(desk: Desk, node: str) -> list[str]:
    """Return the UIDs of the pods of a node that end without our doing."""
    now = desk.now()
    return [pod.uid for pod in desk.state.pods_on(node) if pod.is_ending(now)]
