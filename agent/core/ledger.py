# SPDX-License-Identifier: Apache-2.0
"""The ledger: all grants of this node, and the row of a grant on disk.

The ledger is the agent's record of grants. Kubelet records which container holds which IDs; the pod's annotation records the scheduler's
choice. Invariant (I1): a grant enters the ledger only if no device then has grants of more memory, cores or shares than it has. A ledger is
a value: ``granting`` and ``releasing`` return a new one.

An unclear grant is one with a damaged row and a damaged copy. Its container may run, and it is not known how much it was granted. So
nothing more is granted on its devices until it has ended.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from agent.core.identity import Holder
from agent.core.inventory import DeviceInventory
from agent.core.rows import RowFormat
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import Allocation, DeviceShare, Isolation, Preferences
from aliquot.placement.choose import with_shares
from aliquot.placement.device import DeviceState


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device as ResourceSlices and a claim's allocation name it. ``share_id`` is empty for a device that one claim has alone."""

    pool: str
    device: str
    share_id: str = ""
    request: str = ""
    """The request that it was allocated for; empty if the grant is for one request."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """One request of a prepared ResourceClaim, or several that a container uses together. Its containers, also of several pods, share one
    grant.
    """

    uid: str
    name: str
    request: str
    """The only request, or the first."""
    devices: tuple[ClaimedDevice, ...]
    """As allocated, in the order of the requests: one GPU twice if two requests have a part of it."""
    requests: tuple[str, ...] = ()
    """All requests of the claim with devices of this driver; each has a grant once the claim is prepared."""
    preferences: Preferences = field(default_factory=Preferences)
    admin: bool = False
    """Whether it uses the devices beside all grants, without a part of them (``adminAccess``). Its shares have no memory."""
    joined: tuple[str, ...] = ()
    """The further requests of the grant, in the order of the claim."""
    parts: tuple[DeviceShare, ...] = ()
    """What each of ``devices`` was allocated, if two are parts of one GPU; empty if these are the grant's shares."""

    @property
    def names(self) -> tuple[str, ...]:
        """All requests of the grant."""
        return (self.request, *self.joined)

    def __str__(self) -> str:
        return f"{requests_text(self.names)} of claim {self.name}"


def requests_text(names: Sequence[str]) -> str:
    """Return requests as text for messages: ``request a``, or ``requests a, b and c``."""
    return f"requests {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f"request {names[0]}"


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices granted to one container, or to the containers that use the same requests of a claim.

    ``boot_id`` identifies grants from before a reboot, which has ended their containers. For a claim, ``pod``, ``pod_uid`` and
    ``container`` name the first user; later users are known from their pods (``core.owners``).
    """

    grant_id: str
    resource: str
    device_ids: tuple[str, ...]
    namespace: str
    pod: str
    pod_uid: str
    container: str
    shares: tuple[DeviceShare, ...]
    """Each device once, in the order in which the program sees them."""
    boot_id: str
    isolation: Isolation = Isolation.SHIM
    """The isolation chosen for a vGPU. For a MIG resource use ``backend``."""
    claim: ClaimRequest | None = None
    """None for a container with device IDs of the device plugin."""

    @property
    def owner_uid(self) -> str:
        """The UID of the object that the grant lives with: the claim's, or else the pod's."""
        return self.claim.uid if self.claim is not None else self.pod_uid

    @property
    def holder(self) -> Holder:
        """The container, as PodResources names it."""
        return Holder(self.namespace, self.pod, self.container)

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names in its shares, in order: GPUs, MIG instances, or places for one."""
        return tuple(share.device_uuid for share in self.shares)

    @property
    def promised(self) -> tuple[DeviceShare, ...]:
        """What counts towards what its devices have: each part of a GPU by itself, as the allocator counts."""
        return (self.claim.parts if self.claim is not None else ()) or self.shares

    @property
    def takes_part(self) -> bool:
        """Whether its shares count towards what its devices have; not so for a claim with admin access."""
        return self.claim is None or not self.claim.admin

    @property
    def under_shim(self) -> bool:
        """Whether the shim enforces the grant."""
        return self.backend is Isolation.SHIM

    @property
    def backend(self) -> Isolation:
        """The backend that enforces the grant; for MIG resources that is the hardware."""
        return self.isolation if self.resource == contract.RESOURCE_VGPU else Isolation.MIG


