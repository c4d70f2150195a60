# SPDX-License-Identifier: Apache-2.0
"""Checks whether this host meets the requirements of the optional enforcement backends."""

import os
import shutil
from pathlib import Path

_UNIFIED_CGROUPS = "cgroup.controllers"
"""A file that exists only at the root of cgroup v2."""


def mps_trouble(program: str) -> str:
    """Return why MPS daemons cannot be started; empty if they can."""
    if shutil.which(program) is None:
        return f"mpsControl of aliquot-mps is {program!r}, but there is no such program"
    return ""


def driver_limits_trouble(hook: str, host: Path, cgroups: Path) -> str:
    """Return why the driver's memory limits cannot be applied; empty if they can. Does not check the driver itself.

    Args: hook: path of nvidia-cdi-hook on the host. It may be a link to a file that is not mounted here. host: where the host's root is
    mounted.
    """
    if not hook:
        return "driverLimitsHook of its agent names no nvidia-cdi-hook"
    if not os.path.lexists(seen := host / hook.lstrip("/")):
        return (
            f"driverLimitsHook of its agent is {hook}, but there was no {seen} when the agent started: install nvidia-container-toolkit "
            "1.20.1 or later on the node, set driverLimitsHook to its nvidia-cdi-hook (and hostDir to the node's mounted root: see the "
            "component driver-limits), and delete the agent's pod"
        )
    if not (cgroups / _UNIFIED_CGROUPS).exists():
        return f"the driver limits memory by cgroup v2, but this host has no {cgroups / _UNIFIED_CGROUPS}"
    return ""
