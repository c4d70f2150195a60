"""Who limits a container in the benchmarks: nobody, the shim, or a build of HAMi-core that somebody made and named.

All stand on one simulated node and run the same programs; only what is loaded into them differs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes.container import MIB, Container, Interposition, Node

NO_CEILING = 0
"""Of compute: the container may take what is free."""


class Contender(Protocol):
    """Makes containers whose first device has these limits."""

    def container(self, memory_mib: int, sm_percent: int = NO_CEILING) -> Container:
        """Make a container; ``sm_percent`` of the device's time, 1..99."""


@dataclass(frozen=True)
class Bare:
    """The driver alone: no limit is held."""

    node: Node

    def container(self, memory_mib: int, sm_percent: int = NO_CEILING) -> Container:
        del sm_percent
        return self.node.container(memory_mib, interposition="none")


@dataclass(frozen=True)
class Shim:
    """This project's shim, as front or as preload."""

    node: Node
    interposition: Interposition = "front"

    def container(self, memory_mib: int, sm_percent: int = NO_CEILING) -> Container:
        limits = Limits((DeviceLimit(self.node.uuids[0], memory_mib * MIB, sm_percent=sm_percent),))
        return self.node.container_with(limits, interposition=self.interposition)


@dataclass(frozen=True)
class HamiCore:
    """HAMi-core as its device plugin injects it: preloaded, with limits and the path of its shared region in the environment.

    ``CUDA_REDIRECT`` names the library, which does not lie at ``/usr/local/vgpu`` here: without it, lookups by dlsym pass it by. The
    compute limit is enforced always, not only while HAMi's monitor says that the device is shared.
    Source: README.md and src/multiprocess/multiprocess_memory_limit.c of HAMi-core, server.go of HAMi's device plugin.
    """

    node: Node
    library: Path

    def container(self, memory_mib: int, sm_percent: int = NO_CEILING) -> Container:
        container = self.node.container(memory_mib, interposition="none")
        container.settings |= {
            "LD_PRELOAD": str(self.library),
            "CUDA_REDIRECT": str(self.library),
            "CUDA_DEVICE_MEMORY_LIMIT_0": f"{memory_mib}m",
            "CUDA_DEVICE_SM_LIMIT": str(sm_percent),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(container.root / "vgpu.cache"),
            "GPU_CORE_UTILIZATION_POLICY": "FORCE",
            "LIBCUDA_LOG_LEVEL": "0",
        }
        return container
