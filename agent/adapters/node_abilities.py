"""Which of the optional enforcement backends this host has what it needs for."""

import os
import shutil
from pathlib import Path

_UNIFIED_CGROUPS = "cgroup.controllers"
"""A file that is at the root of cgroup v2 only."""


def mps_trouble(program: str) -> str:
    """Say why MPS daemons cannot be started; empty when they can."""
    if shutil.which(program) is None:
        return f"mpsControl of aliquot-mps is {program!r}, and there is no such program"
    return ""


def driver_limits_trouble(hook: str, host: Path, cgroups: Path) -> str:
    """Say why the driver's memory limits cannot be applied; empty when they can, by a driver that has them.

    Args: hook: path of nvidia-cdi-hook on the host. It may be a link to what is not seen from here. host: where the host's root is seen.
    """
    if not hook:
        return "driverLimitsHook of its agent names no nvidia-cdi-hook"
    if not os.path.lexists(seen := host / hook.lstrip("/")):
        return (
            f"driverLimitsHook of its agent is {hook}, and there was no {seen} when the agent started: install nvidia-container-toolkit "
            "1.20.1 or later on the node, let the setting name its nvidia-cdi-hook (and hostDir where the agent sees the node's files: the "
            "component driver-limits), and delete the agent's pod"
        )
    if not (cgroups / _UNIFIED_CGROUPS).exists():
        return f"the driver limits memory by cgroup v2, and this host has no {cgroups / _UNIFIED_CGROUPS}"
    return ""
