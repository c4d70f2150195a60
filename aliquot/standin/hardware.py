"""The GPUs behind a stand-in node: simulated ones, or those of this machine through the real driver.

Each says what the node's owner would provide on a real node: the driver, and the host's NVIDIA CDI spec (which ``nvidia-ctk cdi generate``
writes there).
"""

import ctypes.util
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aliquot.paths import built
from aliquot.standin.cdi import ContainerEdits, Device, DeviceNode, Mount, Spec
from aliquot.standin.inventory import Inventory, InventoryError, read_inventory
from aliquot.standin.runtime import find_ldconfig
from proto import contract

CONTAINER_LIBRARY_DIR = f"/usr/lib/{platform.machine()}-linux-gnu"
MOUNT_OPTIONS = ("ro", "nosuid", "nodev", "bind")
DRIVER_LIBRARY = re.compile(
    r"lib(cuda|nvidia-ml|nvidia-ptxjitcompiler|nvidia-nvvm|nvidia-gpucomp|nvidia-pkcs11|cudadebugger)[A-Za-z0-9-]*\.so\.[0-9.]+"
)
"""Libraries of the driver that compute needs, of all that a host has."""
LDCONFIG_LINE = re.compile(r"\s*(\S+) \(.*\) => (\S+)")
_inventories: dict[bytes, Inventory] = {}
"""By what describes a simulated node, from which all of it follows, UUIDs too: nodes alike are read once."""
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class HardwareError(Exception):
    """The GPUs cannot be used, with what is missing."""


class Hardware(Protocol):
    """GPUs and driver of a node."""

    title: str
    """What this is, for people."""
    isolates: bool
    """Whether NVML in a container is kept from the GPUs that are not the container's, as a device cgroup does."""

    def prepare(self, directory: Path, node_name: str) -> Inventory:
        """Make the GPUs ready and list them; ``directory`` is the node's own. Raises HardwareError."""
        ...

    def cdi_spec(self, inventory: Inventory) -> Spec:
        """The host's NVIDIA CDI spec."""
        ...

    def agent_environment(self) -> Mapping[str, str]:
        """What the agent's process needs in its environment."""
        ...

    def agent_flags(self) -> Sequence[str]:
        """Flags by which the agent finds the driver."""
        ...

    def host_environment(self) -> Mapping[str, str]:
        """What a program outside of all containers needs to use the driver, seeing every GPU."""
        ...

    def visibility(self, nodes: Sequence[DeviceNode]) -> Mapping[str, str]:
        """Environment that limits a process to the GPUs whose device nodes it was given, where no device cgroup does."""
        ...


class SimulatedHardware:
    """A node of the simulated driver, made from a profile or topology file."""

    def __init__(self, topology: str) -> None:
        self.topology = topology
        self.title = f"simulated node {Path(topology).name}"
        self.isolates = True
        self._directory = Path()
        self._libraries = built(f"lib/sim/{contract.CUDA_SONAME}").parent
        self._control = built("bin/aliquot-sim")

    def prepare(self, directory: Path, node_name: str) -> Inventory:
        """Make the node's directory with ``aliquot-sim init`` and read it back through NVML."""
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
        """Devices are named by UUID, and ``all`` is every GPU; being visible is an environment entry instead of a device node."""
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
        """The directory of the simulated node."""
        return {contract.ENV_SIM_DIR: str(self._directory)}

    def agent_flags(self) -> Sequence[str]:
        """The agent uses the simulated driver of this tree."""
        return ("--simulate", self.topology)

    def host_environment(self) -> Mapping[str, str]:
        """The node's directory, and the simulated driver before any real one."""
        return {contract.ENV_SIM_DIR: str(self._directory), "LD_LIBRARY_PATH": str(self._libraries)}

    def visibility(self, nodes: Sequence[DeviceNode]) -> Mapping[str, str]:
        """Nothing: the simulated driver looks at the CDI environment itself."""
        del nodes
        return {}


class RealHardware:
    """The GPUs of this machine. Processes are limited to their GPUs by CUDA_VISIBLE_DEVICES, as no device cgroup stands in the way."""

    title = "this machine's NVIDIA driver"
    isolates = False

    def __init__(self) -> None:
        self._uuid_of_node: dict[str, str] = {}

    def prepare(self, directory: Path, node_name: str) -> Inventory:
        """Look for a driver and list its GPUs."""
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
        """Device nodes by GPU, and the driver's libraries as the loader's cache lists them."""
        libraries = driver_libraries()
        if not any(path.name.startswith("libcuda.so.") for path in libraries):
            raise HardwareError("no libcuda.so among the loader's libraries (ldconfig -p); the NVIDIA driver is installed without CUDA")
        mounts = tuple(Mount(str(path), f"{CONTAINER_LIBRARY_DIR}/{path.name}", MOUNT_OPTIONS) for path in libraries)
        control = tuple(DeviceNode(path) for path in CONTROL_NODES if Path(path).exists())
        devices = tuple(Device(gpu.uuid, ContainerEdits(device_nodes=(DeviceNode(f"/dev/nvidia{gpu.minor}"),))) for gpu in inventory.gpus)
        return Spec(contract.CDI_VERSION, contract.NVIDIA_CDI_KIND, devices, ContainerEdits(device_nodes=control, mounts=mounts))

    def agent_environment(self) -> Mapping[str, str]:
        """Nothing beside our own environment."""
        return {}

    def agent_flags(self) -> Sequence[str]:
        """The agent finds the driver by itself."""
        return ()

    def host_environment(self) -> Mapping[str, str]:
        """Nothing beside our own environment."""
        return {}

    def visibility(self, nodes: Sequence[DeviceNode]) -> Mapping[str, str]:
        """Name the GPUs of the given nodes; a container without any sees none."""
        uuids = [self._uuid_of_node[node.path] for node in nodes if node.path in self._uuid_of_node]
        return {contract.ENV_CUDA_VISIBLE_DEVICES: ",".join(uuids)}


def _simulated_device(uuid: str, suffix: str) -> Device:
    return Device(uuid, ContainerEdits(env=(_simulated_visible(uuid, suffix),)))


def _simulated_visible(uuid: str, suffix: str) -> str:
    return f"{contract.ENV_SIM_DEVICE_PREFIX}{suffix}={uuid}"


def driver_libraries() -> list[Path]:
    """Return the driver's library files, without the links to them, for this machine's architecture."""
    listing = subprocess.run([find_ldconfig(), "-p"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout
    files: dict[str, Path] = {}
    for match in filter(None, map(LDCONFIG_LINE.fullmatch, listing.splitlines())):
        path = Path(match.group(2)).resolve()
        if path.is_file() and DRIVER_LIBRARY.fullmatch(path.name) and "i386" not in str(path) and "/lib32/" not in str(path):
            files.setdefault(path.name, path)
    return sorted(files.values())
