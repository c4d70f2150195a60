# SPDX-License-Identifier: Apache-2.0
"""Compares how policies choose linked GPUs, on a node with eight GPUs and random requests for whole GPUs.

At each step, one of the held sets ends with a probability of one half; then a request arrives. It needs 1, 1, 1, 2, 2, 2, 4, 4 or 8 GPUs,
drawn with equal probability; a request that does not fit is refused. The quality of a set is the score of its links, divided by the best
score of a set of that size on the empty node. A single GPU has no quality.

ours       aliquot.placement.choose with the policy topology: the best set, then the one that leaves later requests the best links
nvidia     go-gpuallocator's best effort: divide all free GPUs into sets of the size, take the best division and its best set; one GPU:
           the first. It finds NVLinks by the peer's PCI address, so it does not see those through an NVSwitch.
hami       the best set; one GPU: the one with the weakest links to the other free ones
first-fit  the lowest numbers
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from operator import attrgetter
from statistics import fmean
from typing import Final

from aliquot.contract import units
from aliquot.contract.model import ContainerRequest, Device, DeviceShare, Link, LinkKind, Policy, Preferences
from aliquot.placement.choose import Choice, choose
from aliquot.placement.device import AccountingError, DeviceState
from aliquot.placement.topology import NVLINK_QUALITY_PER_LANE, PCIE_QUALITY

GPUS: Final = 8
MIX: Final = (1, 1, 1, 2, 2, 2, 4, 4, 8)
LEAVING: Final = 0.5
STEPS: Final = 30_000
SEEDS: Final = range(1, 9)

Gpus = tuple[int, ...]
Chooser = Callable[[Gpus, int], Gpus]
"""Returns the chosen GPUs from the free GPUs and the requested number, which must not be larger."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of node: the PCIe level and the number of NVLinks of each pair."""

    name: str
    pcie: Mapping[tuple[int, int], LinkKind]
    lanes: Mapping[tuple[int, int], int]
    switched: bool = False
    """Whether the NVLinks go through an NVSwitch."""

    def score(self, gpus: Gpus, *, seeing_switched: bool = True) -> int:
        """Return the sum over the pairs of the score of the PCIe level, and 100 for each NVLink."""
        lanes = self.lanes if seeing_switched or not self.switched else {}
        return sum(PCIE_QUALITY[self.pcie[pair]] + NVLINK_QUALITY_PER_LANE * lanes.get(pair, 0) for pair in combinations(sorted(gpus), 2))

    def links(self) -> tuple[Link, ...]:
        """Return the links as in a node's inventory."""
        return tuple(
            Link(_uuid(a), _uuid(b), LinkKind.NVLINK, self.lanes[a, b], kind) if (a, b) in self.lanes else Link(_uuid(a), _uuid(b), kind)
            for (a, b), kind in self.pcie.items()
        )


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """The result of one chooser on one machine."""

    machine: str
    chooser: str
    mean_quality: float
    best_part: float
    """Part of the placed sets that are as good as the best on the empty node."""
    placed_part: float


