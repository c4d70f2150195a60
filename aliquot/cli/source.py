"""Gathers a cluster's picture: GpuNode objects, agents and their pages, many agents at a time."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import msgspec

from aliquot.cli.access import CONNECTIONS, Cluster, listed, proxy_path
from aliquot.cli.errors import AccessError, NotFoundError
from aliquot.cli.model import Node, node_of
from proto import contract
from proto.errors import ContractError
from proto.gpunode import API_VERSION, GpuNode, decode_gpu_node

SYSTEM_NAMESPACE = "aliquot-system"
"""Where the manifests put agents and scheduler."""
AGENT_LABEL = "app.kubernetes.io/name"
AGENT_NAME = "aliquot-agent"
METRICS_PORT_NAME = "metrics"
DEFAULT_METRICS_PORT = 9402
GPU_NODES_PATH = f"/apis/{API_VERSION}/{contract.GPU_NODE_PLURAL}"
PROGRESS_AFTER_SECONDS = 1.0
NO_AGENT = "no agent runs there"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent's pod."""

    node: str
    namespace: str
    pod: str
    port: int
    phase: str


def gpu_node_names(cluster: Cluster) -> set[str]:
    """Return the names of all GpuNode objects; none where the resource is not installed. Raises AccessError."""
    return {item["metadata"]["name"] for item in _gpu_node_objects(cluster)}


def gpu_nodes(cluster: Cluster) -> Mapping[str, GpuNode]:
    """Return the GpuNode objects by name; none where the resource is not installed. Raises AccessError."""
    found = {}
    for item in _gpu_node_objects(cluster):
        try:
            node = decode_gpu_node(msgspec.json.encode(item))
        except ContractError as exc:
            click.echo(f"left out: {exc}", err=True)
            continue
        found[node.name] = node
    return found


def _gpu_node_objects(cluster: Cluster) -> Sequence[Any]:
    try:
        return list(listed(cluster, GPU_NODES_PATH))
    except NotFoundError:
        return ()


def agents(cluster: Cluster) -> Mapping[str, Agent]:
    """Return the agents by node. Raises AccessError."""
    found: dict[str, Agent] = {}
    for pod in _agent_pods(cluster):
        metadata, spec = pod.get("metadata", {}), pod.get("spec", {})
        if metadata.get("labels", {}).get(AGENT_LABEL) == AGENT_NAME and spec.get("nodeName"):
            phase = pod.get("status", {}).get("phase", "Unknown")
            agent = Agent(spec["nodeName"], metadata.get("namespace", ""), metadata.get("name", ""), _port(spec), phase)
            if agent.node not in found or phase == "Running":
                found[agent.node] = agent
    return found


def _agent_pods(cluster: Cluster) -> Sequence[Any]:
    """Ask in all namespaces; who may not is asked again for the one where role aliquot-user is."""
    query = {"labelSelector": f"{AGENT_LABEL}={AGENT_NAME}"}
    try:
        return list(listed(cluster, "/api/v1/pods", query))
    except AccessError:
        return list(listed(cluster, f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods", query))


def nodes(cluster: Cluster, wanted: Sequence[str] = (), *, all_of_them: bool = True) -> list[Node]:
    """Return the nodes with GPUs, by name.

    Args: wanted: names of nodes; none means all. all_of_them: a name that is no node with GPUs is an error.
    Raises: AccessError, or NotFoundError.
    """
    described, running = gpu_nodes(cluster), agents(cluster)
    names = sorted(described.keys() | running.keys())
    if all_of_them and (missing := [name for name in wanted if name not in names]):
        raise NotFoundError(f"no node with GPUs is named {', '.join(missing)}; there are {', '.join(names) or 'none'}")
    chosen = [name for name in names if not wanted or name in wanted]
    pages = agent_pages(cluster, [running[name] for name in chosen if name in running], "/metrics")
    return [_node(name, described.get(name), pages.get(name)) for name in chosen]


def agent_pages(cluster: Cluster, of: Sequence[Agent], page: str) -> Mapping[str, "str | AccessError"]:
    """Ask agents for a page, many at a time; return it, or why there is none, by node."""

    def ask(agent: Agent) -> tuple[str, "str | AccessError"]:
        try:
            return agent.node, cluster.text(proxy_path(agent.namespace, agent.pod, agent.port, page))
        except NotFoundError as exc:
            return agent.node, AccessError(exc.message)
        except AccessError as exc:
            return agent.node, exc

    return dict(in_parallel(ask, of, "agents asked"))


def in_parallel(work: Callable[[Any], T], items: Sequence[Any], what: str) -> Iterable[T]:
    """Do work for each item, many at a time; tell of the progress on a terminal when it takes long."""
    if not items:
        return []
    begun, results, told = time.monotonic(), [], False
    with ThreadPoolExecutor(min(CONNECTIONS, len(items))) as pool:
        for done in as_completed([pool.submit(work, item) for item in items]):
            results.append(done.result())
            if sys.stderr.isatty() and time.monotonic() - begun > PROGRESS_AFTER_SECONDS:
                told = True
                click.echo(f"\r{len(results)} of {len(items)} {what}", nl=False, err=True)
    if told:
        click.echo("\r\x1b[K", nl=False, err=True)
    return results


def _node(name: str, described: GpuNode | None, page: "str | AccessError | None") -> Node:
    if isinstance(page, str):
        return node_of(name, described, page)
    trouble = page.message if page is not None else NO_AGENT
    return node_of(name, described, None, trouble)


def _port(spec: Mapping[str, Any]) -> int:
    ports = [port for container in spec.get("containers", ()) for port in container.get("ports", ())]
    return next((int(port["containerPort"]) for port in ports if port.get("name") == METRICS_PORT_NAME), DEFAULT_METRICS_PORT)
