# SPDX-License-Identifier: Apache-2.0
"""The agent as a DRA driver: claims, the sockets for kubelet, and the node's slices."""

from dataclasses import dataclass

from agent.adapters.kube_api import COMPONENT, kube_connection
from agent.adapters.resource_api import ResourceApiClient, ResourceSliceWatcher
from agent.core.backends import MigStrategy
from agent.core.ledger import ids_trouble
from agent.core.slices import Offer
from agent.services.claim_requests import ClaimRequests
from agent.services.claim_sweep import ClaimSweep
from agent.services.claims import ClaimManager, ClaimOptions
from agent.services.dra_health import DeviceHealthService
from agent.services.dra_plugin import DraPlugin
from agent.services.driver_front import DriverFront
from agent.services.publisher import NodePublisher
from agent.services.slice_publisher import SliceCache, SliceTarget
from agent.settings import LostGpuPolicy, Settings
from agent.wiring.driver import Driver
from agent.wiring.grants import Grants
from agent.wiring.setup import Setup
from aliquot.kube.http_reads import HttpReads


@dataclass(frozen=True, slots=True)
class Claims:
    """What serves ResourceClaims."""

    manager: ClaimManager
    sweep: ClaimSweep
    requests: ClaimRequests
    front: DriverFront
    driver: DraPlugin
    health: DeviceHealthService
    publisher: NodePublisher
    cache: SliceCache
    watcher: ResourceSliceWatcher

    def open(self) -> None:
        """Pass kubelet's calls on, now that the ledger is read: with an empty one, a release would find nothing to do."""
        self.front.open(self.driver, self.health)


def build_claims(setup: Setup, driver: Driver, grants: Grants, front: DriverFront | None) -> Claims | None:
    """Build the group; None where claims are not served."""
    settings, state, node_name = setup.settings, driver.state, setup.node_name
    if front is None:
        return None
    api = ResourceApiClient(kube_connection(setup.api_server), HttpReads(setup.api_server, COMPONENT))
    requests = ClaimRequests(api)
    manager = ClaimManager(
        ClaimOptions(grants.secret, setup.boot_id, node_name, settings.shares_per_gpu, settings.dra_admin_access),
        state=state,
        requests=requests,
        contents=grants.contents,
        backends=grants.backends,
        reporting=driver.reporting,
        clock=setup.clock,
    )
    sweep = ClaimSweep(manager, state.manager, grants.liveness, requests, node_name)
    offer = _offer(settings)
    health = DeviceHealthService(node_name, offer, driver.watch, setup.clock)
    cache = SliceCache()

    def withheld() -> str:
        allocation = settings.allocation
        return ids_trouble(state.manager.ledger, allocation) if allocation.by_claims else f"allocation: {allocation}"

    target = SliceTarget(node_name, offer, api=api, state=state, cache=cache, withheld=withheld)
    changes = [cache.changes, front.registrar.changes]
    publisher = NodePublisher(node_name, [target], state=state, clock=setup.clock, further=changes)
    watcher = ResourceSliceWatcher(lambda **o: kube_connection(setup.api_server, **o), node_name)
    return Claims(manager, sweep, requests, front, DraPlugin(manager), health, publisher, cache, watcher)


def _offer(settings: Settings) -> Offer:
    evicts, mig = settings.lost_gpu_policy is LostGpuPolicy.EVICT, settings.mig_strategy is not MigStrategy.NONE
    planned = settings.allocation.is_planned
    return Offer(settings.shares_per_gpu, evicts_from_lost=evicts, profiles_gib=settings.profiles_gib, mig=mig, planned=planned)
