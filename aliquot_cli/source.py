# SPDX-License-Identifier: Apache-2.0
"""Reads a cluster for the commands: GpuNode objects, agents and the pages they serve, many agents at a time."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import msgspec

from aliquot import contract
from aliquot.contract.errors import ContractError
from aliquot.contract.gpunode import API_VERSION, GpuNode, decode_gpu_node
from aliquot_cli.access import CONNECTIONS, Cluster, listed, proxy_path
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.model import Node, node_of

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
    """Return the names of all GpuNode objects; an empty set if the resource is not installed. Raises AccessError."""
    return {item["metadata"]["name"] for item in _gpu_node_objects(cluster)}


def gpu_nodes(cluster: Cluster) -> Mapping[str, GpuNode]:
    """Return the GpuNode objects by name; an empty mapping if the resource is not installed. Raises AccessError."""
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
    """List the pods of all namespaces; a user without that right has it in one namespace, by the role aliquot-user."""
    query = {"labelSelector": f"{AGENT_LABEL}={AGENT_NAME}"}
    try:
        return list(listed(cluster, "/api/v1/pods", query))
    except AccessError:
        return list(listed(cluster, f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods", query))


def nodes(cluster: Cluster, wanted: Sequence[str] = (), *, all_of_them: bool = True) -> list[Node]:
    """Return the nodes with GPUs, by name.

    Args: wanted: names of nodes; an empty sequence means all. all_of_them: whether a name without a GPU node is an error.
    Raises: AccessError, or NotFoundError.
    """
    described, running = gpu_nodes(cluster), agents(cluster)
    names = sorted(described.keys() | running.keys())
    if all_of_them:
        _check_known(wanted, names)
    chosen = [name for name in names if not wanted or name in wanted]
    pages = agent_pages(cluster, [running[name] for name in chosen if name in running], "/metrics")
    return [_node(name, described.get(name), pages.get(name)) for name in chosen]


def _check_known(wanted: Sequence[str], names: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in names]:
        raise NotFoundError(f"no node with GPUs is named {', '.join(missing)}; there are {', '.join(names) or 'none'}")


def agent_pages(cluster: Cluster, of: Sequence[Agent], page: str) -> Mapping[str, "str | AccessError"]:
    """Fetch a page from agents, many at a time; return its text or the error, by node."""

    def fetch(agent: Agent) -> tuple[str, "str | AccessError"]:
        try:
            return agent.node, cluster.text(proxy_path(agent.namespace, agent.pod, agent.port, page))
        except NotFoundError as exc:
            return agent.node, AccessError(exc.message)
        except AccessError as exc:
            return agent.node, exc

    return dict(in_parallel(fetch, of, "agents queried"))


def in_parallel(work: Callable[[Any], T], items: Sequence[Any], what: str) -> Iterable[T]:
    """Do work for each item, many at a time; show progress on a terminal if it takes long."""
    if not items:
        return []
    begun, results, progress_shown = time.monotonic(), [], False
    with ThreadPoolExecutor(min(CONNECTIONS, len(items))) as pool:
        for done in as_completed([pool.submit(work, item) for item in items]):
            results.append(done.result())
            if sys.stderr.isatty() and time.monotonic() - begun > PROGRESS_AFTER_SECONDS:
                progress_shown = True
                click.echo(f"\r{len(results)} of {len(items)} {what}", nl=False, err=True)
    if progress_shown:
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
