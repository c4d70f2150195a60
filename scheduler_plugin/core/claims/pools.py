# SPDX-License-Identifier: Apache-2.0
"""The devices for claims and what uses them, and the devices that kube-scheduler takes for claims on a node.

Invariant: the use of a node's devices is the sum of the allocations of all claims, and of the guesses for pods that are being scheduled.
A guess counts until the pod's claims are allocated, or its caller drops it. Pure: objects in, values out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.codec import MigPlace
from aliquot.contract.errors import ContractError
from aliquot.contract.units import parse_quantity
from scheduler_plugin.core.claims.extended import classes_by_resource
from scheduler_plugin.core.claims.first_fit import Amounts, Claim, Device, DeviceKey, Effort, PoolKey, Request, Taken, Usage, predict
from scheduler_plugin.core.claims.objects import check_whole, claim_of, devices_of
from scheduler_plugin.core.claims.selecting import check, meets
from scheduler_plugin.core.claims.stored import ClaimKey, Part, StoredClaim
from scheduler_plugin.core.cluster.hold_uids import is_of_claim
from scheduler_plugin.core.cluster.pods import Footprint, Use

Json = Mapping[str, Any]
MEMORY, CORES, SHARES = "memory", "cores", "shares"
"""The capacities of a GPU."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a device for claims comes from."""

    gpu: str
    """The UUID of its GPU."""
    counted_as: str
    """The UUID by which its use is counted: of the GPU or MIG instance, or the name of a place for one."""
    fixed_mib: int | None = None
    """The memory of a fixed share."""
    profile: str = ""
    """That of a MIG instance."""
    in_instance: bool = False
    """Whether shares of it lie in a MIG instance, which they use together."""


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
        self.footprints_on: Callable[[str], Mapping[str, Footprint]] = lambda _: {}
        """Returns what is taken of a node's devices: by claims and guesses, which count here already, and by pods with device IDs."""
        self.classes: dict[str, Json] = {}
        self.claims: dict[ClaimKey, StoredClaim] = {}
        self.class_of: Mapping[str, str] = {}
        """The classes by the extended resource that they give out."""
        self.class_version = 0
        """Grows when a class changes: then each prediction may."""
        self.change_count = 0
        """Grows with each change of a slice, class or claim."""
        self.origins: dict[DeviceKey, Origin] = {}
        """Of Aliquot's devices. They stay when a slice goes, because kubelet deletes all slices when it restarts."""
        self._slices: dict[str, Json] = {}
        self._on_node: dict[str, dict[str, Json]] = {}
        """Slices by node and name."""
        self._devices: dict[str, Sequence[Device] | str] = {}
        """By node; a sentence where they are not predicted."""
        self._planned: dict[str, tuple[Sequence[Device], Sequence[Device]]] = {}
        """By node, its devices and what of them can be planned."""
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
            if driver == contract.DRA_DRIVER and (origin := _origin_of(device)) is not None:
                self.origins[driver, pool, device["name"]] = origin
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
        self._classes_changed()

    def set_class(self, one: Json) -> None:
        """Store a new or changed DeviceClass."""
        self.classes[one["metadata"]["name"]] = one
        self._classes_changed()

    def drop_class(self, one: Json) -> None:
        """Forget a DeviceClass."""
        self.classes.pop(one["metadata"]["name"], None)
        self._classes_changed()

    def _classes_changed(self) -> None:
        self.class_of = classes_by_resource(self.classes)
        self.class_version += 1
        self.change_count += 1

    def set_claim(self, claim: StoredClaim) -> None:
        """Store a new or changed claim."""
        self.change_count += 1
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
        self.change_count += 1
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

    def stamp(self, node: str, own_uid: str) -> tuple[object, ...]:
        """Return what a prediction on a node depends on, besides the claims and classes. Args: own_uid: as in ``predict``."""
        return self._versions[node], *(uid for uid in self._guesses if self._counts(uid, node, own_uid))

    def _counts(self, uid: str, node: str, own_uid: str) -> bool:
        """Whether the guess for a pod counts on a node."""
        return uid != own_uid and self._guesses[uid].node == node and self.is_expected(uid)

    def _note(self, node: str) -> None:
        self._versions[node] += 1
        self.on_node(node)

    def offers(self, node: str) -> bool:
        """Whether a node has devices for claims."""
        return bool(self._on_node.get(node))

    def may_be_common(self, requests: Iterable[Request]) -> bool:
        """Whether one of these requests may be for a device that several nodes can use. Those are not in the search."""
        drivers = {one["spec"]["driver"] for one in self._on_node.get("", {}).values() if one["spec"].get("devices")}
        return any(_may_be_of(request, driver) for request in requests for driver in drivers)

    def read(self, claims: Iterable[StoredClaim]) -> Sequence[Claim]:
        """Return claims as the search reads them. Raises ContractError for what it does not know."""
        read = [claim_of({"spec": claim.spec}, self.classes) for claim in claims]
        for one in (one for claim in read for alternatives in claim.requests for one in alternatives):
            for expression in one.selectors:
                check(expression)
        return read

    def predict(
        self, node: str, claims: Sequence[Claim], own_uid: str = "", *, guesses: bool = True, effort: Effort | None = None
    ) -> Sequence[Sequence[Taken]] | None:
        """Return the devices that each claim gets on a node; None if they do not fit together.

        Args: own_uid: of the pod that is judged; its own guess does not count. guesses: whether others' guesses count. effort: as for
            ``first_fit.predict``.
        Raises: ContractError, SearchTooLongError: it is not known.
        """
        devices = self._devices_of(node)
        if any(claim.takes_all for claim in claims):
            check_whole(node, self._slices_for(node))
        return predict(devices, self._usage(node, devices, own_uid, guesses=guesses), claims, meets, effort)

    def selected(self, node: str, request: Request) -> Sequence[DeviceKey]:
        """Return the devices of a node that meet a request's selectors, in whatever use. Raises ContractError: it is not known."""
        devices = self._devices_of(node)
        return [device.key for device in devices if all(meets(expression, device) for expression in request.selectors)]

    def origins_of(self, node: str, request: Request) -> Sequence[Origin]:
        """Return where Aliquot's devices among these come from. Raises ContractError: it is not known."""
        known = (self.origins.get(key) for key in self.selected(node, request))
        return [origin for origin in known if origin is not None]

    # --- our own allocation ---

    def planned_on(self, node: str) -> Sequence[Device]:
        """Return the devices that can be planned on a node, without the taint that keeps kube-scheduler off ours.

        Devices of ours without the taint are left to kube-scheduler. Raises ContractError: the devices are not known.
        """
        found = self._devices_of(node)
        known, planned = self._planned.get(node, ((), ()))
        if known is not found:
            planned = tuple(_untainted(device) for device in found if device.key[0] != contract.DRA_DRIVER or _is_planned(device))
            self._planned[node] = found, planned
        return planned

    @property
    def planned_nodes(self) -> Sequence[str]:
        """The names of the nodes with devices of ours that can be planned."""
        return [node for node in self._on_node if node and self._is_planned(node)]

    def _is_planned(self, node: str) -> bool:
        try:
            return any(device.key[0] == contract.DRA_DRIVER for device in self.planned_on(node))
        except ContractError:
            return False

    def allocate(
        self, node: str, claims: Sequence[Claim], first: Sequence[str], gone: Set[str], besides: Iterable[Taken] = ()
    ) -> Sequence[Sequence[Taken]] | None:
        """Return devices for claims on a node; None if they do not fit together, and beside the pods with device IDs.

        Args: first: UUIDs of the devices to try first. gone: UIDs of claims and pods that do not count. besides: what counts in addition.
        Raises: ContractError, SearchTooLongError: it is not known.
        """
        devices = self.planned_on(node)
        rank = {uuid: number for number, uuid in enumerate(first)}
        in_order = sorted(devices, key=lambda device: rank.get(self._counted_as(device.key), len(rank)))
        shared = {device.key for device in devices if device.shared}
        also = ((one.device, one.consumed if one.device in shared else None) for one in besides)
        pools = {device.key[:2] for device in devices}
        used = self._used(pools, gone)
        taken = [*used, *self._guessed(node, devices, ""), *self._of_pods(node, devices, gone), *also]
        return predict(in_order, _sum_of(taken), claims, meets)

    def _of_pods(self, node: str, devices: Sequence[Device], gone: Set[str]) -> Iterable[tuple[DeviceKey, Amounts | None]]:
        """Yield what pods with device IDs have of these devices, as if claims had it. Args: gone: UIDs of pods that do not count."""
        uses: dict[str, Use] = {}
        for uid, footprint in self.footprints_on(node).items():
            if uid not in gone and uid not in self._guesses and not is_of_claim(uid):
                for name, use in footprint.items():
                    uses[name] = uses.get(name, Use()).and_also(use)
        for device in devices:
            origin = self.origins.get(device.key)
            if origin is None or origin.fixed_mib is not None or (found := uses.get(origin.counted_as)) is None:
                continue  # a fixed share is kept off its GPU by the counters, on which the GPU draws
            yield device.key, _as_consumed(found) if device.shared else None

    def _counted_as(self, device: DeviceKey) -> str:
        origin = self.origins.get(device)
        return "" if origin is None else origin.counted_as

    def _used(self, pools: Set[PoolKey], gone: Set[str] = frozenset()) -> list[tuple[DeviceKey, Amounts | None]]:
        """Return what the claims have of some pools. Args: gone: UIDs of claims that do not count."""
        of_claims = (item for pool in pools for item in self._parts.get(pool, {}).items())
        return [(part.device, part.consumed) for uid, parts in of_claims if uid not in gone for part in parts]

    def _slices_for(self, node: str) -> Sequence[Json]:
        """Slices without a node, or for others, count where they complete a pool; pools of drivers here have one node."""
        return [*self._on_node.get(node, {}).values(), *self._on_node.get("", {}).values()]

    def _devices_of(self, node: str) -> Sequence[Device]:
        if node not in self._devices:
            try:
                self._devices[node] = devices_of(node, self._slices_for(node))
            except ContractError as exc:
                self._devices[node] = str(exc)
        found = self._devices[node]
        if isinstance(found, str):
            raise ContractError(found)
        return found

    def _usage(self, node: str, devices: Sequence[Device], own_uid: str, *, guesses: bool) -> Usage:
        used = self._used({device.key[:2] for device in devices})
        return _sum_of([*used, *self._guessed(node, devices, own_uid)] if guesses else used)

    def _guessed(self, node: str, devices: Sequence[Device], own_uid: str) -> Iterable[tuple[DeviceKey, Amounts | None]]:
        """Yield what the guesses for pods use on a node."""
        shared = {device.key for device in devices if device.shared}
        for uid, guess in self._guesses.items():
            if self._counts(uid, node, own_uid):
                yield from ((taken.device, taken.consumed if taken.device in shared else None) for taken in guess.taken)

    def _slices_changed(self, node: str) -> None:
        if node:
            self._devices.pop(node, None)
            self._note(node)
        else:
            self._devices.clear()
            self.class_version += 1
        self.change_count += 1


