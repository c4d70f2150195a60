# SPDX-License-Identifier: Apache-2.0
"""Judges nodes for pods with ResourceClaims: by the devices that kube-scheduler will take there, as ``core.claims`` predicts them.

A pod with extended resources that DeviceClasses give out has a claim too: kube-scheduler makes it for the chosen node, with the resources
that no device plugin gives out there.

kube-scheduler alone decides on a pod if no claim is for our GPUs, all are allocated, one does not exist yet, or one asks for what is not
predicted. Then all nodes fit here, with score 0.

A node is refused only if the claims do not fit with what is allocated. What other pods will probably get lowers its score to 0, because
kube-scheduler itself knows what it has promised. A request with alternatives is rated only where it gets as many devices as its first one
asks for. Admin access takes no devices, so a pod with nothing else is rated by its CPU and RAM.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import msgspec
import numpy as np

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError
from aliquot.contract.model import ContainerRequest, Policy, Preferences
from scheduler_plugin.core.claims.extended import requests_for
from scheduler_plugin.core.claims.first_fit import MOST_STEPS, Claim, Effort, Request, SearchTooLongError, Taken
from scheduler_plugin.core.claims.planned import CORES, as_container, as_shares
from scheduler_plugin.core.claims.pools import Guess, Origin, Pools
from scheduler_plugin.core.claims.stored import StoredClaim
from scheduler_plugin.core.cluster.columns import Rows
from scheduler_plugin.core.cluster.extended import CLASS_PREFIX
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.fit.columnar import RatingQuery, evaluate
from scheduler_plugin.core.fit.shapes import Shapes, Verdict, blank, grown
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.cache import keep
from scheduler_plugin.extender.claim_holds import ClaimHolds, add_use
from scheduler_plugin.ports import Clock

MOST_KEPT: Final = 128
"""Verdicts kept, by the shape of a pod's claims."""
MOST_PREDICTED: Final = 250_000
"""Nodes in all kept predictions, which take 1 KB each."""
STEPS_PER_NODE: Final = 20
"""How many devices a search may try on a node, on average of the nodes of a call, beside MOST_STEPS for the call: filter must answer."""

Taking: TypeAlias = tuple[tuple[Taken, ...], ...]
"""The devices of each request."""
Parts: TypeAlias = tuple[tuple[RatingQuery, tuple[int, ...]], ...]
"""Each request as a container that asks for what it gets on a node, and the columns of its GPUs there."""


@dataclass(frozen=True, slots=True)
class ClaimQuery:
    """The claims of a pod that kube-scheduler has to allocate."""

    claims: tuple[Claim, ...]
    shapes: tuple[bytes, ...]
    demand: HostDemand
    policy: Policy
    resources: tuple[str, ...] = ()
    """The extended resource of each request of the last claim, if that is made for the pod's extended resources."""

    def on(self, plugin_resources: AbstractSet[str]) -> "ClaimQuery":
        """Return what is claimed on a node. Args: plugin_resources: the extended resources that device plugins give out there."""
        if not self.resources or plugin_resources.isdisjoint(self.resources):
            return self
        requests = zip(self.claims[-1].requests, self.resources, strict=True)
        kept = tuple(one for one, resource in requests if resource not in plugin_resources)
        return replace(self, claims=(*self.claims[:-1], *([Claim(kept)] if kept else [])), resources=())

    @property
    def requests(self) -> tuple[Request, ...]:
        """The first alternative of each request."""
        return tuple(alternatives[0] for claim in self.claims for alternatives in claim.requests)

    @property
    def is_ours(self) -> bool:
        """Whether a request is for GPUs of Aliquot."""
        return any(contract.DRA_DRIVER in expression for request in self.requests for expression in request.selectors)

    @property
    def asks(self) -> tuple[RatingQuery, ...]:
        """The same as containers that ask for shares; without admin access."""
        return tuple(map(self.as_rated, (as_container(one) for one in self.requests if not one.is_admin)))

    def as_rated(self, asked: ContainerRequest) -> RatingQuery:
        """Return a container of the pod with all else on which its rating depends."""
        return RatingQuery(asked, Preferences(), self.policy, self.demand)


