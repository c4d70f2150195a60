# SPDX-License-Identifier: Apache-2.0
"""Builds what a container needs so that the driver itself limits its memory (R615 and later, by cgroup).

The limit belongs on the container's own cgroup, which the runtime creates after PreStart. NVIDIA's toolkit has a hook for this moment
(``apply-cuda-memory-limits``, 1.20.1 and later). It reads the limit from the container's environment, in which a CDI edit takes precedence
over the pod's spec, and applies it through NVML. The soft limit stays 0: it would reserve memory on every ancestor of the cgroup, and no
program releases that when the container is gone.
"""

from collections.abc import Sequence

from agent.core.cdi import Edits
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import DeviceShare

NVML_CALLS = ("nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1")
"""The NVML functions for these limits."""


def limit_edits(shares: Sequence[DeviceShare], hook: str) -> Edits:
    """Return the CDI edits with which the toolkit's hook limits the memory of each share; a container's shares have one size.

    Args: hook: path of ``nvidia-cdi-hook`` on the host.
    """
    (memory_bytes,) = {share.memory_bytes for share in shares}
    arguments = [hook.rpartition("/")[2], "apply-cuda-memory-limits"]
    for share in shares:
        arguments += ["--gpu-id", share.device_uuid]
    return {
        "env": [f"{contract.ENV_NVIDIA_MEMORY_LIMIT}={units.bytes_to_mib(memory_bytes)}", f"{contract.ENV_NVIDIA_MEMORY_REQUEST}=0"],
        "hooks": [{"hookName": "createRuntime", "path": hook, "args": arguments}],
    }
