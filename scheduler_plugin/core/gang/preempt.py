# SPDX-License-Identifier: Apache-2.0
"""Finds the cheapest victims for a pod, so that it fits on a node, at the granularity of GPUs.

kube-scheduler's own preemption counts resources of whole nodes, so it can choose victims that free the wrong GPU. This search adds the
cheapest set of victims with which placement finds devices. Sets are compared as kube-scheduler compares nodes: by how far they exceed
disruption budgets, then by the highest priority, then by the sum of priorities (so fewer are better, because each pod counts at least one).
Of equal sets the one with the most extras is taken: pods of gangs that run with more members than their minimum.

Pods of a running gang end one by one only while enough of the gang, and of each role, stay (``Band``); otherwise all of them end, or none.

A container of k vGPUs needs k devices, and for each set of k devices only the pods on them matter. So the search goes through the sets of
devices, the most promising first, and in each through the sets of pods, the cheapest first. It is exact up to MAX_CHECKS checks. Beyond, it
returns the best result so far, or the first set from which no pod can be spared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import combinations
from math import comb
from typing import Final, TypeAlias

from aliquot.contract import units
from aliquot.contract.model import Link, NumaMode, PodRequest, Policy
from aliquot.placement.choose import choose_pod
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import reject_reason
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.budgets import BudgetKey, violations
from scheduler_plugin.core.cluster.plan import FILTER_SEED
from scheduler_plugin.core.cluster.pods import Footprint, Use

MAX_CHECKS: Final = 4000
"""Sets of pods that are checked: a tenth of a second, or a few tenths on a slow machine."""
MAX_DEVICE_SETS: Final = 256
LOWEST_PRIORITY: Final = -(1 << 31)

Cost: TypeAlias = tuple[int, int, int, int]
"""Number of pods beyond budgets, highest priority, sum of priorities, number of pods that are no extras; lower is better."""
_Fits: TypeAlias = Callable[[Mapping[str, DeviceState]], bool]
_Move: TypeAlias = tuple["Victim", ...]
"""Pods that end together."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A pod that may be ended."""

    uid: str
    priority: int
    footprint: Footprint
    budgets: frozenset[BudgetKey] = frozenset()
    """The budgets that count its end."""
    is_extra: bool = False
    """Whether its gang keeps its minimum without it."""


@dataclass(frozen=True, slots=True)
class Band:
    """The candidates of one gang."""

    members: frozenset[str]
    """UIDs."""
    spare: int
    """How many that count towards the minimum can end while enough of the gang stay."""
    whole: bool
    """Whether the whole gang ends if all of these end."""
    roles: tuple[tuple[frozenset[str], int], ...] = ()
    """UIDs of the candidates of each role, and how many members the role has beyond its minimum: those do not count."""

    def spares(self, ended: AbstractSet[str]) -> bool:
        """Whether the gang keeps its minimum, or ends whole, if these members end."""
        return self.keeps_minimum(ended) or (self.whole and ended == self.members)

    def keeps_minimum(self, ended: AbstractSet[str]) -> bool:
        """Whether the gang keeps its minimum if these members end."""
        return len(ended) - sum(min(surplus, len(uids & ended)) for uids, surplus in self.roles) <= self.spare

    def most(self) -> frozenset[str]:
        """Return as many members as can end: all if the gang can end whole, else those that it spares."""
        if self.whole:
            return self.members
        surplus = frozenset(uid for uids, count in self.roles for uid in sorted(uids)[:count])
        return surplus | frozenset(sorted(self.members - surplus)[: self.spare])

    def role_of(self, uid: str) -> int:
        """Return the number of a member's role; -1 without one."""
        return next((number for number, (uids, _) in enumerate(self.roles) if uid in uids), -1)


