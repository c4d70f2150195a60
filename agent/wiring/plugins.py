# SPDX-License-Identifier: Apache-2.0
"""What the agent offers to kubelet: one device plugin per resource, and their registration."""

import os
import time
from dataclasses import dataclass

from agent.adapters.kubelet_grpc import KubeletDirectory
from agent.core.ledger import claims_trouble
from agent.services.device_plugin import DevicePlugin, PluginServices
from agent.services.offering import Offering
from agent.services.pending import PendingPods
from agent.services.registrar import PluginDirectory, Registrar
from agent.wiring.driver import Driver
from agent.wiring.grants import Grants
from agent.wiring.kubelet import Kubelet
from agent.wiring.setup import Setup


@dataclass(frozen=True, slots=True)
class Plugins:
    """The resources of this node, and who registers them."""

    offering: Offering
    registrar: Registrar


def build_plugins(setup: Setup, driver: Driver, kubelet: Kubelet, grants: Grants) -> Plugins:
    """Build the group."""
    settings, clock, telemetry, state = setup.settings, setup.clock, setup.telemetry, driver.state
    allocation = settings.allocation
    offering = Offering(driver.watch, state.manager, settings.shares_per_gpu, lambda: grants.backends.abilities, allocation)
    pending = PendingPods(
        settings.shares_per_gpu, setup.local_policy, state=state, checkpoint=kubelet.checkpoint, injection=grants.injection
    )

    services = PluginServices(kubelet.admissions, grants.allocator, grants.injection, pending)

    def held_back() -> str:
        ledger = state.manager.ledger
        # kubelet calls the plugin when a container with IDs restarts, so with such containers it is registered in any case
        return grants.injection.trouble or ("" if ledger.with_ids else claims_trouble(ledger, allocation))

    directory = KubeletDirectory(settings.device_plugin_dir, kubelet.admissions)
    registrar = Registrar(
        PluginDirectory(directory, f"{os.getpid():x}-{time.time_ns() // 1_000_000:x}"),
        offering,
        lambda resource: DevicePlugin(resource, offering, services=services, telemetry=telemetry, clock=clock),
        pods=state.pods,
        telemetry=telemetry,
        clock=clock,
        held_back=held_back,
    )
    return Plugins(offering, registrar)
