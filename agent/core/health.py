# SPDX-License-Identifier: Apache-2.0
"""The health of one GPU as a state machine. Input: observations with their times. Output: whether new work may be placed on the GPU.

    healthy ── a soft sign ──> suspect ── quiet for a while ──> healthy
       │                          │  too many soft signs
       ├── a hard fault ──────────┴──> quarantined ─┬─ a clean answer ──> recovering ── clean for the hold ──> healthy
       └── off the bus ───────────────> lost ───────┘                         │
                     quarantined, lost <── any hard fault: back, and the hold is twice as long

A hold is a required time without faults. A GPU that answers is quarantined during most of the hold and recovering in its last part.

Only healthy and suspect GPUs get new work. Invariants: a GPU with a persistent fault (a row remap that waits for a reset, a reset that the
driver requests, no answer) is neither healthy nor suspect. A GPU that answers cleanly for ``max_recovery_seconds`` is healthy again without
an operator. A GPU that fails repeatedly waits longer each time, so it cannot flap. The XID classes follow NVIDIA's catalogue
(https://docs.nvidia.com/deploy/xid-errors/), with the reason in a few words.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final


class HealthState(StrEnum):
    """The health state of a GPU. The values are metric labels and words of the gpunodes object."""

    HEALTHY = "healthy"
    """The GPU answers and has no known fault. It gets new work."""
    SUSPECT = "suspect"
    """A warning was seen that may be harmless. The GPU still gets new work."""
    QUARANTINED = "quarantined"
    """The GPU has a fault, or had one recently. It gets no new work."""
    LOST = "lost"
    """The driver reports that the GPU is not on the bus. It gets no new work."""
    RECOVERING = "recovering"
    """The GPU has had no fault for most of its waiting time. It gets no new work yet, but will soon."""

    @property
    def usable(self) -> bool:
        """Whether new work may be placed on the GPU."""
        return self in (HealthState.HEALTHY, HealthState.SUSPECT)


class XidClass(StrEnum):
    """What an XID says about the GPU."""

    APPLICATION = "application"
    """A program made an error; the GPU itself is unaffected."""
    SOFT = "soft"
    """May be a hardware problem. One alone takes no GPU out of service. Includes unknown XIDs."""
    HARD = "hard"
    """The GPU is unreliable until it has been without faults for long, or was reset."""
    LOST = "lost"
    """The GPU is off the bus."""


_CATALOGUE: Final[Mapping[int, tuple[XidClass, str]]] = {
    13: (XidClass.APPLICATION, "exception in a program's kernel"),
    31: (XidClass.APPLICATION, "a program's memory page fault"),
    32: (XidClass.SOFT, "corrupted command stream"),
    38: (XidClass.SOFT, "driver firmware error"),
    43: (XidClass.APPLICATION, "a program's channel was stopped"),
    45: (XidClass.APPLICATION, "cleanup after a program that ended"),
    48: (XidClass.HARD, "uncorrectable memory error"),
    61: (XidClass.SOFT, "microcontroller warning"),
    62: (XidClass.HARD, "microcontroller halt"),
    63: (XidClass.SOFT, "memory row remapped or page retired"),
    64: (XidClass.HARD, "memory row could not be remapped or page not retired"),
    68: (XidClass.APPLICATION, "video decoder exception"),
    69: (XidClass.APPLICATION, "a program's graphics class error"),
    74: (XidClass.HARD, "NVLink error"),
    79: (XidClass.LOST, "fallen off the bus"),
    92: (XidClass.SOFT, "high rate of corrected memory errors"),
    94: (XidClass.APPLICATION, "uncorrectable memory error, contained to the program that met it"),
    95: (XidClass.HARD, "uncorrectable memory error, not contained"),
    109: (XidClass.APPLICATION, "context switch timed out"),
    110: (XidClass.HARD, "security fault"),
    119: (XidClass.HARD, "GSP firmware does not answer"),
    120: (XidClass.HARD, "GSP firmware error"),
    140: (XidClass.HARD, "unrecovered memory error"),
    143: (XidClass.HARD, "initialisation failed"),
    149: (XidClass.HARD, "NVLink fatal error"),
    154: (XidClass.SOFT, "GPU recovery action changed"),  # the next reading shows the new action, which may be no action
}


@dataclass(frozen=True, slots=True)
class HealthRules:
    """Durations in seconds, and the XIDs that the operator classifies differently."""

    recovery_seconds: float = 30.0
    """How long a GPU must answer cleanly before it gets new work again."""
    quarantine_seconds: float = 300.0
    """The same after a hard XID. Longer, because the agent cannot query whether an XID's cause is over."""
    max_recovery_seconds: float = 3600.0
    """The longest hold of a GPU that fails repeatedly."""
    suspect_seconds: float = 300.0
    """How long a warning is remembered."""
    suspect_limit: int = 3
    """This many warnings within that time count as a hard fault."""
    application_xids: frozenset[int] = frozenset()
    hard_xids: frozenset[int] = frozenset()

    @property
    def relapse_seconds(self) -> float:
        """A GPU that fails within this time after it became healthy has relapsed."""
        return self.max_recovery_seconds


