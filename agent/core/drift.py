# SPDX-License-Identifier: Apache-2.0
"""Finds drift on this node: differences between the ledger and the other sources, each with its cure.

Five sources are compared: the ledger in memory, the files on disk (ledger rows, limits and regions, CDI specs), kubelet's PodResources, the
pods with their assignments, and the GPUs. ``core.audit`` compares the sixth, the driver's processes. Invariants: a node with sources that
agree has no drift. A cure that rewrites files never changes what a container was granted. Drift that no file can cure ends a pod only if
the policy allows it. The normal end of a grant is no drift (``core.reconciliation``), unless a source keeps the grant of a deleted pod.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent.core.borrowing import MOST_PERCENT
from agent.core.identity import HeldDevices, Holder
from agent.core.ledger import Grant
from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.errors import ContractError
from aliquot.contract.model import ContainerSpec, ContainerState, DeviceShare, Pod
from aliquot.placement import mig


class DriftKind(StrEnum):
    """The kind of difference. Values of the label ``kind``."""

    STRAY_FILES = "stray-files"
    """Files on disk belong to no grant."""
    LOST_ROW = "lost-row"
    """A grant's ledger row on disk is missing or differs from the agent's ledger."""
    LOST_FILES = "lost-files"
    """A container's limits file or usage region is missing or cannot be read."""
    CHANGED_LIMITS = "changed-limits"
    """A container's limits file differs from its grant."""
    LOST_SPEC = "lost-spec"
    """A container's CDI spec is missing or was changed."""
    DAMAGED_GRANT = "damaged-grant"
    """A grant's ledger row and its copy are both damaged; nothing more is granted on its GPU until its container has ended."""
    POD_GONE = "pod-gone"
    """The pod is deleted from the API, but kubelet or a process still holds its devices."""
    UNLISTED = "unlisted"
    """Kubelet no longer lists the device IDs of a running container, because it lost its checkpoint."""
    IDS_DIFFER = "ids-differ"
    """Kubelet lists a running container with other device IDs than its grant has."""
    UNGRANTED = "ungranted"
    """A running container requests this agent's devices but has no grant."""
    ASSIGNMENT_DIFFERS = "assignment-differs"
    """The pod's assignment names other devices than the container's grant."""
    UNKNOWN_DEVICE = "unknown-device"
    """A grant names a device that this node no longer has."""


class Cure(StrEnum):
    """How a drift is cured."""

    REMOVE = "remove"
    REWRITE = "rewrite"
    WAIT = "wait"
    """The agent can only wait until kubelet or the process lets the devices go."""
    EVICT = "evict"
    """Only a new pod helps. The agent evicts the pod if the policy allows it."""


CURES: Mapping[DriftKind, Cure] = {
    DriftKind.STRAY_FILES: Cure.REMOVE,
    DriftKind.LOST_ROW: Cure.REWRITE,
    DriftKind.LOST_FILES: Cure.REWRITE,
    DriftKind.CHANGED_LIMITS: Cure.REWRITE,
    DriftKind.LOST_SPEC: Cure.REWRITE,
    DriftKind.DAMAGED_GRANT: Cure.WAIT,
    DriftKind.POD_GONE: Cure.WAIT,
    DriftKind.UNLISTED: Cure.EVICT,
    DriftKind.IDS_DIFFER: Cure.EVICT,
    DriftKind.UNGRANTED: Cure.EVICT,
    DriftKind.ASSIGNMENT_DIFFERS: Cure.EVICT,
    DriftKind.UNKNOWN_DEVICE: Cure.EVICT,
}


class DriftPolicy(StrEnum):
    """What the agent does about drift that no file can cure."""

    REPORT = "report"
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference. ``subject``, a grant id or a container's name, identifies it from pass to pass together with ``kind``."""

    kind: DriftKind
    subject: str
    sentence: str
    holder: Holder | None = None
    pod_uid: str = ""

    @property
    def cure(self) -> Cure:
        """How the drift is cured."""
        return CURES[self.kind]


