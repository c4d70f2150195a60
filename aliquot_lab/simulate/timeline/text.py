# SPDX-License-Identifier: Apache-2.0
"""The result of a simulation as Markdown tables, and as plain data for JSON or YAML."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from aliquot_lab.simulate.report import table
from aliquot_lab.simulate.timeline.outcome import ClassWaits, End, Outcome

POLICY_COLUMNS: Final = (
    *("policy", "GPUs allocated", "nodes without GPU pods", "mean wait", "p95 wait", "never started", "refused", "preempted", "reclaimed"),
    "lost GPU hours",
)
WAIT_COLUMNS: Final = ("class", "policy", "workloads", "waited", "mean", "p50", "p95", "longest", "never started")
_UNITS: Final = ((172_800.0, 86_400.0, "d"), (3_600.0, 3_600.0, "h"), (60.0, 60.0, "min"))
"""From how many seconds a unit is used, its seconds, and its name."""


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return the tables of all policies."""
    first = outcomes[0]
    title = f"{first.nodes} nodes, {first.gpus} GPUs, {len(first.records)} workloads, seed {first.seed}"
    parts = [
        table(title, list(POLICY_COLUMNS), policy_rows(outcomes)),
        table("Waits until the first start, by class", list(WAIT_COLUMNS), wait_rows(outcomes)),
    ]
    if reasons := reason_rows(outcomes):
        parts.append(table("Why workloads did not start at once", ["policy", "reason", "workloads"], reasons))
    return "\n\n".join(parts)


def policy_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return one row for each policy, in the order of POLICY_COLUMNS."""
    return [
        [
            outcome.policy,
            f"{outcome.allocated_percent:.1f} %",
            f"{outcome.mean_whole_nodes:.1f}",
            duration(outcome.all_waits.mean),
            duration(outcome.all_waits.p95),
            str(outcome.ends[End.WAITING] + outcome.ends[End.QUEUED]),
            str(outcome.ends[End.REFUSED]),
            str(outcome.preemptions),
            str(outcome.reclaims),
            f"{outcome.lost_gpu_seconds / 3600:.1f}",
        ]
        for outcome in outcomes
    ]


def wait_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return one row for each class and policy, in the order of WAIT_COLUMNS. All policies have the same classes."""
    return [
        [found.size, outcome.policy, *_wait_cells(found)]
        for waits in zip(*(outcome.waits() for outcome in outcomes), strict=True)
        for outcome, found in zip(outcomes, waits, strict=True)
    ]


def reason_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the reasons of each policy: policy, reason, number of workloads."""
    return [[outcome.policy, reason, str(count)] for outcome in outcomes for reason, count in outcome.reasons.items()]


def facts(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Return all results as plain data: amounts in percent and seconds."""
    return {
        "nodes": outcomes[0].nodes,
        "gpus": outcomes[0].gpus,
        "seed": outcomes[0].seed,
        "policies": [_facts(outcome) for outcome in outcomes],
    }


def duration(seconds: float) -> str:
    """Write a duration with one unit: ``0 s``, ``42 s``, ``3.5 min``, ``26.4 h``, ``4.0 d``."""
    for least, size, unit in _UNITS:
        if seconds >= least:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _wait_cells(found: ClassWaits) -> list[str]:
    seconds = (found.mean, found.p50, found.p95, found.longest)
    return [str(found.workloads), str(found.waited), *map(duration, seconds), str(found.never_started)]


def _facts(outcome: Outcome) -> dict[str, object]:
    return {
        "policy": outcome.policy,
        "allocatedPercent": round(outcome.allocated_percent, 3),
        "wholeNodes": round(outcome.mean_whole_nodes, 3),
        "ends": dict(outcome.ends),
        "preemptions": outcome.preemptions,
        "reclaims": outcome.reclaims,
        "lostGpuSeconds": round(outcome.lost_gpu_seconds, 3),
        "waits": [asdict(found) for found in outcome.waits()],
        "reasons": outcome.reasons,
        "curve": [point._asdict() for point in outcome.curve()],
    }
