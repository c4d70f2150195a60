# SPDX-License-Identifier: Apache-2.0
"""The agent as a DRA driver: claims, the sockets for kubelet, and the node's slices."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from agent.adapters.dra_grpc import DriverDirectories, driver_directory
from agent.adapters.kube_api import kube_connection
from agent.adapters.resource_api import ResourceApiClient, ResourceSliceWatcher
from agent.core.ledger import ids_trouble
from agent.services.claim_requests import ClaimRequests
from agent.services.claim_sweep import ClaimSweep
from agent.services.claims import ClaimManager, ClaimOptions
from agent.services.dra_health import DeviceHealthService
from agent.services.dra_plugin import DraPlugin
from agent.services.dra_registrar import DraRegistrar
from agent.services.publisher import NodePublisher
from agent.services.slice_publisher import SliceCache, SliceTarget
from agent.settings import Settings
from agent.wiring.driver import Driver
from agent.wiring.grants import Grants
from agent.wiring.setup import Setup
from aliquot.contract.features import Gate
from aliquot.contract.model import Allocation

CONNECTIONS = 16
"""Kept open to the API server: a pod needs one read before its containers start, and many pods start at once."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What serves ResourceClaims."""

    manager: ClaimManager
    sweep: ClaimSweep
    requests: ClaimRequests
    registrar: DraRegistrar
    publisher: NodePublisher
    cache: SliceCache
    watcher: ResourceSliceWatcher


def build_claims(setup: Setup, driver: Driver, grants: Grants) -> Claims | None:
    """Build the group; None where claims are not served."""
    settings, state, node_name = setup.settings, driver.state, setup.node_name
    if not _is_served(settings):
        return None
    api = ResourceApiClient(kube_connection(setup.api_server, maxsize=CONNECTIONS))
    requests = ClaimRequests(api)
    manager = ClaimManager(
        ClaimOptions(grants.secret, setup.boot_id, node_name, settings.shares_per_gpu),
        state=state,
        requests=requests,
        contents=grants.contents,
        backends=grants.backends,
        reporting=driver.reporting,
        clock=setup.clock,
    )
    sweep = ClaimSweep(manager, state.manager, grants.liveness, requests, node_name)
    sockets = DriverDirectories(Path(settings.kubelet_dir), f"{os.getpid():x}-{time.time_ns() // 1_000_000:x}")
    registrar = DraRegistrar(sockets, DraPlugin(manager), DeviceHealthService(node_name, driver.watch, setup.clock), setup.telemetry)
    cache = SliceCache()

    def withheld() -> str:
        return ids_trouble(state.manager.ledger) if settings.allocation is Allocation.DRA else "allocation: plugin"

    target = SliceTarget(node_name, settings.shares_per_gpu, api=api, state=state, cache=cache, withheld=withheld)
    changes = [cache.changes, registrar.changes]
    publisher = NodePublisher(node_name, [target], state=state, clock=setup.clock, further=changes)
    watcher = ResourceSliceWatcher(lambda **o: kube_connection(setup.api_server, **o), node_name)
    return Claims(manager, sweep, requests, registrar, publisher, cache, watcher)


def _is_served(settings: Settings) -> bool:
    """Whether kubelet may call the agent about claims: also after a change to the device plugin, until the last claim has ended.

    The component ``dra`` mounts the driver's directory. A node that only has the gate open stays without a driver.
    """
    by_claims = settings.allocation is Allocation.DRA
    return Gate.DYNAMIC_RESOURCE_ALLOCATION in settings.gates and (by_claims or driver_directory(Path(settings.kubelet_dir)).is_dir())
