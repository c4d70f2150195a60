# SPDX-License-Identifier: Apache-2.0
"""Measures the admission check: from reserved quota to an answer with held GPUs, for workloads that come one by one and many at once.

    python -m tests.bench.bench_admission [--workloads 1000] [--json FILE]

The whole scheduler runs against a stand-in of the API over HTTP, with eight GPUs on each node and a GPU for each pod. The bench plays
Kueue: it reserves quota at once and admits by the answer. CPU time is that of scheduler and stand-in together.
tests/e2e/test_admission_scale.py measures the same with Kueue itself. Ends with 1 when a figure misses its target.
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

from aliquot.contract.gpunode import encode_gpu_node
from aliquot.contract.units import MIB
from scheduler_plugin.settings import Answer
from tests.bench.bench_agent import Figure
from tests.bench.report import table
from tests.integration.test_admission_check import GATE, answer, prepare, workload
from tests.integration.test_extender import running
from tests.unit.scheduler_plugin.api import FakeApi, node_object
from tests.unit.scheduler_plugin.builders import make_node

GPUS_PER_NODE = 8
STEADY_PER_SECOND = 20.0
STEADY_SHARE = 5
"""One workload in so many comes at the steady rate."""
PODS_OF_LARGE = 10
POLL_SECONDS = 0.001
TARGET_SECONDS = 2.0
"""The 99th percentile of those that come one by one. Many at once wait for each other."""


async def measure(count: int) -> list[Figure]:
    """Return the figures of each pattern; each gets a cluster of its own."""
    figures: list[Figure] = []
    figures += await measure_pattern("one by one", count // STEADY_SHARE, 1, STEADY_PER_SECOND)
    figures += await measure_pattern("at once", count, 1, None)
    figures += await measure_pattern(f"at once, of {PODS_OF_LARGE} pods", count // PODS_OF_LARGE, PODS_OF_LARGE, None)
    return figures


async def measure_pattern(name: str, count: int, pods: int, per_second: float | None) -> list[Figure]:
    """Let workloads come, all at once or at a rate, until all are Ready."""
    async with FakeApi() as api:
        mib = make_node("n", 1).devices[0].device.memory_bytes // MIB
        for number in range(-(-count * pods // GPUS_PER_NODE)):
            await api.put("nodes", node_object(f"n{number}"))
            await api.put("gpunodes", json.loads(encode_gpu_node(make_node(f"n{number}", GPUS_PER_NODE))))
        await prepare(api)
        async with running(api, feature_gates=GATE, answer=Answer.ONE) as scheduler:
            await scheduler.until(lambda: "status" in api.objects["admissionchecks"]["", "fits"])
            begun, used = time.monotonic(), time.process_time()
            watching = asyncio.create_task(ready_times(api, count))
            created: dict[str, float] = {}
            for number in range(count):
                if per_second is not None:
                    await asyncio.sleep(begun + number / per_second - time.monotonic())
                created[f"w{number}"] = time.monotonic()
                await api.put("workloads", workload(f"w{number}", pods, mib))
            ready = await watching
    seconds = sorted(ready[key] - created[key] for key in created)
    return [
        Figure(f"{name}: median", statistics.median(seconds) * 1000, "ms"),
        Figure(
            f"{name}: 99th percentile", seconds[int(0.99 * (count - 1))] * 1000, "ms", None if per_second is None else TARGET_SECONDS * 1000
        ),
        Figure(f"{name}: CPU for each pod", (time.process_time() - used) * 1000 / (count * pods), "ms"),
    ]


async def ready_times(api: FakeApi, count: int) -> dict[str, float]:
    """Return when each workload was seen to be Ready."""
    found: dict[str, float] = {}
    waiting: set[str] = set()
    known = 0
    while len(found) < count:
        waiting |= {name for _, name in list(api.objects["workloads"])[known:]}
        known = len(api.objects["workloads"])
        for name in [name for name in waiting if answer(api, name)["state"] == "Ready"]:
            found[name] = time.monotonic()
            waiting.discard(name)
        await asyncio.sleep(POLL_SECONDS)
    return found


def main(arguments: list[str]) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_admission")
    parser.add_argument("--workloads", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    logging.disable()  # of the connections that the stand-in cuts off
    figures = asyncio.run(measure(options.workloads))
    rows = [
        (figure.name, f"{figure.value:.1f} {figure.unit}", f"{figure.target:g}" if figure.target is not None else "") for figure in figures
    ]
    table(f"Admission check, {options.workloads} workloads", ("figure", "value", "target"), rows)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))
    return int(any(figure.target is not None and figure.value > figure.target for figure in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
