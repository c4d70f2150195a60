"""Refusals as data: a machine-readable reason for metrics and tests, and the sentence a user reads in the pod's events."""

from dataclasses import dataclass
from enum import StrEnum

from placement.fit import Reject


class Reason(StrEnum):
    """Why a container was not granted its devices, where placement has no word for it. Both are values of the label ``reason``."""

    NOT_READY = "not-ready"
    """The agent knows no GPU on its node yet."""
    UNKNOWN_HOLDER = "unknown-holder"
    """Kubelet names no container that holds the IDs it is starting."""
    AMBIGUOUS_HOLDER = "ambiguous-holder"
    """The IDs may be those of several containers, and nothing says yet which one starts."""
    POD_MISSING = "pod-missing"
    """The pod did not appear in the Kubernetes API in time."""
    REQUEST_INVALID = "request-invalid"
    """The pod's resources or annotations mean nothing; it passed no webhook."""
    REQUEST_DIFFERS = "request-differs"
    """Kubelet starts the container with another number of IDs than the pod that is known asks for."""
    ASSIGNMENT_MISSING = "assignment-missing"
    """The pod was not placed by our scheduler."""
    ASSIGNMENT_INVALID = "assignment-invalid"
    """The assignment does not say what the pod's spec asks for."""
    ASSIGNMENT_STALE = "assignment-stale"
    """The assignment is another pod's, of the same name."""
    DEVICE_UNKNOWN = "device-unknown"
    """The assignment names a device that this node does not have."""
    IDS_HELD = "ids-held"
    """Kubelet gave the container IDs that another one still holds, or a process that outlived it."""
    ADMISSION_STALE = "admission-stale"
    """What Allocate answered when the container was admitted leads nowhere on this node any more, and kubelet repeats it."""
    ISOLATION_UNAVAILABLE = "isolation-unavailable"
    """The node does not offer the isolation or the memory burst that the pod wants."""
    NODE_FAILURE = "node-failure"
    """The driver, kubelet or a file failed; tried again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was asked, what is there instead, and what would cure it."""

    reason: Reason | Reject
    message: str
