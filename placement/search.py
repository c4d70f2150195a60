"""The search for a set of devices: all the candidates fit, which of them belong together?

In order of weight a set is better when it holds more preferred devices, (numa prefer) lies on one NUMA node, costs less by the
policy, is linked better, takes less from the links among empty devices (so that single containers do not break pairs), and
leaves less free on the devices it uses. Sets that are equal in all this are told apart by the order of the candidates.

Most choices are made by cost alone, so links and what is left free are only worked out once sets cost the same.

The best is found exactly as long as the devices that cost the same make up to MAX_SETS sets. Beyond that (9 of 20 alike, say)
the set grows by the best device at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Final, TypeAlias

from placement.device import DeviceState
from placement.score import free_ppm
from placement.topology import LinkTable
from proto.model import NumaMode

MAX_SETS: Final = 20_000
"""Enough for 8 of 16 devices: 12,870 sets."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that fits, as far as choosing it goes."""

    device_uuid: str
    numa_node: int | None
    preferred: bool
    cost: int
    """By the policy; lower is better."""
    empty: bool
    after: DeviceState
    """The device as it would be."""


_Indices: TypeAlias = tuple[int, ...]
_Rank: TypeAlias = tuple[int, int, int, int, int]
"""What the module's docstring lists, in that order but for NUMA; lower is better."""


class Search:
    """One question: the candidates, and the links between them.

    Args: links: makes their table. open_others: devices that are empty and shareable too and no candidates: a link to one of them is
          taken like any other.
    """

    def __init__(self, candidates: Sequence[Candidate], links: Callable[[], LinkTable], open_others: Sequence[str] = ()) -> None:
        self._candidates = candidates
        self._links = links
        self._open_others = open_others
        self._left_free_ppm: Sequence[int] = ()
        self._quality: Sequence[Sequence[int]] = ()
        self._open_quality: Sequence[Sequence[int]] = ()
        """Of links between two empty devices: a set that takes either of them takes the link from later ones."""
        self._open_total: Sequence[int] = ()

    def _prepare_ranks(self, count: int) -> None:
        """Work out, once, what sets of so many devices are ranked by; a single device that is in use takes no links."""
        if self._left_free_ppm:
            return
        self._left_free_ppm = [free_ppm(candidate.after) for candidate in self._candidates]
        empty = [candidate.empty for candidate in self._candidates]
        if count == 1 and not any(empty):
            return
        table, uuids = self._links(), [candidate.device_uuid for candidate in self._candidates]
        self._quality = [[table.between(a, b) if a != b else 0 for b in uuids] for a in uuids]
        self._open_quality = [
            [quality if mine and theirs else 0 for quality, theirs in zip(row, empty, strict=True)]
            for row, mine in zip(self._quality, empty, strict=True)
        ]
        self._open_total = [
            sum(row) + (sum(table.between(candidate.device_uuid, other) for other in self._open_others) if candidate.empty else 0)
            for candidate, row in zip(self._candidates, self._open_quality, strict=True)
        ]

    def best(self, count: int, numa: NumaMode | None) -> tuple[Candidate, ...] | None:
        """Return the best set of ``count`` devices in candidate order, or None when no set satisfies ``numa`` strict."""
        everyone = tuple(range(len(self._candidates)))
        pools = [everyone] if numa is not NumaMode.STRICT or count == 1 else []
        if numa is not None and count > 1:
            pools += self._by_numa_node()
        sets = [self._best_of(pool, count) for pool in pools if len(pool) >= count]
        if not sets:
            return None
        if len(sets) > 1:
            self._prepare_ranks(count)
        best = min(sets, key=self._rank_with_numa) if len(sets) > 1 else sets[0]
        return tuple(self._candidates[index] for index in best)

    def _by_numa_node(self) -> list[_Indices]:
        pools: dict[int, _Indices] = {}
        for index, candidate in enumerate(self._candidates):
            if candidate.numa_node is not None:
                pools[candidate.numa_node] = (*pools.get(candidate.numa_node, ()), index)
        return list(pools.values())

    def _best_of(self, pool: _Indices, count: int) -> _Indices:
        """Take what is strictly better by preference and cost; links and the rest decide among the equals at the edge."""
        ordered = sorted(pool, key=self._key)
        edge = self._key(ordered[count - 1])
        certain = tuple(index for index in ordered if self._key(index) < edge)
        equals = tuple(index for index in ordered if self._key(index) == edge)
        missing = count - len(certain)
        if len(equals) == missing:
            return tuple(sorted(certain + equals))
        self._prepare_ranks(count)
        if comb(len(equals), missing) > MAX_SETS:
            return tuple(sorted(self._grow(certain, equals, missing)))
        sets = (certain + others for others in combinations(equals, missing))
        best: _Indices = min(sets, key=self._rank)
        return tuple(sorted(best))

    def _grow(self, certain: _Indices, equals: _Indices, missing: int) -> _Indices:
        grown = certain
        for _ in range(missing):
            grown = min(((*grown, index) for index in equals if index not in grown), key=self._rank)
        return grown

    def _key(self, index: int) -> tuple[bool, int]:
        candidate = self._candidates[index]
        return not candidate.preferred, candidate.cost

    def _rank(self, indices: _Indices) -> _Rank:
        chosen = [self._candidates[index] for index in indices]
        quality = open_taken = 0
        for i in indices:
            if self._candidates[i].empty:
                open_taken += self._open_total[i]
        for i, j in combinations(indices, 2):
            quality += self._quality[i][j]
            open_taken -= self._open_quality[i][j]
        return (
            sum(not candidate.preferred for candidate in chosen),
            sum(candidate.cost for candidate in chosen),
            -quality,
            open_taken,
            sum(self._left_free_ppm[index] for index in indices),
        )

    def _rank_with_numa(self, indices: _Indices) -> tuple[int, bool, tuple[int, ...]]:
        nodes = {self._candidates[index].numa_node for index in indices}
        aligned = len(nodes) == 1 and None not in nodes
        rank = self._rank(indices)
        return rank[0], not aligned, rank[1:]
