# SPDX-License-Identifier: Apache-2.0
"""Serves one plugin per resource and keeps it registered, over restarts of kubelet and lost sockets.

The loop checks two files twice a second and does not watch the directory: two system calls detect every loss of the registration, also
those without a notification. If another plugin serves a resource, the agent reports it and waits; it does not register over it.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.core.conflict import SOCKET_PREFIX, find_conflict, socket_name
from agent.core.registration import FileIdentity, PluginState, SocketsSeen, Step, next_step
from agent.errors import KubeletError
from agent.ports.clock import Clock
from agent.ports.kubelet import Kubelet, PluginServer
from agent.services.device_plugin import DevicePlugin
from agent.services.offering import Offering
from agent.services.pod_cache import PodCache
from agent.services.telemetry import Telemetry
from aliquot import contract

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
CONFLICT_SECONDS = 2.0
"""Seconds between two checks of a resource that another plugin serves."""
FORGOTTEN_SECONDS = 30.0
"""How long the node's status may show no device of a resource. Kubelet updates it every 10 seconds."""


@dataclass
class _Plugin:
    service: DevicePlugin
    server: PluginServer | None = None
    socket: str = ""
    own_socket: FileIdentity | None = None
    registered_with: FileIdentity | None = None
    trouble: str = "not registered yet"
    forgotten_since: float | None = None
    conflict: str | None = None
    conflict_seen_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PluginDirectory:
    """Kubelet's directory for the plugins' sockets."""

    kubelet: Kubelet
    instance: str
    """Unique to this process and start; part of the sockets' names."""


