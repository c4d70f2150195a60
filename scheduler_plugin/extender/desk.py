"""What the verbs share: the state, the verdicts on it, and the reading of a pod's request."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from placement.refusal import Refusal
from placement.request import RequestError, pod_request
from proto.model import PodRequest, Policy
from scheduler_plugin.core.budgets import Budgets
from scheduler_plugin.core.columns import Ints, Rows
from scheduler_plugin.core.decisions import AskedNodes, Choice, Decision, Decisions, GangTurn, Record
from scheduler_plugin.core.gang_plan import Planner
from scheduler_plugin.core.names import NamesText, NameTable
from scheduler_plugin.core.pods import Footprint, PodFacts, footprint
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.score_text import ScoreText, Skeleton
from scheduler_plugin.core.shapes import MAX_KEPT, PodShape, Shapes, Verdict
from scheduler_plugin.core.state import UNKNOWN_ROW, ClusterState, Reservation, Stage
from scheduler_plugin.errors import WireError
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.gang import Gangs

PREPARE_SECONDS: Final = 600.0
"""How long kube-scheduler waits by default, before it asks for a binding, until a pod's volumes and claims are made (VolumeBinding's
bindTimeoutSeconds)."""
_REMEMBERED: Final = 8
_NO_GPU: Final = PodRequest(())
_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Asked:
    """The pod of a call and what it asks of GPUs: None when nothing, an error when nobody could give it."""

    pod: PodFacts
    request: PodRequest | RequestError | None
    shape: PodShape
    """What verdicts on it depend on: on its CPU and RAM alone when it asks for no GPU, or for what nobody could give."""


@dataclass(frozen=True, slots=True)
class Named:
    """The nodes of a call."""

    rows: Rows
    """UNKNOWN_ROW for nodes without an inventory."""
    strange: Mapping[int, str]
    """The names of those, by position."""
    text: bytes
    """The names in JSON, as the call had them."""
    places: NamesText | None = None
    """Where each name is in the text, when it is written plainly."""
    known: npt.NDArray[np.int32] = field(init=False)
    """The rows of those with an inventory, as records keep them."""

    def __post_init__(self) -> None:
        known = self.rows if not self.strange else self.rows[self.rows != UNKNOWN_ROW]
        object.__setattr__(self, "known", known.astype(np.int32))


@dataclass(slots=True)
class Desk:
    """One scheduler's state and how to decide on it."""

    state: ClusterState
    shapes: Shapes
    default_policy: Policy
    soft_seconds: float
    """How long a soft reservation lasts; PREPARE_SECONDS longer for a pod that needs preparing, unless its attempt is seen to be over."""
    monotonic: Callable[[], float]
    now: Callable[[], float] = lambda: 0.0
    """Seconds since 1970."""
    gang_seconds: float = 60.0
    """How long a gang may hold room before it must have started."""
    gangs: Gangs = field(init=False)
    budgets: Budgets = field(default_factory=Budgets)
    decisions: Decisions = field(default_factory=Decisions)
    on_decision: Callable[[Decision], None] = field(default=lambda _: None)
    on_invalid: Callable[[], None] = field(default=lambda: None)
    """Told of each filter call for a GPU pod whose request or gang annotation cannot be honoured: no decision is made then."""
    """Told every decision."""
    on_preemption: Callable[[int, int, int], None] = field(default=lambda *_: None)
    """Told of every preempt call in which nodes were looked at those kept, those dropped and the victims added."""
    _pods: OrderedDict[bytes, Asked] = field(default_factory=OrderedDict)
    _names: deque[Named] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Compared one by one: hashing 5,000 names costs ten times as much as finding that lists differ."""
    _latest: tuple[str, PodShape] | None = None
    """The pod that was judged last, by UID, and its shape."""
    _next: OrderedDict[PodShape, PodShape] = field(default_factory=OrderedDict)
    """By shape, that of the pod that came after the last one of it: pods come in series and in rounds, one round much as the one before."""
    _expected: deque[tuple[str, PodRequest]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Pods that were expected somewhere, by UID, and whose devices have not been planned since."""
    _score_texts: OrderedDict[PodShape, ScoreText] = field(default_factory=OrderedDict)
    _table: NameTable = field(default_factory=lambda: NameTable(()))
    _names_by_row: tuple[str, ...] = ()
    _skeleton: Skeleton | None = None
    _named_at: int = -1

    def __post_init__(self) -> None:
        self.gangs = Gangs(Planner(self.state, self.shapes, self.default_policy), self.gang_seconds, self.monotonic)

    def verdict_for(self, pod: PodFacts, shape: PodShape) -> Verdict:
        """Judge all nodes for a pod, as if it held nothing yet."""
        if self._latest is not None and self._latest[0] != pod.uid:
            _remember(self._next, self._latest[1], shape, MAX_KEPT)
        self._latest = pod.uid, shape
        with self.state.without(pod.uid):
            return self.shapes.verdict(shape)

    def request_of(self, pod: PodFacts) -> PodRequest | RequestError | None:
        """Read what a pod asks of GPUs, as the function does; what was read for its latest decision is not read again."""
        decision = self.decisions.by_uid.get(pod.uid)
        return decision.request if decision is not None and decision.pod.gpu == pod.gpu else request_of(pod)

    def shape_of(self, pod: PodFacts, request: PodRequest) -> PodShape:
        """Reduce a pod to what verdicts depend on."""
        return PodShape.of(request, self.default_policy, HostDemand(pod.cpu_milli, pod.memory_mib))

    def asked(self, raw: msgspec.Raw) -> Asked:
        """Read the pod of a call; the same text is read once, and once what replicas ask. Raises WireError."""
        text = bytes(raw)
        known = self._pods.get(text)
        if known is None:
            pod = wire.decode_pod(raw)
            like = next((other for other in self._pods.values() if _ask_alike(other.pod, pod)), None)
            if like is not None:
                known = replace(like, pod=pod)
            else:
                request = request_of(pod)
                known = Asked(pod, request, self.shape_of(pod, request if isinstance(request, PodRequest) else _NO_GPU))
            _remember(self._pods, text, known)
        return known

    def named(self, text: bytes) -> Named | None:
        """Read the node names of a call, None when it has none; the same text is read once. Raises WireError."""
        self._follow_names()
        known = next((named for named in self._names if named.text == text), None)
        if known is None:
            known = self._read_names(text)
            if known is not None:
                self._names.appendleft(known)
        return known

    def look_up(self, names: Sequence[str], text: bytes = b"[]") -> Named:
        """Look up the rows of names one by one."""
        wire.check_count(len(names))
        rows = np.fromiter(map(self.state.rows_by_name.__getitem__, names), dtype=np.int64, count=len(names))
        return Named(rows, {position: names[position] for position in np.flatnonzero(rows == UNKNOWN_ROW).tolist()}, text)

    def keep_names(self, named: Named, positions: Ints) -> Named:
        """Return some of the nodes of a call, all with an inventory, and expect them to be asked about next."""
        rows = named.rows[positions]
        if named.places is not None:
            text = named.places.part(positions)
        else:
            text = msgspec.json.encode([self.state.names[row] for row in rows.tolist()])
        kept = Named(rows, {}, text)
        self._names.appendleft(kept)
        return kept

    def names_of(self, named: Named, positions: Ints | None = None) -> list[str]:
        """Return the names at some positions, or all."""
        if positions is None:
            positions = np.arange(len(named.rows))
        names, strange = self.state.names, named.strange
        pairs = zip(positions.tolist(), named.rows[positions].tolist(), strict=True)
        return [strange[position] if row == UNKNOWN_ROW else names[row] for position, row in pairs]

    def scores_of(self, shape: PodShape, verdict: Verdict) -> ScoreText:
        """Return prioritize's answer for a shape, brought up to date with its verdict."""
        self._follow_names()
        if self._skeleton is None:
            self._skeleton = Skeleton(self.state.names)
        kept = self._score_texts.get(shape)
        if kept is None or kept.skeleton is not self._skeleton:
            kept = ScoreText(self._skeleton)
        _remember(self._score_texts, shape, kept, MAX_KEPT)
        rows = np.flatnonzero((self.state.columns.changed[: len(verdict.score)] > kept.written_at) & self._skeleton.named)
        kept.write(rows, verdict.score[rows])
        kept.written_at = verdict.computed_at
        return kept

    def _follow_names(self) -> None:
        """Forget what was looked up before a node came or went."""
        if self._named_at != self.state.naming_count:
            self._named_at = self.state.naming_count
            self._names.clear()
            self._names_by_row = tuple(self.state.names)
            self._table, self._skeleton = NameTable(self._names_by_row), None

    def _read_names(self, text: bytes) -> Named | None:
        try:
            found = self._table.read(text)
            if found is None:
                names = wire.decode_names(text)
                return None if names is None else self.look_up(names, text)
            places, rows = found
            wire.check_count(len(rows))
            strange = {position: places.name(position) for position in np.flatnonzero(rows == UNKNOWN_ROW).tolist()}
        except UnicodeDecodeError as exc:
            raise WireError(f"expected a list of names in NodeNames: {exc}") from exc
        return Named(rows, strange, text, places)

    def record(self, decision: Decision, named: Named, turn: GangTurn | None = None) -> None:
        """Keep a decision with its inputs, the nodes that were asked about, and tell it."""
        if not decision.fitting:
            decision = replace(decision, asked=AskedNodes.of(named.known, self._named_at))
        self.on_decision(decision)
        moment = self.state.moment() if turn is None else turn.moment
        self.decisions.record(decision, Record(decision, moment, self._names_by_row, named.known, gang=turn))

    def note_choice(self, pod_uid: str, named: Named, row: int, score: int) -> None:
        """Add to a pod's decision what prioritize said, and of which nodes."""
        self.decisions.chose(pod_uid, Choice(self.state.names[row], score, self.state.moment(), self._names_by_row, named.known))

    def expect(self, pod: PodFacts, request: PodRequest, verdict: Verdict, row: int) -> None:
        """Reserve softly what the pod is likely to get on a node where it fits, unless its binding is under way already.

        For one container the devices by which the node was rated are taken: placement's own search may prefer others that cost the
        same, and bind, which asks it, moves the reservation then. A pod without GPUs is expected with its CPU and RAM.
        """
        node = self.state.names[row]
        known, expires_early_at = self.state.reservations.get(pod.uid), self.monotonic() + self.soft_seconds
        is_there = pod.uid in self.state.pods  # the end of one that is not may have been told already
        expires_at = expires_early_at + (PREPARE_SECONDS if pod.needs_preparing and is_there else 0.0)
        if known is not None and known.stage.is_firm:
            return
        if known is not None and known.node == node and known.expires_at > expires_at:
            return  # planned with its gang, for longer
        uses = self._likely_uses(pod, request, verdict, row)
        if uses is not None:
            demand = HostDemand(pod.cpu_milli, pod.memory_mib)
            self.state.reserve(Reservation(pod.uid, node, uses, demand, Stage.SOFT, expires_at, expires_early_at))
            if pod.gpu is not None:
                self._expected.append((pod.uid, request))

    def prepare(self) -> bool:
        """Work out a piece of what coming calls are likely to need, a millisecond at most as a rule; False when there is nothing left.

        That is what binding a pod just rated will plan, and the verdict on the shape of pod that is likely to come next. It changes no
        answer: what is prepared is used while nothing has changed since, and worked out anew otherwise.
        """
        while self._expected:
            uid, request = self._expected.popleft()
            expected = self.state.reservations.get(uid)
            if expected is not None:
                self.state.plan(expected.node, request, self.default_policy, uid)
                return True
        likely = None if self._latest is None else self._next.get(self._latest[1])
        return likely is not None and self.shapes.catch_up(likely)

    def follow(self, pod: PodFacts) -> None:
        """Expect a pod that is being prepared where kube-scheduler just said it is to go, in place of where we rated best.

        kube-scheduler says so from 1.35 on, when it begins to prepare a pod. Before that bind moves the reservation, and only then.
        """
        known, node = self.state.reservations.get(pod.uid), pod.nominated_node
        if known is None or known.node == node or known.expires_at <= known.expires_early_at:
            return
        if self.gangs.planner.expect_on(pod, node, known.expires_at):
            self.state.end_attempt(pod.uid)
        else:
            self.state.reserve(replace(self.state.reservations[pod.uid], expires_early_at=known.expires_early_at))

    def binding_row(self, pod: PodFacts) -> int | None:
        """Return the row of the node that a pod is being bound to."""
        known = self.state.reservations.get(pod.uid)
        return self.state.row_of(known.node) if known is not None and known.stage is Stage.BINDING else None

    def _likely_uses(self, pod: PodFacts, request: PodRequest, verdict: Verdict, row: int) -> Footprint | None:
        node = self.state.names[row]
        if pod.gpu is None:
            return {}
        if verdict.chosen is not None and len(request.containers) == 1:
            return self.state.nominal_footprint(node, request, verdict.chosen[row].tolist())
        assignment = self.state.plan(node, request, self.default_policy, pod.uid)
        return None if isinstance(assignment, Refusal) else footprint(pod.gpu.containers, assignment)


def request_of(pod: PodFacts) -> PodRequest | RequestError | None:
    """Read what a pod asks of GPUs: None when nothing, an error's sentence when it is wrong."""
    if pod.gpu is None:
        return None
    try:
        return pod_request(pod.gpu)
    except RequestError as exc:
        return exc


def _ask_alike(one: PodFacts, other: PodFacts) -> bool:
    """Whether two pods ask for the same, in the same words: all that a request and a shape are read from is equal."""
    if (one.cpu_milli, one.memory_mib) != (other.cpu_milli, other.memory_mib):
        return False
    if one.gpu is None or other.gpu is None:
        return one.gpu is other.gpu
    return one.gpu.containers == other.gpu.containers and one.gpu.annotations == other.gpu.annotations


def _remember(kept: OrderedDict[_K, _T], key: _K, value: _T, most: int = _REMEMBERED) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
