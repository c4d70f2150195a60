"""The cheapest pods to end so that a pod fits on a node, at the granularity of GPUs.

kube-scheduler's own preemption counts resources of whole nodes, so it can choose victims that free the wrong GPU. This search adds, to the
victims it chose, the cheapest set that makes placement find devices. Sets are compared as kube-scheduler compares nodes: by the highest
priority in them, then by the sum of priorities (which also makes fewer better, because each pod counts at least one).

A container of k vGPUs needs k devices: for each such set of devices only the pods on them matter, so the search goes through the sets and,
in each, through sets of pods from the cheapest up. It is exact until it has made MAX_CHECKS checks; beyond, it returns the best found so
far, or a set from which no pod can be taken back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations
from math import comb
from typing import Final, TypeAlias

from placement.choose import choose_pod
from placement.device import DeviceState
from placement.fit import reject_reason
from placement.refusal import Refusal
from proto import units
from proto.model import Link, NumaMode, PodRequest, Policy
from scheduler_plugin.core.plan import FILTER_SEED
from scheduler_plugin.core.pods import Footprint

MAX_CHECKS: Final = 4000
"""About a tenth of a second."""
MAX_DEVICE_SETS: Final = 256
_LOWEST_PRIORITY: Final = -(1 << 31)

_Cost: TypeAlias = tuple[int, int]
_Fits: TypeAlias = Callable[[Mapping[str, DeviceState]], bool]


@dataclass(frozen=True, slots=True)
class Victim:
    """A pod that may be ended."""

    uid: str
    priority: int
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class Preemption:
    """One question: a pod, a node, and who may go."""

    states: tuple[DeviceState, ...]
    links: tuple[Link, ...]
    request: PodRequest
    policy: Policy
    candidates: tuple[Victim, ...]


def cost_of(victims: Iterable[Victim]) -> _Cost:
    """Return what ending these pods costs; lower is better, and adding a pod always costs more."""
    priorities = [victim.priority for victim in victims]
    return max(priorities, default=_LOWEST_PRIORITY), sum(priority - _LOWEST_PRIORITY + 1 for priority in priorities)


def cheapest_victims(question: Preemption) -> frozenset[str] | None:
    """Return the UIDs of the cheapest victims, none if the pod fits as it is, or None when it fits without no set of them."""
    return _Search(question).run()


class _Search:
    def __init__(self, question: Preemption) -> None:
        self._question = question
        self._checks_left = MAX_CHECKS
        self._best: tuple[Victim, ...] | None = None
        self._states = {state.device.uuid: state for state in question.states}
        self._device_of = {i.uuid: state.device.uuid for state in question.states for i in state.device.mig_instances}
        self._device_of |= {uuid: uuid for uuid in self._states}

    def run(self) -> frozenset[str] | None:
        for devices, fits in self._ways():
            helpful = [victim for victim in self._question.candidates if not devices.isdisjoint(self._devices_of(victim))]
            self._search(sorted(helpful, key=lambda victim: (victim.priority, victim.uid)), fits)
        return None if self._best is None else frozenset(victim.uid for victim in self._best)

    def _ways(self) -> Iterator[tuple[AbstractSet[str], _Fits]]:
        """Yield the sets of devices that would do, each with its test; all devices with placement's search where sets are too many."""
        request = self._question.request
        containers, preferences = request.containers, request.preferences
        count = containers[0].vgpus if len(containers) == 1 and not containers[0].mig else 0
        if not count or comb(len(self._states), count) > MAX_DEVICE_SETS:
            yield self._states.keys(), self._placement_fits
            return
        for chosen in combinations(self._question.states, count):
            numa = {state.device.numa_node for state in chosen}
            if preferences.numa is NumaMode.STRICT and count > 1 and (len(numa) > 1 or None in numa):
                continue
            uuids = {state.device.uuid for state in chosen}
            yield (
                uuids,
                lambda after, uuids=uuids: all(reject_reason(after[uuid], containers[0], preferences) is None for uuid in uuids),  # type: ignore[misc]
            )

    def _placement_fits(self, after: Mapping[str, DeviceState]) -> bool:
        question = self._question
        choice = choose_pod(list(after.values()), question.request, question.policy, links=question.links, seed=FILTER_SEED)
        return not isinstance(choice, Refusal)

    def _search(self, victims: Sequence[Victim], fits: _Fits) -> None:
        """Improve on the best so far by sets of these victims, which come with the lowest priority first."""
        if not self._works(victims, fits):
            return
        needed = [victim for victim in victims if not self._works([other for other in victims if other is not victim], fits)]
        optional = [victim for victim in victims if victim not in needed]
        heap: list[tuple[_Cost, tuple[int, ...]]] = [(cost_of(needed), ())]
        while heap:
            cost, taken = heappop(heap)
            if self._best is not None and cost >= cost_of(self._best):
                return
            chosen = [*needed, *(optional[position] for position in taken)]
            if self._checks_left <= 0:
                self._take_back(victims, fits)
                return
            if self._works(chosen, fits):
                self._best = tuple(chosen)
                return
            for position in range(taken[-1] + 1 if taken else 0, len(optional)):
                if not _repeats(optional, taken, position):
                    heappush(heap, (cost_of([*chosen, optional[position]]), (*taken, position)))

    def _take_back(self, victims: Sequence[Victim], fits: _Fits) -> None:
        """Out of time: spare pods one by one, the most important first, as long as the rest will do."""
        kept = list(victims)
        for victim in sorted(victims, key=lambda victim: -victim.priority):
            rest = [other for other in kept if other is not victim]
            if self._works(rest, fits):
                kept = rest
        if self._best is None or cost_of(kept) < cost_of(self._best):
            self._best = tuple(kept)

    def _works(self, victims: Sequence[Victim], fits: _Fits) -> bool:
        self._checks_left -= 1
        after = dict(self._states)
        for victim in victims:
            for uuid, use in victim.footprint.items():
                if (device := self._device_of.get(uuid)) is None:
                    continue
                state = after[device]
                if uuid != device:
                    after[device] = replace(state, used_instances=state.used_instances - {uuid})
                else:
                    after[device] = replace(
                        state,
                        used_memory_bytes=state.used_memory_bytes - units.mib_to_bytes(use.memory_mib),
                        used_cores_percent=state.used_cores_percent - use.cores_percent,
                        used_shares=state.used_shares - use.shares,
                        unreserved_shares=state.unreserved_shares - use.unreserved,
                    )
        return fits(after)

    def _devices_of(self, victim: Victim) -> Iterable[str]:
        return (self._device_of[uuid] for uuid in victim.footprint if uuid in self._device_of)


def _repeats(optional: Sequence[Victim], taken: tuple[int, ...], position: int) -> bool:
    """Whether an equal pod just before this one was left out: of equal pods, take the first ones only."""
    return (
        position > 0
        and position - 1 not in taken
        and (optional[position - 1].priority, optional[position - 1].footprint)
        == (optional[position].priority, optional[position].footprint)
    )
