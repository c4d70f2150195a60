# SPDX-License-Identifier: Apache-2.0
"""This machine as a node: its first GPU, and the driver that the loader finds. Containers are unpacked roots, so it needs no root.

With ``LD_LIBRARY_PATH`` and ``ALIQUOT_SIM_DIR`` of a simulated node, the simulated driver takes the place of a real one.
"""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from agent.core.region_layout import Limits
from aliquot import contract
from tests.fakes.container import LIBRARY_DIR, Container, Interposition, Node, make_container

PROBE_MIB = 4096
"""A share in which a context surely fits."""
_GPUS = """
import pynvml as n
n.nvmlInit()
for i in range(n.nvmlDeviceGetCount()): print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i)))
"""
_USED = """
import pynvml as n
n.nvmlInit()
print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByUUID({uuid!r})).used)
"""


class MachineNode(Node):
    """A node with containers that share the machine's first GPU. The container shows every GPU, and CUDA there only this one."""

    def __init__(self, build: Path, roots: Path) -> None:
        self.build = build
        self.directory = Path(os.environ.get(contract.ENV_SIM_DIR, roots))
        self._roots = roots
        self._made = 0
        self.uuids = tuple(self.host(_GPUS).split())[:1]
        self._driver = {soname: library_file(soname) for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
        self._used_before_bytes = self._used_bytes()
        self._context_bytes = 0
        reported = self.container(PROBE_MIB).client("info").last
        self._context_bytes = reported["total_bytes"] - reported["free_bytes"]

    def container_with(self, limits: Limits, *, interposition: Interposition = "front", uuids: Sequence[str] | None = None) -> Container:
        """Create a container. Its library path is followed by the machine's, which the driver may need."""
        self._made += 1
        root = self._roots / f"container{self._made}"
        container = make_container(
            root, self.build, self.directory, limits, interposition=interposition, uuids=uuids or (), driver=self._driver
        )
        container.measured_context_bytes = self._context_bytes
        paths = (str(root / LIBRARY_DIR), os.environ.get("LD_LIBRARY_PATH"))
        container.settings = {"LD_LIBRARY_PATH": ":".join(filter(None, paths)), contract.ENV_CUDA_VISIBLE_DEVICES: self.uuids[0]}
        return container

    def host_environment(self) -> dict[str, str]:
        return dict(os.environ)

    def physical_used_bytes(self, uuid: str) -> int:
        """Return the device memory that is used more than before the test: NVML may list no process, for example in a container."""
        assert uuid == self.uuids[0]
        return self._used_bytes() - self._used_before_bytes

    def _used_bytes(self) -> int:
        return int(self.host(_USED.format(uuid=self.uuids[0])))


def library_file(soname: str) -> Path:
    """Return the file that the loader finds by that name on this machine."""
    ctypes.CDLL(soname)
    stem = soname.removesuffix("1")
    mapped = (Path(line.split(maxsplit=5)[5].strip()) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line)
    return next(path for path in mapped if path.name.startswith(stem))
