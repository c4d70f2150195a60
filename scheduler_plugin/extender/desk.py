"""What the verbs share: the state, the verdicts on it, and the reading of a pod's request."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from placement.refusal import Refusal
from placement.request import RequestError, pod_request
from proto.model import PodRequest, Policy
from scheduler_plugin.core.decisions import Decision, Decisions
from scheduler_plugin.core.pods import PodFacts, footprint
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.shapes import PodShape, Shapes, Verdict
from scheduler_plugin.core.state import ClusterState, Reservation, Stage
from scheduler_plugin.extender import wire

_REMEMBERED: Final = 8
_NO_TEXT: Final = msgspec.Raw(b"null")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Asked:
    """The pod of a call and what it asks of GPUs: None when nothing, an error when nobody could give it."""

    pod: PodFacts
    request: PodRequest | RequestError | None


@dataclass(frozen=True, slots=True)
class Named:
    """The nodes of a call."""

    names: list[str]
    rows: npt.NDArray[np.int64]
    """UNKNOWN_ROW for nodes without an inventory."""
    text: msgspec.Raw
    """As the call had them."""


@dataclass(slots=True)
class Desk:
    """One scheduler's state and how to decide on it."""

    state: ClusterState
    shapes: Shapes
    default_policy: Policy
    soft_seconds: float
    """How long a soft reservation lasts."""
    monotonic: Callable[[], float]
    decisions: Decisions = field(default_factory=Decisions)
    on_decision: Callable[[Decision], None] = field(default=lambda _: None)
    """Told every decision."""
    _pods: OrderedDict[bytes, Asked] = field(default_factory=OrderedDict)
    _names: OrderedDict[bytes, Named] = field(default_factory=OrderedDict)
    _named_at: int = -1

    def verdict_for(self, pod: PodFacts, request: PodRequest) -> Verdict:
        """Judge all nodes for a pod, as if it held nothing yet."""
        shape = self.shape_of(pod, request)
        with self.state.without(pod.uid):
            return self.shapes.verdict(shape)

    def shape_of(self, pod: PodFacts, request: PodRequest) -> PodShape:
        """Reduce a pod to what verdicts depend on."""
        return PodShape.of(request, self.default_policy, HostDemand(pod.cpu_milli, pod.memory_mib))

    def asked(self, raw: msgspec.Raw) -> Asked:
        """Read the pod of a call; the same text is read once. Raises WireError."""
        known = self._pods.get(bytes(raw))
        if known is None:
            pod = wire.decode_pod(raw)
            known = Asked(pod, request_of(pod))
            _remember(self._pods, bytes(raw), known)
        return known

    def named(self, raw: msgspec.Raw) -> Named | None:
        """Read the node names of a call, None when it has none; the same text is read once. Raises WireError."""
        if self._named_at != self.state.naming_count:
            self._names.clear()
            self._named_at = self.state.naming_count
        known = self._names.get(bytes(raw))
        if known is None:
            names = wire.decode_names(raw)
            if names is None:
                return None
            known = self.remember_names(names, raw)
        return known

    def look_up(self, names: list[str], text: msgspec.Raw = _NO_TEXT) -> Named:
        """Look up the rows of names."""
        wire.check_count(len(names))
        return Named(names, np.fromiter(map(self.state.rows_by_name.__getitem__, names), dtype=np.int64, count=len(names)), text)

    def remember_names(self, names: list[str], text: msgspec.Raw) -> Named:
        """Look up the rows, and keep them for a call with the same text."""
        named = self.look_up(names, text)
        _remember(self._names, bytes(text), named)
        return named

    def keep_names(self, named: Named, positions: npt.NDArray[np.int64]) -> Named:
        """Return some of the nodes of a call, and expect them to be asked about next."""
        names = [named.names[position] for position in positions.tolist()]
        kept = Named(names, named.rows[positions], msgspec.Raw(msgspec.json.encode(names)))
        _remember(self._names, bytes(kept.text), kept)
        return kept

    def record(self, decision: Decision) -> None:
        """Keep a decision and tell it."""
        self.decisions.record(decision)
        self.on_decision(decision)

    def expect(self, pod: PodFacts, request: PodRequest, node: str) -> None:
        """Reserve softly what the pod would get on a node, unless its binding is under way already."""
        known = self.state.reservations.get(pod.uid)
        if pod.gpu is None or (known is not None and known.stage is not Stage.SOFT):
            return
        assignment = self.state.plan(node, request, self.default_policy, pod.uid)
        if isinstance(assignment, Refusal):
            return
        demand = HostDemand(pod.cpu_milli, pod.memory_mib)
        uses = footprint(pod.gpu.containers, assignment)
        self.state.reserve(Reservation(pod.uid, node, uses, demand, Stage.SOFT, self.monotonic() + self.soft_seconds))


def request_of(pod: PodFacts) -> PodRequest | RequestError | None:
    """Read what a pod asks of GPUs: None when nothing, an error's sentence when it is wrong."""
    if pod.gpu is None:
        return None
    try:
        return pod_request(pod.gpu)
    except RequestError as exc:
        return exc


def _remember(kept: OrderedDict[bytes, _T], key: bytes, value: _T) -> None:
    kept[key] = value
    if len(kept) > _REMEMBERED:
        kept.popitem(last=False)
