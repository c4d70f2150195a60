# SPDX-License-Identifier: Apache-2.0
"""Kueue: the streams of its objects, and the loop that answers our admission check. Only behind the feature gate AdmissionCheck."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.contract.features import Gate
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube_kueue import (
    CHECKS_PATH,
    CLUSTER_QUEUES_PATH,
    FLAVORS_PATH,
    LOCAL_QUEUES_PATH,
    WORKLOADS_PATH,
    KubeChecks,
)
from scheduler_plugin.adapters.kube_watch import Stream
from scheduler_plugin.core.admit.kueue import decode_check, decode_flavor, decode_workload
from scheduler_plugin.core.admit.queues import decode_cluster_queue, decode_local_queue
from scheduler_plugin.services.admission_check import AdmissionCheckController
from scheduler_plugin.services.expected_pods import ExpectedPods
from scheduler_plugin.services.kueue_objects import KueueObjects
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.settings import Settings
from scheduler_plugin.wiring.cluster import Cluster
from scheduler_plugin.wiring.leaders import Leaders
from scheduler_plugin.wiring.verbs import make_normaliser


@dataclass(frozen=True, slots=True)
class Kueue:
    """The parts."""

    controller: AdmissionCheckController
    objects: KueueObjects
    streams: "Sequence[Stream[Any]]"

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops to run."""
        return [self.controller.run(), *(stream.run() for stream in self.streams)]


def make_kueue(settings: Settings, connection: KubeConnection, cluster: Cluster, leaders: Leaders, telemetry: Telemetry) -> Kueue | None:
    """Construct the parts, and connect them with the election; None while the gate is closed."""
    if Gate.ADMISSION_CHECK not in settings.gates:
        return None
    context, objects = cluster.context, KueueObjects(cluster.clock.monotonic)
    expected, api = ExpectedPods(make_normaliser(settings, context.state)), KubeChecks(connection, cluster.clock)
    controller = AdmissionCheckController(context, cluster.watch.directory, objects, expected, api, lambda: leaders.term, telemetry)
    workloads = Stream("workloads of Kueue", WORKLOADS_PATH, decode_workload, connection, objects.workloads)
    checks = Stream("admissionchecks", CHECKS_PATH, decode_check, connection, objects.checks)
    flavors = Stream("resourceflavors", FLAVORS_PATH, decode_flavor, connection, objects.flavors)
    local = Stream("localqueues", LOCAL_QUEUES_PATH, decode_local_queue, connection, objects.local_queues)
    shared = Stream("clusterqueues", CLUSTER_QUEUES_PATH, decode_cluster_queue, connection, objects.cluster_queues)

    for election in (leaders.leadership, leaders.following):
        if election is not None:
            election.on_acquired = _both(election.on_acquired, workloads.relist)
    leaders.is_prepared = lambda: controller.is_prepared
    return Kueue(controller, objects, (workloads, checks, flavors, local, shared))


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
