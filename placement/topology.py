"""How well devices of one node are linked, as numbers that can be added.

The quality of a pair is its PCIe level plus a hundred for each NVLink, the scale that NVIDIA's device plugin and its users
know; the quality of a set is the sum over its pairs. Devices without a known link have quality 0.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from proto.model import Link, LinkKind

NVLINK_QUALITY_PER_LANE: Final = 100
_QUALITY: Final[Mapping[LinkKind, int]] = {
    LinkKind.NVLINK: 50,
    LinkKind.PCIE_SWITCH: 50,
    LinkKind.HOST_BRIDGE: 30,
    LinkKind.NUMA_NODE: 20,
    LinkKind.SYSTEM: 10,
}
"""NVML does not tell the PCIe level below an NVLink; linked boards share a switch in every machine we know."""


def pair_quality(link: Link) -> int:
    """Rate one link. An NVLink counts at least one lane."""
    lanes = max(1, link.lanes) if link.kind is LinkKind.NVLINK else 0
    return _QUALITY[link.kind] + NVLINK_QUALITY_PER_LANE * lanes


@dataclass(frozen=True, slots=True)
class LinkTable:
    """The qualities of a node's pairs, for looking up many."""

    by_pair: Mapping[frozenset[str], int]

    @classmethod
    def of(cls, links: Iterable[Link]) -> "LinkTable":
        """Rate links; of several between one pair the best counts."""
        by_pair: dict[frozenset[str], int] = {}
        for link in links:
            pair = frozenset((link.a_uuid, link.b_uuid))
            by_pair[pair] = max(by_pair.get(pair, 0), pair_quality(link))
        return cls(by_pair)

    def between(self, a_uuid: str, b_uuid: str) -> int:
        """Return the quality of one pair."""
        return self.by_pair.get(frozenset((a_uuid, b_uuid)), 0)

    def within(self, uuids: Collection[str]) -> int:
        """Return the quality of a set: the sum over its pairs."""
        return sum(self.between(a, b) for a, b in combinations(uuids, 2))
