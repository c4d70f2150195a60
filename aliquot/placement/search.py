# SPDX-License-Identifier: Apache-2.0
"""Searches for the best set of devices among candidates that all fit.

A set is better, in this order, if it has more preferred devices, lies on one NUMA node (with ``numa: prefer``), costs less by the policy,
has better links, breaks fewer links between empty devices (so that single containers do not break pairs), and leaves less free on its
devices. Between sets that are equal in all this, the order of the candidates decides.

Cost alone decides most choices, so links and free amounts are computed only when sets cost the same.

The search is exact while the devices of equal cost form at most MAX_SETS sets. Beyond that (9 of 20 equal devices, for example) the set
grows by one device at a time, always the best one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Final, TypeAlias

from aliquot.contract.model import NumaMode
from aliquot.placement.device import DeviceState
from aliquot.placement.score import free_ppm
from aliquot.placement.topology import LinkTable

MAX_SETS: Final = 20_000
"""Enough for 8 of 16 devices: 12,870 sets."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that fits, with what the choice depends on."""

    device_uuid: str
    numa_node: int | None
    preferred: bool
    cost: int
    """By the policy; lower is better."""
    empty: bool
    after: DeviceState
    """The device with the share."""


_Indices: TypeAlias = tuple[int, ...]
_Rank: TypeAlias = tuple[int, int, int, int, int]
"""The criteria of the module's docstring in their order, except NUMA; lower is better."""


class Search:
    """The search over one set of candidates and the links between them.

    Args: links: makes the table of links. open_others: devices that are empty and shareable, but not candidates; a link to one of them
          can be broken like any other.
    """

    def __init__(self, candidates: Sequence[Candidate], links: Callable[[], LinkTable], open_others: Sequence[str] = ()) -> None:
        self._candidates = candidates
        self._links = links
        self._open_others = open_others
        self._left_free_ppm: Sequence[int] = ()
        self._quality: Sequence[Sequence[int]] = ()
        self._open_quality: Sequence[Sequence[int]] = ()
        """Of links between two empty devices: a set with one of the two devices takes the link from later pods."""
        self._open_total: Sequence[int] = ()

    def _prepare_ranks(self, count: int) -> None:
        """Compute, once, the amounts by which sets of ``count`` devices are ranked. A single device in use breaks no links."""
        if self._left_free_ppm:
            return
        self._left_free_ppm = [free_ppm(candidate.after) for candidate in self._candidates]
        empty = [candidate.empty for candidate in self._candidates]
        if count == 1 and not any(empty):
            return
        table, uuids = self._links(), [candidate.device_uuid for candidate in self._candidates]
        self._quality = _qualities(table, uuids)
        self._open_quality = _between_open(self._quality, empty)
        to_others = (sum(table.between(uuid, other) for other in self._open_others) * mine for uuid, mine in zip(uuids, empty, strict=True))
        self._open_total = [sum(row) + outside for row, outside in zip(self._open_quality, to_others, strict=True)]

    def best(self, count: int, numa: NumaMode | None) -> tuple[Candidate, ...] | None:
        """Return the best set of ``count`` devices in candidate order, or None when no set satisfies ``numa`` strict."""
        sets = [self._best_of(pool, count) for pool in self._pools(count, numa) if len(pool) >= count]
        if not sets:
            return None
        best = sets[0]
        if len(sets) > 1:
            self._prepare_ranks(count)
            best = min(sets, key=self._rank_with_numa)
        return tuple(self._candidates[index] for index in best)

    def _pools(self, count: int, numa: NumaMode | None) -> list[_Indices]:
        """Return the groups of candidates from which a set may come: all of them, those of each NUMA node, or both."""
        everyone = tuple(range(len(self._candidates)))
        if numa is None or count == 1:
            return [everyone]
        return self._by_numa_node() if numa is NumaMode.STRICT else [everyone, *self._by_numa_node()]

    def _by_numa_node(self) -> list[_Indices]:
        pools: dict[int, _Indices] = {}
        for index, candidate in enumerate(self._candidates):
            if candidate.numa_node is not None:
                pools[candidate.numa_node] = (*pools.get(candidate.numa_node, ()), index)
        return list(pools.values())

    def _best_of(self, pool: _Indices, count: int) -> _Indices:
        """Take the devices that are strictly better by preference and cost; links and the rest decide among equal ones at the edge."""
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


def _qualities(table: LinkTable, uuids: Sequence[str]) -> Sequence[Sequence[int]]:
    return [[table.between(a, b) if a != b else 0 for b in uuids] for a in uuids]


def _between_open(quality: Sequence[Sequence[int]], empty: Sequence[bool]) -> Sequence[Sequence[int]]:
    """Return the qualities of links between two empty devices; 0 for all others."""
    return [
        [value if mine and theirs else 0 for value, theirs in zip(row, empty, strict=True)]
        for row, mine in zip(quality, empty, strict=True)
    ]