@dataclass(frozen=True, slots=True)
class FilesOfGrant:
    """The files on disk under one grant id."""

    row: Grant | None = None
    limits: Limits | None = None
    written_limits: Limits | None = None
    """The limits as this agent wrote or first saw them; None if it has done neither."""
    region: bool = False
    spec: str | None = None
    """Digest of the CDI spec."""
    written_spec: str | None = None
    """Digest of the CDI spec as this agent wrote or first saw it; None if it has done neither."""


NO_FILES = FilesOfGrant()
_Listing = Mapping[tuple[str, str, str, str], Sequence[Set[str]]]
"""The IDs that kubelet lists, by namespace, pod, container and resource."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The sources, as read in one pass. None: the source did not answer, and comparisons with it are skipped."""

    grants: Mapping[str, Grant]
    files: Mapping[str, FilesOfGrant]
    """By grant id, for all files on disk."""
    pods_by_uid: Mapping[str, Pod] | None = None
    held: Sequence[HeldDevices] | None = None
    device_uuids: Set[str] | None = None
    """The names that shares may use: GPUs and MIG instances."""
    waiting: Sequence[Grant] = field(default_factory=tuple)
    """Grants of deleted pods that another source still holds (``core.reconciliation``)."""
    resources: Set[str] = frozenset()
    """Names of the resources this agent serves."""
    assigned: bool = True
    """Whether the scheduler's assignments are binding; False with local placement."""
    profiles: Mapping[str, str] = field(default_factory=dict)
    """The profile of each known MIG instance or place for one, by the name that shares use."""
    unclear: Mapping[str, Set[str]] = field(default_factory=dict)
    """The devices of each grant with a damaged row and copy, by grant id; empty if they are unknown."""
    unclear_holders: Mapping[str, tuple[Holder, str]] = field(default_factory=dict)
    """The container and the pod UID of such a grant, where kubelet lists its device IDs."""


def find_drifts(snapshot: Snapshot) -> tuple[Drift, ...]:
    """Compare the sources."""
    drifts = [*_strays(snapshot), *_unclear(snapshot)]
    for grant in snapshot.grants.values():
        drifts += _of_files(grant, snapshot.files.get(grant.grant_id, NO_FILES))
        drifts += _of_devices(grant, snapshot)
    drifts += [_drift(DriftKind.POD_GONE, grant, "its pod is deleted, but its devices are still held") for grant in snapshot.waiting]
    if snapshot.pods_by_uid is not None:
        drifts += _of_pods(snapshot.grants.values(), snapshot.pods_by_uid, snapshot)
    return tuple(drifts)


def _strays(snapshot: Snapshot) -> Iterator[Drift]:
    for identifier in snapshot.files.keys() - snapshot.grants.keys() - snapshot.unclear.keys():
        yield Drift(DriftKind.STRAY_FILES, identifier, f"files of {identifier} belong to no grant")


def _unclear(snapshot: Snapshot) -> Iterator[Drift]:
    for identifier, devices in snapshot.unclear.items():
        where = ", ".join(sorted(devices)) or "any GPU of this node"
        holder, pod_uid = snapshot.unclear_holders.get(identifier, (None, ""))
        subject = f"container {holder.container}" if holder is not None else f"a container with grant {identifier}"
        sentence = (
            f"{subject}: its ledger row and the copy of it are damaged. It may run on {where}, where nothing more is granted until it has "
            "ended. Delete its pod"
        )
        yield Drift(DriftKind.DAMAGED_GRANT, identifier, sentence, holder, pod_uid)


def _of_files(grant: Grant, files: FilesOfGrant) -> Iterator[Drift]:
    if files.row != grant:
        found = "is missing or damaged" if files.row is None else f"belongs to {files.row.holder}"
        yield _drift(DriftKind.LOST_ROW, grant, f"its row in the ledger on disk {found}")
    yield from _of_shim_files(grant, files)
    if files.spec is None or files.written_spec not in (None, files.spec):
        yield _drift(DriftKind.LOST_SPEC, grant, f"its CDI spec {'is missing' if files.spec is None else 'was changed'}")


