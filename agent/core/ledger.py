"""What this node has promised to containers, and the row of a promise on disk.

The ledger is the agent's truth of what was granted; kubelet's truth is who holds which IDs, the pod's annotation where the
scheduler put it. Kept true (I1): a grant enters the ledger only when, with it, no device is promised more memory, cores or shares
than it has. A ledger is a value: ``granting`` and ``releasing`` return a new one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from agent.core.identity import Holder
from agent.core.inventory import DeviceBoard
from agent.core.rows import RowFormat
from placement.choose import with_shares
from placement.device import DeviceState
from proto import contract, units
from proto.model import DeviceShare, Isolation


@dataclass(frozen=True, slots=True)
class Grant:
    """One container's devices, as promised. ``boot_id`` tells grants of containers that a reboot has ended."""

    grant_id: str
    resource: str
    device_ids: tuple[str, ...]
    namespace: str
    pod: str
    pod_uid: str
    container: str
    shares: tuple[DeviceShare, ...]
    boot_id: str
    isolation: Isolation = Isolation.SHIM
    """As it was chosen for a vGPU; of a MIG resource, ``backend`` tells."""

    @property
    def holder(self) -> Holder:
        """The container, as PodResources names it."""
        return Holder(self.namespace, self.pod, self.container)

    @property
    def device_names(self) -> tuple[str, ...]:
        """What its shares name, in order: GPUs, MIG instances, or places for one."""
        return tuple(share.device_uuid for share in self.shares)

    @property
    def under_shim(self) -> bool:
        """Whether the shim enforces it."""
        return self.backend is Isolation.SHIM

    @property
    def backend(self) -> Isolation:
        """What enforces it; MIG instances are kept apart by the hardware."""
        return self.isolation if self.resource == contract.RESOURCE_VGPU else Isolation.MIG


GRANT_ROWS = RowFormat("ledger row", "grant", Grant, version=1)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All grants of the node by grant id."""

    grants: Mapping[str, Grant] = field(default_factory=dict)

    def states(self, board: DeviceBoard, shares_per_gpu: int) -> tuple[DeviceState, ...]:
        """Return every GPU with what it has promised, the form in which ``placement`` reasons about devices."""
        promised = defaultdict(list)
        for grant in self.grants.values():
            for share in grant.shares:
                promised[share.device_uuid].append(share)
        return tuple(
            DeviceState.of(
                entry.device,
                [share for uuid in entry.grantable_uuids for share in promised[uuid]],
                max_shares=shares_per_gpu,
                healthy=entry.healthy,
                cordoned=entry.cordoned,
            )
            for entry in board.devices
        )

    def holders_on(self, device_uuid: str) -> tuple[str, ...]:
        """Describe who was promised how much of a device, for refusals."""
        return tuple(
            f"{grant.holder} {units.format_memory(share.memory_bytes)}"
            for grant in self.grants.values()
            for share in grant.shares
            if share.device_uuid == device_uuid
        )

    def holding_any(self, resource: str, device_ids: Set[str]) -> tuple[Grant, ...]:
        """Return the grants of a resource that share an ID with the given ones."""
        return tuple(grant for grant in self.grants.values() if grant.resource == resource and not device_ids.isdisjoint(grant.device_ids))

    def held_ids(self, resource: str) -> frozenset[str]:
        """Return every ID of a resource that a grant was made for."""
        return frozenset(device_id for grant in self.grants.values() if grant.resource == resource for device_id in grant.device_ids)

    def granting(self, grant: Grant, board: DeviceBoard, shares_per_gpu: int) -> "Ledger":
        """Return the ledger with this grant, in place of one with the same id. One that promises what that one did always fits.

        Raises: AccountingError when a device has no room for it: whoever planned the grant did not look.
        """
        before, others = self.grants.get(grant.grant_id), self.releasing((grant.grant_id,))
        if before is None or before.shares != grant.shares:
            with_shares(others.states(board, shares_per_gpu), grant.shares)
        return Ledger({**others.grants, grant.grant_id: grant})

    def adopting(self, grants: Iterable[Grant]) -> "Ledger":
        """Return the ledger with grants that are facts: made earlier, by this agent before it was restarted."""
        return Ledger({**self.grants, **{grant.grant_id: grant for grant in grants}})

    def releasing(self, grant_ids: Iterable[str]) -> "Ledger":
        """Return the ledger without these grants."""
        gone = set(grant_ids)
        return Ledger({identifier: grant for identifier, grant in self.grants.items() if identifier not in gone})
