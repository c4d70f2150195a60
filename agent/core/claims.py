# SPDX-License-Identifier: Apache-2.0
"""Turns an allocated ResourceClaim into grants, or into a refusal.

A grant is for one request, or for those that a container uses together (``core.claim_groups``): a container has one limits file.

Devices and amounts come from the claim's allocation, which kube-scheduler or another allocator wrote. The ledger has the last word: what
does not fit beside all other grants, of claims and of the device plugin, is refused. Pure.
Source: https://pkg.go.dev/k8s.io/api/resource/v1#ResourceClaim
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from agent.core.backends import Abilities
from agent.core.identity import claim_grant_id
from agent.core.inventory import DeviceInventory, InventoryDevice
from agent.core.ledger import ClaimedDevice, ClaimRequest, Grant, Ledger, requests_text
from agent.core.limits import may_burst
from agent.core.mig_devices import find_instance
from agent.core.owners import used_by, users_in
from agent.core.planning import Planned
from agent.core.refusal import Reason, Refusal
from agent.core.slices import CAPACITY_CORES, CAPACITY_MEMORY, find_device, profile_bytes
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError, QuantityError
from aliquot.contract.features import Gate
from aliquot.contract.model import DeviceShare, Isolation, MigInstance, Pod, Preferences
from aliquot.contract.parameters import preferences_of
from aliquot.kube.requests import timestamp
from aliquot.placement import mig
from aliquot.placement.device import AccountingError, DeviceState, whole_instance
from aliquot.placement.fit import Reject

_AGAIN: Final = (
    "The agent tries again when kubelet retries. If the GPU does not come back, delete the pod so that the claim is allocated again"
)


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A ResourceClaim as kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class AllocatedDevice:
    """One device of an allocation."""

    pool: str
    device: str
    share_id: str
    admin: bool
    consumed: Mapping[str, str]
    """Quantities by the name of the capacity."""


@dataclass(frozen=True, slots=True)
class AllocatedRequest:
    """One request with the devices of this driver, in the order in which the program sees them."""

    name: str
    devices: tuple[AllocatedDevice, ...]
    cores_stated: bool
    """Whether the claim states cores. Otherwise the container reserves no cores, and uses what is free."""
    parameters: tuple[msgspec.Raw, ...]

    @property
    def admin(self) -> bool:
        """Whether it uses its devices beside all other claims."""
        return any(device.admin for device in self.devices)


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """The requests of one grant, in the order of the claim."""

    requests: tuple[AllocatedRequest, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the requests."""
        return tuple(request.name for request in self.requests)

    @property
    def admin(self) -> bool:
        """Whether it uses devices beside all other claims."""
        return any(request.admin for request in self.requests)

    @property
    def devices(self) -> tuple[tuple[AllocatedRequest, AllocatedDevice], ...]:
        """All devices, each with its request."""
        return tuple((request, device) for request in self.requests for device in request.devices)

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names of the devices, each once."""
        return tuple(dict.fromkeys(device.device for _, device in self.devices))

    def __str__(self) -> str:
        return requests_text(self.names)


@dataclass(frozen=True, slots=True)
class AllocatedClaim:
    """What a claim's object says to this driver."""

    uid: str
    requests: tuple[AllocatedRequest, ...]
    """Empty while the claim is not allocated, or has no device of this driver."""
    allocated: bool
    pods: tuple[tuple[str, str], ...]
    """Name and UID of the pods for which the claim is reserved."""
    reserved: bool
    """Whether it is reserved for anything: a pod, or a group of pods. The members of a group are not listed."""


@dataclass(frozen=True, slots=True)
class ClaimNode:
    """The node's state for a decision about claims."""

    secret: bytes
    boot_id: str
    pool: str
    shares_per_gpu: int
    inventory: DeviceInventory
    ledger: Ledger
    abilities: Abilities
    pods: Mapping[str, Pod]
    """By UID."""
    admin_access: bool = False
    """Whether claims with ``adminAccess`` are served."""


# --- the claim's object ---


class _Capacity(msgspec.Struct):
    requests: dict[str, Any] | None = None


class _Exactly(msgspec.Struct):
    name: str = ""
    capacity: _Capacity | None = None


class _SpecRequest(msgspec.Struct, rename="camel"):
    name: str
    exactly: _Exactly | None = None
    first_available: list[_Exactly] | None = None


class _SpecDevices(msgspec.Struct):
    requests: list[_SpecRequest] | None = None


