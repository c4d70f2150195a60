# SPDX-License-Identifier: Apache-2.0
"""A device plugin with replies that a test sets, and a stand-in kubelet in a temporary directory."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from aliquot.kubelet_api import deviceplugin_pb2 as pb
from aliquot.kubelet_api import deviceplugin_pb2_grpc as rpc
from aliquot.kubelet_api import podresources_pb2 as podresources
from aliquot.kubelet_api import podresources_pb2_grpc as podresources_rpc
from aliquot_lab.standin.cluster import Cluster, Kind
from aliquot_lab.standin.kubelet import Kubelet
from aliquot_lab.standin.plugins import Behaviour
from aliquot_lab.standin.pods import parse_amount
from aliquot_lab.standin.runtime import Runtime

NODE = "node-1"
RESOURCE = "example.com/device"
QUICK = Behaviour(retry_seconds=0.05, crash_backoff_seconds=0.05, crash_backoff_limit_seconds=0.05)


def device(device_id: str, *, healthy: bool = True, numa: int | None = None) -> pb.Device:
    topology = None if numa is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=numa)])
    return pb.Device(ID=device_id, health="Healthy" if healthy else "Unhealthy", topology=topology)


def devices(count: int) -> list[pb.Device]:
    return [device(f"d{number}") for number in range(count)]


@dataclass
class ScriptedPlugin(rpc.DevicePluginServicer):
    """Records every call, and replies with the values of its fields."""

    resource: str = RESOURCE
    options: pb.DevicePluginOptions = field(default_factory=lambda: pb.DevicePluginOptions(pre_start_required=True))
    preferred: list[str] = field(default_factory=list)
    on_allocate: Callable[[list[str]], pb.ContainerAllocateResponse] = lambda _: pb.ContainerAllocateResponse()
    allocate_error: str = ""
    prestart_error: str = ""
    prestart_seconds: float = 0.0
    calls: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def __post_init__(self):
        self.messages: asyncio.Queue[list[pb.Device] | None] = asyncio.Queue()
        self.server = None

    def advertise(self, items: list[pb.Device] | None) -> None:
        """Send a message on the stream; None ends the stream."""
        self.messages.put_nowait(items)

    def called(self, name: str) -> list[tuple[str, ...]]:
        return [ids for call, ids in self.calls if call == name]

    async def serve(self, directory: Path, endpoint: str) -> None:
        self.server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix://{directory / endpoint}")
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(grace=None)
            self.server = None

    async def register(self, directory: Path, endpoint: str = "plugin.sock", *, version: str = "v1beta1") -> None:
        async with grpc.aio.insecure_channel(f"unix://{directory / 'kubelet.sock'}") as channel:
            request = pb.RegisterRequest(version=version, endpoint=endpoint, resource_name=self.resource)
            await rpc.RegistrationStub(channel).Register(request, timeout=20)
        self.calls.append(("Registered", ()))

    async def GetDevicePluginOptions(self, request, context):
        self.calls.append(("GetDevicePluginOptions", ()))
        return self.options

    async def ListAndWatch(self, request, context):
        while (items := await self.messages.get()) is not None:
            yield pb.ListAndWatchResponse(devices=items)

    async def GetPreferredAllocation(self, request, context):
        self.calls.append(("GetPreferredAllocation", tuple(request.container_requests[0].available_deviceIDs)))
        answer = pb.ContainerPreferredAllocationResponse(deviceIDs=self.preferred)
        return pb.PreferredAllocationResponse(container_responses=[answer])

    async def Allocate(self, request, context):
        ids = list(request.container_requests[0].devices_ids)
        self.calls.append(("Allocate", tuple(ids)))
        if self.allocate_error:
            await context.abort(grpc.StatusCode.INTERNAL, self.allocate_error)
        return pb.AllocateResponse(container_responses=[self.on_allocate(ids)])

    async def PreStartContainer(self, request, context):
        self.calls.append(("PreStartContainer", tuple(request.devices_ids)))
        await asyncio.sleep(self.prestart_seconds)
        if self.prestart_error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.prestart_error)
        return pb.PreStartContainerResponse()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return when ``condition`` is true, which is polled."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class KubeletHarness:
    """A kubelet with cluster and runtime, and shortcuts to their state."""

    def __init__(self, base: Path, behaviour: Behaviour) -> None:
        self.base = base
        self.cluster = Cluster()
        self.cdi_dir = base / "cdi"
        self.cdi_dir.mkdir()
        self.runtime = Runtime(base / "containers", [self.cdi_dir])
        self.kubelet = Kubelet(
            self.cluster, self.runtime, NODE, plugin_dir=base / "dp", pod_resources_socket=base / "pr" / "k.sock", behaviour=behaviour
        )
        self.plugins: list[ScriptedPlugin] = []

    @property
    def plugin_dir(self) -> Path:
        return self.base / "dp"

    async def plugin(self, items: list[pb.Device], endpoint: str = "plugin.sock", **fields) -> ScriptedPlugin:
        """Serve and register a plugin, and wait until kubelet has its devices."""
        plugin = ScriptedPlugin(**fields)
        self.plugins.append(plugin)
        plugin.advertise(items)
        await plugin.serve(self.plugin_dir, endpoint)
        await plugin.register(self.plugin_dir, endpoint)
        await self.until(lambda: self.capacity(plugin.resource) == len(items))
        return plugin

    def capacity(self, resource: str = RESOURCE) -> int | None:
        return self._amount("capacity", resource)

    def allocatable(self, resource: str = RESOURCE) -> int | None:
        return self._amount("allocatable", resource)

    def _amount(self, kind: str, resource: str) -> int | None:
        amounts = self.cluster.get(Kind.NODE, "", NODE)["status"][kind]
        return parse_amount(amounts[resource]) if resource in amounts else None

    def create(self, name: str, count: int = 1, **changes) -> None:
        """Create a pod with one container that sleeps; ``changes`` replace fields of its spec."""
        spec = {"nodeName": NODE, "restartPolicy": "Always", "terminationGracePeriodSeconds": 1, "containers": [container("main", count)]}
        self.cluster.create(Kind.POD, {"metadata": {"name": name}, "spec": {**spec, **changes}})

    def status(self, name: str) -> dict:
        return self.cluster.get(Kind.POD, "default", name)["status"]

    def waiting(self, name: str) -> dict:
        statuses = self.status(name).get("containerStatuses", [])
        return statuses[0]["state"].get("waiting", {}) if statuses else {}

    def events(self, name: str) -> list[tuple[str, str]]:
        _, items = self.cluster.list(Kind.EVENT, lambda event: event["involvedObject"]["name"] == name)
        return [(event["reason"], event["message"]) for event in items]

    def ids(self, pod: str) -> set[str]:
        uid = self.cluster.get(Kind.POD, "default", pod)["metadata"]["uid"]
        return {device_id for item in self.kubelet.devices.table.allocations if item.pod_uid == uid for device_id in item.ids}

    async def running(self, name: str) -> None:
        await self.until(lambda: self.status(name)["phase"] == "Running")

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        await until(condition, seconds)

    async def list_pod_resources(self) -> dict[str, podresources.PodResources]:
        async with grpc.aio.insecure_channel(f"unix://{self.kubelet.pod_resources.socket}") as channel:
            answer = await podresources_rpc.PodResourcesListerStub(channel).List(podresources.ListPodResourcesRequest())
        return {pod.name: pod for pod in answer.pod_resources}


def container(name: str, count: int = 1, *, command: str = "exec sleep 600", **more) -> dict:
    return {"name": name, "command": ["sh", "-c", command], "resources": {"limits": {RESOURCE: count}} if count else {}, **more}


@asynccontextmanager
async def kubelet_harness(behaviour: Behaviour = QUICK) -> AsyncIterator[KubeletHarness]:
    """Run a kubelet in a directory with a path short enough for sockets."""
    base = Path(tempfile.mkdtemp(prefix="aq-"))
    harness = KubeletHarness(base, behaviour)
    await harness.kubelet.start()
    try:
        yield harness
    finally:
        await harness.kubelet.shutdown()
        for plugin in harness.plugins:
            await plugin.stop()
        shutil.rmtree(base)
