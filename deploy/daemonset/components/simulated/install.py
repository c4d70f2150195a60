#!/opt/aliquot/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Installs the simulated driver on a node, as NVIDIA's driver container and ``nvidia-ctk cdi generate`` do on a real one.

Makes three things on the node: the driver's libraries, the simulated GPUs (once: running containers use them), and the
host's NVIDIA CDI spec. Paths are the same on the node and in this container. Called with the arguments of
``nvidia-ctk cdi generate`` it prints that spec as it is now, for MIG instances that were made since.
"""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pynvml

IMAGE = Path("/opt/aliquot-simulated")
DRIVER = Path("/var/lib/aliquot-simulated/driver")
NODE = Path("/var/lib/aliquot-simulated/node")
SPEC = Path("/etc/cdi/nvidia.json")
LIBRARY_DIR = f"/usr/lib/{platform.machine()}-linux-gnu"
SONAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


def install_libraries() -> None:
    """Put the libraries in place; a container that mapped an earlier one keeps its file."""
    DRIVER.mkdir(parents=True, exist_ok=True)
    for soname in SONAMES:
        fresh = DRIVER / f"{soname}.new"
        shutil.copy(IMAGE / "lib/sim" / soname, fresh)
        fresh.rename(DRIVER / soname)


def make_gpus() -> None:
    """Make the simulated GPUs unless the node has them."""
    if not (NODE / "topology").exists():
        NODE.mkdir(exist_ok=True)
        command: list[str | Path] = [
            IMAGE / "bin/aliquot-sim",
            "init",
            os.environ["PROFILE"],
            "--dir",
            NODE,
            "--node",
            os.environ["NODE_NAME"],
        ]
        subprocess.run(command, check=True)


def devices() -> dict[str, str]:
    """Ask the driver for its devices.

    Returns: UUID of each GPU and MIG instance -> what tells it from the others, made of its numbers.
    """
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        minor = pynvml.nvmlDeviceGetMinorNumber(gpu)
        found[pynvml.nvmlDeviceGetUUID(gpu)] = str(minor)
        for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            try:
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)
            except pynvml.NVMLError_NotFound:
                continue
            numbers = (minor, pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig))
            found[pynvml.nvmlDeviceGetUUID(mig)] = "_".join(map(str, numbers))
    return found


def write_spec() -> None:
    """Write the host's CDI spec."""
    fresh = SPEC.with_suffix(".new")
    fresh.write_text(json.dumps(spec(), indent=1))
    fresh.rename(SPEC)


def spec() -> dict[str, object]:
    """Return the host's CDI spec: instead of a device node, an environment entry makes a simulated GPU visible."""
    os.environ["ALIQUOT_SIM_DIR"] = str(NODE)
    ctypes.CDLL(str(DRIVER / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    pynvml.nvmlInit()
    version = pynvml.nvmlSystemGetDriverVersion()
    libraries = [(soname, name) for soname in SONAMES for name in (soname, f"{soname.removesuffix('.1')}.{version}")]
    mounts = [_mount(DRIVER / soname, f"{LIBRARY_DIR}/{name}", "ro") for soname, name in libraries]
    mounts.append(_mount(NODE, str(NODE), "rw"))
    return {
        "cdiVersion": "0.6.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": uuid, "containerEdits": {"env": [f"ALIQUOT_SIM_DEVICE_{number}={uuid}"]}} for uuid, number in devices().items()
        ],
        "containerEdits": {"env": [f"ALIQUOT_SIM_DIR={NODE}"], "mounts": mounts},
    }


def _mount(host_path: Path, container_path: str, access: str) -> dict[str, object]:
    return {"hostPath": str(host_path), "containerPath": container_path, "options": [access, "nosuid", "nodev", "bind"]}


if __name__ == "__main__":
    if sys.argv[1:3] == ["cdi", "generate"]:
        json.dump(spec(), sys.stdout)
    else:
        install_libraries()
        make_gpus()
        write_spec()
