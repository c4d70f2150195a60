# SPDX-License-Identifier: Apache-2.0
"""The gate of the policy frag: GPUs allocated, whole nodes kept, and waits, against FGD, BestFit, HAMi's formula and our binpack.

    python -m tests.bench.placement_gate --load 0.4                       # a generated list: what CI runs
    python -m tests.bench.placement_gate --trace DIR [--pods NAME ...] [--mix NAME ...] [--seeds N] [--load L ...]

The openb trace is not in this repository. Without ``--trace``, nodes and pods are drawn by a seed, with the numbers of the trace: nodes of
each type, pods of each size, and CPU and RAM of the pods of a size. These are drawn independently of each other, lifetimes and arrivals are
made up, and the cluster has an eighth of the nodes. So only the trace shows how good the policy is; the generated list shows that a change
did not break it.

Means over the seeds of a list. Ends with 1 when frag misses one of these:

allocated    at each tenth of arrived demand from 30 to 130 %: at least the better of FGD and BestFit, minus 0.3 points
refused      at each tenth: at most as many refused pods with several GPUs as FGD
whole nodes  at each tenth from 10 to 90 %: at least as many nodes that can take eight GPUs as FGD
waits        with departures, for each size of pods: 95th percentile at most 1.1 times that of the best other policy

``--mix`` replays each list also with a change of it (trace.MIXES), without departures. ``--beside`` shows more policies, without a bound.
"""

import argparse
import csv
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from aliquot.contract import units
from aliquot_lab.simulate import report
from aliquot_lab.simulate.baselines import BASELINES
from aliquot_lab.simulate.departures import DepartureResult, replay_departures
from aliquot_lab.simulate.run import Point, Result, Task, replay, run_all
from aliquot_lab.simulate.trace import MIXES, NODE_LIST, POD_LIST_PREFIX, pod_lists
from tests.bench.report import table

_T = TypeVar("_T")

OURS, PEERS, OTHERS = "frag", ("fgd", "bestfit"), ("hami-binpack", "binpack")
"""The other policies: those of all bounds, and those that only count for waits and are shown beside."""
POINTS_BELOW = 0.3
WAIT_FACTOR = 1.1
MIN_ALLOCATED_AT, MAX_WHOLE_AT = 30, 90
LOADS = (0.4, 0.7, 0.9)
GENERATED = "generated"
GIB_MIB = units.GIB // units.MIB

