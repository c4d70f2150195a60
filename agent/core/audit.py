"""What the driver says each process uses, compared with what its container was granted.

The shim lives in the tenant's process, so the host looks from outside: the driver lists processes, a process's cgroup names its container,
and the container's grant says what it may use. Kept true: a finding rests on the driver's word and the kernel's; the usage region, which
is the tenant's word, can only clear a process of running without the shim, never of what it uses. A process of the host is reported and
never ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.cgroups import ContainerRef, container_of
from agent.core.identity import Holder
from agent.core.ledger import Grant
from agent.core.mig import gpu_of
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.owners import Owner, owner_of
from proto import units
from proto.model import Isolation, Pod
from proto.units import MIB

LEAST_SLACK_BYTES = 32 * MIB
SLACK_PART = 50
"""A container may be a fiftieth of its limit over it: what the driver loads for a program already at its limit is nobody's attack."""

MAPS_RIGHTS = "the agent needs the capability SYS_PTRACE for that (the component deploy/daemonset/components/audit-shim)"
"""The cure where the kernel does not show what processes of containers have mapped."""


class FindingKind(StrEnum):
    """What is wrong. Values of the label ``kind``."""

    OVER_LIMIT = "over-limit"
    """A container's processes hold more device memory than it was granted."""
    NO_GRANT = "no-grant"
    """A container uses a GPU and was granted none."""
    WRONG_DEVICE = "wrong-device"
    """A container uses another GPU than it was granted."""
    SHIM_MISSING = "shim-missing"
    """A process uses the GPU past the shim: it is not among those the shim counts."""
    SHIM_UNKNOWN = "shim-unknown"
    """A process uses the GPU and has no slot with the shim, and what it has loaded may not be looked at."""
    HOST_PROCESS = "host-process"
    """A process of the host uses a GPU that is shared out."""


class AuditPolicy(StrEnum):
    """What is done about a container that takes what it was not granted."""

    REPORT = "report"
    KILL = "kill"
    """Its processes are ended."""
    EVICT = "evict"
    """Its pod is."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. ``subject`` with ``kind`` and device is its identity from pass to pass."""

    kind: FindingKind
    subject: str
    device_uuid: str
    sentence: str
    processes: tuple[HostProcess, ...]
    holder: Holder | None = None
    pod_uid: str = ""
    grant_id: str = ""

    @property
    def of_container(self) -> bool:
        """Whether something may be done about it: not for what is only suspected, and the host's own processes are the host's business."""
        return self.kind not in (FindingKind.HOST_PROCESS, FindingKind.SHIM_UNKNOWN)


@dataclass(frozen=True, slots=True)
class AuditView:
    """What one pass rests on."""

    listed: Sequence[GpuProcess]
    processes: Mapping[int, HostProcess]
    """By host pid, those that are still there."""
    pods_by_uid: Mapping[str, Pod]
    pods_current: bool
    """Whether these are the pods of now; those that came during an outage of the API are not among them, nor their namespaces known."""
    grants: Sequence[Grant]
    shimmed_pids: Mapping[str, Set[int]]
    """By grant id: host pids of the processes that the shim counts."""
    unseen_pids: Mapping[str, Set[int]] = field(default_factory=dict)
    """By grant id: host pids of which that cannot be told."""
    burst_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By grant id and device UUID: how far above its share a container may go; absent = not at all."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """The GPU of each MIG instance, by UUID: the driver lists processes by GPU."""
    own_cgroups: Set[str] = frozenset()
    """Of the agent, and of aliquot-mps, whose servers are on the GPUs for their clients."""
    exempt_namespaces: Set[str] = frozenset()
    """Of pods that may use GPUs without a grant, such as monitoring."""

    def owner_of(self, ref: ContainerRef, pid: int) -> Owner:
        """Say whose a process is."""
        return owner_of(ref, pid, pods_by_uid=self.pods_by_uid, grants=self.grants, counted_pids=self.shimmed_pids)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One process on one device."""

    use: GpuProcess
    process: HostProcess
    ref: ContainerRef | None


def audit(view: AuditView) -> tuple[Finding, ...]:
    """Compare use with grants."""
    seen = [
        _Seen(entry, process, container_of(process.cgroup))
        for entry in view.listed
        if (process := view.processes.get(entry.pid)) is not None and process.cgroup not in view.own_cgroups
    ]
    findings: list[Finding] = []
    used: dict[tuple[str, str], list[_Seen]] = defaultdict(list)
    for one in seen:
        if one.ref is None:
            findings.append(_host_process(one))
            continue
        owner = view.owner_of(one.ref, one.process.pid)
        if owner.pod is not None and owner.pod.namespace in view.exempt_namespaces:
            continue
        if owner.pod is None and not owner.grants and not view.pods_current:
            continue
        grant = _grant_for(one.use.device_uuid, owner.grants, view.parents)
        if grant is None:
            if not _is_somewhere_unknown(owner.grants, view.parents):
                findings.append(_not_granted(one, one.ref, owner))
            continue
        if grant.backend is not Isolation.MIG:  # the hardware keeps MIG instances apart
            used[grant.grant_id, one.use.device_uuid].append(one)
        if grant.under_shim and one.process.pid in view.unseen_pids.get(grant.grant_id, ()):
            findings.append(_unseen(one, grant))
        elif grant.under_shim and one.process.pid not in view.shimmed_pids.get(grant.grant_id, ()):
            findings.append(_without_shim(one, grant))
    grants = {grant.grant_id: grant for grant in view.grants}
    findings += _over_limits(used, grants, view)
    return tuple(findings)


