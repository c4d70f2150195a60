# SPDX-License-Identifier: Apache-2.0
"""Every prefix of a plan is feasible, no move of it can be spared, it keeps to the rules, and its certificate replays only unchanged."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract.model import Policy
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.journal import Rules, Snapshot, snapshot_of
from scheduler_plugin.core.cluster.nodes import CORDONED, NodeFacts
from scheduler_plugin.core.cluster.objects import is_closed, node_facts
from scheduler_plugin.core.cluster.pods import Footprint, PodFacts
from scheduler_plugin.core.cluster.selectors import exactly
from scheduler_plugin.core.cluster.state import ClusterState, Reservation
from scheduler_plugin.core.consolidate.certificate import Certificate, CertificateError, certify, check
from scheduler_plugin.core.consolidate.plan import Goal, Plan, find_plan, replacement_of
from scheduler_plugin.core.explain.replay import restore
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand
from tests.fakes.node_rules import (
    Object,
    depends_on_pods,
    may_run,
    node_object,
    random_node,
    random_rules,
    requires_labels,
    with_rules,
)
from tests.unit.scheduler_plugin.builders import make_node, make_pod, make_share

NOW = 100_000.0
RULES = Rules(Policy.FRAG, DEFAULT_WEIGHTS)
CPU_MILLI = 16_000


@st.composite
def clusters(draw: st.DrawFn) -> Snapshot:
    """Nodes with pods of all kinds, half full, and one waiting pod ``big``.

    By seed: hypothesis draws small numbers more often, and a cluster with few pods needs no moves.
    """
    return make_cluster(draw(st.integers(0, 1 << 40)))


def make_cluster(seed: int) -> Snapshot:
    """Make one of them. The UID of a pod's controller is its rules about nodes, as JSON."""
    choices = random.Random(seed)
    state, names = ClusterState(), [f"n{number}" for number in range(choices.randint(2, 6))]
    gpus, tainted = choices.randint(2, 4), choices.choice([0.05, 0.5])
    nodes = {name: node_object(random_node(choices, name, tainted)) for name in names}
    for name, item in nodes.items():
        state.set_host(name, CPU_MILLI, 64_000)
        state.set_gpu_node(make_node(name, gpus, shares_per_gpu=choices.choice([2, 4])))
        state.set_closed(name, closed=is_closed(item))
    odd = choices.choice([0, 0.05, 0.2])
    for node in names:
        for number in range(choices.randint(1, gpus + 1)):
            bind(state, choices, f"{node}-{number}", node, gpus, odd)
    vgpus = choices.randint(max(1, gpus - 1), gpus)
    exclusive = {contract.ANNOTATION_ISOLATION: "exclusive"} if choices.random() < 0.5 else {}
    memory: dict[str, Any] = {} if exclusive else {"vgpu_memory": str(vgpus * choices.choice([500, 800, 1000]))}
    cpu = choices.choice([0, 4000, 14_000])
    big = make_pod("big", annotations=exclusive, priority=choices.randint(0, 1), cpu_milli=cpu, vgpu=str(vgpus), **memory)
    rules = rules_for(choices, odd)
    state.set_pod(replace(with_rules(big, rules), controller_uid=json.dumps(rules)))
    budgets = tuple(Budget("team", name, tuple(exactly({"app": name})), choices.choice([0, 1, 1, 1])) for name in ("a", "b"))
    snapshot = snapshot_of(state.moment(), RULES, NOW)
    known = map(node_facts, nodes.values()) if choices.random() < 0.7 else ()
    return msgspec.structs.replace(snapshot, budgets=budgets, closed_nodes=tuple(sorted(state.closed_nodes)), node_facts=tuple(known))


def rules_for(choices: random.Random, odd: float) -> Object:
    """Return the rules of a pod about nodes: none for half of them."""
    return random_rules(choices, odd) if choices.random() < 0.5 else {}


def bind(state: ClusterState, choices: random.Random, uid: str, node: str, gpus: int, odd: float) -> None:
    """Bind a pod to random devices of a node, if it fits there. Args: odd: how often each reason not to move it applies."""

    def usually(value: Any, *others: Any) -> Any:
        return choices.choice(others) if choices.random() < odd else value

    states = state.device_states(node)
    mib, cores = choices.choice([200, 400, 400, 1000]), choices.choice([None, 20, 50])
    minors = choices.sample(range(gpus), choices.choice([1, 1, 2]))
    shares = [make_share(node, minor, mib, cores) for minor in minors]
    if not all(states[minor].has_room_for(share) for minor, share in zip(minors, shares, strict=True)):
        return
    stated = {
        contract.ANNOTATION_MOVABLE: usually("true", None, "false", "yes"),
        contract.ANNOTATION_MIN_RUNTIME: usually(choices.choice([None, "0s", "2h"]), "1d", "soon"),
        contract.ANNOTATION_LAST_CHECKPOINT: usually(choices.choice([None, "1970-01-02T03:00:00Z"]), "yesterday"),
    }
    limits: dict[str, Any] = {"vgpu": str(len(minors)), "vgpu_memory": str(mib * len(minors))}
    if cores is not None:
        limits["vgpu_cores"] = str(cores * len(minors))
    annotations = {name: text for name, text in stated.items() if text is not None}
    priority = usually(-100_000, 0, 1)
    pod = make_pod(uid, node=node, annotations=annotations, shares={"main": shares}, priority=priority, **limits)
    label, rules = choices.choice(["", "", "a", "b"]), rules_for(choices, odd)
    state.set_pod(
        replace(
            with_rules(pod, rules),
            cpu_milli=choices.choice([0, 1000]),
            labels=(("app", label),) if label else (),
            started_at=usually(choices.choice([NOW - 20_000, NOW - 90_000]), None, NOW - 60),
            controller_uid=usually(json.dumps(rules), ""),
            controller_kind=usually("Job", "DaemonSet", "Node"),
        )
    )


