# SPDX-License-Identifier: Apache-2.0
"""Finds grants with a live process on their GPUs, from the driver and the kernel.

The usage region alone is not enough. It shows only processes under the shim, and the tenant writes it: a container that overwrote its
region looks dead. A container of a deleted pod may look alive, because every process with the open file holds its lock, and a process can
pass an open file to another pod. Tenants cannot change the driver's list or a process's cgroup.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.cgroups import container_of
from agent.core.ledger import Grant
from agent.core.mig import gpu_of
from agent.core.overhead import GpuProcess, HostProcess
from aliquot.contract.model import Isolation


def processes_of(
    grant: Grant, listed: Iterable[GpuProcess], processes: Iterable[HostProcess], parents: Mapping[str, str]
) -> Sequence[HostProcess]:
    """Return the processes of the grant's pod that the driver lists on one of its GPUs.

    Args: processes: details of the listed processes. parents: the GPU of each MIG instance, by UUID.
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
    """Ids of grants with a live process."""

    live: Set[str]
    claimed: Set[str]
    """Grants with only a held lock, if the lock's owner cannot be determined."""


@dataclass(frozen=True, slots=True)
class PodsAtWork:
    """The pods that have processes on the host."""

    uids: Set[str]
    some_end: bool
    """Whether a process is exiting, so that its pod is unknown."""
    sees_others: bool
    """Whether the agent sees processes of pods other than its own."""

    @classmethod
    def of(cls, cgroups: Collection[str], own_cgroup: str) -> "PodsAtWork":
        """Args: cgroups: of all visible processes; empty text for an exiting one. own_cgroup: the agent's."""
        uids = {container.pod_uid for cgroup in cgroups if (container := container_of(cgroup)) is not None}
        own = container_of(own_cgroup)
        return cls(uids, "" in cgroups, bool(uids - {own.pod_uid if own is not None else ""}))

    def has(self, pod_uid: str) -> bool | None:
        """Whether the pod has, or may have, a process on the host; None if the agent cannot see it."""
        if pod_uid in self.uids or self.some_end:
            return True
        return False if self.sees_others else None


def gpus_of(grant: Grant, parents: Mapping[str, str]) -> Set[str] | None:
    """Return the GPUs of a grant; None if it may be any GPU, because no known GPU has its instance."""
    parent_gpus = {gpu_of(share, parents) for share in grant.shares}
    if grant.backend is Isolation.MIG and None in parent_gpus:
        return None
    return {uuid for uuid in parent_gpus if uuid is not None} | set(grant.device_names)


def still_there(before: Iterable[HostProcess], now: Iterable[HostProcess]) -> Set[int]:
    """Return the pids that still belong to the same process as before. The kernel may have reused the others."""
    then = {process.pid: process.start_ticks for process in before}
    return {process.pid for process in now if then.get(process.pid) == process.start_ticks}
