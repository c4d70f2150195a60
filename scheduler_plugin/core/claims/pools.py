# SPDX-License-Identifier: Apache-2.0
"""ResourceSlices, DeviceClasses and ResourceClaims as the API shows them, and the devices that kube-scheduler takes for claims on a node.

Invariant: the use of a node's devices is the sum of the allocations of all claims, and of the guesses for pods that are being scheduled.
A guess counts until the pod's claims are allocated, or its caller drops it. Pure: objects in, values out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract.errors import ContractError
from aliquot.contract.units import parse_quantity
from scheduler_plugin.core.claims.first_fit import Amounts, Claim, Device, DeviceKey, Taken, Usage, predict
from scheduler_plugin.core.claims.objects import claim_of, devices_of
from scheduler_plugin.core.claims.selecting import check, meets

Json = Mapping[str, Any]
ClaimKey = tuple[str, str]
"""Namespace and name."""
PoolKey = tuple[str, str]
"""Driver and name."""
UUID: Final = f"{contract.DRA_DRIVER}/uuid"


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""


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
    spec: Json
    shape: bytes
    """Its spec as text: equal claims have equal shapes."""
    parts: tuple[Part, ...] | None
    """None until it is allocated."""
    reserved_for: tuple[str, ...]
    """UIDs of the pods that use it."""


def decode_claim(raw: msgspec.Raw | bytes) -> StoredClaim:
    """Read a ResourceClaim. Raises DecodeError, ContractError."""
    found = msgspec.json.decode(raw, type=_ClaimObject)
    allocation, metadata = found.status.allocation, found.metadata
    parts = None if allocation is None else tuple(map(_part, (one for one in allocation.devices.results or () if not one.admin_access)))
    users = tuple(user.uid for user in found.status.reserved_for or ())
    shape = msgspec.json.encode(found.spec, order="deterministic")
    return StoredClaim((metadata.namespace, metadata.name), metadata.uid, found.spec, shape, parts, users)


def _part(result: _Result) -> Part:
    amounts = None if result.consumed_capacity is None else {name: parse_quantity(text) for name, text in result.consumed_capacity.items()}
    return Part(result.request, (result.driver, result.pool, result.device), amounts)


@dataclass(frozen=True, slots=True)
class Guess:
    """The devices that a pod's claims probably get."""

    node: str
    taken: tuple[Taken, ...]