def _of_shim_files(grant: Grant, files: FilesOfGrant) -> Iterator[Drift]:
    """Compare the files that the container's shim maps: limits and usage region."""
    if files.limits is None or not files.region:
        missing = " and ".join(name for name, there in (("limits", files.limits), ("usage region", files.region)) if not there)
        yield _drift(DriftKind.LOST_FILES, grant, f"its {missing} cannot be read")
    elif not _are_granted(files.limits, grant) or _fixed_part(files.written_limits or files.limits, grant) != _fixed_part(
        files.limits, grant
    ):
        yield _drift(DriftKind.CHANGED_LIMITS, grant, "its limits on disk differ from its grant")


def _are_granted(limits: Limits, grant: Grant) -> bool:
    """Whether limits match the part that a grant determines: devices, memory and cores (``core.limits`` writes them)."""
    found = [(device.uuid, device.memory_bytes) for device in limits.devices]
    granted = [(share.device_uuid, share.memory_bytes) for share in grant.shares]
    return found == granted and all(map(_has_cores, limits.devices, grant.shares))


def _has_cores(device: DeviceLimit, share: DeviceShare) -> bool:
    """Whether the SM limit matches the grant. In weight mode it is at least the granted value, because borrowing raises it. Without cores
    it is any value, because a container then uses what the others do not. A fixed limit may be lower, because the audit lowers it
    (``services.throttle``); a change by another program differs from the written limits."""
    cores = share.cores_percent or 0
    if not cores:  # it may use what the others do not
        return not device.sm_weight and device.sm_percent <= MOST_PERCENT
    if device.sm_weight:
        return device.sm_weight == cores and min(cores, MOST_PERCENT) <= device.sm_percent <= MOST_PERCENT
    return device.sm_percent == cores or 0 < device.sm_percent < cores


def _fixed_part(limits: Limits, grant: Grant) -> Limits:
    """Return limits without measured values (context, overhead) and without what borrowing changes: they do not affect the grant."""
    cores = {share.device_uuid: share.cores_percent for share in grant.shares}
    return replace(
        limits,
        devices=tuple(
            replace(
                device,
                context_bytes=0,
                overhead_bytes=0,
                sm_percent=0 if device.sm_weight or not cores.get(device.uuid) else device.sm_percent,
            )
            for device in limits.devices
        ),
    )


def _of_devices(grant: Grant, snapshot: Snapshot) -> Iterator[Drift]:
    if snapshot.device_uuids is None:
        return
    unknown = [share.device_uuid for share in grant.shares if share.device_uuid not in snapshot.device_uuids]
    if unknown:
        sentence = f"this node no longer has {', '.join(unknown)}. Delete the pod so that it is placed again"
        yield _drift(DriftKind.UNKNOWN_DEVICE, grant, sentence)


def _of_pods(grants: Iterable[Grant], pods_by_uid: Mapping[str, Pod], snapshot: Snapshot) -> Iterator[Drift]:
    granted = {(grant.pod_uid, grant.container, grant.resource): grant for grant in grants if grant.claim is None}
    yield from _of_active_pods(granted.values(), pods_by_uid, snapshot)
    damaged = {holder for holder, _ in snapshot.unclear_holders.values()}  # they have a grant that cannot be read
    yield from (drift for drift in _ungranted(granted.keys(), pods_by_uid.values(), snapshot.resources) if drift.holder not in damaged)


def _of_active_pods(grants: Iterable[Grant], pods_by_uid: Mapping[str, Pod], snapshot: Snapshot) -> Iterator[Drift]:
    """Compare grants with the assignment and with PodResources; not for pods that have ended or are being deleted."""
    listed = _by_container(snapshot.held) if snapshot.held is not None else None
    for grant in grants:
        pod = pods_by_uid.get(grant.pod_uid)
        if pod is None or not pod.active or pod.deletion_requested:
            continue
        if snapshot.assigned:
            yield from _of_assignment(grant, pod, snapshot.profiles)
        if listed is not None:
            yield from _of_listing(grant, pod, listed)


