"""What a container needs to be a client of the MPS control daemon of its GPU.

One daemon serves one GPU, so that the GPU is ordinal 0 to its clients and a fault of one tenant stays on one GPU. Limits travel in the
client's environment: a program that unsets them has none, which the audit of processes against grants tells. See
https://docs.nvidia.com/deploy/mps for the variables.
"""

from typing import Any

from agent.core.cdi import Edits
from proto import contract, units
from proto.model import DeviceShare

_READ_WRITE = ("rw", "nosuid", "nodev", "bind")
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the MPS server and its clients meet, whatever the container's own is
DAEMONS_DIRECTORY = "mps"
"""Below the runtime directory: the pipes and logs of daemons."""
RECORDS_DIRECTORY = "mps-daemons"
"""Below the runtime directory: what the agent and ``aliquot-mps`` tell each other."""
FAULT = "FAULT"
"""The state of a server that ends its clients and takes no new ones."""


def pipe_directory(directory: str, device_uuid: str) -> str:
    """Return the directory by which clients find the daemon of a GPU, below that of all daemons."""
    return f"{directory}/{device_uuid}/pipe"


def client_edits(share: DeviceShare, pipe_directory: str, shared_memory: str) -> Edits:
    """Return the CDI edits of a container whose GPU an MPS daemon serves.

    Args: pipe_directory, shared_memory: of the daemon, on the host.
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
    """Return the environment of the daemon of one GPU, and of those who talk to it."""
    return {
        "CUDA_VISIBLE_DEVICES": device_uuid,
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory,
        "CUDA_MPS_LOG_DIRECTORY": log_directory,
    }