class _Spec(msgspec.Struct):
    devices: _SpecDevices = msgspec.field(default_factory=_SpecDevices)


class _Result(msgspec.Struct, rename="camel"):
    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: dict[str, str] | None = None


class _Opaque(msgspec.Struct):
    driver: str
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class _Config(msgspec.Struct):
    source: str = ""
    requests: list[str] | None = None
    opaque: _Opaque | None = None


class _AllocatedDevices(msgspec.Struct):
    results: list[_Result] | None = None
    config: list[_Config] | None = None


class _Allocation(msgspec.Struct):
    devices: _AllocatedDevices = msgspec.field(default_factory=_AllocatedDevices)


class _Consumer(msgspec.Struct):
    resource: str = ""
    name: str = ""
    uid: str = ""


class _Status(msgspec.Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = None


class _Metadata(msgspec.Struct):
    uid: str


class _Claim(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_DECODER = msgspec.json.Decoder(_Claim)


def decode_claim(body: bytes) -> AllocatedClaim:
    """Read a ResourceClaim. Raises ContractError when it has another form than the API's."""
    try:
        claim = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ContractError(f"the API returned a ResourceClaim that cannot be read: {exc}") from exc
    except RecursionError as exc:  # opaque parameters, also those for other drivers, may be nested as deep as their 10 KiB allow
        raise ContractError("the ResourceClaim cannot be read: its values are nested too deeply") from exc
    allocation = claim.status.allocation
    pods = tuple((one.name, one.uid) for one in claim.status.reserved_for or () if one.resource == "pods")
    requests = _requests(claim, allocation) if allocation is not None else ()
    return AllocatedClaim(claim.metadata.uid, requests, allocation is not None, pods, bool(claim.status.reserved_for))


def _requests(claim: _Claim, allocation: _Allocation) -> tuple[AllocatedRequest, ...]:
    configs = sorted(allocation.devices.config or (), key=lambda config: config.source != "FromClass")  # the claim's own take precedence
    stated = _stated_cores(claim.spec.devices.requests or ())
    return tuple(
        AllocatedRequest(
            _main(request),
            tuple(_allocated(result) for result in of_request),
            stated.get(request, False),
            tuple(_parameters(request, configs)),
        )
        for request, of_request in _own_results(allocation).items()
    )


def _own_results(allocation: _Allocation) -> Mapping[str, Sequence[_Result]]:
    """Return the devices of this driver by request, or subrequest."""
    results: dict[str, list[_Result]] = {}
    for result in allocation.devices.results or ():
        if result.driver == contract.DRA_DRIVER:
            results.setdefault(result.request, []).append(result)
    return results


def _main(request: str) -> str:
    """Return the request that containers name: ``gpu`` for the subrequest ``gpu/large``."""
    return request.partition("/")[0]


def _allocated(result: _Result) -> AllocatedDevice:
    return AllocatedDevice(
        result.pool, result.device, result.share_id or "", bool(result.admin_access), dict(result.consumed_capacity or {})
    )


def _stated_cores(requests: Sequence[_SpecRequest]) -> Mapping[str, bool]:
    """Return by request, or subrequest, whether it states cores."""
    stated = {one.name: _states_cores(one.exactly) for one in requests}
    return stated | {f"{one.name}/{sub.name}": _states_cores(sub) for one in requests for sub in one.first_available or ()}


def _states_cores(request: _Exactly | None) -> bool:
    return request is not None and request.capacity is not None and CAPACITY_CORES in (request.capacity.requests or {})


def _parameters(request: str, configs: Sequence[_Config]) -> Sequence[msgspec.Raw]:
    return [
        one.opaque.parameters
        for one in configs
        if one.opaque is not None
        and one.opaque.driver == contract.DRA_DRIVER
        and (not one.requests or request in one.requests or _main(request) in one.requests)
    ]


# --- the decision ---


def plan_group(ref: ClaimRef, claim: AllocatedClaim, group: RequestGroup, node: ClaimNode) -> Planned | Refusal:
    """Decide what the requests of one grant get."""
    preferences = _preferences(ref, group, node)
    if isinstance(preferences, Refusal):
        return preferences
    if (impossible := _devices_trouble(ref, group) or _admin_trouble(ref, group, node)) is not None:
        return impossible
    parts = []
    for request, allocated in group.devices:
        part = _share(ref, allocated, request, group, preferences, node)
        if isinstance(part, Refusal):
            return part
        parts.append(part)
    identifier = claim_grant_id(node.secret, ref.uid, group.names[0])
    replaced = _replaced(ref, group, identifier, node.ledger)
    if (no_room := _room_trouble(ref, parts, node, {identifier, *(grant.grant_id for grant in replaced)})) is not None:
        return no_room
    grant = _grant(ref, claim, group, node, identifier, tuple(parts), preferences)
    return _second_grant(grant, claim, node) or Planned(grant, replaced, preferences)


def _preferences(ref: ClaimRef, group: RequestGroup, node: ClaimNode) -> Preferences | Refusal:
    """Return the preferences of a container: one limits file has room for those of one request."""
    try:
        found = [preferences_of(request.parameters) for request in group.requests]
    except ContractError as exc:
        return Refusal(Reason.REQUEST_INVALID, f"claim {ref}: {exc}")
    if any(preferences != found[0] for preferences in found):
        return Refusal(
            Reason.REQUEST_INVALID,
            f"claim {ref}: one container uses {group}, but their parameters differ (isolation or priority, for example). One "
            "container needs one set of parameters: give these requests the same",
        )
    if trouble := _preferences_trouble(found[0], node.abilities):
        return Refusal(Reason.ISOLATION_UNAVAILABLE, f"claim {ref}: {trouble}")
    return found[0]


def _replaced(ref: ClaimRef, group: RequestGroup, identifier: str, ledger: Ledger) -> tuple[Grant, ...]:
    """Return other grants for the same requests. They are left from a try that ended half-way, or from before a reboot: no container has
    them, as long as ``claim_groups`` keeps what was prepared as a whole.
    """
    wanted = set(group.names)
    return tuple(
        grant
        for grant in ledger.of_claim(ref.uid)
        if grant.claim is not None and grant.grant_id != identifier and not wanted.isdisjoint(grant.claim.names)
    )


def _second_grant(grant: Grant, claim: AllocatedClaim, node: ClaimNode) -> Refusal | None:
    """Return a refusal if a container would get a second grant: it has one limits file, so the other GPUs would have no limit."""
    for pod in (node.pods[uid] for _, uid in claim.pods if uid in node.pods):
        users = set(users_in(grant, pod))
        for other in used_by(pod, node.ledger.grants.values()):
            twice = sorted(users.intersection(users_in(other, pod)))
            if twice and other.owner_uid != grant.owner_uid and not _is_of_namesake(other, grant):
                return Refusal(
                    Reason.REQUEST_INVALID,
                    f"container {twice[0]} of pod {pod.namespace}/{pod.name} uses {_wanted(other)} and {_wanted(grant)}. "
                    f"{_one_only(other)}",
                )
    return None


def _wanted(grant: Grant) -> str:
    """Return what a container asked for to have a grant, for messages."""
    return str(grant.claim) if grant.claim is not None else "its vGPUs"


def _one_only(other: Grant) -> str:
    """Return what to do about a container that has another grant already."""
    if other.claim is None:
        return "A container can use one: remove the claim or the resource"
    return "A container can use one claim: write one claim with several requests, or a count"


def _is_of_namesake(other: Grant, grant: Grant) -> bool:
    """Whether a grant is of an earlier claim with this name. A pod refers to a claim by name, so only its last one is the pod's."""
    return (
        other.claim is not None
        and grant.claim is not None
        and (other.namespace, other.claim.name) == (grant.namespace, grant.claim.name)
        and other.claim.uid != grant.claim.uid
    )


def _admin_trouble(ref: ClaimRef, group: RequestGroup, node: ClaimNode) -> Refusal | None:
    """Return a refusal if a request has admin access that this node does not grant, or that another one of the container lacks."""
    if not group.admin:
        return None
    if not all(request.admin for request in group.requests):
        return Refusal(
            Reason.REQUEST_INVALID,
            f"claim {ref}: one container uses {group}, but not all of them have adminAccess. With it a container has no limit: use the "
            "requests in separate containers",
        )
    if node.admin_access:
        return None
    return Refusal(
        Reason.REQUEST_INVALID,
        f"claim {ref} requests adminAccess, which this node does not grant: remove adminAccess from the claim, or set draAdminAccess: true "
        "for the agent",
    )


def _devices_trouble(ref: ClaimRef, group: RequestGroup) -> Refusal | None:
    """Return a refusal if the limits file of a container cannot have these devices. kube-scheduler gives each request a device once."""
    number, most = len(group.device_names), contract.MAX_DEVICES_PER_CONTAINER
    if number > most:
        have = "have" if len(group.requests) > 1 else "has"
        return Refusal(Reason.REQUEST_INVALID, f"claim {ref}: {group} {have} {number} devices; a container can have {most}")
    for request in group.requests:
        names = [one.device for one in request.devices]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            return Refusal(
                Reason.REQUEST_INVALID,
                f"claim {ref}: request {request.name} was allocated device {twice[0]} twice. "
                "Delete the pod so that the claim is allocated again",
            )
    return None


def _preferences_trouble(preferences: Preferences, abilities: Abilities) -> str:
    if not may_burst(preferences):
        return ""
    if closed := abilities.gates.closed(Gate.MEMORY_BURST):
        return f"memoryBurst is not available on this node: {closed}"
    if (preferences.memory_burst or 1.0) > abilities.most_memory_burst:
        return f"memoryBurst {preferences.memory_burst:g} exceeds {abilities.most_memory_burst:g}, the most that this node allows"
    return "memoryBurst needs isolation shim" if preferences.isolation is Isolation.EXCLUSIVE else ""


def _share(
    ref: ClaimRef, allocated: AllocatedDevice, request: AllocatedRequest, group: RequestGroup, preferences: Preferences, node: ClaimNode
) -> DeviceShare | Refusal:
    """Return the part of a device that a claim was allocated."""
    if (found := find_instance(node.inventory, allocated.device)) is not None and allocated.pool == node.pool:
        return _instance(ref, *found, request, preferences, node)
    entry = find_device(node.inventory, allocated.device)
    if entry is None or allocated.pool != node.pool:
        return _unknown(ref, allocated, node)
    if entry.device.mig_enabled and (impossible := _shared_instance_trouble(ref, entry, group, preferences)) is not None:
        return impossible
    if request.admin:  # also on a GPU that takes no new work: monitoring must see it
        return DeviceShare(entry.device.uuid, 0)
    if (unusable := _unusable(ref, entry, node)) is not None:
        return unusable
    return _part(ref, entry, allocated, request, preferences)


def _shared_instance_trouble(ref: ClaimRef, entry: InventoryDevice, group: RequestGroup, preferences: Preferences) -> Refusal | None:
    """Return a refusal if a claim cannot have a share of this GPU, which is in MIG mode: such a share uses an instance with others."""
    if whole_instance(entry.device) is None:
        return Refusal(Reject.MIG_MODE, f"claim {ref} was allocated {entry.device.uuid}, which is in MIG mode now. Delete the pod")
    where = f"claim {ref} was allocated a share of {entry.device.uuid}, which is in MIG mode"
    other = f"request class {contract.DRA_CLASS}"
    if len(group.device_names) > 1:
        only_one = f"{where}, beside other devices: a program can use one MIG instance only. To have several, {other}"
        return Refusal(Reason.REQUEST_INVALID, only_one)
    if group.admin or preferences.isolation not in (None, Isolation.SHIM) or may_burst(preferences):
        return Refusal(
            Reason.REQUEST_INVALID,
            f"{where}: adminAccess, memoryBurst and isolation other than shim are not available there. For them, {other}",
        )
    return None


def _part(
    ref: ClaimRef, entry: InventoryDevice, allocated: AllocatedDevice, request: AllocatedRequest, preferences: Preferences
) -> DeviceShare | Refusal:
    """Return what a claim consumes of a GPU."""
    whole_bytes = DeviceState(entry.device).capacity_bytes
    try:
        memory_bytes = _amount(allocated, CAPACITY_MEMORY, profile_bytes(allocated.device) or whole_bytes)
        cores = _amount(allocated, CAPACITY_CORES, 1) if request.cores_stated else None
    except QuantityError as exc:
        return Refusal(Reason.REQUEST_INVALID, f"claim {ref}: consumedCapacity of device {allocated.device}: {exc}")
    if preferences.isolation is not Isolation.EXCLUSIVE:
        return DeviceShare(entry.device.uuid, memory_bytes, cores)
    if memory_bytes != whole_bytes:
        return Refusal(
            Reason.REQUEST_INVALID,
            f"claim {ref}: isolation exclusive is a whole GPU, but the claim requests {units.format_memory(memory_bytes)} of "
            f"{units.format_memory(whole_bytes)}. Remove the capacity from the request, or use isolation shim",
        )
    return DeviceShare(entry.device.uuid, whole_bytes, units.WHOLE_GPU_PERCENT)


def _unknown(ref: ClaimRef, allocated: AllocatedDevice, node: ClaimNode) -> Refusal:
    if allocated.pool == node.pool and node.inventory.unidentified:
        return Refusal(
            Reason.NOT_READY,
            f"claim {ref} was allocated device {allocated.device}. It may be a GPU that has not answered since the agent started: "
            f"{'; '.join(node.inventory.unidentified)}. {_AGAIN}",
        )
    return Refusal(
        Reason.DEVICE_UNKNOWN,
        f"claim {ref} was allocated device {allocated.device} of pool {allocated.pool}, which this node does not have. "
        "Delete the pod so that the claim is allocated again",
    )


def _instance(
    ref: ClaimRef, entry: InventoryDevice, instance: MigInstance, request: AllocatedRequest, preferences: Preferences, node: ClaimNode
) -> DeviceShare | Refusal:
    """Return the share of a MIG instance, or of a place where the agent makes one."""
    if preferences.isolation not in (None, Isolation.MIG) or may_burst(preferences):
        return Refusal(
            Reason.REQUEST_INVALID,
            f"claim {ref}: a MIG instance is a fixed part of a GPU: remove isolation and memoryBurst from the parameters",
        )
    if request.admin and instance.on_demand:
        return Refusal(Reason.REQUEST_INVALID, f"claim {ref}: adminAccess is not available for MIG instances that do not exist yet")
    if (unusable := _unusable(ref, entry, node)) is not None and not request.admin:
        return unusable
    return DeviceShare(instance.uuid, 0 if request.admin else instance.memory_bytes)


def _amount(allocated: AllocatedDevice, capacity: str, default: int) -> int:
    """Return a consumed capacity, in bytes or percent. Raises QuantityError unless it is a whole number of at least 1."""
    text = allocated.consumed.get(capacity)
    return default if text is None else units.parse_count(text)


def _unusable(ref: ClaimRef, entry: InventoryDevice, node: ClaimNode) -> Refusal | None:
    uuid = entry.device.uuid
    if entry.silent and not entry.answers:
        return Refusal(
            Reason.NOT_READY,
            f"claim {ref} was allocated {uuid}, which does not answer now: {entry.trouble}. {_AGAIN}",
        )
    # A GPU that answers again takes no new claims for a while, in case it stops again. This claim was allocated before.
    if not entry.healthy and not entry.silent:
        return Refusal(
            Reject.UNHEALTHY,
            f"claim {ref} was allocated {uuid}, which takes no new work: {entry.trouble}. The agent checks again when kubelet retries; "
            "delete the pod so that the claim is allocated again",
        )
    if node.ledger.unclear_on(entry.grantable_uuids):
        return Refusal(
            Reason.LEDGER_DAMAGED,
            f"claim {ref} was allocated {uuid}, where a container with a damaged ledger row may run. "
            "aliquot drift shows damaged-grant; delete the pod it names",
        )
    return None


def _room_trouble(ref: ClaimRef, shares: Sequence[DeviceShare], node: ClaimNode, own: Set[str]) -> Refusal | None:
    """Return a refusal if the shares do not fit beside all other grants of this node. Args: own: ids of the grants that are replaced."""
    others = node.ledger.releasing(own)
    shares = [share for share in shares if share.memory_bytes]  # admin access takes no part of a device
    named = frozenset(share.device_uuid for share in shares)
    states = list(others.states(node.inventory, node.shares_per_gpu, named))
    for share in shares:
        position, state = next((number, state) for number, state in enumerate(states) if state.carries(share))
        try:
            states[position] = _with_share(state, share)
        except AccountingError:
            return _no_room(ref, share, state, others)
    return None


def _no_room(ref: ClaimRef, share: DeviceShare, state: DeviceState, others: Ledger) -> Refusal:
    """Return a refusal that names what the share's device has free, and who has the rest."""
    holders = ", ".join(_holders_of(state, share, others)) or "another request of this claim"
    free = f"{state.free_cores_percent} percent and {state.free_shares} shares free"
    free = f"{units.format_memory(state.free_memory_bytes)}, {free}" if state.leaves_shares else "MIG instances in use"
    cores = "no reserved cores" if share.cores_percent is None else f"{share.cores_percent} percent of cores"
    return Refusal(
        Reason.OVERCOMMITTED,
        f"claim {ref} was allocated {units.format_memory(share.memory_bytes)} and {cores} of {share.device_uuid}, which has {free}. "
        f"Already granted there: {holders}. Delete the pod so that the claim is allocated again",
    )


def _holders_of(state: DeviceState, share: DeviceShare, ledger: Ledger) -> Sequence[str]:
    """Return who has what is in the way of a share. In MIG mode, a grant with any name on the GPU may be."""
    device = state.device
    names = (device.uuid, *(one.uuid for one in device.mig_instances)) if device.mig_enabled else (share.device_uuid,)
    return [holder for name in names for holder in ledger.holders_on(name)]


def _with_share(state: DeviceState, share: DeviceShare) -> DeviceState:
    """Promise a share. Raises AccountingError if the device has no room for it, also because another instance overlaps it."""
    instance = next((one for one in state.device.mig_instances if one.uuid == share.device_uuid), None)
    if instance is not None and instance not in mig.free_instances(state, instance.profile):
        raise AccountingError(f"expected no instance that overlaps {instance.uuid}, found {sorted(state.used_instances)}")
    return state.with_share(share)


def _resource(shares: Sequence[DeviceShare], inventory: DeviceInventory) -> str:
    """Return the resource of a request's devices. Raises ContractError if it has GPUs and MIG instances."""
    found = [inventory.mig_instance(share.device_uuid) for share in shares]
    profiles = [one[1].profile for one in found if one is not None]
    if not profiles:
        return contract.RESOURCE_VGPU
    if len(profiles) != len(shares):
        raise ContractError(
            "one container has GPUs and MIG instances: name a class in each request, and use the two kinds in separate containers"
        )
    return mig.resource_of_profile(profiles[0])


def _grant(
    ref: ClaimRef,
    claim: AllocatedClaim,
    group: RequestGroup,
    node: ClaimNode,
    identifier: str,
    parts: tuple[DeviceShare, ...],
    preferences: Preferences,
) -> Grant:
    name, uid = claim.pods[0] if claim.pods else ("", "")
    first, *joined = group.names
    devices = tuple(ClaimedDevice(one.pool, one.device, one.share_id, request.name if joined else "") for request, one in group.devices)
    shares = _merged(parts)
    grant = Grant(
        grant_id=identifier,
        resource=_resource(shares, node.inventory),
        device_ids=(),
        namespace=ref.namespace,
        pod=name,
        pod_uid=uid,
        container=first,
        shares=shares,
        boot_id=node.boot_id,
        isolation=Isolation.EXCLUSIVE if group.admin else preferences.isolation or Isolation.SHIM,
        claim=ClaimRequest(
            ref.uid,
            ref.name,
            first,
            devices,
            tuple(one.name for one in claim.requests),
            preferences,
            admin=group.admin,
            joined=tuple(joined),
            parts=parts if shares != parts else (),
        ),
    )
    pod = node.pods.get(uid)
    users = users_in(grant, pod) if pod is not None else ()
    return replace(grant, container=users[0]) if users else grant


def _merged(parts: Sequence[DeviceShare]) -> tuple[DeviceShare, ...]:
    """Return what a program sees of these parts: each device once, with the sum of its memory and of the cores that are stated."""
    merged: dict[str, DeviceShare] = {}
    for part in parts:
        known = merged.get(part.device_uuid)
        merged[part.device_uuid] = part if known is None else _sum(known, part)
    return tuple(merged.values())


def _sum(one: DeviceShare, other: DeviceShare) -> DeviceShare:
    stated = [share.cores_percent for share in (one, other) if share.cores_percent is not None]
    return DeviceShare(one.device_uuid, one.memory_bytes + other.memory_bytes, sum(stated) if stated else None)


def device_status(grants: Iterable[Grant], now: float) -> Sequence[Mapping[str, Any]]:
    """Return what a claim's status says about its prepared devices. Args: now: in seconds since 1970."""
    return [
        {
            "driver": contract.DRA_DRIVER,
            "pool": device.pool,
            "device": device.device,
            **({"shareID": device.share_id} if device.share_id else {}),
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "Prepared",
                    "message": f"limit enforced by {grant.backend}" if grant.takes_part else "admin access, without a limit",
                    "lastTransitionTime": timestamp(now),
                }
            ],
            "data": {"memoryBytes": share.memory_bytes, "coresPercent": share.cores_percent, "isolation": str(grant.backend)},
        }
        for grant in grants
        if grant.claim is not None
        for device, share in zip(grant.claim.devices, grant.promised, strict=True)
    ]