NODES = (
    ("G2", 8, 96, 384, 549),
    ("G3", 8, 128, 768, 39),
    ("P100", 2, 16, 120, 107),
    ("P100", 2, 64, 256, 22),
    ("T4", 2, 104, 512, 387),
    ("T4", 4, 96, 384, 17),
    ("V100M16", 4, 32, 128, 28),
    ("V100M16", 8, 64, 256, 8),
    ("V100M32", 4, 48, 368, 9),
    ("V100M32", 8, 96, 768, 21),
)
"""Model, GPUs, cores, GiB, and nodes in the trace; types with fewer than eight nodes are left out."""
NODES_PART = 8
PODS = {0: 1088, 1: 6989, 2: 16, 4: 15, 8: 44}
"""Pods of the list ``default`` by their GPUs."""
PARTS_MILLI = {1000: 3911, 810: 1078, 470: 750, 320: 328, 650: 253, 230: 140, 460: 128, 590: 75, 160: 74, 550: 72, 220: 62}
"""Pods with one GPU or a part of it, by thousandths."""
HOSTS: dict[int, dict[tuple[int, int], int]] = {
    0: {(12_500, 56): 364, (32_000, 48): 284, (8000, 29): 163, (15_400, 50): 120, (16_500, 50): 95},
    1: {(3152, 5): 1592, (11_300, 48): 857, (11_908, 46): 778, (11_400, 47): 534, (8000, 29): 486, (18_708, 63): 255, (9810, 40): 195},
    2: {(16_200, 65): 7, (6000, 64): 3, (30_200, 157): 3, (17_400, 42): 2, (14_000, 58): 1},
    4: {(32_200, 129): 9, (32_000, 128): 3, (60_200, 313): 3},
    8: {(88_000, 320): 18, (64_200, 257): 18, (120_000, 720): 3, (64_000, 256): 3, (120_200, 625): 2},
}
"""By the GPUs of a pod, its CPU in milli and its GiB, with the number of such pods."""
GENERATED_PODS = 800
ARRIVAL_SECONDS = 500_000
SHORT_SECONDS, LONG_SECONDS, LONG_PART = 1800, 100_000, 0.1
"""Mean lifetimes, drawn as exponential: a tenth of the pods runs for a day, the others for half an hour."""


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of the gate."""

    where: str
    measured: float
    bound: float
    upper: bool
    """Whether the bound is a maximum."""

    @property
    def margin(self) -> float:
        """By how much the bound is kept; negative when it is missed."""
        return self.bound - self.measured if self.upper else self.measured - self.bound


def generate(directory: Path, seed: int) -> None:
    """Write a list of nodes and one of pods in the format of the trace."""
    rng = random.Random(seed)
    nodes = [kind for kind in NODES for _ in range(round(kind[-1] / NODES_PART))]
    rows = [
        (f"node-{number:04}", cores * 1000, gib * GIB_MIB, gpus, model)
        for number, (model, gpus, cores, gib, _) in enumerate(rng.sample(nodes, len(nodes)))
    ]
    _write(directory / NODE_LIST, ("sn", "cpu_milli", "memory_mib", "gpu", "model"), rows)
    header = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "creation_time", "deletion_time")
    _write(directory / f"{POD_LIST_PREFIX}{GENERATED}.csv", header, (_pod(rng, number) for number in range(GENERATED_PODS)))


def _pod(rng: random.Random, number: int) -> Sequence[str | int]:
    gpus = _drawn(rng, PODS)
    cpu_milli, gib = _drawn(rng, HOSTS[gpus])
    milli = _drawn(rng, PARTS_MILLI) if gpus == 1 else 1000 * min(1, gpus)
    created = rng.randrange(ARRIVAL_SECONDS)
    lifetime = rng.expovariate(1 / (LONG_SECONDS if rng.random() < LONG_PART else SHORT_SECONDS))
    return f"pod-{number:04}", cpu_milli, gib * GIB_MIB, gpus, milli, created, created + 1 + int(lifetime)


def _drawn(rng: random.Random, counts: Mapping[_T, int]) -> _T:
    return rng.choices(list(counts), list(counts.values()))[0]


def _write(file: Path, header: Sequence[str], rows: Iterable[Sequence[str | int]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([header, *rows])


def curve_checks(results: Sequence[Result]) -> dict[str, list[Check]]:
    """Return the checks of one list's replays, by kind."""
    points = {policy: [result.curve for result in results if result.policy == policy] for policy in (OURS, *PEERS)}
    found: dict[str, list[Check]] = {"allocated": [], "refused": [], "whole nodes": []}
    for position, point in enumerate(results[0].curve):
        percent, where = point.arrived_percent, f"{results[0].trace}, {point.arrived_percent} %"

        def mean(policy: str, value: Callable[[Point], float], position: int = position) -> float:
            return fmean(value(curve[position]) for curve in points[policy])

        allocated = {policy: mean(policy, lambda point: point.allocated_percent) for policy in points}
        refused = {policy: mean(policy, lambda point: point.refused_large) for policy in points}
        whole = {policy: mean(policy, lambda point: point.whole_nodes) for policy in points}
        if percent >= MIN_ALLOCATED_AT:
            bound = max(allocated[peer] for peer in PEERS) - POINTS_BELOW
            found["allocated"].append(Check(where, allocated[OURS], bound, upper=False))
        found["refused"].append(Check(where, refused[OURS], refused["fgd"], upper=True))
        if percent <= MAX_WHOLE_AT:
            found["whole nodes"].append(Check(where, whole[OURS], whole["fgd"], upper=False))
    return found


