"""What replays found, as Markdown tables or as one JSON document."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from statistics import fmean, stdev

from aliquot.simulate.departures import DepartureResult
from aliquot.simulate.published import Means, Published
from aliquot.simulate.run import NOTED_PERCENT, Result
from aliquot.simulate.topology import LinkQuality


def means(results: Sequence[Result], values: Callable[[Result], Sequence[float]] = attrgetter("allocated_percent")) -> Means:
    """Average values over the seeds, by trace and policy: what was allocated unless said otherwise."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.trace, result.policy), []).append(result)
    return {key: tuple(fmean(column) for column in zip(*map(values, group), strict=True)) for key, group in groups.items()}


def tables(results: Sequence[Result], published: Published) -> str:
    """Write what was allocated and fragmented by trace and policy, what was published beside it, and what else was measured."""
    traces = {result.trace for result in results}
    parts = []
    for what, found, theirs in (
        ("Allocated", means(results), published.allocated),
        ("Fragmented", means(results, attrgetter("fragmented_percent")), published.fragmented),
    ):
        parts.append(_by_trace(f"{what} GPUs in percent, at 100 % / 130 % of arrived demand", found))
        if shown := {key: value for key, value in theirs.items() if key[0] in traces}:
            parts.append(_by_trace("The same, as published for FGD (USENIX ATC'23)", shown))
    if all(result.memory_percent for result in results):
        parts.append(_by_trace("Allocated memory in percent", means(results, attrgetter("memory_percent"))))
        parts.append(_by_trace("Allocated compute in percent", means(results, attrgetter("cores_percent"))))
    parts.append(_costs(results))
    return "\n\n".join(parts)


def facts(results: Sequence[Result], published: Published) -> dict[str, object]:
    """Return all that is known, as plain data."""
    return {
        "notedPercent": NOTED_PERCENT,
        "runs": [asdict(result) for result in results],
        "means": _nested(means(results)),
        "published": _nested(published.allocated),
        "fragmented": _nested(means(results, attrgetter("fragmented_percent"))),
        "publishedFragmented": _nested(published.fragmented),
    }


def departures_table(results: Sequence[DepartureResult]) -> str:
    """Write what came of replays with departures, each policy on average over traces and seeds."""
    rows = []
    for policy in dict.fromkeys(result.policy for result in results):
        runs = [result for result in results if result.policy == policy]
        rows.append(
            [
                policy,
                f"{fmean(run.gpus for run in runs):.0f}",
                f"{fmean(run.allocated_percent for run in runs):.2f}",
                f"{fmean(run.wait_mean_seconds for run in runs):.0f}",
                f"{fmean(run.wait_p95_seconds for run in runs):.0f}",
                str(sum(run.never_placed for run in runs)),
            ]
        )
    header = ["policy", "GPUs", "allocated, % over time", "mean wait, s", "p95 wait, s", "never placed"]
    return table(f"With departures, means of {len(runs)} replays", header, rows)


def links_table(results: Sequence[LinkQuality]) -> str:
    """Write what came of the comparison of who chooses linked GPUs."""
    rows = [[found.machine, found.chooser, f"{found.mean_quality:.3f}", f"{found.best_part:.3f}"] for found in results]
    return table("Links of the chosen GPUs", ["node", "chosen by", "quality, best = 1", "part that is the best"], rows)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write one table."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in (header, *rows)]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join((f"### {title}", "", lines[0], rule, *lines[1:]))


def _by_trace(title: str, values: Means) -> str:
    traces, policies = list(dict.fromkeys(trace for trace, _ in values)), list(dict.fromkeys(policy for _, policy in values))
    rows = [[trace, *(_pair(values.get((trace, policy))) for policy in policies)] for trace in traces]
    every = [[value for (_, other), value in values.items() if other == policy] for policy in policies]
    rows.append([f"mean of {len(traces)}", *(_pair(tuple(fmean(column) for column in zip(*group, strict=True))) for group in every)])
    return table(title, ["trace", *policies], rows)


def _costs(results: Sequence[Result]) -> str:
    rows = []
    for policy in dict.fromkeys(result.policy for result in results):
        runs = [result for result in results if result.policy == policy]
        ends = [run.allocated_percent[-1] for run in runs]
        timed = [run for run in runs if run.decision_p50_ms is not None]
        latency = "/".join(f"{fmean(getattr(run, name) for run in timed):.2f}" for name in ("decision_p50_ms", "decision_p99_ms") if timed)
        rows.append(
            [
                policy,
                f"{_spread(runs):.2f}" if len(ends) > 1 else "",
                f"{fmean(run.seconds for run in runs):.1f}",
                latency,
            ]
        )
    header = ["policy", "std over seeds at 130 %", "s per run", "ms per decision, p50/p99"]
    return table("Spread and cost, means", header, rows)


def _spread(runs: Sequence[Result]) -> float:
    """Average the standard deviation over the seeds of each trace."""
    by_trace: dict[str, list[float]] = {}
    for run in runs:
        by_trace.setdefault(run.trace, []).append(run.allocated_percent[-1])
    spreads = [stdev(values) for values in by_trace.values() if len(values) > 1]
    return fmean(spreads) if spreads else 0.0


def _pair(values: Sequence[float] | None) -> str:
    return "" if values is None else "/".join(f"{value:.2f}" for value in values)


def _nested(values: Means) -> Mapping[str, Mapping[str, Sequence[float]]]:
    nested: dict[str, dict[str, Sequence[float]]] = {}
    for (trace, policy), noted in values.items():
        nested.setdefault(trace, {})[policy] = [round(value, 3) for value in noted]
    return nested
