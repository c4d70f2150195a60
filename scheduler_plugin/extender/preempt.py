"""preempt: of the nodes that kube-scheduler would free, which really help, and whose end is needed there.

Its victims stay: it chose them for CPU, RAM and whatever else it counts. Pods are added only where the right GPU is not free then, with
core.preempt's search, and nodes where nothing helps are dropped. An empty list of victims is an ordinary case: all that
kube-scheduler counts is free, and one GPU is not. Pods that are ending already free what they hold by themselves.
"""

from collections.abc import Iterable

from placement.request import RequestError
from proto.model import PodRequest
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.preempt import Preemption, Victim, cheapest_victims
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Desk, request_of


def choose_victims(desk: Desk, body: bytes) -> bytes:
    """Answer one preempt call. Raises WireError."""
    args = wire.decode(body, wire.PreemptionArgs)
    pod = wire.decode_pod(args.pod)
    proposed = _proposed(args)
    wire.check_count(len(proposed))
    request = request_of(pod)
    if request is None:
        return wire.preempt_result(proposed)
    if isinstance(request, RequestError):
        return wire.preempt_result({})
    answer = {}
    for node, victims in proposed.items():
        chosen = [meta.uid for meta in victims.pods or ()]
        added = _added_victims(desk, pod, request, node, frozenset(chosen))
        if added is not None:
            pods = [wire.MetaPod(uid) for uid in (*chosen, *sorted(added))]
            answer[node] = wire.MetaVictims(pods, victims.num_pdb_violations)
    return wire.preempt_result(answer)


def _proposed(args: wire.PreemptionArgs) -> dict[str, wire.MetaVictims]:
    if args.node_name_to_meta_victims is not None:
        return args.node_name_to_meta_victims
    return {
        node: wire.MetaVictims([wire.MetaPod(pod.metadata.uid) for pod in victims.pods or ()], victims.num_pdb_violations)
        for node, victims in (args.node_name_to_victims or {}).items()
    }


def _added_victims(desk: Desk, pod: PodFacts, request: PodRequest, node: str, chosen: frozenset[str]) -> frozenset[str] | None:
    """Return whom else to end on a node, or None when nobody's end makes the pod fit."""
    state, gpu = desk.state, desk.state.gpu_node(node)
    if gpu is None or (request.preferences.isolation is not None and request.preferences.isolation not in gpu.isolation):
        return None
    on_node = list(state.pods_on(node))
    going = [other.uid for other in on_node if other.uid in chosen or other.deletion_requested]
    with state.without_all([pod.uid, *going]):
        states = state.device_states(node)
    candidates = tuple(
        Victim(other.uid, other.priority, state.footprint_of(other.uid))
        for other in _evictable(on_node, pod)
        if other.uid not in going and state.footprint_of(other.uid)
    )
    policy = request.preferences.policy or desk.default_policy
    return cheapest_victims(Preemption(states, gpu.links, request, policy, candidates))


def _evictable(pods: Iterable[PodFacts], preemptor: PodFacts) -> Iterable[PodFacts]:
    return (pod for pod in pods if pod.priority < preemptor.priority)
