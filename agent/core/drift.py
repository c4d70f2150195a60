"""What is not as it should be on this node, and the cure of each: a look at all witnesses in, a list of drifts out.

Five witnesses are compared: the ledger in memory, the files on disk (rows, limits and regions, CDI specs), kubelet's PodResources, the pods
with their assignments, and the GPUs on the board. The driver's processes are the sixth (``core.audit``). Kept true: a node on which all
agree has no drift; a cure that works on files never changes what a container was promised; what no file can cure ends a pod only by
policy. Ends of grants are no drift but their normal end (``core.reconciliation``), unless a witness keeps the grant of a pod that is gone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent.core.borrowing import MOST_PERCENT
from agent.core.identity import HeldDevices, Holder
from agent.core.ledger import Grant
from agent.core.region_layout import DeviceLimit, Limits
from placement import mig
from proto import codec, contract, units
from proto.errors import ContractError
from proto.model import ContainerState, DeviceShare, Pod


class DriftKind(StrEnum):
    """What differs from what. Values of the label ``kind``."""

    STRAY_FILES = "stray-files"
    """Files on disk that belong to no grant."""
    LOST_ROW = "lost-row"
    """The ledger's row on disk is gone or says something else than the agent knows."""
    LOST_FILES = "lost-files"
    """The limits or the usage region of a container are gone."""
    CHANGED_LIMITS = "changed-limits"
    """The limits on disk are not what the container was granted."""
    LOST_SPEC = "lost-spec"
    """The container's CDI spec is gone or was changed."""
    POD_GONE = "pod-gone"
    """The pod is gone from the API, and kubelet or a process keeps its devices."""
    UNLISTED = "unlisted"
    """Kubelet no longer knows that a running container holds its IDs: its checkpoint was lost."""
    IDS_DIFFER = "ids-differ"
    """Kubelet lists a running container with other IDs than it was granted devices for."""
    UNGRANTED = "ungranted"
    """A container that asks for our devices runs, and no grant is known for it."""
    ASSIGNMENT_DIFFERS = "assignment-differs"
    """The pod's assignment names other devices than the container was granted."""
    UNKNOWN_DEVICE = "unknown-device"
    """A grant is of a device that this node no longer has."""


class Cure(StrEnum):
    """What makes it right again."""

    REMOVE = "remove"
    REWRITE = "rewrite"
    WAIT = "wait"
    """Nothing is to be done but to wait for the witness that holds it."""
    EVICT = "evict"
    """Only a new pod helps; done where the policy says so."""


CURES: Mapping[DriftKind, Cure] = {
    DriftKind.STRAY_FILES: Cure.REMOVE,
    DriftKind.LOST_ROW: Cure.REWRITE,
    DriftKind.LOST_FILES: Cure.REWRITE,
    DriftKind.CHANGED_LIMITS: Cure.REWRITE,
    DriftKind.LOST_SPEC: Cure.REWRITE,
    DriftKind.POD_GONE: Cure.WAIT,
    DriftKind.UNLISTED: Cure.EVICT,
    DriftKind.IDS_DIFFER: Cure.EVICT,
    DriftKind.UNGRANTED: Cure.EVICT,
    DriftKind.ASSIGNMENT_DIFFERS: Cure.EVICT,
    DriftKind.UNKNOWN_DEVICE: Cure.EVICT,
}


class DriftPolicy(StrEnum):
    """What is done about drift that no file can cure."""

    REPORT = "report"
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference. ``subject`` with ``kind`` is its identity from pass to pass: a grant id, or a container's name."""

    kind: DriftKind
    subject: str
    sentence: str
    holder: Holder | None = None
    pod_uid: str = ""

    @property
    def cure(self) -> Cure:
        """What makes it right again."""
        return CURES[self.kind]


@dataclass(frozen=True, slots=True)
class FilesOfGrant:
    """What lies on the disk under one grant id."""

    row: Grant | None = None
    limits: Limits | None = None
    written_limits: Limits | None = None
    """The limits as this agent wrote them, or first saw them; None while it did neither."""
    region: bool = False
    spec: str | None = None
    """Digest of the CDI spec."""
    written_spec: str | None = None
    """Digest of the CDI spec as this agent wrote it, or first saw it; None while it did neither."""


