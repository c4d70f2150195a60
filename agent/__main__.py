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
from agent.adapters.cgroup_tree import CgroupTree
from agent.adapters.clock import SystemClock
from agent.adapters.container_files import GrantFiles
from agent.adapters.directory_watch import DirectoryWatch
from agent.adapters.durable import make_directory, write_whole
from agent.adapters.health_file import HealthFile
from agent.adapters.host_directories import HostDirectories
from agent.adapters.http_server import StatusServer
from agent.adapters.kube_api import KubeApiClient, KubeConnection
from agent.adapters.kube_watch import KubeWatcher
from agent.adapters.kubelet_checkpoint import KubeletCheckpoint
from agent.adapters.kubelet_grpc import KubeletDirectory
from agent.adapters.ledger_files import LedgerFiles
from agent.adapters.memory import use_one_heap
from agent.adapters.mig_files import MigRecordFiles
from agent.adapters.mps_files import MpsWishFiles
from agent.adapters.node_abilities import driver_limits_trouble
from agent.adapters.node_files import PageFile, RowFile, boot_id, load_secret
from agent.adapters.nvidia_ctk import NvidiaCtk
from agent.adapters.nvml import NvmlDriver
from agent.adapters.nvml_limits import NvmlLimits
from agent.adapters.nvml_mig import NvmlMig
from agent.adapters.pod_resources import KubeletPodResources
from agent.adapters.processes import ProcProcesses
from agent.adapters.shim_store import ShimStore
from agent.adapters.simulation import driver_library, prepare_node
from agent.core.backends import Abilities
from agent.core.health_record import CORDON_ROWS
from agent.core.injection import VERSION_ROWS, NodeVersions
from agent.core.metrics import models_of
from agent.core.mps import DAEMONS_DIRECTORY, RECORDS_DIRECTORY
from agent.core.node_pages import PRIORITY, TURNS
from agent.core.publishing import NodeFacts
from agent.errors import AgentError, StorageError
from agent.services.admissions import Admissions
from agent.services.allocator import Allocator, AllocatorOptions
from agent.services.audit import Auditor, AuditorOptions
from agent.services.backends import Backends
from agent.services.borrowing import Borrower
from agent.services.device_plugin import DevicePlugin
from agent.services.directory_guard import DirectoryGuard
from agent.services.drift_page import DriftPage
from agent.services.driver_guard import DriverGuard
from agent.services.driver_limits import DriverLimitKeeper
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.evictor import Evictor
from agent.services.grant_book import GrantBook
from agent.services.health import CordonKeeper, HealthMemory, HealthReporter
from agent.services.injection import Injection
from agent.services.liveness import Liveness
from agent.services.mig_keeper import MigAwareDriver, MigKeeper
from agent.services.monitor import Monitor, MonitorOptions
from agent.services.mps_keeper import MpsKeeper
from agent.services.offering import Offering
from agent.services.overhead import OverheadKeeper
from agent.services.page_keeper import PageKeeper
from agent.services.pausing import Pauser
from agent.services.pending import PendingPods
from agent.services.pod_cache import PodCache
from agent.services.process_census import ProcessCensus
from agent.services.publisher import Capacity, Condition, Inventory, NodePublisher, Target
from agent.services.reconciler import Reconciler, ReconcilerOptions
from agent.services.region_keeper import RegionKeeper
from agent.services.registrar import Registrar
from agent.services.shim_keeper import ShimKeeper
from agent.services.telemetry import Telemetry
from agent.settings import Placement, Settings
from program.api_server import ApiServer, find_api_server
from program.log_format import configure_logging
from program.settings import SettingsError
from proto import contract
from proto.gpunode import NO_CORDON

logger = logging.getLogger("agent")

