"""What containers use of whole GPUs by the driver's account, whatever enforces their limits: each process the driver lists, given to the
grant of its container by its control group.

Kept true: a container uses nothing only where its GPU told who is on it and listed no process of the container; what is not known is None.
MIG instances are not here: the driver tells of each as a whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from agent.core.cgroups import container_of
from agent.core.ledger import Grant
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.owners import owner_of
from proto.model import Isolation, Pod

Key = tuple[str, str]
"""Grant id and GPU UUID."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """All containers, as of one census."""

    told: Set[str] = frozenset()
    """UUIDs of the GPUs that told who is on them."""
    listed: Mapping[Key, Sequence[GpuProcess]] = field(default_factory=dict)
    """The container's processes, where there are any."""
    unclear: Set[Key] = frozenset()
    """Where a process is listed that may be the container's or another one's of its pod."""
    silent: Set[Key] = frozenset()
    """Where how busy a container is cannot be told by what is listed."""
    uncounted: Mapping[str, int] = field(default_factory=dict)
    """By grant id, the listed processes of the container that the shim does not count, where there are any."""
    recent: bool = True
    """Whether this is of lately; else how busy containers are is not known."""

    def used_bytes(self, grant_id: str, device_uuid: str) -> int | None:
        """Return what the container's processes use of a GPU."""
        key = (grant_id, device_uuid)
        return sum(process.used_bytes for process in self.listed.get(key, ())) if self._is_known(key) else None

    def utilization_ratio(self, grant_id: str, device_uuid: str) -> float | None:
        """Return the share of the last seconds in which the container's processes kept a GPU busy."""
        key = (grant_id, device_uuid)
        ratios = [process.utilization_ratio for process in self.listed.get(key, ())]
        told = [ratio for ratio in ratios if ratio is not None]
        known = self.recent and self._is_known(key) and key not in self.silent and len(told) == len(ratios)
        return min(1.0, sum(told)) if known else None

    def processes(self, grant: Grant) -> int | None:
        """Return how many processes of a container without the shim are on its GPUs."""
        known = all(self._is_known((grant.grant_id, uuid)) for uuid in grant.device_names)
        return self.uncounted.get(grant.grant_id, 0) if known else None

    def _is_known(self, key: Key) -> bool:
        return key[1] in self.told and key not in self.unclear


def holdings_of(
    listed: Iterable[GpuProcess],
    processes: Iterable[HostProcess],
    told: Set[str],
    *,
    grants: Sequence[Grant],
    pods_by_uid: Mapping[str, Pod],
    counted_pids: Mapping[str, Set[int]],
    silent: Set[Key] = frozenset(),
) -> Holdings:
    """Give every process that is still there to the grant it is of; one in no container is of the grant whose shim counts it, if any.

    Args: counted_pids: by grant id, host pids of the processes that the shim counts. told, silent: as ``Holdings`` has them.
    """
    known = {process.pid: process for process in processes}
    found: dict[Key, list[GpuProcess]] = defaultdict(list)
    unclear: set[Key] = set()
    uncounted: dict[str, set[int]] = defaultdict(set)
    for entry in listed:
        if (process := known.get(entry.pid)) is None:
            continue
        ref = container_of(process.cgroup)
        if ref is None:
            own: Iterable[Grant] = (grant for grant in grants if entry.pid in counted_pids.get(grant.grant_id, ()))
        else:
            own = owner_of(ref, entry.pid, pods_by_uid=pods_by_uid, grants=grants, counted_pids=counted_pids).grants
        keys = [
            (grant.grant_id, entry.device_uuid)
            for grant in own
            if grant.backend is not Isolation.MIG and entry.device_uuid in grant.device_names
        ]
        if len(keys) > 1:
            unclear.update(keys)
            continue
        for grant_id, device_uuid in keys:
            found[grant_id, device_uuid].append(entry)
            if entry.pid not in counted_pids.get(grant_id, ()):
                uncounted[grant_id].add(entry.pid)
    return Holdings(told, found, unclear, silent, {grant_id: len(pids) for grant_id, pids in uncounted.items()})
