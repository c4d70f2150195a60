"""What an examination says."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters, the least first."""

    OK = "ok"
    INFO = "info"
    """Worth knowing; nothing needs to be done."""
    WARNING = "warning"
    """Works, with something missing or at risk."""
    ERROR = "error"
    """GPUs cannot be shared, or not safely, until it is cured."""

    @property
    def weight(self) -> int:
        """Larger is worse."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined. ``check`` is a stable name, such as ``runtime.cdi``, for scripts."""

    check: str
    severity: Severity
    found: str
    fix: str = ""


def ok(check: str, found: str) -> Finding:
    """Make a finding that all is well."""
    return Finding(check, Severity.OK, found)


def info(check: str, found: str, fix: str = "") -> Finding:
    """Make a finding worth knowing."""
    return Finding(check, Severity.INFO, found, fix)


def warning(check: str, found: str, fix: str) -> Finding:
    """Make a finding that something is missing or at risk."""
    return Finding(check, Severity.WARNING, found, fix)


def error(check: str, found: str, fix: str) -> Finding:
    """Make a finding that must be cured."""
    return Finding(check, Severity.ERROR, found, fix)


def worst(findings: Iterable[Finding]) -> Severity:
    """Return the gravest severity; OK when there is no finding."""
    return max((finding.severity for finding in findings), key=lambda severity: severity.weight, default=Severity.OK)