BUILD_DIR_ENV = "ALIQUOT_BUILD_DIR"
INSTALLED_SHIM_DIR = Path("/usr/local/lib/aliquot")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent; return the exit code: 2 for wrong settings, 1 for a failure, 0 after a signal."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(settings.log_level, settings.log_format)
        use_one_heap()
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
        telemetry = Telemetry(node_name)
        local_policy = settings.placement_policy if settings.placement is Placement.LOCAL else None
        self._runtime = runtime
        self._boot_id = boot_id()
        nvml = NvmlDriver(nvml_library, settings.nvml_timeout_seconds, telemetry.nvml_error, telemetry.driver_read_seconds.observe)
        self._pods = PodCache()
        files = GrantFiles(runtime / "containers", clock.monotonic)
        ctk = NvidiaCtk(settings.nvidia_ctk, settings.nvidia_ctk_timeout_seconds)
        cdi = CdiDirectory(Path(settings.cdi_dir), Path(settings.cdi_static_dir), generate=ctk.host_spec)
        self._book = GrantBook(LedgerFiles(state / "ledger"), files, cdi, clock)
        self._mig = MigKeeper(
            NvmlMig(nvml),
            MigRecordFiles(state / "mig"),
            book=self._book,
            labels=lambda: self._pods.node.labels if self._pods.node is not None else None,
            boot_id=self._boot_id,
            offering=settings.mig_dynamic,
        )
        driver = MigAwareDriver(nvml, self._mig)
        self._driver = DriverWatch(driver, settings.driver_poll_seconds, settings.health_rules, clock.monotonic)
        self._kube_watch = KubeWatcher(
            lambda **options: KubeConnection(api_server, **options), node_name, gpu_nodes=settings.publish_gpu_node
        )
        api = KubeApiClient(KubeConnection(api_server), node_name, clock)
        self._pod_resources = KubeletPodResources(Path(settings.pod_resources_socket))
        kubelet_memory = KubeletCheckpoint(Path(settings.kubelet_device_plugin_dir))
        admissions = Admissions(self._pod_resources, kubelet_memory, clock.monotonic)
        shim = ShimStore(shim_source, state / "shim")
        self._shim = ShimKeeper(shim, cdi, files)
        self._events = EventRecorder(api, clock)
        abilities = find_abilities(settings)
        daemons = MpsWishFiles(runtime / RECORDS_DIRECTORY)
        self._mps = MpsKeeper(
            node_name,
            daemons,
            str(runtime / DAEMONS_DIRECTORY),
            book=self._book,
            models=lambda: models_of(self._driver.board),
            events=self._events,
        )
        backends = Backends(abilities, self._mig, self._mps, settings.driver_limits_hook)
        self._limits = DriverLimitKeeper(
            node_name, NvmlLimits(nvml), CgroupTree(Path(settings.cgroup_dir)), book=self._book, pods=self._pods, events=self._events
        )
        self._cordons = CordonKeeper(
            self._driver, self._pods, RowFile(state / "cordon", CORDON_ROWS, NO_CORDON), watched=settings.publish_gpu_node
        )
        self._offering = Offering(self._driver, self._book, settings.shares_per_gpu, lambda: backends.abilities)
        evictor = Evictor(api, clock)
        processes = ProcProcesses(Path(settings.proc_dir))
        priority_page, turns_page = PageFile(runtime / "priority", PRIORITY), PageFile(runtime / "turns", TURNS)
        options = AllocatorOptions(
            secret=load_secret(state / "secret"),
            boot_id=self._boot_id,
            shares_per_gpu=settings.shares_per_gpu,
            local_policy=local_policy,
            interposition=settings.interposition,
            fail_policy=settings.fail_policy,
            pod_wait_seconds=settings.pod_wait_seconds,
            priority_page=str(priority_page.make()),
            turns_page=str(turns_page.make()) if settings.memory_oversubscription > 1 else None,
        )
        there = [page for page in (priority_page, turns_page) if page.path.exists()]  # turns perhaps from an earlier configuration
        self._page_keeper = PageKeeper(there, settings.reconcile_seconds)
        self._region_keeper = RegionKeeper(settings.reconcile_seconds, book=self._book, files=files)
        self._census = ProcessCensus(settings.reconcile_seconds, driver=driver, processes=processes, monotonic=clock.monotonic)
        liveness = Liveness(book=self._book, files=files, census=self._census, processes=processes, watch=self._driver)
        self._overhead = OverheadKeeper(census=self._census, watch=self._driver, book=self._book, pods=self._pods, files=files, clock=clock)
        self._borrower = Borrower(book=self._book, files=files, clock=clock)
        self._pauser = Pauser(book=self._book, pods=self._pods, files=files, events=self._events)
        self._injection = injection = Injection(
            settings.device_injection,
            watch=self._driver,
            pods=self._pods,
            book=self._book,
            files=files,
            cdi=cdi,
            versions=RowFile(state / "node-versions", VERSION_ROWS, NodeVersions()),
            clock=clock,
        )
        allocator = Allocator(
            options,
            watch=self._driver,
            pods=self._pods,
            book=self._book,
            pod_resources=admissions,
            kubelet_memory=kubelet_memory,
            injection=injection,
            files=files,
            cdi=cdi,
            shim=shim,
            backends=backends,
            liveness=liveness,
            events=self._events,
            telemetry=telemetry,
            clock=clock,
            context_bytes=self._overhead.context_bytes,
            cordon_is_told=self._cordons.is_told,
        )
        pending = PendingPods(
            settings.shares_per_gpu,
            local_policy,
            watch=self._driver,
            pods=self._pods,
            book=self._book,
            kubelet_memory=kubelet_memory,
            injection=injection,
        )

        def make_plugin(resource: str) -> DevicePlugin:
            return DevicePlugin(
                resource,
                self._offering,
                admissions=admissions,
                allocator=allocator,
                injection=injection,
                pending=pending,
                telemetry=telemetry,
                clock=clock,
            )

        self._registrar = Registrar(
            f"{os.getpid():x}-{time.time_ns() // 1_000_000:x}",
            self._offering,
            make_plugin,
            kubelet=KubeletDirectory(Path(settings.kubelet_device_plugin_dir), admissions),
            pods=self._pods,
            telemetry=telemetry,
            clock=clock,
            held_back=lambda: injection.trouble,
        )
        self._health = HealthReporter(
            node_name, watch=self._driver, book=self._book, pods=self._pods, events=self._events, telemetry=telemetry
        )
        self._memory = HealthMemory(self._driver, HealthFile(runtime / "health"))
        self._publisher = self._make_publisher(settings, node_name, api, clock)
        self._guard = DirectoryGuard(HostDirectories(_host_directories(settings)))
        self._driver_guard = DriverGuard(self._driver, clock.monotonic)
        self._file_changes = DirectoryWatch([Path(settings.cdi_dir), state / "ledger"], nested=runtime / "containers")
        self._reconciler = Reconciler(
            ReconcilerOptions(node_name, settings.reconcile_seconds, local_policy is None, settings.drift_policy),
            book=self._book,
            pods=self._pods,
            pod_resources=admissions,
            liveness=liveness,
            file_changes=self._file_changes,
            watch=self._driver,
            resources=lambda: self._offering.devices().keys(),
            rewrite=allocator.rewrite,
            evictor=evictor,
            events=self._events,
            telemetry=telemetry,
            clock=clock,
        )
        self._auditor = Auditor(
            AuditorOptions(node_name, settings.audit_policy, settings.exempt_namespaces),
            census=self._census,
            processes=processes,
            watch=self._driver,
            book=self._book,
            pods=self._pods,
            files=files,
            evictor=evictor,
            events=self._events,
            telemetry=telemetry,
            clock=clock,
            supervisor_pid=lambda: self._mps.supervisor_pid,
        )
        self._monitor = Monitor(
            MonitorOptions(_version(), node_name, settings.shares_per_gpu, settings.compat_metrics),
            watch=self._driver,
            book=self._book,
            pods=self._pods,
            files=files,
            registrar=self._registrar,
            telemetry=telemetry,
            overhead_bytes=self._overhead.fresh_overhead_bytes,
            holdings=lambda: self._overhead.holdings,
            troubles=self._troubles,
            clock=clock,
            bypassed=lambda: self._auditor.bypassed | self._limits.unlimited | self._mps.unserved,
            mig_records=lambda: self._mig.records,
            further=(
                self._driver.families,
                self._auditor.families,
                self._reconciler.families,
                self._limits.families,
                self._mps.families,
                self._events.families,
            ),
        )
        drift_page = DriftPage(node_name, self._reconciler, self._auditor, clock)
        pages = {"/metrics": self._monitor.metrics, "/healthz": self._monitor.health, "/readyz": self._monitor.readiness}
        pages["/drift"] = drift_page.page
        self._status = StatusServer(*settings.metrics_host_port, pages)
        self._address_from_node = settings.address_from_node(self._status.address)

    def _make_publisher(self, settings: Settings, node_name: str, api: KubeApiClient, clock: SystemClock) -> NodePublisher:
        targets: list[Target] = []
        if settings.publish_node_capacity:
            targets.append(Capacity(node_name, api=api, watch=self._driver, book=self._book, pods=self._pods))
        if settings.publish_node_condition:
            targets.append(Condition(node_name, api=api, watch=self._driver, pods=self._pods))
        if settings.publish_gpu_node:
            facts = NodeFacts(node_name, _version(), settings.shares_per_gpu, settings.memory_oversubscription)
            offered = self._offering.backends
            targets.append(Inventory(facts, lambda: offered().backends, api=api, watch=self._driver, pods=self._pods))
        further = [self._mps.changes]
        return NodePublisher(node_name, targets, watch=self._driver, book=self._book, pods=self._pods, clock=clock, further=further)

    async def run(self, stop: asyncio.Event) -> None:
        """Run all services until told to stop, or until one of them fails."""
        self._book.load(self._boot_id)
        self._memory.load()
        self._cordons.load()
        self._mig.load()
        self._injection.load()
        await self._mps.load()
        services = [
            self._driver.run(),
            self._registrar.run(),
            self._injection.run(),
            self._monitor.run(),
            self._shim.run(),
            self._page_keeper.run(),
            self._region_keeper.run(),
            self._events.run(),
            self._reconciler.run(),
            self._auditor.run(),
            self._overhead.run(),
            self._census.run(),
            self._borrower.run(),
            self._pauser.run(),
            self._publisher.run(),
            self._cordons.run(),
            self._memory.run(),
            self._mig.run(),
            self._mps.run(),
            self._limits.run(),
            self._guard.run(),
            self._driver_guard.run(),
        ]
        self._status.start()
        try:
            write_whole(self._runtime / "metrics-address", f"{self._address_from_node}\n".encode(), mode=0o644, durable=False)
        except StorageError as exc:  # whoever knows the configured port finds it all the same
            logger.error("the address of the status server is not written down: %s", exc)  # noqa: TRY400 - the sentence says it all
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
        self._file_changes.close()
        await self._registrar.stop()
        await self._pod_resources.close()
        self._book.close()
        self._status.stop()

    def _troubles(self) -> list[str]:
        never_synced = [] if self._pods.synced else [self._pods.trouble]
        return [trouble for trouble in (self._shim.trouble, self._offering.trouble, *never_synced) if trouble]


def find_abilities(settings: Settings) -> Abilities:
    """Look what the backends beside the shim need, as configured."""
    return Abilities(
        mig_strategy=settings.mig_strategy,
        without_driver_limits=driver_limits_trouble(settings.driver_limits_hook, Path(settings.host_dir), Path(settings.cgroup_dir)),
        most_memory_burst=settings.memory_oversubscription,
    )


def _host_directories(settings: Settings) -> Sequence[Path]:
    """Return what the agent shares with the host's other programs, and keeps there from one start to the next."""
    sockets = [settings.kubelet_device_plugin_dir, str(Path(settings.pod_resources_socket).parent)]
    return [Path(path) for path in (*sockets, settings.cdi_dir, settings.cdi_static_dir, settings.state_dir, settings.runtime_dir)]


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