def machines() -> tuple[Machine, ...]:
    """Return the kinds of nodes: the cube mesh of a DGX-1V, bridged pairs on PCIe, and NVSwitch."""
    pairs = list(combinations(range(GPUS), 2))
    sockets = {(a, b): LinkKind.NUMA_NODE if a // 4 == b // 4 else LinkKind.SYSTEM for a, b in pairs}
    boards = {(a, b): LinkKind.PCIE_SWITCH if a // 2 == b // 2 else kind for (a, b), kind in sockets.items()}
    mesh = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1}
    mesh |= {(4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2}
    return (
        Machine("DGX-1V cube mesh", boards, mesh),
        Machine("PCIe with NVLink pairs", sockets, {(a, a + 1): 4 for a in range(0, GPUS, 2)}),
        Machine("NVSwitch", sockets, dict.fromkeys(pairs, 18), switched=True),
    )


def choosers(machine: Machine) -> Mapping[str, Chooser]:
    """Return the choosers for a machine, by name."""
    return {
        "ours": _ours(machine),
        "nvidia": lambda free, count: _nvidia(machine, free, count),
        "hami": lambda free, count: _hami(machine, free, count),
        "first-fit": lambda free, count: free[:count],
    }


def measure(machine: Machine, name: str, chooser: Chooser, steps: int, seed: int) -> LinkQuality:
    """Run one chooser through the steps that the seed draws."""
    rng = random.Random(seed)  # noqa: S311 (random numbers of a simulation, not a secret)
    best = {count: max(machine.score(gpus) for gpus in combinations(range(GPUS), count)) for count in set(MIX)}
    cached = cache(chooser)
    free = set(range(GPUS))
    held: list[Gpus] = []
    qualities: list[float] = []
    placed = 0
    for _ in range(steps):
        if held and rng.random() < LEAVING:
            free.update(held.pop(rng.randrange(len(held))))
        count = rng.choice(MIX)
        if count > len(free):
            continue
        gpus = cached(tuple(sorted(free)), count)
        placed += 1
        held.append(gpus)
        free.difference_update(gpus)
        if count > 1:
            qualities.append(machine.score(gpus) / best[count])
    return LinkQuality(machine.name, name, fmean(qualities), fmean(quality == 1 for quality in qualities), placed / steps)


def compare(steps: int = STEPS, seeds: Sequence[int] = SEEDS) -> list[LinkQuality]:
    """Run every chooser on every machine; return means over the seeds."""
    return [
        _mean([measure(machine, *named, steps, seed) for seed in seeds]) for machine in machines() for named in choosers(machine).items()
    ]


def _mean(runs: Sequence[LinkQuality]) -> LinkQuality:
    def over(value: Callable[[LinkQuality], float]) -> float:
        return fmean(map(value, runs))

    quality, best, placed = over(attrgetter("mean_quality")), over(attrgetter("best_part")), over(attrgetter("placed_part"))
    return LinkQuality(runs[0].machine, runs[0].chooser, quality, best, placed)


def _ours(machine: Machine) -> Chooser:
    links = machine.links()
    devices = [Device(_uuid(gpu), "", gpu, "", units.GIB, gpu // 4) for gpu in range(GPUS)]

    def chosen(free: Gpus, count: int) -> Gpus:
        states = [
            DeviceState.of(device, () if device.minor in free else (DeviceShare(device.uuid, units.GIB, units.WHOLE_GPU_PERCENT),))
            for device in devices
        ]
        choice = choose(states, ContainerRequest("main", count), Preferences(), Policy.TOPOLOGY, links=links)
        if not isinstance(choice, Choice):
            raise AccountingError(f"expected {count} of the GPUs {free} to be chosen, found: {choice.sentence}")
        return tuple(device.minor for device in devices if device.uuid in {share.device_uuid for share in choice.shares})

    return chosen


def _nvidia(machine: Machine, free: Gpus, count: int) -> Gpus:
    if count == 1:
        return free[:1]

    def score(gpus: Gpus) -> int:
        return machine.score(gpus, seeing_switched=False)

    division = max(_divisions(free, count), key=lambda sets: sum(map(score, sets)))
    return max((gpus for gpus in division if len(gpus) == count), key=score)


def _divisions(free: Gpus, count: int) -> Iterator[Sequence[Gpus]]:
    """Yield all divisions of the GPUs into sets of ``count``, and one set with the rest."""
    if len(free) < count:
        yield (free,) if free else ()
        return
    rest_size = len(free) % count
    for rest in combinations(free, rest_size):
        for division in _even_divisions(tuple(gpu for gpu in free if gpu not in rest), count):
            yield (*division, rest) if rest else division


def _even_divisions(free: Gpus, count: int) -> Iterator[tuple[Gpus, ...]]:
    if not free:
        yield ()
        return
    for others in combinations(free[1:], count - 1):
        first = (free[0], *others)
        for division in _even_divisions(tuple(gpu for gpu in free if gpu not in first), count):
            yield (first, *division)


def _hami(machine: Machine, free: Gpus, count: int) -> Gpus:
    if count == 1:
        return (min(free, key=lambda gpu: sum(machine.score((gpu, other)) for other in free if other != gpu)),)
    return max(combinations(free, count), key=machine.score)


def _uuid(gpu: int) -> str:
    return f"GPU-{gpu}"
