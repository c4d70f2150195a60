"""What a container needs for the driver itself to limit its memory (R615 and later, by cgroup).

The limit belongs on the container's own cgroup, which the runtime makes after PreStart. NVIDIA's toolkit brings a hook for this moment
(``apply-cuda-memory-limits``, 1.20.1 and later): it reads the limit from the container's environment, where a CDI edit stands above what
the pod's spec says, and applies it through NVML. The soft limit is left alone: it reserves memory on every ancestor of the cgroup, and
nobody takes that back when the container is gone.
"""

from collections.abc import Sequence

from agent.core.cdi import Edits
from proto import units
from proto.model import DeviceShare

_LIMIT = "NVIDIA_GPU_MEMORY_LIMIT"
_REQUEST = "NVIDIA_GPU_MEMORY_REQUEST"

NVML_CALLS = ("nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1")
"""What NVML needs for it."""


def limit_edits(shares: Sequence[DeviceShare], hook: str) -> Edits:
    """Return the CDI edits that have the toolkit's hook limit each share's memory; a container's shares are of one size.

    Args: hook: path of ``nvidia-cdi-hook`` on the host.
    """
    (memory_bytes,) = {share.memory_bytes for share in shares}
    arguments = [hook.rpartition("/")[2], "apply-cuda-memory-limits"]
    for share in shares:
        arguments += ["--gpu-id", share.device_uuid]
    return {
        "env": [f"{_LIMIT}={units.bytes_to_mib(memory_bytes)}", f"{_REQUEST}=0"],
        "hooks": [{"hookName": "createRuntime", "path": hook, "args": arguments}],
    }
