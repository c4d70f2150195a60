# SPDX-License-Identifier: Apache-2.0
"""Finds a container's cgroup directory on the host (cgroup version 2)."""

import os
from pathlib import Path

from agent.core.cgroups import ContainerRef, container_of


class CgroupTree:
    """Implements ``ports.Cgroups``."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._root = root

    def of_container(self, container: ContainerRef) -> str | None:
        """See ``ports.Cgroups``."""
        for directory, names, _ in os.walk(self._root):
            if container_of(f"0::/{Path(directory).relative_to(self._root)}") == container:
                return directory
            names.sort()
        return None
