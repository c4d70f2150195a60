# SPDX-License-Identifier: Apache-2.0
"""Decides whether a pod's vGPUs become ResourceClaims, who allocates a pod's claims, and which claims are for our GPUs.

Most nodes give out their GPUs in one way, so a pod can run on one kind of node only, and on nodes that give them out in both.

The label ``aliquot.dev/allocation`` of the pod decides, then that of its namespace, with the values ``dra``, ``planned`` and ``plugin``.
Without a label the nodes decide: vGPUs become planned claims if a node has ``planned``, else claims if a node has ``dra`` or there is no
node with GPUs yet. A pod's own claims are planned if a node has ``planned`` or ``both``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.contract.model import Allocation
from aliquot.kube.errors import KubeApiError
from aliquot.kube.requests import namespaced, object_path
from aliquot.placement.request import RequestError
from scheduler_plugin.core.claims.templates import is_ours
from scheduler_plugin.ports import ObjectApi
from scheduler_plugin.webhook.draft import Draft

KEPT_SECONDS: Final = 5.0
"""How long the label of a namespace that was just read is not read again: a Deployment makes many pods at once."""
MOST_KEPT: Final = 1024
RESOURCES: Final = "apis/resource.k8s.io/v1"
_WORDS: Final = tuple(word for word in Allocation if word is not Allocation.BOTH)
"""A pod gets each of its GPUs in one way, so ``both`` is a word for nodes only."""


class AllocationRule:
    """Knows the nodes' interfaces, and reads the labels of namespaces."""

    def __init__(
        self,
        nodes: Callable[[], Iterable[Allocation]],
        objects: ObjectApi,
        monotonic: Callable[[], float],
        is_our_class: Callable[[str], bool] = lambda _: True,
        is_our_resource: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Make it.

        Args:
            nodes: returns the allocation of each node with GPUs.
            is_our_class: whether a DeviceClass may select GPUs of Aliquot.
            is_our_resource: whether such a class gives out an extended resource.
        """
        self._nodes = nodes
        self._is_our_class = is_our_class
        self._is_our_resource = is_our_resource
        self._objects = objects
        self._monotonic = monotonic
        self._kept: dict[str, tuple[float, Allocation | None]] = {}

    async def of(self, pod: Mapping[str, Any], namespace: str) -> Allocation:
        """Return how a pod gets its vGPUs. Raises RequestError: a label is invalid, or the namespace's is not known now."""
        stated = await self._stated_for(pod, namespace)
        if stated is not None:
            return stated
        nodes = set(self._nodes())
        if Allocation.PLANNED in nodes:
            return Allocation.PLANNED
        return Allocation.DRA if Allocation.DRA in nodes or not nodes else Allocation.PLUGIN

    async def plans_claims(self, pod: Mapping[str, Any], namespace: str) -> bool:
        """Whether our scheduler allocates a pod's claims. The word ``plugin`` is about vGPUs only. Raises RequestError, as ``of``."""
        stated = await self._stated_for(pod, namespace)
        if stated in (None, Allocation.PLUGIN):
            return any(allocation.is_planned for allocation in self._nodes())
        return stated is Allocation.PLANNED

    async def _stated_for(self, pod: Mapping[str, Any], namespace: str) -> Allocation | None:
        """Return what the labels of a pod and its namespace say; None without a label. Raises RequestError."""
        stated = _stated((pod.get("metadata") or {}).get("labels"), "pod")
        return await self._of_namespace(namespace) if stated is None else stated

    async def claims_ours(self, pod: Mapping[str, Any], namespace: str) -> bool:
        """Whether a claim of a pod is for GPUs of Aliquot, or may be: one that cannot be read now counts."""
        for one in (pod.get("spec") or {}).get("resourceClaims") or ():
            template, claim = one.get("resourceClaimTemplateName"), one.get("resourceClaimName")
            if is_ours(str(template or "")):
                return True
            plural, name = ("resourceclaimtemplates", template) if template else ("resourceclaims", claim)
            if name and await self._may_be_ours(object_path(namespaced(plural, namespace, RESOURCES), str(name))):
                return True
        return False

    def asks_ours(self, pod: Mapping[str, Any]) -> bool:
        """Whether a pod asks for GPUs of Aliquot by the resource of a DeviceClass. Raises RequestError: this is no pod."""
        return any(self._is_our_resource(name) for one in Draft(pod).containers for name in (*one.limits, *one.requests))

    async def _may_be_ours(self, path: str) -> bool:
        try:
            found = await self._objects.get_object(path)
        except KubeApiError:
            return True
        return found is None or any(self._is_our_class(name) for name in _classes_in(found))

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


def _classes_in(claim_or_template: Mapping[str, Any]) -> Iterator[str]:
    """Yield the classes that a ResourceClaim or its template names; empty texts too."""
    spec = claim_or_template.get("spec") or {}
    devices = (spec.get("spec") or spec).get("devices") or {}
    for request in devices.get("requests") or ():
        for stated in (request.get("exactly") or {}, *(request.get("firstAvailable") or ())):
            yield str(stated.get("deviceClassName") or "")


def _stated(labels: object, where: str) -> Allocation | None:
    """Return what a label says; None without it. Raises RequestError."""
    text = labels.get(contract.LABEL_ALLOCATION) if isinstance(labels, Mapping) else None
    if text is None:
        return None
    if text not in _WORDS:
        raise RequestError(f"label {contract.LABEL_ALLOCATION} of the {where}: expected dra, planned or plugin, found {quote(str(text))}")
    return Allocation(text)
