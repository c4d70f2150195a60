"""The script for real GPUs (tests/bench/real_gpu.py) runs to its end where there is none, so that the one time there is one it works."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.real_gpu import Guard, library_file
from tests.rendering import ROOT

STEPS = (
    "filled, bytes", "Shows the slice, by route", "Monitoring in the container", "Calls",
    "Two tenants", "CUDA graphs", "A neighbour", "A kill",
)  # fmt: skip
FAKE_TORCH = ROOT / "tests/fakes/torch_on_the_driver.py"


def run_script(*flags: str) -> list[str]:
    command = [sys.executable, "-m", "tests.bench.real_gpu", "--simulated", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_run_that_is_out_of_time_names_the_steps_it_left_out(build_dir: Path) -> None:
    said = run_script("--seconds", "0.5")
    for step in STEPS[3:]:  # the ones before may fit
        assert any(step in line and "not measured, the 0.5 s of a run were over" in line for line in said), step


def test_a_row_that_fails_or_hangs_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def fails():
        yield ("half a row",)
        raise ValueError("why")

    def hangs():
        yield ("before",)
        time.sleep(20)

    guard = Guard(60, measure_seconds=0.2)
    guard.table("One", ("what",), [fails, hangs, lambda: [("after",)]])
    guard.table("Other", ("what",), [lambda: [("all",)]])
    said = capsys.readouterr()
    for expected in ("| half a row", "| before", "| after", "One: a row failed: ValueError('why')", "One: a row hangs", "| all"):
        assert expected in said.out
    assert "Traceback" in said.err
    assert guard.failed == ["One", "One"]


def test_the_drivers_file_is_found_as_the_loader_finds_it() -> None:
    """A machine's driver may be in no cache of the loader, but where LD_LIBRARY_PATH says."""
    assert library_file("libc.so.6").name.startswith("libc")


@pytest.fixture
def python_with_torch(tmp_path: Path) -> Path:
    """A Python that has a PyTorch with just enough in it, on the driver."""
    packages, python = tmp_path / "packages", tmp_path / "python"
    (packages / "torch-2.0.dist-info").mkdir(parents=True)
    (packages / "torch-2.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0\n")
    (packages / "torch.py").symlink_to(FAKE_TORCH)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages}:{ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.soak
def test_every_step_of_the_script_runs_on_the_simulated_driver(build_dir: Path, python_with_torch: Path) -> None:
    said = run_script("--python", str(python_with_torch))
    assert "PyTorch 2.0" in said[0]
    for step in (*STEPS, "PyTorch fills the slice"):
        assert any(line.startswith("### ") and step in line for line in said), step
    assert not any("were over" in line for line in said)
    graphs = next(line for line in said if line.startswith("| graphs"))
    assert len(graphs.split("|")[5].split()) > 3, "an error for each second"