NO_FILES = FilesOfGrant()
_Listing = Mapping[tuple[str, str, str, str], Sequence[Set[str]]]
"""The IDs that kubelet lists, by namespace, pod, container and resource."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The witnesses, as of one pass. None stands for a witness that did not answer, and what it would say is not guessed."""

    grants: Mapping[str, Grant]
    files: Mapping[str, FilesOfGrant]
    """By grant id, of everything that lies there."""
    pods_by_uid: Mapping[str, Pod] | None = None
    held: Sequence[HeldDevices] | None = None
    device_uuids: Set[str] | None = None
    """What shares may name: GPUs and MIG instances."""
    waiting: Sequence[Grant] = field(default_factory=tuple)
    """Grants whose pod is gone and which another witness keeps (``core.reconciliation``)."""
    resources: Set[str] = frozenset()
    """Names of the resources this agent serves."""
    assigned: bool = True
    """Whether the scheduler's assignments bind; without it, placement is local."""
    profiles: Mapping[str, str] = field(default_factory=dict)
    """By what shares name, the profile of each MIG instance, or place for one, that the board shows."""


def find_drifts(snapshot: Snapshot) -> tuple[Drift, ...]:
    """Compare the witnesses."""
    drifts = [*_strays(snapshot)]
    for grant in snapshot.grants.values():
        drifts += _of_files(grant, snapshot.files.get(grant.grant_id, NO_FILES))
        drifts += _of_devices(grant, snapshot)
    drifts += [_drift(DriftKind.POD_GONE, grant, "its pod is gone, and its devices are still held") for grant in snapshot.waiting]
    if snapshot.pods_by_uid is not None:
        drifts += _of_pods(snapshot.grants.values(), snapshot.pods_by_uid, snapshot)
    return tuple(drifts)


def _strays(snapshot: Snapshot) -> Iterator[Drift]:
    for identifier in snapshot.files.keys() - snapshot.grants.keys():
        yield Drift(DriftKind.STRAY_FILES, identifier, f"files of {identifier} belong to no grant")


def _of_files(grant: Grant, files: FilesOfGrant) -> Iterator[Drift]:
    if files.row != grant:
        found = "is gone or damaged" if files.row is None else f"is of {files.row.holder}"
        yield _drift(DriftKind.LOST_ROW, grant, f"its row in the ledger on disk {found}")
    if files.limits is None or not files.region:
        missing = " and ".join(name for name, there in (("limits", files.limits), ("usage region", files.region)) if not there)
        yield _drift(DriftKind.LOST_FILES, grant, f"its {missing} cannot be read")
    elif not _are_granted(files.limits, grant) or _lasting(files.written_limits or files.limits) != _lasting(files.limits):
        yield _drift(DriftKind.CHANGED_LIMITS, grant, "its limits on disk are not what it was granted")
    if files.spec is None or files.written_spec not in (None, files.spec):
        yield _drift(DriftKind.LOST_SPEC, grant, f"its CDI spec {'is gone' if files.spec is None else 'was changed'}")


def _are_granted(limits: Limits, grant: Grant) -> bool:
    """Whether limits are those of a grant, as far as a grant says: devices, memory and cores (``core.limits`` writes them)."""
    said = [(device.uuid, device.memory_bytes) for device in limits.devices]
    granted = [(share.device_uuid, share.memory_bytes) for share in grant.shares]
    return said == granted and all(map(_has_cores, limits.devices, grant.shares))


def _has_cores(device: DeviceLimit, share: DeviceShare) -> bool:
    """Whether the limit of compute is what was granted; in weight mode it is at least that, since borrowing moves it."""
    cores = share.cores_percent or 0
    if device.sm_weight:
        return device.sm_weight == cores and min(cores, MOST_PERCENT) <= device.sm_percent <= MOST_PERCENT
    return device.sm_percent == cores


def _lasting(limits: Limits) -> Limits:
    """Return limits without what is measured (context, overhead), and what borrowing moves: no promise is changed by them."""
    return replace(
        limits,
        devices=tuple(
            replace(device, context_bytes=0, overhead_bytes=0, sm_percent=0 if device.sm_weight else device.sm_percent)
            for device in limits.devices
        ),
    )