class Pools:
    """All that is known of claims and of the devices for them."""

    def __init__(self) -> None:
        self.on_node: Callable[[str], None] = lambda _: None
        """Called with the name of each node after its devices, or their use, changed."""
        self.is_expected: Callable[[str], bool] = lambda _: True
        """Whether the guess for a pod still counts, by the pod's UID."""
        self.classes: dict[str, Json] = {}
        self.claims: dict[ClaimKey, StoredClaim] = {}
        self.class_version = 0
        """Grows when a class changes: then each prediction may."""
        self.uuids: dict[DeviceKey, str] = {}
        """GPU UUIDs, also of devices whose slice is gone: kubelet deletes slices when it restarts."""
        self._slices: dict[str, Json] = {}
        self._on_node: dict[str, dict[str, Json]] = {}
        """Slices by node and name."""
        self._devices: dict[str, Sequence[Device] | str] = {}
        """By node; a sentence where they are not predicted."""
        self._parts: dict[PoolKey, dict[str, tuple[Part, ...]]] = {}
        """By pool and claim UID."""
        self._guesses: dict[str, Guess] = {}
        """By pod UID."""
        self._versions: Counter[str] = Counter()
        """By node, how often its devices or their use changed."""

    # --- objects ---

    def set_slice(self, one: Json) -> None:
        """Store a new or changed ResourceSlice."""
        self.drop_slice(one)
        name, node = one["metadata"]["name"], one["spec"].get("nodeName") or ""
        self._slices[name] = one
        self._on_node.setdefault(node, {})[name] = one
        driver, pool = one["spec"]["driver"], one["spec"]["pool"]["name"]
        for device in one["spec"].get("devices") or ():
            uuid = (device.get("attributes") or {}).get("uuid")
            if driver == contract.DRA_DRIVER and uuid:
                self.uuids[driver, pool, device["name"]] = uuid["string"]
        self._slices_changed(node)

    def drop_slice(self, one: Json) -> None:
        """Forget a ResourceSlice."""
        known = self._slices.pop(one["metadata"]["name"], None)
        if known is not None:
            node = known["spec"].get("nodeName") or ""
            self._on_node[node].pop(known["metadata"]["name"], None)
            self._slices_changed(node)

    def replace_slices(self, slices: Iterable[Json]) -> None:
        """Store a full list."""
        listed = list(slices)
        names = {one["metadata"]["name"] for one in listed}
        for one in [one for name, one in self._slices.items() if name not in names]:
            self.drop_slice(one)
        for one in listed:
            if self._slices.get(one["metadata"]["name"]) != one:
                self.set_slice(one)

    def replace_classes(self, classes: Iterable[Json]) -> None:
        """Store a full list of DeviceClasses."""
        self.classes = {one["metadata"]["name"]: one for one in classes}
        self.class_version += 1

    def set_class(self, one: Json) -> None:
        """Store a new or changed DeviceClass."""
        self.classes[one["metadata"]["name"]] = one
        self.class_version += 1

    def drop_class(self, one: Json) -> None:
        """Forget a DeviceClass."""
        self.classes.pop(one["metadata"]["name"], None)
        self.class_version += 1

    def set_claim(self, claim: StoredClaim) -> None:
        """Store a new or changed claim."""
        before = self.claims.get(claim.key)
        self.claims[claim.key] = claim
        if claim.parts is not None:
            for uid in claim.reserved_for:
                self.drop_guess(uid)
        if before is None or (before.uid, before.parts) != (claim.uid, claim.parts):
            self._count(before, -1)
            self._count(claim, 1)

    def drop_claim(self, claim: StoredClaim) -> None:
        """Forget a claim."""
        self._count(self.claims.pop(claim.key, None), -1)

    def _count(self, claim: StoredClaim | None, sign: int) -> None:
        if claim is None:
            return
        by_pool: dict[PoolKey, list[Part]] = {}
        for part in claim.parts or ():
            by_pool.setdefault(part.device[:2], []).append(part)
        for pool, parts in by_pool.items():
            if sign > 0:
                self._parts.setdefault(pool, {})[claim.uid] = tuple(parts)
            else:
                self._parts.get(pool, {}).pop(claim.uid, None)
        for node in {node_of(pool) for pool in by_pool}:
            self._note(node)

    # --- guesses ---

    def guess(self, pod_uid: str, guess: Guess) -> None:
        """Expect a pod's claims on a node, in place of an earlier guess."""
        for uid in [uid for uid in self._guesses if uid == pod_uid or not self.is_expected(uid)]:
            self.drop_guess(uid)
        self._guesses[pod_uid] = guess
        self._note(guess.node)

    def drop_guess(self, pod_uid: str) -> None:
        """Expect a pod no more."""
        known = self._guesses.pop(pod_uid, None)
        if known is not None:
            self._note(known.node)

    # --- prediction ---

    def stamp(self, node: str, but: str) -> tuple[object, ...]:
        """Return what a prediction on a node depends on, besides the claims and classes. Args: but: as in ``predict``."""
        return self._versions[node], *(uid for uid in self._guesses if self._counts(uid, node, but))

    def _counts(self, uid: str, node: str, but: str) -> bool:
        """Whether the guess for a pod counts on a node."""
        return uid != but and self._guesses[uid].node == node and self.is_expected(uid)

    def _note(self, node: str) -> None:
        self._versions[node] += 1
        self.on_node(node)

    def offers(self, node: str) -> bool:
        """Whether a node has devices for claims."""
        return bool(self._on_node.get(node))

    def read(self, claims: Iterable[StoredClaim]) -> Sequence[Claim]:
        """Return claims as the search reads them. Raises ContractError for what it does not know."""
        read = [claim_of({"spec": claim.spec}, self.classes) for claim in claims]
        for one in (one for claim in read for alternatives in claim.requests for one in alternatives):
            for expression in one.selectors:
                check(expression)
        return read

    def predict(self, node: str, claims: Sequence[Claim], but: str = "", *, guesses: bool = True) -> Sequence[Sequence[Taken]] | None:
        """Return the devices that each claim gets on a node; None if they do not fit together.

        Args: but: UID of a pod; its own guess does not count. guesses: whether others' guesses count.
        Raises: ContractError, SearchTooLongError: it is not known.
        """
        devices = self._devices_of(node)
        return predict(devices, self._usage(node, devices, but, guesses=guesses), claims, meets)

    def _devices_of(self, node: str) -> Sequence[Device]:
        if node not in self._devices:
            # Slices without a node, or for others, count where they complete a pool; pools of drivers here have one node.
            members = [*self._on_node.get(node, {}).values(), *self._on_node.get("", {}).values()]
            try:
                self._devices[node] = devices_of(node, members)
            except ContractError as exc:
                self._devices[node] = str(exc)
        found = self._devices[node]
        if isinstance(found, str):
            raise ContractError(found)
        return found

    def _usage(self, node: str, devices: Sequence[Device], but: str, *, guesses: bool) -> Usage:
        pools = {device.key[:2] for device in devices}
        used = [(part.device, part.consumed) for pool in pools for parts in self._parts.get(pool, {}).values() for part in parts]
        return _sum_of([*used, *self._guessed(node, devices, but)] if guesses else used)

    def _guessed(self, node: str, devices: Sequence[Device], but: str) -> Iterable[tuple[DeviceKey, Amounts | None]]:
        """Yield what the guesses for pods use on a node."""
        shared = {device.key for device in devices if device.shared}
        for uid, guess in self._guesses.items():
            if self._counts(uid, node, but):
                yield from ((taken.device, taken.consumed if taken.device in shared else None) for taken in guess.taken)

    def _slices_changed(self, node: str) -> None:
        if node:
            self._devices.pop(node, None)
            self._note(node)
        else:
            self._devices.clear()
            self.class_version += 1


def _sum_of(used: Iterable[tuple[DeviceKey, Amounts | None]]) -> Usage:
    """Add up uses of devices. Without amounts a use has the device alone."""
    alone: set[DeviceKey] = set()
    consumed: dict[DeviceKey, dict[str, Fraction]] = {}
    for device, amounts in used:
        if amounts is None:
            alone.add(device)
            continue
        sums = consumed.setdefault(device, {})
        for name, amount in amounts.items():
            sums[name] = sums.get(name, Fraction(0)) + amount
    return Usage(frozenset(alone), consumed)


def node_of(pool: PoolKey) -> str:
    """Return the node of a pool of our driver: it has the node's name. Empty for other drivers."""
    return pool[1] if pool[0] == contract.DRA_DRIVER else ""
