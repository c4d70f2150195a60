"""Starts the agent: reads the settings, makes every adapter, and runs the services until it is told to stop.

Order at the start: the driver is entered and the plugins are registered before anything else, because a node that reboots admits
pods only once its devices are there. On SIGTERM the plugins stop; files stay, and running containers do not notice.
"""

import asyncio
import gc
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.clock import SystemClock
from agent.adapters.container_files import GrantFiles
from agent.adapters.durable import make_directory, write_whole
from agent.adapters.http_server import StatusServer
from agent.adapters.kube_api import ApiServer, KubeApiClient, KubeConnection, find_api_server
from agent.adapters.kube_watch import KubeWatcher
from agent.adapters.kubelet_grpc import KubeletDirectory
from agent.adapters.ledger_files import LedgerFiles
from agent.adapters.log_format import JsonFormatter, TextFormatter, configure_logging
from agent.adapters.node_files import boot_id, load_secret, make_priority_page
from agent.adapters.nvml import NvmlDriver
from agent.adapters.pod_resources import KubeletPodResources
from agent.adapters.processes import ProcProcesses
from agent.adapters.shim_store import ShimStore
from agent.adapters.simulation import driver_library, prepare_node
from agent.errors import AgentError, SettingsError
from agent.services.allocator import Allocator, AllocatorOptions
from agent.services.borrowing import Borrower
from agent.services.device_plugin import DevicePlugin
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from agent.services.monitor import Monitor
from agent.services.overhead import OverheadKeeper
from agent.services.pending import PendingPods
from agent.services.pod_cache import PodCache
from agent.services.publisher import CapacityPublisher
from agent.services.reconciler import Reconciler
from agent.services.registrar import Registrar
from agent.services.shim_keeper import ShimKeeper
from agent.services.telemetry import Telemetry
from agent.settings import LogFormat, Placement, Settings
from proto import contract

logger = logging.getLogger("agent")

BUILD_DIR_ENV = "ALIQUOT_BUILD_DIR"
INSTALLED_SHIM_DIR = Path("/usr/local/lib/aliquot")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent; return the exit code: 2 for wrong settings, 1 for a failure, 0 after a signal."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(settings.log_level, JsonFormatter() if settings.log_format is LogFormat.JSON else TextFormatter())
        asyncio.run(_run(settings, os.environ))
    except SettingsError as exc:
        print(f"aliquot agent: {exc}", file=sys.stderr)
        return 2
    except AgentError as exc:
        logger.critical("%s", exc)
        return 1
    return 0


