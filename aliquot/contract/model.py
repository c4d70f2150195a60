# SPDX-License-Identifier: Apache-2.0
"""The value types that agent and scheduler share: frozen and hashable, with bytes and percent inside. codec.py has the text forms.

A *share* is a container's part of one device. A *request* is what a pod asks for. An *assignment* says which devices the scheduler chose,
and a *grant* (agent/core) what the agent gave. Amounts always come from the pod's spec; an assignment only names devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from aliquot.contract.units import MIB, WHOLE_GPU_PERCENT


class Policy(StrEnum):
    """How to choose among the devices that fit."""

    FRAG = "frag"
    BINPACK = "binpack"
    SPREAD = "spread"
    TOPOLOGY = "topology"


class Allocation(StrEnum):
    """Which of kubelet's two interfaces give out a node's GPUs, and who allocates them."""

    PLUGIN = "plugin"
    DRA = "dra"
    """By ResourceClaims, which kube-scheduler allocates."""
    PLANNED = "planned"
    """By ResourceClaims, which Aliquot's scheduler allocates."""
    BOTH = "both"
    """By both interfaces on the same GPUs. Aliquot's scheduler allocates them all."""

    @property
    def by_claims(self) -> bool:
        """Whether pods get GPUs by ResourceClaims."""
        return self is not Allocation.PLUGIN

    @property
    def by_ids(self) -> bool:
        """Whether pods get GPUs by device IDs of the device plugin."""
        return self in (Allocation.PLUGIN, Allocation.BOTH)

    @property
    def is_planned(self) -> bool:
        """Whether Aliquot's scheduler, and no other, allocates ResourceClaims."""
        return self in (Allocation.PLANNED, Allocation.BOTH)


class NumaMode(StrEnum):
    """Whether a container's devices must, or should, lie on one NUMA node."""

    STRICT = "strict"
    PREFER = "prefer"


class Isolation(StrEnum):
    """The backend that enforces a share; docs/use/threat-model.md says what each one stops."""

    SHIM = "shim"
    MPS = "mps"
    MIG = "mig"
    DRIVER = "driver"
    EXCLUSIVE = "exclusive"


class Priority(StrEnum):
    """Which work waits when a device is contended."""

    HIGH = "high"
    LOW = "low"


class CoresMode(StrEnum):
    """What a container's cores mean while others are idle: still a ceiling, or the weight of its part of all cores."""

    CEILING = "ceiling"
    WEIGHT = "weight"


class LinkKind(StrEnum):
    """The best path between two devices, from NVML's NvLink state and topology level; best first."""

    NVLINK = "nvlink"
    SAME_BOARD = "same-board"
    PCIE_SWITCH = "pcie-switch"
    PCIE_SWITCHES = "pcie-switches"
    """Several switches, without the host bridge."""
    HOST_BRIDGE = "host-bridge"
    NUMA_NODE = "numa-node"
    SYSTEM = "system"


# --- what a node has --------------------------------------------------------------------------------------------


class MediaEngines(NamedTuple):
    """Numbers of a GPU's units for video and images. MIG instances do not share them."""

    decoders: int = 0
    encoders: int = 0
    jpegs: int = 0
    ofas: int = 0


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG device: a GPU instance with its compute instance. Sizes in bytes; placement in memory slices."""

    uuid: str
    parent_uuid: str
    profile: str
    """As NVML names it, such as ``1g.10gb`` or ``1g.10gb+me``."""
    memory_bytes: int
    gpu_instance_id: int
    compute_instance_id: int
    placement_start: int
    placement_size: int
    most_on_device: int = 0
    """Above 0 for a *place*: the node's agent creates an instance there when a container starts, and the device holds at most this many of
    the profile. Its ``uuid`` is the place's name (``codec.MigPlace``), and its two ids are unused."""
    engines: MediaEngines | None = None
    """Of a place: the media engines that an instance there takes; None if unknown, which is no limit."""

    @property
    def on_demand(self) -> bool:
        """Whether this is a place for an instance, and not an existing one."""
        return self.most_on_device > 0

    def overlaps(self, other: "MigInstance") -> bool:
        """Whether both cannot exist at the same time: they lie on the same device and share memory slices."""
        return (
            self.parent_uuid == other.parent_uuid
            and self.placement_start < other.placement_start + other.placement_size
            and other.placement_start < self.placement_start + self.placement_size
        )


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU in the inventory. ``memory_bytes`` is what containers can get: total minus the driver's reserve."""

    uuid: str
    model: str
    minor: int
    """The number in /dev/nvidia<minor>; stable until reboot, unlike the NVML index under visibility masks."""
    pci_bus_id: str
    memory_bytes: int
    numa_node: int | None = None
    compute_capability: tuple[int, int] | None = None
    mig_enabled: bool = False
    mig_instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """The path between two devices of one node, unordered. ``lanes`` counts active NVLinks; 0 for PCIe paths."""

    a_uuid: str
    b_uuid: str
    kind: LinkKind
    lanes: int = 0
    pcie: LinkKind | None = None
    """The PCIe path of an NVLink pair; None if unknown. For a PCIe path, ``kind`` says it and this is None."""


