# SPDX-License-Identifier: Apache-2.0
"""Refusals as data: a machine-readable reason for metrics and tests, and the message a user reads in the pod's events."""

from dataclasses import dataclass
from enum import StrEnum

from aliquot.placement.fit import Reject


class Reason(StrEnum):
    """Why the agent refuses a container's start. Adds to placement's reasons (``Reject``); both are values of the label ``reason``."""

    NOT_READY = "not-ready"
    """The agent knows no GPU on its node yet."""
    UNKNOWN_HOLDER = "unknown-holder"
    """Kubelet starts a container with device IDs, and PodResources lists no container with these IDs."""
    AMBIGUOUS_HOLDER = "ambiguous-holder"
    """Several containers may own the device IDs, and it is not known yet which one starts."""
    POD_MISSING = "pod-missing"
    """The pod did not appear in the Kubernetes API in time."""
    REQUEST_INVALID = "request-invalid"
    """The pod's resources or annotations are invalid; the pod bypassed the webhook."""
    REQUEST_DIFFERS = "request-differs"
    """Kubelet starts the container with a different number of device IDs than the known pod requests."""
    ASSIGNMENT_MISSING = "assignment-missing"
    """The pod has no assignment: another scheduler placed it."""
    ASSIGNMENT_INVALID = "assignment-invalid"
    """The assignment is malformed or differs from the pod's spec."""
    ASSIGNMENT_STALE = "assignment-stale"
    """The assignment belongs to another pod with the same name."""
    DEVICE_UNKNOWN = "device-unknown"
    """The assignment names a device that this node does not have."""
    IDS_HELD = "ids-held"
    """Kubelet gave the container device IDs that another container still holds, or a process that outlived its pod."""
    ADMISSION_STALE = "admission-stale"
    """Kubelet repeats the Allocate response from the container's admission, and that response is no longer valid on this node."""
    ISOLATION_UNAVAILABLE = "isolation-unavailable"
    """The node does not offer the isolation or the memory burst that the pod requests."""
    OVERCOMMITTED = "overcommitted"
    """A claim was allocated more of a device than the grants of this node leave: two allocators wrote, or one wrote wrongly."""
    CLAIM_UNALLOCATED = "claim-unallocated"
    """Kubelet prepares a ResourceClaim that is not allocated, or is another one with the same name."""
    LEDGER_DAMAGED = "ledger-damaged"
    """A container with a damaged ledger row may run on the GPU, and its amounts are unknown."""
    NODE_FAILURE = "node-failure"
    """The driver, kubelet or a file failed. The agent retries when kubelet retries."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused start. ``message`` says what was requested, what was found, and what to do."""

    reason: Reason | Reject
    message: str
