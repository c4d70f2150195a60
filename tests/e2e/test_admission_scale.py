# SPDX-License-Identifier: Apache-2.0
"""A thousand workloads in Kueue itself: what the admission check costs beside Kueue's own time.

The thousand GPUs are on nodes that exist in the API only.
A run of its own: ``make e2e ARGS="-n 0 -m scale -s -k admission_scale"``.
"""

import json
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import pytest
import urllib3

from aliquot import contract
from aliquot.contract.gpunode import API_VERSION
from tests.e2e.api import Api
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.scale import GPU_MEMORY_MIB, GPUS_PER_NODE, fake_nodes_kept_ready, make_nodes
from tests.e2e.test_queues import VARIANT, kueue

__all__ = ["VARIANT", "kueue"]  # a fixture, and what it needs

WORKLOADS = 1000
WITHOUT_ROOM = 100
STEADY_WORKLOADS = 200
STEADY_PER_SECOND = 10.0
SECONDS = 300
CLIENTS = 8
REASON_SECONDS = 60
KUEUE = "kueue.x-k8s.io"
PROCESSES = {"Kueue": "/manager", "scheduler": "bin/aliquot-scheduler"}
"""By name, a part of the command line."""


def queue(name: str, checks: Iterable[str]) -> list[Object]:
    """A queue with room for everything."""
    amounts = {contract.RESOURCE_VGPU: 10 * WORKLOADS, contract.RESOURCE_VGPU_MEMORY: 10 * WORKLOADS * GPU_MEMORY_MIB}
    resources = [{"name": resource, "nominalQuota": str(amount)} for resource, amount in amounts.items()]
    spec: Object = {
        "namespaceSelector": {},
        "resourceGroups": [{"coveredResources": list(amounts), "flavors": [{"name": "scale", "resources": resources}]}],
    }
    if checks:
        spec["admissionChecksStrategy"] = {"admissionChecks": [{"name": check} for check in checks]}
    return [item("ClusterQueue", name, spec), item("LocalQueue", name, {"clusterQueue": name})]


def item(kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": f"{KUEUE}/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}


def workload(name: str, queue_name: str, annotations: Mapping[str, str] = {}) -> Object:
    """A workload of one pod with a whole GPU. No job owns it, so that only Kueue and the check work."""
    limits = {contract.RESOURCE_VGPU: "1", contract.RESOURCE_VGPU_MEMORY: str(GPU_MEMORY_MIB)}
    container = {"name": "main", "image": "none", "resources": {"limits": limits, "requests": limits}}
    template = {"metadata": {"annotations": dict(annotations)}, "spec": {"restartPolicy": "Never", "containers": [container]}}
    return item("Workload", name, {"queueName": queue_name, "podSets": [{"name": "main", "count": 1, "template": template}]})


@dataclass
class Seen:
    """When each workload got each condition, from a watch. A workload that is admitted is deleted, as if its job ended at once."""

    api: Api
    path: str
    at: dict[str, dict[str, float]] = field(default_factory=lambda: {"QuotaReserved": {}, "Admitted": {}})
    seats: dict[str, str] = field(default_factory=dict)
    """By workload, while it exists."""
    promised: int = 0
    """Answers with seats."""
    twice: list[str] = field(default_factory=list)
    """Seats that two workloads had at the same time."""

    def follow(self, stopped: threading.Event) -> None:
        """Note conditions; a watch that the API server cut off begins again with all that is there."""
        with ThreadPoolExecutor(CLIENTS) as deleting:
            while not stopped.is_set():
                try:
                    for event in self.api.watch(f"{self.path}?watch=1&timeoutSeconds=60&resourceVersion=0"):
                        name = self._note(event["type"], event["object"])
                        if name:
                            deleting.submit(self.api.send, "DELETE", f"{self.path}/{name}")
                except urllib3.exceptions.ProtocolError:
                    continue  # cut off in the middle of an event

    def _note(self, kind: str, found: Object) -> str:
        """Note an event; return the workload's name if it is newly admitted."""
        now, name, status = time.monotonic(), found["metadata"]["name"], found.get("status", {})
        if kind == "DELETED" or "deletionTimestamp" in found["metadata"]:
            self.seats.pop(name, None)
            return ""
        is_new = name not in self.at["Admitted"]
        for one in status.get("conditions", ()):
            if one["status"] == "True" and one["type"] in self.at:
                self.at[one["type"]].setdefault(name, now)
        for check in status.get("admissionChecks", ()):
            if check["state"] == "Ready" and name not in self.seats:
                self.promised += 1
                self.twice += [seat for seat in self.seats.values() if seat == check["message"]]
                self.seats[name] = check["message"]
        return name if is_new and name in self.at["Admitted"] else ""


def cpu_seconds() -> dict[str, float]:
    """The CPU time of the processes, of all replicas together."""
    used = dict.fromkeys(PROCESSES, 0.0)
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        for name, part in PROCESSES.items():
            if any(part in word for word in process.info["cmdline"] or ()):
                times = process.info["cpu_times"]
                used[name] += times.user + times.system
    return used


