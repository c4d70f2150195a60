# SPDX-License-Identifier: Apache-2.0
"""What bound and expected pods take of their nodes, added up in the columns.

Invariant: each pod counts once. What was added is remembered and subtracted exactly, even if the inventory changed in between.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import IDLE, Utilization
from aliquot.placement.device import whole_instance
from scheduler_plugin.core.cluster.columns import Columns
from scheduler_plugin.core.cluster.pods import Footprint
from scheduler_plugin.core.score.cost import HostDemand

NO_FOOTPRINT: Final[Footprint] = {}


@dataclass(frozen=True, slots=True)
class Holder:
    """A bound or expected pod: its node, and what it takes there."""

    node: str
    footprint: Footprint
    demand: HostDemand
    used: Utilization = IDLE
    """What it uses of each of its devices, as far as that counts."""


@dataclass(slots=True)
class InventoriedNode:
    """A node with an inventory: its row, and the columns of its devices."""

    row: int
    gpu: GpuNode
    column_of: dict[str, int]
    """By device UUID."""
    column_of_instance: dict[str, int]
    """By the UUID of a MIG instance or the name of a place for one: an agent lists its places whether or not the instance exists."""
    instance_of_shares: Mapping[str, str]
    """Of a GPU in MIG mode that claims may share, by its UUID: the place of the instance that all shares use."""
    instance_uses: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, row: int, gpu: GpuNode) -> "InventoriedNode":
        """Look up the columns of an inventory."""
        columns = {entry.device.uuid: column for column, entry in enumerate(gpu.devices)}
        instances = {i.uuid: column for column, entry in enumerate(gpu.devices) for i in entry.device.mig_instances}
        shared = {entry.device.uuid: whole.uuid for entry in gpu.devices if (whole := whole_instance(entry.device)) is not None}
        return cls(row, gpu, columns, instances, shared)


class Holders:
    """The holders by pod UID.

    Args: nodes: the nodes with an inventory, by name; the owner changes them only within ``uncounted_on``.
    """

    def __init__(self, columns: Columns, nodes: Mapping[str, InventoriedNode]) -> None:
        self._columns = columns
        self._nodes = nodes
        self._by_uid: dict[str, Holder] = {}
        self._uids_on: dict[str, set[str]] = {}

    def __contains__(self, pod_uid: str) -> bool:
        return pod_uid in self._by_uid

    def footprint_of(self, pod_uid: str) -> Footprint:
        """Return what a pod takes of devices; empty for an unknown pod."""
        holder = self._by_uid.get(pod_uid)
        return NO_FOOTPRINT if holder is None else holder.footprint

    def uids_on(self, node: str) -> Collection[str]:
        """Return the UIDs of the pods that take something of a node."""
        return self._uids_on.get(node, ())

    def rows_of(self, pod_uids: Iterable[str]) -> Set[int]:
        """Return the rows in which these pods count."""
        nodes = (self._nodes.get(holder.node) for uid in pod_uids if (holder := self._by_uid.get(uid)) is not None)
        return {node.row for node in nodes if node is not None}

    def put(self, pod_uid: str, holder: Holder) -> bool:
        """Count a pod, in place of what it took before; return whether that freed devices."""
        if self._by_uid.get(pod_uid) == holder:
            return False
        freed = self.drop(pod_uid)
        self._by_uid[pod_uid] = holder
        self._uids_on.setdefault(holder.node, set()).add(pod_uid)
        self._count(holder, +1)
        return freed

    def drop(self, pod_uid: str) -> bool:
        """Stop counting a pod; return whether that freed devices."""
        holder = self._by_uid.pop(pod_uid, None)
        if holder is None:
            return False
        self._count(holder, -1)
        self._uids_on[holder.node].discard(pod_uid)
        if not self._uids_on[holder.node]:
            del self._uids_on[holder.node]
        return bool(holder.footprint)

    def uids(self) -> Collection[str]:
        """Return the UIDs of all holders."""
        return self._by_uid.keys()

    def set_used(self, pod_uid: str, used: Utilization) -> None:
        """Count what a pod uses of its devices, in place of what it used before. Does nothing for an unknown pod."""
        holder = self._by_uid.get(pod_uid)
        if holder is not None and holder.footprint and holder.used != used:
            self._count(holder, -1)
            self._by_uid[pod_uid] = replace(holder, used=used)
            self._count(self._by_uid[pod_uid], +1)

    @contextmanager
    def without(self, pod_uid: str) -> Iterator[None]:
        """Do not count a pod inside the block."""
        holder = self._by_uid.get(pod_uid)
        if holder is None:
            yield
            return
        self._count(holder, -1)
        try:
            yield
        finally:
            self._count(holder, +1)

    @contextmanager
    def uncounted_on(self, node: str) -> Iterator[None]:
        """Count no pod of a node inside the block, in which the node's inventory changes."""
        holders = [self._by_uid[uid] for uid in self.uids_on(node)]
        for holder in holders:
            self._count(holder, -1)
        yield
        for holder in holders:
            self._count(holder, +1)

    def _count(self, holder: Holder, sign: int) -> None:
        """Add what a holder takes to its node's row, or subtract it. Devices that the inventory does not have now are skipped."""
        node = self._nodes.get(holder.node)
        if node is None:
            return
        self._columns.add_host_use(node.row, sign * holder.demand.cpu_milli, sign * holder.demand.ram_mib)
        for uuid, use in holder.footprint.items():
            if (column := node.column_of.get(uuid)) is not None:
                self._columns.add_use(node.row, column, use, sign)
                if holder.used is not IDLE:
                    self._columns.add_busy(node.row, column, holder.used, sign)
            if (instance := node.instance_of_shares.get(uuid, uuid)) in node.column_of_instance:
                self._count_instance(node, instance, sign)

    def _count_instance(self, node: InventoriedNode, uuid: str, sign: int) -> None:
        before = node.instance_uses[uuid]
        node.instance_uses[uuid] = before + sign
        if bool(before) != bool(before + sign):
            self._columns.set_instance_used(node.row, node.column_of_instance[uuid], uuid, used=sign > 0)
