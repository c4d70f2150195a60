# SPDX-License-Identifier: Apache-2.0
"""Finds devices for all containers of a pod together, after choosing the best devices for each in turn left no room for one of them.

The search backtracks. It tries the sets of devices that a container could have, the fullest devices first (with ``numa``, sets on one NUMA
node before others), and stops at the first layout with room for all containers. It tries equal devices once, and an equal rest once. It
gives up after MAX_SETS_TRIED sets, which takes many containers on GPUs that all differ; only then can a refusal be wrong.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import comb
from typing import Final, TypeAlias

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, DeviceShare, NumaMode, Preferences
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import reject_reason, share_on

MAX_SETS_TRIED: Final = 128
"""Sets of devices that are tried: up to ten milliseconds if no set works."""

Layout: TypeAlias = Mapping[str, tuple[DeviceShare, ...]]
"""The shares of each container, in the order of the devices' minor numbers."""
_Offers: TypeAlias = Mapping[str, Mapping[str, DeviceShare]]
"""For each container, the devices with room for one of its vGPUs, and its share on each."""
_Suits: TypeAlias = Callable[[Layout], bool]


def lay_out(
    states: Sequence[DeviceState], requests: Sequence[ContainerRequest], preferences: Preferences, suits: _Suits | None = None
) -> tuple[Layout | None, int]:
    """Find devices for containers that ask for vGPUs and run at the same time.

    Args:    suits: whether a complete layout is acceptable; it may depend on which container has which device.
    Returns: for each container distinct devices, or None if no layout was found; and how many sets of devices were tried.
    """
    offers = {
        request.container: {
            state.device.uuid: share_on(state.device, request, preferences)
            for state in states
            if reject_reason(state, request, preferences) is None
        }
        for request in requests
    }
    if any(len(offers[request.container]) < request.vgpus for request in requests):
        return None, 0
    usable = [state for state in states if any(state.device.uuid in offer for offer in offers.values())]
    fewest_first = sorted(requests, key=lambda request: (comb(len(offers[request.container]), request.vgpus), _asked_bytes(request)))
    search = _Search(fewest_first, preferences, offers, suits)
    return search.place(usable, {}), search.sets_tried


class _Search:
    def __init__(self, requests: Sequence[ContainerRequest], preferences: Preferences, offers: _Offers, suits: _Suits | None) -> None:
        self._requests, self._preferences, self._offers, self._suits = requests, preferences, offers, suits
        self.sets_tried = 0
        self._tried: set[tuple[int, tuple[Hashable, ...]]] = set()

    def place(self, states: Sequence[DeviceState], chosen: Layout) -> Layout | None:
        """Place the containers without devices on the devices as the others leave them."""
        if len(chosen) == len(self._requests):
            return chosen if self._suits is None or self._suits(chosen) else None
        request, later = self._requests[len(chosen)], self._requests[len(chosen) + 1 :]
        if not self._may_hold(states, (request, *later)):
            return None
        for devices in self._sets(self._fitting(states, request), request):
            if self.sets_tried == MAX_SETS_TRIED:
                return None
            self.sets_tried += 1
            shares = {uuid: self._offers[request.container][uuid] for uuid in devices}
            left = _with(states, shares)
            # Another order of the same choices leaves the same rest: searching it again finds nothing new.
            if self._is_new(len(chosen), left) and (found := self.place(left, {**chosen, request.container: tuple(shares.values())})):
                return found
        return None

    def _is_new(self, placed: int, left: Iterable[DeviceState]) -> bool:
        """Whether the search meets this rest for the first time; it is remembered."""
        rest = placed, tuple(sorted(map(self._likeness, left)))
        is_new = rest not in self._tried
        self._tried.add(rest)
        return is_new

    def _fitting(self, states: Iterable[DeviceState], request: ContainerRequest) -> list[DeviceState]:
        offer = self._offers[request.container]
        return [state for state in states if (share := offer.get(state.device.uuid)) and state.has_room_for(share)]

    def _may_hold(self, states: Iterable[DeviceState], requests: Sequence[ContainerRequest]) -> bool:
        """Whether the containers may fit: each one by itself, and as many shares if all were as small as the smallest."""
        if any(len(self._fitting(states, request)) < request.vgpus for request in requests):
            return False
        least_bytes = min(share.memory_bytes for request in requests for share in self._offers[request.container].values())
        seats = sum(min(len(requests), state.free_shares, state.free_memory_bytes // least_bytes) for state in states)
        return seats >= sum(request.vgpus for request in requests)

    def _sets(self, fitting: Sequence[DeviceState], request: ContainerRequest) -> Iterator[list[str]]:
        """Yield the UUIDs of devices, in the order of their minor numbers; the sets differ in what is left on the devices."""
        numa = self._preferences.numa if request.vgpus > 1 else None
        for pool in _pools(fitting, numa):
            if len(pool) < request.vgpus:
                continue
            ordered = sorted(pool, key=lambda state: (self._likeness(state), state.device.minor))
            alike = [tuple(group) for _, group in groupby(ordered, key=self._likeness)]
            for devices in _taking(alike, request.vgpus):
                yield [state.device.uuid for state in sorted(devices, key=lambda state: state.device.minor)]

    def _likeness(self, state: DeviceState) -> tuple[int, ...]:
        """Return all by which usable devices can differ; the first is the free memory."""
        node, device = state.device.numa_node, state.device
        what = (state.free_memory_bytes, state.capacity_bytes, state.used_cores_percent, state.used_shares, state.unreserved_shares)
        return (*what, state.max_shares, -1 if node is None else node, -1 if self._suits is None else device.minor)


def _with(states: Iterable[DeviceState], shares: Mapping[str, DeviceShare]) -> list[DeviceState]:
    """Return the devices after some of them promised a share."""
    return [state.with_share(shares[state.device.uuid]) if state.device.uuid in shares else state for state in states]


def _pools(fitting: Sequence[DeviceState], numa: NumaMode | None) -> list[Sequence[DeviceState]]:
    """Return the groups of devices from which a set may come: those of each NUMA node, all of them, or both."""
    if numa is None:
        return [fitting]
    nodes = sorted({state.device.numa_node for state in fitting if state.device.numa_node is not None})
    pools: list[Sequence[DeviceState]] = [[state for state in fitting if state.device.numa_node == node] for node in nodes]
    return pools if numa is NumaMode.STRICT else [*pools, fitting]


def _asked_bytes(request: ContainerRequest) -> int:
    """Return a sort key that puts large requests first, and whole GPUs before all, then parts of GPUs."""
    percent = request.memory_percent_per_vgpu or units.WHOLE_GPU_PERCENT
    return -(request.memory_bytes_per_vgpu or sys.maxsize // units.WHOLE_GPU_PERCENT * percent)


def _taking(groups: Sequence[tuple[DeviceState, ...]], count: int) -> Iterator[tuple[DeviceState, ...]]:
    """Yield the ways to take ``count`` devices, the first ones of each group of equal devices; there must be as many."""
    if not count:
        yield ()
        return
    most, rest = min(count, len(groups[0])), sum(map(len, groups[1:]))
    for taken in range(most, max(0, count - rest) - 1, -1):
        for others in _taking(groups[1:], count - taken):
            yield (*groups[0][:taken], *others)
