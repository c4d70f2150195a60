"""The limits a grant becomes: which words the shim reads for each share of a container."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent.core.borrowing import MOST_PERCENT
from agent.core.ledger import Grant
from agent.core.region_layout import DeviceLimit, Limits
from proto import units
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
    """A device's line in the node's pages, priority and turns alike."""


NO_PREFERENCES = Preferences()
NOTHING_KNOWN = DeviceFacts()


def may_burst(preferences: Preferences) -> bool:
    """Whether a container may hold more memory than it is guaranteed. That the node allows as much was settled when it was planned."""
    return preferences.memory_burst is not None and preferences.memory_burst > 1.0


def limits_of(
    grant: Grant, fail_policy: FailPolicy, preferences: Preferences = NO_PREFERENCES, facts: DeviceFacts = NOTHING_KNOWN
) -> Limits:
    """Return the content of the container's limits file, devices in the order the program sees them."""
    devices = tuple(_device_limit(share, preferences, facts) for share in grant.shares)
    return Limits(devices, fail_open=fail_policy is FailPolicy.OPEN)


def pausing(limits: Limits, *, paused: bool) -> Limits:
    """Return limits under which a container's launches wait, or do not."""
    return replace(limits, devices=tuple(replace(device, paused=paused) for device in limits.devices))


def _device_limit(share: DeviceShare, preferences: Preferences, facts: DeviceFacts) -> DeviceLimit:
    cores = share.cores_percent or 0
    by_weight = preferences.cores_mode is CoresMode.WEIGHT
    has_line = preferences.priority is not None or may_burst(preferences)
    return DeviceLimit(
        uuid=share.device_uuid,
        memory_bytes=share.memory_bytes,
        burst_bytes=_burst_bytes(share, preferences),
        context_bytes=facts.context_bytes.get(share.device_uuid, 0),
        sm_percent=min(cores, MOST_PERCENT) if by_weight else cores,
        sm_weight=cores if by_weight else 0,
        priority=PRIORITY_VALUES[preferences.priority],
        paused=preferences.paused,
        priority_line=facts.priority_lines.get(share.device_uuid, 0) if has_line else 0,
    )


def _burst_bytes(share: DeviceShare, preferences: Preferences) -> int:
    """Return the ceiling of a share that may burst; 0 for one that may not.

    What is above the share is memory that the driver may move to the host, and moves first: nobody's promise is behind it.
    """
    ratio = preferences.memory_burst or 1.0
    return units.floor_to_mib(int(share.memory_bytes * ratio)) if ratio > 1.0 else 0
