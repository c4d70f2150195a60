# SPDX-License-Identifier: Apache-2.0
"""The limiters of a container in the benchmarks: the bare driver without limits, the shim, or a build of HAMi-core.

All use one simulated node and run the same programs; only the loaded libraries differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes import bare_driver
from tests.fakes.container import MIB, Container, Interposition, Node, make_container

NO_CEILING = 0
"""No limit of compute."""


class Contender(Protocol):
    """Creates containers with limits on their first device."""

    def container(self, memory_mib: int, sm_percent: int = NO_CEILING) -> Container:
        """Create a container; ``sm_percent`` of the device's time, 1..99."""


@dataclass(frozen=True)
class Bare:
    """The driver alone, without limits."""

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
class OnBareDriver:
    """This project's shim, or no limiter, on a driver that does nothing."""

    directory: Path
    build: Path
    driver: Mapping[str, Path]
    interposition: Interposition

    @classmethod
    def both(cls, directory: Path, build: Path) -> "tuple[OnBareDriver, OnBareDriver]":
        """Compile the driver into a folder of ``directory``; return the driver alone, and the shim on it."""
        place = directory / "bare-driver"
        place.mkdir()
        driver = bare_driver.compile_into(place)
        return cls(place, build, driver, "none"), cls(place, build, driver, "front")

    def container(self, memory_mib: int, sm_percent: int = NO_CEILING) -> Container:
        limits = Limits((DeviceLimit(bare_driver.DEVICE_UUID, memory_mib * MIB, sm_percent=sm_percent),))
        root = self.directory / f"{self.interposition}-{sm_percent}"
        return make_container(root, self.build, self.directory, limits, interposition=self.interposition, driver=self.driver)


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
