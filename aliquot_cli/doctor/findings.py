# SPDX-License-Identifier: Apache-2.0
"""The result of a check."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How serious a finding is, from the least to the most."""

    OK = "ok"
    INFO = "info"
    """Needs no action."""
    WARNING = "warning"
    """GPU sharing works, but something is missing or at risk."""
    ERROR = "error"
    """GPUs cannot be shared, or not safely, until this is fixed."""

    @property
    def weight(self) -> int:
        """Return the rank; larger is more serious."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. ``check`` is a stable name for scripts, such as ``runtime.cdi``. ``fix`` says what to do."""

    check: str
    severity: Severity
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    """Create a finding without a problem."""
    return Finding(check, Severity.OK, found)


def info(check: str, found: str, fix: str = "") -> Finding:
    """Create a finding that needs no action."""
    return Finding(check, Severity.INFO, found, fix)


def warning(check: str, found: str, fix: str) -> Finding:
    """Create a finding that something is missing or at risk."""
    return Finding(check, Severity.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    """Create a finding that must be fixed."""
    return Finding(check, Severity.ERROR, found, fix)


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the highest severity; OK without a finding."""
    return max((finding.severity for finding in findings), key=lambda severity: severity.weight, default=Severity.OK)
