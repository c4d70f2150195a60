# SPDX-License-Identifier: Apache-2.0
"""A large cluster with nodes that exist in the API only, and how fast a scheduler fills it.

API server, etcd and kube-scheduler are real; KWOK keeps the nodes Ready. What is measured is the same for any scheduler: pods that wait
when it starts, pods that come at a steady rate, and the API server's own count of requests.
"""

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from aliquot.contract.gpunode import API_VERSION
from tests.e2e.api import Api, ApiError
from tests.e2e.cluster import namespaces
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.components import API_PORT, Component
from tests.e2e.cluster.host import KUBERNETES, KWOK, built_programs, module_source
from tests.e2e.cluster.namespaces import NODE_ADDRESS
from tests.e2e.cluster.paths import ROOT
from tests.e2e.kubectl import Object, eventually

NAMESPACE = "scale"
GPUS_PER_NODE = 8
GPU_MEMORY_MIB = 143151
SHARES_PER_GPU = 16
STOCK_SCHEDULER = "stock-scheduler"
"""kube-scheduler with its own defaults: it filters and scores a sample of the nodes."""
PLAIN_SCHEDULER = "plain-scheduler"
"""kube-scheduler as shipped, without the extender: it filters and scores all nodes."""
LISTING_SCHEDULER = "listing-scheduler"
"""As shipped, and the extender answers with all nodes that fit."""
_SIZES_MIB = (4096, 10240, 20480, 71575, 143151)
_CORES = (None, 10, 25, 50)
_CLIENTS = 8
_EXTENDER = "scale-extender"
_KUBE = "scale-scheduler"
_API_SERVER = "kube-apiserver"
_LEASE_SECONDS = 3600
"""How long a node's lease lasts; KWOK renews at a quarter, which for 15,000 nodes is seventeen requests a second."""
_TAINT_SECONDS = 300.0
_SETTLE_SECONDS = 3.0
_BOUND_SECONDS = 300.0
"""For a machine many times slower than any we saw: how fast it goes is a figure, and no check."""
_STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-delete.yaml",
)
"""How KWOK's nodes and pods behave: files of its own module."""
_PODS_RUN = "pod/fast/pod-ready.yaml"
"""Marks bound pods as running and ready. Not where writes are counted: those are no scheduler's."""


def make_nodes(api: Api, count: int) -> None:
    """Make nodes with eight GPUs each, as an agent would have them, and their inventories."""

    def make(number: int) -> None:
        name = f"scale-{number:04}"
        api.send("POST", "/api/v1/nodes", node_object(name))
        made = json.loads(
            api.send("POST", f"/apis/{API_VERSION}/gpunodes", {"apiVersion": API_VERSION, "kind": "GpuNode", "metadata": {"name": name}})
        )
        api.send("PUT", f"/apis/{API_VERSION}/gpunodes/{name}/status", made | {"status": inventory(name)})

    _in_parallel(make, range(count))


