# SPDX-License-Identifier: Apache-2.0
"""The operating system: control groups, inotify, disk space and a running MPS daemon."""

import os
from collections.abc import Iterator

import psutil

from aliquot.contract.units import MIB
from aliquot_cli.doctor.findings import Finding, info, ok, warning
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions

_LEAST_FREE_BYTES = 64 * MIB
_LEAST_INOTIFY_INSTANCES = 256
_MPS_DAEMON = "nvidia-cuda-mps-control"


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Check the system."""
    yield _cgroups(host)
    yield from _inotify(host)
    yield from _space(host, options)
    yield from _mps(host)


def _cgroups(host: Host) -> Finding:
    if host.exists("/sys/fs/cgroup/cgroup.controllers"):
        return ok("system.cgroups", "control groups v2")
    if host.exists("/sys/fs/cgroup/memory"):
        return warning(
            "system.cgroups",
            "control groups v1: the audit works, limits by the driver (isolation: driver) do not",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )
    return warning("system.cgroups", "no control groups below /sys/fs/cgroup", "mount the node's /sys below --root")


def _inotify(host: Host) -> Iterator[Finding]:
    text = (host.text("/proc/sys/fs/inotify/max_user_instances") or "").strip()
    if text.isdigit() and int(text) < _LEAST_INOTIFY_INSTANCES:
        yield warning(
            "system.inotify",
            f"fs.inotify.max_user_instances is {text}: a runtime that runs out of instances does not see new CDI specs",
            f"sysctl fs.inotify.max_user_instances={2 * _LEAST_INOTIFY_INSTANCES} or more",
        )


def _space(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    for name in (options.state_dir, options.runtime_dir):
        if host.exists(name):
            found = os.statvfs(host.path(name))
            free_bytes = found.f_bavail * found.f_frsize
            if free_bytes < _LEAST_FREE_BYTES:
                yield warning(
                    "system.space",
                    f"{name} has {free_bytes // MIB} MiB left: the agent refuses new containers when it is full",
                    f"free at least {_LEAST_FREE_BYTES // MIB} MiB",
                )


def _mps(host: Host) -> Iterator[Finding]:
    if host.is_own and any(process.info["name"] == _MPS_DAEMON for process in psutil.process_iter(["name"])):
        yield info(
            "system.mps",
            f"{_MPS_DAEMON} runs: programs that connect to it share one context, while the shim's limits count per process",
            "stop it unless aliquot-mps started it (isolation: mps)",
        )
