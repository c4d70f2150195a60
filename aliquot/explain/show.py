"""Explanations and placements as lines for people."""

from collections.abc import Iterator

from scheduler_plugin.core.explain import ReasonCount
from scheduler_plugin.core.kube_filters import NOT_CHECKED
from scheduler_plugin.core.what_if import Figures, Placement
from scheduler_plugin.core.why import Why

_SHOWN_DEVICES = 4
STALE_SECONDS = 70.0
"""What is younger may be all there is to tell: API servers send a bookmark every minute where nothing changes."""


def why_lines(why: Why) -> Iterator[str]:
    """Explain one pod, and say so where what that was read from is old."""
    yield from _answer_lines(why)
    yield from age_lines(why.generation, why.age_seconds)


def age_lines(generation: int | None, age_seconds: float | None) -> Iterator[str]:
    """Say that an answer comes from an old state; nothing where it does not, or no age was told. Args: as in ``Why``."""
    if generation is None:
        return
    if age_seconds is None:
        yield "the scheduler has not listed the whole cluster yet: this is what it knows so far"
    elif age_seconds > STALE_SECONDS:
        yield f"this is the cluster as it was {age_seconds:.0f} s ago: since then the API server told the scheduler nothing, or not all"


def _answer_lines(why: Why) -> Iterator[str]:
    if why.node or why.refusal or why.fitting:
        yield f"{why.pod}: {why.sentence}"
        if why.fitting and why.reasons:
            yield from _reason_lines(why.reasons)
        return
    yield f"{why.pod}: {why.held_back}none of {why.nodes} nodes fits"
    yield from _reason_lines(why.reasons)
    if why.changes:
        yield "what would make it fit, each the least of its kind:"
        yield from (f"  - {change.sentence}" for change in why.changes)
    else:
        yield "no single change to this pod, its neighbours or a cordon makes it fit: several together may, or a node with what these lack"
    if why.not_checked:
        yield not_checked_line()


def placement_line(placement: Placement, *, wide: bool = False) -> str:
    """Say where one pod would go; ``wide``: with every device, and nodes that fail for each reason."""
    if placement.node:
        devices = placement.devices if wide else placement.devices[:_SHOWN_DEVICES]
        return f"{placement.pod}: node {placement.node}, {', '.join(devices)}{', ...' if len(devices) < len(placement.devices) else ''}"
    if placement.refusal:
        return f"{placement.pod}: {placement.refusal}"
    reasons = (f"{one.nodes} {one.reason}{f' ({_examples(one)})' if wide else ''}" for one in placement.reasons)
    return f"{placement.pod}: fits nowhere: " + "; ".join(reasons)


def not_checked_line() -> str:
    """Say what an answer leaves open."""
    return f"not checked: {NOT_CHECKED}; kube-scheduler does"


def figure_lines(before: Figures, after: Figures) -> Iterator[str]:
    """Compare the cluster before and after."""
    yield f"memory promised: {before.memory_allocated_ratio:.1%} -> {after.memory_allocated_ratio:.1%} of {after.gpus} GPUs"
    yield f"fragmentation: {before.fragmentation_ratio:.1%} -> {after.fragmentation_ratio:.1%}"
    waiting = f"{before.waiting_pods_that_fit} of {before.waiting_pods} -> {after.waiting_pods_that_fit} of {after.waiting_pods}"
    yield f"waiting pods that would fit: {waiting}"


def _reason_lines(reasons: tuple[ReasonCount, ...]) -> Iterator[str]:
    for count in reasons:
        yield f"  {count.nodes:>6}  {count.reason}  ({_examples(count)})"


def _examples(count: ReasonCount) -> str:
    return ", ".join(count.examples) + (", ..." if count.nodes > len(count.examples) else "")