def _of_assignment(grant: Grant, pod: Pod, profiles: Mapping[str, str]) -> Iterator[Drift]:
    if contract.ANNOTATION_ASSIGNMENT not in pod.annotations:
        return  # placed while placement was local: there is no assignment to compare with
    assigned = _assigned_shares(grant, pod, profiles)
    if assigned != grant.shares:
        named = ", ".join(f"{share.device_uuid} ({units.format_memory(share.memory_bytes)})" for share in assigned or ()) or "no device"
        has = ", ".join(f"{share.device_uuid} ({units.format_memory(share.memory_bytes)})" for share in grant.shares)
        yield _drift(DriftKind.ASSIGNMENT_DIFFERS, grant, f"its assignment names {named}, but it was granted {has}")


def _assigned_shares(grant: Grant, pod: Pod, profiles: Mapping[str, str]) -> tuple[DeviceShare, ...] | None:
    """Return the shares of the grant's resource that the assignment gives the container.

    An assignment lists the container's MIG instances of all profiles together. An instance that the driver does not show may have any
    profile: it counts if the grant has it.
    """
    try:
        assignment = codec.decode_assignment(pod.annotations[contract.ANNOTATION_ASSIGNMENT], pod_uid=pod.uid)
    except ContractError:
        return None
    assigned = assignment.of(grant.container)
    if assigned is None or grant.resource == contract.RESOURCE_VGPU:
        return assigned.shares if assigned is not None else None
    profile = mig.profile_of_resource(grant.resource)
    return tuple(
        share
        for share in assigned.shares
        if (profiles[share.device_uuid] == profile if share.device_uuid in profiles else share in grant.shares)
    )


def _by_container(held: Iterable[HeldDevices]) -> _Listing:
    listed: defaultdict[tuple[str, str, str, str], list[Set[str]]] = defaultdict(list)
    for one in held:
        listed[one.namespace, one.pod, one.container, one.resource].append(one.device_ids)
    return listed


def _of_listing(grant: Grant, pod: Pod, listed: _Listing) -> Iterator[Drift]:
    """Compare the grant with PodResources.

    Only for running containers, because kubelet may still change the IDs of others; and PodResources omits ordinary init containers.
    """
    if pod.state_of(grant.container) is not ContainerState.RUNNING or _is_ordinary_init(pod, grant.container):
        return
    own = listed.get((pod.namespace, pod.name, grant.container, grant.resource))
    if own is None:
        sentence = "kubelet no longer lists its devices and may give them to another pod. Delete the pod so that it gets other devices"
        yield _drift(DriftKind.UNLISTED, grant, sentence)
    elif frozenset(grant.device_ids) not in own:
        yield _drift(DriftKind.IDS_DIFFER, grant, "kubelet lists it with other device IDs. Delete the pod so that it is placed again")


def ungranted_containers(grants: Iterable[Grant], pods: Iterable[Pod], resources: Set[str]) -> bool:
    """Whether a container runs that requested a resource and has no grant."""
    return any(_ungranted({(grant.pod_uid, grant.container, grant.resource) for grant in grants}, pods, resources))


def _ungranted(granted: Set[tuple[str, str, str]], pods: Iterable[Pod], resources: Set[str]) -> Iterator[Drift]:
    """Find running containers without a grant.

    Kubelet starts a container without its devices when it lost its checkpoint and the plugin is not registered at that moment.
    """
    for pod in pods:
        if not pod.active or pod.deletion_requested:
            continue
        for spec in pod.containers:
            missing = [resource for resource in _requested(spec, resources) if (pod.uid, spec.name, resource) not in granted]
            if missing and pod.state_of(spec.name) is ContainerState.RUNNING:
                holder = Holder(pod.namespace, pod.name, spec.name)
                sentence = f"container {spec.name} requests {', '.join(missing)} and runs without a grant. Delete the pod"
                yield Drift(DriftKind.UNGRANTED, str(holder), sentence, holder, pod.uid)


def _requested(spec: ContainerSpec, resources: Set[str]) -> list[str]:
    return [resource for resource, amount in spec.limits.items() if resource in resources and amount != "0"]


def _is_ordinary_init(pod: Pod, container: str) -> bool:
    return any(spec.name == container and spec.init and not spec.restartable for spec in pod.containers)


def _drift(kind: DriftKind, grant: Grant, sentence: str) -> Drift:
    return Drift(kind, grant.grant_id, f"container {grant.container}: {sentence}", grant.holder, grant.pod_uid)