def measure(api: Api, kubectl: Kubectl, queue_name: str, count: int, per_second: float | None) -> tuple[str, Seen]:
    """Create workloads, all at once or at a rate, until all are admitted; return a line of the report, and what was seen."""
    path, stopped = f"/apis/{KUEUE}/v1beta2/namespaces/{kubectl.namespace}/workloads", threading.Event()
    seen = Seen(api, path)
    threading.Thread(target=seen.follow, args=(stopped,), daemon=True).start()
    created: dict[str, float] = {}
    before, begun = cpu_seconds(), time.monotonic()

    def create(number: int) -> None:
        if per_second is not None:
            time.sleep(max(0.0, begun + number / per_second - time.monotonic()))
        name = f"{queue_name}-{number}"
        created[name] = time.monotonic()
        api.send("POST", path, workload(name, queue_name))

    with ThreadPoolExecutor(CLIENTS) as creating:
        for _ in creating.map(create, range(count)):
            pass
    try:
        eventually(lambda: len(seen.at["Admitted"]) == count, f"{count} workloads to be admitted", seconds=SECONDS,
                   otherwise=lambda: f"{ {kind: len(at) for kind, at in seen.at.items()} }")  # fmt: skip
    finally:
        stopped.set()
    after, admitted = cpu_seconds(), seen.at["Admitted"]
    whole = [admitted[name] - created[name] for name in created]
    checked = [admitted[name] - seen.at["QuotaReserved"][name] for name in created]
    used = ", ".join(f"{name} {1000 * (after[name] - before[name]) / count:.1f}" for name in PROCESSES)
    rate = count / (max(admitted.values()) - min(created.values()))
    line = f"{queue_name:8}{'at once' if per_second is None else f'{per_second:.0f}/s':>8}{rate:8.0f}{times(whole)}{times(checked)}  {used}"
    delete_all(api, path)
    return line, seen


def delete_all(api: Api, path: str) -> None:
    api.send("DELETE", path)
    eventually(lambda: not json.loads(api.send("GET", f"{path}?limit=1"))["items"], "the workloads to be gone", seconds=SECONDS)


def reasons(api: Api, kubectl: Kubectl, queue_name: str) -> list[str]:
    """Create workloads for a model that no node has, all at once; return what the check says of them."""
    path = f"/apis/{KUEUE}/v1beta2/namespaces/{kubectl.namespace}/workloads"

    def create(number: int) -> None:
        api.send("POST", path, workload(f"without-room-{number}", queue_name, {contract.ANNOTATION_GPU_TYPE: "A100"}))

    with ThreadPoolExecutor(CLIENTS) as creating:
        for _ in creating.map(create, range(WITHOUT_ROOM)):
            pass

    def said() -> list[str]:
        found = json.loads(api.send("GET", path))["items"]
        checks = (check for one in found for check in one.get("status", {}).get("admissionChecks", ()))
        return [check["message"] for check in checks if check["message"]]

    try:
        eventually(lambda: len(said()) == WITHOUT_ROOM, f"{WITHOUT_ROOM} workloads to have a reason", seconds=REASON_SECONDS,
                   otherwise=lambda: f"{len(said())} have one")  # fmt: skip
        return said()
    finally:
        delete_all(api, path)


def times(seconds: list[float]) -> str:
    """Median and 99th percentile in ms."""
    return f"{1000 * statistics.median(seconds):8.0f}{1000 * sorted(seconds)[int(0.99 * (len(seconds) - 1))]:8.0f}"


@pytest.fixture
def thousand_gpus(kueue: Kubectl, node: Cluster) -> Iterator[Api]:
    """Nodes with a thousand GPUs that exist in the API only."""
    api = Api(node.kubeconfig)
    count = WORKLOADS // GPUS_PER_NODE

    def untainted() -> bool:
        return sum(one["metadata"]["name"].startswith("scale-") and not one["spec"].get("taints") for one in kueue.all("nodes")) == count

    with fake_nodes_kept_ready(node):
        try:
            make_nodes(api, count)
            eventually(untainted, "the nodes to be without taints", seconds=SECONDS)
            yield api
        finally:
            for number in range(count):
                api.send("DELETE", f"/api/v1/nodes/scale-{number:04}")
                api.send("DELETE", f"/apis/{API_VERSION}/gpunodes/scale-{number:04}")


@pytest.mark.scale
@pytest.mark.timeout(1800)
def test_each_of_many_workloads_has_own_seats(kubectl: Kubectl, thousand_gpus: Api, capsys: pytest.CaptureFixture[str]) -> None:
    check = item("AdmissionCheck", "scale-fits", {"controllerName": "aliquot.dev/fits"})
    made = [item("ResourceFlavor", "scale", {}), check, *queue("plain", ()), *queue("checked", ("scale-fits",))]
    kubectl.run("apply", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": made}))
    lines = [f"{'queue':8}{'come':>8}{'per s':>8}{'p50 ms':>8}{'p99 ms':>8}{'p50 ms':>8}{'p99 ms':>8}  CPU ms for each workload"]
    try:
        for name in ("plain", "checked"):
            for count, per_second in ((STEADY_WORKLOADS, STEADY_PER_SECOND), (WORKLOADS, None)):
                line, seen = measure(thousand_gpus, kubectl, name, count, per_second)
                lines.append(line)
        with capsys.disabled():
            print(f"\nfrom creation, and from reserved quota, to admission, of {WORKLOADS} workloads", *lines, sep="\n")
        assert all("0 of 1 pods" in reason for reason in reasons(thousand_gpus, kubectl, "checked"))
    finally:
        for one in reversed(made):
            kubectl.delete(f"{one['kind'].lower()}.{KUEUE}", one["metadata"]["name"])
    assert seen.promised == WORKLOADS
    assert seen.twice == []
