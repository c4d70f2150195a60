# SPDX-License-Identifier: Apache-2.0
"""What one device has promised, and what is left.

A DeviceState is a value: adding or removing a share makes a new one. Invariant (I1): ``with_share`` never lets a device promise more
memory, cores or shares than it has, and never promises one MIG instance twice.

A GPU in MIG mode has no memory of its own to share: shares of it lie in one instance with all its slices. So it has either shares, which
use that instance together, or other instances.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from aliquot.contract import units
from aliquot.contract.errors import AliquotError
from aliquot.contract.model import Device, DeviceShare, MigInstance

DEFAULT_MAX_SHARES: Final = 16
"""Containers per physical GPU, unless the agent's ``sharesPerGpu`` says otherwise."""

UNRESERVED_MIN_PERCENT: Final = 1
"""Cores that stay unreserved on a device with a share that reserves no cores: such a share uses what is free."""


class AccountingError(AliquotError):
    """The shares on a device add up to an impossible sum: a bug, or a wrong ledger."""


def whole_instance(device: Device) -> MigInstance | None:
    """Return the place for the instance that shares of a GPU in MIG mode use; None where its agent cannot make one.

    It has all memory slices of the GPU. An instance of the administrator leaves no place for it. Of several such profiles it is the one
    without further attributes.
    """
    places = device.mig_instances
    if not device.mig_enabled or not all(place.on_demand for place in places):
        return None
    # By memory, because an inventory may list some places only. A little less than the GPU has, but far more than the next profile.
    whole = [place for place in places if place.placement_start == 0 and place.memory_bytes * 4 >= device.memory_bytes * 3]
    return min(whole, key=lambda place: (len(place.profile), place.profile), default=None)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device with the sums of the shares it carries.

    Build it from existing shares with ``of``. These may exceed the device, for example after a new driver reduced its usable memory. Then
    the free amounts are 0, and ``with_share`` raises; no other method does.
    """

    device: Device
    used_memory_bytes: int = 0
    used_cores_percent: int = 0
    used_shares: int = 0
    unreserved_shares: int = 0
    """Those of ``used_shares`` that reserve no compute."""
    used_instances: frozenset[str] = frozenset()
    """UUIDs of the MIG instances in use, also of the one that shares of a GPU in MIG mode use."""
    max_shares: int = DEFAULT_MAX_SHARES
    healthy: bool = True
    cordoned: bool = False
    aversion_ppm: int = 0
    """What the device costs for the pod that is being placed beyond its policy, such as for pods there that would slow it down."""

    def __post_init__(self) -> None:
        sums = (self.used_memory_bytes, self.used_cores_percent, self.unreserved_shares, self.used_shares - self.unreserved_shares)
        if min(sums) < 0:
            raise AccountingError(f"expected sums of at least 0 on {self.device.uuid}, found {self}")

    @classmethod
    def of(
        cls,
        device: Device,
        shares: Iterable[DeviceShare] = (),
        *,
        max_shares: int = DEFAULT_MAX_SHARES,
        healthy: bool = True,
        cordoned: bool = False,
    ) -> "DeviceState":
        """Add up the existing shares of a device, without a check against its capacity. Shares of other devices are skipped."""
        shares = tuple(shares)
        parts = [share for share in shares if share.device_uuid == device.uuid]
        used_instances = frozenset(i.uuid for i in device.mig_instances).intersection(share.device_uuid for share in shares)
        return cls(
            device,
            used_memory_bytes=sum(share.memory_bytes for share in parts),
            used_cores_percent=sum(share.cores_percent or 0 for share in parts),
            used_shares=len(parts),
            unreserved_shares=sum(share.cores_percent is None for share in parts),
            used_instances=used_instances | (_instances_of_shares(device) if parts else frozenset()),
            max_shares=max_shares,
            healthy=healthy,
            cordoned=cordoned,
        )

    @property
    def capacity_bytes(self) -> int:
        """Memory that can be promised: whole MiB, the unit of requests and assignments."""
        whole = whole_instance(self.device)
        return units.floor_to_mib(self.device.memory_bytes if whole is None else whole.memory_bytes)

    @property
    def free_memory_bytes(self) -> int:
        """Memory that is not promised to a share, never below 0."""
        return max(0, self.capacity_bytes - self.used_memory_bytes)

    @property
    def free_cores_percent(self) -> int:
        """Cores that one more share may reserve, never below 0."""
        kept = UNRESERVED_MIN_PERCENT if self.unreserved_shares else 0
        return max(0, units.WHOLE_GPU_PERCENT - self.used_cores_percent - kept)

    @property
    def unreserved_fits(self) -> bool:
        """Whether unreserved cores are left for a share without reserved cores."""
        return self.used_cores_percent <= units.WHOLE_GPU_PERCENT - UNRESERVED_MIN_PERCENT

    @property
    def free_shares(self) -> int:
        """How many more containers the device takes, never below 0."""
        return max(0, self.max_shares - self.used_shares)

    @property
    def empty(self) -> bool:
        """True while no container uses the device or an instance on it."""
        return self.used_shares == 0 and not self.used_instances

    @property
    def shareable(self) -> bool:
        """Whether the device gives out shares: it is healthy, not cordoned and not in MIG mode."""
        return self.healthy and not self.cordoned and not self.device.mig_enabled

    @property
    def leaves_shares(self) -> bool:
        """Whether no MIG instance in use keeps shares of the device itself out. One of a GPU outside MIG mode has none."""
        if not self.device.mig_enabled:
            return True
        return whole_instance(self.device) is not None and (self.used_shares > 0 or not self.used_instances)

    def carries(self, share: DeviceShare) -> bool:
        """Whether the share is one of this device or of a MIG instance on it."""
        return share.device_uuid == self.device.uuid or any(share.device_uuid == i.uuid for i in self.device.mig_instances)

    def has_room_for(self, share: DeviceShare) -> bool:
        """Whether a share of the device itself, not of an instance on it, adds up with the others."""
        if not self.leaves_shares:
            return False
        cores = self.unreserved_fits if share.cores_percent is None else share.cores_percent <= self.free_cores_percent
        return cores and self.free_shares > 0 and share.memory_bytes <= self.free_memory_bytes

    def with_share(self, share: DeviceShare) -> "DeviceState":
        """Promise a share. Raises AccountingError if the device has no room for it."""
        self._check_carries(share)
        if share.device_uuid != self.device.uuid:
            if share.device_uuid in self.used_instances:
                raise AccountingError(f"expected MIG instance {share.device_uuid} to be free, found it in use")
        elif not self.has_room_for(share):
            raise AccountingError(f"expected room for {share}, found {self}")
        return self._adding(share)

    def without_share(self, share: DeviceShare) -> "DeviceState":
        """Remove a share. Raises AccountingError if the device did not promise it."""
        self._check_carries(share)
        if share.device_uuid != self.device.uuid:
            if share.device_uuid not in self.used_instances:
                raise AccountingError(f"expected MIG instance {share.device_uuid} to be in use, found it free")
            return replace(self, used_instances=self.used_instances - {share.device_uuid})
        return replace(
            self,
            used_memory_bytes=self.used_memory_bytes - share.memory_bytes,
            used_cores_percent=self.used_cores_percent - (share.cores_percent or 0),
            used_shares=self.used_shares - 1,
            used_instances=self.used_instances - (_instances_of_shares(self.device) if self.used_shares == 1 else frozenset()),
            unreserved_shares=self.unreserved_shares - (share.cores_percent is None),
        )

    def _check_carries(self, share: DeviceShare) -> None:
        if not self.carries(share):
            raise AccountingError(f"expected a share of {self.device.uuid} or of an instance on it, found one of {share.device_uuid}")
        if share.memory_bytes < 1 or (share.cores_percent is not None and share.cores_percent < 1):
            raise AccountingError(f"expected a share with memory of at least 1 byte and cores of at least 1 percent, found {share}")

    def _adding(self, share: DeviceShare) -> "DeviceState":
        if share.device_uuid != self.device.uuid:
            return replace(self, used_instances=self.used_instances | {share.device_uuid})
        return DeviceState(  # as replace does, in a third of its time: rating a node tries the share on every device
            self.device,
            self.used_memory_bytes + share.memory_bytes,
            self.used_cores_percent + (share.cores_percent or 0),
            self.used_shares + 1,
            self.unreserved_shares + (share.cores_percent is None),
            self.used_instances | _instances_of_shares(self.device) if self.device.mig_enabled else self.used_instances,
            self.max_shares,
            self.healthy,
            self.cordoned,
            self.aversion_ppm,
        )


def _instances_of_shares(device: Device) -> frozenset[str]:
    """Return the instance that shares of a GPU use, by UUID; empty for a GPU that is not in MIG mode."""
    whole = whole_instance(device)
    return frozenset() if whole is None else frozenset([whole.uuid])