class Registrar:
    """Serves and registers the plugins of all resources that this node offers."""

    def __init__(
        self,
        directory: PluginDirectory,
        offering: Offering,
        make_plugin: Callable[[str], DevicePlugin],
        *,
        pods: PodCache,
        telemetry: Telemetry,
        clock: Clock,
        held_back: Callable[[], str],
    ) -> None:
        """Args: held_back: returns why the plugins must not be registered yet; empty when they may."""
        self._instance = directory.instance
        self._offering = offering
        self._make_plugin = make_plugin
        self._kubelet = directory.kubelet
        self._pods = pods
        self._telemetry = telemetry
        self._clock = clock
        self._held_back = held_back
        self._plugins: dict[str, _Plugin] = {}
        self._serial = itertools.count()

    @property
    def troubles(self) -> Mapping[str, str]:
        """Why each resource is not registered; empty for a registered one. For any thread."""
        return {resource: plugin.trouble for resource, plugin in tuple(self._plugins.items())}

    async def run(self) -> None:
        """Start a plugin for every resource that appears, until cancelled."""
        await self._clean_up()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._offering.run())
            while True:
                seen = self._offering.changes.count
                for resource in self._offering.devices():
                    if resource not in self._plugins:
                        self._plugins[resource] = _Plugin(self._make_plugin(resource))
                        group.create_task(self._keep(resource, self._plugins[resource]), name=f"registrar-{resource}")
                for plugin in self._plugins.values():
                    plugin.service.refresh()
                await self._offering.changes.after(seen)

    async def stop(self) -> None:
        """Stop serving. Kubelet marks the devices unhealthy until the agent is back; containers keep running."""
        for plugin in self._plugins.values():
            plugin.service.end_streams()
        await asyncio.gather(*(plugin.server.stop() for plugin in self._plugins.values() if plugin.server is not None))

    async def _clean_up(self) -> None:
        try:
            await self._kubelet.remove_dead_sockets(SOCKET_PREFIX)
        except KubeletError as exc:
            logger.warning("%s", exc)

    async def _keep(self, resource: str, plugin: _Plugin) -> None:
        while True:
            try:
                await self._step(resource, plugin)
            except KubeletError as exc:
                self._report(resource, plugin, str(exc))
            await asyncio.sleep(LOOK_SECONDS)

    async def _step(self, resource: str, plugin: _Plugin) -> None:
        step = next_step(self._state_of(resource, plugin), self._look(plugin), self._clock.monotonic())
        if step is Step.SERVE:
            await self._serve(resource, plugin)
            step = next_step(self._state_of(resource, plugin), self._look(plugin), self._clock.monotonic())
        if step is Step.REGISTER and (trouble := self._held_back()):
            self._report(resource, plugin, trouble)
        elif step is Step.REGISTER and await self._is_free(resource, plugin):
            await self._register(resource, plugin)
        if plugin.registered_with is None and self._look(plugin).kubelet is None:
            self._report(resource, plugin, f"kubelet's socket {contract.KUBELET_SOCKET_NAME} does not exist: waiting for kubelet")

    def _look(self, plugin: _Plugin) -> SocketsSeen:
        own = self._kubelet.identity(plugin.socket) if plugin.socket else None
        return SocketsSeen(own, self._kubelet.identity(contract.KUBELET_SOCKET_NAME))

    def _state_of(self, resource: str, plugin: _Plugin) -> PluginState:
        return PluginState(plugin.own_socket, plugin.registered_with, plugin.service.stream_lost_at, self._is_forgotten(resource, plugin))

    def _is_forgotten(self, resource: str, plugin: _Plugin) -> bool:
        """Whether the node's status has shown no device of this resource for long, although some are healthy."""
        node = self._pods.node
        denied = (
            node is not None and node.allocatable.get(resource, "0") == "0" and any(device.healthy for device in plugin.service.devices())
        )
        if not denied or plugin.registered_with is None:
            plugin.forgotten_since = None
            return False
        now = self._clock.monotonic()
        plugin.forgotten_since = now if plugin.forgotten_since is None else plugin.forgotten_since
        return now - plugin.forgotten_since >= FORGOTTEN_SECONDS

    async def _serve(self, resource: str, plugin: _Plugin) -> None:
        old, plugin.server, plugin.own_socket, plugin.registered_with = plugin.server, None, None, None
        if old is not None:
            logger.info("socket lost; serving on a new one", extra={"resource": resource})
            plugin.service.end_streams()
            await old.stop()
        plugin.socket = socket_name(resource, f"{self._instance}-{next(self._serial)}")
        plugin.server = await self._kubelet.serve(plugin.socket, plugin.service)
        plugin.own_socket = self._kubelet.identity(plugin.socket)

    async def _is_free(self, resource: str, plugin: _Plugin) -> bool:
        now = self._clock.monotonic()
        if plugin.conflict and now - plugin.conflict_seen_at < CONFLICT_SECONDS:
            return False
        evidence = await self._kubelet.evidence(resource, frozenset(other.socket for other in self._plugins.values()))
        plugin.conflict, plugin.conflict_seen_at = find_conflict(resource, evidence), now
        if plugin.conflict is None:
            return True
        self._report(resource, plugin, plugin.conflict)
        return False

    async def _register(self, resource: str, plugin: _Plugin) -> None:
        kubelet_socket = self._kubelet.identity(contract.KUBELET_SOCKET_NAME)
        plugin.service.expect_stream()
        try:
            await self._kubelet.register(plugin.socket, resource)
        except KubeletError:
            self._telemetry.registration(resource, succeeded=False)
            raise
        self._telemetry.registration(resource, succeeded=True)
        plugin.registered_with = kubelet_socket
        plugin.forgotten_since = None
        plugin.service.expect_stream()
        plugin.trouble = ""
        logger.info(
            "registered with kubelet", extra={"resource": resource, "socket": plugin.socket, "devices": len(plugin.service.devices())}
        )

    def _report(self, resource: str, plugin: _Plugin, trouble: str) -> None:
        if trouble != plugin.trouble:
            logger.error("resource not registered: %s", trouble, extra={"resource": resource})
            plugin.trouble = trouble
