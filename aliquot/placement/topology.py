# SPDX-License-Identifier: Apache-2.0
"""Rates the links between devices of one node, as numbers that can be added.

The quality of a pair is its PCIe level plus 100 for each NVLink, as NVIDIA's device plugin rates it. The quality of a set is the sum over
its pairs. Devices without a known link have quality 0.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from aliquot.contract.model import Device, Link, LinkKind

NVLINK_QUALITY_PER_LANE: Final = 100
PCIE_QUALITY: Final[Mapping[LinkKind, int]] = {
    LinkKind.SAME_BOARD: 60,
    LinkKind.PCIE_SWITCH: 50,
    LinkKind.PCIE_SWITCHES: 40,
    LinkKind.HOST_BRIDGE: 30,
    LinkKind.NUMA_NODE: 20,
    LinkKind.SYSTEM: 10,
}


def pair_quality(link: Link, *, across_numa: bool = False) -> int:
    """Rate one link. An NVLink counts at least one lane.

    Args: across_numa: whether its ends are known to lie on different NUMA nodes. Used if the inventory, of an older agent, does not state
          the PCIe path of an NVLink pair: the path then counts as one through a switch, unless it crosses NUMA nodes.
    """
    if link.kind is not LinkKind.NVLINK:
        return PCIE_QUALITY[link.kind]
    beside = link.pcie or (LinkKind.SYSTEM if across_numa else LinkKind.PCIE_SWITCH)
    return PCIE_QUALITY[beside] + NVLINK_QUALITY_PER_LANE * max(1, link.lanes)


@dataclass(frozen=True, slots=True)
class LinkTable:
    """The qualities of a node's pairs."""

    by_pair: Mapping[tuple[str, str], int]
    """In both orders."""

    @classmethod
    def of(cls, links: Iterable[Link], devices: Iterable[Device] = ()) -> "LinkTable":
        """Rate links; of several links of one pair the best counts. Args: devices: for their NUMA nodes."""
        numa = {device.uuid: device.numa_node for device in devices if device.numa_node is not None}
        by_pair: dict[tuple[str, str], int] = {}
        for link in links:
            a, b = link.a_uuid, link.b_uuid
            across = a in numa and b in numa and numa[a] != numa[b]
            by_pair[a, b] = by_pair[b, a] = max(by_pair.get((a, b), 0), pair_quality(link, across_numa=across))
        return cls(by_pair)

    def between(self, a_uuid: str, b_uuid: str) -> int:
        """Return the quality of one pair."""
        return self.by_pair.get((a_uuid, b_uuid), 0)

    def within(self, uuids: Collection[str]) -> int:
        """Return the quality of a set: the sum over its pairs."""
        return sum(self.between(a, b) for a, b in combinations(uuids, 2))
