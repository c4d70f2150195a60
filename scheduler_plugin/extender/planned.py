# SPDX-License-Identifier: Apache-2.0
"""Chooses nodes and devices for pods with claims that are allocated here, by the placement core that also serves pods with vGPUs.

Each request of a claim counts as a container that asks for shares. Placement then chooses the node and proposes its devices, with links,
NUMA nodes and fragmentation in mind. The search of kube-scheduler has the last word: it tries the proposed devices first, and judges
selectors, constraints, counters and taints. So what is chosen here is an allocation that kube-scheduler could have made too.

Claims for other kinds of devices, such as MIG instances, have no rating: the first node in the order of names takes them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from typing import Final

import msgspec
import numpy as np

from aliquot import contract
from aliquot.contract.errors import ContractError
from scheduler_plugin.core.claims.first_fit import Claim, Device, Request, SearchTooLongError, Taken
from scheduler_plugin.core.claims.groups import Group
from scheduler_plugin.core.claims.planned import CORES, PlannedPod, as_container, as_shares
from scheduler_plugin.core.claims.pools import Pools, node_of
from scheduler_plugin.core.claims.selecting import meets
from scheduler_plugin.core.claims.stored import StoredClaim
from scheduler_plugin.core.cluster.hold_uids import claim_uid
from scheduler_plugin.core.cluster.nodes import NodeDirectory, rules_of
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import Reservation, Stage
from scheduler_plugin.core.gang.domains import Ranks
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.claim_holds import add_use
from scheduler_plugin.extender.context import ExtenderContext

MOST_NODES: Final = 8
"""Nodes that are tried for a pod where placement finds room and the search finds no devices."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a pod needs."""

    pod: PlannedPod
    waiting: tuple[StoredClaim, ...]
    """Its claims without an allocation; those of other drivers are among them."""
    claims: tuple[Claim, ...]
    """The same, as the search reads them."""
    ours: tuple[bool, ...]
    """For each of them, whether it is allocated here."""
    nodes: frozenset[str]
    """Those that it may use."""
    shares: PodFacts
    """The pod as if it asked for shares."""
    is_rated: bool
    """Whether placement can judge that."""

    @property
    def demand(self) -> HostDemand:
        """Its CPU and RAM."""
        return HostDemand(self.pod.facts.cpu_milli, self.pod.facts.memory_mib)

    @property
    def likeness(self) -> object:
        """What decides where the pod fits, and which other pods may end for it."""
        facts = self.pod.facts
        annotations = None if facts.gpu is None else tuple(sorted(facts.gpu.annotations.items()))
        return tuple(claim.shape for claim in self.waiting), self.demand, self.nodes, facts.priority, annotations

    @property
    def requests(self) -> Sequence[Request]:
        """The first alternative of each request."""
        return [alternatives[0] for claim in self.claims for alternatives in claim.requests]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pod goes, and what its claims get."""

    want: Want
    node: str
    taken: tuple[tuple[Taken, ...], ...]
    """For each claim of ``want.claims``."""

    @property
    def pod(self) -> PodFacts:
        """The pod."""
        return self.want.pod.facts


class ClaimPlacer:
    """Places pods on the state as it is; nothing stays reserved."""

    def __init__(self, context: ExtenderContext, directory: NodeDirectory) -> None:
        self._context = context
        self._directory = directory
        self._suitable: dict[tuple[str, tuple[str, ...]], tuple[Sequence[Device], tuple[int, bool]]] = {}
        """By node and selectors: the devices that were looked at, how many are selected, and whether all of these can be shared."""

    @property
    def _pools(self) -> Pools:
        return self._context.claims.pools

    @property
    def nodes_version(self) -> int:
        """Grows when a pod may get a node that it could not get before."""
        return self._directory.version

    def is_node(self, name: str) -> bool:
        """Whether a node exists."""
        return self._directory.knows(name)

    def claims_of(self, pod: PlannedPod) -> Sequence[StoredClaim] | None:
        """Return the claims of a pod; None while one does not exist, or ends."""
        facts = pod.facts
        found = [claim for name in facts.claims if (claim := self._pools.claims.get((facts.namespace, name))) is not None]
        return found if len(found) == len(facts.claims) and not any(claim.is_ending for claim in found) else None

    def want(self, pod: PlannedPod, excluded: Collection[str] = ()) -> Want | str | None:
        """Return what a pod needs to be allocated here; None if nothing, a sentence if that is impossible, and an empty one if a claim
        does not exist yet.

        Args: excluded: nodes that it must not get.
        """
        found = self.claims_of(pod)
        if found is None:
            return ""
        waiting = tuple(claim for claim in found if claim.parts is None)
        try:
            claims = tuple(self._pools.read(waiting))
            ours = tuple(map(_is_ours, claims))
            _check_modes(claims)
        except ContractError as exc:
            return f"a ResourceClaim of the pod cannot be planned: {exc}"
        if not any(ours):
            return None
        requests = [alternatives[0] for claim in claims for alternatives in claim.requests]
        shares = as_shares(pod.facts, map(as_container, requests))
        try:
            nodes = self._nodes_for(pod, found, excluded)
        except msgspec.ValidationError as exc:
            return f"the node affinity of the pod cannot be read: {exc}"
        suitable, is_rated = self._with_devices(nodes, claims)
        return Want(pod, waiting, claims, ours, suitable, shares, is_rated)

    def _nodes_for(self, pod: PlannedPod, claims: Iterable[StoredClaim], excluded: Collection[str]) -> frozenset[str]:
        """Return the nodes that a pod may use: those of claims that are allocated already, or those that its spec allows."""
        nodes = self._directory.allowed(rules_of(pod.spec)) & set(self._pools.planned_nodes)
        taken = {node for claim in claims for part in claim.parts or () if (node := node_of(part.device[:2]))}
        return frozenset((nodes & taken if taken else nodes) - set(excluded))

    def _with_devices(self, nodes: Iterable[str], claims: Iterable[Claim]) -> tuple[frozenset[str], bool]:
        """Return the nodes that have the devices for each request, in whatever use; and whether all of them are shared GPUs."""
        requests, found, is_rated = [request for claim in claims for (request, *_) in claim.requests], set[str](), True
        for node in nodes:
            looked = [(request.count, *self._selected(node, request.selectors)) for request in requests]
            has_alternatives = any(len(alternatives) > 1 for claim in claims for alternatives in claim.requests)
            if has_alternatives or all(count <= number for count, number, _ in looked):
                found.add(node)
                is_rated &= all(are_shared for _, _, are_shared in looked)
        return frozenset(found), is_rated

    def _selected(self, node: str, selectors: tuple[str, ...]) -> tuple[int, bool]:
        try:
            devices = self._pools.planned_on(node)
            known, result = self._suitable.get((node, selectors), ((), (0, True)))
            if known is not devices:
                selected = [device for device in devices if all(meets(expression, device) for expression in selectors)]
                result = len(selected), all(device.shared and not self._is_in_instance(device) for device in selected)
                self._suitable[node, selectors] = devices, result
        except ContractError:
            return 0, True
        return result

    def _is_in_instance(self, device: Device) -> bool:
        """Whether shares of a device lie in a MIG instance. Placement does not rate these: it shares GPUs outside MIG mode only."""
        origin = self._pools.origins.get(device.key)
        return origin is not None and origin.in_instance

    def place(self, wants: Sequence[Want], ended: AbstractSet[str] | None = None, among: Collection[str] | None = None) -> list[Placement]:
        """Return a place for each pod, or nothing if not all of them fit together.

        Args: ended: UIDs of pods that do not count, nor claims that only these or pods that are gone use; None: everything counts.
              among: the only nodes to use; None for all.
        """
        planner, state = self._context.gangs.planner, self._context.state
        claims = frozenset[str]() if ended is None else self._context.claims.holds.claims_without(ended)
        gone, members = claims | (ended or frozenset()), [want.shares for want in wants]
        with state.without_all([*(ended or ()), *map(claim_uid, claims)]), planner.trying(members):
            for ranks in planner.rankings(members, frozenset[str]().union(*(want.nodes for want in wants))):
                if found := self._placed(wants, gone, among, ranks):
                    return found
                for member in members:
                    state.release(member.uid)
        return []

    def _placed(self, wants: Sequence[Want], gone: AbstractSet[str], among: Collection[str] | None, ranks: Ranks | None) -> list[Placement]:
        found: list[Placement] = []
        for want in wants:
            placement = self._one(want, gone, among, ranks, found)
            if placement is None:
                return []
            found.append(placement)
        return found

    def _one(
        self, want: Want, gone: AbstractSet[str], among: Collection[str] | None, ranks: Ranks | None, others: Sequence[Placement]
    ) -> Placement | None:
        """Place one pod beside others, and reserve its room for the rest of the attempt."""
        allowed = set(want.nodes if among is None else want.nodes & set(among))
        for _ in range(MOST_NODES):
            node = self._best_node(want, allowed, ranks)
            if not node:
                return None
            if (placement := self._on(want, node, gone, others)) is not None:
                self._context.state.reserve(self.reservation(placement, inf))
                return placement
            self._context.state.release(want.shares.uid)
            allowed.discard(node)
        return None

    def _best_node(self, want: Want, allowed: Collection[str], ranks: Ranks | None) -> str:
        """Return the node that placement takes, with a reservation there; empty if there is none."""
        state = self._context.state
        if want.is_rated:
            found = self._context.gangs.planner.expect(want.shares, allowed, inf, ranks)
            return state.reservations[want.shares.uid].node if found else ""
        usable = [node for node in allowed if (ranks is None or node in ranks) and self._host_has_room(want.demand, node)]
        return min(usable, key=lambda node: (0 if ranks is None else ranks[node], node), default="")

    def _host_has_room(self, demand: HostDemand, node: str) -> bool:
        columns, row = self._context.state.columns, self._context.state.row_of(node)
        if row is None:
            return False
        cpu = int(columns.cpu_milli[row]) - int(columns.cpu_used_milli[row])
        return demand.cpu_milli <= cpu and demand.ram_mib <= int(columns.ram_mib[row]) - int(columns.ram_used_mib[row])

    def _on(self, want: Want, node: str, gone: AbstractSet[str], others: Sequence[Placement]) -> Placement | None:
        """Search a node for the devices of a pod. Args: gone: UIDs of claims and pods that do not count. others: they count by these."""
        reservation = self._context.state.reservations.get(want.shares.uid)
        placing = {want.shares.uid, *(other.pod.uid for other in others)}
        proposed = () if reservation is None else tuple(reservation.footprint)
        besides = [one for other in others if other.node == node for taken in other.taken for one in taken]
        try:
            found = self._pools.allocate(node, want.claims, proposed, gone | placing, besides)
        except (ContractError, SearchTooLongError):
            return None
        return None if found is None else Placement(want, node, tuple(map(tuple, found)))

    def reservation(self, placement: Placement, expires_at: float) -> Reservation:
        """Return what counts a placement in the state."""
        uses: dict[str, Use] = {}
        for taken in (one for group in placement.taken for one in group):
            states_cores = any(CORES in request.amounts for request in placement.want.requests if request.name == taken.request)
            found = self._context.claims.holds.use(placement.node, taken.device, taken.consumed or None, states_cores=states_cores)
            if found is not None:
                add_use(uses, *found)
        return Reservation(placement.pod.uid, placement.node, uses, placement.want.demand, Stage.SOFT, expires_at, expires_at)

    def lacking(self, want: Want) -> str:
        """Return why a pod has no place now."""
        planned, state = len(self._pools.planned_nodes), self._context.state
        counts: Counter[str] = Counter()
        if left_out := planned - len(want.nodes):
            counts["excluded by the pod's selectors, by taints, or without such a device"] = left_out
        shape = self._context.gangs.planner.shape_of(want.shares) if want.is_rated else None
        rows = [row for node in want.nodes if (row := state.row_of(node)) is not None]
        if shape is not None and rows:
            reasons = self._context.verdicts.shapes.verdict(shape).reason[np.array(rows, dtype=np.int64)].tolist()
            counts.update(NodeReason(value).sentence for value in reasons if value != NodeReason.FITS.value)
        lacking = (f"{count} {sentence}" for sentence, count in sorted(counts.items()))
        return f"of {planned} nodes with planned claims: {', '.join(lacking) or 'no room for the claims as they are'}"


def _check_modes(claims: Iterable[Claim]) -> None:
    """Raise ContractError for a request that can be predicted, but not planned."""
    for request in (one for claim in claims for alternatives in claim.requests for one in alternatives):
        if request.takes_all or request.is_admin:
            raise ContractError(f"request {request.name}: allocationMode All and adminAccess are not planned: state a count")


def _is_ours(claim: Claim) -> bool:
    """Whether a claim is for our devices. Raises ContractError if only a part of it is: a claim is allocated as a whole."""
    alternatives = [one for alternatives in claim.requests for one in alternatives]
    ours = [any(contract.DRA_DRIVER in expression for expression in one.selectors) for one in alternatives]
    if any(ours) and not all(ours):
        raise ContractError("it asks for devices of several drivers: make a claim for each")
    return any(ours)


def needed_first(group: Group, ready: Sequence[PlannedPod], wants: Sequence[Want]) -> tuple[list[Want], list[Want]]:
    """Split what the pods of a group need into those that it lacks, and the others. Args: ready: pods that need nothing more."""
    needed = group.needed(ready, [want.pod for want in wants])
    return [want for want in wants if want.pod.facts.uid in needed], [want for want in wants if want.pod.facts.uid not in needed]
