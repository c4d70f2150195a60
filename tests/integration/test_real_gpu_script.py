"""The script for real GPUs (tests/bench/real_gpu.py) runs to its end where there is none, so that the one time there is one it works."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rendering import ROOT

STEPS = ("filled, bytes", "Shows the slice, by route", "Calls", "Two tenants", "CUDA graphs", "A neighbour", "A kill")


def run_script(*flags: str) -> list[str]:
    command = [sys.executable, "-m", "tests.bench.real_gpu", "--simulated", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_run_that_is_out_of_time_names_the_steps_it_left_out(build_dir: Path) -> None:
    said = run_script("--seconds", "0.5")
    for step in STEPS[3:]:  # the ones before may fit
        assert any(step in line and "not measured, the 0.5 s of a run were over" in line for line in said), step


@pytest.mark.soak
def test_every_step_of_the_script_runs_on_the_simulated_driver(build_dir: Path) -> None:
    said = run_script()
    for step in STEPS:
        assert any(line.startswith("### ") and step in line for line in said), step
    assert not any("were over" in line for line in said)
    graphs = next(line for line in said if line.startswith("| graphs"))
    assert len(graphs.split("|")[5].split()) > 3, "an error for each second"
