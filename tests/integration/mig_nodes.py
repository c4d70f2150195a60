# SPDX-License-Identifier: Apache-2.0
"""Nodes with GPUs in MIG mode: small topologies, stand-ins for NVIDIA's programs, and NVML as an administrator of the node uses it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from aliquot.paths import SOURCE_ROOT, built
from aliquot_lab.standin.node import Node

PROFILE = SOURCE_ROOT / "simulated_driver/profiles/a100x8-mig"
DRIVER_VERSION = re.compile(r"(?<=driver   )version=\S+")
DRIVER_WITH_LIMITS = "615.10.01"
GPU_LINE = re.compile(r"gpu +\d+ .*")


def a100_topology(
    directory: Path, *, whole: int = 0, partitioned: int = 1, instances: tuple[str, ...] = (), driver: str | None = None
) -> str:
    """Write a node of so many A100, without NVLinks; return the file.

    Args: partitioned: GPUs in MIG mode, numbered after the whole ones.
          instances: such as ``gpu=1 profile=3g.40gb start=0``; they exist at boot.
          driver: its version; None: the profile's.
    """
    lines = PROFILE.read_text().splitlines()
    gpus = [line.replace(" mig-mode=on", "") for line in lines if GPU_LINE.match(line)][: whole + partitioned]
    kept = [line for line in lines if not GPU_LINE.match(line) and not line.startswith(("nvlink", "mig "))]
    made = [line if number < whole else f"{line} mig-mode=on" for number, line in enumerate(gpus)]
    path = directory / f"a100x{whole}-{partitioned}"
    text = "\n".join([*kept, *made, *(f"mig {instance}" for instance in instances), ""])
    path.write_text(text if driver is None else DRIVER_VERSION.sub(f"version={driver}", text))
    return str(path)


def ctk(directory: Path) -> str:
    """A stand-in for nvidia-ctk."""
    program = directory / "nvidia-ctk"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={SOURCE_ROOT} exec {sys.executable} -m tests.fakes.nvidia_ctk "$@"\n')
    program.chmod(0o755)
    return str(program)


def mps_program(directory: Path) -> Path:
    """A stand-in for nvidia-cuda-mps-control."""
    program = directory / "nvidia-cuda-mps-control"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={SOURCE_ROOT} exec {sys.executable} -S -m tests.fakes.mps_daemon "$@"\n')
    program.chmod(0o755)
    return program


def on_host(node: Node, script: str, gpu: int) -> Any:
    """Run Python with NVML as an administrator of the node would; ``result`` of the script comes back."""
    prologue = (
        "import ctypes, json, pynvml as nv\n"
        f"nv.nvmlLib = ctypes.CDLL({str(built('lib/sim/libnvidia-ml.so.1'))!r})\n"
        "nv.nvmlInit()\n"
        f"gpu = nv.nvmlDeviceGetHandleByIndex({gpu})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{prologue}{script}\nprint(json.dumps(result))"],
        env={**node.hardware.host_environment(), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return json.loads(done.stdout)
