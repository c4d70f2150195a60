# SPDX-License-Identifier: Apache-2.0
"""The GPUs of a stand-in node: simulated ones, or those of this machine through the real driver.

Each provides what an administrator installs on a real node: the driver, and the host's NVIDIA CDI spec (from ``nvidia-ctk cdi generate``).
"""

import ctypes.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aliquot import contract
from aliquot.paths import built
from aliquot_lab.standin.cdi import ContainerEdits, Device, DeviceNode, Mount, Spec
from aliquot_lab.standin.inventory import Inventory, InventoryError, read_inventory
from aliquot_lab.standin.runtime import find_ldconfig

CONTAINER_LIBRARY_DIR = f"/usr/lib/{platform.machine()}-linux-gnu"
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "bind")
DRIVER_LIBRARY = re.compile(
    r"lib(cuda|nvidia-ml|nvidia-ptxjitcompiler|nvidia-nvvm|nvidia-gpucomp|nvidia-pkcs11|cudadebugger)[A-Za-z0-9-]*\.so\.[0-9.]+"
)
"""The driver's libraries that compute needs."""
LDCONFIG_LINE = re.compile(r"\s*(\S+) \(.*\) => (\S+)")
_inventories: dict[bytes, Inventory] = {}
"""Inventories of simulated nodes by their description, which determines them with all UUIDs. Each is read once."""
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class HardwareError(Exception):
    """The GPUs cannot be used; the message has the reason."""


class Hardware(Protocol):
    """GPUs and driver of a node."""

    title: str
    """Title for users."""
    isolates: bool
    """Whether NVML in a container sees only the container's GPUs, as with a device cgroup."""

    def prepare(self, directory: Path, node_name: str) -> Inventory:
        """Prepare the GPUs and list them; ``directory`` is that of the node. Raises HardwareError."""
        ...

    def cdi_spec(self, inventory: Inventory) -> Spec:
        """Return the host's NVIDIA CDI spec."""
        ...

    def agent_environment(self) -> Mapping[str, str]:
        """Return the environment of the agent's process."""
        ...

    def agent_flags(self) -> Sequence[str]:
        """Return the flags by which the agent finds the driver."""
        ...

    def host_environment(self) -> Mapping[str, str]:
        """Return the environment of a program outside of containers that uses the driver and sees every GPU."""
        ...

    def visibility(self, nodes: Sequence[DeviceNode]) -> Mapping[str, str]:
        """Return the environment that limits a process to the GPUs of its device nodes, in place of a device cgroup."""
        ...


