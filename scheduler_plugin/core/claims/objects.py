# SPDX-License-Identifier: Apache-2.0
"""Reads ResourceSlices, DeviceClasses and ResourceClaims, as JSON, into what ``first_fit`` works with. Pure.

Invariant: the devices of a node come in the order of kube-scheduler's search: pools by driver and name, in a pool slices by name, in a
slice devices as listed. Pools with binding conditions come last. Incomplete pools are left out, and those that name a device or a set of
counters twice, or draw on counters that they do not have.
Source: https://pkg.go.dev/k8s.io/api/resource/v1, and k8s.io/dynamic-resource-allocation/structured, ``GatherPools``
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any, Final

from aliquot.contract.errors import ContractError, quote
from aliquot.contract.units import parse_quantity
from scheduler_plugin.core.claims.first_fit import Capacity, Claim, Device, Draw, Match, PoolKey, Request, Taint, Toleration
from scheduler_plugin.core.claims.versions import parse_version

Json = Mapping[str, Any]

COUNT: Final = "ExactCount"
ALL: Final = "All"
"""The modes of allocation."""
_PREVENTING: Final = ("NoSchedule", "NoExecute")
_KINDS: Final = ("string", "int", "bool", "version")


def devices_of(node: str, slices: Iterable[Json]) -> Sequence[Device]:
    """Return the devices that only this node has, in the search's order.

    Raises: ContractError: devices of other nodes may draw on the counters of a pool here; or a quantity or version cannot be read.
    """
    pools = _pools(slices)
    usable = {key: found for key, members in pools.items() if (found := _usable(node, members))}
    totals = {key: _totals(members) for key, members in usable.items()}
    _check_names([pool for (_, pool), found in totals.items() if found])
    return [_device(key, raw, totals[key]) for key in _in_order(usable) for raw in _raw_devices(usable[key])]


def _in_order(pools: Mapping[PoolKey, Sequence[Json]]) -> Sequence[PoolKey]:
    return sorted(pools, key=lambda key: (any(raw.get("bindingConditions") for raw in _raw_devices(pools[key])), key))


def claim_of(found: Json, classes: Mapping[str, Json]) -> Claim:
    """Return a claim. Raises ContractError for what the search here does not know, such as an unknown class."""
    spec = found["spec"].get("devices") or {}
    requests = tuple(tuple(_alternatives(raw, classes)) for raw in spec.get("requests") or ())
    return Claim(requests, tuple(_match(raw) for raw in spec.get("constraints") or ()))


def _usable(node: str, members: Sequence[Json]) -> Sequence[Json]:
    """Return a pool's slices on a node, by name. Empty while slices of the pool are missing or a device has two entries.

    Slices for other nodes count, too: they complete a pool, and a newer generation there makes the node's own slices obsolete.
    """
    newest, others = _on_and_off(node, members)
    if others is None:
        return ()
    if any(raw.get("consumesCounters") for raw in _raw_devices(others)):
        raise ContractError(f"devices of other nodes draw on the counters of pool {newest[0]['spec']['pool']['name']}")
    return newest if _is_valid(newest) else ()


def check_whole(node: str, slices: Iterable[Json]) -> None:
    """Raise ContractError if a pool with slices for a node is incomplete or invalid: no claim can have all devices then."""
    for (_, pool), members in _pools(slices).items():
        newest, others = _on_and_off(node, members)
        if newest and (not _is_valid(newest) if others is not None else _is_newest(members, newest)):
            raise ContractError(f"pool {pool} is incomplete or invalid, so no claim can have all devices")


def _pools(slices: Iterable[Json]) -> Mapping[PoolKey, Sequence[Json]]:
    pools: dict[PoolKey, list[Json]] = {}
    for one in slices:
        pools.setdefault((one["spec"]["driver"], one["spec"]["pool"]["name"]), []).append(one)
    return pools


def _on_and_off(node: str, members: Sequence[Json]) -> tuple[Sequence[Json], Sequence[Json] | None]:
    """Return a pool's newest slices for a node, and those for others; None while slices are missing, or these are obsolete."""
    newest = _of_newest_generation([one for one in members if _is_for(node, one)])
    return newest, _elsewhere(members, newest) if newest else None


def _is_for(node: str, one: Json) -> bool:
    """Whether a slice counts on a node. Counters are for the whole pool, on whatever node their slice is."""
    return bool(one["spec"].get("nodeName") == node or one["spec"].get("sharedCounters"))


def _of_newest_generation(slices: Sequence[Json]) -> Sequence[Json]:
    generation = max(map(_generation, slices), default=0)
    return sorted((one for one in slices if _generation(one) == generation), key=lambda one: str(one["metadata"]["name"]))


def _elsewhere(members: Sequence[Json], newest: Sequence[Json]) -> Sequence[Json] | None:
    """Return a pool's slices for other nodes; None while slices are missing, or these are obsolete."""
    expected, generation = newest[0]["spec"]["pool"]["resourceSliceCount"], _generation(newest[0])
    if len(newest) == expected:
        return ()
    others = [one for one in members if _generation(one) == generation and one not in newest]
    return others if _is_newest(members, newest) and len(newest) + len(others) == expected else None


def _is_newest(members: Iterable[Json], found: Sequence[Json]) -> bool:
    """Whether no slice of a pool is newer than these."""
    return all(_generation(one) <= _generation(found[0]) for one in members)


def _is_valid(members: Sequence[Json]) -> bool:
    """Whether a pool's names are unique, and the counters that its devices draw on exist."""
    devices, sets = [raw["name"] for raw in _raw_devices(members)], [raw["name"] for raw in _raw_sets(members)]
    are_unique = len(set(devices)) == len(devices) and len(set(sets)) == len(sets)
    return are_unique and _drawn_sets(members) <= set(sets) and _drawn_counters(members) <= _totals(members).keys()


