# SPDX-License-Identifier: Apache-2.0
"""MIG instances on GPUs, and the records of those that the agent created."""

from collections.abc import Sequence
from typing import Protocol

from agent.core.mig import MigRecord
from aliquot.contract.codec import MigPlace
from aliquot.contract.model import MigInstance


class MigPartitions(Protocol):
    """The partitions of GPUs in MIG mode. Calls raise PartitionError, or what ``ports.driver.Driver`` raises."""

    async def places(self, device_uuid: str) -> Sequence[MigInstance]:
        """List the places for instances on an empty GPU, for every profile that a resource can name."""
        ...

    async def instance_at(self, place: MigPlace) -> MigInstance | None:
        """Return the instance of the place's profile that begins there. An instance that was left incomplete has no UUID."""
        ...

    async def create(self, place: MigPlace, size: int) -> MigInstance:
        """Create an instance at a place of ``size`` memory slices."""
        ...

    async def destroy(self, place: MigPlace) -> None:
        """Remove the instance at a place, if it exists. Raises PartitionInUseError while processes use it."""
        ...


class MigRecords(Protocol):
    """Records of the instances that the agent created, on disk. Calls raise StorageError."""

    def load(self) -> Sequence[MigRecord]:
        """Read all records. Damaged files are left out and logged."""
        ...

    def write(self, record: MigRecord) -> None:
        """Write a record durably: after a crash the file has either the new record or the previous one."""
        ...

    def remove(self, place: str) -> None:
        """Remove a record, if it exists."""
        ...
