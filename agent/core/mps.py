# SPDX-License-Identifier: Apache-2.0
"""Builds what a container needs to be a client of the MPS daemon of its GPU.

Each GPU has its own daemon, so that the GPU is ordinal 0 to its clients and one tenant's fault stays on one GPU. Limits are in the client's
environment. A program that unsets them has no limit, which the audit of processes against grants detects. See
https://docs.nvidia.com/deploy/mps for the variables.
"""

from typing import Any

from agent.core.cdi import Edits
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import DeviceShare

_READ_WRITE = ("rw", "nosuid", "nodev", "bind")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the MPS server and its clients share it; it replaces the container's own
DAEMONS_DIRECTORY = "mps"
"""Below the runtime directory: the pipes and logs of daemons."""
RECORDS_DIRECTORY = "mps-daemons"
"""Below the runtime directory: the files that the agent and ``aliquot-mps`` exchange."""
FAULT = "FAULT"
"""The state of a server that ends its clients and takes no new ones."""


def pipe_directory(directory: str, device_uuid: str) -> str:
    """Return the directory by which clients find a GPU's daemon, below the directory of all daemons."""
    return f"{directory}/{device_uuid}/pipe"


def client_edits(share: DeviceShare, pipe_directory: str, shared_memory: str) -> Edits:
    """Return the CDI edits of an MPS client container.

    Args: pipe_directory, shared_memory: the daemon's, on the host.
    """
    env = [
        f"CUDA_MPS_PIPE_DIRECTORY={contract.CONTAINER_MPS_PIPE}",
        f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={units.bytes_to_mib(share.memory_bytes)}M",
    ]
    if share.cores_percent is not None:
        env.append(f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={share.cores_percent}")
    mounts: list[dict[str, Any]] = [
        {"hostPath": pipe_directory, "containerPath": contract.CONTAINER_MPS_PIPE, "options": list(_READ_WRITE)},
        {"hostPath": shared_memory, "containerPath": _SHARED_MEMORY, "options": list(_READ_WRITE)},
    ]
    return {"env": env, "mounts": mounts}


def daemon_environment(device_uuid: str, pipe_directory: str, log_directory: str) -> dict[str, str]:
    """Return the environment of a GPU's daemon, and of programs that control it."""
    return {
        "CUDA_VISIBLE_DEVICES": device_uuid,
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory,
        "CUDA_MPS_LOG_DIRECTORY": log_directory,
    }
