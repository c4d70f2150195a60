# SPDX-License-Identifier: Apache-2.0
"""The benchmark of partners fits the loss on its own networks only, and rates the scheduler's own choice. The data here are made up."""

import csv
import random
from itertools import combinations

import pytest

from tests.bench import bench_interference
from tests.bench.bench_interference import ALONE, FIT, NETWORKS, PAIRS, Measured

KNEES, SLOPES = (60, 40), (0.003, 0.002)


def write_data(folder, *, factor=1.0, left_out_factor=1.0):
    """Write both files: three jobs for each network, and the speeds of all pairs by a known loss. Args: factor: of all losses."""
    rng = random.Random(1)
    alone = {(network, "D", str(32 << at), "0"): (rng.uniform(5, 95), rng.uniform(0, 80)) for network in NETWORKS for at in range(3)}
    with (folder / ALONE).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "dataset", "batchsize", "amp", "gpu_util", "gmem_util"])
        rows.writerows([*job, *used] for job, used in alone.items())
    with (folder / PAIRS).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([f"{name}{number}" for number in (1, 2) for name in ("model", "dataset", "batchsize", "amp", "speed")])
        for one, other in combinations(alone, 2):
            sums = [sum(both) for both in zip(alone[one], alone[other], strict=True)]
            loss = sum(slope * max(0.0, total - knee) for slope, total, knee in zip(SLOPES, sums, KNEES, strict=True))
            loss *= factor if {one[0], other[0]} <= set(FIT) else factor * left_out_factor
            rows.writerow([*one, 1 - loss, *other, 1.0])
    return folder


def test_fit_finds_loss_from_its_own_networks_alone(tmp_path):
    line = bench_interference.fit(Measured.read(write_data(tmp_path, left_out_factor=0.2)))
    assert (line.sm_knee, line.dram_knee) == KNEES
    assert [line.sm_slope, line.dram_slope, line.constant] == pytest.approx([*SLOPES, 0], abs=1e-9)


@pytest.mark.parametrize(("factor", "status"), [(0.1, 0), (20.0, 1)])
def test_exit_status_says_whether_few_pairs_are_slow(tmp_path, capsys, factor, status):
    assert bench_interference.main(["--data", str(write_data(tmp_path, factor=factor)), "--draws", "2"]) == status
    output = capsys.readouterr().out
    assert "without the term" in output
    assert ("failed" in output) == bool(status)


@pytest.mark.parametrize("arguments", [[], ["--data", "/nowhere"]])
def test_without_data_it_says_what_it_needs_and_ends_with_two(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_interference.main(arguments)
    assert PAIRS in capsys.readouterr().err or not arguments
