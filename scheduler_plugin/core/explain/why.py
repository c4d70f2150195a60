# SPDX-License-Identifier: Apache-2.0
"""One pod's explanation as a document: where it is, or what each node lacks and the smallest changes that would help."""

from datetime import UTC, datetime, tzinfo
from typing import Final, NamedTuple

import msgspec

from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.errors import ContractError
from aliquot.contract.model import PodRequest, Policy
from aliquot.placement.request import RequestError, pod_request
from scheduler_plugin.core.cluster.decisions import QueriedNodes
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.one import (
    NodeQuestion,
    ReasonCount,
    count_reasons,
    fewest_pods,
    several_question,
    smallest_changes,
    victim_questions,
)
from scheduler_plugin.core.explain.several import SeveralQuestion, answer_several
from scheduler_plugin.core.fit.change import Change
from scheduler_plugin.core.fit.kube_filters import NOT_CHECKED, Scope
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import HostDemand

_RUNTIME: Final = f"annotation {contract.ANNOTATION_EXPECTED_RUNTIME}"


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a waiting pod probably starts, on room that is held for it. Times are in seconds since 1970; None if unknown."""

    nodes: tuple[str, ...]
    expected_at: float | None = None
    earliest_at: float | None = None
    """It starts earlier in one case of ten."""
    latest_at: float | None = None
    """It starts later in one case of ten."""
    unknown: int = 0
    """How many pods use that room that have no expected end."""
    overdue: int = 0
    """How many pods use it for longer than expected."""

    def sentence(self, zone: tzinfo = UTC) -> str:
        """Say when and where. Args: zone: in which times are shown."""
        where = f"room is held on node{'s' * (len(self.nodes) > 1)} {', '.join(self.nodes)}"
        if self.expected_at is None or self.earliest_at is None or self.latest_at is None:
            without = "1 pod there has" if self.unknown == 1 else f"{self.unknown} pods there have"
            return f"{where}, and it is unknown when it is free: {without} no expected end ({_RUNTIME})"
        at, early, late = (_time_text(seconds, zone) for seconds in (self.expected_at, self.earliest_at, self.latest_at))
        late_ones = f"; running there for longer than expected: {self.overdue}" if self.overdue else ""
        return f"expected to start {at} (80 %: {early} to {late}); {where}{late_ones}"


class Why(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The explanation. Exactly one of these holds: the pod has a node, it has a refusal, it fits somewhere, or it fits nowhere.

    A pod that fits can still wait for its gang or for its scheduling gates.
    """

    pod: str
    """``namespace/name``."""
    uid: str
    node: str = ""
    """The node to which it is bound."""
    devices: tuple[str, ...] = ()
    refusal: str = ""
    """Why no node is searched for it, as a sentence: none can ever take it, or something else comes first."""
    nodes: int = 0
    """Number of nodes with an inventory."""
    left_out: int | None = None
    """How many of them kube-scheduler's own filters excluded at its last call; None if unknown."""
    fitting: int = 0
    reasons: tuple[ReasonCount, ...] = ()
    changes: tuple[Change, ...] = ()
    gang: str = ""
    """Why its gang cannot start."""
    domain: str = ""
    """In which domains the placed members of its gang are, if it asks for domains."""
    gates: tuple[str, ...] = ()
    """Its scheduling gates: kube-scheduler skips the pod until all are removed."""
    generation: int | None = None
    """The change counter of the state that was read; None from an older scheduler."""
    start: Start | None = None
    """When it probably starts; only for the pod, or the members of the gang, for which room is held."""
    held: str = ""
    """Where it would fit if no room were held for another pod, and what lets it use that room."""
    by_claims: bool = False
    """Whether it gets its GPUs by ResourceClaims. Then no changes are searched, and kube-scheduler chooses the devices."""
    age_seconds: float | None = None
    """Seconds since the last event of the watch that is furthest behind; None before each watch had one, or from an older scheduler."""

    @property
    def waits(self) -> bool:
        """Whether the pod cannot start until something outside of kube-scheduler changes."""
        return not self.node and bool(not self.fitting or self.gang or self.gates)

    @property
    def not_checked(self) -> str:
        """Further filters that were not checked; empty if all were."""
        return NOT_CHECKED if self.left_out is None and not (self.node or self.refusal) else ""

    @property
    def held_back(self) -> str:
        """The start of a sentence on a pod with scheduling gates; empty for others."""
        return f"scheduling gates hold it back ({', '.join(self.gates)}); without them " if self.gates else ""

    @property
    def sentence(self) -> str:
        """The explanation in one line, for an event of the pod."""
        if self.node:
            return f"bound to node {self.node} with {', '.join(self.devices) or 'no GPU'}" + (f"; {self.domain}" if self.domain else "")
        return self.refusal or (self._fits_somewhere() if self.fitting else self._fits_nowhere())

    def _fits_somewhere(self) -> str:
        unsure = f" (not checked: {self.not_checked})" if self.not_checked else ""
        return f"{self.held_back}{self.fitting} of {self.nodes} nodes fit{unsure}" + (f", but {self.gang}" if self.gang else "")

    def _fits_nowhere(self) -> str:
        counts = "; ".join(f"{count.nodes} {count.reason}" for count in self.reasons)
        cures = "; or ".join(change.sentence for change in self.changes)
        lacking = f"{self.held_back}0 of {self.nodes} nodes fit: {counts or 'there is no node with GPUs'}."
        later = [self.start.sentence()] if self.start is not None else [self.held] if self.held else []
        return " ".join([lacking, *(f"{text[0].upper()}{text[1:]}." for text in later), *([f"What would help: {cures}."] if cures else [])])


