"""Starts the scheduler: reads the settings, makes every adapter, and runs the services until it is told to stop.

Ready means: the state was built from full lists, and this replica leads and has listed the pods since it does. Beside kube-scheduler on
loopback the lease is not needed; behind a Service, readiness sends the calls to the leader.
"""

import asyncio
import gc
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from proto import contract, gpunode, units
from proto.model import Preferences
from scheduler_plugin.adapters.clock import SystemClock
from scheduler_plugin.adapters.http import HttpServer, Page, TlsFiles, Verb
from scheduler_plugin.adapters.kube import KubeConnection, KubeLease, KubePods, find_api_server
from scheduler_plugin.adapters.kube_watch import Stream
from scheduler_plugin.adapters.log_format import JsonFormatter, TextFormatter, configure_logging
from scheduler_plugin.core.columnar import type_wanted
from scheduler_plugin.core.objects import NodeObject, PodObject, host_amounts, pod_facts
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.errors import SchedulerError, SettingsError
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.services.cluster_watch import ClusterWatch, NamedHost, Source
from scheduler_plugin.services.leadership import Leadership
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.settings import LogFormat, Settings, split_address
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.review import Reviews
from scheduler_plugin.webhook.vocabularies import Options

logger = logging.getLogger("scheduler_plugin")

