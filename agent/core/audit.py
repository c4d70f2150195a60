# SPDX-License-Identifier: Apache-2.0
"""Compares what the driver reports for each process with the grant of its container.

The shim runs inside the tenant's process, so the agent checks from outside: the driver lists processes, a process's cgroup names its
container, and the container's grant says what it may use. Invariant: a finding is based on driver and kernel only. The tenant writes the
usage region, so the region may only show that a process runs under the shim; it never excuses what a process uses. The agent reports
processes of the host and never ends them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent.core.cgroups import ContainerRef, container_of
from agent.core.identity import Holder
from agent.core.ledger import Grant
from agent.core.mig import gpu_of
from agent.core.over_cores import Busy, Key
from agent.core.overhead import GpuProcess, HostProcess
from agent.core.owners import Owner, owner_of
from aliquot.contract import units
from aliquot.contract.model import Isolation, Pod
from aliquot.contract.units import MIB

LEAST_SLACK_BYTES = 32 * MIB
SLACK_PART = 50
"""A container may exceed its limit by one fiftieth: the driver may load code for a program that is already at its limit."""

MAPS_RIGHTS = "the agent needs the capability SYS_PTRACE for that (the component deploy/daemonset/components/audit-shim)"
"""What to do if the kernel does not show the mapped files of containers' processes."""


class FindingKind(StrEnum):
    """The kind of finding. Values of the label ``kind``."""

    OVER_LIMIT = "over-limit"
    """A container's processes hold more device memory than its limit."""
    OVER_CORES = "over-cores"
    """A container's kernels ran for a larger part of the time than its cores allow."""
    NO_GRANT = "no-grant"
    """A container without a grant uses a GPU."""
    WRONG_DEVICE = "wrong-device"
    """A container uses a GPU that is not in its grant."""
    SHIM_MISSING = "shim-missing"
    """A process uses the GPU without the shim: the shim does not count it."""
    SHIM_UNKNOWN = "shim-unknown"
    """A process uses the GPU, the shim does not count it, and the agent may not read whether it has loaded the shim."""
    HOST_PROCESS = "host-process"
    """A process of the host, outside all containers, uses a shared GPU."""


class AuditPolicy(StrEnum):
    """What the agent does about a container that uses more than its grant."""

    REPORT = "report"
    THROTTLE = "throttle"
    """Lower its SM limit, if it uses more than its cores; report everything else."""
    KILL = "kill"
    """End its processes."""
    EVICT = "evict"
    """Evict its pod."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation. ``subject``, ``kind`` and device together identify it from pass to pass."""

    kind: FindingKind
    subject: str
    device_uuid: str
    sentence: str
    processes: tuple[HostProcess, ...]
    holder: Holder | None = None
    pod_uid: str = ""
    grant_id: str = ""
    throttled_percent: int = 0
    """For more use than its cores: the SM limit that would bring the container back to them."""

    @property
    def of_container(self) -> bool:
        """Whether the policy applies: not to mere suspicion, and not to the host's own processes."""
        return self.kind not in (FindingKind.HOST_PROCESS, FindingKind.SHIM_UNKNOWN)


