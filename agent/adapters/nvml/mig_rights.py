# SPDX-License-Identifier: Apache-2.0
"""The message with the permissions that the agent needs for GPUs in MIG mode, for when the driver refuses a call.

The permissions are two device nodes. The NVIDIA container runtime adds them to a container that requests them in its environment, but some
versions do not. Source: https://github.com/NVIDIA/nvidia-container-toolkit/issues/1740 and pull request 1947
"""

import os
from pathlib import Path

MIG_RIGHTS = (
    "no permission: for GPUs in MIG mode the agent needs the capability SYS_ADMIN, and NVIDIA_MIG_MONITOR_DEVICES=all and "
    "NVIDIA_MIG_CONFIG_DEVICES=all in its environment (the component deploy/daemonset/components/mig)"
)
"""What to do about NO_PERMISSION. A process that may use the driver at all gets this error only for GPUs in MIG mode."""
_VARIABLES_IGNORED = (
    "if the agent has all that, the container toolkit ignored the variables, as 1.18 to 1.20.0 do in mode jit-cdi: "
    "install 1.20.1, or see docs/use/install.md for a workaround"
)
_NODES = ("nvidia-cap1", "nvidia-cap2")
"""The device nodes for making instances and for reading all of them: the first two capabilities of every driver with MIG."""
_CAPABILITIES = Path("/dev/nvidia-caps")


def mig_rights(capabilities: Path = _CAPABILITIES) -> str:
    """Return what to do, with the device nodes that this process lacks: they are missing, or its device cgroup denies access."""
    lacking = [str(capabilities / name) for name in _NODES if not os.access(capabilities / name, os.R_OK)]
    return f"{MIG_RIGHTS}. It has no access to {' and '.join(lacking)}; {_VARIABLES_IGNORED}" if lacking else MIG_RIGHTS
