# SPDX-License-Identifier: Apache-2.0
"""Measures how often a waiting pod starts within the 80 % interval that ``aliquot why`` states.

    python -m tests.bench.bench_starts --trace DIR [--jobs N] [--drift]

Replays of the openb trace with departures and held room (``aliquot simulate --starts``), on lists that were not used to choose the two ends
of the interval. Ends with 1 when the first intervals of all replays together hit less than 75 % or more than 85 %: an interval that is too
wide is wrong too.

With ``--drift`` pods of one class get lifetimes of another from the middle of each replay on, so what was learned by then is wrong. That
is a measurement without an aim, and ends with 0.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from aliquot_lab.simulate.run import Task
from aliquot_lab.simulate.starts import StartsResult, replay_starts
from aliquot_lab.simulate.trace import NODE_LIST, pod_lists
from tests.bench.report import table

MOST_PODS: Final = 1500
LEAST_PERCENT, MOST_PERCENT = 75.0, 85.0


class Replay(NamedTuple):
    """A list that was held out, with its seed and load."""

    pods: str
    seed: int
    load: float


REPLAYS: Final = (
    Replay("gpuspec20", 61, 0.9),
    Replay("cpu200", 62, 0.9),
    Replay("gpushare80", 63, 0.8),
    Replay("gpuspec25", 64, 0.9),
    Replay("cpu100", 65, 1.0),
)


def rate(trace: Path, one: Replay, *, drifts: bool = False) -> StartsResult:
    """Run one replay. Args: drifts: whether the classes exchange their lifetimes half way."""
    directory = trace / "csv"
    task = Task(directory / NODE_LIST, pod_lists(directory)[one.pods], one.pods, "frag", one.seed)
    return replay_starts(task, one.load, MOST_PODS, drifts=drifts)


def hits_percent(results: Sequence[StartsResult]) -> float:
    """The part of all first intervals that hit."""
    return sum(one.first_hit_percent * one.owners for one in results) / sum(one.owners for one in results)


def main() -> int:
    """Run the replays, print a table, and return 1 when the intervals are too narrow or too wide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="the openb trace: docs/measurements/placement.md says from where")
    parser.add_argument("--jobs", type=int, default=2, help="replays at once")
    parser.add_argument("--drift", action="store_true", help="exchange the lifetimes of classes half way")
    options = parser.parse_args()
    if missing := sorted({one.pods for one in REPLAYS} - pod_lists(options.trace / "csv").keys()):
        parser.error(f"{options.trace / 'csv'}: expected the openb trace, found no pod list {', '.join(missing)}")
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(pool.map(partial(rate, drifts=options.drift), [options.trace] * len(REPLAYS), REPLAYS))
    rows = [
        (one.trace, str(one.seed), f"{one.load}", str(one.owners), f"{one.first_hit_percent:.1f} %", f"{one.median_width_hours:.2f} h")
        for one in results
    ]
    table("Stated start times", ("list", "seed", "demand", "pods", "first interval hits", "median width"), rows)
    found = hits_percent(results)
    if options.drift:
        print(f"All first intervals, with lifetimes that change half way: {found:.1f} %")
        return 0
    print(f"All first intervals: {found:.1f} %; the aim is {LEAST_PERCENT:g} to {MOST_PERCENT:g} %")
    return 0 if LEAST_PERCENT <= found <= MOST_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
