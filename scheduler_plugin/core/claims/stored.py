# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims as the extender keeps them, read from the API's JSON. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from aliquot.contract.units import parse_quantity
from scheduler_plugin.core.claims.first_fit import Amounts, DeviceKey

ClaimKey: TypeAlias = tuple[str, str]
"""Namespace and name."""


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    finalizers: tuple[str, ...] | None = None
    deletion_timestamp: str | None = None


class _Result(msgspec.Struct, rename="camel"):
    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    admin_access: bool | None = None
    consumed_capacity: dict[str, str] | None = None


class _Devices(msgspec.Struct):
    results: list[_Result] | None = None


class _Allocation(msgspec.Struct):
    devices: _Devices = msgspec.field(default_factory=_Devices)


class _Consumer(msgspec.Struct):
    uid: str = ""


class _Status(msgspec.Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] | None = None


class _ClaimObject(msgspec.Struct):
    metadata: _Metadata
    spec: dict[str, Any]
    status: _Status = msgspec.field(default_factory=_Status)


@dataclass(frozen=True, slots=True)
class Part:
    """What a claim has of a device. Without amounts it has the device alone."""

    request: str
    device: DeviceKey
    consumed: Amounts | None


@dataclass(frozen=True, slots=True)
class StoredClaim:
    """A ResourceClaim."""

    key: ClaimKey
    uid: str
    spec: Mapping[str, Any]
    shape: bytes
    """Its spec as text: equal claims have equal shapes."""
    parts: tuple[Part, ...] | None
    """None until it is allocated."""
    reserved_for: tuple[str, ...]
    """UIDs of the pods that use it."""
    version: str = ""
    """A write with it fails if the claim changed since."""
    finalizers: tuple[str, ...] = ()
    is_ending: bool = False
    """Whether its deletion was requested."""

    def is_older_than(self, other: "StoredClaim") -> bool:
        """Whether this is an earlier state of the same claim. Versions of one object grow."""
        are_numbers = self.version.isdigit() and other.version.isdigit()
        return self.uid == other.uid and are_numbers and int(self.version) < int(other.version)


def decode_claim(raw: msgspec.Raw | bytes) -> StoredClaim:
    """Read a ResourceClaim. Raises DecodeError, ContractError."""
    found = msgspec.json.decode(raw, type=_ClaimObject)
    allocation, metadata = found.status.allocation, found.metadata
    parts = None if allocation is None else tuple(map(_part, (one for one in allocation.devices.results or () if not one.admin_access)))
    users = tuple(user.uid for user in found.status.reserved_for or ())
    shape, spec = _shared(msgspec.json.encode(found.spec, order="deterministic"))
    key, is_ending = (metadata.namespace, metadata.name), metadata.deletion_timestamp is not None
    return StoredClaim(key, metadata.uid, spec, shape, parts, users, metadata.resource_version, metadata.finalizers or (), is_ending)


@lru_cache(maxsize=1024)
def _shared(shape: bytes) -> tuple[bytes, Mapping[str, Any]]:
    """Return one object for all equal specs: claims are made from templates, and a spec takes most of a claim's memory."""
    return shape, msgspec.json.decode(shape)


def _part(result: _Result) -> Part:
    amounts = None if result.consumed_capacity is None else {name: parse_quantity(text) for name, text in result.consumed_capacity.items()}
    return Part(result.request, (result.driver, result.pool, result.device), amounts)
