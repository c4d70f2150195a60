# SPDX-License-Identifier: Apache-2.0
"""A few nodes that exist in the API only, for scenarios that need several nodes: their GPUs, cliques and pods.

API server, kube-scheduler and our extender are real; KWOK keeps the nodes Ready, removes deleted pods and can mark bound ones as running.
A pod that is bound counts as started, because no kubelet runs it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from aliquot import contract
from aliquot.contract.gpunode import API_VERSION
from tests.e2e.api import Api
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.components import Component
from tests.e2e.cluster.paths import ROOT
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.scale import GPU_MEMORY_MIB, GPUS_PER_NODE, fake_nodes_kept_ready, inventory, node_object, schedulers

HIGH, LOW = "aliquot-production", "aliquot-best-effort"
READY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Fleet:
    """The nodes, and the processes that schedule on them."""

    cluster: Cluster
    kubectl: Kubectl
    """Of the namespace with the pods."""
    processes: tuple[str, ...]

    def wait_until_it_answers(self) -> None:
        """Wait until the extender has listed the cluster."""

        def answers() -> bool:
            return self.cluster.in_node("busybox", "wget", "-q", "-O-", "http://127.0.0.1:9412/readyz").returncode == 0

        eventually(answers, "the extender to have listed the cluster", seconds=READY_SECONDS)

    def replace_extender(self, program: str, *options: str) -> None:
        """Run the extender by another program, given as text, with more options. It ends with the fleet."""
        extender, _ = self.processes
        shipped = schedulers(self.cluster)[contract.SCHEDULER_NAME][extender]
        at = shipped.command.index("-m")
        self.cluster.stop(extender)
        self.cluster.start(
            extender, Component([*shipped.command[:at], "-c", program, *shipped.command[at + 2 :], *options], shipped.environment)
        )
        self.wait_until_it_answers()

    def write_inventory(self, node: str, **changed: object) -> None:
        """Change fields of what the agent of a node would publish."""
        api, path = Api(self.cluster.kubeconfig), f"/apis/{API_VERSION}/gpunodes/{node}"
        found = json.loads(api.send("GET", path))
        api.send("PUT", f"{path}/status", found | {"status": found["status"] | changed})

    def create(self, *pods: Object) -> None:
        self.kubectl.run("create", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))

    def end(self, *pods: str) -> None:
        """Delete pods at once: no kubelet has to end their containers, and KWOK takes up to half a minute for it."""
        self.kubectl.run("delete", "pods", *pods, "--force", "--grace-period=0")

    def nodes_of(self, *, prefix: str = "") -> dict[str, str]:
        """Return the node of each bound pod that is not ending, by the pod's name."""
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"]
            for pod in self.kubectl.all("pods")
            if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"] and pod["metadata"]["name"].startswith(prefix)
        }

    def devices_of(self, pod: str) -> list[str]:
        """Return the GPUs of a bound pod, by UUID."""
        text = self.kubectl.get("pod", pod)["metadata"]["annotations"][contract.ANNOTATION_ASSIGNMENT]
        return [device["uuid"] for container in json.loads(text)["containers"] for device in container["devices"]]

    def wait_until_bound(self, pod: str, seconds: float = 60) -> None:
        eventually(lambda: pod in self.nodes_of(), f"pod {pod} to be bound", seconds=seconds, otherwise=lambda: self.kubectl.explain(pod))

    def why(self, pod: str) -> dict[str, Any]:
        """Return the scheduler's explanation of a pod."""
        query = f"namespace={self.kubectl.namespace}&pod={pod}"
        done = self.cluster.in_node("busybox", "wget", "-q", "-O-", f"http://127.0.0.1:9412/explain/why?{query}")
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def fill(self, free: Mapping[str, int], priority: str = HIGH) -> None:
        """Leave this many GPUs of each node free: whole GPUs are taken, one pod for each."""
        names = [(node, number) for node, left in free.items() for number in range(GPUS_PER_NODE - left)]
        self.create(*(pod(f"filler-{node}-{number}", priority=priority, node=node) for node, number in names))
        wanted = {f"filler-{node}-{number}" for node, number in names}
        eventually(lambda: wanted <= self.nodes_of().keys(), "the other pods to be bound", seconds=READY_SECONDS)


