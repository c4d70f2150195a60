"""What services ask of the outside world, in our own types. Each port has one adapter in ``adapters`` and fakes in the tests.

Adapters raise from ``errors`` only. Synchronous ports are called in a thread; asynchronous ones on the event loop.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from agent.core.cdi import CapabilityNode, HostSpec
from agent.core.cgroups import ContainerRef
from agent.core.conflict import Evidence
from agent.core.health import GpuHealth, HealthTable
from agent.core.identity import HeldDevices, RememberedDevices
from agent.core.injection import Answer
from agent.core.inventory import DeviceEvent, DriverReading, OverdueCall
from agent.core.ledger import Grant
from agent.core.mig import MigRecord
from agent.core.mps_records import DaemonState, SupervisorState, Wish
from agent.core.overhead import HostProcess, ProcessList
from agent.core.publishing import NodeCondition
from agent.core.region_layout import ComputeCounters, Limits, RegionSnapshot
from agent.core.registration import FileIdentity
from proto.codec import MigPlace
from proto.gpunode import Cordon
from proto.kubelet.deviceplugin_pb2_grpc import DevicePluginServicer
from proto.model import Link, MigInstance, Pod

T = TypeVar("T")


class Clock(Protocol):
    """Time, as an argument."""

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        ...

    def now(self) -> float:
        """Seconds since 1970."""
        ...


class Driver(Protocol):
    """The NVIDIA driver. Every call may raise DriverError, DriverMissingError or DriverTimeoutError, and none blocks the event loop."""

    async def read(self) -> DriverReading:
        """Look at all GPUs: what they are, how they are. One whose earlier call has not come back is not asked, and did not answer."""
        ...

    async def events(self) -> Sequence[DeviceEvent]:
        """Take what GPUs reported since the last call, without waiting for more, or for another call that hangs."""
        ...

    async def links(self) -> Sequence[Link]:
        """Read how the GPUs that answered the last ``read`` are connected.

        Raises DriverError before the first ``read`` and after ``restart``, until the next.
        """
        ...

    async def processes(self) -> ProcessList:
        """List the processes on the GPUs that the last ``read`` found, those whose use the driver does not tell left out.

        Raises DriverError before the first ``read`` and after ``restart``, until the next.
        """
        ...

    async def restart(self) -> None:
        """Leave the driver, so that the next ``read`` enters it again; a GPU that was reset comes back only so."""
        ...

    async def keep_out(self, reason: str) -> None:
        """Leave the driver and do not enter it while there is a reason, which is then the error of every call; empty ends that.

        A GPU can be reset, and its MIG mode changed where that takes a reset, only while nobody has it open.
        """
        ...

    async def found_anew(self) -> Set[str]:
        """Return the UUIDs of the GPUs that would answer if the driver were left and entered again. May take a minute."""
        ...

    def overdue(self) -> Sequence[OverdueCall]:
        """Return the calls that have not come back in time; for any thread. Raises nothing."""
        ...


class MigPartitions(Protocol):
    """The partitions of GPUs in MIG mode. Calls raise PartitionError, or what ``Driver`` raises."""

    async def places(self, device_uuid: str) -> Sequence[MigInstance]:
        """List where instances may be made on an empty GPU, of every profile that a resource can name."""
        ...

    async def instance_at(self, place: MigPlace) -> MigInstance | None:
        """Return the instance of the place's profile that begins there; one that was left half made has no UUID."""
        ...

    async def create(self, place: MigPlace, size: int) -> MigInstance:
        """Make an instance at a place of ``size`` memory slices."""
        ...

    async def destroy(self, place: MigPlace) -> None:
        """Remove the instance at a place, if there is one. Raises PartitionInUseError while processes use it."""
        ...


class MigRecords(Protocol):
    """The instances the agent made, on disk. Calls raise StorageError."""

    def load(self) -> Sequence[MigRecord]:
        """Read all records, those of damaged files left out and reported."""
        ...

    def write(self, record: MigRecord) -> None:
        """Make a record durable: after a crash it is there whole, or as it was before."""
        ...

    def remove(self, place: str) -> None:
        """Remove a record; nothing happens when it is gone."""
        ...


