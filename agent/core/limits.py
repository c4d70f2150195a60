"""The limits a grant becomes: which words the shim reads for each share of a container."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.borrowing import MOST_PERCENT
from agent.core.ledger import Grant
from agent.core.region_layout import DeviceLimit, Limits
from proto.model import CoresMode, DeviceShare, Preferences, Priority

PRIORITY_VALUES = {Priority.HIGH: 1, Priority.LOW: -1, None: 0}
"""Larger runs first; a pod that states no priority stands between."""


class FailPolicy(StrEnum):
    """What the shim does in a container where it cannot work."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the node knows of its devices and the shim wants to be told, by device UUID."""

    context_bytes: Mapping[str, int] = field(default_factory=dict)
    """What one context costs; 0 where that was not measured."""
    priority_lines: Mapping[str, int] = field(default_factory=dict)


NO_PREFERENCES = Preferences()
NOTHING_KNOWN = DeviceFacts()


def limits_of(
    grant: Grant, fail_policy: FailPolicy, preferences: Preferences = NO_PREFERENCES, facts: DeviceFacts = NOTHING_KNOWN
) -> Limits:
    """Return the content of the container's limits file, devices in the order the program sees them."""
    devices = tuple(_device_limit(share, preferences, facts) for share in grant.shares)
    return Limits(devices, fail_open=fail_policy is FailPolicy.OPEN)


def _device_limit(share: DeviceShare, preferences: Preferences, facts: DeviceFacts) -> DeviceLimit:
    cores = share.cores_percent or 0
    by_weight = preferences.cores_mode is CoresMode.WEIGHT
    return DeviceLimit(
        uuid=share.device_uuid,
        memory_bytes=share.memory_bytes,
        context_bytes=facts.context_bytes.get(share.device_uuid, 0),
        sm_percent=min(cores, MOST_PERCENT) if by_weight else cores,
        sm_weight=cores if by_weight else 0,
        priority=PRIORITY_VALUES[preferences.priority],
        priority_line=facts.priority_lines.get(share.device_uuid, 0) if preferences.priority is not None else 0,
    )
