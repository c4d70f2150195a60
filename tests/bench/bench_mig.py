# SPDX-License-Identifier: Apache-2.0
"""Measures how many pods get a MIG instance when instances are created on demand: by expected fragments, and packed by number.

    python -m tests.bench.bench_mig [--seeds N] [--first-seed N] [--mix NAME ...] [--pods N] [--jobs N]

Pods arrive and end, each with one profile, CPU and RAM; a pod that fits nowhere goes away. Lifetimes and the times between arrivals are
exponential, so that on the mean 90 % of the compute slices are requested. The policies run the scheduler's own verdict, score and plan:

frag      by expected fragments
binpack   packed by the number of instances

docs/measurements/placement.md declares the mixes, and which of them were held out. Ends with 1 when, on the mean over the mixes, frag
accepts less than MIN_LEAD points more pods than binpack.
"""

import argparse
import heapq
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import fmean
from typing import Final, NamedTuple

from aliquot.contract.model import Policy
from aliquot.placement.mig import parse_profile
from aliquot_lab.simulate.timeline.choosers import Scheduler
from aliquot_lab.simulate.timeline.cluster import SimulatedCluster
from aliquot_lab.simulate.timeline.mig_layout import ON_DEMAND, profiles_of
from aliquot_lab.simulate.timeline.model import PodKind, SimNode, SimPod, Workload
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from tests.bench.report import table

GPU_MIB: Final = 81_920
PROFILES: Final = tuple(profiles_of(GPU_MIB))
NODES: Final = 8
GPUS: Final = 4
COMPUTE_SLICES: Final = 7
LOAD: Final = 0.9
MIXES: Final[Mapping[str, Sequence[int]]] = {
    "uniform": (1, 1, 1, 1, 1, 1),
    "small": (6, 3, 3, 1, 1, 1),
    "large": (1, 1, 1, 3, 3, 3),
    "bimodal": (4, 1, 1, 1, 1, 4),
}
"""How often each profile is requested, in the order of PROFILES."""
CORES_PER_SLICE: Final = (1, 2, 3)
GIB_PER_SLICE: Final = (8, 16, 24)
HOSTS: Final = {"ample": (256, 2048), "tight": (60, 480)}
"""Cores and GiB of a node. All its slices need 56 cores and 448 GiB on the mean."""
OURS, BY_NUMBER = POLICIES = (Policy.FRAG.value, Policy.BINPACK.value)
WARM_PODS: Final = 500
MIN_LEAD: Final = 1.0


class Run(NamedTuple):
    """One simulation."""

    mix: str
    host: str
    policy: str
    seed: int
    pods: int


class Accepted(NamedTuple):
    """Parts of what was requested, in percent."""

    pods: float
    slices: float


def _kind(rng: random.Random, mix: str) -> PodKind:
    (profile,) = rng.choices(PROFILES, MIXES[mix])
    slices = parse_profile(profile).gpu_slices
    return PodKind(slices * rng.choice(CORES_PER_SLICE) * 1000, slices * rng.choice(GIB_PER_SLICE) * 1024, mig=profile)


def simulate(run: Run) -> Accepted:
    """Return what a policy accepts of the pods after the first WARM_PODS."""
    rng = random.Random(run.seed)
    cores, gib = HOSTS[run.host]
    nodes = [SimNode(f"n{number}", cores * 1000, gib * 1024, GPUS, GPU_MIB, mig=(ON_DEMAND,)) for number in range(NODES)]
    cluster = SimulatedCluster(nodes, Policy(run.policy), dict(DEFAULT_WEIGHTS), Scheduler, run.seed)
    now, pods_per_lifetime = 0.0, LOAD * NODES * GPUS * COMPUTE_SLICES / _mean_slices(run.mix)
    ends: list[tuple[float, int, Workload]] = []
    outcomes: list[tuple[int, bool]] = []
    for number in range(WARM_PODS + run.pods):
        now += rng.expovariate(pods_per_lifetime)
        kind, lifetime = _kind(rng, run.mix), rng.expovariate(1)
        while ends and ends[0][0] <= now:
            cluster.stop(heapq.heappop(ends)[2])
        workload = Workload(f"p{number}", (SimPod(f"p{number}", kind),), number)
        accepted = not cluster.start(workload)
        if accepted:
            heapq.heappush(ends, (now + lifetime, number, workload))
        outcomes.append((_slices(kind.mig), accepted))
    counted = outcomes[WARM_PODS:]
    got = sum(slices for slices, accepted in counted if accepted)
    return Accepted(100 * fmean(accepted for _, accepted in counted), 100 * got / sum(slices for slices, _ in counted))


def _slices(profile: str) -> int:
    return parse_profile(profile).gpu_slices


def _mean_slices(mix: str) -> float:
    weights = MIXES[mix]
    return sum(weight * _slices(profile) for profile, weight in zip(PROFILES, weights, strict=True)) / sum(weights)


def show(found: Mapping[Run, Accepted]) -> float:
    """Print the means over the seeds of each mix and host; return by how many points frag accepts more pods, on the mean of all."""
    rows, leads = [], []
    for mix, host in dict.fromkeys((run.mix, run.host) for run in found):
        alike = {run: accepted for run, accepted in found.items() if (run.mix, run.host) == (mix, host)}
        pods = {policy: fmean(accepted.pods for run, accepted in alike.items() if run.policy == policy) for policy in POLICIES}
        slices = {policy: fmean(accepted.slices for run, accepted in alike.items() if run.policy == policy) for policy in POLICIES}
        leads.append(pods[OURS] - pods[BY_NUMBER])
        rows.append((mix, host, *(f"{pods[policy]:.1f} / {slices[policy]:.1f}" for policy in POLICIES), f"{leads[-1]:+.2f}"))
    table("MIG: accepted pods / slices, %", ("mix", "host", *POLICIES, "lead in pods"), rows)
    return fmean(leads)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="simulations of each mix, host and policy (default: 2)")
    parser.add_argument("--first-seed", type=int, default=42)
    parser.add_argument("--mix", nargs="+", default=tuple(MIXES), choices=MIXES, metavar="NAME")
    parser.add_argument("--pods", type=int, default=2500, help="pods that count in each simulation (default: 2500)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(argv)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [Run(mix, host, policy, seed, options.pods) for mix, host, policy, seed in product(options.mix, HOSTS, POLICIES, seeds)]
    with ProcessPoolExecutor(options.jobs) as pool:
        lead = show(dict(zip(runs, pool.map(simulate, runs), strict=True)))
    print(f"\nOn the mean {OURS} accepts {lead:+.2f} points more pods than {BY_NUMBER}; at least {MIN_LEAD} is wanted.")
    return 0 if lead >= MIN_LEAD else 1


if __name__ == "__main__":
    sys.exit(main())
