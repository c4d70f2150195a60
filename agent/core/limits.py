"""The limits a grant becomes: which words the shim reads for each share of a container."""

from enum import StrEnum

from agent.core.ledger import Grant
from agent.core.region_layout import DeviceLimit, Limits
from proto.model import Priority

PRIORITY_VALUES = {Priority.HIGH: 1, Priority.LOW: -1, None: 0}
"""Larger runs first; a pod that states no priority stands between."""


class FailPolicy(StrEnum):
    """What the shim does in a container where it cannot work."""

    CLOSED = "closed"
    OPEN = "open"


def limits_of(grant: Grant, fail_policy: FailPolicy, priority: Priority | None) -> Limits:
    """Return the content of the container's limits file, devices in the order the program sees them."""
    devices = tuple(
        DeviceLimit(
            uuid=share.device_uuid,
            memory_bytes=share.memory_bytes,
            sm_percent=share.cores_percent or 0,
            priority=PRIORITY_VALUES[priority],
        )
        for share in grant.shares
    )
    return Limits(devices, fail_open=fail_policy is FailPolicy.OPEN)
