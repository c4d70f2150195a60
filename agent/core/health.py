"""The health of one GPU as a state machine: what was seen of it goes in with the time of seeing, whether work may go there comes out.

    healthy ── a soft sign ──> suspect ── quiet for a while ──> healthy
       │                          │  too many soft signs
       ├── a hard fault ──────────┴──> quarantined ─┬─ a clean answer ──> recovering ── clean for the hold ──> healthy
       └── gone from the bus ─────────> lost ───────┘                         │
                     quarantined, lost <── any hard fault: back, and the hold is twice as long

A hold is a time without faults; recovering is its end, before which a GPU that answers is quarantined.

Healthy and suspect GPUs are given out, the others are not. Kept true: a GPU with a fault that stands (a row remap that waits for a reset,
a reset the driver asks for, no answer) is neither healthy nor suspect; whatever happened, one that answers cleanly for
``max_recovery_seconds`` is healthy again, without anybody's help; and one that falls again and again waits longer each time, so it cannot
flap. The classes of XIDs follow NVIDIA's catalogue (https://docs.nvidia.com/deploy/xid-errors/), with the reason in a few words.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final


class HealthState(StrEnum):
    """Where a GPU stands. The values are metric labels and words of the gpunodes object."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Something was seen that may be nothing. Still given out."""
    QUARANTINED = "quarantined"
    """A fault: no new work."""
    LOST = "lost"
    """Not on the bus, as far as the driver can tell."""
    RECOVERING = "recovering"
    """It has had no fault for long, and will soon be given out."""

    @property
    def usable(self) -> bool:
        """Whether new work may go there."""
        return self in (HealthState.HEALTHY, HealthState.SUSPECT)


class XidClass(StrEnum):
    """What an XID says about the GPU."""

    APPLICATION = "application"
    """A program did something wrong; the GPU is as good as before."""
    SOFT = "soft"
    """May point to the hardware; one alone takes nothing out of service. Also what we do not know."""
    HARD = "hard"
    """The GPU cannot be trusted until it has been quiet for long, or was reset."""
    LOST = "lost"
    """The GPU is gone from the bus."""


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
    154: (XidClass.SOFT, "another recovery action is asked for"),  # which one, the next reading tells: it may be none
}


@dataclass(frozen=True, slots=True)
class HealthRules:
    """How long things take, in seconds, and what an operator classifies differently."""

    recovery_seconds: float = 30.0
    """How long a GPU must answer cleanly before it is given out again."""
    quarantine_seconds: float = 300.0
    """The same after a hard XID: what cannot be asked for again must have been over for longer."""
    max_recovery_seconds: float = 3600.0
    """The longest hold of a GPU that falls again and again."""
    suspect_seconds: float = 300.0
    """How long a soft sign is remembered."""
    suspect_limit: int = 3
    """Soft signs within that time that make a hard fault."""
    application_xids: frozenset[int] = frozenset()
    hard_xids: frozenset[int] = frozenset()

    @property
    def relapse_seconds(self) -> float:
        """A GPU that falls within this time of having become healthy has relapsed."""
        return self.max_recovery_seconds


def classify(xid: int, rules: HealthRules) -> XidClass:
    """Say what an XID means; the operator's lists beat the catalogue."""
    if xid in rules.application_xids:
        return XidClass.APPLICATION
    if xid in rules.hard_xids:
        return XidClass.HARD
    return _CATALOGUE.get(xid, (XidClass.SOFT, ""))[0]


def describe_xid(xid: int) -> str:
    """Name an XID for people."""
    text = _CATALOGUE.get(xid, (XidClass.SOFT, ""))[1]
    return f"XID {xid} ({text})" if text else f"XID {xid}"


def parse_xids(text: str) -> frozenset[int]:
    """Read a comma list of XIDs, as settings have it. Raises ValueError."""
    return frozenset(int(word) for word in text.replace(" ", "").split(",") if word)


