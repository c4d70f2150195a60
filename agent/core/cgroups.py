# SPDX-License-Identifier: Apache-2.0
"""Finds the container of a process from the text of its ``/proc/<pid>/cgroup``.

Kubelet names a pod's cgroup after the pod's UID, and the runtime names the container's after the container's id. That holds for every
cgroup version (1: one line per hierarchy, 2: one line), driver (cgroupfs or systemd) and runtime (containerd, CRI-O, Docker). A reader in
its own cgroup namespace sees paths that begin with ``/..``, so only the pod's and the container's parts are read.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

_POD = re.compile(r"(?:^|-)pod([0-9A-Za-z_-]+?)(?:\.slice)?$")
"""``pod<uid>`` of the cgroupfs driver, ``kubepods-burstable-pod<uid>.slice`` of systemd's, where the UID has underscores for dashes."""
_CONTAINER = re.compile(r"(?:[a-z]+(?:-[a-z]+)*-)?([0-9a-f]{32,64})(?:\.scope)?$")
"""``<id>``, ``cri-containerd-<id>.scope``, ``crio-<id>.scope``, ``docker-<id>.scope``."""
_MONITOR = "crio-conmon-"
"""The scope of the process that watches a CRI-O container from outside."""


@dataclass(frozen=True, slots=True)
class ContainerRef:
    """A container as the runtime knows it."""

    pod_uid: str
    container_id: str


def container_of(cgroup: str) -> ContainerRef | None:
    """Return the container of a process; None for a process of the host."""
    for line in cgroup.splitlines():
        path = line.split(":", 2)[-1]
        if (found := _container_of_path(path)) is not None:
            return found
    return None


def _container_of_path(path: str) -> ContainerRef | None:
    # containerd before 1.4 leaves systemd's "slice:prefix:id" as one name when runc manages cgroups itself
    segments = [part for segment in path.split("/") for part in _unfolded(segment)]
    for pod, container in pairwise(segments):
        pod_match = _POD.search(pod)
        if pod_match is None or container.startswith(_MONITOR):
            continue
        container_match = _CONTAINER.fullmatch(container)
        if container_match is not None:
            return ContainerRef(pod_match[1].replace("_", "-"), container_match[1])
    return None


def _unfolded(segment: str) -> tuple[str, ...]:
    slice_name, colon, rest = segment.partition(":")
    return (slice_name, rest.rpartition(":")[2]) if colon else (segment,)
