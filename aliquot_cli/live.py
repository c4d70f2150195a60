# SPDX-License-Identifier: Apache-2.0
"""Names for shell completion: nodes, GPUs, pods and namespaces from the cluster, contexts from the kubeconfig.

A press of the completion key waits ``PATIENCE_SECONDS`` at most and reads one page of one list. If the cluster does not reply, there are
no completions and no message: the command itself will report the error.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from aliquot import contract
from aliquot_cli.access import PAGE_SIZE, Cluster, Target, connect, context_names, current_namespace
from aliquot_cli.pods import requests_gpus

PATIENCE_SECONDS = 1.5
_NODES_PATH = f"/apis/{contract.GPU_NODE_GROUP}/{contract.GPU_NODE_VERSION}/{contract.GPU_NODE_PLURAL}"

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete nodes with GPUs."""
    del param
    return _offer(incomplete, lambda: _node_names(_gpu_nodes(_cluster(ctx))))


def gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete GPUs: NODE/NUMBER, or UUIDs if the word starts like one."""
    del param
    return _offer(incomplete, lambda: _gpu_names(_gpu_nodes(_cluster(ctx)), by_uuid=incomplete.startswith("GPU-")))


def uuids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete UUIDs of GPUs."""
    del param
    return _offer(incomplete, lambda: _gpu_names(_gpu_nodes(_cluster(ctx)), by_uuid=True))


def gpus_and_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete what can be cordoned."""
    del param
    by_uuid = incomplete.startswith("GPU-")

    def names() -> list[str]:
        items = _gpu_nodes(_cluster(ctx))
        return [*_node_names(items), *_gpu_names(items, by_uuid=by_uuid)]

    return _offer(incomplete, names)


def pods(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete pods that request GPUs, in the given namespace or that of the context."""
    del param
    return _offer(incomplete, lambda: _pod_names(ctx))


def of_kind(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of the kind in the argument before them."""
    by_kind: dict[str, Completion] = {"gpu": gpus, "node": nodes, "pod": pods}
    complete = by_kind.get(str(ctx.params.get("kind")).removesuffix("s"))
    return complete(ctx, param, incomplete) if complete is not None else []


def namespaces(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete namespaces."""
    del param
    return _offer(incomplete, lambda: [item["metadata"]["name"] for item in _page(_cluster(ctx), "/api/v1/namespaces")])


def contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete contexts of the kubeconfig."""
    del param
    return _offer(incomplete, lambda: context_names(_target(ctx)))


def _offer(incomplete: str, ask: Callable[[], Iterable[str]]) -> list[CompletionItem]:
    """Call ``ask`` in a thread, so that a hanging credential plugin or name server does not block the shell."""
    found: list[str] = []

    def work() -> None:
        with suppress(Exception):  # a prompt is no place to report any error
            found.extend(ask())

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    asking.join(PATIENCE_SECONDS)
    return [CompletionItem(name) for name in sorted({*found}) if name.startswith(incomplete)]


def _target(ctx: click.Context) -> Target:
    kubeconfig = ctx.params.get("kubeconfig")
    return Target(Path(kubeconfig) if kubeconfig else None, ctx.params.get("context"))


def _cluster(ctx: click.Context) -> Cluster:
    return connect(_target(ctx), PATIENCE_SECONDS)


def _page(cluster: Cluster, path: str) -> list[Any]:
    return list(cluster.get(path, {"limit": str(PAGE_SIZE)})["items"])


def _gpu_nodes(cluster: Cluster) -> list[Any]:
    return _page(cluster, _NODES_PATH)


def _node_names(items: Iterable[Any]) -> list[str]:
    return [item["metadata"]["name"] for item in items]


def _gpu_names(items: Iterable[Any], *, by_uuid: bool) -> list[str]:
    devices = [(item["metadata"]["name"], one) for item in items for one in item.get("status", {}).get("devices", ())]
    return [one["uuid"] if by_uuid else f"{node}/{one['minor']}" for node, one in devices]


def _pod_names(ctx: click.Context) -> list[str]:
    namespace = ctx.params.get("namespace") or current_namespace(_target(ctx))
    found = _page(_cluster(ctx), f"/api/v1/namespaces/{namespace}/pods")
    return [pod["metadata"]["name"] for pod in found if requests_gpus(pod)]