def wait_checks(results: Sequence[DepartureResult], load: float) -> list[Check]:
    """Return the checks of one list's replays with departures: the waits of each size of pods, in seconds."""
    checks = []
    for size in sorted({size for result in results for size in result.waits}):
        waits = {
            policy: fmean(result.waits[size].p95_seconds for result in results if result.policy == policy and size in result.waits)
            for policy in (OURS, *PEERS, *OTHERS)
        }
        where = f"{results[0].trace}, load {load}, pods with {size} GPUs" if size != "share" else f"{results[0].trace}, load {load}, shares"
        checks.append(Check(where, waits[OURS], WAIT_FACTOR * min(waits[peer] for peer in (*PEERS, *OTHERS)), upper=True))
    return checks


def tasks_of(directory: Path, name: str, seeds: Sequence[int], mix: str = "", beside: Sequence[str] = ()) -> list[Task]:
    """Return the replays of one list. Args: mix: one of MIXES; empty: the list as it is. beside: policies without a bound."""
    file, shown = pod_lists(directory)[name], f"{name}, {mix}" if mix else name
    return [
        Task(directory / NODE_LIST, file, shown, policy, seed, mix=mix) for policy in (OURS, *PEERS, *OTHERS, *beside) for seed in seeds
    ]


def judge(
    directory: Path,
    names: Sequence[str],
    seeds: Sequence[int],
    loads: Sequence[float],
    jobs: int,
    mixes: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> dict[str, list[Check]]:
    """Replay the lists, print what was found, and return the checks by kind."""
    found: dict[str, list[Check]] = {"allocated": [], "refused": [], "whole nodes": [], "waits": []}
    for name in names:
        for mix in ("", *mixes):
            tasks = tasks_of(directory, name, seeds, mix, beside)
            results = run_all(replay, tasks, jobs, _ignore, _ignore)
            print("", report.curve_table(tasks[0].trace, results), sep="\n", flush=True)
            for kind, checks in curve_checks(results).items():
                found[kind] += checks
        tasks = tasks_of(directory, name, seeds)
        for load in loads if any(pod.deleted_seconds for pod in tasks[0].read()[1]) else ():
            departed = run_all(partial(replay_departures, load=load), tasks, jobs, _ignore, _ignore)
            print(f"\n## {name}, load {load}\n", report.departures_table(departed), sep="\n", flush=True)
            found["waits"] += wait_checks(departed, load)
    return found


def show(found: dict[str, list[Check]]) -> bool:
    """Print the gate, and return whether it is kept: of each kind all figures that miss it, or the closest one."""
    rows = []
    for kind, checks in found.items():
        ordered = sorted(checks, key=lambda check: check.margin)
        for check in [check for check in ordered if check.margin < 0] or ordered[:1]:
            bound = f"{'at most' if check.upper else 'at least'} {check.bound:.2f}"
            rows.append((kind, check.where, f"{check.measured:.2f}", bound, "yes" if check.margin >= 0 else "NO"))
    table("Gate: all misses, or else the closest figure of each kind", ("figure", "where", "measured", "bound", "kept"), rows)
    return all(check.margin >= 0 for checks in found.values() for check in checks)


def _ignore(*_: object) -> None:
    """Show no progress."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="directory of the trace, with its lists in csv/ or directly")
    parser.add_argument("--pods", nargs="+", default=(), metavar="NAME", help="short names of pod lists (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="replays of each list and policy (default: 3)")
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--load", type=float, nargs="*", default=LOADS, help="with departures: mean demand as a part of the GPUs")
    parser.add_argument("--mix", nargs="+", default=(), choices=MIXES, metavar="NAME", help=f"changes of each list: {', '.join(MIXES)}")
    parser.add_argument(
        "--beside", nargs="+", default=(), choices=BASELINES, metavar="NAME", help="policies that are shown without a bound"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(argv)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) if options.trace is None else options.trace
        if options.trace is None:
            generate(directory, options.first_seed)
            print("No trace was given: nodes and pods are generated. --trace DIR gives the figures of docs/measurements/placement.md.")
        elif (directory / "csv").is_dir():
            directory /= "csv"
        kept = show(
            judge(directory, options.pods or tuple(pod_lists(directory)), seeds, options.load, options.jobs, options.mix, options.beside)
        )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