class CgroupLimits(Protocol):
    """The driver's own memory limits. Calls raise what ``Driver`` raises."""

    async def limit_bytes(self, device_uuid: str, cgroup: str) -> int | None:
        """Return what the processes of a cgroup may use of a GPU's memory; None when nothing limits them."""
        ...

    async def set_limit(self, device_uuid: str, cgroup: str, limit_bytes: int) -> None:
        """Limit the processes of a cgroup."""
        ...


class Cgroups(Protocol):
    """The host's cgroups."""

    def of_container(self, container: ContainerRef) -> str | None:
        """Return the directory of a container's cgroup; None when there is none."""
        ...


class MpsControl(Protocol):
    """MPS control daemons, one per GPU. Calls block, so that they are made in a thread; they raise MpsError, or StorageError."""

    def start(self, device_uuid: str) -> int | None:
        """Start a daemon where none runs; return its process, None where it is not found."""
        ...

    def servers(self, device_uuid: str) -> Mapping[int, str] | None:
        """Return the servers of a daemon by their pid, with the state each is in; None where no daemon answers."""
        ...

    def trim_logs(self, device_uuid: str) -> None:
        """Empty the logs of the daemon and its servers that have become large; every question adds to them."""
        ...

    def shut_down_server(self, device_uuid: str, pid: int) -> None:
        """End a server and whoever is connected to it."""
        ...

    def stop(self, device_uuid: str) -> None:
        """End the daemon and its servers, whatever state they are in, and remove its directories."""
        ...

    def known(self) -> Sequence[str]:
        """Return the GPUs that have a daemon's directories."""
        ...

    def clear_shared_memory(self) -> None:
        """Empty the directory that is /dev/shm to all daemons and clients of the node; to be called while there are none."""
        ...


class MpsDaemons(Protocol):
    """What the agent asks of ``aliquot-mps``, and hears from it. Calls raise StorageError."""

    def supervisor(self) -> SupervisorState | None:
        """Return what the supervisor says of itself; None when none lives."""
        ...

    def load(self) -> Mapping[str, Wish]:
        """Return the wishes that an earlier agent left, by GPU; those that cannot be read are left out."""
        ...

    def want(self, wish: Wish) -> None:
        """Want the daemon of a GPU, for these clients."""
        ...

    def wanted(self) -> Set[str]:
        """Return the GPUs of which a daemon is wanted now, whatever the wish says."""
        ...

    def withdraw(self, device_uuid: str) -> None:
        """Want the daemon of a GPU no more."""
        ...

    def state(self, device_uuid: str) -> DaemonState | None:
        """Return what has become of a wish; None while nothing has. It counts only while a supervisor lives."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wishes as the supervisor finds them."""

    devices: Set[str] = frozenset()
    """The GPUs of which a daemon is wanted."""
    unclear: Mapping[str, str] = field(default_factory=dict)
    """Of each GPU whose wish cannot be read, why: a daemon that runs is kept, and none is started."""


class MpsDesk(Protocol):
    """Where the supervisor of MPS daemons hears what is wanted, and says what there is. Calls raise StorageError."""

    def take(self) -> bool:
        """Become the one supervisor of this node, and take back what an earlier one said of its daemons; False while another lives."""
        ...

    def open(self, state: SupervisorState) -> None:
        """Say that this supervisor lives; from now on what it tells counts."""
        ...

    def close(self) -> None:
        """Live no more."""
        ...

    def wanted(self) -> Wanted:
        """Return what is wanted; a file that is refused is said in the log, once."""
        ...

    def tell(self, state: DaemonState) -> None:
        """Say what has become of a wish."""
        ...

    def forget(self, device_uuid: str) -> None:
        """Say nothing any more of a GPU whose daemon nobody wants."""
        ...


class ProcessEnds(Protocol):
    """Tells when processes end. On the event loop."""

    def watch(self, pid: int, tell: Callable[[], None]) -> Callable[[], None]:
        """Call ``tell`` once when a process ends; return what stops that. A process that is gone already is told of at once.

        Raises: ProcessError.
        """
        ...


class PodResources(Protocol):
    """The kubelet's PodResources socket. Calls raise KubeletError, or KubeletBusyError where there were too many of them."""

    async def held(self) -> Sequence[HeldDevices]:
        """Return which container holds which device IDs."""
        ...

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """Return the IDs kubelet offers under a resource name."""
        ...


