# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does for Kueue: the streams of its objects, and the loops behind the feature gates AdmissionCheck and MaxWait."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from aliquot.contract.features import Gate
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube_kueue import (
    CHECKS_PATH,
    CLASS_PATHS,
    CLUSTER_QUEUES_PATH,
    FLAVORS_PATH,
    LOCAL_QUEUES_PATH,
    WORKLOADS_PATH,
    KubeChecks,
)
from scheduler_plugin.adapters.kube_watch import Stream
from scheduler_plugin.core.admit.kueue import decode_check, decode_flavor, decode_priority_class, decode_workload
from scheduler_plugin.core.admit.queues import decode_cluster_queue, decode_local_queue
from scheduler_plugin.services.admission_check import AdmissionCheckController
from scheduler_plugin.services.expected_pods import ExpectedPods
from scheduler_plugin.services.kueue_objects import KueueObjects
from scheduler_plugin.services.max_waits import MaxWaits
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.settings import Settings
from scheduler_plugin.wiring.cluster import Cluster
from scheduler_plugin.wiring.leaders import Leaders
from scheduler_plugin.wiring.verbs import make_normaliser


@dataclass(frozen=True, slots=True)
class Kueue:
    """The parts."""

    objects: KueueObjects
    services: Sequence[AdmissionCheckController | MaxWaits]
    streams: "Sequence[Stream[Any]]"
    reads_queues: bool

    @property
    def trouble(self) -> str:
        """Why templates cannot be reviewed yet: a percentage counts in MiB only if the queue of its template is known."""
        return "the queues of Kueue are being listed" if self.reads_queues and self.objects.are_queues_pending else ""

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops to run."""
        return [part.run() for part in (*self.services, *self.streams)]


def make_kueue(settings: Settings, connection: KubeConnection, cluster: Cluster, leaders: Leaders, telemetry: Telemetry) -> Kueue | None:
    """Construct the parts, and connect them with the election; None while both gates are closed."""
    if not {Gate.ADMISSION_CHECK, Gate.MAX_WAIT} & settings.gates.opened:
        return None
    objects, api = KueueObjects(cluster.clock.monotonic), KubeChecks(connection, cluster.clock)
    workloads = Stream("workloads of Kueue", WORKLOADS_PATH, decode_workload, connection, objects.workloads)
    services, streams = list[AdmissionCheckController | MaxWaits](), list[Stream[Any]]([workloads])

    if Gate.ADMISSION_CHECK in settings.gates:
        context = cluster.context
        expected = ExpectedPods(make_normaliser(settings, context.state))
        controller = AdmissionCheckController(context, cluster.watch.directory, objects, expected, api, lambda: leaders.term, telemetry)
        services.append(controller)
        streams.append(Stream("admissionchecks", CHECKS_PATH, decode_check, connection, objects.checks))
        streams.append(Stream("resourceflavors", FLAVORS_PATH, decode_flavor, connection, objects.flavors))
        streams.append(Stream("localqueues", LOCAL_QUEUES_PATH, decode_local_queue, connection, objects.local_queues))
        streams.append(Stream("clusterqueues", CLUSTER_QUEUES_PATH, decode_cluster_queue, connection, objects.cluster_queues))
        leaders.is_prepared = lambda: controller.is_prepared

    if Gate.MAX_WAIT in settings.gates:
        services.append(MaxWaits(objects, api, cluster.clock, lambda: leaders.leads))
        for kind, kept in objects.classes.items():
            streams.append(Stream(f"{kind} objects", CLASS_PATHS[kind], decode_priority_class, connection, kept))

    for election in (leaders.leadership, leaders.following):
        if election is not None:
            election.on_acquired = _both(election.on_acquired, workloads.relist)
    return Kueue(objects, services, streams, reads_queues=Gate.ADMISSION_CHECK in settings.gates)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call
