# SPDX-License-Identifier: Apache-2.0
"""Requests about the ResourceClaimTemplates that the webhook makes (resource.k8s.io/v1), and about the pods that name them."""

from collections.abc import AsyncIterator, Set
from datetime import datetime
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.kube.errors import KubeNotFoundError, decode_reply
from aliquot.kube.requests import MERGE_PATCH, namespaced, object_path, timestamp, with_options
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube import LIST_SECONDS, PAGE_SIZE
from scheduler_plugin.core.claims.templates import ClaimTemplate
from scheduler_plugin.ports import TemplateRecord

API_VERSION: Final = "resource.k8s.io/v1"
_PLURAL: Final = "resourceclaimtemplates"
_API: Final = f"apis/{API_VERSION}"
_OURS: Final = {contract.LABEL_TRANSLATED: "true"}


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class _TemplateSpec(msgspec.Struct):
    spec: Any = None


class _Template(msgspec.Struct):
    metadata: _Metadata
    spec: _TemplateSpec = msgspec.field(default_factory=_TemplateSpec)


class _PageMetadata(msgspec.Struct):
    continue_: str | None = msgspec.field(default=None, name="continue")


class _Claim(msgspec.Struct, rename="camel"):
    resource_claim_template_name: str | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    resource_claims: list[_Claim] | None = None


class _Pod(msgspec.Struct):
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _TemplatePage(msgspec.Struct):
    metadata: _PageMetadata
    items: list[_Template] | None = None


class _PodPage(msgspec.Struct):
    metadata: _PageMetadata
    items: list[_Pod] | None = None


class KubeTemplates:
    """Implements ``ports.TemplateApi``."""

    def __init__(self, connection: KubeConnection) -> None:
        self._connection = connection

    async def read(self, namespace: str, name: str) -> TemplateRecord | None:
        """See ``ports.TemplateApi``."""
        try:
            data = await self._connection.request("GET", _path(namespace, name))
        except KubeNotFoundError:
            return None
        return _record(decode_reply(data, _Template, "a ResourceClaimTemplate"))

    async def create(self, namespace: str, template: ClaimTemplate, now: float) -> None:
        """See ``ports.TemplateApi``."""
        metadata = {"name": template.name, "namespace": namespace, "labels": _OURS, "annotations": _used(now)}
        body = {"apiVersion": API_VERSION, "kind": "ResourceClaimTemplate", "metadata": metadata, "spec": {"spec": template.spec}}
        await self._connection.request("POST", namespaced(_PLURAL, namespace, _API), body=body)

    async def touch(self, namespace: str, name: str, now: float) -> None:
        """See ``ports.TemplateApi``."""
        patch = {"metadata": {"annotations": _used(now)}}
        await self._connection.request("PATCH", _path(namespace, name), body=patch, content_type=MERGE_PATCH)

    async def listed(self) -> list[TemplateRecord]:
        """See ``ports.TemplateApi``."""
        path = with_options(f"/{_API}/{_PLURAL}", labelSelector=f"{contract.LABEL_TRANSLATED}=true")
        return [_record(item) async for item in self._pages(path, _TemplatePage)]

    async def used(self, namespace: str) -> Set[str]:
        """See ``ports.TemplateApi``."""
        claims = [claim async for pod in self._pages(namespaced("pods", namespace), _PodPage) for claim in pod.spec.resource_claims or ()]
        return {claim.resource_claim_template_name for claim in claims if claim.resource_claim_template_name}

    async def delete(self, record: TemplateRecord) -> None:
        """See ``ports.TemplateApi``."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"resourceVersion": record.version}}
        await self._connection.request("DELETE", _path(record.namespace, record.name), body=options)

    async def _pages(self, path: str, kind: Any) -> AsyncIterator[Any]:
        """Yield the objects of a collection, read in pages."""
        following = ""
        while True:
            part = with_options(path, limit=str(PAGE_SIZE), **({"continue": following} if following else {}))
            page = decode_reply(await self._connection.request("GET", part, seconds=LIST_SECONDS), kind, "a list")
            for item in page.items or ():
                yield item
            following = page.metadata.continue_ or ""
            if not following:
                return


def _path(namespace: str, name: str) -> str:
    return object_path(namespaced(_PLURAL, namespace, _API), name)


def _used(now: float) -> dict[str, str]:
    return {contract.ANNOTATION_LAST_USED: timestamp(now)}


def _record(item: _Template) -> TemplateRecord:
    metadata = item.metadata
    text = (metadata.annotations or {}).get(contract.ANNOTATION_LAST_USED, "")
    return TemplateRecord(metadata.namespace, metadata.name, metadata.resource_version, _seconds(text), item.spec.spec)


def _seconds(text: str) -> float:
    """Return a time in seconds since 1970; 0 for a text without one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