class KubeletMemory(Protocol):
    """Kubelet's checkpoint of allocations: a witness that may have nothing to say."""

    def remembered(self) -> Sequence[RememberedDevices]:
        """Return which container was given which IDs; empty when it cannot be read."""
        ...

    def answer(self, kept: bytes) -> Answer | None:
        """Decode ``RememberedDevices.answer``; None when it says nothing. Pure."""
        ...

    def version(self) -> object:
        """Return what is another whenever the checkpoint was written; None when it cannot be looked at."""
        ...


class HostDirectories(Protocol):
    """Directories that the agent shares with the host."""

    def removed(self) -> Sequence[Path]:
        """Return those that were removed on the host while they are mounted here."""
        ...


class PluginServer(Protocol):
    """A plugin that listens on a socket."""

    async def stop(self) -> None:
        """Stop listening, let running calls end, remove the socket."""
        ...


class Kubelet(Protocol):
    """The kubelet's device plugin directory. Calls raise KubeletError."""

    async def serve(self, socket_name: str, plugin: DevicePluginServicer) -> PluginServer:
        """Serve a plugin on a socket in the directory."""
        ...

    async def register(self, socket_name: str, resource: str) -> None:
        """Tell kubelet that the resource is served on that socket."""
        ...

    def identity(self, socket_name: str) -> FileIdentity | None:
        """Say which file a name in the directory is now."""
        ...

    async def evidence(self, resource: str, own_sockets: frozenset[str]) -> Evidence:
        """Gather what tells whether another plugin holds the resource."""
        ...

    async def remove_dead_sockets(self, prefix: str) -> None:
        """Remove sockets of that prefix on which nobody listens any more."""
        ...


@dataclass(frozen=True, slots=True)
class NodeState:
    """The part of the Node object the agent watches."""

    uid: str
    capacity: Mapping[str, str]
    allocatable: Mapping[str, str]
    runtime_version: str = ""
    """Such as ``containerd://2.1.4``."""
    kubelet_version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus_healthy: NodeCondition | None = None
    """The condition the agent publishes, as it stands there; None before it was published."""


@dataclass(frozen=True, slots=True)
class GpuNodeState:
    """This node's gpunodes object as it stands in the API."""

    cordon: Cordon | None
    """None when what is written there cannot be understood."""
    trouble: str
    """Why it cannot be understood; empty when it can."""
    status: Mapping[str, object]
    """As decoded from JSON; empty before an agent reported."""


class KubeListener(Protocol):
    """Receives what list-watch learns, in the watching thread; implementations hand over to the event loop."""

    def pods_listed(self, pods: Sequence[Pod]) -> None:
        """All pods of the node, as of now: those not named are gone."""
        ...

    def pod_changed(self, pod: Pod) -> None:
        """A pod was added or changed."""
        ...

    def pod_deleted(self, pod: Pod) -> None:
        """A pod was deleted."""
        ...

    def node_changed(self, node: NodeState) -> None:
        """The node object was read or changed."""
        ...

    def gpu_node_seen(self, gpu_node: GpuNodeState | None) -> None:
        """The node's gpunodes object was read or changed; None when there is none."""
        ...

    def api_trouble(self, what: str, trouble: str) -> None:
        """List-watch of ``what`` fails with this sentence; empty when it works again."""
        ...


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One event about a pod, for ``kubectl describe``."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    reason: str
    message: str
    warning: bool


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One event about this node, for ``kubectl describe``."""

    node: str
    node_uid: str
    reason: str
    message: str
    warning: bool


class KubeApi(Protocol):
    """Requests to the Kubernetes API, called in a thread. They raise KubeApiError."""

    def publish_capacity(self, node_name: str, capacity: Mapping[str, int]) -> None:
        """Set extended resources in the node's status."""
        ...

    def publish_condition(self, node_name: str, condition: NodeCondition, *, turned: bool) -> None:
        """Set the agent's own condition in the node's status; ``turned`` says that it did not hold before and does now, or the reverse."""
        ...

    def create_gpu_node(self, node_name: str, node_uid: str) -> None:
        """Create the node's gpunodes object, to vanish with the node."""
        ...

    def publish_gpu_node(self, node_name: str, status: Mapping[str, object]) -> Mapping[str, object]:
        """Replace the status of the node's gpunodes object; return it as the API keeps it."""
        ...

    def post_event(self, event: PodEvent | NodeEvent, happened_at: float) -> None:
        """Create an event. Raises KubeAbsentError or KubeRefusedError where the API will never take it.

        Args: happened_at: in seconds since 1970.
        """
        ...

    def evict_pod(self, namespace: str, name: str, uid: str) -> None:
        """Ask for a pod's end by the Eviction API, which respects disruption budgets; the pod must still be the one of this UID."""
        ...