class Questions(NamedTuple):
    """Searches that take longer than the state may be blocked. They hold immutable values, so they can run in another thread."""

    victims: tuple[NodeQuestion, ...] = ()
    several: SeveralQuestion | None = None

    def answered(self) -> tuple[Change, ...]:
        """Return the changes that would help. Pure, and slow."""
        changes = () if self.several is None else answer_several(self.several)
        ended = fewest_pods(self.victims)
        return changes if ended is None else (*changes, ended)


def explain_pod(
    state: ClusterState,
    shapes: Shapes,
    default_policy: Policy,
    pod: PodFacts,
    asked: QueriedNodes | None = None,
    request: PodRequest | RequestError | None = None,
) -> tuple[Why, Questions]:
    """Explain a pod, except for the searches that are returned as questions.

    Args: asked: the nodes of kube-scheduler's last call; only changes on these can help the pod. None if unknown.
          request: the pod's request if it is parsed already, or the error of an invalid one.
    """
    name = f"{pod.namespace}/{pod.name}"
    if pod.node_name:
        return Why(name, pod.uid, pod.node_name, _devices(pod)), Questions()
    if pod.gpu is None:
        return Why(name, pod.uid, refusal="it asks for no GPU of Aliquot, so kube-scheduler alone decides"), Questions()
    try:
        request = pod_request(pod.gpu) if request is None else request
    except RequestError as exc:
        request = exc
    if isinstance(request, RequestError):
        return Why(name, pod.uid, refusal=str(request)), Questions()
    shape = PodShape.of(request, default_policy, HostDemand(pod.cpu_milli, pod.memory_mib), state.utilizations.of(pod))
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


def completed(why: Why, found: tuple[Change, ...], gang: str, domain: str = "") -> Why:
    """Add the changes that were found later, the reason why the gang cannot start, and where its members are."""
    return msgspec.structs.replace(why, changes=(*why.changes, *found), gang="" if why.node else gang, domain=domain)


def _time_text(seconds: float, zone: tzinfo) -> str:
    return datetime.fromtimestamp(seconds, zone).strftime("%Y-%m-%d %H:%M %Z")


def _devices(pod: PodFacts) -> tuple[str, ...]:
    text = pod.gpu.annotations.get(contract.ANNOTATION_ASSIGNMENT) if pod.gpu is not None else None
    if text is None:
        return ()
    try:
        assignment = codec.decode_assignment(text, pod_uid=pod.uid)
    except ContractError:
        return ()  # the state lists such a pod as unaccounted, with the reason
    return tuple(dict.fromkeys(share.device_uuid for container in assignment.containers for share in container.shares))
