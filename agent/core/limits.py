# SPDX-License-Identifier: Apache-2.0
"""Converts a grant to the content of the container's limits file, which the shim reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent.core.borrowing import MOST_PERCENT
from agent.core.ledger import Grant
from agent.core.region_layout import DeviceLimit, Limits
from aliquot.contract import units
from aliquot.contract.model import CoresMode, DeviceShare, Preferences, Priority

PRIORITY_VALUES = {Priority.HIGH: 1, Priority.LOW: -1, None: 0}
"""The larger value runs first. A pod without a priority is between high and low."""


class FailPolicy(StrEnum):
    """What the shim does in a container in which it cannot work."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about the node's devices that the shim needs, by device UUID."""

    context_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory of one context; 0 if it was not measured."""
    priority_lines: Mapping[str, int] = field(default_factory=dict)
    """A device's line in the node's shared pages: the same line for priorities and for time slots."""


NO_PREFERENCES = Preferences()
NOTHING_KNOWN = DeviceFacts()


def may_burst(preferences: Preferences) -> bool:
    """Whether a container may hold more memory than it is guaranteed. Planning has already checked that the node allows it."""
    return preferences.memory_burst is not None and preferences.memory_burst > 1.0


def limits_of(
    grant: Grant, fail_policy: FailPolicy, preferences: Preferences = NO_PREFERENCES, facts: DeviceFacts = NOTHING_KNOWN
) -> Limits:
    """Return the content of the container's limits file, with devices in the order in which the program sees them."""
    devices = tuple(_device_limit(share, preferences, facts) for share in grant.shares)
    return Limits(devices, fail_open=fail_policy is FailPolicy.OPEN)


def pausing(limits: Limits, *, paused: bool) -> Limits:
    """Return limits that pause or resume a container's launches."""
    return replace(limits, devices=tuple(replace(device, paused=paused) for device in limits.devices))


def with_sm_limit(limits: Limits, *, device_uuid: str, percent: int) -> Limits:
    """Return limits with another fixed SM limit on one device."""
    return replace(
        limits,
        devices=tuple(replace(device, sm_percent=percent) if device.uuid == device_uuid else device for device in limits.devices),
    )


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
    """Return the burst limit of a share; 0 if it may not burst.

    Memory above the share is not guaranteed: the driver may move it to the host, and moves it first.
    """
    ratio = preferences.memory_burst or 1.0
    return units.floor_to_mib(int(share.memory_bytes * ratio)) if ratio > 1.0 else 0
