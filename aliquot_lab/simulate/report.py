# SPDX-License-Identifier: Apache-2.0
"""The results of replays, as Markdown tables or as one JSON document."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from statistics import fmean, stdev

from aliquot_lab.simulate.departures import DepartureResult, Waits
from aliquot_lab.simulate.published import Means, Published
from aliquot_lab.simulate.run import NOTED_PERCENT, Point, Result
from aliquot_lab.simulate.starts import LEVEL, StartsResult
from aliquot_lab.simulate.topology import LinkQuality


def means(results: Sequence[Result], values: Callable[[Result], Sequence[float]] = attrgetter("allocated_percent")) -> Means:
    """Return the means over the seeds, by trace and policy; the default is what was allocated."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.trace, result.policy), []).append(result)
    return {key: tuple(fmean(column) for column in zip(*map(values, group), strict=True)) for key, group in groups.items()}


def tables(results: Sequence[Result], published: Published) -> str:
    """Return tables of allocation and fragmentation by trace and policy, the published ones, and the cost."""
    parts = _pair_tables("Allocated", means(results), published.allocated)
    parts += _pair_tables("Fragmented", means(results, attrgetter("fragmented_percent")), published.fragmented)
    if all(result.memory_percent for result in results):
        parts.append(_by_trace("Allocated memory in percent", means(results, attrgetter("memory_percent"))))
        parts.append(_by_trace("Allocated compute in percent", means(results, attrgetter("cores_percent"))))
    traces = dict.fromkeys(result.trace for result in results)
    parts += [curve_table(trace, [result for result in results if result.trace == trace]) for trace in traces]
    parts.append(_costs(results))
    return "\n\n".join(parts)


def _pair_tables(what: str, found: Means, published: Means) -> list[str]:
    """Return the table of what was found, and the published one of the same traces if there is one."""
    parts = [_by_trace(f"{what} GPUs in percent, at 100 % / 130 % of arrived demand", found)]
    traces = {trace for trace, _ in found}
    if shown := {key: value for key, value in published.items() if key[0] in traces}:
        parts.append(_by_trace("The same, as published for FGD (USENIX ATC'23)", shown))
    return parts


