"""Which grants have a process at work on their GPUs, by what the driver and the kernel say.

The usage region tells of processes under the shim only, and is the tenant's word: a container that another backend enforces has none in
it, and one that wrote over its region looks dead. One whose pod is gone may look alive, because a lock is held by all who have the open
file, and files can be handed to another pod. The driver's list and the cgroup of a process are no tenant's word.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.cgroups import container_of
from agent.core.ledger import Grant
from agent.core.mig import gpu_of
from agent.core.overhead import GpuProcess, HostProcess
from proto.model import Isolation


def processes_of(
    grant: Grant, listed: Iterable[GpuProcess], processes: Iterable[HostProcess], parents: Mapping[str, str]
) -> Sequence[HostProcess]:
    """Return the processes of the grant's pod that the driver lists on one of its GPUs.

    Args: processes: who the listed ones are. parents: the GPU of each MIG instance, by UUID.
    """
    gpus = gpus_of(grant, parents)
    pids = {entry.pid for entry in listed if gpus is None or entry.device_uuid in gpus}
    return [
        process
        for process in processes
        if process.pid in pids and (container := container_of(process.cgroup)) is not None and container.pod_uid == grant.pod_uid
    ]


@dataclass(frozen=True, slots=True)
class Signs:
    """Of which grants a process runs, by grant id."""

    live: Set[str]
    claimed: Set[str]
    """By a lock alone, where it cannot be seen whose."""


@dataclass(frozen=True, slots=True)
class PodsAtWork:
    """Of which pods processes are on the host."""

    uids: Set[str]
    some_end: bool
    """Whether a process ends and does not tell of which pod it is."""
    sees_others: bool
    """Whether processes of other pods than the agent's are to be seen at all."""

    @classmethod
    def of(cls, cgroups: Collection[str], own_cgroup: str) -> "PodsAtWork":
        """Take the cgroups of all processes that are to be seen, empty text for one that ends, and the agent's own."""
        uids = {container.pod_uid for cgroup in cgroups if (container := container_of(cgroup)) is not None}
        own = container_of(own_cgroup)
        return cls(uids, "" in cgroups, bool(uids - {own.pod_uid if own is not None else ""}))

    def has(self, pod_uid: str) -> bool | None:
        """Say whether a process of this pod is, or may be, on the host; None where that is not to be seen."""
        if pod_uid in self.uids or self.some_end:
            return True
        return False if self.sees_others else None


def gpus_of(grant: Grant, parents: Mapping[str, str]) -> Set[str] | None:
    """Return the GPUs of a grant; None when it may be any, because none on the board shows its instance."""
    parent_gpus = {gpu_of(share, parents) for share in grant.shares}
    if grant.backend is Isolation.MIG and None in parent_gpus:
        return None
    return {uuid for uuid in parent_gpus if uuid is not None} | set(grant.device_names)


def still_there(before: Iterable[HostProcess], now: Iterable[HostProcess]) -> Set[int]:
    """Return the pids that are the same process as before, and not another's by now."""
    then = {process.pid: process.start_ticks for process in before}
    return {process.pid for process in now if then.get(process.pid) == process.start_ticks}
