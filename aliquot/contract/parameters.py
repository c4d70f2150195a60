# SPDX-License-Identifier: Apache-2.0
"""The opaque parameters of ResourceClaims and DeviceClasses: kind ``VgpuParameters``, versioned, without unknown fields.

A DeviceClass and a claim may both have parameters. Those of the class come first, and a later one replaces each field that it states.
"""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from aliquot.contract import PARAMETERS_API_VERSION, PARAMETERS_KIND
from aliquot.contract.errors import ContractError
from aliquot.contract.model import CoresMode, Isolation, Preferences, Priority

ISOLATIONS = (Isolation.SHIM, Isolation.EXCLUSIVE)
"""The backends that a claim may choose so far."""
_MEANING = "isolation (shim or exclusive), priority (high or low), coresMode (ceiling or weight), memoryBurst (such as 1.5)"


class _Parameters(msgspec.Struct, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    api_version: str = ""
    kind: str = ""
    isolation: Isolation | None = None
    priority: Priority | None = None
    cores_mode: CoresMode | None = None
    memory_burst: str | float | None = None


def preferences_of(parameters: Iterable[bytes | msgspec.Raw]) -> Preferences:
    """Merge parameters, as JSON, in their order. Raises ContractError with the wrong part and what is allowed."""
    merged = Preferences()
    for text in parameters:
        one = _decode(text)
        stated = {
            "isolation": one.isolation,
            "priority": one.priority,
            "cores_mode": one.cores_mode,
            "memory_burst": _burst(one.memory_burst),
        }
        merged = replace(merged, **{name: value for name, value in stated.items() if value is not None})  # type: ignore[arg-type]
    return merged


def _decode(text: bytes | msgspec.Raw) -> _Parameters:
    try:
        found = msgspec.json.decode(text, type=_Parameters)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ContractError(f"parameters of the claim or its DeviceClass: {exc}. {PARAMETERS_KIND} has the fields {_MEANING}") from exc
    if (found.api_version, found.kind) != (PARAMETERS_API_VERSION, PARAMETERS_KIND):
        raise ContractError(
            f"parameters of the claim or its DeviceClass: expected {PARAMETERS_API_VERSION} {PARAMETERS_KIND}, "
            f"found {found.api_version or 'no apiVersion'} {found.kind or 'without a kind'}"
        )
    if found.isolation not in (None, *ISOLATIONS):
        raise ContractError(
            f"isolation {found.isolation} is not available to claims: write {' or '.join(ISOLATIONS)}, "
            "or request vGPUs from a node that uses the device plugin"
        )
    return found


def _burst(found: str | float | None) -> float | None:
    if found is None:
        return None
    try:
        burst = float(found)
    except ValueError as exc:
        raise ContractError(f"memoryBurst {found!r}: expected a ratio of at least 1, such as 1.5") from exc
    if not 1.0 <= burst <= 10.0:  # as the agent's setting memoryOversubscription
        raise ContractError(f"memoryBurst {found!r}: expected a ratio from 1 to 10")
    return burst
