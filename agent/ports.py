"""What services ask of the outside world, in our own types. Each port has one adapter in ``adapters`` and fakes in the tests.

Adapters raise from ``errors`` only. Synchronous ports are called in a thread; asynchronous ones on the event loop.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.core.cdi import HostSpec
from agent.core.conflict import Evidence
from agent.core.identity import HeldDevices
from agent.core.inventory import DriverReading
from agent.core.ledger import Grant
from agent.core.overhead import HostProcess, ProcessMemory
from agent.core.region_layout import ComputeCounters, Limits, RegionSnapshot
from agent.core.registration import FileIdentity
from proto.kubelet.deviceplugin_pb2_grpc import DevicePluginServicer
from proto.model import Link, Pod


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
        """Look at all GPUs: what they are, how they are."""
        ...

    async def links(self) -> Sequence[Link]:
        """Read how the GPUs that answer are connected."""
        ...

    async def processes(self) -> Sequence[ProcessMemory]:
        """List the processes on the GPUs that answer, those whose use the driver does not tell left out."""
        ...

    async def restart(self) -> None:
        """Leave the driver and enter it again; a GPU that was reset comes back only so."""
        ...

    def hung_device(self) -> str | None:
        """The UUID of the GPU whose call has not come back; None when no call hangs or it concerns no single GPU."""
        ...


class PodResources(Protocol):
    """The kubelet's PodResources socket. Calls raise KubeletError."""

    async def held(self) -> Sequence[HeldDevices]:
        """Return which container holds which device IDs."""
        ...

    async def allocatable_ids(self, resource: str) -> Sequence[str]:
        """Return the IDs kubelet offers under a resource name."""
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


class KubeApi(Protocol):
    """Requests to the Kubernetes API, called in a thread. They raise KubeApiError."""

    def publish_capacity(self, node_name: str, capacity: Mapping[str, int]) -> None:
        """Set extended resources in the node's status."""
        ...

    def post_event(self, event: PodEvent) -> None:
        """Create an event."""
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

    def prepare(self, grant: Grant, limits: Limits) -> None:
        """Make both files ready for a container that is about to start; a region that a process still uses is kept."""
        ...

    def paths(self, grant_id: str) -> tuple[str, str]:
        """Return the paths of limits and region."""
        ...

    def copies(self) -> Sequence[Grant]:
        """Return the grants recorded beside the files, to heal a ledger row that was lost."""
        ...

    def region(self, grant_id: str) -> RegionView | None:
        """Read a usage region; None when there is none or a tenant spoilt it."""
        ...

    def limits(self, grant_id: str) -> Limits | None:
        """Read the limits that hold now; None when there are none."""
        ...

    def amend_limits(self, grant_id: str, change: Callable[[Limits], Limits]) -> Limits:
        """Change the limits in place, unless ``change`` returns them as they are; return what holds now."""
        ...

    def compute(self, grant_id: str) -> Sequence[ComputeCounters] | None:
        """Read what the container paid for GPU time, by device; None when there is no region or a tenant spoilt it."""
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


class Processes(Protocol):
    """The host's processes."""

    def read(self, pids: Iterable[int]) -> Sequence[HostProcess]:
        """Say who these processes are; those that are gone are left out."""
        ...


class CdiFiles(Protocol):
    """The CDI specs. Calls raise StorageError."""

    def host_spec(self) -> HostSpec | None:
        """Return the host's NVIDIA spec, or None where there is none."""
        ...

    def present_nodes(self) -> Sequence[str]:
        """Return the host's /dev/nvidia* nodes."""
        ...

    def capability_nodes(self, minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[str, ...]:
        """Return the nodes that grant access to one MIG instance."""
        ...

    def write(self, grant_id: str, spec: Mapping[str, object]) -> None:
        """Write the spec of a grant: a runtime sees all of it or none."""
        ...

    def ids(self) -> Sequence[str]:
        """Return the grant ids that have a spec."""
        ...

    def remove(self, grant_id: str) -> None:
        """Remove the spec of a grant."""
        ...


class ShimInstaller(Protocol):
    """The shim's artefacts on the host."""

    def installed(self) -> Path:
        """Install them unless they are, and return their directory. Raises ShimError."""
        ...


@dataclass(frozen=True, slots=True)
class Page:
    """An answer of the status server."""

    status: int
    content_type: str
    body: bytes
