"""List-watch of this node's pods and of the node itself, each in a thread of its own.

Survives what API servers do: outages, also slow ones (backoff with jitter, what is known stays known), ended watches (continued from the
last version), and forgotten history (410: list again). What the agents of a large cluster do at once is cheap for the API server: pods are
listed from its memory, and after a 410 at moments that chance spreads. Only the fields the agent reads are decoded: 10 µs per pod instead
of 2 ms.
"""

import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
import urllib3

from agent.adapters.kube_api import GPU_NODES, LIST_TIMEOUT_SECONDS, KubeConnection
from agent.core.publishing import NodeCondition
from agent.errors import KubeAbsentError, KubeApiError, KubeBehindError, KubeExpiredError
from agent.ports import GpuNodeState, KubeListener, NodeState
from program.backoff import Backoff
from proto import contract, gpunode
from proto.errors import ContractError
from proto.model import ContainerSpec, ContainerState, ContainerStatus, Pod, RestartPolicy

logger = logging.getLogger(__name__)

WATCH_SECONDS = 240
"""How long the server keeps one watch; a little more is drawn by chance, so that the agents of a cluster do not reconnect at once."""
FIRST_BACKOFF_SECONDS = 0.2
LAST_BACKOFF_SECONDS = 10.0
EXPIRED_SECONDS = 5.0
"""The most that chance puts between a 410 and the next list: a restarted server has forgotten the history for all agents at once."""
ABSENT_SECONDS = 60.0
"""Between two looks for a kind of object that the cluster does not have, such as gpunodes before their definition is installed."""
CHUNK_BYTES = 1 << 16
_MIRROR = "kubernetes.io/config.mirror"
_STATIC_UID = "kubernetes.io/config.hash"
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A peer that vanished without a word is noticed in half a minute, not at the end of the watch."""


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, str] | None = None


class _Container(msgspec.Struct, rename="camel"):
    name: str
    resources: _Resources | None = None
    restart_policy: str | None = None
    restart_policy_rules: list[msgspec.Raw] | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    containers: list[_Container] = []
    init_containers: list[_Container] | None = None
    restart_policy: str | None = None
    node_name: str = ""
    scheduler_name: str = ""


class _Running(msgspec.Struct):
    pass


class _Terminated(msgspec.Struct, rename="camel"):
    exit_code: int = 0


class _State(msgspec.Struct):
    running: _Running | None = None
    terminated: _Terminated | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    name: str
    state: _State = msgspec.field(default_factory=_State)
    container_id: str = msgspec.field(default="", name="containerID")


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    init_container_statuses: list[_ContainerStatus] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _NodeInfo(msgspec.Struct, rename="camel"):
    container_runtime_version: str = ""
    kubelet_version: str = ""


class _Condition(msgspec.Struct):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _NodeStatus(msgspec.Struct, rename="camel"):
    capacity: dict[str, str] | None = None
    allocatable: dict[str, str] | None = None
    node_info: _NodeInfo | None = None
    conditions: list[_Condition] | None = None


class _NodeMetadata(_Metadata):
    labels: dict[str, str] | None = None


class _Node(msgspec.Struct):
    metadata: _NodeMetadata
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class _GpuNode(msgspec.Struct):
    metadata: _Metadata
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: dict[str, Any] = {}


class _GpuNodeList(msgspec.Struct):
    metadata: _Metadata
    items: list[_GpuNode] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _OnlyVersion(msgspec.Struct):
    metadata: _Metadata


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""


class _PodList(msgspec.Struct):
    metadata: _Metadata
    items: list[_Pod] | None = None


class _NodeList(msgspec.Struct):
    metadata: _Metadata
    items: list[_Node] | None = None


class _Sink(Protocol):
    """Decodes one kind of object and hands it to the listener."""

    what: str

    def listed(self, data: bytes) -> str:
        """Take a list; return its version."""
        ...

    def changed(self, event_type: str, data: bytes) -> None:
        """Take the object of one watch event."""
        ...


class _Pods:
    what = "pods"

    def __init__(self, listener: KubeListener) -> None:
        self._listener = listener

    def listed(self, data: bytes) -> str:
        listing = msgspec.json.decode(data, type=_PodList)
        self._listener.pods_listed([to_pod(item) for item in listing.items or ()])
        return listing.metadata.resource_version

    def changed(self, event_type: str, data: bytes) -> None:
        pod = to_pod(msgspec.json.decode(data, type=_Pod))
        if event_type == "DELETED":
            self._listener.pod_deleted(pod)
        else:
            self._listener.pod_changed(pod)


class _Nodes:
    what = "node"

    def __init__(self, listener: KubeListener) -> None:
        self._listener = listener

    def listed(self, data: bytes) -> str:
        listing = msgspec.json.decode(data, type=_NodeList)
        for item in listing.items or ():
            self._listener.node_changed(to_node(item))
        return listing.metadata.resource_version

    def changed(self, event_type: str, data: bytes) -> None:
        if event_type != "DELETED":  # a node that registers again is added again
            self._listener.node_changed(to_node(msgspec.json.decode(data, type=_Node)))


class _GpuNodes:
    what = contract.GPU_NODE_PLURAL

    def __init__(self, listener: KubeListener) -> None:
        self._listener = listener

    def listed(self, data: bytes) -> str:
        listing = msgspec.json.decode(data, type=_GpuNodeList)
        states = [to_gpu_node(item) for item in listing.items or ()]
        self._listener.gpu_node_seen(states[0] if states else None)
        return listing.metadata.resource_version

    def changed(self, event_type: str, data: bytes) -> None:
        self._listener.gpu_node_seen(None if event_type == "DELETED" else to_gpu_node(msgspec.json.decode(data, type=_GpuNode)))


class KubeWatcher:
    """Implements ``ports.KubeWatch``."""

    def __init__(self, connect: Callable[..., KubeConnection], node_name: str, *, gpu_nodes: bool = True) -> None:
        """Args: connect: makes a connection with the given options of a urllib3 pool. gpu_nodes: whether to watch the gpunodes object."""
        self._connect = connect
        self._node_name = node_name
        self._gpu_nodes = gpu_nodes
        self._stopped = threading.Event()

    def start(self, listener: KubeListener) -> None:
        """See ``ports.KubeWatch``."""
        name = quote(self._node_name, safe="")
        node = f"/api/v1/nodes?fieldSelector=metadata.name%3D{name}"
        self._start_stream(_Pods(listener), f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}", listener, version_from=node)
        self._start_stream(_Nodes(listener), node, listener)
        if self._gpu_nodes:
            self._start_stream(_GpuNodes(listener), f"{GPU_NODES}?fieldSelector=metadata.name%3D{name}", listener)

    def stop(self) -> None:
        """See ``ports.KubeWatch``."""
        self._stopped.set()

    def _start_stream(self, sink: _Sink, path: str, listener: KubeListener, *, version_from: str = "") -> None:
        default = urllib3.connection.HTTPConnection.default_socket_options
        connection = self._connect(socket_options=[*default, *_KEEPALIVE])
        stream = _Stream(sink, path, connection, listener.api_trouble, self._stopped, version_from)
        threading.Thread(target=stream.run, name=f"watch-{sink.what}", daemon=True).start()


class _Stream:
    """One list-watch."""

    def __init__(
        self,
        sink: _Sink,
        path: str,
        connection: KubeConnection,
        trouble: Callable[[str, str], None],
        stopped: threading.Event,
        version_from: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: version_from: the path of a cheap list whose version the list has to have reached; empty where the list itself is cheap."""
        self._sink = sink
        self._path = path
        self._connection = connection
        self._trouble = trouble
        self._stopped = stopped
        self._version_from = version_from
        self._monotonic = monotonic
        self._backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)
        self._version = ""

    def run(self) -> None:
        """List and watch until stopped."""
        while not self._stopped.is_set():
            least_wait = 0.0
            self._backoff.begin()
            try:
                if not self._version:
                    self._version = self._sink.listed(self._list())
                self._watch()
            except KubeExpiredError as exc:
                self._trouble(self._sink.what, str(exc))
                self._version, least_wait = "", random.uniform(0.0, EXPIRED_SECONDS)  # noqa: S311 - spreads load
            except KubeAbsentError as exc:
                self._trouble(self._sink.what, str(exc))
                self._version, least_wait = "", ABSENT_SECONDS
            except KubeApiError as exc:
                self._trouble(self._sink.what, str(exc))
                least_wait = exc.retry_after_seconds
            except msgspec.DecodeError as exc:
                self._trouble(self._sink.what, str(exc))
            except Exception as exc:  # a thread that died would leave the agent blind without a word
                logger.exception("watching %s", self._sink.what)
                self._trouble(self._sink.what, f"unexpected {type(exc).__name__}: {exc}")
            backoff = self._backoff.ended(self._monotonic())
            self._stopped.wait(least_wait + random.uniform(backoff / 2, backoff))  # noqa: S311 - spreads load

    def _list(self) -> bytes:
        """Read what is there now.

        An object that is chosen by its name is read alone. To choose pods by their node, an API server before 1.31, or with an old etcd,
        reads all pods of the cluster from etcd, unless it is told of which version the answer has to be at least: then it takes it from
        its memory, where pods are found by their node. That version is the one etcd is at, which a list of one object by its name tells. So
        the answer is as new as the other would be: an older one may lack a pod that has a grant, or have one that a namesake has replaced.

        Source: k8s.io/apiserver/pkg/registry/generic/registry.Store.ListPredicate; k8s.io/apiserver/pkg/storage/cacher, GetList.
        """
        if not self._version_from:
            return self._get(self._path)
        version = msgspec.json.decode(self._get(self._version_from), type=_OnlyVersion).metadata.resource_version
        try:
            return self._get(f"{self._path}&resourceVersion={version}&resourceVersionMatch=NotOlderThan")
        except KubeBehindError:  # nobody wrote a pod for seconds, and this server asks etcd seldom how far it is: few agents list then
            return self._get(self._path)

    def _get(self, path: str) -> bytes:
        return self._connection.request("GET", path, read_timeout=LIST_TIMEOUT_SECONDS).data

    def _watch(self) -> None:
        seconds = int(WATCH_SECONDS * random.uniform(1.0, 1.25))  # noqa: S311 - spreads load
        path = f"{self._path}&watch=1&allowWatchBookmarks=true&resourceVersion={self._version}&timeoutSeconds={seconds}"
        response = self._connection.request("GET", path, read_timeout=seconds + 10, stream=True)
        self._backoff.opened(self._monotonic())
        self._trouble(self._sink.what, "")
        try:
            for line in _lines(response):
                if self._stopped.is_set():
                    return
                self._take(msgspec.json.decode(line, type=_Event))
        finally:
            response.close()

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            failure = msgspec.json.decode(bytes(event.object), type=_Failure)
            message = f"watching {self._sink.what}: {failure.message} ({failure.code})"
            raise KubeExpiredError(message) if failure.code == 410 else KubeApiError(message)
        if event.type != "BOOKMARK":
            self._sink.changed(event.type, bytes(event.object))
        self._version = msgspec.json.decode(bytes(event.object), type=_OnlyVersion).metadata.resource_version


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield whole lines as they arrive."""
    pending = b""
    try:
        while chunk := response.read1(CHUNK_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (line for line in lines if line)
    except urllib3.exceptions.HTTPError as exc:
        raise KubeApiError(f"the watch broke off: {exc}") from exc


def to_pod(item: _Pod) -> Pod:
    """Translate a pod; init containers come first, as kubelet starts them."""
    init, restarts = item.spec.init_containers or [], item.spec.restart_policy
    return Pod(
        namespace=item.metadata.namespace,
        name=item.metadata.name,
        uid=_uid(item.metadata),
        node_name=item.spec.node_name,
        phase=item.status.phase,
        annotations=item.metadata.annotations or {},
        containers=(
            *(
                ContainerSpec(spec.name, _limits(spec), True, spec.restart_policy == RestartPolicy.ALWAYS, _restart_policy(spec, restarts))
                for spec in init
            ),
            *(ContainerSpec(spec.name, _limits(spec), restart_policy=_restart_policy(spec, restarts)) for spec in item.spec.containers),
        ),
        scheduler_name=item.spec.scheduler_name,
        deletion_requested=item.metadata.deletion_timestamp is not None,
        statuses=tuple(_status(one) for one in (*(item.status.init_container_statuses or ()), *(item.status.container_statuses or ()))),
    )


def _restart_policy(spec: _Container, of_pod: str | None) -> RestartPolicy:
    """Say when a container starts again; what a later API says, and rules by exit code, may start it after any end."""
    if spec.restart_policy_rules:
        return RestartPolicy.ALWAYS
    wanted = spec.restart_policy or of_pod
    return next((policy for policy in RestartPolicy if policy == wanted), RestartPolicy.ALWAYS)


def _uid(metadata: _Metadata) -> str:
    """Return the UID under which kubelet runs the pod.

    A static pod's is in an annotation of its mirror, and outlives the mirror when somebody deletes that. It is a bare hash, which no pod
    of the API has for a UID, so that none can pass for another by this annotation.
    """
    annotations = metadata.annotations or {}
    of_static = annotations.get(_STATIC_UID, "")
    return of_static if _MIRROR in annotations and re.fullmatch(r"[0-9a-f]{32}", of_static) else metadata.uid


def _status(item: _ContainerStatus) -> ContainerStatus:
    terminated = item.state.terminated
    if item.state.running is not None:
        state = ContainerState.RUNNING
    elif terminated is None:
        state = ContainerState.WAITING
    else:
        state = ContainerState.FAILED if terminated.exit_code else ContainerState.COMPLETED
    return ContainerStatus(item.name, state, item.container_id.rpartition("://")[2])


def _limits(spec: _Container) -> Mapping[str, str]:
    return (spec.resources.limits if spec.resources else None) or {}


def to_node(item: _Node) -> NodeState:
    """Translate a node."""
    info = item.status.node_info or _NodeInfo()
    versions = (info.container_runtime_version, info.kubelet_version)
    labels = item.metadata.labels or {}
    ours = next((one for one in item.status.conditions or () if one.type == contract.NODE_CONDITION_GPUS_HEALTHY), None)
    return NodeState(
        item.metadata.uid,
        item.status.capacity or {},
        item.status.allocatable or {},
        *versions,
        labels=labels,
        gpus_healthy=NodeCondition(ours.status == "True", ours.reason, ours.message) if ours is not None else None,
    )


def to_gpu_node(item: _GpuNode) -> GpuNodeState:
    """Translate a gpunodes object. What an administrator wrote is read on its own, so that it holds whatever the agent's half is like."""
    try:
        return GpuNodeState(gpunode.decode_cordon(item.spec), "", item.status)
    except ContractError as exc:
        return GpuNodeState(None, str(exc), item.status)