def pod(
    name: str,
    *,
    gpus: int = 1,
    mib: int = GPU_MEMORY_MIB,
    cores: int = 0,
    priority: str = LOW,
    annotations: Mapping[str, str] | None = None,
    node: str = "",
) -> Object:
    """Return a pod with whole GPUs, or with ``mib`` and ``cores`` percent of each, as the webhook leaves it."""
    limits = {contract.RESOURCE_VGPU: str(gpus), contract.RESOURCE_VGPU_MEMORY: str(gpus * mib)}
    if cores:
        limits[contract.RESOURCE_VGPU_CORES] = str(gpus * cores)
    spec: Object = {
        "schedulerName": contract.SCHEDULER_NAME,
        "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}],
        "terminationGracePeriodSeconds": 0,
        "priorityClassName": priority,
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    metadata = {"name": name, "annotations": dict(annotations or {}), "labels": {"part-of": name.rpartition("-")[0]}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def gang(name: str, minimum: int, **further: str) -> dict[str, str]:
    """Return the annotations of a gang; the keys of further ones are written with underscores."""
    return {
        contract.ANNOTATION_GANG: name,
        contract.ANNOTATION_GANG_MIN: str(minimum),
        **{contract.ANNOTATION_PREFIX + key.replace("_", "-"): value for key, value in further.items()},
    }


@contextmanager
def running_fleet(cluster: Cluster, cliques: Mapping[str, str], *options: str, pods_run: bool = False) -> Iterator[Fleet]:
    """Have nodes and schedulers inside the block. Their pods are gone before it ends.

    Args: cliques: by node, its NVLink fabric. options: of the extender. pods_run: mark bound pods as running.
    """
    everywhere = cluster.kubectl()
    made = [f"--filename={ROOT}/deploy/daemonset/{name}.yaml" for name in ("base/crd-gpunodes", "scheduler/priority-classes")]
    everywhere.run("apply", *made)
    everywhere.wait_until_served("gpunodes.aliquot.dev")
    processes = schedulers(cluster)[contract.SCHEDULER_NAME]
    extender, _ = processes
    processes[extender] = replace(processes[extender], command=[*processes[extender].command, *options])
    with fake_nodes_kept_ready(cluster, pods_run=pods_run):
        _make_nodes(Api(cluster.kubeconfig), cliques)
        eventually(lambda: _untainted(everywhere, cliques), "the nodes to be without taints", seconds=READY_SECONDS)
        try:
            for name, component in processes.items():
                cluster.start(name, component)
            yield Fleet(cluster, everywhere, tuple(processes))
        finally:
            for name in processes:
                cluster.stop(name)
            everywhere.delete("gpunodes", *cliques)
            everywhere.delete("nodes", *cliques)
            everywhere.run("delete", *made)


def _make_nodes(api: Api, cliques: Mapping[str, str]) -> None:
    for name, clique in cliques.items():
        api.send("POST", "/api/v1/nodes", node_object(name))
        publish_inventory(api, name, clique)


def publish_inventory(api: Api, name: str, clique: str = "") -> None:
    """Publish what the agent of a node with eight GPUs would. Args: clique: its NVLink fabric; empty for none."""
    made = json.loads(
        api.send("POST", f"/apis/{API_VERSION}/gpunodes", {"apiVersion": API_VERSION, "kind": "GpuNode", "metadata": {"name": name}})
    )
    status = inventory(name)
    made["status"] = status | {"devices": [device | {"fabricClique": clique} for device in status["devices"]]}
    api.send("PUT", f"/apis/{API_VERSION}/gpunodes/{name}/status", made)


def _untainted(kubectl: Kubectl, names: Iterable[str]) -> bool:
    taints = {node["metadata"]["name"]: node["spec"].get("taints") for node in kubectl.all("nodes")}
    return all(name in taints and not taints[name] for name in names)