@dataclass(frozen=True, slots=True)
class Preemption:
    """The input of one search: a pod's request, a node, and the candidates."""

    states: tuple[DeviceState, ...]
    links: tuple[Link, ...]
    request: PodRequest
    policy: Policy
    candidates: tuple[Victim, ...]
    bands: tuple[Band, ...] = ()
    """Each candidate is in at most one of them."""
    allowed: Mapping[BudgetKey, int] = field(default_factory=dict)
    """How many more pods each budget of a candidate allows to end."""


def cost_of(victims: Sequence[Victim], allowed: Mapping[BudgetKey, int]) -> Cost:
    """Return the cost of ending these pods. Lower is better, and each further pod costs more. Args: allowed: as in ``Preemption``."""
    exceeded = violations((victim.budgets for victim in victims), allowed) if allowed else 0
    priorities = [victim.priority for victim in victims]
    total, needed = sum(priority - LOWEST_PRIORITY + 1 for priority in priorities), sum(not victim.is_extra for victim in victims)
    return exceeded, max(priorities, default=LOWEST_PRIORITY), total, needed


def moves_of(candidates: Sequence[Victim], bands: Sequence[Band]) -> Iterator[_Move]:
    """Yield the possible moves: to end one pod, or all pods of a gang."""
    band_of = {uid: band for band in bands for uid in band.members}
    for victim in candidates:
        band = band_of.get(victim.uid)
        if band is None or band.keeps_minimum({victim.uid}):
            yield (victim,)
    for band in bands:
        if band.whole and not band.keeps_minimum(band.members):
            yield tuple(victim for victim in candidates if victim.uid in band.members)


def cheapest_victims(question: Preemption) -> frozenset[str] | None:
    """Return the UIDs of the cheapest victims: empty if the pod fits without them, None if it does not fit with any."""
    return _Search(question).run()


@dataclass(slots=True)
class _Freed:
    """What becomes free on one device."""

    memory_mib: int = 0
    cores_percent: int = 0
    shares: int = 0
    unreserved: int = 0
    instances: set[str] = field(default_factory=set)

    def add(self, use: Use, instance: str) -> None:
        """Add what a pod used of the device, or the MIG instance of this UUID."""
        if instance:
            self.instances.add(instance)
            return
        self.memory_mib += use.memory_mib
        self.cores_percent += use.cores_percent
        self.shares += use.shares
        self.unreserved += use.unreserved

    def taken_from(self, state: DeviceState) -> DeviceState:
        """Return the device afterwards."""
        return replace(
            state,
            used_memory_bytes=state.used_memory_bytes - units.mib_to_bytes(self.memory_mib),
            used_cores_percent=state.used_cores_percent - self.cores_percent,
            used_shares=state.used_shares - self.shares,
            unreserved_shares=state.unreserved_shares - self.unreserved,
            used_instances=state.used_instances - self.instances,
        )


@dataclass(frozen=True, slots=True)
class _Way:
    """A set of devices on which the pod can fit."""

    moves: Sequence[_Move]
    """The moves that free something on them, the cheapest first."""
    needed: Sequence[_Move]
    """The moves without which all others together are not enough."""
    fits: _Fits


