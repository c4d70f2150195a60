# SPDX-License-Identifier: Apache-2.0
"""``make baseline`` lets an image be built only with a shim that old containers can load."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.rendering import ROOT

ARM64_COMPILER = "aarch64-linux-gnu-gcc"


def baseline(build_dir: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--silent", "--directory=cuda_shim", "baseline", f"BUILD={build_dir}", *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_library_of_the_shim_loads_with_an_old_glibc(build_dir: Path) -> None:
    done = baseline(build_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {path.name for path in (build_dir / "lib/shim").iterdir()}


def test_one_that_needs_more_ends_the_build_and_is_named(build_dir: Path) -> None:
    done = baseline(build_dir, "GLIBC_BASELINE=2.2.5")
    assert done.returncode != 0
    assert "needs glibc 2." in done.stdout


@pytest.mark.skipif(shutil.which(ARM64_COMPILER) is None, reason=f"{ARM64_COMPILER} is not here (Debian: gcc-aarch64-linux-gnu)")
def test_the_shim_for_arm64_is_held_to_the_same(tmp_path: Path) -> None:
    done = baseline(tmp_path, f"CC={ARM64_COMPILER}")
    assert done.returncode == 0, done.stdout + done.stderr
    for library in (tmp_path / "lib/shim").iterdir():
        header = subprocess.run(["readelf", "-h", library], capture_output=True, text=True, check=True).stdout
        assert "AArch64" in header, library.name
