# SPDX-License-Identifier: Apache-2.0
"""Simulated nodes for the benchmarks, created and removed outside pytest."""

import subprocess
from pathlib import Path

from tests.fakes.container import Node

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def simulated(directory: Path, profile: str) -> Node:
    """Create a simulated node below ``directory``."""
    roots = directory / "containers"
    roots.mkdir()
    subprocess.run([BUILD / "bin/aliquot-sim", "init", profile, "--dir", directory / "node"], check=True, stdout=subprocess.DEVNULL)
    return Node(BUILD, directory / "node", roots)
