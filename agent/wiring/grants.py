# SPDX-License-Identifier: Apache-2.0
"""What a container gets, and what enforces it: the allocator, the backends, and the controllers of running containers."""

from dataclasses import dataclass
from pathlib import Path

from agent.adapters.cgroup_tree import CgroupTree
from agent.adapters.mps_files import MpsDaemonFiles
from agent.adapters.node_abilities import driver_limits_trouble
from agent.adapters.node_files import RowFile, load_secret
from agent.adapters.nvml.limits import NvmlLimits
from agent.core.backends import Abilities
from agent.core.injection import VERSION_ROWS, NodeVersions
from agent.core.metrics import models_of
from agent.core.mps import DAEMONS_DIRECTORY, RECORDS_DIRECTORY
from agent.services.allocator import Allocator, AllocatorOptions
from agent.services.backends import Backends
from agent.services.borrowing import Borrower
from agent.services.container_finder import ContainerFinder
from agent.services.driver_limits import DriverLimitController
from agent.services.grant_contents import ContentsOptions, GrantContents
from agent.services.injection import Injection
from agent.services.liveness import Liveness
from agent.services.mps_controller import MpsController
from agent.services.overhead import OverheadMeter
from agent.services.pausing import Pauser
from agent.settings import Settings
from agent.wiring.cluster import Cluster
from agent.wiring.driver import Driver
from agent.wiring.kubelet import Kubelet
from agent.wiring.setup import Setup
from agent.wiring.storage import Storage
from aliquot.contract.features import Gate


@dataclass(frozen=True, slots=True)
class Grants:
    """The services that make grants and hold containers to them."""

    secret: bytes
    """The node's secret, from which grant ids are made."""
    allocator: Allocator
    contents: GrantContents
    injection: Injection
    backends: Backends
    mps: MpsController
    limits: DriverLimitController
    overhead: OverheadMeter
    liveness: Liveness
    borrower: Borrower
    pauser: Pauser


def build_grants(setup: Setup, cluster: Cluster, storage: Storage, driver: Driver, kubelet: Kubelet) -> Grants:
    """Build the group. Raises StorageError when the node's secret cannot be read or written."""
    state, clock, manager, files, events = driver.state, setup.clock, storage.manager, storage.files, cluster.events
    mps = _mps(setup, storage, driver, cluster)
    backends = Backends(find_abilities(setup.settings), driver.mig, mps, setup.settings.driver_limits_hook)
    overhead = OverheadMeter(census=driver.census, state=state, files=files, clock=clock)
    liveness = Liveness(manager=manager, files=files, census=driver.census, processes=driver.processes, watch=driver.watch)
    injection = Injection(
        setup.settings.device_injection,
        state=state,
        files=files,
        cdi=storage.cdi,
        versions=RowFile(setup.state / "node-versions", VERSION_ROWS, NodeVersions()),
        clock=clock,
    )
    secret, contents = load_secret(setup.state / "secret"), _contents(setup, storage, overhead)
    allocator = Allocator(
        AllocatorOptions(secret, setup.boot_id, setup.settings.shares_per_gpu, setup.local_policy),
        state=state,
        finder=_finder(setup, driver, kubelet, injection),
        contents=contents,
        backends=backends,
        liveness=liveness,
        reporting=driver.reporting,
    )
    cgroups = CgroupTree(Path(setup.settings.cgroup_dir))
    return Grants(
        secret,
        allocator,
        contents,
        injection,
        backends,
        mps,
        DriverLimitController(setup.node_name, NvmlLimits(driver.nvml), cgroups, manager=manager, pods=cluster.pods, events=events),
        overhead,
        liveness,
        Borrower(manager=manager, files=files, clock=clock),
        Pauser(manager=manager, pods=cluster.pods, files=files, events=events, gates=setup.settings.gates),
    )


def find_abilities(settings: Settings) -> Abilities:
    """Return which backends this node can offer in addition to the shim, as configured and as found on the host."""
    hook, gates = settings.driver_limits_hook, settings.gates
    return Abilities(
        gates=gates,
        mig_strategy=settings.mig_strategy,
        without_driver_limits=gates.closed(Gate.DRIVER_ISOLATION)
        or driver_limits_trouble(hook, Path(settings.host_dir), Path(settings.cgroup_dir)),
        most_memory_burst=settings.memory_oversubscription,
    )


def _mps(setup: Setup, storage: Storage, driver: Driver, cluster: Cluster) -> MpsController:
    return MpsController(
        setup.node_name,
        MpsDaemonFiles(setup.runtime / RECORDS_DIRECTORY),
        str(setup.runtime / DAEMONS_DIRECTORY),
        manager=storage.manager,
        models=lambda: models_of(driver.watch.inventory),
        events=cluster.events,
    )


def _finder(setup: Setup, driver: Driver, kubelet: Kubelet, injection: Injection) -> ContainerFinder:
    return ContainerFinder(
        setup.settings.pod_wait_seconds,
        state=driver.state,
        pod_resources=kubelet.admissions,
        checkpoint=kubelet.checkpoint,
        injection=injection,
        clock=setup.clock,
        cordon_known=driver.cordons.is_known,
    )


def _contents(setup: Setup, storage: Storage, overhead: OverheadMeter) -> GrantContents:
    settings = setup.settings
    return GrantContents(
        ContentsOptions(settings.interposition, settings.fail_policy, storage.priority_page, storage.turns_page),
        manager=storage.manager,
        files=storage.files,
        cdi=storage.cdi,
        shim=storage.shim,
        context_bytes=overhead.context_bytes,
    )