def classify(xid: int, rules: HealthRules) -> XidClass:
    """Return the class of an XID. The operator's lists take precedence over the catalogue."""
    if xid in rules.application_xids:
        return XidClass.APPLICATION
    if xid in rules.hard_xids:
        return XidClass.HARD
    return _CATALOGUE.get(xid, (XidClass.SOFT, ""))[0]


def describe_xid(xid: int) -> str:
    """Return an XID with its meaning, for messages."""
    text = _CATALOGUE.get(xid, (XidClass.SOFT, ""))[1]
    return f"XID {xid} ({text})" if text else f"XID {xid}"


def parse_xids(text: str) -> frozenset[int]:
    """Parse a comma-separated list of XIDs from a setting. Raises ValueError."""
    return frozenset(int(word) for word in text.replace(" ", "").split(",") if word)


@dataclass(frozen=True, slots=True)
class Answer:
    """A GPU answered. ``faults`` are the persistent ones: they do not go away by waiting."""

    faults: tuple[str, ...] = ()
    uncorrected_errors: int | None = None
    """Uncorrectable memory errors over the lifetime of the hardware; None if the GPU does not count them."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A GPU did not answer, or the driver as a whole did not."""

    trouble: str
    lost: bool = False
    """Whether the GPU is off the bus."""


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One GPU's health at its last observation. Times are monotonic seconds."""

    state: HealthState = HealthState.HEALTHY
    reason: str = ""
    """The fault that led to this state. The text stays the same while the fault lasts; empty while healthy."""
    since: float = 0.0
    """When the state was entered."""
    hold_seconds: float = 0.0
    """How long the GPU must be clean before it is healthy. Kept afterwards, to double it when the GPU relapses."""
    clean_since: float | None = None
    signs: tuple[float, ...] = field(default=())
    """Times of the warnings that are still remembered."""
    uncorrected_errors: int | None = None
    silent: bool = False
    """Whether the GPU is out of service for one reason: it did not answer for a time. It may answer again, and have no other fault."""

    def after_xids(self, xids: Collection[int], now: float, rules: HealthRules) -> "GpuHealth":
        """Apply the XIDs reported since the last observation. Together they count as one incident."""
        by_class: dict[XidClass, int] = {}
        for xid in xids:
            by_class.setdefault(classify(xid, rules), xid)
        if XidClass.LOST in by_class:
            return self._failed(HealthState.LOST, describe_xid(by_class[XidClass.LOST]), rules.recovery_seconds, now, rules)
        if XidClass.HARD in by_class:
            return self._failed(HealthState.QUARANTINED, describe_xid(by_class[XidClass.HARD]), rules.quarantine_seconds, now, rules)
        if XidClass.SOFT in by_class:
            return self._with_warning(describe_xid(by_class[XidClass.SOFT]), now, rules)
        return self

    def after_probe(self, probe: Answer | Silence, now: float, rules: HealthRules) -> "GpuHealth":
        """Apply one observation of the GPU. Only observations advance the state: without one, it stays as it is."""
        if isinstance(probe, Silence):
            state = HealthState.LOST if probe.lost else HealthState.QUARANTINED
            failed = self._failed(state, probe.trouble, rules.recovery_seconds, now, rules)
            return replace(failed, silent=not probe.lost and (self.state.usable or self.silent))
        before = self.uncorrected_errors
        updated = replace(self, uncorrected_errors=probe.uncorrected_errors)
        if probe.faults:
            return updated._failed(HealthState.QUARANTINED, "; ".join(probe.faults), rules.recovery_seconds, now, rules)
        if before is not None and probe.uncorrected_errors is not None and probe.uncorrected_errors > before:
            return updated._with_warning(f"{probe.uncorrected_errors - before} uncorrectable memory errors", now, rules)
        return updated._clean(now, rules)

    def _failed(self, state: HealthState, reason: str, least_hold_seconds: float, now: float, rules: HealthRules) -> "GpuHealth":
        """Take the GPU out of service. If it is out already, a further fault only restarts the clean time and may lengthen the hold."""
        if self.state in (HealthState.QUARANTINED, HealthState.LOST):
            hold = max(self.hold_seconds, min(least_hold_seconds, rules.max_recovery_seconds))
            held = replace(self, hold_seconds=hold, clean_since=None, silent=False)
            # a lost GPU stays lost until it answers; otherwise keep the first reason, because it started the quarantine
            return held if self.state in (state, HealthState.LOST) else replace(held, state=state, reason=reason, since=now)
        relapsed = self.hold_seconds > 0 and (self.state is HealthState.RECOVERING or now - self.since < rules.relapse_seconds)
        hold = min(max(least_hold_seconds, 2 * self.hold_seconds if relapsed else 0.0), rules.max_recovery_seconds)
        return replace(self, state=state, reason=reason, since=now, hold_seconds=hold, clean_since=None, signs=(), silent=False)

    def _with_warning(self, reason: str, now: float, rules: HealthRules) -> "GpuHealth":
        """Add a warning. While the GPU is out of service, a warning restarts its clean time."""
        if not self.state.usable:
            return replace(self, clean_since=now if self.state is HealthState.RECOVERING else None, silent=False)
        signs = (*(at for at in self.signs if now - at < rules.suspect_seconds), now)
        if len(signs) >= rules.suspect_limit:
            return self._failed(
                HealthState.QUARANTINED, f"{len(signs)} warnings in a row, the last: {reason}", rules.quarantine_seconds, now, rules
            )
        since = self.since if self.state is HealthState.SUSPECT else now
        return replace(self, state=HealthState.SUSPECT, reason=reason, since=since, signs=signs)

    def _clean(self, now: float, rules: HealthRules) -> "GpuHealth":
        """Apply an answer without faults."""
        if self.state is HealthState.HEALTHY:
            return self
        if self.state is HealthState.SUSPECT:
            return self if now - self.signs[-1] < rules.suspect_seconds else self._healthy(now)
        clean = self if self.clean_since is not None else replace(self, clean_since=now)
        left_seconds = self.hold_seconds - (now - (now if self.clean_since is None else self.clean_since))
        if left_seconds <= 0:
            return self._healthy(now)
        state = HealthState.RECOVERING if left_seconds <= rules.recovery_seconds else HealthState.QUARANTINED
        return clean if self.state in (state, HealthState.RECOVERING) else replace(clean, state=state, since=now)

    def _healthy(self, now: float) -> "GpuHealth":
        return replace(self, state=HealthState.HEALTHY, reason="", since=now, clean_since=None, signs=(), silent=False)


