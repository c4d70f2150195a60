# SPDX-License-Identifier: Apache-2.0
"""Computes what containers use of whole GPUs according to the driver, under any backend.

A process that the driver lists belongs to the grant of its container, which its cgroup names. Invariant: a container's use is 0 only if its
GPU reported its processes and listed no process of the container; an unknown value is None. MIG instances are not here, because the driver
reports each as a whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from agent.core.cgroups import container_of
from agent.core.ledger import Grant
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.owners import owner_of
from aliquot.contract.model import Isolation, Pod

Key = tuple[str, str]
"""Grant id and GPU UUID."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """All containers, from one census of the GPUs' processes."""

    reporting: Set[str] = frozenset()
    """UUIDs of the GPUs that reported their processes."""
    listed: Mapping[Key, Sequence[GpuProcess]] = field(default_factory=dict)
    """The listed processes of a container on a GPU; no entry without one."""
    unclear: Set[Key] = frozenset()
    """Keys with a process that may belong to this container or to another one of its pod."""
    silent: Set[Key] = frozenset()
    """Keys for which the listed processes do not show how busy the container is."""
    uncounted: Mapping[str, int] = field(default_factory=dict)
    """By grant id: the number of the container's listed processes that the shim does not count; no entry without one."""
    recent: bool = True
    """Whether the census is recent. If not, it is unknown how busy containers are."""

    def used_bytes(self, grant_id: str, device_uuid: str) -> int | None:
        """Return the memory that the container's processes use on a GPU."""
        key = (grant_id, device_uuid)
        return sum(process.used_bytes for process in self.listed.get(key, ())) if self._is_known(key) else None

    def utilization_ratio(self, grant_id: str, device_uuid: str) -> float | None:
        """Return the fraction of the last seconds in which the container's processes kept a GPU busy."""
        key = (grant_id, device_uuid)
        return self._sum_of(key, [process.utilization_ratio for process in self.listed.get(key, ())])

    def memory_ratio(self, grant_id: str, device_uuid: str) -> float | None:
        """Return the fraction of the last seconds in which a GPU's memory was busy for the container's processes."""
        key = (grant_id, device_uuid)
        return self._sum_of(key, [process.memory_ratio for process in self.listed.get(key, ())])

    def _sum_of(self, key: Key, ratios: Sequence[float | None]) -> float | None:
        reported = [ratio for ratio in ratios if ratio is not None]
        known = self.recent and self._is_known(key) and key not in self.silent and len(reported) == len(ratios)
        return min(1.0, sum(reported)) if known else None

    def processes(self, grant: Grant) -> int | None:
        """Return the number of a container's processes on its GPUs. For a container that is not under the shim."""
        known = all(self._is_known((grant.grant_id, uuid)) for uuid in grant.device_names)
        return self.uncounted.get(grant.grant_id, 0) if known else None

    def _is_known(self, key: Key) -> bool:
        return key[1] in self.reporting and key not in self.unclear


def holdings_of(
    listed: Iterable[GpuProcess],
    processes: Iterable[HostProcess],
    reporting: Set[str],
    *,
    grants: Sequence[Grant],
    pods_by_uid: Mapping[str, Pod],
    counted_pids: Mapping[str, Set[int]],
    silent: Set[Key] = frozenset(),
) -> Holdings:
    """Attribute every live process to its grant. A process outside all containers belongs to the grant with a shim that counts it, if any.

    Args: counted_pids: by grant id, host pids of the processes that the shim counts. reporting, silent: as in ``Holdings``.
    """
    known = {process.pid: process for process in processes}
    found: dict[Key, list[GpuProcess]] = defaultdict(list)
    unclear: set[Key] = set()
    uncounted: dict[str, set[int]] = defaultdict(set)
    for entry in listed:
        if (process := known.get(entry.pid)) is None:
            continue
        own = _grants_of(process, grants, pods_by_uid, counted_pids)
        keys = _keys(own, entry.device_uuid)
        if len(keys) > 1:
            unclear.update(keys)
            continue
        for grant_id, device_uuid in keys:
            found[grant_id, device_uuid].append(entry)
            if entry.pid not in counted_pids.get(grant_id, ()):
                uncounted[grant_id].add(entry.pid)
    return Holdings(reporting, found, unclear, silent, {grant_id: len(pids) for grant_id, pids in uncounted.items()})


def _grants_of(
    process: HostProcess, grants: Sequence[Grant], pods_by_uid: Mapping[str, Pod], counted_pids: Mapping[str, Set[int]]
) -> Iterable[Grant]:
    """Return the grants of a process's container; outside all containers, those with a shim that counts the process."""
    ref = container_of(process.cgroup)
    if ref is None:
        return (grant for grant in grants if process.pid in counted_pids.get(grant.grant_id, ()))
    return owner_of(ref, process.pid, pods_by_uid=pods_by_uid, grants=grants, counted_pids=counted_pids).grants


def _keys(grants: Iterable[Grant], device_uuid: str) -> Sequence[Key]:
    """Return the keys of the grants that have this whole GPU."""
    return [(grant.grant_id, device_uuid) for grant in grants if grant.backend is not Isolation.MIG and device_uuid in grant.device_names]
