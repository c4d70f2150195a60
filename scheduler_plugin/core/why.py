"""One pod's explanation as a document: where it is, or what each node lacks for it and the least that would change that."""

from typing import NamedTuple

import msgspec

from placement.request import RequestError, pod_request
from proto import codec, contract
from proto.errors import ContractError
from proto.model import Policy
from scheduler_plugin.core.change import Change
from scheduler_plugin.core.decisions import AskedNodes
from scheduler_plugin.core.explain import (
    NodeQuestion,
    ReasonCount,
    count_reasons,
    fewest_pods,
    several_question,
    smallest_changes,
    victim_questions,
)
from scheduler_plugin.core.explain_several import SeveralQuestion, answer_several
from scheduler_plugin.core.kube_filters import NOT_CHECKED, Scope
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.shapes import PodShape, Shapes
from scheduler_plugin.core.state import ClusterState


class Why(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The explanation. Exactly one of these holds: it has a node, it has a refusal, it fits somewhere, or it fits nowhere.

    One that fits can still wait for its gang, or be held back by scheduling gates.
    """

    pod: str
    """``namespace/name``."""
    uid: str
    node: str = ""
    """Where it is bound."""
    devices: tuple[str, ...] = ()
    refusal: str = ""
    """Why no node could ever take it, as a sentence."""
    nodes: int = 0
    """How many have an inventory."""
    left_out: int | None = None
    """How many of them kube-scheduler's own filters left out when it last asked; None where that is not known."""
    fitting: int = 0
    reasons: tuple[ReasonCount, ...] = ()
    changes: tuple[Change, ...] = ()
    gang: str = ""
    """Why its gang cannot start."""
    gates: tuple[str, ...] = ()
    """What keeps kube-scheduler from placing it, wherever it fits."""
    generation: int | None = None
    """The change counter of the state that this was read from; None from a scheduler that does not tell."""
    age_seconds: float | None = None
    """How long ago the stream of the API server that is furthest behind brought anything; None before all did, or where not told."""

    @property
    def waits(self) -> bool:
        """Whether nothing but a change outside of kube-scheduler makes it start."""
        return not self.node and bool(not self.fitting or self.gang or self.gates)

    @property
    def not_checked(self) -> str:
        """What could keep the pod off nodes and was not looked at; empty where nothing could."""
        return NOT_CHECKED if self.left_out is None and not (self.node or self.refusal) else ""

    @property
    def held_back(self) -> str:
        """The beginning of a sentence on a pod that scheduling gates hold back; empty for others."""
        return f"scheduling gates hold it back ({', '.join(self.gates)}); without them " if self.gates else ""

    @property
    def sentence(self) -> str:
        """All of it in a line, for an event of the pod."""
        if self.node:
            return f"bound to node {self.node} with {', '.join(self.devices) or 'no GPU'}"
        if self.refusal:
            return self.refusal
        if self.fitting:
            unsure = f" (not checked: {self.not_checked})" if self.not_checked else ""
            return f"{self.held_back}{self.fitting} of {self.nodes} nodes fit{unsure}" + (f", but {self.gang}" if self.gang else "")
        counts = "; ".join(f"{count.nodes} {count.reason}" for count in self.reasons)
        cures = "; or ".join(change.sentence for change in self.changes)
        lacking = f"{self.held_back}0 of {self.nodes} nodes fit: {counts or 'there is no node with GPUs'}."
        return lacking + (f" What would help: {cures}." if cures else "")


class Questions(NamedTuple):
    """What takes longer to find out than the state may be held up; values that never change."""

    victims: tuple[NodeQuestion, ...] = ()
    several: SeveralQuestion | None = None

    def answered(self) -> tuple[Change, ...]:
        """Return what would help. Pure, and slow."""
        changes = () if self.several is None else answer_several(self.several)
        ended = fewest_pods(self.victims)
        return changes if ended is None else (*changes, ended)


def explain_pod(
    state: ClusterState, shapes: Shapes, default_policy: Policy, pod: PodFacts, asked: AskedNodes | None = None
) -> tuple[Why, Questions]:
    """Explain a pod, but for what the questions ask.

    Args: asked: the nodes that kube-scheduler last asked about, and on which alone the pod can be helped; None where that is not known.
    """
    name = f"{pod.namespace}/{pod.name}"
    if pod.node_name:
        return Why(name, pod.uid, pod.node_name, _devices(pod)), Questions()
    if pod.gpu is None:
        return Why(name, pod.uid, refusal="it asks for no GPU of Aliquot, so kube-scheduler alone decides"), Questions()
    try:
        request = pod_request(pod.gpu)
    except RequestError as exc:
        return Why(name, pod.uid, refusal=str(exc)), Questions()
    shape = PodShape.of(request, default_policy, HostDemand(pod.cpu_milli, pod.memory_mib))
    scope = Scope.of(state, asked)
    left_out = None if scope.left_out is None else len(scope.left_out)
    with state.without(pod.uid):
        fitting, reasons = count_reasons(state, shapes.verdict(shape), shape.demand, scope)
        why = Why(name, pod.uid, nodes=state.node_count, left_out=left_out, fitting=fitting, reasons=reasons, gates=pod.gates)
        if fitting:
            return why, Questions()
        changes = smallest_changes(state, shapes, shape, scope)
        questions = Questions(victim_questions(state, shapes, shape, scope), several_question(state, shape, request, scope))
    return msgspec.structs.replace(why, changes=changes), questions


def completed(why: Why, found: tuple[Change, ...], gang: str) -> Why:
    """Add the changes that were found later, and why its gang cannot start."""
    return msgspec.structs.replace(why, changes=(*why.changes, *found), gang="" if why.node else gang)


def _devices(pod: PodFacts) -> tuple[str, ...]:
    text = pod.gpu.annotations.get(contract.ANNOTATION_ASSIGNMENT) if pod.gpu is not None else None
    if text is None:
        return ()
    try:
        assignment = codec.decode_assignment(text, pod_uid=pod.uid)
    except ContractError:
        return ()  # the state counts such a pod as unaccounted, and says so
    return tuple(dict.fromkeys(share.device_uuid for container in assignment.containers for share in container.shares))