PODS_PATH = "/api/v1/pods?fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
NODES_PATH = "/api/v1/nodes"
GPU_NODES_PATH = f"/apis/{gpunode.API_VERSION}/{contract.GPU_NODE_PLURAL}"
WEBHOOK_BODY_BYTES = 8 << 20
"""The API server's own limit is 3 MiB for an object."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler; return the exit code: 2 for wrong settings, 1 for a failure, 0 after a signal."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(settings.log_level, JsonFormatter() if settings.log_format is LogFormat.JSON else TextFormatter())
        asyncio.run(_run(settings, os.environ))
    except SettingsError as exc:
        print(f"aliquot scheduler: {exc}", file=sys.stderr)
        return 2
    except SchedulerError as exc:
        logger.critical("%s", exc)
        return 1
    return 0


async def _run(settings: Settings, environ: Mapping[str, str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = find_api_server(settings.kube_api_url, settings.kube_token_file, settings.kube_ca_file, environ)
    connection = KubeConnection(server)
    try:
        await Scheduler(settings, connection).run(stop)
    finally:
        await connection.close()


class Scheduler:
    """All parts of one scheduler, wired."""

    def __init__(self, settings: Settings, connection: KubeConnection) -> None:
        clock = SystemClock()
        self._clock = clock
        self._settings = settings
        self.addresses: dict[str, str] = {}
        """Where each server listens, once it does."""
        self._telemetry = Telemetry()
        self._state = ClusterState()
        self._desk = Desk(
            self._state, Shapes(self._state, settings.weights), settings.policy, settings.soft_seconds, monotonic=clock.monotonic
        )
        self._watch = ClusterWatch(self._state, clock)
        self._watch.on_pod_gone = self._desk.decisions.forget
        self._watch.on_synced = _settle_memory
        self._desk.on_decision = self._telemetry.count_decision
        pods = KubePods(connection)
        self._pods_stream = Stream("pods", PODS_PATH, decode_pod, connection, self._watch.pods)
        self._streams = (
            Stream("gpunodes", GPU_NODES_PATH, gpunode.decode_gpu_node, connection, self._watch.inventories),
            Stream("nodes", NODES_PATH, decode_host, connection, self._watch.hosts),
            self._pods_stream,
        )
        self._leadership: Leadership | None = None
        if settings.lease_name:
            lease = KubeLease(connection, settings.lease_namespace, settings.lease_name, clock)
            self._leadership = Leadership(lease, clock, f"{socket.gethostname()}_{uuid.uuid4()}")
            self._leadership.on_acquired = self._pods_stream.relist
        self._binder = Binder(self._desk, pods, lambda: self.ready)
        self._retry = Retry(self._desk, pods, lambda: self.ready, lambda: self._watch.current_at(Source.PODS), self._telemetry)
        self._telemetry.watch_state(self._state, self._watch.age_seconds, lambda: self.leads)
        self._servers = self._make_servers()

    @property
    def leads(self) -> bool:
        """Whether this replica is the leader."""
        return self._leadership is None or self._leadership.leads

    @property
    def ready(self) -> bool:
        """Whether decisions of this replica may be acted upon."""
        if not self._watch.synced or not self.leads:
            return False
        return self._leadership is None or self._watch.listed_at[Source.PODS] > self._leadership.acquired_at

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``."""
        for name, server in self._servers.items():
            self.addresses[name] = await server.start()
            logger.info("%s listens on %s", name, self.addresses[name])
        loops = [*(stream.run() for stream in self._streams), self._retry.run()]
        if self._leadership is not None:
            loops.append(self._leadership.run())
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for server in self._servers.values():
                await server.stop()
            await self._binder.stop()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    # --- servers ---

    def _make_servers(self) -> dict[str, HttpServer]:
        settings = self._settings
        tls = TlsFiles(Path(settings.tls_cert_file), Path(settings.tls_key_file)) if settings.tls_cert_file else None
        host, port = split_address("extenderAddress", settings.extender_address)
        mutual = tls and settings.client_ca_file
        extender_tls = TlsFiles(tls.certificate, tls.key, Path(settings.client_ca_file)) if tls and mutual else None
        servers = {
            "extender": HttpServer(
                host, port, verbs=self._extender_verbs(), max_body_bytes=settings.max_body_mib * units.MIB, tls=extender_tls
            )
        }
        if settings.webhook_address:
            host, port = split_address("webhookAddress", settings.webhook_address)
            servers["webhook"] = HttpServer(host, port, verbs=self._webhook_verbs(), max_body_bytes=WEBHOOK_BODY_BYTES, tls=tls)
        host, port = split_address("metricsAddress", settings.metrics_address)
        servers["status"] = HttpServer(
            host, port, pages={"/metrics": self._metrics_page, "/healthz": self._health_page, "/readyz": self._ready_page}
        )
        return servers

    def _extender_verbs(self) -> dict[str, Verb]:
        desk = self._desk
        return {
            "/filter": self._timed("filter", lambda body: filter_nodes(desk, body, self._clock.now())),
            "/prioritize": self._timed("prioritize", lambda body: prioritize_nodes(desk, body)),
            "/preempt": self._timed("preempt", lambda body: choose_victims(desk, body)),
            "/bind": self._timed_bind,
        }

    def _timed(self, name: str, verb: Callable[[bytes], bytes]) -> Verb:
        async def handle(body: bytes) -> bytes:
            self._check_ready()
            with self._telemetry.timing(name):
                return verb(body)

        return handle

    async def _timed_bind(self, body: bytes) -> bytes:
        self._check_ready()
        with self._telemetry.timing("bind"):
            return await self._binder.bind(body)

    def _check_ready(self) -> None:
        if not self.ready:
            raise web.HTTPServiceUnavailable(text=f"{self._trouble()}\n")

    def _webhook_verbs(self) -> dict[str, Verb]:
        options = Options(self._device_sizes, self._settings.adopt_nvidia_gpu)
        reviews = Reviews(Normaliser(options, self._settings.scheduler_name), self._telemetry.count_admission)
        return {"/mutate": reviews.mutate, "/validate": reviews.validate}

    def _device_sizes(self, preferences: Preferences) -> Collection[int]:
        return {
            entry.device.memory_bytes // units.MIB
            for node in self._state.gpu_nodes()
            for entry in node.devices
            if not entry.device.mig_enabled and type_wanted(entry.device.model.lower(), preferences)
        }

    # --- pages ---

    def _trouble(self) -> str:
        return self._watch.trouble or ("another replica leads" if not self.leads else "the pods are being listed after the lease was taken")

    def _metrics_page(self, request: web.Request) -> Page:
        del request
        return Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, self._telemetry.page())

    def _health_page(self, request: web.Request) -> Page:
        del request
        version = importlib.metadata.version(contract.PRODUCT)
        return Page(HTTPStatus.OK, "text/plain", f"aliquot scheduler {version}\n".encode())

    def _ready_page(self, request: web.Request) -> Page:
        del request
        if self.ready:
            return Page(HTTPStatus.OK, "text/plain", b"ready\n")
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{self._trouble()}\n".encode())


def _settle_memory() -> None:
    """Take what the first lists made out of the garbage collector's sight: scanning it costs 100 ms pauses and frees nothing."""
    gc.collect()
    gc.freeze()


def decode_pod(raw: msgspec.Raw) -> PodFacts:
    """Read a pod off its stream."""
    return pod_facts(msgspec.json.decode(raw, type=PodObject))


def decode_host(raw: msgspec.Raw) -> NamedHost:
    """Read a node off its stream."""
    node = msgspec.json.decode(raw, type=NodeObject)
    return NamedHost(node.metadata.name, host_amounts(node))


if __name__ == "__main__":
    sys.exit(main())