def _grant_for(device_uuid: str, grants: Iterable[Grant], parents: Mapping[str, str]) -> Grant | None:
    for grant in grants:
        if any(device_uuid in (share.device_uuid, gpu_of(share, parents)) for share in grant.shares):
            return grant
    return None


def _is_somewhere_unknown(grants: Iterable[Grant], parents: Mapping[str, str]) -> bool:
    """Whether an instance was granted that no GPU on the board shows: it may be on one that has not answered since the agent started."""
    return any(gpu_of(share, parents) is None for grant in grants if grant.backend is Isolation.MIG for share in grant.shares)


def _host_process(one: _Seen) -> Finding:
    uuid, process = one.use.device_uuid, one.process
    sentence = f"process {process.pid} of the host uses {units.format_memory(one.use.used_bytes)} of {uuid}"
    return Finding(FindingKind.HOST_PROCESS, _subject(process), uuid, sentence, (process,))


def _not_granted(one: _Seen, ref: ContainerRef, owner: Owner) -> Finding:
    uuid, process, pod = one.use.device_uuid, one.process, owner.pod
    holder = Holder(pod.namespace, pod.name, owner.container) if pod is not None else None
    amount = units.format_memory(one.use.used_bytes)
    if owner.grants:
        granted = ", ".join(share.device_uuid for grant in owner.grants for share in grant.shares)
        sentence = f"process {process.pid} uses {amount} of {uuid}, and its container was granted {granted}"
        return Finding(
            FindingKind.WRONG_DEVICE, _subject(process), uuid, sentence, (process,), holder, ref.pod_uid, owner.grants[0].grant_id
        )
    whose = "" if pod is not None else f" of a pod that is gone (UID {ref.pod_uid})"
    sentence = f"process {process.pid}{whose} uses {amount} of {uuid}, and its container was granted no GPU"
    return Finding(FindingKind.NO_GRANT, _subject(process), uuid, sentence, (process,), holder, ref.pod_uid)


def _without_shim(one: _Seen, grant: Grant) -> Finding:
    uuid, process = one.use.device_uuid, one.process
    amount = units.format_memory(one.use.used_bytes)
    sentence = (
        f"process {process.pid} uses {amount} of {uuid} without the shim, so that its container's limit does not bind it: the "
        "program is static, brings a driver library of its own, or was started in another root file system"
    )
    return _finding(FindingKind.SHIM_MISSING, _subject(process), uuid, sentence, (process,), grant)


def _unseen(one: _Seen, grant: Grant) -> Finding:
    uuid, process = one.use.device_uuid, one.process
    sentence = (
        f"process {process.pid} uses {units.format_memory(one.use.used_bytes)} of {uuid} and is not among those that the shim counts; "
        f"whether it has loaded the shim cannot be seen: {MAPS_RIGHTS}"
    )
    return _finding(FindingKind.SHIM_UNKNOWN, _subject(process), uuid, sentence, (process,), grant)


def _over_limits(used: Mapping[tuple[str, str], Sequence[_Seen]], grants: Mapping[str, Grant], view: AuditView) -> Iterator[Finding]:
    for (grant_id, uuid), several in used.items():
        grant = grants[grant_id]
        granted_bytes = sum(share.memory_bytes for share in grant.shares if share.device_uuid == uuid)
        limit_bytes = max(granted_bytes, view.burst_bytes.get((grant_id, uuid), 0))
        used_bytes = sum(one.use.used_bytes for one in several)
        if used_bytes <= limit_bytes + max(LEAST_SLACK_BYTES, limit_bytes // SLACK_PART):
            continue
        sentence = (
            f"container {grant.container} holds {units.format_memory(used_bytes)} of {uuid} by the driver's account, and its limit is "
            f"{units.format_memory(limit_bytes)}"
        )
        yield _finding(FindingKind.OVER_LIMIT, grant_id, uuid, sentence, tuple(one.process for one in several), grant)


def _finding(kind: FindingKind, subject: str, uuid: str, sentence: str, processes: tuple[HostProcess, ...], grant: Grant) -> Finding:
    return Finding(kind, subject, uuid, sentence, processes, grant.holder, grant.pod_uid, grant.grant_id)


def _subject(process: HostProcess) -> str:
    """A pid may be used again; with its start time it names one process."""
    return f"{process.pid}/{process.start_ticks}"