def goals() -> st.SearchStrategy[Goal]:
    return st.one_of(st.just(Goal("big")), st.builds(Goal, whole_nodes=st.integers(1, 2)))


def found(snapshot: Snapshot, goal: Goal) -> Plan | None:
    plan = find_plan(snapshot, goal)
    event(f"{len(plan.moves)} moves" if isinstance(plan, Plan) else "no plan")
    return plan if isinstance(plan, Plan) else None


def over_given(state: ClusterState, node: str) -> list[str]:
    """Which devices of a node are promised beyond what they have, by sums over the pods alone."""
    gpu, used = state.gpu_node(node), Counter[tuple[str, str]]()
    assert gpu is not None
    expected = [one.footprint for one in state.reservations.values() if one.node == node]
    for uses in [*(state.footprint_of(pod.uid) for pod in state.pods_on(node)), *expected]:
        for uuid, use in uses.items():
            used.update({(uuid, "memory"): use.memory_mib, (uuid, "cores"): use.cores_percent, (uuid, "shares"): use.shares})
    most = {"memory": 1000, "cores": 100, "shares": gpu.shares_per_gpu}
    return [f"{uuid} {what}" for (uuid, what), amount in used.items() if amount > most[what]]


@given(clusters(), goals())
def test_every_prefix_of_a_plan_is_feasible(snapshot: Snapshot, goal: Goal) -> None:
    plan = found(snapshot, goal)
    if plan is None:
        return
    state = restore(snapshot)
    nodes = [node.name for node in state.gpu_nodes()]
    for move in plan.moves:
        pod = state.pods[move.pod_uid]
        assert pod.node_name == move.from_node
        seat = replacement_of(pod)
        state.reserve(make_reservation(seat, move.to_node, move.seat))
        assert not [over for node in nodes for over in over_given(state, node)]
    for move in plan.moves:
        state.drop_pod(move.pod_uid)
        assert not [over for node in nodes for over in over_given(state, node)]
    if goal.pod_uid:
        state.reserve(make_reservation(state.pods["big"], plan.nodes[0], plan.place))
        assert not [over for node in nodes for over in over_given(state, node)]
        assert state.columns.cpu_used_milli.max() <= CPU_MILLI
    else:
        assert not [pod for node in plan.nodes for pod in state.pods_on(node) if state.footprint_of(pod.uid)]
        assert len(set(plan.nodes)) == goal.whole_nodes


def make_reservation(pod: PodFacts, node: str, footprint: Footprint) -> Reservation:
    return Reservation(pod.uid, node, footprint, HostDemand(pod.cpu_milli, pod.memory_mib))


@given(clusters(), goals())
def test_only_pods_that_may_move_do(snapshot: Snapshot, goal: Goal) -> None:
    plan = found(snapshot, goal)
    if plan is None:
        return
    state, allowed = restore(snapshot), {budget.name: budget.allowed for budget in snapshot.budgets}
    for pod in (state.pods[move.pod_uid] for move in plan.moves):
        annotations = pod.gpu.annotations if pod.gpu is not None else {}
        agreed = annotations.get(contract.ANNOTATION_MOVABLE)
        assert agreed == "true" or (agreed is None and pod.priority == -100_000)
        assert pod.controller_uid
        assert pod.controller_kind == "Job"
        least = {"0s": 0, "2h": 7200, "1d": 86_400, None: 300}[annotations.get(contract.ANNOTATION_MIN_RUNTIME)]
        assert not least or (pod.started_at is not None and NOW - pod.started_at >= least)
        assert all(allowed[label] for _, label in pod.labels)
        assert not goal.pod_uid or pod.priority <= state.pods["big"].priority


def used_nodes(plan: Plan) -> list[tuple[str, str]]:
    """The pods of a plan, by UID, each with the node that it gets."""
    places = [("big", plan.nodes[0])] if plan.goal.pod_uid else []
    return places + [(move.pod_uid, move.to_node) for move in plan.moves]


def object_of(node: NodeFacts) -> Object:
    """The node of the API that a snapshot has."""
    taints = [{"key": taint.key, "value": taint.value, "effect": taint.effect} for taint in node.taints]
    return {"metadata": {"name": node.name, "labels": node.labels}, "spec": {"taints": taints, "unschedulable": CORDONED in node.taints}}


