# SPDX-License-Identifier: Apache-2.0
"""Prepares a simulated node for the agent: ``aliquot-sim`` creates it from a profile or topology file. A restarted agent reuses it."""

import subprocess
from pathlib import Path

from aliquot import contract
from aliquot.process.settings import SettingsError

INIT_TIMEOUT_SECONDS = 30.0


def prepare_node(topology: str, directory: Path, node_name: str, build: Path) -> None:
    """Create the node unless it exists. Raises SettingsError."""
    if (directory / "state").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    command = [str(build / "bin/aliquot-sim"), "init", topology, "--dir", str(directory), "--node", node_name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=INIT_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SettingsError(f"simulate: {command[0]} cannot be run: {exc}; build it with make") from exc
    if result.returncode != 0:
        raise SettingsError(f"simulate {topology!r}: {result.stderr.strip() or f'{command[0]} ended with {result.returncode}'}")


def driver_library(build: Path) -> Path:
    """Return the path of the simulated driver's NVML library. Raises SettingsError if it is not built."""
    path = build / "lib/sim" / contract.NVML_SONAME
    if not path.exists():
        raise SettingsError(f"simulate: {path} is missing; build it with make")
    return path
