# SPDX-License-Identifier: Apache-2.0
"""The Secret that keeps the webhook's certificate, and the webhook configurations that make the API server trust it."""

import base64
from collections.abc import Mapping
from typing import Final

import msgspec

from aliquot.kube.errors import KubeNotFoundError, decode_reply
from aliquot.kube.requests import JSON_PATCH, MERGE_PATCH, namespaced, object_path
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.ports import SecretRecord, WebhookKind

_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1"


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str


class _Secret(msgspec.Struct):
    metadata: _Metadata
    data: dict[str, bytes] | None = None
    """msgspec reads base64 text into bytes."""


class _ClientConfig(msgspec.Struct, rename="camel"):
    ca_bundle: str = ""


class _Webhook(msgspec.Struct, rename="camel"):
    name: str
    client_config: _ClientConfig


class _Configuration(msgspec.Struct):
    webhooks: list[_Webhook] | None = None


class KubeCertificate:
    """Implements ``ports.CertificateApi``."""

    def __init__(self, connection: KubeConnection, namespace: str, secret: str, configuration: str) -> None:
        """Args: secret: its name. configuration: the name of both webhook configurations."""
        self._connection = connection
        self._collection = namespaced("secrets", namespace)
        self._path = object_path(self._collection, secret)
        self._secret = secret
        self._configuration = configuration

    async def read(self) -> SecretRecord | None:
        """See ``ports.CertificateApi``."""
        try:
            data = await self._connection.request("GET", self._path)
        except KubeNotFoundError:
            return None
        secret = decode_reply(data, _Secret, "a Secret")
        return SecretRecord(secret.data or {}, secret.metadata.resource_version)

    async def write(self, data: Mapping[str, bytes], version: str | None) -> None:
        """See ``ports.CertificateApi``."""
        if version is None:
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": self._secret}, "data": dict(data)}
            await self._connection.request("POST", self._collection, body=body)
            return
        patch = {"metadata": {"resourceVersion": version}, "data": dict(data)}
        await self._connection.request("PATCH", self._path, body=patch, content_type=MERGE_PATCH)

    async def trust(self, kind: WebhookKind, authorities: bytes) -> bool:
        """See ``ports.CertificateApi``."""
        path = object_path(f"{_CONFIGURATIONS}/{kind.value}", self._configuration)
        data = await self._connection.request("GET", path)
        webhooks = decode_reply(data, _Configuration, "a webhook configuration").webhooks or []
        bundle = base64.b64encode(authorities).decode()
        patch: list[dict[str, str]] = []
        for place, webhook in enumerate(webhooks):
            if webhook.client_config.ca_bundle != bundle:
                # In a JSON patch a webhook is known only by its place, which may have changed, so test the name too.
                patch.append({"op": "test", "path": f"/webhooks/{place}/name", "value": webhook.name})
                patch.append({"op": "add", "path": f"/webhooks/{place}/clientConfig/caBundle", "value": bundle})
        if patch:
            await self._connection.request("PATCH", path, body=patch, content_type=JSON_PATCH)
        return bool(patch)