class _Search:
    def __init__(self, question: Preemption) -> None:
        self._question = question
        self._checks_left = MAX_CHECKS
        self._best: tuple[Victim, ...] | None = None
        self._band_of = {uid: band for band in question.bands for uid in band.members}
        self._moves = tuple(moves_of(question.candidates, question.bands))
        self._states = {state.device.uuid: state for state in question.states}
        self._device_of = {i.uuid: state.device.uuid for state in question.states for i in state.device.mig_instances}
        self._device_of |= {uuid: uuid for uuid in self._states}

    def run(self) -> frozenset[str] | None:
        if any(self._works((), fits) for _, fits in self._ways()):
            return frozenset()
        for way in self._promising_first():
            if self._checks_left <= 0 and self._best is not None:
                break
            self._search(way)
        return None if self._best is None else frozenset(victim.uid for victim in self._best)

    def _promising_first(self) -> Sequence[_Way]:
        """Return the ways that can work, sorted by the cost of the cheapest pods of each device."""
        ways = list(self._ways())
        if len(ways) == 1:
            only = self._way(*ways[0])
            return [] if only is None else [only]
        # Devices do not depend on each other here, so each one is searched alone, and a set needs what its devices need.
        alone = {uuid: way for uuid in self._states if (way := self._way({uuid}, self._fits_on({uuid}))) is not None}
        cheapest = {uuid: self._cheapest(way) for uuid, way in alone.items()}
        guesses: list[tuple[Cost, _Way]] = []
        for devices, fits in ways:
            if devices <= alone.keys():
                ended = {victim.uid: victim for uuid in devices for victim in cheapest[uuid]}
                guesses.append((self._cost(tuple(ended.values())), self._joined([alone[uuid] for uuid in devices], devices, fits)))
        return [way for _, way in sorted(guesses, key=lambda guess: guess[0])]

    def _joined(self, parts: Sequence[_Way], devices: AbstractSet[str], fits: _Fits) -> _Way:
        """Return the way of a set of devices, from the ways of its devices."""
        moves = self._moves_on(devices)
        return _Way(moves, [move for move in moves if any(move in part.needed for part in parts)], fits)

    def _way(self, devices: AbstractSet[str], fits: _Fits) -> _Way | None:
        """Return the way of these devices; None if not even all moves together are enough."""
        moves = self._moves_on(devices)
        if not self._works(moves, fits):
            return None
        return _Way(moves, [move for move in moves if not self._works([other for other in moves if other is not move], fits)], fits)

    def _cheapest(self, way: _Way) -> _Move:
        """Return pods in the order of their cost, as many as are enough."""
        return next(_ended(way.moves[:count]) for count in range(len(way.moves) + 1) if self._works(way.moves[:count], way.fits))

    def _moves_on(self, devices: AbstractSet[str]) -> Sequence[_Move]:
        """Return the moves that free something on these devices, the cheapest first."""
        helpful = [move for move in self._moves if not devices.isdisjoint(self._devices_of(move))]
        return sorted(helpful, key=lambda move: (self._cost(move), [victim.uid for victim in move]))

    def _ways(self) -> Iterator[tuple[AbstractSet[str], _Fits]]:
        """Yield the sets of devices on which the pod can fit, each with its test. If there are too many, yield all devices as one set, with
        placement's search as the test."""
        request = self._question.request
        containers, preferences = request.containers, request.preferences
        count = containers[0].vgpus if len(containers) == 1 and not containers[0].mig else 0
        if not count or comb(len(self._states), count) > MAX_DEVICE_SETS:
            yield self._states.keys(), self._placement_fits
            return
        is_strict = preferences.numa is NumaMode.STRICT and count > 1
        for chosen in combinations(self._question.states, count):
            if is_strict and not _on_one_numa_node(chosen):
                continue
            uuids = {state.device.uuid for state in chosen}
            yield uuids, self._fits_on(uuids)

    def _fits_on(self, uuids: AbstractSet[str]) -> _Fits:
        """Return the test whether the only container fits on exactly these devices."""
        container, preferences = self._question.request.containers[0], self._question.request.preferences
        return lambda after: all(reject_reason(after[uuid], container, preferences) is None for uuid in uuids)

    def _placement_fits(self, after: Mapping[str, DeviceState]) -> bool:
        question = self._question
        choice = choose_pod(list(after.values()), question.request, question.policy, links=question.links, seed=FILTER_SEED)
        return not isinstance(choice, Refusal)

    def _search(self, way: _Way) -> None:
        """Search the sets of this way's moves for a result that is better than the best so far."""
        moves, needed, fits = way.moves, way.needed, way.fits
        if not self._compatible(needed):
            return
        optional = [move for move in moves if move not in needed]
        # A set costs less than each set that contains it, so the first set from the heap that works is the cheapest.
        heap: list[tuple[Cost, tuple[int, ...]]] = [(self._cost(_ended(needed)), ())]
        while heap:
            cost, taken = heappop(heap)
            if self._best is not None and cost >= self._cost(self._best):
                return
            chosen = [*needed, *(optional[position] for position in taken)]
            if self._checks_left <= 0:
                self._run_out(moves, fits)
                return
            if self._works(chosen, fits):
                self._best = _ended(chosen)
                return
            self._push_larger(heap, chosen, optional, taken)

    def _push_larger(
        self, heap: list[tuple[Cost, tuple[int, ...]]], chosen: Sequence[_Move], optional: Sequence[_Move], taken: tuple[int, ...]
    ) -> None:
        """Push the sets with one more move. Moves are added in ascending order, so that each set is pushed once."""
        for position in range(taken[-1] + 1 if taken else 0, len(optional)):
            more = [*chosen, optional[position]]
            self._checks_left -= 1
            if not self._repeats(optional, taken, position) and self._compatible(more):
                heappush(heap, (self._cost(_ended(more)), (*taken, position)))

    def _run_out(self, moves: Sequence[_Move], fits: _Fits) -> None:
        """Out of checks without a result: start from all moves, and drop one by one, the most costly first, while the rest is enough."""
        if self._best is not None:
            return
        kept: list[_Move] = []
        for move in sorted(moves, key=len, reverse=True):  # whole gangs, so that all can go
            if self._compatible([*kept, move]):
                kept.append(move)
        if not self._works(kept, fits):
            return
        for move in sorted(kept, key=self._cost, reverse=True):
            rest = [other for other in kept if other is not move]
            if self._works(rest, fits):
                kept = rest
        self._best = _ended(kept)

    def _compatible(self, moves: Iterable[_Move]) -> bool:
        """Whether moves can be made together: no pod ends twice, and no gang loses more pods one by one than it can spare."""
        ended = [victim.uid for move in moves for victim in move]
        gone = frozenset(ended)
        bands = {id(band): band for uid in ended if (band := self._band_of.get(uid)) is not None}
        return len(gone) == len(ended) and all(band.spares(band.members & gone) for band in bands.values())

    def _works(self, moves: Iterable[_Move], fits: _Fits) -> bool:
        self._checks_left -= 1
        freed: dict[str, _Freed] = {}
        for victim in {victim.uid: victim for move in moves for victim in move}.values():
            for uuid, use in victim.footprint.items():
                if (device := self._device_of.get(uuid)) is not None:
                    freed.setdefault(device, _Freed()).add(use, "" if uuid == device else uuid)
        after = dict(self._states)
        for device, amounts in freed.items():
            after[device] = amounts.taken_from(after[device])
        return fits(after)

    def _devices_of(self, move: _Move) -> Iterable[str]:
        return (self._device_of[uuid] for victim in move for uuid in victim.footprint if uuid in self._device_of)

    def _repeats(self, optional: Sequence[_Move], taken: tuple[int, ...], position: int) -> bool:
        """Whether an equal move just before this one was left out: of equal moves, only the first ones are taken."""
        return position > 0 and position - 1 not in taken and self._alike(optional[position - 1], optional[position])

    def _alike(self, a: _Move, b: _Move) -> bool:
        return [self._nature(victim) for victim in a] == [self._nature(victim) for victim in b]

    def _nature(self, victim: Victim) -> tuple[object, ...]:
        band = self._band_of.get(victim.uid)
        of_gang = None if band is None else (band, band.role_of(victim.uid))
        return victim.priority, victim.footprint, victim.budgets, victim.is_extra, of_gang

    def _cost(self, ended: _Move) -> Cost:
        return cost_of(ended, self._question.allowed)


def _on_one_numa_node(states: Iterable[DeviceState]) -> bool:
    nodes = {state.device.numa_node for state in states}
    return len(nodes) == 1 and None not in nodes


def _ended(moves: Iterable[_Move]) -> _Move:
    return tuple(victim for move in moves for victim in move)
