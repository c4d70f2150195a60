# SPDX-License-Identifier: Apache-2.0
"""Measures how much of a cluster's GPUs the extender's policy frag allocates, compared with six others, and how well its GPUs are linked.

    python -m tests.bench.bench_placement [--trace DIR] [--quick] [--policies NAME,...] [--jobs N] [--json FILE]

DIR contains the openb trace and its published results (csv/ and expected_results/); the default is ALIQUOT_TRACE. Without it only the links
are compared, and the last line reports this. ``--quick`` replays four pod lists with two seeds; the full form replays all with ten, 42 to
51. ``--policies`` are replayed in addition to frag, by default FGD and the five policies that it was compared with. The difference of each
to its published figures is printed too.

Ends with 1 when a target is missed: in the mean over the lists half a point above the published FGD, at 100 % and at 130 % of arrived
demand; on each list at most 0.3 points below it in both; on linked machines, as good as the best of the others.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from aliquot_cli.output import Output
from aliquot_lab.simulate import report, topology
from aliquot_lab.simulate.baselines import BASELINES
from aliquot_lab.simulate.command import SimulateOptions, run
from tests.bench.report import table

ENVIRONMENT = "ALIQUOT_TRACE"
QUICK_LISTS = ("default", "cpu250", "gpushare100", "gpuspec33")
OURS = "frag"
PEERS = tuple(name for name, published in BASELINES.items() if published)
"""All six policies with published results."""
MEAN_AIM = 0.5
WORST_AIM = -0.3
LINKS_TOLERANCE = 0.003
"""Twice the standard error of the mean over the seeds."""


def allocation(directory: Path, lists: tuple[str, ...], policies: tuple[str, ...], seeds: int, jobs: int) -> dict:
    """Replay, and print our policy and the others with the published results."""
    options = SimulateOptions(directory, lists, (OURS, *policies), range(42, 42 + seeds), jobs, Output.JSON)
    document = json.loads(run(options))
    means, published = document["means"], document["published"]
    rows = [
        [name, *map(pair, found.values()), pair(published[name]["fgd"]), pair(difference(found[OURS], published[name]["fgd"]))]
        for name, found in means.items()
    ]
    header = ["pod list", OURS, *policies, "FGD as published", f"{OURS} ahead of it"]
    table(f"Allocated GPUs in percent, at 100 % / 130 % of arrived demand, {seeds} seeds", header, rows)
    known = [policy for policy in policies if policy in PEERS]
    rows = [[name, *(pair(difference(found[policy], published[name][policy])) for policy in known)] for name, found in means.items()]
    table("How far the others are from what was published of them", ["pod list", *known], rows)
    return document


def allocation_aims(document: dict) -> list[tuple[str, float, float]]:
    """Return the targets, each with the measured value and the required minimum."""
    ahead = [difference(found[OURS], document["published"][name]["fgd"]) for name, found in document["means"].items()]
    aims = []
    for column, percent in enumerate(document["notedPercent"]):
        values = [row[column] for row in ahead]
        aims.append((f"mean lead on the published FGD at {percent} %", fmean(values), MEAN_AIM))
        aims.append((f"smallest lead at {percent} %", min(values), WORST_AIM))
    return aims


def link_aims(found: list[topology.LinkQuality]) -> list[tuple[str, float, float]]:
    """Return the targets of the links."""
    quality: dict[str, dict[str, float]] = {}
    for result in found:
        quality.setdefault(result.machine, {})[result.chooser] = result.mean_quality
    return [(f"links on {machine}", found.pop("ours"), max(found.values()) - LINKS_TOLERANCE) for machine, found in quality.items()]


def difference(values: list[float], others: list[float]) -> list[float]:
    return [value - other for value, other in zip(values, others, strict=True)]


def pair(values: list[float]) -> str:
    return "/".join(f"{value:.2f}" for value in values)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=os.environ.get(ENVIRONMENT), help=f"directory of the trace (default: ${ENVIRONMENT})")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK_LISTS)}, two seeds")
    parser.add_argument("--policies", type=policies_named, default=PEERS, help=f"beside {OURS}, with commas (default: {','.join(PEERS)})")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures there")
    options = parser.parse_args(argv)
    found = topology.compare()
    print(report.links_table(found))
    aims, document = link_aims(found), {}
    if options.trace is not None:
        lists, seeds = (QUICK_LISTS, 2) if options.quick else ((), 10)
        document = allocation(Path(options.trace), lists, options.policies, seeds, options.jobs)
        aims += allocation_aims(document)
    table(
        "Aims",
        ("figure", "measured", "at least", "met"),
        [(name, f"{is_:.3f}", f"{least:.3f}", met(is_, least)) for name, is_, least in aims],
    )
    if options.json:
        options.json.write_text(json.dumps({"links": [asdict(result) for result in found], "allocation": document}, indent=1))
    if options.trace is None:
        print(
            f"\nTHE AIM OF ALLOCATION WAS NOT CHECKED: no trace. Give --trace DIR or set {ENVIRONMENT}; "
            "docs/measurements/placement.md says where it comes from"
        )
    return 0 if all(met(is_, least) == "yes" for _, is_, least in aims) else 1


def policies_named(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of policies."""
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in BASELINES]:
        raise argparse.ArgumentTypeError(f"expected names of {', '.join(BASELINES)}, found {', '.join(unknown)}")
    return names


def met(measured: float, least: float) -> str:
    return "yes" if measured >= least else "no"


if __name__ == "__main__":
    sys.exit(main())