def curve_table(trace: str, results: Sequence[Result]) -> str:
    """Return what each policy did at every tenth of arrived demand, as means over the seeds."""
    by_policy: dict[str, list[Result]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    rows = [
        [str(points[0].arrived_percent), *(_curve_cell([run.curve[position] for run in runs]) for runs in by_policy.values())]
        for position, points in enumerate(zip(*(result.curve for result in results), strict=True))
    ]
    title = f"{trace}: allocated GPUs in percent / nodes that can take eight GPUs / refused pods with several GPUs"
    return table(title, ["arrived, %", *by_policy], rows)


def _curve_cell(points: Sequence[Point]) -> str:
    whole, refused = fmean(point.whole_nodes for point in points), fmean(point.refused_large for point in points)
    return f"{fmean(point.allocated_percent for point in points):.2f} / {whole:.0f} / {refused:.0f}"


def facts(results: Sequence[Result], published: Published) -> dict[str, object]:
    """Return all results as plain data."""
    return {
        "notedPercent": NOTED_PERCENT,
        "runs": [asdict(result) for result in results],
        "means": _nested(means(results)),
        "published": _nested(published.allocated),
        "fragmented": _nested(means(results, attrgetter("fragmented_percent"))),
        "publishedFragmented": _nested(published.fragmented),
    }


def departures_table(results: Sequence[DepartureResult]) -> str:
    """Return the table of replays with departures: for each policy the means over traces and seeds."""
    has_moves, groups = any(result.moves for result in results), _by_policy(results)
    rows = [[policy, *_departure_cells(runs), *(_move_cells(runs) if has_moves else ())] for policy, runs in groups.items()]
    header = ["policy", "GPUs", "allocated, % over time", "mean wait, s", "p95 wait, s", "never placed"]
    header += ["served by moves", "moves", "GPU-hours repeated"] if has_moves else []
    replays = max(map(len, groups.values()))
    return "\n\n".join((table(f"With departures, means of {replays} replays", header, rows), _waits_table(groups)))


def starts_table(results: Sequence[StartsResult], without: Sequence[StartsResult]) -> str:
    """Return the tables of replays with held room: how often pods started within the stated interval, and what held room does to waits.

    Args: without: the same replays without held room.
    """
    rows = [[one.trace, str(one.seed), str(one.nodes), *_starts_cells(one)] for one in results]
    header = ["list", "seed", "nodes", "allocated, % over time", "pods with held room", "intervals"]
    header += ["first one hits, %", "hit, %", "early, %", "median width, h"]
    rated = table(f"Stated times: intervals of {LEVEL:.0%}", header, rows)
    groups: dict[str, list[StartsResult]] = {}
    for one in (*results, *without):
        groups.setdefault("yes" if one.holds else "no", []).append(one)
    return "\n\n".join((rated, _waits_table(groups, "held room")))


def _starts_cells(one: StartsResult) -> list[str]:
    rates = (one.first_hit_percent, one.hit_percent, one.early_percent)
    counts = [f"{one.allocated_percent:.1f}", str(one.owners), str(one.stated)]
    return [*counts, *(f"{rate:.1f}" for rate in rates), f"{one.median_width_hours:.1f}"]


def _by_policy(results: Sequence[DepartureResult]) -> dict[str, list[DepartureResult]]:
    groups: dict[str, list[DepartureResult]] = {}
    for result in results:
        groups.setdefault(result.policy, []).append(result)
    return groups


def _departure_cells(runs: Sequence[DepartureResult]) -> list[str]:
    return [
        f"{fmean(run.gpus for run in runs):.0f}",
        f"{fmean(run.allocated_percent for run in runs):.2f}",
        f"{fmean(run.wait_mean_seconds for run in runs):.0f}",
        f"{fmean(run.wait_p95_seconds for run in runs):.0f}",
        str(sum(run.never_placed for run in runs)),
    ]


def _move_cells(runs: Sequence[DepartureResult]) -> list[str]:
    served, moves = sum(run.served_by_moves for run in runs), sum(run.moves for run in runs)
    return [str(served), str(moves), f"{sum(run.lost_gpu_hours for run in runs):.0f}"]


def _waits_table(groups: Mapping[str, Sequence[DepartureResult | StartsResult]], of: str = "policy") -> str:
    """Return the waits by size of pods: sums of pods over the replays, and means of the others. Args: of: what the groups are."""
    rows = [row for policy, runs in groups.items() for row in _wait_rows(policy, runs)]
    return table("Waits by the GPUs of a pod", [of, "GPUs of a pod", "pods", "waited", "mean wait, s", "p95 wait, s"], rows)


def _wait_rows(policy: str, runs: Sequence[DepartureResult | StartsResult]) -> Iterator[list[str]]:
    for size in sorted({size for run in runs for size in run.waits}):
        yield [policy, size, *_wait_cells([run.waits[size] for run in runs if size in run.waits])]


def _wait_cells(found: Sequence[Waits]) -> list[str]:
    counts = (sum(waits.pods for waits in found), sum(waits.waited for waits in found))
    seconds = (fmean(waits.mean_seconds for waits in found), fmean(waits.p95_seconds for waits in found))
    return [*map(str, counts), *(f"{value:.0f}" for value in seconds)]


def links_table(results: Sequence[LinkQuality]) -> str:
    """Return the table of the comparison of link choices."""
    rows = [[found.machine, found.chooser, f"{found.mean_quality:.3f}", f"{found.best_part:.3f}"] for found in results]
    return table("Links of the chosen GPUs", ["node", "chosen by", "quality, best = 1", "part that is the best"], rows)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return one Markdown table."""
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
    policies = dict.fromkeys(result.policy for result in results)
    rows = [_cost_row(policy, [result for result in results if result.policy == policy]) for policy in policies]
    header = ["policy", "std over seeds at 130 %", "s per run", "ms per decision, p50/p99"]
    return table("Spread and cost, means", header, rows)


def _cost_row(policy: str, runs: Sequence[Result]) -> list[str]:
    timed = [run for run in runs if run.decision_p50_ms is not None]
    latency = "/".join(f"{fmean(getattr(run, name) for run in timed):.2f}" for name in ("decision_p50_ms", "decision_p99_ms") if timed)
    spread = f"{_spread(runs):.2f}" if len(runs) > 1 else ""
    return [policy, spread, f"{fmean(run.seconds for run in runs):.1f}", latency]


def _spread(runs: Sequence[Result]) -> float:
    """Return the mean over the traces of the standard deviation over the seeds."""
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
