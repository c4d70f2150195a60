# SPDX-License-Identifier: Apache-2.0
"""When held room will be free: from the pods that use its devices now, and how long they run.

A device is free for the owner once enough of its pods have ended; the room is free with its last device. The interval comes from repeated
draws of all lifetimes. The draws are fixed, so that equal states give equal times.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from aliquot.contract import units
from scheduler_plugin.core.backfill.hold import Hold, Outlook, Place
from scheduler_plugin.core.backfill.lifetimes import Lifetime, Lifetimes, Seconds, age_of, usual_end
from scheduler_plugin.core.cluster.hold_uids import HOLD_PREFIX
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.cluster.state import ClusterState

DRAWS: Final = 201
MAX_DRAWN: Final = 20_000
"""Lifetimes drawn for one outlook, at most: a few milliseconds."""
MIN_DRAWS: Final = 41
_LOW, _MIDDLE, _HIGH = 0.05, 0.5, 0.93
"""Parts of the draws that end earlier. Eight of ten real starts are between the first and the last: some pods start elsewhere before, and
lifetimes of pods that run at the same time are not independent. Chosen on eight lists of the trace, rated on others."""


@dataclass(frozen=True, slots=True)
class _User:
    """A pod that uses held devices."""

    pod: PodFacts
    lifetime: Lifetime | None


@dataclass(frozen=True, slots=True)
class _Device:
    """One device of a hold: the users by their numbers, with what each takes, and how much must end."""

    users: tuple[int, ...]
    uses: tuple[Use, ...]
    excess: Use
    """How much more is used than may be beside the owner."""


def outlook_of(state: ClusterState, hold: Hold, lifetimes: Lifetimes, now: float) -> Outlook:
    """Estimate when the room of a hold is free. Args: now: seconds since 1970."""
    users, devices = _used(state, hold, lifetimes)
    overdue = tuple(user.pod.uid for user in users if user.lifetime is not None and user.lifetime.is_overdue(age_of(user.pod, now)))
    unknown = sum(user.lifetime is None for user in users)
    points = np.array([[_usual(user, now) for user in users]])
    point = float(_free_at(devices, points, now)[0])
    if point == inf:
        return Outlook(overdue=overdue, unknown=unknown)
    low, middle, high = np.quantile(_free_at(devices, _drawn(users, now), now), (_LOW, _MIDDLE, _HIGH), method="nearest").tolist()
    if high == inf:
        return Outlook(overdue=overdue, unknown=unknown)
    return Outlook(min(low, point), low, middle, high, overdue, unknown)


def _usual(user: _User, now: float) -> float:
    end = usual_end(user.pod, user.lifetime, now)
    return inf if end is None else end


def _drawn(users: Sequence[_User], now: float) -> Seconds:
    """Return possible ends: a row for each draw, a column for each user."""
    draws = max(MIN_DRAWS, min(DRAWS, MAX_DRAWN // max(1, len(users))))
    parts = np.random.default_rng(0).random((draws, len(users)))
    ends = np.full((draws, len(users)), inf)
    for number, user in enumerate(users):
        if user.lifetime is not None:
            ends[:, number] = now + user.lifetime.left_at(age_of(user.pod, now), parts[:, number])
    return ends


def _free_at(devices: Sequence[_Device], ends: Seconds, now: float) -> Seconds:
    """Return for each row of ends when all devices are free."""
    free_at = np.full(len(ends), now)
    for device in devices:
        free_at = np.maximum(free_at, _device_free_at(device, ends[:, device.users]))
    return free_at


def _device_free_at(device: _Device, ends: Seconds) -> Seconds:
    order = np.argsort(ends, axis=1)
    gone = np.cumsum(np.array(device.uses)[order], axis=1)
    # The first position in the order of ends after which nothing is in excess any longer.
    enough: npt.NDArray[np.bool_] = np.all(gone >= np.array(device.excess), axis=2)
    at: Seconds = np.take_along_axis(np.take_along_axis(ends, order, axis=1), enough.argmax(axis=1)[:, None], axis=1)[:, 0]
    return np.where(np.any(enough, axis=1), at, inf)


def _used(state: ClusterState, hold: Hold, lifetimes: Lifetimes) -> tuple[list[_User], list[_Device]]:
    """Return the pods that use held devices, and the devices on which some of them must end."""
    users: list[_User] = []
    devices: list[_Device] = []
    wanted: dict[str, dict[str, Use]] = defaultdict(dict)
    for place in hold.places:
        _add(wanted[place.node], place)
    for node, held in wanted.items():
        on_device: dict[str, list[tuple[int, Use]]] = defaultdict(list)
        for pod in _pods_on(state, node, hold.owners):
            uses = {uuid: use for uuid, use in state.footprint_of(pod.uid).items() if uuid in held}
            for uuid, use in uses.items():
                on_device[uuid].append((len(users), use))
            if uses:
                users.append(_User(pod, lifetimes.of(pod)))
        capacities = _capacities(state, node)
        for uuid, entries in on_device.items():
            device = _device(entries, held[uuid], capacities.get(uuid))
            if any(amount > 0 for amount in device.excess):
                devices.append(device)
    return users, devices


def _add(held: dict[str, Use], place: Place) -> None:
    for uuid, use in place.footprint.items():
        held[uuid] = Use(*(sum(pair) for pair in zip(held.get(uuid, Use()), use, strict=True)))


def _device(entries: Sequence[tuple[int, Use]], held: Use, capacity: Use | None) -> _Device:
    """Compute what must end on a device. Args: capacity: None for a MIG instance, which has one user."""
    users, uses = tuple(number for number, _ in entries), tuple(use for _, use in entries)
    if capacity is None:
        uses = tuple(Use(shares=1) for _ in entries)
        return _Device(users, uses, Use(shares=len(entries)))
    excess = [sum(column) + own - most for column, own, most in zip(zip(*uses, strict=True), held, capacity, strict=True)]
    return _Device(users, uses, Use(*(max(0, amount) for amount in excess)))


def _pods_on(state: ClusterState, node: str, owners: frozenset[str]) -> Iterator[PodFacts]:
    """Yield the pods that are bound or expected on a node, except the owners of the hold."""
    yield from state.pods_on(node)
    for reservation in state.reservations.values():
        uid = reservation.pod_uid
        pod = state.pods.get(uid)
        if reservation.node == node and pod is not None and uid not in owners and not uid.startswith(HOLD_PREFIX):
            yield pod


def _capacities(state: ClusterState, node: str) -> Mapping[str, Use]:
    """Return what each device of a node offers; shares without a limit of cores are not limited."""
    gpu = state.gpu_node(node)
    if gpu is None:
        return {}
    return {
        entry.device.uuid: Use(entry.device.memory_bytes // units.MIB, units.WHOLE_GPU_PERCENT, gpu.shares_per_gpu, gpu.shares_per_gpu)
        for entry in gpu.devices
    }
