# SPDX-License-Identifier: Apache-2.0
"""Measures the start time of the command, which also matters for shell completion.

    python -m tests.bench.bench_cli

Ends with 1 when a figure misses its target.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from aliquot.paths import SOURCE_ROOT
from aliquot_cli.model import WANTED, node_of
from aliquot_cli.scrape import read_metrics
from tests.bench.report import table

ROUNDS = 15
HELP_TARGET_MS = 200.0
NODES = 1000
SHARES_PER_NODE = 50


def seconds_to_run(*arguments: str, environment: Mapping[str, str] | None = None) -> float:
    """Return the median time of a run of the command."""
    took = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "aliquot_cli", *arguments],
            check=True,
            cwd=SOURCE_ROOT,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def page() -> str:
    """Return the metrics of a node with eight GPUs and many shares."""
    lines = [f'aliquot_device_info{{node="n",device_uuid="GPU-{gpu}",model="NVIDIA H200",minor="{gpu}"}} 1' for gpu in range(8)]
    for number in range(SHARES_PER_NODE):
        labels = f'node="n",namespace="team",pod="train-{number}",container="main",device_uuid="GPU-{number % 8}"'
        lines += [f"aliquot_{name}{{{labels}}} 1.5e+09" for name in WANTED if name.startswith("container_")]
        lines += [f"aliquot_container_{name}{{{labels}}} 1" for name in ("busy_seconds_total", "launches_total", "processes")]
    return "\n".join(lines)


def seconds_per_node() -> tuple[float, float]:
    """Return the times to parse one agent's page, and to build its node."""
    text = page()
    begun = time.perf_counter()
    for _ in range(100):
        read_metrics(text, WANTED)
    read = time.perf_counter()
    for _ in range(100):
        node_of("n", None, text)
    return (read - begun) / 100, (time.perf_counter() - read) / 100


def main() -> int:
    """Measure, print, and compare with the targets."""
    completing = {"_ALIQUOT_COMPLETE": "bash_complete", "COMP_WORDS": "aliquot de", "COMP_CWORD": "1"}
    figures: Sequence[tuple[str, float, float | None]] = (
        ("aliquot --help", seconds_to_run("--help"), HELP_TARGET_MS),
        ("aliquot top --help", seconds_to_run("top", "--help"), None),
        ("completing a word", seconds_to_run(environment=completing), None),
    )
    rows = [(name, f"{took * 1e3:.0f} ms", "" if target is None else f"< {target:.0f} ms") for name, took, target in figures]
    read, made = seconds_per_node()
    rows.append((f"reading a page of {SHARES_PER_NODE} shares", f"{read * 1e3:.2f} ms", ""))
    rows.append((f"pictures of {NODES} nodes of {SHARES_PER_NODE} shares", f"{made * NODES:.1f} s", ""))
    table("The command line", ("what", "median", "target"), rows)
    return 0 if all(target is None or took * 1e3 < target for _, took, target in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
