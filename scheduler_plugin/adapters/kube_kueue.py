# SPDX-License-Identifier: Apache-2.0
"""Answers of the admission check, written to Kueue's objects by server-side apply, and boosts. ``aiohttp_transport`` says how requests
fail.

An answer names the workload's version. Without it the API server would also take an answer to a reservation that has ended, and Kueue would
admit the workload by it at the next reservation.
"""

from typing import Final

from aliquot import contract
from aliquot.kube.requests import APPLY_PATCH, MERGE_PATCH, namespaced, object_path, timestamp, with_options
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.core.admit.kueue import API, API_VERSION, PRIORITY_BOOST
from scheduler_plugin.ports import CheckAnswer, Clock

FIELD_MANAGER: Final = "aliquot-fits"
WORKLOADS_PATH: Final = f"/{API}/workloads"
CHECKS_PATH: Final = f"/{API}/admissionchecks"
FLAVORS_PATH: Final = f"/{API}/resourceflavors"
LOCAL_QUEUES_PATH: Final = f"/{API}/localqueues"
CLUSTER_QUEUES_PATH: Final = f"/{API}/clusterqueues"
CLASS_PATHS: Final = {
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "WorkloadPriorityClass": f"/{API}/workloadpriorityclasses",
}
"""By kind."""
_APPLY: Final = {"fieldManager": FIELD_MANAGER, "force": "true"}


class KubeChecks:
    """Implements ``ports.CheckApi`` and ``ports.BoostApi``."""

    def __init__(self, connection: KubeConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    async def activate(self, name: str, generation: int) -> None:
        """See ``ports.CheckApi``."""
        condition = {
            "type": "Active",
            "status": "True",
            "reason": "Active",
            "message": f"{contract.SCHEDULER_NAME} plans the pods of workloads on its GPUs",
            "lastTransitionTime": timestamp(self._clock.now()),
            "observedGeneration": generation,
        }
        status = {"conditions": [condition]}
        body = {"apiVersion": API_VERSION, "kind": "AdmissionCheck", "metadata": {"name": name}, "status": status}
        path = with_options(object_path(CHECKS_PATH, name, "status"), **_APPLY)
        await self._connection.request("PATCH", path, body=body, content_type=APPLY_PATCH)

    async def answer(self, answer: CheckAnswer) -> None:
        """See ``ports.CheckApi``."""
        updates = [{"name": pod_set, "annotations": {contract.ANNOTATION_HOLD: text}} for pod_set, text in sorted(answer.holds.items())]
        entry = {"state": answer.state, "message": answer.message, "lastTransitionTime": timestamp(self._clock.now())}
        entries = [{"name": check, **entry, **({"podSetUpdates": updates} if updates else {})} for check in answer.checks]
        metadata = {"namespace": answer.namespace, "name": answer.name, "resourceVersion": answer.version}
        body = {"apiVersion": API_VERSION, "kind": "Workload", "metadata": metadata, "status": {"admissionChecks": entries}}
        path = with_options(object_path(namespaced("workloads", answer.namespace, API), answer.name, "status"), **_APPLY)
        await self._connection.request("PATCH", path, body=body, content_type=APPLY_PATCH)

    async def boost(self, namespace: str, name: str, version: str, amount: int) -> None:
        """See ``ports.BoostApi``."""
        body = {"metadata": {"resourceVersion": version, "annotations": {PRIORITY_BOOST: str(amount)}}}
        path = object_path(namespaced("workloads", namespace, API), name)
        await self._connection.request("PATCH", path, body=body, content_type=MERGE_PATCH)