def _drawn_sets(members: Sequence[Json]) -> Set[str]:
    return {one["counterSet"] for raw in _raw_devices(members) for one in raw.get("consumesCounters") or ()}


def _drawn_counters(members: Sequence[Json]) -> Set[tuple[str, str]]:
    return {counter for raw in _raw_devices(members) for counter, _ in _drawn(raw)}


def _check_names(with_counters: Sequence[str]) -> None:
    """Raise ContractError if pools with counters differ only in their drivers: kube-scheduler takes their counters for the same."""
    if twice := sorted({name for name in with_counters if with_counters.count(name) > 1}):
        raise ContractError(f"several drivers have a pool {twice[0]} with counters, which is not predicted")


def _generation(one: Json) -> int:
    return int(one["spec"]["pool"].get("generation", 0))


def _raw_devices(members: Iterable[Json]) -> Iterable[Json]:
    """Yield the devices. A slice has devices or counters."""
    return (raw for one in members if not one["spec"].get("sharedCounters") for raw in one["spec"].get("devices") or ())


def _raw_sets(members: Iterable[Json]) -> Iterable[Json]:
    return (raw for one in members for raw in one["spec"].get("sharedCounters") or ())


def _totals(members: Iterable[Json]) -> Mapping[tuple[str, str], Fraction]:
    """Return what a pool's counters have, by set and name."""
    return {
        (raw["name"], name): _quantity(counter["value"])
        for raw in _raw_sets(members)
        for name, counter in (raw.get("counters") or {}).items()
    }


def _drawn(raw: Json) -> Iterable[tuple[tuple[str, str], Fraction]]:
    """Yield what a device draws, by set and name of the counter."""
    return (
        ((one["counterSet"], name), _quantity(counter["value"]))
        for one in raw.get("consumesCounters") or ()
        for name, counter in (one.get("counters") or {}).items()
    )


def _device(pool: PoolKey, raw: Json, totals: Mapping[tuple[str, str], Fraction]) -> Device:
    driver, name = pool
    return Device(
        (driver, name, raw["name"]),
        {name: _capacity(value) for name, value in (raw.get("capacity") or {}).items()},
        bool(raw.get("allowMultipleAllocations")),
        {_whole_name(name, driver): _value(value) for name, value in (raw.get("attributes") or {}).items()},
        tuple(
            Taint(taint["key"], taint.get("value") or "", taint["effect"])
            for taint in raw.get("taints") or ()
            if taint["effect"] in _PREVENTING
        ),
        _draws(pool, raw, totals),
    )


def _draws(pool: PoolKey, raw: Json, totals: Mapping[tuple[str, str], Fraction]) -> tuple[Draw, ...]:
    drawn: dict[tuple[str, str], Fraction] = {}
    for counter, amount in _drawn(raw):
        drawn[counter] = drawn.get(counter, Fraction(0)) + amount
    return tuple(Draw((*pool, *counter), amount, totals[counter]) for counter, amount in drawn.items())


def _whole_name(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _value(attribute: Json) -> object:
    """Return an attribute's value with its kind: the text "1" is not the number 1. None for another kind, such as a list.

    Raises: ContractError: Kubernetes cannot read a version. It then evaluates no selector for the device.
    """
    found = next(((kind, attribute[kind]) for kind in _KINDS if attribute.get(kind) is not None), None)
    if found is not None and found[0] == "version":
        parse_version(found[1])
    return found


def _capacity(raw: Json) -> Capacity:
    policy = raw.get("requestPolicy") or {}
    bounds = policy.get("validRange") or {}
    default, least, most, step = (
        None if text is None else _quantity(text)
        for text in (policy.get("default"), bounds.get("min"), bounds.get("max"), bounds.get("step"))
    )
    return Capacity(_quantity(raw["value"]), default, least, most, step, tuple(map(_quantity, policy.get("validValues") or ())))


def _quantity(text: str | float) -> Fraction:
    return parse_quantity(str(text))


def _alternatives(raw: Json, classes: Mapping[str, Json]) -> Iterable[Request]:
    """Yield what satisfies a request: one, or the first of several that fits."""
    if raw.get("exactly"):
        yield _request(raw["name"], raw["exactly"], classes)
    for one in raw.get("firstAvailable") or ():
        yield _request(f"{raw['name']}/{one['name']}", one, classes)


def _request(name: str, raw: Json, classes: Mapping[str, Json]) -> Request:
    device_class = classes.get(raw["deviceClassName"])
    if device_class is None:
        raise ContractError(f"request {name}: there is no DeviceClass {raw['deviceClassName']}")
    mode = raw.get("allocationMode") or COUNT
    if mode not in (COUNT, ALL):
        raise ContractError(f"request {name}: allocationMode {quote(mode)} is not predicted")
    return Request(
        name,
        int(raw.get("count") or 1),
        {capacity: _quantity(text) for capacity, text in ((raw.get("capacity") or {}).get("requests") or {}).items()},
        tuple(one["cel"]["expression"] for of in (device_class["spec"], raw) for one in of.get("selectors") or ()),
        tuple(_toleration(one) for one in raw.get("tolerations") or ()),
        mode == ALL,
        bool(raw.get("adminAccess")),
    )


def _toleration(raw: Json) -> Toleration:
    return Toleration(raw.get("key") or "", raw.get("operator") == "Exists", raw.get("value") or "", raw.get("effect") or "")


def _match(raw: Json) -> Match:
    if not raw.get("matchAttribute"):
        raise ContractError("constraints other than matchAttribute are not predicted")
    return Match(raw["matchAttribute"], frozenset(raw.get("requests") or ()))
