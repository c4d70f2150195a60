# SPDX-License-Identifier: Apache-2.0
"""All groups that serve containers, built in the order in which they need each other."""

from dataclasses import dataclass

from agent.services.driver_front import DriverFront
from agent.wiring.claims import Claims, build_claims
from agent.wiring.cluster import Cluster, build_cluster
from agent.wiring.driver import Driver, build_driver
from agent.wiring.grants import Grants, build_grants
from agent.wiring.kubelet import Kubelet, build_kubelet
from agent.wiring.plugins import Plugins, build_plugins
from agent.wiring.setup import Setup
from agent.wiring.storage import Storage, build_storage


@dataclass(frozen=True, slots=True)
class Parts:
    """The groups of one agent, except the watchers, which look at these."""

    setup: Setup
    cluster: Cluster
    storage: Storage
    driver: Driver
    kubelet: Kubelet
    grants: Grants
    plugins: Plugins
    claims: Claims | None
    """None while the gate of dynamic resource allocation is closed."""


def build_parts(setup: Setup, front: DriverFront | None) -> Parts:
    """Build the groups; on the event loop. Args: front: the driver's sockets, None without claims. Raises StorageError."""
    cluster, storage, kubelet = build_cluster(setup), build_storage(setup), build_kubelet(setup)
    driver = build_driver(setup, cluster, storage)
    grants = build_grants(setup, cluster, storage, driver, kubelet)
    plugins, claims = build_plugins(setup, driver, kubelet, grants), build_claims(setup, driver, grants, front)
    return Parts(setup, cluster, storage, driver, kubelet, grants, plugins, claims)
