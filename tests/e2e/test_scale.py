# SPDX-License-Identifier: Apache-2.0
"""A thousand nodes with eight thousand GPUs: our scheduler next to three others, in one run.

They are kube-scheduler with its own defaults, kube-scheduler as shipped without the extender, and ours with answers that list all nodes.

A run of its own, for the load it makes: ``make e2e ARGS="-m scale -s -k thousand"``. ALIQUOT_SCALE_NODES and
ALIQUOT_SCALE_PODS change the size. ``tests.bench.bench_scale`` measures larger clusters.
"""

import json
import os
from collections import Counter

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.scale import GPU_MEMORY_MIB, LISTING_SCHEDULER, PLAIN_SCHEDULER, STOCK_SCHEDULER, Figures, large_cluster, measure

NODES = int(os.environ.get("ALIQUOT_SCALE_NODES", "1000"))
PODS = int(os.environ.get("ALIQUOT_SCALE_PODS", "1000"))
STEADY_PODS_PER_SECOND = 20.0
STEADY_SECONDS = 15.0


@pytest.mark.scale
@pytest.mark.timeout(2400)
def test_a_thousand_nodes_are_filled_with_nothing_promised_twice(node: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    figures: dict[str, Figures] = {}
    with large_cluster(node, NODES) as api:
        for scheduler in (STOCK_SCHEDULER, PLAIN_SCHEDULER, LISTING_SCHEDULER, contract.SCHEDULER_NAME):
            figures[scheduler], assignments = measure(
                node, api, scheduler, waiting=PODS, per_second=STEADY_PODS_PER_SECOND, seconds=STEADY_SECONDS
            )
    with capsys.disabled():
        print(report(figures))
    promised: Counter[str] = Counter()
    for assignment in map(json.loads, assignments):
        promised.update({device["uuid"]: device["mib"] for container in assignment["containers"] for device in container["devices"]})
    assert len(assignments) == PODS + int(STEADY_PODS_PER_SECOND * STEADY_SECONDS)
    assert max(promised.values()) <= GPU_MEMORY_MIB
    ours, plain = (writes_to_pods(figures[scheduler]) for scheduler in (contract.SCHEDULER_NAME, PLAIN_SCHEDULER))
    assert plain >= 1.0, "a binding at least"
    assert ours <= plain + 1.1, "the assignment travels with the binding, and a nomination is one more write"


def writes_to_pods(figures: Figures) -> float:
    """How often the API server wrote a pod, for each that was bound."""
    return sum(count for what, count in figures.requests_per_pod.items() if not what.endswith(" events"))


def report(figures: dict[str, Figures]) -> str:
    """A table for people."""
    lines = [f"\n{NODES} nodes, {8 * NODES} GPUs, {PODS} waiting pods, then {STEADY_PODS_PER_SECOND:.0f} pods/s"]
    lines.append(f"{'':20}{'pods/s':>8}{'p50 ms':>8}{'p99 ms':>8}  CPU ms and API writes per pod")
    for name, row in figures.items():
        p50, p99 = (1000 * seconds for seconds in row.latency_seconds)
        writes = ", ".join(f"{what} {count:.2f}" for what, count in row.requests_per_pod.items())
        cpu = ", ".join(f"{process} {ms:.1f}" for process, ms in row.cpu_ms_per_pod.items())
        lines.append(f"{name:20}{row.pods_per_second:8.0f}{p50:8.1f}{p99:8.1f}  {cpu}; {writes}")
    return "\n".join(lines)
