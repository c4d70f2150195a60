"""Refusals as data: a machine-readable reason for metrics and tests, and the sentence a user reads in the pod's events."""

from dataclasses import dataclass
from enum import StrEnum

from placement.fit import Reject


class Reason(StrEnum):
    """Why a container was not granted its devices, where placement has no word for it. Both are values of the label ``reason``."""

    NOT_READY = "not-ready"
    UNKNOWN_HOLDER = "unknown-holder"
    AMBIGUOUS_HOLDER = "ambiguous-holder"
    POD_MISSING = "pod-missing"
    REQUEST_INVALID = "request-invalid"
    REQUEST_DIFFERS = "request-differs"
    ASSIGNMENT_MISSING = "assignment-missing"
    ASSIGNMENT_INVALID = "assignment-invalid"
    ASSIGNMENT_STALE = "assignment-stale"
    DEVICE_UNKNOWN = "device-unknown"
    IDS_HELD = "ids-held"
    ISOLATION_UNAVAILABLE = "isolation-unavailable"
    NODE_FAILURE = "node-failure"


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was asked, what is there instead, and what would cure it."""

    reason: Reason | Reject
    message: str