# --- what a pod asks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """The request of one container, from its limits: totals as the user wrote them, in bytes and percent.

    ``memory_bytes`` and ``memory_percent``: at most one is set; without both the container asks for all memory of each device.
    ``cores_percent`` None uses what is free.
    ``mig`` has profiles with their counts; a container with MIG instances has no vGPUs.
    """

    container: str
    vgpus: int = 0
    memory_bytes: int | None = None
    cores_percent: int | None = None
    mig: tuple[tuple[str, int], ...] = ()
    init: bool = False
    """True for an ordinary init container: it ends before the app containers start, so both may use the same room."""
    memory_percent: int | None = None
    """The total over the vGPUs, of the memory of the devices that are chosen."""

    @property
    def asks_whole_memory(self) -> bool:
        """Whether each vGPU takes all memory of its device."""
        return self.memory_bytes is None and self.memory_percent is None

    @property
    def memory_bytes_per_vgpu(self) -> int | None:
        """Memory of one vGPU: the total split evenly; None if it depends on the device."""
        return None if self.memory_bytes is None else self.memory_bytes // self.vgpus

    @property
    def memory_percent_per_vgpu(self) -> int | None:
        """Memory of one vGPU as a percentage of its device's; None if it is no percentage."""
        return None if self.memory_percent is None else self.memory_percent // self.vgpus

    def memory_mib_on(self, capacity_mib: int) -> int:
        """Return the MiB of one vGPU on a device with this much memory: a percentage is rounded down, to 1 MiB at least."""
        if self.memory_percent is not None:
            return min(capacity_mib, max(1, capacity_mib * self.memory_percent // self.vgpus // WHOLE_GPU_PERCENT))
        return capacity_mib if self.memory_bytes is None else self.memory_bytes // self.vgpus // MIB

    @property
    def cores_percent_per_vgpu(self) -> int | None:
        """Cores of one vGPU: the total split evenly; None without reserved cores."""
        return None if self.cores_percent is None else self.cores_percent // self.vgpus


@dataclass(frozen=True, slots=True)
class Preferences:
    """The settings of a pod's annotations for placement and enforcement. They hold for all its containers."""

    gpu_type: tuple[str, ...] = ()
    gpu_type_not: tuple[str, ...] = ()
    gpu_uuid: tuple[str, ...] = ()
    gpu_uuid_not: tuple[str, ...] = ()
    policy: Policy | None = None
    numa: NumaMode | None = None
    isolation: Isolation | None = None
    priority: Priority | None = None
    memory_burst: float | None = None
    cores_mode: CoresMode | None = None
    """``None`` means ceiling."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The GPU side of one pod: the containers that ask for GPUs, in spec order, and the preferences."""

    containers: tuple[ContainerRequest, ...]
    preferences: Preferences = field(default_factory=Preferences)


class Utilization(NamedTuple):
    """What the containers of a pod use of one GPU, in percent: the time in which its multiprocessors and its memory are busy for them."""

    sm_percent: int = 0
    dram_percent: int = 0


IDLE: Final = Utilization()


# --- where it was put -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A container's part of one device, or a whole MIG instance: its UUID or the name of its place, and its memory."""

    device_uuid: str
    memory_bytes: int
    cores_percent: int | None = None


@dataclass(frozen=True, slots=True)
class ContainerAssignment:
    """The devices of one container, in the order in which the program sees them."""

    container: str
    shares: tuple[DeviceShare, ...]


@dataclass(frozen=True, slots=True)
class PodAssignment:
    """The scheduler's choice for one pod. It names the pod's UID, so that a recreated pod cannot inherit it."""

    pod_uid: str
    containers: tuple[ContainerAssignment, ...]

    def of(self, container: str) -> ContainerAssignment | None:
        """Return the assignment of the named container, or None."""
        return next((assigned for assigned in self.containers if assigned.container == container), None)


# --- a pod, as far as GPU sharing cares ---------------------------------------------------------------------------


class RestartPolicy(StrEnum):
    """When kubelet restarts a container that ended. It never restarts an ordinary init container that completed."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"


class ClaimUse(NamedTuple):
    """What a container uses of a ResourceClaim in its namespace."""

    claim: str
    """The name of the ResourceClaim object."""
    request: str
    """The request in it; empty for all of them."""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container of a pod's spec: its name and its resource limits as written."""

    name: str
    limits: Mapping[str, str]
    init: bool = False
    restartable: bool = False
    """True for a sidecar: an init container with restartPolicy Always."""
    restart_policy: RestartPolicy = RestartPolicy.ALWAYS
    """The container's own policy, or else the pod's."""
    claims: tuple[ClaimUse, ...] = ()
    """The parts of ResourceClaims that it uses."""


class ContainerState(StrEnum):
    """The state of a container in the pod's status."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    """Ended with exit code 0."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """One container of a pod's status. ``container_id`` is the runtime's, without its scheme; empty before the first start."""

    name: str
    state: ContainerState
    container_id: str = ""


@dataclass(frozen=True, slots=True)
class Pod:
    """The fields of a Kubernetes pod that agent and scheduler read."""

    namespace: str
    name: str
    uid: str
    node_name: str
    phase: str
    annotations: Mapping[str, str]
    containers: tuple[ContainerSpec, ...]
    scheduler_name: str = ""
    deletion_requested: bool = False
    statuses: tuple[ContainerStatus, ...] = ()

    @property
    def active(self) -> bool:
        """False once all containers have ended and will not restart: the pod's shares are free."""
        return self.phase not in ("Succeeded", "Failed")

    def state_of(self, container: str) -> ContainerState:
        """Return the state of a container; waiting if the status does not have it."""
        return next((status.state for status in self.statuses if status.name == container), ContainerState.WAITING)

    def has_ended(self, container: str) -> bool:
        """Whether a container has ended and kubelet will not restart it, by its status. A new sandbox of the pod starts it all the same."""
        spec = next((spec for spec in self.containers if spec.name == container), None)
        match self.state_of(container):
            case ContainerState.COMPLETED if spec is not None:
                return spec.restart_policy is not RestartPolicy.ALWAYS or (spec.init and not spec.restartable)
            case ContainerState.FAILED if spec is not None:
                return spec.restart_policy is RestartPolicy.NEVER
        return False
