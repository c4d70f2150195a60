# SPDX-License-Identifier: Apache-2.0
"""Fixtures every test may use: the built C side and simulated nodes. Nothing here needs a GPU, root or a network."""

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# How long one example may take says more about the machine than about the code. ``make soak`` asks for the second profile.
settings.register_profile("bounded", deadline=None, max_examples=40)
settings.register_profile("soak", deadline=None, max_examples=2000)
settings.load_profile("bounded")


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """The build directory, with the shim, the simulated driver and their programs up to date."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with (build / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of pytest-xdist build one after another
        subprocess.run(["make", "--no-print-directory", "-s", "-C", ROOT / "cuda_shim"], check=True, env=_environment_for_make())
    return build


@pytest.fixture
def sim_node(build_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make simulated nodes: ``sim_node("h200x8")`` returns the directory to name in ALIQUOT_SIM_DIR."""

    def make(profile: str = "h200x8", *flags: str) -> Path:
        directory = tmp_path_factory.mktemp("sim")
        subprocess.run([build_dir / "bin/aliquot-sim", "init", profile, "--dir", directory, *flags], check=True)
        return directory

    return make


def _environment_for_make() -> dict[str, str]:
    """Drop what an outer ``make test`` exports: its flags and job server are not ours to pass on."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
