# SPDX-License-Identifier: Apache-2.0
"""Measures how fast our scheduler fills a large cluster beside kube-scheduler alone: real API server and kube-scheduler, simulated nodes.

    python -m tests.bench.bench_scale [--nodes 5000] [--pods 300] [--schedulers stock-scheduler plain-scheduler aliquot-scheduler]

``make bench ARGS=scale`` runs it for 5,000 nodes; 15,000 nodes take about ten minutes. It needs root and a Go toolchain, as make e2e, and
no other run of it or of ``make e2e`` from the same tree. The schedulers are those of tests/e2e/scale.py:

- ``stock-scheduler``: kube-scheduler with its own defaults, which look at a sample of the nodes
- ``plain-scheduler``: our configuration without the extender (``percentageOfNodesToScore: 100``)
- ``listing-scheduler``: ours with ``answer: all``
- ``aliquot-scheduler``: ours

CPU per pod is that of each process over the burst of waiting pods. Pods per second depend on all that runs on the machine. Ends with 1 when
ours binds fewer than 0.9 times the pods per second of ``plain-scheduler``, or 0.6 times those of ``stock-scheduler``.
"""

import argparse
import os
import sys

from aliquot import contract
from tests.bench.report import table
from tests.e2e.cluster.cluster import running_cluster
from tests.e2e.cluster.host import UnavailableError
from tests.e2e.scale import LISTING_SCHEDULER, PLAIN_SCHEDULER, STOCK_SCHEDULER, Figures, large_cluster, measure

SCHEDULERS = (STOCK_SCHEDULER, PLAIN_SCHEDULER, LISTING_SCHEDULER, contract.SCHEDULER_NAME)
DEFAULT = (STOCK_SCHEDULER, PLAIN_SCHEDULER, contract.SCHEDULER_NAME)
PODS_PER_SECOND = 20.0
SECONDS = 5.0
AIMS = {PLAIN_SCHEDULER: 0.9, STOCK_SCHEDULER: 0.6}
"""Least part of the pods per second of another scheduler."""


def measure_all(nodes: int, pods: int, schedulers: list[str]) -> dict[str, Figures]:
    """Measure schedulers one after the other on one cluster."""
    with running_cluster() as cluster, large_cluster(cluster, nodes) as api:
        return {name: measure(cluster, api, name, waiting=pods, per_second=PODS_PER_SECOND, seconds=SECONDS)[0] for name in schedulers}


def show(nodes: int, pods: int, figures: dict[str, Figures]) -> bool:
    """Print one size of cluster; return whether ours meets the aims, as far as the schedulers were measured."""
    busy = os.getloadavg()[0]
    stock, plain = (figures.get(name) for name in (STOCK_SCHEDULER, PLAIN_SCHEDULER))
    rows = []
    for name, row in figures.items():
        ratios = (round(row.pods_per_second / other.pods_per_second, 2) if other else "" for other in (plain, stock))
        cpu = " + ".join(f"{process} {ms:.1f}" for process, ms in row.cpu_ms_per_pod.items())
        writes = sum(count for what, count in row.requests_per_pod.items() if not what.endswith(" events"))
        rows.append((name, round(row.pods_per_second, 1), *ratios, round(1000 * row.latency_seconds[1]), cpu, round(writes, 2)))
    title = f"{nodes} nodes, {pods} waiting pods, then {PODS_PER_SECOND:.0f} a second (load {busy:.1f} on {os.cpu_count()} cores)"
    header = ("scheduler", "pods/s", "to plain", "to stock", "p99 ms", "CPU ms per pod", "writes to pods")
    table(title, header, rows)
    ours, met = figures.get(contract.SCHEDULER_NAME), True
    for other, aim in AIMS.items():
        if ours is not None and other in figures:
            ratio = ours.pods_per_second / figures[other].pods_per_second
            met &= ratio >= aim
            print(f"{ratio:.2f} times the pods per second of {other}, aim {aim}: {'met' if ratio >= aim else 'MISSED'}")
    return met


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=300)
    parser.add_argument("--schedulers", nargs="+", choices=SCHEDULERS, default=list(DEFAULT))
    options = parser.parse_args()
    try:
        figures = measure_all(options.nodes, options.pods, options.schedulers)
    except UnavailableError as missing:
        print(f"not measured: {missing}", file=sys.stderr)
        return 1
    return 0 if show(options.nodes, options.pods, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
