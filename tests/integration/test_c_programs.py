# SPDX-License-Identifier: Apache-2.0
"""The test programs in C, each as a test: those of ``make -C cuda_shim check``, bounded; in ``make soak`` for longer and under sanitizers.

Which programs there are is the Makefile's list, so that a new one is run here without being named here.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.rendering import ROOT

FUZZ_RUNS = 100_000
"""Inputs to each fuzz target: sixty times what a bounded run tries."""

LIBFUZZER_SECONDS = 600
"""To each fuzz target."""


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make on the C side, as if no other make had called us."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    environment = {name: text for name, text in os.environ.items() if name not in outer}
    command = ["make", "--silent", f"--directory={ROOT / 'cuda_shim'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def list_programs() -> list[str]:
    """Names of the test programs, in the order of the Makefile."""
    done = make("list-tests")
    if done.returncode != 0:
        raise RuntimeError(f"make -C cuda_shim list-tests: want the names of the C tests, got: {done.stderr}")
    return done.stdout.split()


PROGRAMS = list_programs()
FUZZERS = [program for program in PROGRAMS if program.startswith("fuzz_")]


def run_program(program: str, build_dir: Path, **environment: str) -> None:
    """Run one test program; a failure is reported with all its output."""
    done = subprocess.run(
        [build_dir / "tests" / program, build_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stdout}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_c_program_passes(program: str, build_dir: Path) -> None:
    run_program(program, build_dir)


def test_no_c_test_is_built_and_not_run() -> None:
    folders = ("cuda_shim/tests", "cuda_shim/fuzz", "simulated_driver/tests", "simulated_runtime/tests", "simulated_runtime/blas/tests")
    sources = {path.stem for folder in folders for path in (ROOT / folder).glob("*.c")}
    assert {name for name in sources if name.startswith(("test_", "fuzz_"))} == set(PROGRAMS)


# --- longer -----------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("program", FUZZERS)
def test_many_more_inputs_break_no_promise(program: str, build_dir: Path) -> None:
    run_program(program, build_dir, FUZZ_RUNS=str(FUZZ_RUNS), FUZZ_SEED="1")


@pytest.mark.soak
def test_libfuzzer_finds_nothing(build_dir: Path) -> None:
    """Inputs that are led by the code they reach; what it learns stays in build/fuzz for the next time."""
    settings = [f"BUILD={build_dir}", f"CC={os.environ.get('CLANG', 'clang')}", f"FUZZ_SECONDS={LIBFUZZER_SECONDS}"]
    there = make("fuzzer", *settings)
    if there.returncode != 0:
        pytest.skip(f"no libFuzzer: {there.stderr.splitlines()[0]}")
    done = make("fuzz", *settings)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("sanitizer", ["asan", "tsan"])
def test_c_programs_pass_under_a_sanitizer(sanitizer: str, build_dir: Path) -> None:
    done = make("check", f"BUILD={build_dir}", f"SAN={sanitizer}")
    assert done.returncode == 0, done.stdout + done.stderr