class SimulatedHardware:
    """A node of the simulated driver, from a profile or topology file."""

    def __init__(self, topology: str) -> None:
        self.topology = topology
        self.title = f"simulated node {Path(topology).name}"
        self.isolates = True
        self._directory = Path()
        self._libraries = built(f"lib/sim/{contract.CUDA_SONAME}").parent
        self._control = built("bin/aliquot-sim")

    def prepare(self, directory: Path, node_name: str) -> Inventory:
        """Create the node's directory with ``aliquot-sim init``, and read the GPUs through NVML."""
        self._directory = directory / "sim"
        self._directory.mkdir()
        command: list[str | Path] = [self._control, "init", self.topology, "--dir", self._directory, "--node", node_name]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise HardwareError(f"topology {self.topology!r}: {result.stderr.strip()}")
        described = (self._directory / "topology").read_bytes()
        if described not in _inventories:
            try:
                _inventories[described] = read_inventory(self.host_environment())
            except InventoryError as exc:
                raise HardwareError(f"the simulated driver of {self.topology!r} does not answer: {exc}") from exc
        return _inventories[described]

    def cdi_spec(self, inventory: Inventory) -> Spec:
        """Return a spec with devices by UUID and ``all``. An environment entry makes a GPU visible, in place of a device node."""
        devices = []
        for gpu in inventory.gpus:
            devices.append(_simulated_device(gpu.uuid, str(gpu.minor)))
            devices += [
                _simulated_device(mig.uuid, f"{gpu.minor}_{mig.gpu_instance_id}_{mig.compute_instance_id}") for mig in gpu.mig_devices
            ]
        devices.append(Device("all", ContainerEdits(env=tuple(_simulated_visible(gpu.uuid, str(gpu.minor)) for gpu in inventory.gpus))))
        libraries = {soname: self._libraries / soname for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
        mounts = tuple(
            Mount(str(path), f"{CONTAINER_LIBRARY_DIR}/{soname.removesuffix('.1')}.{inventory.driver_version}", MOUNT_OPTIONS)
            for soname, path in libraries.items()
        )
        edits = ContainerEdits(env=(f"{contract.ENV_SIM_DIR}={self._directory}",), mounts=mounts)
        return Spec(contract.CDI_VERSION, contract.NVIDIA_CDI_KIND, tuple(devices), edits)

    def agent_environment(self) -> Mapping[str, str]:
        """Return the directory of the simulated node."""
        return {contract.ENV_SIM_DIR: str(self._directory)}

    def agent_flags(self) -> Sequence[str]:
        """Name the simulated driver of this tree."""
        return ("--simulate", self.topology)

    def host_environment(self) -> Mapping[str, str]:
        """Return the node's directory, and a library path with the simulated driver before a real one."""
        return {contract.ENV_SIM_DIR: str(self._directory), "LD_LIBRARY_PATH": str(self._libraries)}

    def visibility(self, nodes: Sequence[DeviceNode]) -> Mapping[str, str]:
        """Return nothing: the simulated driver reads the environment of the CDI spec."""
        del nodes
        return {}


class RealHardware:
    """The GPUs of this machine. CUDA_VISIBLE_DEVICES limits a process to its GPUs, because there is no device cgroup."""

    title = "this machine's NVIDIA driver"
    isolates = False

    def __init__(self) -> None:
        self._uuid_of_node: dict[str, str] = {}

    def prepare(self, directory: Path, node_name: str) -> Inventory:
        """Find the driver and list its GPUs."""
        del directory, node_name
        if ctypes.util.find_library("nvidia-ml") is None:
            raise HardwareError("no NVIDIA driver on this machine: libnvidia-ml.so.1 is not among the loader's libraries (ldconfig -p)")
        try:
            inventory = read_inventory({})
        except InventoryError as exc:
            raise HardwareError(f"the NVIDIA driver does not answer: {exc}") from exc
        if not inventory.gpus:
            raise HardwareError("the NVIDIA driver finds no GPU")
        self._uuid_of_node = {f"/dev/nvidia{gpu.minor}": gpu.uuid for gpu in inventory.gpus}
        return inventory

    def cdi_spec(self, inventory: Inventory) -> Spec:
        """Return a spec with the device nodes of each GPU, and the driver's libraries from the loader's cache."""
        libraries = driver_libraries()
        if not any(path.name.startswith("libcuda.so.") for path in libraries):
            raise HardwareError("no libcuda.so among the loader's libraries (ldconfig -p); the NVIDIA driver is installed without CUDA")
        mounts = tuple(Mount(str(path), f"{CONTAINER_LIBRARY_DIR}/{path.name}", MOUNT_OPTIONS) for path in libraries)
        control = tuple(DeviceNode(path) for path in CONTROL_NODES if Path(path).exists())
        devices = tuple(Device(gpu.uuid, ContainerEdits(device_nodes=(DeviceNode(f"/dev/nvidia{gpu.minor}"),))) for gpu in inventory.gpus)
        return Spec(contract.CDI_VERSION, contract.NVIDIA_CDI_KIND, devices, ContainerEdits(device_nodes=control, mounts=mounts))

    def agent_environment(self) -> Mapping[str, str]:
        """Return nothing: this process's environment is enough."""
        return {}

    def agent_flags(self) -> Sequence[str]:
        """Return nothing: the agent finds the driver by itself."""
        return ()

    def host_environment(self) -> Mapping[str, str]:
        """Return nothing: this process's environment is enough."""
        return {}

    def visibility(self, nodes: Sequence[DeviceNode]) -> Mapping[str, str]:
        """Name the GPUs of the given device nodes. A container without device nodes sees no GPU."""
        uuids = [self._uuid_of_node[node.path] for node in nodes if node.path in self._uuid_of_node]
        return {contract.ENV_CUDA_VISIBLE_DEVICES: ",".join(uuids)}


def _simulated_device(uuid: str, suffix: str) -> Device:
    return Device(uuid, ContainerEdits(env=(_simulated_visible(uuid, suffix),)))


def _simulated_visible(uuid: str, suffix: str) -> str:
    return f"{contract.ENV_SIM_DEVICE_PREFIX}{suffix}={uuid}"


def driver_libraries() -> list[Path]:
    """Return the driver's library files for this machine's architecture, without links."""
    listing = subprocess.run([find_ldconfig(), "-p"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout
    files: dict[str, Path] = {}
    for match in filter(None, map(LDCONFIG_LINE.fullmatch, listing.splitlines())):
        path = Path(match.group(2)).resolve()
        if path.is_file() and DRIVER_LIBRARY.fullmatch(path.name) and "i386" not in str(path) and "/lib32/" not in str(path):
            files.setdefault(path.name, path)
    return sorted(files.values())
