# SPDX-License-Identifier: Apache-2.0
"""Requests that allocate ResourceClaims (resource.k8s.io/v1), and that open the gates of their pods.

Each write states the version of the claim that it changes: of two writers, one is refused.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract.errors import AliquotError
from aliquot.kube.errors import KubeApiError, KubeNotFoundError
from aliquot.kube.requests import MERGE_PATCH, STRATEGIC_PATCH, namespaced, object_path, pod_path
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.core.claims.planned import FINALIZER
from scheduler_plugin.core.claims.stored import StoredClaim, decode_claim
from scheduler_plugin.core.cluster.pods import PodFacts

_API: Final = "apis/resource.k8s.io/v1"
_PLURAL: Final = "resourceclaims"


class KubeClaims:
    """Implements ``ports.ClaimApi``."""

    def __init__(self, connection: KubeConnection) -> None:
        self._connection = connection

    async def read(self, claim: StoredClaim) -> StoredClaim | None:
        """See ``ports.ClaimApi``."""
        try:
            return _read(await self._connection.request("GET", _path(claim)))
        except KubeNotFoundError:
            return None

    async def protect(self, claim: StoredClaim) -> StoredClaim:
        """See ``ports.ClaimApi``. The patch replaces the list, which the version makes safe."""
        return await self._patch(claim, {"metadata": {"finalizers": [*claim.finalizers, FINALIZER]}})

    async def allocate(self, claim: StoredClaim, allocation: Mapping[str, Any], pod: PodFacts) -> StoredClaim:
        """See ``ports.ClaimApi``."""
        user = {"resource": "pods", "name": pod.name, "uid": pod.uid}
        return await self._patch(claim, {"status": {"allocation": allocation, "reservedFor": [user]}}, "status")

    async def free(self, claim: StoredClaim) -> StoredClaim:
        """See ``ports.ClaimApi``."""
        return await self._patch(claim, {"status": {"allocation": None, "reservedFor": None, "devices": None}}, "status")

    async def open_gate(self, pod: PodFacts) -> None:
        """See ``ports.ClaimApi``. The strategic patch removes this one entry, whatever the other gates are now."""
        patch = {"metadata": {"uid": pod.uid}, "spec": {"schedulingGates": [{"$patch": "delete", "name": contract.PLANNED}]}}
        await self._connection.request("PATCH", pod_path(pod.namespace, pod.name), body=patch, content_type=STRATEGIC_PATCH)

    async def _patch(self, claim: StoredClaim, patch: Mapping[str, Any], subresource: str = "") -> StoredClaim:
        expected = {"uid": claim.uid, "resourceVersion": claim.version}
        body = {**patch, "metadata": {**patch.get("metadata", {}), **expected}}
        return _read(await self._connection.request("PATCH", _path(claim, subresource), body=body, content_type=MERGE_PATCH))


def _path(claim: StoredClaim, subresource: str = "") -> str:
    namespace, name = claim.key
    return object_path(namespaced(_PLURAL, namespace, _API), name, subresource)


def _read(data: bytes) -> StoredClaim:
    try:
        return decode_claim(data)
    except (AliquotError, msgspec.MsgspecError) as exc:
        raise KubeApiError(f"the API replied with a ResourceClaim that cannot be read: {exc}") from exc
