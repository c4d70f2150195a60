"""Which of the optional enforcement backends this host has what it needs for."""

import shutil
from pathlib import Path

_UNIFIED_CGROUPS = "cgroup.controllers"
"""A file that is at the root of cgroup v2 only."""


def mps_trouble(program: str) -> str:
    """Say why MPS daemons cannot be started; empty when they can."""
    if not program:
        return "mpsControl of its agent names no nvidia-cuda-mps-control"
    if shutil.which(program) is None:
        return f"mpsControl of its agent is {program}, and there is no such program"
    return ""


def driver_limits_trouble(hook: str, cgroups: Path) -> str:
    """Say why the driver's memory limits cannot be applied; empty when they can, by a driver that has them."""
    if not hook:
        return "driverLimitsHook of its agent names no nvidia-cdi-hook"
    if not (cgroups / _UNIFIED_CGROUPS).exists():
        return f"the driver limits memory by cgroup v2, and this host has no {cgroups / _UNIFIED_CGROUPS}"
    return ""