@dataclass(frozen=True, slots=True)
class Answer:
    """A GPU answered. ``faults`` are those that stand: they do not pass by waiting."""

    faults: tuple[str, ...] = ()
    uncorrected_errors: int | None = None
    """Memory errors that could not be corrected, in the life of the board; None where it does not count them."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A GPU did not answer, or the driver as a whole did not."""

    trouble: str
    lost: bool = False
    """Whether it is gone from the bus."""


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One GPU's health at the time it was last looked at. Times are monotonic seconds."""

    state: HealthState = HealthState.HEALTHY
    reason: str = ""
    """The fault that led here, in words that stay the same while it lasts; empty while healthy."""
    since: float = 0.0
    """When the state was entered."""
    hold_seconds: float = 0.0
    """How long it must be clean before it is healthy; kept afterwards, to double it when the GPU relapses."""
    clean_since: float | None = None
    signs: tuple[float, ...] = field(default=())
    """When soft signs were seen, as far as they are remembered."""
    uncorrected_errors: int | None = None

    def after_xids(self, xids: Collection[int], now: float, rules: HealthRules) -> "GpuHealth":
        """Take in the XIDs that were reported since the last look. However many, they are one incident."""
        by_class: dict[XidClass, int] = {}
        for xid in xids:
            by_class.setdefault(classify(xid, rules), xid)
        if XidClass.LOST in by_class:
            return self._fallen(HealthState.LOST, describe_xid(by_class[XidClass.LOST]), rules.recovery_seconds, now, rules)
        if XidClass.HARD in by_class:
            return self._fallen(HealthState.QUARANTINED, describe_xid(by_class[XidClass.HARD]), rules.quarantine_seconds, now, rules)
        if XidClass.SOFT in by_class:
            return self._with_sign(describe_xid(by_class[XidClass.SOFT]), now, rules)
        return self

    def after_probe(self, probe: Answer | Silence, now: float, rules: HealthRules) -> "GpuHealth":
        """Take in one look at the GPU. Only looks let time pass: a GPU that is not looked at stays as it is."""
        if isinstance(probe, Silence):
            state = HealthState.LOST if probe.lost else HealthState.QUARANTINED
            return self._fallen(state, probe.trouble, rules.recovery_seconds, now, rules)
        known = self.uncorrected_errors
        looked = replace(self, uncorrected_errors=probe.uncorrected_errors)
        if probe.faults:
            return looked._fallen(HealthState.QUARANTINED, "; ".join(probe.faults), rules.recovery_seconds, now, rules)
        if known is not None and probe.uncorrected_errors is not None and probe.uncorrected_errors > known:
            return looked._with_sign(f"{probe.uncorrected_errors - known} uncorrectable memory errors", now, rules)
        return looked._clean(now, rules)

    def _fallen(self, state: HealthState, reason: str, least_hold_seconds: float, now: float, rules: HealthRules) -> "GpuHealth":
        """Return it out of service. While it is, further faults only begin its clean time anew, and lengthen it to what they ask."""
        if self.state in (HealthState.QUARANTINED, HealthState.LOST):
            hold = max(self.hold_seconds, min(least_hold_seconds, rules.max_recovery_seconds))
            held = replace(self, hold_seconds=hold, clean_since=None)
            # what is gone cannot be worse, and stays gone until it answers; the first reason is the one that led here
            return held if self.state in (state, HealthState.LOST) else replace(held, state=state, reason=reason, since=now)
        relapsed = self.hold_seconds > 0 and (self.state is HealthState.RECOVERING or now - self.since < rules.relapse_seconds)
        hold = min(max(least_hold_seconds, 2 * self.hold_seconds if relapsed else 0.0), rules.max_recovery_seconds)
        return replace(self, state=state, reason=reason, since=now, hold_seconds=hold, clean_since=None, signs=())

    def _with_sign(self, reason: str, now: float, rules: HealthRules) -> "GpuHealth":
        """Return it with one more soft sign. Out of service, a sign means that it was not clean after all."""
        if not self.state.usable:
            return replace(self, clean_since=now if self.state is HealthState.RECOVERING else None)
        signs = (*(at for at in self.signs if now - at < rules.suspect_seconds), now)
        if len(signs) >= rules.suspect_limit:
            return self._fallen(
                HealthState.QUARANTINED, f"{len(signs)} warnings in a row, the last: {reason}", rules.quarantine_seconds, now, rules
            )
        since = self.since if self.state is HealthState.SUSPECT else now
        return replace(self, state=HealthState.SUSPECT, reason=reason, since=since, signs=signs)

    def _clean(self, now: float, rules: HealthRules) -> "GpuHealth":
        """Return it after an answer without any fault."""
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
        return replace(self, state=HealthState.HEALTHY, reason="", since=now, clean_since=None, signs=())


@dataclass(frozen=True, slots=True)
class Transition:
    """A GPU that went from one state to another."""

    device_uuid: str
    before: HealthState
    after: HealthState
    reason: str
    """What led out of health; for one that is healthy again, what it has recovered from."""


@dataclass(frozen=True, slots=True)
class HealthTable:
    """The health of all GPUs seen so far, by UUID. One that was never in trouble may be missing: it is healthy."""

    gpus: Mapping[str, GpuHealth] = field(default_factory=dict)

    def of(self, device_uuid: str) -> GpuHealth:
        """Return one GPU's health."""
        return self.gpus.get(device_uuid, GpuHealth())

    def after_probes(self, probes: Mapping[str, Answer | Silence], now: float, rules: HealthRules) -> "HealthTable":
        """Take in a look at some of the GPUs; the others stay as they are."""
        return HealthTable({**self.gpus, **{uuid: self.of(uuid).after_probe(probe, now, rules) for uuid, probe in probes.items()}})

    def after_xids(self, reports: Sequence[tuple[str, int]], now: float, rules: HealthRules) -> "HealthTable":
        """Take in XIDs, each with the UUID of its GPU."""
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