class KubeWatch(Protocol):
    """List-watch streams, each in a thread of its own."""

    def start(self, listener: KubeListener) -> None:
        """Begin; listens until the process ends or ``stop``."""
        ...

    def stop(self) -> None:
        """End the streams."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedGrants:
    """The ledger as found on disk, and the files that were set aside because they could not be read."""

    grants: tuple[Grant, ...]
    quarantined: tuple[str, ...]


class GrantStore(Protocol):
    """The ledger on disk, one file per grant. Calls raise StorageError."""

    def load(self) -> LoadedGrants:
        """Read all rows; set unreadable ones aside."""
        ...

    def write(self, grant: Grant) -> None:
        """Make a row durable: after a crash it is there whole, or as it was before."""
        ...

    def read(self, grant_id: str) -> Grant | None:
        """Read one row; None when there is none or it is damaged."""
        ...

    def ids(self) -> Sequence[str]:
        """Return the grant ids that have a row."""
        ...

    def remove(self, grant_id: str) -> None:
        """Remove a row; nothing happens when it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class RegionView:
    """A usage region, and which of its processes are gone."""

    snapshot: RegionSnapshot
    dead: tuple[int, ...]
    """Indexes of slots that are taken and whose process is gone."""

    @property
    def live(self) -> bool:
        """Whether a process of the container is there."""
        return len(self.dead) < len(self.snapshot.slots)


class ContainerFiles(Protocol):
    """The limits and usage region of each grant. Calls raise StorageError."""

    def prepare(self, grant: Grant, limits: Limits, *, mounted: bool = False) -> None:
        """Make both files ready for a container that is about to start; a region that a process of its pod still uses is kept.

        Args: mounted: whether the container may be running, with the files that are there mounted: then they stay the files they are.
        """
        ...

    def link_shim(self, grant_id: str, directory: Path) -> None:
        """Show the shim of this directory beside a grant's files, where an answer without CDI has it mounted from."""
        ...

    def linked(self, paths: Iterable[str]) -> Set[str]:
        """Return which of these directories are shown beside some grant's files."""
        ...

    def paths(self, grant_id: str) -> tuple[str, str]:
        """Return the paths of limits and region."""
        ...

    def copies(self) -> Sequence[Grant]:
        """Return the grants recorded beside the files, to heal a ledger row that was lost."""
        ...

    def region(self, grant_id: str) -> RegionView | None:
        """Read a usage region; None when there is none, or a tenant spoilt it or made looking at it slow."""
        ...

    def has_region(self, grant_id: str) -> bool:
        """Whether there is a usage region, whatever is in it."""
        ...

    def cut_region(self, grant_id: str) -> int:
        """Take away what a tenant wrote behind its usage region (``region_layout.REGION_BYTES_KEPT``); return how many bytes that was."""
        ...

    def limits(self, grant_id: str) -> Limits | None:
        """Read the limits that hold now; None when there are none."""
        ...

    def amend_limits(self, grant_id: str, change: Callable[[Limits], Limits]) -> Limits:
        """Change the limits in place, unless ``change`` returns them as they are; return what holds now."""
        ...

    def compute(self, grant_id: str) -> Sequence[ComputeCounters] | None:
        """Read what the container paid for GPU time, by device; None when ``region`` is."""
        ...

    def store_host_pids(self, grant_id: str, pids: Mapping[int, int]) -> None:
        """Tell the container's processes, by slot index, who they are on the host."""
        ...

    def ids(self) -> Sequence[str]:
        """Return the grant ids that have files."""
        ...

    def remove(self, grant_id: str) -> None:
        """Remove the files of a grant."""
        ...


