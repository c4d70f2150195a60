# SPDX-License-Identifier: Apache-2.0
"""Explanations and placements as lines of text."""

from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo

from scheduler_plugin.core.explain.one import ReasonCount
from scheduler_plugin.core.explain.what_if import Figures, Placement
from scheduler_plugin.core.explain.why import Why
from scheduler_plugin.core.fit.kube_filters import NOT_CHECKED

_SHOWN_DEVICES = 4
STALE_SECONDS = 70.0
"""Age from which a state is reported as old. API servers send a bookmark every minute when nothing changes."""


def why_lines(why: Why) -> Iterator[str]:
    """Explain one pod, and add a line where the scheduler's state is old."""
    yield from _answer_lines(why)
    yield from age_lines(why.generation, why.age_seconds)


def age_lines(generation: int | None, age_seconds: float | None) -> Iterator[str]:
    """Yield a line where the scheduler's state is incomplete or old. Args: as in ``Why``."""
    if generation is None:
        return
    if age_seconds is None:
        yield "the scheduler has not listed the whole cluster yet: this result can be incomplete"
    elif age_seconds > STALE_SECONDS:
        yield f"this is the cluster's state {age_seconds:.0f} s ago: the API server has sent the scheduler no complete update since then"


def _answer_lines(why: Why) -> Iterator[str]:
    is_answered = bool(why.node or why.refusal or why.fitting)
    yield f"{why.pod}: {why.sentence}" if is_answered else f"{why.pod}: {why.held_back}0 of {why.nodes} nodes fit"
    if why.fitting or not is_answered:
        yield from _reason_lines(why.reasons)
    if why.start is not None:
        yield why.start.sentence(local_zone())
    if not is_answered:
        yield from _cure_lines(why)


def _cure_lines(why: Why) -> Iterator[str]:
    if why.held:
        yield why.held
    if why.changes:
        yield "each of these changes alone makes it fit:"
        yield from (f"  - {change.sentence}" for change in why.changes)
    elif not why.by_claims:
        yield "no single change to this pod, its neighbours or a cordon makes it fit: combine several, or add a node with what these lack"
    if why.not_checked:
        yield not_checked_line()


def placement_line(placement: Placement, *, wide: bool = False) -> str:
    """Return where one pod would run. ``wide`` adds every device, and example nodes for each reason."""
    if placement.node:
        devices = placement.devices if wide else placement.devices[:_SHOWN_DEVICES]
        return f"{placement.pod}: node {placement.node}, {', '.join(devices)}{', ...' if len(devices) < len(placement.devices) else ''}"
    if placement.refusal:
        return f"{placement.pod}: {placement.refusal}"
    reasons = (f"{one.nodes} {one.reason}{f' ({_examples(one)})' if wide else ''}" for one in placement.reasons)
    return f"{placement.pod}: fits nowhere: " + "; ".join(reasons)


def not_checked_line() -> str:
    """Return the line that names what the result does not check."""
    return f"not checked: {NOT_CHECKED} (kube-scheduler checks them)"


def figure_lines(before: Figures, after: Figures) -> Iterator[str]:
    """Compare the cluster before and after."""
    yield f"memory allocated: {before.memory_allocated_ratio:.1%} -> {after.memory_allocated_ratio:.1%} of {after.gpus} GPUs"
    yield f"fragmentation: {before.fragmentation_ratio:.1%} -> {after.fragmentation_ratio:.1%}"
    waiting = f"{before.waiting_pods_that_fit} of {before.waiting_pods} -> {after.waiting_pods_that_fit} of {after.waiting_pods}"
    yield f"waiting pods that would fit: {waiting}"


def local_zone() -> tzinfo:
    """Return the time zone of this machine."""
    return datetime.now().astimezone().tzinfo or UTC


def _reason_lines(reasons: tuple[ReasonCount, ...]) -> Iterator[str]:
    for count in reasons:
        yield f"  {count.nodes:>6}  {count.reason}  ({_examples(count)})"


def _examples(count: ReasonCount) -> str:
    return ", ".join(count.examples) + (", ..." if count.nodes > len(count.examples) else "")
