# SPDX-License-Identifier: Apache-2.0
"""Reads ResourceSlices, DeviceClasses and ResourceClaims, as JSON, into what ``first_fit`` works with. Pure.

Invariant: the devices of a node come in the order of kube-scheduler's search: pools by driver and name, in a pool slices by name, in a
slice devices as listed. Pools with binding conditions come last; incomplete pools, and those that name a device twice, are left out.
Source: https://pkg.go.dev/k8s.io/api/resource/v1, and k8s.io/dynamic-resource-allocation/structured, ``GatherPools``
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from aliquot.contract.errors import ContractError
from aliquot.contract.units import parse_quantity
from scheduler_plugin.core.claims.first_fit import Capacity, Claim, Device, Match, Request, Taint, Toleration

Json = Mapping[str, Any]

_PREVENTING: Final = ("NoSchedule", "NoExecute")
_KINDS: Final = ("string", "int", "bool", "version")


def devices_of(node: str, slices: Iterable[Json]) -> Sequence[Device]:
    """Return the devices that only this node has, in the search's order.

    Raises: ContractError: a device draws on shared counters, which the search here does not know; or a quantity cannot be read.
    """
    pools: dict[tuple[str, str], list[Json]] = {}
    for one in slices:
        pools.setdefault((one["spec"]["driver"], one["spec"]["pool"]["name"]), []).append(one)
    complete = {key: found for key, members in sorted(pools.items()) if (found := _usable(node, members))}
    last = {key for key, members in complete.items() if any(raw.get("bindingConditions") for raw in _raw_devices(members))}
    ordered = [*(key for key in complete if key not in last), *(key for key in complete if key in last)]
    return [_device(key, raw) for key in ordered for raw in _raw_devices(complete[key])]


def claim_of(found: Json, classes: Mapping[str, Json]) -> Claim:
    """Return a claim. Raises ContractError for what the search here does not know, such as an unknown class or admin access."""
    spec = found["spec"].get("devices") or {}
    requests = tuple(tuple(_alternatives(raw, classes)) for raw in spec.get("requests") or ())
    return Claim(requests, tuple(_match(raw) for raw in spec.get("constraints") or ()))


def _usable(node: str, members: Sequence[Json]) -> Sequence[Json]:
    """Return a pool's slices on a node, by name. Empty while slices of the pool are missing or a device has two entries.

    Slices for other nodes count, too: they complete a pool, and a newer generation there makes the node's own slices obsolete.
    """
    own = [one for one in members if one["spec"].get("nodeName") == node]
    if not own:
        return ()
    generation = max(map(_generation, own))
    newest = sorted((one for one in own if _generation(one) == generation), key=lambda one: str(one["metadata"]["name"]))
    expected = newest[0]["spec"]["pool"]["resourceSliceCount"]
    if len(newest) != expected:
        present = [one for one in members if _generation(one) == generation]
        if len(present) != expected or any(_generation(one) > generation for one in members):
            return ()
    names = [raw["name"] for raw in _raw_devices(newest)]
    return newest if len(set(names)) == len(names) else ()


def _generation(one: Json) -> int:
    return int(one["spec"]["pool"].get("generation", 0))


def _raw_devices(members: Iterable[Json]) -> Iterable[Json]:
    return (raw for one in members for raw in one["spec"].get("devices") or ())


def _device(pool: tuple[str, str], raw: Json) -> Device:
    driver, name = pool
    if raw.get("consumesCounters"):
        raise ContractError(f"device {raw['name']} of pool {name} draws on shared counters, which are not predicted")
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
    )


def _whole_name(name: str, driver: str) -> str:
    return name if "/" in name else f"{driver}/{name}"


def _value(attribute: Json) -> object:
    """Return an attribute's value with its kind: the text "1" is not the number 1. None for another kind, such as a list."""
    return next(((kind, attribute[kind]) for kind in _KINDS if attribute.get(kind) is not None), None)


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
    if raw.get("allocationMode", "ExactCount") != "ExactCount" or raw.get("adminAccess"):
        raise ContractError(f"request {name}: allocation modes and adminAccess are not predicted")
    return Request(
        name,
        int(raw.get("count") or 1),
        {capacity: _quantity(text) for capacity, text in ((raw.get("capacity") or {}).get("requests") or {}).items()},
        tuple(one["cel"]["expression"] for of in (device_class["spec"], raw) for one in of.get("selectors") or ()),
        tuple(_toleration(one) for one in raw.get("tolerations") or ()),
    )


def _toleration(raw: Json) -> Toleration:
    return Toleration(raw.get("key") or "", raw.get("operator") == "Exists", raw.get("value") or "", raw.get("effect") or "")


def _match(raw: Json) -> Match:
    if not raw.get("matchAttribute"):
        raise ContractError("constraints other than matchAttribute are not predicted")
    return Match(raw["matchAttribute"], frozenset(raw.get("requests") or ()))
