# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver: its GPUs, their health and cordons, the MIG instances on them, and the processes that use them."""

from dataclasses import dataclass
from pathlib import Path

from agent.adapters.health_file import HealthFile
from agent.adapters.mig_files import MigRecordFiles
from agent.adapters.node_files import RowFile
from agent.adapters.nvml.driver import NvmlDriver
from agent.adapters.nvml.mig import NvmlMig
from agent.adapters.processes import ProcProcesses
from agent.core.backends import MigStrategy
from agent.core.health_record import CORDON_ROWS
from agent.services.driver_watch import DriverWatch
from agent.services.driver_watchdog import DriverWatchdog
from agent.services.health import CordonController, HealthRecorder, HealthReporter
from agent.services.mig_controller import MigAwareDriver, MigController
from agent.services.process_census import ProcessCensus
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from agent.wiring.cluster import Cluster
from agent.wiring.setup import Setup
from agent.wiring.storage import Storage
from aliquot.contract.gpunode import NO_CORDON


@dataclass(frozen=True, slots=True)
class Driver:
    """The GPUs of this node."""

    nvml: NvmlDriver
    mig: MigController
    mig_aware: MigAwareDriver
    watch: DriverWatch
    census: ProcessCensus
    processes: ProcProcesses
    cordons: CordonController
    health: HealthRecorder
    watchdog: DriverWatchdog
    state: AgentState
    """The GPUs with the pods and grants that the earlier groups hold."""
    reporting: Reporting


def build_driver(setup: Setup, cluster: Cluster, storage: Storage) -> Driver:
    """Build the group. The driver is entered when ``watch`` runs."""
    settings, clock, pods, telemetry = setup.settings, setup.clock, cluster.pods, setup.telemetry
    nvml = NvmlDriver(setup.nvml_library, settings.nvml_timeout_seconds, telemetry.nvml_error, telemetry.driver_read_seconds.observe)
    mig = MigController(
        NvmlMig(nvml),
        MigRecordFiles(setup.state / "mig"),
        manager=storage.manager,
        labels=lambda: pods.node.labels if pods.node is not None else None,
        boot_id=setup.boot_id,
        offering=settings.mig_strategy is MigStrategy.DYNAMIC,
    )
    driver = MigAwareDriver(nvml, mig)
    watch = DriverWatch(driver, settings.driver_poll_seconds, settings.health_rules, clock.monotonic)
    processes = ProcProcesses(Path(settings.proc_dir))
    cordon_store = RowFile(setup.state / "cordon", CORDON_ROWS, NO_CORDON)
    state, reporting = AgentState(watch, pods, storage.manager), Reporting(cluster.events, telemetry)
    HealthReporter(setup.node_name, state=state, reporting=reporting)  # the watch calls it
    return Driver(
        nvml,
        mig,
        driver,
        watch,
        ProcessCensus(settings.reconcile_seconds, driver=driver, processes=processes, monotonic=clock.monotonic),
        processes,
        CordonController(watch, pods, cordon_store, watched=settings.publish_gpu_node),
        HealthRecorder(watch, HealthFile(setup.runtime / "health")),
        DriverWatchdog(watch, clock.monotonic),
        state,
        reporting,
    )