@dataclass(frozen=True, slots=True)
class AuditView:
    """The input of one pass."""

    listed: Sequence[GpuProcess]
    processes: Mapping[int, HostProcess]
    """By host pid: the listed processes that still exist."""
    pods_by_uid: Mapping[str, Pod]
    pods_current: bool
    """Whether the pods are up to date. During an API outage new pods and their namespaces are unknown."""
    grants: Sequence[Grant]
    shimmed_pids: Mapping[str, Set[int]]
    """By grant id: host pids of the processes that the shim counts."""
    unseen_pids: Mapping[str, Set[int]] = field(default_factory=dict)
    """By grant id: host pids of processes that may or may not run under the shim."""
    burst_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By grant id and device UUID: the limit of a container that may burst above its share; absent = no burst."""
    busy: Mapping[Key, Busy] = field(default_factory=dict)
    """How busy containers were over the last window; without those that were sampled for less time."""
    cores_percent: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By grant id and device UUID: the SM limit of containers that have a fixed one."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """The GPU of each MIG instance, by UUID: the driver lists processes by GPU."""
    own_cgroups: Set[str] = frozenset()
    """Cgroups of the agent and of aliquot-mps. MPS servers use the GPUs on behalf of their clients."""
    closed_uuids: Set[str] = frozenset()
    """GPUs on which a container with a damaged ledger row may run: a process without a grant there proves nothing."""
    exempt_namespaces: Set[str] = frozenset()
    """Namespaces of pods that may use GPUs without a grant, such as monitoring."""

    def owner_of(self, ref: ContainerRef, pid: int) -> Owner:
        """Return the owner of a process."""
        return owner_of(ref, pid, pods_by_uid=self.pods_by_uid, grants=self.grants, counted_pids=self.shimmed_pids)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One process on one device."""

    use: GpuProcess
    process: HostProcess
    ref: ContainerRef | None


def audit(view: AuditView) -> tuple[Finding, ...]:
    """Compare use with grants."""
    findings: list[Finding] = []
    used: dict[tuple[str, str], list[_Seen]] = defaultdict(list)
    for one in _seen_processes(view):
        if one.ref is None:
            findings.append(_host_process(one))
            continue
        owner = view.owner_of(one.ref, one.process.pid)
        if _is_exempt(owner, view):
            continue
        grant = _grant_for(one.use.device_uuid, owner.grants, view.parents)
        if grant is None and not owner.grants and one.use.device_uuid in view.closed_uuids:
            continue
        if grant is None:
            # a granted instance without a known GPU may be on this one: that is no proof of a wrong device
            if not _is_somewhere_unknown(owner.grants, view.parents):
                findings.append(_not_granted(one, one.ref, owner))
            continue
        if grant.backend is not Isolation.MIG:  # the hardware limits MIG instances
            used[grant.grant_id, one.use.device_uuid].append(one)
        findings += _outside_shim(one, grant, view)
    grants = {grant.grant_id: grant for grant in view.grants}
    findings += _over_limits(used, grants, view)
    findings += _over_cores(view)
    return tuple(findings)


def _seen_processes(view: AuditView) -> Iterator[_Seen]:
    """Yield the listed processes that still exist, without those of the agent itself."""
    for entry in view.listed:
        process = view.processes.get(entry.pid)
        if process is not None and process.cgroup not in view.own_cgroups:
            yield _Seen(entry, process, container_of(process.cgroup))


def _is_exempt(owner: Owner, view: AuditView) -> bool:
    """Whether the owner may use GPUs without a grant, or is not known yet and may be such a pod."""
    if owner.pod is not None:
        return owner.pod.namespace in view.exempt_namespaces
    return not owner.grants and not view.pods_current


def _outside_shim(one: _Seen, grant: Grant, view: AuditView) -> Iterator[Finding]:
    """Yield a finding if the shim should count the process and does not."""
    if not grant.under_shim:
        return
    if one.process.pid in view.unseen_pids.get(grant.grant_id, ()):
        yield _unseen(one, grant)
    elif one.process.pid not in view.shimmed_pids.get(grant.grant_id, ()):
        yield _without_shim(one, grant)


def _grant_for(device_uuid: str, grants: Iterable[Grant], parents: Mapping[str, str]) -> Grant | None:
    for grant in grants:
        if any(device_uuid in (share.device_uuid, gpu_of(share, parents)) for share in grant.shares):
            return grant
    return None


def _is_somewhere_unknown(grants: Iterable[Grant], parents: Mapping[str, str]) -> bool:
    """Whether a granted MIG instance is on no known GPU. Its GPU may not have answered since the agent started."""
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
        sentence = f"process {process.pid} uses {amount} of {uuid}, but its container was granted {granted}"
        return Finding(
            FindingKind.WRONG_DEVICE, _subject(process), uuid, sentence, (process,), holder, ref.pod_uid, owner.grants[0].grant_id
        )
    of_pod = "" if pod is not None else f" of a deleted pod (UID {ref.pod_uid})"
    sentence = f"process {process.pid}{of_pod} uses {amount} of {uuid}, but its container was granted no GPU"
    return Finding(FindingKind.NO_GRANT, _subject(process), uuid, sentence, (process,), holder, ref.pod_uid)