@dataclass(frozen=True, slots=True)
class Transition:
    """A GPU's change from one state to another."""

    device_uuid: str
    before: HealthState
    after: HealthState
    reason: str
    """The fault. For a GPU that is healthy again: the fault it has recovered from."""


@dataclass(frozen=True, slots=True)
class HealthTable:
    """The health of all GPUs seen so far, by UUID. A GPU without an entry is healthy."""

    gpus: Mapping[str, GpuHealth] = field(default_factory=dict)

    def of(self, device_uuid: str) -> GpuHealth:
        """Return one GPU's health."""
        return self.gpus.get(device_uuid, GpuHealth())

    def after_probes(self, probes: Mapping[str, Answer | Silence], now: float, rules: HealthRules) -> "HealthTable":
        """Apply observations of some of the GPUs; the others stay as they are."""
        return HealthTable({**self.gpus, **{uuid: self.of(uuid).after_probe(probe, now, rules) for uuid, probe in probes.items()}})

    def after_xids(self, reports: Sequence[tuple[str, int]], now: float, rules: HealthRules) -> "HealthTable":
        """Apply XIDs, each with the UUID of its GPU."""
        by_uuid: dict[str, list[int]] = {}
        for uuid, xid in reports:
            by_uuid.setdefault(uuid, []).append(xid)
        return HealthTable({**self.gpus, **{uuid: self.of(uuid).after_xids(xids, now, rules) for uuid, xids in by_uuid.items()}})

    def transitions_to(self, after: "HealthTable") -> tuple[Transition, ...]:
        """Return what changed between this table and a later one."""
        found = []
        for uuid, gpu in after.gpus.items():
            before = self.of(uuid)
            if before.state is not gpu.state:
                found.append(Transition(uuid, before.state, gpu.state, gpu.reason or before.reason))
        return tuple(found)
