# SPDX-License-Identifier: Apache-2.0
"""Decides whether a pod's vGPUs become ResourceClaims.

A node gives out its GPUs by one interface, so a pod can run on one kind of node only.

The label ``aliquot.dev/allocation`` of the pod decides, then that of its namespace, with the values ``dra`` and ``plugin``. Without a label
pods get claims if a node gives out its GPUs by claims, or if there is no node with GPUs yet.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.contract.model import Allocation
from aliquot.kube.errors import KubeApiError
from aliquot.kube.requests import object_path
from aliquot.placement.request import RequestError
from scheduler_plugin.ports import ObjectApi

KEPT_SECONDS: Final = 5.0
"""How long the label of a namespace that was just read is not read again: a Deployment makes many pods at once."""
MOST_KEPT: Final = 1024


class AllocationRule:
    """Knows the nodes' interfaces, and reads the labels of namespaces."""

    def __init__(self, nodes: Callable[[], Iterable[Allocation]], objects: ObjectApi, monotonic: Callable[[], float]) -> None:
        """Args: nodes: returns the interface of each node with GPUs."""
        self._nodes = nodes
        self._objects = objects
        self._monotonic = monotonic
        self._kept: dict[str, tuple[float, Allocation | None]] = {}

    async def of(self, pod: Mapping[str, Any], namespace: str) -> Allocation:
        """Return how a pod gets its GPUs. Raises RequestError: a label is invalid, or the namespace's is not known now."""
        stated = _stated((pod.get("metadata") or {}).get("labels"), "pod")
        if stated is None:
            stated = await self._of_namespace(namespace)
        if stated is not None:
            return stated
        nodes = set(self._nodes())
        return Allocation.DRA if Allocation.DRA in nodes or not nodes else Allocation.PLUGIN

    async def _of_namespace(self, namespace: str) -> Allocation | None:
        now = self._monotonic()
        at, known = self._kept.get(namespace, (float("-inf"), None))
        if now - at < KEPT_SECONDS:
            return known
        try:
            found = await self._objects.get_object(object_path("/api/v1/namespaces", namespace))
        except KubeApiError as exc:
            raise RequestError(f"label {contract.LABEL_ALLOCATION} of namespace {namespace} is not known now, try again: {exc}") from exc
        stated = _stated(((found or {}).get("metadata") or {}).get("labels"), f"namespace {namespace}")
        if len(self._kept) >= MOST_KEPT:
            self._kept.clear()
        self._kept[namespace] = now, stated
        return stated


def _stated(labels: object, where: str) -> Allocation | None:
    """Return what a label says; None without it. Raises RequestError."""
    text = labels.get(contract.LABEL_ALLOCATION) if isinstance(labels, Mapping) else None
    if text is None:
        return None
    try:
        return Allocation(text)
    except ValueError:
        raise RequestError(f"label {contract.LABEL_ALLOCATION} of the {where}: expected dra or plugin, found {quote(str(text))}") from None
