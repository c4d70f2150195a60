"""Where the containers of a pod fit together, when giving each in turn what its policy likes best left nothing for one of them.

The search goes back: it tries the sets of devices that a container could have, fullest devices first (for ``numa`` those of one NUMA node
before others), and stops at the first layout that has room for everybody. Devices that are alike are tried once, and so is what is left to
give out. It gives up after MAX_SETS_TRIED, which takes many containers on GPUs that all differ; only then can a refusal be wrong.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import comb
from typing import Final, TypeAlias

from placement.device import DeviceState
from placement.fit import reject_reason, share_on
from proto.model import ContainerRequest, DeviceShare, NumaMode, Preferences

MAX_SETS_TRIED: Final = 128
"""Sets of devices that are tried: up to ten milliseconds where none will do."""

Layout: TypeAlias = Mapping[str, tuple[DeviceShare, ...]]
"""The shares of each container, in the order of the devices' minor numbers."""
_Offers: TypeAlias = Mapping[str, Mapping[str, DeviceShare]]
"""For each container, the devices that would take one vGPU of it beside what they carry, and what it is on them."""
_Suits: TypeAlias = Callable[[Layout], bool]


def lay_out(
    states: Sequence[DeviceState], requests: Sequence[ContainerRequest], preferences: Preferences, suits: _Suits | None = None
) -> tuple[Layout | None, int]:
    """Find devices for containers that ask for vGPUs and run at the same time.

    Args:    suits: asked of each layout, by which device it has who on.
    Returns: for each container distinct devices, or None when nothing was found; and how many sets of devices were tried.
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
        """Place the containers that are not chosen for on what is left of the devices."""
        if len(chosen) == len(self._requests):
            return chosen if self._suits is None or self._suits(chosen) else None
        request, later = self._requests[len(chosen)], self._requests[len(chosen) + 1 :]
        fitting = self._fitting(states, request)
        if not self._may_hold(states, (request, *later)) or any(len(self._fitting(states, other)) < other.vgpus for other in later):
            return None
        offer = self._offers[request.container]
        for devices in self._sets(fitting, request):
            if self.sets_tried == MAX_SETS_TRIED:
                return None
            self.sets_tried += 1
            shares = {uuid: offer[uuid] for uuid in devices}
            left = [state.with_share(shares[state.device.uuid]) if state.device.uuid in shares else state for state in states]
            situation = len(chosen), tuple(sorted(map(self._likeness, left)))
            if situation in self._tried:
                continue
            self._tried.add(situation)
            found = self.place(left, {**chosen, request.container: tuple(shares.values())})
            if found is not None:
                return found
        return None

    def _fitting(self, states: Iterable[DeviceState], request: ContainerRequest) -> list[DeviceState]:
        offer = self._offers[request.container]
        return [state for state in states if (share := offer.get(state.device.uuid)) and state.has_room_for(share)]

    def _may_hold(self, states: Iterable[DeviceState], requests: Sequence[ContainerRequest]) -> bool:
        """Whether there is room for as many shares, if all were as small as the smallest of them."""
        least_bytes = min(share.memory_bytes for request in requests for share in self._offers[request.container].values())
        seats = sum(min(len(requests), state.free_shares, state.free_memory_bytes // least_bytes) for state in states)
        return seats >= sum(request.vgpus for request in requests)

    def _sets(self, fitting: Sequence[DeviceState], request: ContainerRequest) -> Iterator[list[str]]:
        """Yield the UUIDs of devices, in the order of their minor numbers; the sets differ in what is left on the devices."""
        numa = self._preferences.numa if request.vgpus > 1 else None
        nodes = sorted({state.device.numa_node for state in fitting if state.device.numa_node is not None})
        pools = [] if numa is None else [[state for state in fitting if state.device.numa_node == node] for node in nodes]
        for pool in pools if numa is NumaMode.STRICT else [*pools, fitting]:
            if len(pool) < request.vgpus:
                continue
            ordered = sorted(pool, key=lambda state: (self._likeness(state), state.device.minor))
            alike = [tuple(group) for _, group in groupby(ordered, key=self._likeness)]
            for devices in _taking(alike, request.vgpus):
                yield [state.device.uuid for state in sorted(devices, key=lambda state: state.device.minor)]

    def _likeness(self, state: DeviceState) -> tuple[int, ...]:
        """Return what tells a usable device from others; the first is what is free on it."""
        node, device = state.device.numa_node, state.device
        what = (state.free_memory_bytes, state.capacity_bytes, state.used_cores_percent, state.used_shares, state.unreserved_shares)
        return (*what, state.max_shares, -1 if node is None else node, -1 if self._suits is None else device.minor)


def _asked_bytes(request: ContainerRequest) -> int:
    """Return a sort key that puts what is large first, whole GPUs before all."""
    return -(request.memory_bytes_per_vgpu or sys.maxsize)


def _taking(groups: Sequence[tuple[DeviceState, ...]], count: int) -> Iterator[tuple[DeviceState, ...]]:
    """Yield ways to take ``count`` of the devices, of those that are alike the first ones; there are as many."""
    if not count:
        yield ()
        return
    most, rest = min(count, len(groups[0])), sum(map(len, groups[1:]))
    for taken in range(most, max(0, count - rest) - 1, -1):
        for others in _taking(groups[1:], count - taken):
            yield (*groups[0][:taken], *others)