def _of_devices(grant: Grant, snapshot: Snapshot) -> Iterator[Drift]:
    if snapshot.device_uuids is None:
        return
    unknown = [share.device_uuid for share in grant.shares if share.device_uuid not in snapshot.device_uuids]
    if unknown:
        sentence = f"this node no longer has {', '.join(unknown)}. Delete the pod so that it is placed anew"
        yield _drift(DriftKind.UNKNOWN_DEVICE, grant, sentence)


def _of_pods(grants: Iterable[Grant], pods_by_uid: Mapping[str, Pod], snapshot: Snapshot) -> Iterator[Drift]:
    granted = {(grant.pod_uid, grant.container, grant.resource): grant for grant in grants}
    listed = _by_container(snapshot.held) if snapshot.held is not None else None
    for grant in granted.values():
        pod = pods_by_uid.get(grant.pod_uid)
        if pod is None or not pod.active or pod.deletion_requested:
            continue
        if snapshot.assigned:
            yield from _of_assignment(grant, pod, snapshot.profiles)
        if listed is not None:
            yield from _of_listing(grant, pod, listed)
    yield from _ungranted(granted.keys(), pods_by_uid.values(), snapshot.resources)


def _of_assignment(grant: Grant, pod: Pod, profiles: Mapping[str, str]) -> Iterator[Drift]:
    if contract.ANNOTATION_ASSIGNMENT not in pod.annotations:
        return  # placed while placement was local: no witness speaks against it
    assigned = _assigned_shares(grant, pod, profiles)
    if assigned != grant.shares:
        named = ", ".join(f"{share.device_uuid} ({units.format_memory(share.memory_bytes)})" for share in assigned or ()) or "no device"
        has = ", ".join(f"{share.device_uuid} ({units.format_memory(share.memory_bytes)})" for share in grant.shares)
        yield _drift(DriftKind.ASSIGNMENT_DIFFERS, grant, f"its assignment names {named}, and it has {has}")


def _assigned_shares(grant: Grant, pod: Pod, profiles: Mapping[str, str]) -> tuple[DeviceShare, ...] | None:
    """Return what the assignment gives the container of the grant's resource; an assignment names the instances of all profiles together.

    An instance that the board does not show may be of any profile: it counts where it was granted.
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
    """PodResources omits ordinary init containers, and what has not started may still be given other IDs."""
    if pod.state_of(grant.container) is not ContainerState.RUNNING or _is_ordinary_init(pod, grant.container):
        return
    own = listed.get((pod.namespace, pod.name, grant.container, grant.resource))
    if own is None:
        sentence = "kubelet has forgotten its devices and may give them away. Delete the pod so that it gets others"
        yield _drift(DriftKind.UNLISTED, grant, sentence)
    elif frozenset(grant.device_ids) not in own:
        yield _drift(DriftKind.IDS_DIFFER, grant, "kubelet lists it with other device IDs. Delete the pod so that it is placed anew")


def _ungranted(granted: Set[tuple[str, str, str]], pods: Iterable[Pod], resources: Set[str]) -> Iterator[Drift]:
    """Kubelet starts a container without its devices when it lost its checkpoint and the plugin is not there at that moment."""
    for pod in pods:
        if not pod.active or pod.deletion_requested:
            continue
        for spec in pod.containers:
            asked = [resource for resource, amount in spec.limits.items() if resource in resources and amount != "0"]
            missing = [resource for resource in asked if (pod.uid, spec.name, resource) not in granted]
            if missing and pod.state_of(spec.name) is ContainerState.RUNNING:
                holder = Holder(pod.namespace, pod.name, spec.name)
                sentence = f"container {spec.name} asks for {', '.join(missing)} and runs, and no grant is known for it. Delete the pod"
                yield Drift(DriftKind.UNGRANTED, str(holder), sentence, holder, pod.uid)


def _is_ordinary_init(pod: Pod, container: str) -> bool:
    return any(spec.name == container and spec.init and not spec.restartable for spec in pod.containers)


def _drift(kind: DriftKind, grant: Grant, sentence: str) -> Drift:
    return Drift(kind, grant.grant_id, f"container {grant.container}: {sentence}", grant.holder, grant.pod_uid)