def check_nodes(snapshot: Snapshot, plan: Plan) -> None:
    """Check that each pod may run on the node that a plan names, by the oracle alone."""
    nodes, pods = {node.name: object_of(node) for node in snapshot.node_facts}, restore(snapshot).pods
    for uid, node in used_nodes(plan):
        spec = json.loads(pods[uid].controller_uid)
        assert not depends_on_pods(spec)
        if nodes:
            assert may_run(spec, nodes[node])
        else:
            assert not requires_labels(spec)
            assert node not in snapshot.closed_nodes
    assert plan.goal.pod_uid or not set(plan.nodes) & set(snapshot.closed_nodes)


@given(clusters(), goals())
def test_no_plan_names_node_that_pod_may_not_use(snapshot: Snapshot, goal: Goal) -> None:
    plan = found(snapshot, goal)
    if plan is not None:
        check_nodes(snapshot, plan)


def test_plans_serve_waiting_and_moving_pods_with_rules() -> None:
    """The checks above are not empty: each of these was left out where labels were unknown."""
    served = Counter[str]()
    for seed in range(300):
        snapshot = make_cluster(seed)
        plan = find_plan(snapshot, Goal("big"))
        if not isinstance(plan, Plan):
            continue
        check_nodes(snapshot, plan)
        for uid, node in used_nodes(plan):
            role = "waiting" if uid == "big" else "moving"
            served[f"{role} selects"] += requires_labels(json.loads(restore(snapshot).pods[uid].controller_uid))
            served[f"{role} tolerates"] += node in snapshot.closed_nodes
    assert min(served[f"{role} {rule}"] for role in ("waiting", "moving") for rule in ("selects", "tolerates")) >= 2, served


@given(clusters(), st.data())
def test_plan_does_not_replay_after_a_node_was_cordoned(snapshot: Snapshot, data: st.DataObject) -> None:
    plan = found(snapshot, Goal("big"))
    if plan is None or not snapshot.node_facts:
        return
    cordoned = data.draw(st.sampled_from([node for _, node in used_nodes(plan)]))
    facts = tuple(replace(node, taints=(*node.taints, CORDONED)) if node.name == cordoned else node for node in snapshot.node_facts)
    later = msgspec.structs.replace(snapshot, node_facts=facts)
    with pytest.raises(CertificateError):
        certify(later, plan)
    other = find_plan(later, Goal("big"))
    assert not isinstance(other, Plan) or cordoned not in [node for _, node in used_nodes(other)]


@given(clusters())
def test_no_move_for_a_pod_can_be_spared(snapshot: Snapshot) -> None:
    plan = found(snapshot, Goal("big"))
    if plan is None:
        return
    assert plan.moves
    for spared in plan.moves:
        fewer = msgspec.structs.replace(plan, moves=tuple(move for move in plan.moves if move is not spared))
        with pytest.raises(CertificateError):
            certify(snapshot, fewer)


@given(clusters(), goals())
def test_certificate_replays_after_a_trip_through_json(snapshot: Snapshot, goal: Goal) -> None:
    plan = found(snapshot, goal)
    if plan is not None:
        check(msgspec.json.decode(msgspec.json.encode(certify(snapshot, plan)), type=Certificate))
        assert find_plan(msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot), goal) == plan


@given(clusters(), goals(), st.data())
def test_changed_certificate_is_refused(snapshot: Snapshot, goal: Goal, data: st.DataObject) -> None:
    plan = found(snapshot, goal)
    if plan is None or not plan.moves:
        return
    document = msgspec.to_builtins(certify(snapshot, plan))
    holder, key = data.draw(st.sampled_from(list(leaves(document))))
    old = holder[key]
    holder[key] = (not old) if isinstance(old, bool) else old + 1 if isinstance(old, int | float) else f"{old}x"
    try:
        changed = msgspec.convert(document, Certificate)
    except (msgspec.ValidationError, ValueError):
        return  # it is not even of the form
    with pytest.raises(CertificateError):
        check(changed)


def leaves(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value of a document that is no container, as its container and its key there."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from leaves(value)
        elif isinstance(value, str | int | float):
            yield document, key


@given(clusters(), st.data())
def test_plan_with_another_seat_is_refused_although_the_digest_is_right(snapshot: Snapshot, data: st.DataObject) -> None:
    plan = found(snapshot, Goal("big"))
    if plan is None:
        return
    number = data.draw(st.integers(0, len(plan.moves) - 1))
    move = plan.moves[number]
    seat = {uuid: use._replace(memory_mib=use.memory_mib + 1000) for uuid, use in move.seat.items()}
    for wrong in ({"seat": seat}, {"to_node": "n9"}, {"from_node": "n9"}, {"pod_uid": "big"}, {"pod": "team/other"}):
        moves = [*plan.moves]
        moves[number] = msgspec.structs.replace(move, **wrong)
        with pytest.raises(CertificateError):
            certify(snapshot, msgspec.structs.replace(plan, moves=tuple(moves)))