def _may_be_of(request: Request, driver: str) -> bool:
    """Whether the selectors of a request leave devices of a driver."""
    try:
        return all(meets(expression, Device((driver, "", ""))) for expression in request.selectors)
    except ContractError:  # that depends on the device
        return True


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


def _as_consumed(use: Use) -> Amounts:
    """Return what pods use of a GPU as its capacities count it: what is left of the cores for several pods counts as 1 percent once."""
    cores = use.cores_percent + bool(use.unreserved)
    return {MEMORY: Fraction(units.mib_to_bytes(use.memory_mib)), CORES: Fraction(cores), SHARES: Fraction(use.shares)}


def _is_planned(device: Device) -> bool:
    return any(taint.key == contract.PLANNED for taint in device.taints)


def _untainted(device: Device) -> Device:
    return replace(device, taints=tuple(taint for taint in device.taints if taint.key != contract.PLANNED))


def _origin_of(device: Json) -> Origin | None:
    """Return what the agent says of a device; None if it names no GPU."""
    texts = {name: value.get("string") or "" for name, value in (device.get("attributes") or {}).items()}
    uuid, parent, profile = (texts.get(name, "") for name in ("uuid", "parentUUID", "profile"))
    if not parent:
        return Origin(uuid, uuid, in_instance=texts.get("type") == "shared-mig") if uuid else None
    if texts.get("type") == "fixed":
        return Origin(parent, parent, int(parse_quantity(str(device["capacity"]["memory"]["value"]))) // units.MIB)
    start = device["name"].rpartition("-")[2]  # of a place; an existing instance has a UUID
    return Origin(parent, uuid or str(MigPlace(parent, profile, int(start) if start.isdecimal() else 0)), profile=profile)


def node_of(pool: PoolKey) -> str:
    """Return the node of a pool of our driver: it has the node's name. Empty for other drivers."""
    return pool[1] if pool[0] == contract.DRA_DRIVER else ""