async def _run(settings: Settings, environ: Mapping[str, str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    node_name = settings.node_name or socket.gethostname().lower()
    build = _build_dir(environ)
    api_server = find_api_server(settings.kube_api_url, settings.kube_token_file, settings.kube_ca_file, environ)
    state, runtime = make_directory(Path(settings.state_dir), 0o700), make_directory(Path(settings.runtime_dir), 0o755)
    agent = _Agent(
        settings,
        node_name,
        _nvml_library(settings, node_name, runtime, build, environ),
        api_server,
        state,
        runtime,
        _shim_dir(settings, build),
    )
    await agent.run(stop)


class _Agent:
    """All parts of one agent, wired."""

    def __init__(
        self, settings: Settings, node_name: str, nvml_library: str, api_server: ApiServer, state: Path, runtime: Path, shim_source: Path
    ) -> None:
        clock = SystemClock()
        telemetry = Telemetry()
        local_policy = settings.placement_policy if settings.placement is Placement.LOCAL else None
        self._runtime = runtime
        self._boot_id = boot_id()
        driver = NvmlDriver(nvml_library, settings.nvml_timeout_seconds, telemetry.nvml_error)
        self._driver = DriverWatch(driver, settings.driver_poll_seconds)
        self._pods = PodCache()
        self._kube_watch = KubeWatcher(lambda **options: KubeConnection(api_server, **options), node_name)
        api = KubeApiClient(KubeConnection(api_server), node_name, clock)
        self._pod_resources = pod_resources = KubeletPodResources(Path(settings.pod_resources_socket))
        files = GrantFiles(runtime / "containers")
        cdi = CdiDirectory(Path(settings.cdi_dir), Path(settings.cdi_static_dir))
        shim = ShimStore(shim_source, state / "shim")
        self._shim = ShimKeeper(shim)
        self._book = GrantBook(LedgerFiles(state / "ledger"), files, cdi)
        self._events = EventRecorder(api, clock)
        options = AllocatorOptions(
            secret=load_secret(state / "secret"),
            boot_id=self._boot_id,
            shares_per_gpu=settings.shares_per_gpu,
            local_policy=local_policy,
            interposition=settings.interposition,
            fail_policy=settings.fail_policy,
            pod_wait_seconds=settings.pod_wait_seconds,
            priority_page=str(make_priority_page(runtime / "priority")),
        )
        self._overhead = OverheadKeeper(
            settings.reconcile_seconds,
            driver=driver,
            processes=ProcProcesses(),
            watch=self._driver,
            book=self._book,
            files=files,
            clock=clock,
        )
        self._borrower = Borrower(book=self._book, files=files, clock=clock)
        allocator = Allocator(
            options,
            watch=self._driver,
            pods=self._pods,
            book=self._book,
            pod_resources=pod_resources,
            files=files,
            cdi=cdi,
            shim=shim,
            events=self._events,
            telemetry=telemetry,
            clock=clock,
            context_bytes=self._overhead.context_bytes,
        )
        pending = PendingPods(self._driver, self._pods, self._book, settings.shares_per_gpu, local_policy)

        def make_plugin(resource: str) -> DevicePlugin:
            return DevicePlugin(
                resource,
                settings.shares_per_gpu,
                watch=self._driver,
                allocator=allocator,
                pending=pending,
                telemetry=telemetry,
                clock=clock,
            )

        self._registrar = Registrar(
            f"{os.getpid():x}-{time.time_ns() // 1_000_000:x}",
            settings.shares_per_gpu,
            make_plugin,
            kubelet=KubeletDirectory(Path(settings.kubelet_device_plugin_dir), pod_resources),
            watch=self._driver,
            pods=self._pods,
            telemetry=telemetry,
            clock=clock,
        )
        self._publisher = CapacityPublisher(node_name, api, self._driver, self._pods) if settings.publish_node_capacity else None
        self._reconciler = Reconciler(
            settings.reconcile_seconds, book=self._book, pods=self._pods, pod_resources=pod_resources, files=files, clock=clock
        )
        self._monitor = Monitor(
            _version(),
            watch=self._driver,
            book=self._book,
            files=files,
            registrar=self._registrar,
            telemetry=telemetry,
            overhead_bytes=self._overhead.fresh_overhead_bytes,
            troubles=self._troubles,
            clock=clock,
        )
        pages = {"/metrics": self._monitor.metrics, "/healthz": self._monitor.health, "/readyz": self._monitor.readiness}
        self._status = StatusServer(*settings.metrics_host_port, pages)

    async def run(self, stop: asyncio.Event) -> None:
        """Run all services until told to stop, or until one of them fails."""
        self._book.load(self._boot_id)
        services = [
            self._driver.run(),
            self._registrar.run(),
            self._monitor.run(),
            self._shim.run(),
            self._events.run(),
            self._reconciler.run(),
            self._overhead.run(),
            self._borrower.run(),
        ]
        if self._publisher is not None:
            services.append(self._publisher.run())
        self._status.start()
        write_whole(self._runtime / "metrics-address", f"{self._status.address}\n".encode(), mode=0o644, durable=False)
        logger.info("status server listens", extra={"address": self._status.address})
        self._kube_watch.start(self._pods)
        gc.freeze()  # what was imported stays for good: collections need not look at it, and are short
        tasks = [asyncio.ensure_future(service) for service in services]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                await task  # a service ends by failing only
            logger.info("stopping: told to")
        finally:
            await self._shut_down([*tasks, stopping])

    async def _shut_down(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._kube_watch.stop()
        await self._registrar.stop()
        await self._pod_resources.close()
        self._book.close()
        self._status.stop()

    def _troubles(self) -> list[str]:
        never_synced = [] if self._pods.synced else [self._pods.trouble]
        return [trouble for trouble in (self._shim.trouble, *never_synced) if trouble]


def _build_dir(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(BUILD_DIR_ENV) or Path(__file__).resolve().parent.parent / "build")


def _shim_dir(settings: Settings, build: Path) -> Path:
    if settings.shim_dir:
        return Path(settings.shim_dir)
    in_tree = build / "lib/shim"
    return in_tree if in_tree.is_dir() else INSTALLED_SHIM_DIR


def _nvml_library(settings: Settings, node_name: str, runtime: Path, build: Path, environ: Mapping[str, str]) -> str:
    """Return the NVML library to load, having made the simulated node when one is asked for."""
    if not settings.simulate:
        return settings.nvml_library
    if contract.ENV_SIM_DIR not in environ:
        directory = runtime / "sim"
        prepare_node(settings.simulate, directory, node_name, build)
        os.environ[contract.ENV_SIM_DIR] = str(directory)  # the simulated driver finds its node there
    return settings.nvml_library or str(driver_library(build))


def _version() -> str:
    try:
        return importlib.metadata.version(contract.PRODUCT)
    except importlib.metadata.PackageNotFoundError:
        return "unpackaged"


if __name__ == "__main__":
    sys.exit(main())