class HealthStore(Protocol):
    """What is remembered of the GPUs' health over the agent's process, until the next boot. Calls raise StorageError."""

    def load(self) -> HealthTable:
        """Read it; an empty table when nothing was saved in this boot."""
        ...

    def save(self, gpus: Mapping[str, GpuHealth]) -> None:
        """Replace it."""
        ...


class Store(Protocol[T]):
    """What the API last told of something, over restarts and reboots. Calls raise StorageError."""

    def load(self) -> T:
        """Read it; when nothing was saved, what holds at first."""
        ...

    def save(self, value: T) -> None:
        """Replace it, durably."""
        ...


class Processes(Protocol):
    """The host's processes."""

    def read(self, pids: Iterable[int]) -> Sequence[HostProcess]:
        """Say who these processes are; those that are gone are left out."""
        ...

    def cgroups(self) -> Collection[str]:
        """Return the cgroups of all processes, as ``HostProcess.cgroup`` has them; empty text stands for one that ends and tells none."""
        ...

    def own_cgroup(self) -> str:
        """Return the cgroup of this agent, as ``HostProcess.cgroup`` has it of others; empty when it cannot be read."""
        ...

    def maps(self, pid: int, path: str) -> bool | None:
        """Whether a process has mapped the file at this path of the host; None when that may not be looked at."""
        ...

    def kill(self, process: HostProcess) -> bool:
        """End this very process, never one that has its pid by now; False when it is gone. Raises ProcessError."""
        ...


class CdiFiles(Protocol):
    """The CDI specs. Calls raise StorageError."""

    def host_spec(self, wanted: Collection[str] = ()) -> HostSpec | None:
        """Return the host's NVIDIA spec, with these devices if it can be had; None where there is none at all."""
        ...

    def has_host_spec(self) -> bool:
        """Whether somebody wrote an NVIDIA spec for this host."""
        ...

    def present_nodes(self) -> Sequence[str]:
        """Return the host's /dev/nvidia* nodes."""
        ...

    def capability_nodes(self, minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[CapabilityNode, ...]:
        """Return the nodes that grant access to one MIG instance."""
        ...

    def write(self, grant_id: str, spec: Mapping[str, object]) -> None:
        """Write the spec of a grant: a runtime sees all of it or none."""
        ...

    def mentioned(self, paths: Iterable[str]) -> Set[str]:
        """Return which of these paths the spec of some grant names."""
        ...

    def digest(self, grant_id: str) -> str | None:
        """Return a digest of the spec of a grant; None when there is none."""
        ...

    def digest_of(self, spec: Mapping[str, object]) -> str:
        """Return the digest that this spec has when it is written."""
        ...

    def total_bytes(self) -> int:
        """Return the size of all specs that a runtime reads, anybody's."""
        ...

    def ids(self) -> Sequence[str]:
        """Return the grant ids that have a spec."""
        ...

    def remove(self, grant_id: str) -> None:
        """Remove the spec of a grant."""
        ...


class FileChanges(Protocol):
    """The directories whose files the reconciler compares. On the event loop."""

    def start(self, tell: Callable[[], None]) -> None:
        """Begin to call ``tell`` when something came, went or was replaced there."""
        ...

    def forget(self) -> None:
        """Do not tell of what has happened until now."""
        ...

    def close(self) -> None:
        """Tell nothing any more."""
        ...


class SharedPage(Protocol):
    """A page that containers share, as a file of the node."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    def mend(self) -> bool:
        """Give it its size and its beginning back, in place; return whether that was needed. Raises StorageError."""
        ...


class ShimInstaller(Protocol):
    """The shim's artefacts on the host."""

    def installed(self) -> Path:
        """Install them unless they are, and return their directory. Raises ShimError."""
        ...

    def sweep(self, mentioned: Callable[[Iterable[str]], Set[str]]) -> Sequence[str]:
        """Remove other versions that nobody uses and return their directories. Raises ShimError, or what ``mentioned`` raises.

        Args: mentioned: says which of some directories a container uses.
        """
        ...


@dataclass(frozen=True, slots=True)
class Page:
    """An answer of the status server."""

    status: int
    content_type: str
    body: bytes
