# SPDX-License-Identifier: Apache-2.0
"""Chooses the domains of a gang: one domain if it asks for that, and else as few as possible.

How many members fit in a domain is estimated from columns: never too few, and exactly if all members ask for the same in one container of
vGPUs. The estimate only decides which domains are tried, and in which order. Planning itself decides what fits.

Of the domains with room for all members the smallest is used, so that large ones stay whole. If no domain has that room, the largest comes
first, and the smallest with room for the rest comes last. For equal members no choice has fewer domains.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from aliquot.contract import units
from scheduler_plugin.core.cluster.columns import Columns, Ints, Rows
from scheduler_plugin.core.cluster.domains import DomainMode, DomainRequest
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import RatingQuery, asked_mib, judge_devices
from scheduler_plugin.core.fit.shapes import PodShape, Shapes

MAX_TRIED: Final = 16
"""Domains that are planned for a gang that must be in one: a plan takes 2 ms per member."""

Ranks = Mapping[str, int]
"""The allowed nodes by name; nodes with a lower number are used first."""


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain."""

    name: str
    nodes: frozenset[str]
    most: int
    """How many of the missing members fit there at most."""
    room: int
    """How many such pods fit there at most, if there were more of them."""


def domains_for(state: ClusterState, shapes: Shapes, request: DomainRequest, wanted: Sequence[PodShape]) -> list[Domain]:
    """Return the domains with room for one of the wanted pods at least. Args: wanted: the shape of each missing member."""
    counts: dict[str, Counter[PodShape]] = {}
    nodes: dict[str, set[str]] = {}
    for shape in set(wanted):
        verdict = shapes.verdict(shape)
        rows = np.flatnonzero(verdict.reason == NodeReason.FITS.value)
        for row, most in zip(rows.tolist(), _most_pods(state.columns, rows, shape).tolist(), strict=True):
            domain = state.domain_of(state.names[row], request.level)
            counts.setdefault(domain, Counter())[shape] += most
            nodes.setdefault(domain, set()).add(state.names[row])
    needs = Counter(wanted)
    return [
        Domain(name, frozenset(nodes[name]), sum(min(need, count[shape]) for shape, need in needs.items()), count.total())
        for name, count in sorted(counts.items())
    ]


def choices(
    domains: Iterable[Domain], request: DomainRequest, missing: int, offered: Collection[str], used: Collection[str] = ()
) -> Iterator[Ranks]:
    """Yield the nodes to try for a gang, the best choice first.

    Args: missing: how many members need a place. offered: the nodes that the first of them may use. used: the domains of other members.
    """
    if request.mode is DomainMode.PREFERRED:
        yield _few(domains, missing, offered, used)
        return
    able = [one for one in domains if one.most >= missing and not one.nodes.isdisjoint(offered) and (not used or one.name in used)]
    for one in sorted(able, key=lambda one: (one.room, one.name))[:MAX_TRIED]:
        yield dict.fromkeys(one.nodes, 0)


def _few(domains: Iterable[Domain], missing: int, offered: Collection[str], used: Collection[str]) -> Ranks:
    """Rank the nodes so that few domains are used: first the domains of other members, then the largest."""
    left = sorted(domains, key=lambda one: (-one.most, one.name))
    ranks: dict[str, int] = {}
    for rank in range(len(left)):
        chosen = _next(left, missing, offered if not ranks else (), used)
        left.remove(chosen)
        ranks |= dict.fromkeys(chosen.nodes, rank)
        missing -= chosen.most
    return ranks


def _next(left: Sequence[Domain], missing: int, offered: Collection[str], used: Collection[str]) -> Domain:
    """Choose the next domain. Args: left: the largest first. offered: as for ``choices``; empty if it does not matter."""
    able = [one for one in left if not one.nodes.isdisjoint(offered)] or left
    known = [one for one in able if one.name in used]
    if known:
        return known[0]
    enough = [one for one in able if one.most >= missing]
    return min(enough, key=lambda one: (one.room, one.name)) if enough else able[0]


def _most_pods(columns: Columns, rows: Rows, shape: PodShape) -> Ints:
    """Return how many pods of a shape fit on each row at most. The rows fit one."""
    lasting = [request for request in shape.request.containers if not request.init]
    most = np.full(len(rows), np.iinfo(np.int64).max)
    for request in lasting:
        ask = RatingQuery(request, shape.request.preferences, shape.policy, shape.demand)
        most = np.minimum(most, _instances(columns, rows, ask) if request.mig else _vgpus(columns, rows, ask))
    return np.asarray(np.maximum(1, most), dtype=np.int64)


def _vgpus(columns: Columns, rows: Rows, ask: RatingQuery) -> Ints:
    """Return how often the vGPUs of a container fit on each row, each on another device."""
    usable, _ = judge_devices(columns, rows, ask)
    seats = np.minimum(columns.free_shares[rows], columns.free_mib[rows] // np.maximum(1, asked_mib(ask, columns.capacity_mib[rows])))
    if (cores := ask.request.cores_percent_per_vgpu) is not None:
        seats = np.minimum(seats, (units.WHOLE_GPU_PERCENT - columns.used_cores[rows]) // cores)
    seats = np.where(usable, np.maximum(1, seats), 0)
    most, vgpus = seats.sum(axis=1) // ask.request.vgpus, ask.request.vgpus
    # A container cannot use a device twice, so of each device at most as many seats count as containers fit.
    while vgpus > 1 and (crowded := np.minimum(seats, most[:, None]).sum(axis=1) < most * vgpus).any():
        most = np.where(crowded, most - 1, most)
    return np.asarray(most, dtype=np.int64)


def _instances(columns: Columns, rows: Rows, ask: RatingQuery) -> Ints:
    """Return how often the MIG instances of a container fit on each row at most."""
    parts = [columns.mig_room[columns.profiles.index(profile)][rows].sum(axis=1) // count for profile, count in ask.request.mig]
    return np.asarray(np.min(parts, axis=0), dtype=np.int64)
