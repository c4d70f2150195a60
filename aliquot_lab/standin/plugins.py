# SPDX-License-Identifier: Apache-2.0
"""The kubelet's side of the device-plugin API v1beta1: registration, plugin connections, and the calls for a container's devices.

As in the real device manager:

- ``Register`` dials the plugin and reads its options before it replies, within 10 s.
- A message of a plugin's stream has at most 4 MiB and replaces the whole set of devices. The end of the stream makes every device
  unhealthy; after the endpoint's grace time they are removed.
- IDs are picked in arbitrary order, after the plugin's preference.
- ``Allocate`` is called once for a container and resource, and the checkpoint keeps the reply.
- ``PreStartContainer`` is called before every start of a container, and has 30 s.

The state of the devices is in ``devices``.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from aliquot import contract
from aliquot.kubelet_api import deviceplugin_pb2 as pb
from aliquot.kubelet_api import deviceplugin_pb2_grpc as rpc
from aliquot_lab.standin.devices import (
    Allocation,
    AllocationError,
    Candidates,
    CheckpointError,
    DeviceTable,
    PluginDevice,
    decode_checkpoint,
    encode_checkpoint,
)
from aliquot_lab.standin.pods import is_extended_resource

log = logging.getLogger(__name__)

T = TypeVar("T")

DIAL_TIMEOUT_SECONDS = 10.0
"""Time limit of Register for the plugin's socket, and again for its options."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""grpc-go's default receive limit, which the kubelet does not change."""
ENDPOINT_GRACE_SECONDS = 300.0
CHECKPOINT_NAME = "kubelet_internal_checkpoint"
SOCKET_PATH_LIMIT = 107
RESOURCE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class InterruptedCallError(Exception):
    """This kubelet stopped during a call to a plugin."""


class PreStartError(Exception):
    """A plugin refused to prepare a container, or did not reply in time; the kubelet retries the start."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Options of this kubelet: differences between versions, and times that tests shorten."""

    seed: int = 0
    """Seed of the order in which device IDs are picked."""
    align_numa: bool = True
    """Topology manager policy: ``best-effort`` if true, otherwise ``none``."""
    endpoint_grace_seconds: float = ENDPOINT_GRACE_SECONDS
    retry_seconds: float = 10.0
    """Time between attempts to start a container that could not be created."""
    crash_backoff_seconds: float = 10.0
    """Wait before the first restart of an exited container; doubles up to ``crash_backoff_limit_seconds``."""
    crash_backoff_limit_seconds: float = 300.0
    kubelet_version: str = "v1.34.1"
    runtime_version: str = "containerd://2.1.4"
    """Versions in the Node object."""
    cdi: bool = True
    """Whether the runtime resolves CDI names. If not, NVIDIA's runtime adds devices by the environment."""
    image_env: tuple[tuple[str, str], ...] = ()
    """Environment of every image. The plugins' environment wins over it."""
    reregistration_race: bool = False
    """Kubelet <= 1.35: a replaced plugin stays connected, and when its stream ends, the devices of its successor become unhealthy."""


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What a container gets for its devices, from the stored replies of its plugins."""

    env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    """Pairs of host path and container path."""
    device_paths: tuple[str, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    cdi_devices: tuple[str, ...] = ()


class _Plugin:
    """The connection to one registered plugin."""

    def __init__(self, resource: str, socket: Path) -> None:
        self.resource = resource
        self.socket = socket
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.default_authority", "localhost")]
        self._channel = grpc.aio.insecure_channel(f"unix://{socket}", options=options)
        self.stub = rpc.DevicePluginStub(self._channel)
        self.options = pb.DevicePluginOptions()
        self.watch: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Dial and read the options, within DIAL_TIMEOUT_SECONDS each."""
        await asyncio.wait_for(self._channel.channel_ready(), DIAL_TIMEOUT_SECONDS)
        self.options = await self.stub.GetDevicePluginOptions(pb.Empty(), timeout=DIAL_TIMEOUT_SECONDS)

    async def close(self) -> None:
        if self.watch is not None and self.watch is not asyncio.current_task():
            self.watch.cancel()
            await asyncio.gather(self.watch, return_exceptions=True)
        await self._channel.close(grace=None)