@dataclass(frozen=True, slots=True)
class _Predicted:
    """What was predicted for a node."""

    stamp: tuple[object, ...]
    """What it depends on: see ``Pools.stamp``, with the inventory."""
    reason: NodeReason
    taking: Taking = ()
    """Empty if the devices are unknown."""
    parts: "Parts | None" = None
    """By what the node is rated; None if it cannot be."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A pod that fitted nowhere at its last call."""

    pod: PodFacts
    rows: Rows
    """The nodes of the call. kube-scheduler refused the others itself, and it knows when to try them again."""
    at: float
    """On the monotonic clock."""


@dataclass(slots=True)
class _Predictions:
    """What was predicted for some claims, by row. It depends on no CPU and RAM, so pods of many sizes share it."""

    class_version: int
    are_complete: bool
    """Whether all devices that the claims may get are in the search."""
    by_row: dict[int, _Predicted] = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)
    """What is left for the present call."""


class ClaimVerdicts:
    """The claims of the cluster, and what they mean for new pods."""

    def __init__(self, state: ClusterState, shapes: Shapes, policy: Policy, clock: Clock, soft_seconds: float) -> None:
        """Args: policy: by which nodes are rated. soft_seconds: as for ``Reservations``."""
        self.pools = Pools()
        self.holds = ClaimHolds(state, self.pools)
        self.pools.on_node = self._touch
        self.pools.is_expected = lambda uid: uid in state.reservations
        self.pools.footprints_on = state.footprints_on
        self.is_current = False
        """Whether slices, classes and claims are known and followed."""
        self.refused: dict[str, Refusal] = {}
        """By the pod's UID."""
        self._state = state
        self._shapes = shapes
        self._policy = policy
        self._clock = clock
        self._soft_seconds = soft_seconds
        self._predictions: OrderedDict[tuple[bytes, ...], _Predictions] = OrderedDict()
        self._verdicts: OrderedDict[tuple[tuple[bytes, ...], HostDemand], tuple[_Predictions, Verdict]] = OrderedDict()

    def is_our_class(self, name: str) -> bool:
        """Whether a DeviceClass selects GPUs of Aliquot, or may: while classes are not known, each may."""
        selectors = ((self.pools.classes.get(name) or {}).get("spec") or {}).get("selectors") or ()
        return not self.is_current or any(contract.DRA_DRIVER in one["cel"]["expression"] for one in selectors)

    def is_our_resource(self, name: str) -> bool:
        """Whether a DeviceClass that selects GPUs of Aliquot gives out an extended resource. Without classes only the class in the name
        tells.
        """
        if name.startswith(CLASS_PREFIX):
            return self.is_our_class(name.removeprefix(CLASS_PREFIX))
        given = self.pools.class_of.get(name)
        return given is not None and self.is_our_class(given)

    def query(self, pod: PodFacts) -> ClaimQuery | str:
        """Return what a pod claims; a sentence if kube-scheduler alone decides."""
        special, resources = self._special(pod)
        waiting = self._waiting(pod, special)
        if isinstance(waiting, str):
            return waiting
        try:
            claims = tuple(self.pools.read(waiting))
        except ContractError as exc:
            return f"its ResourceClaims are not predicted, so kube-scheduler alone decides: {exc}"
        demand = HostDemand(pod.cpu_milli, pod.memory_mib)
        query = ClaimQuery(claims, tuple(claim.shape for claim in waiting), demand, self._policy, resources)
        return query if query.is_ours else "its ResourceClaims are not for GPUs of Aliquot, so kube-scheduler alone decides"

    def _special(self, pod: PodFacts) -> tuple[Sequence[StoredClaim], tuple[str, ...]]:
        """Return the claim that kube-scheduler makes for a pod's extended resources, if it does, and the resource of each request."""
        found = requests_for(pod.extended, self.pools.class_of) if pod.extended else ()
        if not found:
            return (), ()
        resources = tuple(resource for resource, _ in found)
        spec = {"devices": {"requests": [request for _, request in found]}}
        return [StoredClaim((pod.namespace, ""), "", spec, msgspec.json.encode((spec, resources)), None, ())], resources

    def _waiting(self, pod: PodFacts, special: Sequence[StoredClaim]) -> Sequence[StoredClaim] | str:
        """Return the claims of a pod that are not allocated; a sentence without any, or if they are unknown."""
        if not pod.claims and not special:
            return "it asks for no GPU of Aliquot, so kube-scheduler alone decides"
        if not self.is_current:
            return "it has ResourceClaims, which the scheduler does not read now: kube-scheduler alone decides"
        known = [claim for name in pod.claims if (claim := self.pools.claims.get((pod.namespace, name))) is not None]
        if len(known) < len(pod.claims):
            return "it waits for a ResourceClaim that does not exist yet"
        waiting = [*(claim for claim in known if claim.parts is None), *special]
        return waiting or "its ResourceClaims are allocated, so it can only run on their node"

    def verdict(self, pod: PodFacts) -> Verdict | None:
        """Judge all nodes for a pod, as if it had no devices yet; None if kube-scheduler alone decides. Valid until the state changes."""
        query = self.query(pod)
        return None if isinstance(query, str) else self.judge(pod, query)

    def judge(self, pod: PodFacts, query: ClaimQuery) -> Verdict:
        """Judge all nodes for these claims."""
        if asks := self._asks(query):
            self._state.wanted.see(as_shares(replace(pod, gpu=None), [ask.request for ask in asks]))
        self._shapes.refresh()
        with self._state.without(pod.uid):
            self._state.columns.derive()
            return self._up_to_date(pod.uid, query)

    def note_outcome(self, pod: PodFacts, rows: Rows, *, fits: bool) -> None:
        """Remember the pods that fit nowhere. Args: rows: of the nodes of the call."""
        if fits:
            self.refused.pop(pod.uid, None)
        else:
            self.refused[pod.uid] = Refusal(pod, rows, self._clock.monotonic())

    def assume(self, pod: PodFacts, row: int) -> None:
        """Expect a pod on a node that was judged for it, until its claims are allocated or some seconds are over."""
        query, node = self.query(pod), self._state.names[row]
        if isinstance(query, str) or ((known := self._state.reservations.get(pod.uid)) is not None and known.stage.is_firm):
            return
        requests = query.on(self._plugin_resources(row)).requests
        taking = [pair for pair in zip(requests, self.taking(query, row), strict=False) if not pair[0].is_admin]
        uses = self._uses_of(node, taking)
        expires_at = self._clock.monotonic() + self._soft_seconds
        self._state.reserve(Reservation(pod.uid, node, uses, query.demand, Stage.SOFT, expires_at, expires_at))
        self.pools.guess(pod.uid, Guess(node, tuple(taken for _, group in taking for taken in group)))

    def _uses_of(self, node: str, taking: Iterable[tuple[Request, Iterable[Taken]]]) -> dict[str, Use]:
        uses: dict[str, Use] = {}
        for request, group in taking:
            for taken in group:
                found = self.holds.use(node, taken.device, taken.consumed or None, states_cores=CORES in request.amounts)
                if found is not None:
                    add_use(uses, *found)
        return uses

    def taking(self, query: ClaimQuery, row: int) -> Taking:
        """Return the devices that were predicted for claims on a node, by request; empty if unknown."""
        kept = self._predictions.get(query.shapes)
        found = None if kept is None else kept.by_row.get(row)
        return () if found is None else found.taking

    def devices_of(self, pod: PodFacts) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that a pod's claims have."""
        found = (self.pools.claims.get((pod.namespace, name)) for name in pod.claims)
        parts = (part for claim in found if claim is not None for part in claim.parts or ())
        return tuple(dict.fromkeys(origin.gpu for part in parts if (origin := self.pools.origins.get(part.device)) is not None))

    def _asks(self, query: ClaimQuery) -> Sequence[RatingQuery]:
        """Return claims as containers that ask for what they get on some node; before that is known, for shares."""
        kept = self._predictions.get(query.shapes)
        known = (found.parts for found in kept.by_row.values() if found.parts is not None) if kept is not None else iter(())
        return [ask for ask, _ in next(known, ())] or query.asks

    def _plugin_resources(self, row: int) -> AbstractSet[str]:
        """Return the extended resources that device plugins give out on a node."""
        return self._state.plugin_resources.get(self._state.names[row], frozenset())

    def _touch(self, node: str) -> None:
        """Have a node judged again."""
        row = self._state.row_of(node)
        if row is not None:
            self._state.columns.touch(row)

    def _up_to_date(self, uid: str, query: ClaimQuery) -> Verdict:
        columns, predictions, key = self._state.columns, self._predictions_for(query), (query.shapes, query.demand)
        known, verdict = self._verdicts.get(key, (None, None))
        if verdict is None or known is not predictions:
            verdict = blank(columns.rows)
            verdict.computed_at = -1
        if len(verdict.reason) < columns.rows:
            verdict = grown(verdict, columns.rows)
        keep(self._verdicts, key, (predictions, verdict), MOST_KEPT)
        changed = np.flatnonzero(columns.rated[: columns.rows] > verdict.computed_at)
        predictions.effort = Effort(MOST_STEPS + STEPS_PER_NODE * len(changed))
        for chunk in columns.chunks(changed):
            self._judge(uid, query, chunk, predictions, verdict)
        verdict.computed_at = columns.rating_count
        return verdict

    def _predictions_for(self, query: ClaimQuery) -> _Predictions:
        """Return what is kept for these claims; nothing if a class changed since."""
        kept = self._predictions.get(query.shapes)
        if kept is None or kept.class_version != self.pools.class_version:
            requests = (one for claim in query.claims for alternatives in claim.requests for one in alternatives)
            kept = _Predictions(self.pools.class_version, not self.pools.may_be_common(requests))
        keep(self._predictions, query.shapes, kept, min(MOST_KEPT, MOST_PREDICTED // max(1, self._state.columns.rows) + 1))
        return kept

    def _judge(self, uid: str, query: ClaimQuery, rows: Rows, predictions: _Predictions, verdict: Verdict) -> None:
        verdict.reason[rows], verdict.curable[rows], verdict.score[rows], verdict.cost[rows] = NodeReason.NO_GPU.value, False, 0, 0.0
        rated: dict[int, Parts] = {}
        for row in rows.tolist():
            if not (node := self._state.names[row]):
                predictions.by_row.pop(row, None)
                continue
            here = query.on(self._plugin_resources(row)) if query.resources else query
            stamp = (*self.pools.stamp(node, uid), self._state.gpu_node(node), here.claims if query.resources else None)
            found = predictions.by_row.get(row)
            if found is None or found.stamp != stamp:
                found = predictions.by_row[row] = self._predict(uid, here, row, stamp, predictions)
            verdict.reason[row] = found.reason.value
            if found.parts is not None:
                rated[row] = found.parts
        if rated:
            self._rate(query, rated, verdict)

    def _predict(self, uid: str, query: ClaimQuery, row: int, stamp: tuple[object, ...], predictions: _Predictions) -> _Predicted:
        """Predict whether claims fit on a node, and the devices that they get."""
        if not query.claims:  # device plugins give out all that the pod asks for
            return _Predicted(stamp, NodeReason.FITS)
        node, is_complete, effort = self._state.names[row], predictions.are_complete, predictions.effort
        if not self.pools.offers(node):
            return _Predicted(stamp, NodeReason.NOT_CLAIMABLE if is_complete else NodeReason.FITS)
        try:
            found = self.pools.predict(node, query.claims, uid, effort=effort)
            if found is not None:
                taking = tuple(group for claim, taken in zip(query.claims, found, strict=True) for group in _groups(claim, taken))
                return _Predicted(stamp, NodeReason.FITS, taking, self._parts(query, taking, row))
            if is_complete and self.pools.predict(node, query.claims, uid, guesses=False, effort=effort) is None:
                return _Predicted(stamp, self._lacking(query, row))
        except (ContractError, SearchTooLongError):
            pass  # kube-scheduler's own search decides
        return _Predicted(stamp, NodeReason.FITS)

    def _lacking(self, query: ClaimQuery, row: int) -> NodeReason:
        """Return why claims do not fit on a node: what its GPUs lack for one of the requests, or else for all together."""
        weights, rows = self._shapes.weights[self._policy], np.array([row], dtype=np.int64)
        looked = (self._as_looked_for(one, self._state.names[row]) for one in query.requests)
        asks = (query.as_rated(one) for one in looked if one is not None)
        reasons = (int(evaluate(self._state.columns, rows, ask, weights).reason[0]) for ask in asks)
        return NodeReason(next((reason for reason in reasons if reason != NodeReason.FITS.value), NodeReason.CLAIMS.value))

    def _as_looked_for(self, request: Request, node: str) -> ContainerRequest | None:
        """Return a request as a container, by the devices of a node that meet its selectors. One for fixed shares asks for one of them.

        None for shares that lie in a MIG instance: what such a GPU lacks for containers is not what it lacks for them.
        """
        origins = self.pools.origins_of(node, request)
        if origins and all(origin.in_instance for origin in origins):
            return None
        if request.takes_all:
            request = replace(request, count=max(1, len(origins)))
        kinds = {(origin.fixed_mib, origin.profile) for origin in origins}
        fixed_mib, profile = kinds.pop() if len(kinds) == 1 else (None, "")
        if profile:
            return ContainerRequest(request.name, mig=((profile, request.count),))
        return as_container(request) if fixed_mib is None else ContainerRequest(request.name, 1, fixed_mib * units.MIB)

    def _parts(self, query: ClaimQuery, taking: Taking, row: int) -> Parts | None:
        """Return by what a node is rated; None if the inventory lacks a GPU, or another alternative was taken."""
        gpu = self._state.gpu_node(self._state.names[row])
        column_of = {} if gpu is None else {entry.device.uuid: column for column, entry in enumerate(gpu.devices)}
        parts = []
        for request, group in _taking_requests(query.requests, taking):
            known = (self.pools.origins.get(taken.device) for taken in group)
            origins = [origin for origin in known if origin is not None and origin.gpu in column_of]
            ask = _as_given(request, origins)
            if ask is None:
                return None
            columns = tuple(sorted({column_of[origin.gpu] for origin in origins}))
            parts.append((query.as_rated(ask), columns))
        return tuple(parts)

    def _rate(self, query: ClaimQuery, chosen: Mapping[int, Parts], verdict: Verdict) -> None:
        """Rate nodes by the devices that the claims get there. Rows where the claims get the same are rated together."""
        width, alike = self._state.columns.width, dict[tuple[RatingQuery, ...], list[int]]()
        for row, parts in chosen.items():
            alike.setdefault(tuple(ask for ask, _ in parts), []).append(row)
        for asks, members in alike.items():
            rated = []
            for number, ask in enumerate(asks):
                devices = np.zeros((len(members), width), dtype=np.bool_)
                for position, row in enumerate(members):
                    devices[position, chosen[row][number][1]] = True
                rated.append((ask, devices))
            rows = np.array(members, dtype=np.int64)
            found = self._shapes.rated_on(rows, rated) if rated else self._shapes.rated_by_host(rows, query.policy, query.demand)
            verdict.cost[rows], verdict.score[rows] = found


def _taking_requests(requests: Sequence[Request], taking: Taking) -> Iterable[tuple[Request, tuple[Taken, ...]]]:
    """Yield the requests that take something, each with its devices and their number."""
    for request, group in zip(requests, taking, strict=True):
        if not request.is_admin:
            yield replace(request, count=len(group)) if request.takes_all else request, group


def _groups(claim: Claim, taken: Sequence[Taken]) -> list[tuple[Taken, ...]]:
    """Return the devices of each request of a claim."""
    names = [alternatives[0].name.partition("/")[0] for alternatives in claim.requests]
    return [tuple(one for one in taken if one.request.partition("/")[0] == name) for name in names]


def _as_given(request: Request, origins: Sequence[Origin]) -> ContainerRequest | None:
    """Return a request as a container that asks for these devices; None if they are not all of it, or of several kinds."""
    if len(origins) != request.count:
        return None
    (kind, *others), on_gpu = {(origin.fixed_mib, origin.profile) for origin in origins}, Counter(origin.gpu for origin in origins)
    (several, *uneven), (fixed_mib, profile) = set(on_gpu.values()), kind
    if others or uneven:
        return None
    if profile:
        return ContainerRequest(request.name, mig=((profile, request.count),))
    if fixed_mib is None:
        return as_container(request) if several == 1 else None
    return ContainerRequest(request.name, len(on_gpu), request.count * fixed_mib * units.MIB)
