"""What the agent needs for GPUs in MIG mode, said where the driver refuses it: who lacks it learns what to change.

The rights are two device nodes. The NVIDIA container runtime puts them into a container whose environment asks for them, but not each of
its versions does. Source: https://github.com/NVIDIA/nvidia-container-toolkit/issues/1740 and pull request 1947
"""

import os
from pathlib import Path

MIG_RIGHTS = (
    "the agent may not: GPUs in MIG mode need the capability SYS_ADMIN, and NVIDIA_MIG_MONITOR_DEVICES=all and "
    "NVIDIA_MIG_CONFIG_DEVICES=all in its environment (the component deploy/daemonset/components/mig)"
)
"""The cure for NO_PERMISSION, which the driver answers about nothing but GPUs in MIG mode once a process may use it at all."""
_PASSED_OVER = (
    "where it has all that, the container toolkit passed the variables over, as 1.18 to 1.20.0 do in their mode jit-cdi: "
    "install 1.20.1, or see docs/install.md for what to do without"
)
_NODES = ("nvidia-cap1", "nvidia-cap2")
"""What lets a process make instances, and look at all of them: the first two capabilities of every driver with MIG."""
_CAPABILITIES = Path("/dev/nvidia-caps")


def mig_rights(capabilities: Path = _CAPABILITIES) -> str:
    """Return the cure, with which of the two device nodes this process lacks: not there, or kept from it by its device cgroup."""
    lacking = [str(capabilities / name) for name in _NODES if not os.access(capabilities / name, os.R_OK)]
    return f"{MIG_RIGHTS}. It has no access to {' and '.join(lacking)}; {_PASSED_OVER}" if lacking else MIG_RIGHTS