def node_object(name: str) -> Object:
    """A node as a kubelet with an agent would make it."""
    amounts = {
        "cpu": "192",
        "memory": "2Ti",
        "pods": "250",
        contract.RESOURCE_VGPU: str(GPUS_PER_NODE * SHARES_PER_GPU),
        contract.RESOURCE_VGPU_MEMORY: str(GPUS_PER_NODE * GPU_MEMORY_MIB),
        contract.RESOURCE_VGPU_CORES: str(GPUS_PER_NODE * 100),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": f"zone-{name[-1]}"},
        },
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def inventory(name: str) -> Object:
    """What the agent of such a node publishes."""
    devices = [
        {"uuid": f"GPU-{name}-{minor}", "model": "NVIDIA H200", "minor": minor, "pciBusId": f"00000000:{minor:02X}:00.0",
         "memoryMib": GPU_MEMORY_MIB, "numaNode": minor // 4}
        for minor in range(GPUS_PER_NODE)
    ]  # fmt: skip
    links = [" ".join("X" if a == b else "NV18" for b in range(GPUS_PER_NODE)) for a in range(GPUS_PER_NODE)]
    return {"devices": devices, "links": links, "sharesPerGpu": SHARES_PER_GPU, "isolation": ["shim", "exclusive"]}


def make_pod(name: str, scheduler: str, choices: random.Random) -> Object:
    """A pod with a share of one or two GPUs, in the words the webhook leaves behind."""
    vgpus = choices.choice((1, 1, 1, 2))
    limits = {contract.RESOURCE_VGPU: str(vgpus), contract.RESOURCE_VGPU_MEMORY: str(vgpus * choices.choice(_SIZES_MIB))}
    if (cores := choices.choice(_CORES)) is not None:
        limits[contract.RESOURCE_VGPU_CORES] = str(vgpus * cores)
    container = {"name": "main", "image": "none", "resources": {"limits": limits, "requests": {"cpu": "2", "memory": "8Gi"}}}
    spec = {"schedulerName": scheduler, "containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@contextmanager
def fake_nodes_kept_ready(cluster: Cluster, *, pods_run: bool = False) -> Iterator[None]:
    """KWOK in the place of a thousand kubelets, and a node controller that waits as long as their leases last."""
    programs = built_programs(KWOK)
    manager = cluster.component("kube-controller-manager")
    fast = ("--kube-api-qps=500", "--kube-api-burst=1000")  # by default it removes the taints of twenty nodes a second
    patient = Component([*manager.command, f"--node-monitor-grace-period={2 * _LEASE_SECONDS}s", *fast], manager.environment)
    cluster.stop("kube-controller-manager")
    cluster.start("kube-controller-manager", patient)
    stages = module_source(KWOK.module) / "kustomize/stage"
    nodes = ["--manage-all-nodes=false", "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]
    behaviour = [
        f"--node-lease-duration-seconds={_LEASE_SECONDS}",
        *(f"--config={stages / name}" for name in (*_STAGES, *[_PODS_RUN] * pods_run)),
    ]
    cluster.start(
        "kwok",
        Component(
            [str(programs / "kwok"), f"--kubeconfig={cluster.config}/admin.kubeconfig", *nodes, *behaviour],
            # KWOK waits for streamed lists, which Debian's etcd cannot give
            {"HOME": str(cluster.run_dir), "KUBE_FEATURE_WatchListClient": "false"},
        ),
    )  # fmt: skip
    try:
        yield
    finally:
        cluster.stop("kwok")
        cluster.restart("kube-controller-manager")


def schedulers(cluster: Cluster) -> dict[str, dict[str, Component]]:
    """The processes of each scheduler that is compared, by its name."""
    shipped = yaml.safe_load((ROOT / "deploy/daemonset/scheduler/kube-scheduler.yaml").read_text())
    token = cluster.config / "admin.token"
    token.write_text(yaml.safe_load((cluster.config / "admin.kubeconfig").read_text())["users"][0]["user"]["token"])
    extender = [sys.executable, "-m", "scheduler_plugin", "--webhook-address=", f"--kube-api-url=https://{NODE_ADDRESS}:{API_PORT}",
                f"--kube-token-file={token}", f"--kube-ca-file={cluster.config}/pki/ca.crt", "--log-level=warning"]  # fmt: skip
    paths = {"PYTHONPATH": str(ROOT)}

    def named(name: str, **changed: object) -> Component:
        profile = {**shipped["profiles"][0], "schedulerName": name}
        return _kube_scheduler(cluster, {**shipped, "profiles": [profile], **changed})

    return {
        STOCK_SCHEDULER: {_KUBE: named(STOCK_SCHEDULER, profiles=[{"schedulerName": STOCK_SCHEDULER}], extenders=[])},
        PLAIN_SCHEDULER: {_KUBE: named(PLAIN_SCHEDULER, extenders=[])},
        LISTING_SCHEDULER: {_EXTENDER: Component([*extender, "--answer=all"], paths), _KUBE: named(LISTING_SCHEDULER)},
        contract.SCHEDULER_NAME: {_EXTENDER: Component(extender, paths), _KUBE: named(contract.SCHEDULER_NAME)},
    }


def _kube_scheduler(cluster: Cluster, configuration: Mapping[str, Any]) -> Component:
    name = configuration["profiles"][0]["schedulerName"]
    alone = {**configuration, "leaderElection": {"leaderElect": False}}
    alone["clientConnection"] = {**configuration["clientConnection"], "kubeconfig": f"{cluster.config}/admin.kubeconfig"}
    file = cluster.config / f"{name}.yaml"
    file.write_text(yaml.safe_dump(alone))
    return Component([str(built_programs(KUBERNETES) / "kube-scheduler"), f"--config={file}", "--secure-port=10261"])


@contextmanager
def large_cluster(cluster: Cluster, count: int) -> Iterator[Api]:
    """Have this many nodes inside the block, all ready, and of the product only the kind of its inventories."""
    kubectl, api = cluster.kubectl(), Api(cluster.kubeconfig)
    kubectl.run("apply", f"--filename={ROOT}/deploy/daemonset/base/crd-gpunodes.yaml")
    kubectl.wait_until_served("gpunodes.aliquot.dev")
    kubectl.run("create", "namespace", NAMESPACE)
    with fake_nodes_kept_ready(cluster):
        make_nodes(api, count)
        eventually(lambda: not _tainted(api), "the nodes to be without taints", seconds=_TAINT_SECONDS)
        yield api


def _tainted(api: Api) -> bool:
    """Whether a node has a taint. All have one until KWOK and the node controller have seen them."""
    return any(node["spec"].get("taints") for node in json.loads(api.send("GET", "/api/v1/nodes?resourceVersion=0"))["items"])


@dataclass(frozen=True, slots=True)
class Figures:
    """What one scheduler did."""

    pods_per_second: float
    """Over the pods that waited when it started, from the first binding to the last."""
    latency_seconds: tuple[float, float]
    """Median and 99th percentile, from a pod's creation to its binding, at a steady rate."""
    requests_per_pod: Mapping[str, float]
    """Writes that the API server counted while the waiting pods were bound, by verb and resource."""
    cpu_ms_per_pod: Mapping[str, float]
    """CPU time of each process while the waiting pods were bound, by its name."""


@dataclass(slots=True)
class _Bindings:
    """When each pod was seen bound, from a watch."""

    seen_at: dict[str, float] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)

    def follow(self, api: Api, version: str, stopped: threading.Event) -> None:
        """Note bindings from a version of the list on; a watch that the API server cut off is taken up where it ended."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?watch=1&timeoutSeconds=60&resourceVersion="
        while not stopped.is_set():
            try:
                for event in api.watch(path + version):
                    version = self._note(event)
            except ApiError as error:
                if error.status:
                    raise  # it was refused, not cut off in the middle of an event

    def _note(self, event: Object) -> str:
        """Note one event; return the version it brings."""
        now, pod = time.monotonic(), event["object"]
        if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
            raise AssertionError(f"expected events of pods, found {event['type']}: {str(pod)[:300]}")
        name = pod["metadata"]["name"]
        if pod["spec"].get("nodeName") and name not in self.seen_at:
            self.seen_at[name] = now
            self.assignments[name] = pod["metadata"].get("annotations", {}).get(contract.ANNOTATION_ASSIGNMENT, "")
        return pod["metadata"]["resourceVersion"]


def measure(cluster: Cluster, api: Api, scheduler: str, *, waiting: int, per_second: float, seconds: float) -> tuple[Figures, list[str]]:
    """Let one scheduler bind pods that wait, then pods that come.

    Returns: the figures, and the assignments it wrote, as text.
    """
    choices = random.Random(7)
    backlog = [make_pod(f"waiting-{number}", scheduler, choices) for number in range(waiting)]
    _in_parallel(lambda pod: api.send("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod), backlog)
    bindings, stopped = _Bindings(), threading.Event()
    version = json.loads(api.send("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?limit=1"))["metadata"]["resourceVersion"]
    threading.Thread(target=bindings.follow, args=(api, version, stopped), daemon=True).start()
    before = _writes(api)
    processes = schedulers(cluster)[scheduler]
    watched = [*processes, _API_SERVER]
    if _EXTENDER in processes:
        cluster.start(_EXTENDER, processes[_EXTENDER])
        eventually(lambda: _extender_is_ready(cluster), "the extender to have listed the cluster", seconds=60)
    cpu_before = {name: _cpu_seconds(cluster, name) for name in watched if name != _KUBE}
    cluster.start(_KUBE, processes[_KUBE])
    try:
        eventually(lambda: len(bindings.seen_at) == waiting, f"{waiting} waiting pods to be bound", seconds=_BOUND_SECONDS,
                   otherwise=lambda: f"{len(bindings.seen_at)} are bound")  # fmt: skip
        cpu = {name: _cpu_seconds(cluster, name) - cpu_before.get(name, 0.0) for name in watched}
        times = sorted(bindings.seen_at.values())
        time.sleep(_SETTLE_SECONDS)  # events and statuses of the last pods
        after = _writes(api)
        latencies = sorted(_trickle(api, bindings, [make_pod(f"later-{n}", scheduler, choices) for n in range(int(per_second * seconds))],
                                    per_second))  # fmt: skip
    finally:
        stopped.set()
        for name in processes:
            cluster.stop(name)
    figures = Figures(
        pods_per_second=(waiting - 1) / (times[-1] - times[0]),
        latency_seconds=(latencies[len(latencies) // 2], latencies[int(0.99 * (len(latencies) - 1))]),
        requests_per_pod={what: count / waiting for what, count in sorted((after - before).items())},
        cpu_ms_per_pod={name: 1000 * seconds / waiting for name, seconds in cpu.items()},
    )
    assignments = list(bindings.assignments.values())
    api.send("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods?gracePeriodSeconds=0")
    eventually(lambda: not json.loads(api.send("GET", f"/api/v1/namespaces/{NAMESPACE}/pods?limit=1"))["items"], "the pods to be gone",
               seconds=120)  # fmt: skip
    return figures, assignments


def _cpu_seconds(cluster: Cluster, name: str) -> float:
    """The CPU time that a process of the node has used."""
    times = psutil.Process(namespaces.host_pid(cluster.run_dir, name)).cpu_times()
    return float(times.user + times.system)


def _extender_is_ready(cluster: Cluster) -> bool:
    return cluster.in_node("busybox", "wget", "-q", "-O-", "http://127.0.0.1:9412/readyz").returncode == 0


def _trickle(api: Api, bindings: _Bindings, pods: Sequence[Object], per_second: float) -> Iterator[float]:
    """Create pods at a steady rate; yield how long each waited from the answer to its creation until it was seen bound."""
    created: dict[str, float] = {}
    begun = time.monotonic()
    for number, pod in enumerate(pods):
        time.sleep(max(0.0, begun + number / per_second - time.monotonic()))
        api.send("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
        created[pod["metadata"]["name"]] = time.monotonic()
    eventually(lambda: created.keys() <= bindings.seen_at.keys(), f"{len(pods)} later pods to be bound", seconds=_BOUND_SECONDS)
    for name, at in created.items():
        yield max(0.0, bindings.seen_at[name] - at)


class _Counts(dict[str, float]):
    """Counters that can be subtracted."""

    def __sub__(self, other: "_Counts") -> "_Counts":
        return _Counts({what: count - other.get(what, 0) for what, count in self.items() if count != other.get(what, 0)})


def _writes(api: Api) -> _Counts:
    """Requests that the API server has served so far and that change pods or write events, by verb and resource."""
    counts = _Counts()
    for family in text_string_to_metric_families(api.send("GET", "/metrics").decode()):
        if family.name != "apiserver_request":
            continue
        for sample in family.samples:
            labels = sample.labels
            if labels["verb"] in ("POST", "PATCH", "PUT") and labels["resource"] in ("pods", "events", "bindings"):
                what = f"{labels['verb']} {labels['resource']}{'/' if labels['subresource'] else ''}{labels['subresource']}"
                counts[what] = counts.get(what, 0) + sample.value
    return counts


def _in_parallel(act: Callable[[Any], object], items: Sequence[Any]) -> None:
    with ThreadPoolExecutor(_CLIENTS) as pool:
        for _ in pool.map(act, items):
            pass
