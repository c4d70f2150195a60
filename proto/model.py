"""The value types both sides share. Frozen, hashable, bytes and percent inside; text forms live in codec.py.

A *share* is a container's portion of one device. A *request* is what a pod asks, an *assignment* where the scheduler put it,
a *grant* (agent/core) what was given. Amounts always come from the pod's spec; an assignment only says where.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Policy(StrEnum):
    """How devices are chosen among those that fit."""

    FRAG = "frag"
    BINPACK = "binpack"
    SPREAD = "spread"
    TOPOLOGY = "topology"


class NumaMode(StrEnum):
    """Whether a container's devices must, or should, lie on one NUMA node."""

    STRICT = "strict"
    PREFER = "prefer"


class Isolation(StrEnum):
    """The backend that enforces a share; see design.md section 3 for what each stops."""

    SHIM = "shim"
    MPS = "mps"
    MIG = "mig"
    DRIVER = "driver"
    EXCLUSIVE = "exclusive"


class Priority(StrEnum):
    """Whose work waits when a device is contended."""

    HIGH = "high"
    LOW = "low"


class CoresMode(StrEnum):
    """What a container's cores mean while others leave theirs idle: a ceiling all the same, or the weight of its part of everything."""

    CEILING = "ceiling"
    WEIGHT = "weight"


class LinkKind(StrEnum):
    """The best path between two devices, from NVML's NvLink state and topology level; best first."""

    NVLINK = "nvlink"
    SAME_BOARD = "same-board"
    PCIE_SWITCH = "pcie-switch"
    PCIE_SWITCHES = "pcie-switches"
    """Several switches, none of them the host's."""
    HOST_BRIDGE = "host-bridge"
    NUMA_NODE = "numa-node"
    SYSTEM = "system"


# --- what a node has --------------------------------------------------------------------------------------------


class MediaEngines(NamedTuple):
    """How many of a GPU's units for video and pictures something takes. MIG instances do not share them with one another."""

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
    """Above 0 for a *place*: the node's agent makes an instance there when a container starts, and the device holds at most so many of
    the profile. Its ``uuid`` is the place's name (``codec.MigPlace``), and its two ids mean nothing."""
    engines: MediaEngines | None = None
    """Of a place: what an instance there takes of the device's media engines; None where that is not told, and not a limit."""

    @property
    def on_demand(self) -> bool:
        """Whether this is a place for an instance, and not one that exists."""
        return self.most_on_device > 0

    def overlaps(self, other: "MigInstance") -> bool:
        """Whether both can never exist at once: they lie on the same device and share memory slices."""
        return (
            self.parent_uuid == other.parent_uuid
            and self.placement_start < other.placement_start + other.placement_size
            and other.placement_start < self.placement_start + self.placement_size
        )


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU as inventoried. ``memory_bytes`` is what containers can be promised: total minus the driver's reserve."""

    uuid: str
    model: str
    minor: int
    """The number in /dev/nvidia<minor>; stable for a boot, unlike NVML's index under visibility masks."""
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
    """The PCIe path beside NVLinks; None where it is not told. A PCIe path is its own ``kind`` and has none here."""


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """All GPUs of one node, in the order of their minor numbers, with the driver they run."""

    driver_version: str
    cuda_version: int
    """As the driver reports it: 1000 * major + 10 * minor, so 13000 is CUDA 13.0."""
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def device(self, uuid: str) -> Device | None:
        """Return the physical GPU with this UUID, or None."""
        return next((device for device in self.devices if device.uuid == uuid), None)


# --- what a pod asks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """What one container asks for, from its limits. Totals as the user wrote them, converted to bytes and percent.

    ``memory_bytes`` None asks for the whole memory of each device; ``cores_percent`` None shares what is free.
    ``mig`` maps a profile to a count and excludes vGPUs in the same container.
    """

    container: str
    vgpus: int = 0
    memory_bytes: int | None = None
    cores_percent: int | None = None
    mig: tuple[tuple[str, int], ...] = ()
    init: bool = False
    """True for an ordinary init container: it ends before the app containers start, so its shares may overlap theirs."""

    @property
    def memory_bytes_per_vgpu(self) -> int | None:
        """The even split of the total; None when whole devices are asked."""
        return None if self.memory_bytes is None else self.memory_bytes // self.vgpus

    @property
    def cores_percent_per_vgpu(self) -> int | None:
        """The even split of the total; None when compute is unlimited."""
        return None if self.cores_percent is None else self.cores_percent // self.vgpus


@dataclass(frozen=True, slots=True)
class Preferences:
    """What a pod's annotations ask of placement and enforcement, for all its containers."""

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
    """None is a ceiling."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The GPU side of one pod: its requesting containers in spec order, and its preferences."""

    containers: tuple[ContainerRequest, ...]
    preferences: Preferences = field(default_factory=Preferences)


# --- where it was put -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """A container's portion of one device (or a whole MIG instance, then with the instance's UUID, or its place's name, and its memory)."""

    device_uuid: str
    memory_bytes: int
    cores_percent: int | None = None


@dataclass(frozen=True, slots=True)
class ContainerAssignment:
    """The devices of one container, in the order the program will see them."""

    container: str
    shares: tuple[DeviceShare, ...]


@dataclass(frozen=True, slots=True)
class PodAssignment:
    """The scheduler's choice for one pod, bound to the pod's UID so that a recreated pod cannot inherit it."""

    pod_uid: str
    containers: tuple[ContainerAssignment, ...]

    def of(self, container: str) -> ContainerAssignment | None:
        """Return the assignment of the named container, or None."""
        return next((assigned for assigned in self.containers if assigned.container == container), None)


# --- a pod, as far as GPU sharing cares ---------------------------------------------------------------------------


class RestartPolicy(StrEnum):
    """After which ends kubelet starts a container again. An ordinary init container that completed is never."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container of a pod's spec: its name and its resource limits as written."""

    name: str
    limits: Mapping[str, str]
    init: bool = False
    restartable: bool = False
    """True for a sidecar: an init container with restartPolicy Always."""
    restart_policy: RestartPolicy = RestartPolicy.ALWAYS
    """Its own, or else its pod's."""


class ContainerState(StrEnum):
    """How far a container of a pod has come, as its status says."""

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
    """The fields of a Kubernetes pod that the agent reads."""

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
        """False once every container has ended for good: the pod's shares are free."""
        return self.phase not in ("Succeeded", "Failed")

    def state_of(self, container: str) -> ContainerState:
        """Return how far a container has come; waiting when its status does not say."""
        return next((status.state for status in self.statuses if status.name == container), ContainerState.WAITING)

    def has_ended(self, container: str) -> bool:
        """Whether a container has ended for good, as far as the status says; a pod whose sandbox is made anew starts it all the same."""
        spec = next((spec for spec in self.containers if spec.name == container), None)
        match self.state_of(container):
            case ContainerState.COMPLETED if spec is not None:
                return spec.restart_policy is not RestartPolicy.ALWAYS or (spec.init and not spec.restartable)
            case ContainerState.FAILED if spec is not None:
                return spec.restart_policy is RestartPolicy.NEVER
        return False