class DeviceManager(rpc.RegistrationServicer):
    """Serves Registration on ``kubelet.sock`` of its directory and gives devices to containers."""

    def __init__(self, directory: Path, behaviour: Behaviour, on_change: Callable[[], None]) -> None:
        """Args: on_change: called when capacity or allocatable of a resource may have changed."""
        self.directory = directory
        self.table = DeviceTable()
        self.registrations: list[str] = []
        """Registered resource names, oldest first."""
        self.removed: set[str] = set()
        """Resources without a plugin for longer than the grace time; the node has zero of them."""
        self._behaviour = behaviour
        self._on_change = on_change
        self._rng = random.Random(behaviour.seed)  # noqa: S311  an order for tests, not a secret
        self._plugins: dict[str, _Plugin] = {}
        self._replaced: list[_Plugin] = []
        """Connections that are left after their plugin was replaced, as in old kubelets."""
        self._grace: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None

    @property
    def socket(self) -> Path:
        """Return the socket at which plugins register."""
        return self.directory / contract.KUBELET_SOCKET_NAME

    @property
    def checkpoint(self) -> Path:
        """Return the file that keeps allocations over a restart."""
        return self.directory / CHECKPOINT_NAME

    async def start(self) -> None:
        """Read the checkpoint, remove every other file of the directory, and serve registrations."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if len(str(self.socket)) > SOCKET_PATH_LIMIT:
            raise ValueError(f"{self.socket}: a unix socket path has at most {SOCKET_PATH_LIMIT} characters; use a shorter directory")
        self._read_checkpoint()
        for path in self.directory.iterdir():
            if path != self.checkpoint and not path.is_dir():
                path.unlink()
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        rpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix://{self.socket}")
        await self._server.start()
        self._on_change()

    async def stop(self) -> None:
        """Drop every connection, as a killed process does; files stay."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
        for task in (*self._grace.values(), *self._background):
            task.cancel()
        await asyncio.gather(*self._grace.values(), *self._background, return_exceptions=True)
        self._grace.clear()
        plugins = [*self._plugins.values(), *self._replaced]
        self._plugins, self._replaced = {}, []
        for plugin in plugins:
            await plugin.close()

    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.Empty:
        """Accept a plugin after reading its options. Go reports any error of a handler as UNKNOWN."""
        if request.version != contract.DEVICE_PLUGIN_API_VERSION:
            message = (
                f"requested API version {request.version!r} is not supported by kubelet, supported: {contract.DEVICE_PLUGIN_API_VERSION}"
            )
            await context.abort(grpc.StatusCode.UNKNOWN, message)
        name = request.resource_name
        if not is_extended_resource(name) or not RESOURCE_NAME.fullmatch(name.partition("/")[2]):
            await context.abort(grpc.StatusCode.UNKNOWN, f"the resource name {name!r} is not that of an extended resource")
        if Path(request.endpoint).name != request.endpoint:
            await context.abort(
                grpc.StatusCode.UNKNOWN, f"endpoint {request.endpoint!r}: expected the name of a socket in {self.directory}"
            )
        plugin = _Plugin(name, self.directory / request.endpoint)
        try:
            await plugin.connect()
        except (TimeoutError, grpc.aio.AioRpcError) as exc:
            await plugin.close()
            await context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial device plugin {plugin.socket}: {_reason(exc)}")
        self._adopt(plugin)
        return pb.Empty()

    def is_registered(self, resource: str) -> bool:
        """Whether a plugin of the resource is connected."""
        return resource in self._plugins

    async def allocate(
        self,
        pod_uid: str,
        container: str,
        limits: Iterable[tuple[str, int]],
        reusable: Mapping[str, Collection[str]],
        active_pod_uids: Collection[str],
    ) -> None:
        """Give one container its devices of every plugin resource that it requests, except those that it already holds.

        Args:   reusable: IDs that the pod's ordinary init containers hold, by resource.
                active_pod_uids: pods that keep their allocations; those of all other pods are freed first.
        Raises: AllocationError: the pod fails admission. InterruptedCallError: the result is unknown.
        """
        wanted = [(resource, count) for resource, count in limits if count > 0 and self.table.manages(resource)]
        self._rng.shuffle(wanted)
        for resource, count in wanted:
            self.table.release_all_but(active_pod_uids)
            requested = Allocation(pod_uid, container, resource, (), b"")
            candidates = self.table.candidates(requested, count, reusable.get(resource, ()), self._rng, align=self._behaviour.align_numa)
            if candidates is not None:
                await self._allocate_from(requested, candidates)

    async def prestart(self, pod_uid: str, container: str, limits: Iterable[tuple[str, int]]) -> None:
        """Call PreStartContainer of every plugin that requires it.

        Raises: PreStartError, also when the container has no device of a requested resource, because the checkpoint was lost;
            InterruptedCallError.
        """
        held = {allocation.resource: allocation for allocation in self.table.held(pod_uid, container)}
        for resource, count in limits:
            if count > 0 and self.table.manages(resource) and resource not in held:
                what = f"pod {pod_uid}, container {container}, resource {resource}"
                raise PreStartError(f"no devices found allocated in local cache for {what}")
        for allocation in held.values():
            plugin = self._plugins.get(allocation.resource)
            if plugin is None:
                raise PreStartError(f"the device plugin endpoint of {allocation.resource} is gone")
            if plugin.options.pre_start_required:
                await self._prestart_one(plugin, allocation)

    def options(self, pod_uid: str, container: str) -> DeviceOptions:
        """Merge the stored replies for a container. The first of two equal environment names wins, in arbitrary order."""
        allocations = self.table.held(pod_uid, container)
        self._rng.shuffle(allocations)
        responses = [pb.ContainerAllocateResponse.FromString(item.response) for item in allocations]
        env: dict[str, str] = {}
        annotations: dict[str, str] = {}
        for response in reversed(responses):  # so that the first one wins
            env.update(response.envs)
            annotations.update(response.annotations)
        return DeviceOptions(
            env=tuple(env.items()),
            mounts=tuple((mount.host_path, mount.container_path) for response in responses for mount in response.mounts),
            device_paths=tuple(device.host_path for response in responses for device in response.devices),
            annotations=tuple(annotations.items()),
            cdi_devices=tuple(device.name for response in responses for device in response.cdi_devices),
        )

    # --- connections of plugins ---

    def _adopt(self, plugin: _Plugin) -> None:
        """Make a plugin the owner of its resource. The last plugin to register wins."""
        resource = plugin.resource
        old, self._plugins[resource] = self._plugins.get(resource), plugin
        if (grace := self._grace.pop(resource, None)) is not None:
            grace.cancel()
        self.removed.discard(resource)
        self.table.advertised.setdefault(resource, {})
        self.registrations.append(resource)
        plugin.watch = asyncio.create_task(self._watch(plugin))
        if old is not None and self._behaviour.reregistration_race:
            self._replaced.append(old)
        elif old is not None:
            self._close_soon(old)
        log.info("device plugin registered: resource=%s endpoint=%s", resource, plugin.socket.name)

    async def _watch(self, plugin: _Plugin) -> None:
        """Follow a plugin's stream, which has no deadline. Its end for any reason means that the plugin has gone."""
        try:
            async for message in plugin.stub.ListAndWatch(pb.Empty()):
                self.table.replace(plugin.resource, (_device(device) for device in message.devices))
                self._on_change()
        except grpc.aio.AioRpcError as exc:
            log.warning("device plugin stream ended: resource=%s error=%s", plugin.resource, _reason(exc))
        finally:
            self._disconnected(plugin)

    def _disconnected(self, plugin: _Plugin) -> None:
        current = self._plugins.get(plugin.resource)
        if current is not plugin and not (self._behaviour.reregistration_race and current is not None):
            return
        self.table.mark_unhealthy(plugin.resource)
        self._on_change()
        if current is plugin:
            del self._plugins[plugin.resource]
            self._close_soon(plugin)
            self._grace[plugin.resource] = asyncio.create_task(self._remove_after_grace(plugin.resource))

    def _close_soon(self, plugin: _Plugin) -> None:
        closing = asyncio.create_task(plugin.close())
        self._background.add(closing)
        closing.add_done_callback(self._background.discard)

    async def _remove_after_grace(self, resource: str) -> None:
        await asyncio.sleep(self._behaviour.endpoint_grace_seconds)
        self.table.advertised.pop(resource, None)
        self.removed.add(resource)
        del self._grace[resource]
        self._on_change()

    # --- one allocation ---

    async def _allocate_from(self, requested: Allocation, candidates: Candidates) -> None:
        plugin = self._plugins.get(requested.resource)
        if plugin is None:
            raise AllocationError(f"cannot allocate unregistered device {requested.resource}")
        try:
            ids = await self._pick(plugin, candidates)
            request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
            answer = await _call(plugin.stub.Allocate(request))
        except grpc.aio.AioRpcError as exc:
            raise AllocationError(_reason(exc)) from exc
        if len(answer.container_responses) != 1:
            raise AllocationError(
                f"expected one container response from the plugin of {requested.resource}, found {len(answer.container_responses)}"
            )
        response = answer.container_responses[0].SerializeToString()
        self.table.allocations.append(Allocation(requested.pod_uid, requested.container, requested.resource, tuple(ids), response))
        self._write_checkpoint()

    async def _pick(self, plugin: _Plugin, candidates: Candidates) -> list[str]:
        """Choose IDs: first reused ones, then free ones that the plugin prefers, then any."""
        chosen = list(candidates.must_include)
        if candidates.missing == 0:
            return chosen
        pool = list(candidates.pool)
        if plugin.options.get_preferred_allocation_available:
            request = pb.PreferredAllocationRequest(
                container_requests=[
                    pb.ContainerPreferredAllocationRequest(
                        available_deviceIDs=[*candidates.must_include, *candidates.pool],
                        must_include_deviceIDs=candidates.must_include,
                        allocation_size=len(candidates.must_include) + candidates.missing,
                    )
                ]
            )
            answer = await _call(plugin.stub.GetPreferredAllocation(request))
            preferred = dict.fromkeys(device_id for item in answer.container_responses[:1] for device_id in item.deviceIDs)
            pool = [device_id for device_id in preferred if device_id in set(pool)] + [
                device_id for device_id in pool if device_id not in preferred
            ]
        return chosen + pool[: candidates.missing]

    async def _prestart_one(self, plugin: _Plugin, allocation: Allocation) -> None:
        started = time.monotonic()
        try:
            request = pb.PreStartContainerRequest(devices_ids=allocation.ids)
            await _call(plugin.stub.PreStartContainer(request, timeout=contract.PRESTART_TIMEOUT_SECONDS))
        except grpc.aio.AioRpcError as exc:
            seconds = time.monotonic() - started
            log.info("PreStartContainer refused: resource=%s after=%.3fs error=%s", allocation.resource, seconds, _reason(exc))
            raise PreStartError(f"device plugin PreStartContainer rpc failed with err: {_reason(exc)}") from exc

    # --- checkpoint ---

    def _read_checkpoint(self) -> None:
        self.table = DeviceTable()
        with contextlib.suppress(FileNotFoundError):
            try:
                self.table = decode_checkpoint(self.checkpoint.read_bytes())
            except CheckpointError as exc:
                log.warning("checkpoint ignored and removed: path=%s error=%s", self.checkpoint, exc)
                self.checkpoint.unlink()

    def _write_checkpoint(self) -> None:
        temporary = self.checkpoint.with_name(f".{CHECKPOINT_NAME}.tmp")
        temporary.write_bytes(encode_checkpoint(self.table))
        temporary.replace(self.checkpoint)


def _device(device: pb.Device) -> PluginDevice:
    return PluginDevice(device.ID, device.health == contract.DEVICE_HEALTHY, tuple(node.ID for node in device.topology.nodes))


async def _call(call: Awaitable[T]) -> T:
    """Await an RPC. grpc.aio ends calls of a closing channel with CancelledError, which must not look like a cancelled task."""
    try:
        return await call
    except asyncio.CancelledError as exc:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise InterruptedCallError("the kubelet closed its connections") from exc


def _reason(exc: Exception) -> str:
    """Format an RPC error as grpc-go does; this text appears in events and pod status."""
    if isinstance(exc, grpc.aio.AioRpcError):
        code = "".join(part.capitalize() for part in exc.code().name.split("_")).replace("Cancelled", "Canceled")
        return f"rpc error: code = {code} desc = {exc.details()}"
    if isinstance(exc, TimeoutError):
        return "context deadline exceeded"
    return str(exc)