def _without_shim(one: _Seen, grant: Grant) -> Finding:
    uuid, process = one.use.device_uuid, one.process
    amount = units.format_memory(one.use.used_bytes)
    sentence = (
        f"process {process.pid} uses {amount} of {uuid} without the shim, so its container's limit does not apply to it: the program is "
        "statically linked, has its own driver library, or was started in another root file system"
    )
    return _finding(FindingKind.SHIM_MISSING, _subject(process), uuid, sentence, (process,), grant)


def _unseen(one: _Seen, grant: Grant) -> Finding:
    uuid, process = one.use.device_uuid, one.process
    sentence = (
        f"process {process.pid} uses {units.format_memory(one.use.used_bytes)} of {uuid}, and the shim does not count it; "
        f"the agent cannot see whether it has loaded the shim: {MAPS_RIGHTS}"
    )
    return _finding(FindingKind.SHIM_UNKNOWN, _subject(process), uuid, sentence, (process,), grant)


def _over_limits(used: Mapping[tuple[str, str], Sequence[_Seen]], grants: Mapping[str, Grant], view: AuditView) -> Iterator[Finding]:
    for (grant_id, uuid), several in used.items():
        grant = grants[grant_id]
        if not grant.takes_part:  # admin access has no limit
            continue
        granted_bytes = sum(share.memory_bytes for share in grant.shares if share.device_uuid == uuid)
        limit_bytes = max(granted_bytes, view.burst_bytes.get((grant_id, uuid), 0))
        used_bytes = sum(one.use.used_bytes for one in several)
        if used_bytes <= limit_bytes + max(LEAST_SLACK_BYTES, limit_bytes // SLACK_PART):
            continue
        sentence = (
            f"container {grant.container} holds {units.format_memory(used_bytes)} of {uuid} according to the driver, but its limit is "
            f"{units.format_memory(limit_bytes)}"
        )
        yield _finding(FindingKind.OVER_LIMIT, grant_id, uuid, sentence, tuple(one.process for one in several), grant)


def _over_cores(view: AuditView) -> Iterator[Finding]:
    for (ref, uuid), busy in view.busy.items():
        processes = tuple(one.process for one in _seen_processes(view) if (one.ref, one.use.device_uuid) == (ref, uuid))
        owner = view.owner_of(ref, processes[0].pid if processes else 0)
        grants = [grant for grant in owner.grants if (grant.grant_id, uuid) in view.cores_percent]
        if len(grants) != 1:  # without cores, or of an unknown container of its pod
            continue
        grant, cores_percent = grants[0], view.cores_percent[grants[0].grant_id, uuid]
        if not busy.exceeds(cores_percent) or _is_exempt(owner, view):
            continue
        sentence = (
            f"kernels of container {grant.container} ran for {busy.percent:.0f} % of the time on {uuid} according to the driver, but it "
            f"was granted {cores_percent} % of the cores: its launches do not keep to the shim's limit"
        )
        found = _finding(FindingKind.OVER_CORES, grant.grant_id, uuid, sentence, processes, grant)
        yield replace(found, throttled_percent=busy.throttled_percent(cores_percent))


def _finding(kind: FindingKind, subject: str, uuid: str, sentence: str, processes: tuple[HostProcess, ...], grant: Grant) -> Finding:
    return Finding(kind, subject, uuid, sentence, processes, grant.holder, grant.pod_uid, grant.grant_id)


def _subject(process: HostProcess) -> str:
    """Return pid and start time: the kernel may reuse a pid, but the two together identify one process."""
    return f"{process.pid}/{process.start_ticks}"