GRANT_ROWS = RowFormat("ledger row", "grant", Grant, version=1)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All grants of the node by grant id."""

    grants: Mapping[str, Grant] = field(default_factory=dict)
    unclear: Mapping[str, Set[str]] = field(default_factory=dict)
    """By the id of an unclear grant: the names of its devices; empty if they are unknown, so it may be on every GPU."""

    def states(self, inventory: DeviceInventory, shares_per_gpu: int, of: Set[str] | None = None) -> tuple[DeviceState, ...]:
        """Return every GPU with its granted shares, in the form that ``placement`` uses.

        Args: of: only these GPUs are needed. Ignored if it has another name, such as that of a MIG instance, which may be on any GPU.
        """
        devices = inventory.devices
        if of is not None and of <= {entry.device.uuid for entry in devices}:
            devices = tuple(entry for entry in devices if entry.device.uuid in of)
        promised = self._shares_by_device({uuid for entry in devices for uuid in entry.grantable_uuids})
        return tuple(
            DeviceState.of(
                entry.device,
                [share for uuid in entry.grantable_uuids for share in promised[uuid]],
                max_shares=shares_per_gpu,
                healthy=entry.healthy,
                cordoned=entry.cordoned or bool(self.unclear_on(entry.grantable_uuids)),
            )
            for entry in devices
        )

    def _shares_by_device(self, names: Iterable[str]) -> Mapping[str, Sequence[DeviceShare]]:
        """Return the granted shares of these devices by the device's name."""
        found: dict[str, list[DeviceShare]] = {name: [] for name in names}
        for grant in self.grants.values():
            for share in grant.promised:
                if share.device_uuid in found and grant.takes_part:
                    found[share.device_uuid].append(share)
        return found

    def unclear_on(self, device_names: Iterable[str]) -> tuple[str, ...]:
        """Return the ids of the unclear grants that may be on one of these devices."""
        names = frozenset(device_names)
        return tuple(identifier for identifier, devices in self.unclear.items() if not devices or not names.isdisjoint(devices))

    def holders_on(self, device_uuid: str) -> tuple[str, ...]:
        """Return the holders of a device with their amounts, as text for refusals. The first user of a claim may be gone."""
        return tuple(
            f"{f'claim {grant.namespace}/{grant.claim.name}' if grant.claim is not None else grant.holder} "
            f"{units.format_memory(share.memory_bytes)}"
            for grant in self.grants.values()
            for share in grant.shares
            if share.device_uuid == device_uuid
        )

    @property
    def with_ids(self) -> tuple[Grant, ...]:
        """The grants of containers with device IDs."""
        return tuple(grant for grant in self.grants.values() if grant.claim is None)

    @property
    def with_claims(self) -> tuple[Grant, ...]:
        """The grants of claims."""
        return tuple(grant for grant in self.grants.values() if grant.claim is not None)

    def of_claim(self, uid: str) -> tuple[Grant, ...]:
        """Return the grants of a claim: one for each of its requests, or for several that a container uses together."""
        return tuple([grant for grant in self.grants.values() if grant.claim is not None and grant.claim.uid == uid])

    def holding_any(self, resource: str, device_ids: Set[str]) -> tuple[Grant, ...]:
        """Return the grants of a resource that have at least one of the given IDs."""
        return tuple(grant for grant in self.grants.values() if grant.resource == resource and not device_ids.isdisjoint(grant.device_ids))

    def held_ids(self, resource: str) -> frozenset[str]:
        """Return all IDs of a resource that belong to a grant."""
        return frozenset(device_id for grant in self.grants.values() if grant.resource == resource for device_id in grant.device_ids)

    def granting(self, grant: Grant, inventory: DeviceInventory, shares_per_gpu: int) -> "Ledger":
        """Return the ledger with this grant, which replaces one with the same id. A grant with the same shares as before always fits.

        Raises: AccountingError if a device has no room for it, which is an error in planning.
        """
        before, others = self.grants.get(grant.grant_id), self.releasing((grant.grant_id,))
        if grant.takes_part and (before is None or before.promised != grant.promised):
            named = frozenset(grant.device_names)
            with_shares(others.states(inventory, shares_per_gpu, named), grant.promised)
        return replace(others, grants={**others.grants, grant.grant_id: grant})

    def adopting(self, grants: Iterable[Grant]) -> "Ledger":
        """Return the ledger with grants from before the agent's restart. They are facts, so they are not checked."""
        return replace(self, grants={**self.grants, **{grant.grant_id: grant for grant in grants}})

    def with_unclear(self, unclear: Mapping[str, Set[str]]) -> "Ledger":
        """Return the ledger with these unclear grants in place of its own."""
        return replace(self, unclear=unclear)

    def releasing(self, grant_ids: Iterable[str]) -> "Ledger":
        """Return the ledger without these grants, unclear ones included."""
        gone = set(grant_ids)
        if gone.isdisjoint(self.grants) and gone.isdisjoint(self.unclear):
            return self
        return Ledger(
            {identifier: grant for identifier, grant in self.grants.items() if identifier not in gone},
            {identifier: devices for identifier, devices in self.unclear.items() if identifier not in gone},
        )


def claims_trouble(ledger: Ledger, allocation: Allocation) -> str:
    """Return why device IDs cannot be offered yet; empty when no claim is left from an interface that the node serves no more."""
    claims = {grant.owner_uid for grant in ledger.with_claims}
    if allocation.by_claims or not claims:
        return ""
    return f"allocation: {allocation} waits until the last of {len(claims)} prepared ResourceClaims of this node has ended"


def ids_trouble(ledger: Ledger, allocation: Allocation) -> str:
    """Return why no device can be offered to claims yet; empty when no container has IDs that the node serves no more."""
    containers = len(ledger.with_ids)
    if allocation.by_ids or not containers:
        return ""
    return f"allocation: {allocation} waits until the last of {containers} containers with device IDs has ended"
