"""The Secret that keeps the webhook's certificate, and the webhook configurations whose callers are to trust it."""

import base64
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from scheduler_plugin.adapters.kube import KubeConnection
from scheduler_plugin.errors import KubeApiError, KubeNotFoundError
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
        self._collection = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets"
        self._secret = secret
        self._configuration = configuration

    async def read(self) -> SecretRecord | None:
        """See ``ports.CertificateApi``."""
        try:
            data = await self._connection.request("GET", self._path)
        except KubeNotFoundError:
            return None
        try:
            secret = msgspec.json.decode(data, type=_Secret)
        except msgspec.DecodeError as exc:
            raise KubeApiError(f"the API answered with something that is no Secret: {exc}") from exc
        return SecretRecord(secret.data or {}, secret.metadata.resource_version)

    async def write(self, data: Mapping[str, bytes], version: str | None) -> None:
        """See ``ports.CertificateApi``."""
        if version is None:
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": self._secret}, "data": dict(data)}
            await self._connection.request("POST", self._collection, body=body)
            return
        patch = {"metadata": {"resourceVersion": version}, "data": dict(data)}
        await self._connection.request("PATCH", self._path, body=patch, content_type="application/merge-patch+json")

    async def trust(self, kind: WebhookKind, authorities: bytes) -> bool:
        """See ``ports.CertificateApi``."""
        path = f"{_CONFIGURATIONS}/{kind.value}/{quote(self._configuration, safe='')}"
        data = await self._connection.request("GET", path)
        try:
            webhooks = msgspec.json.decode(data, type=_Configuration).webhooks or []
        except msgspec.DecodeError as exc:
            raise KubeApiError(f"the API answered with something that is no webhook configuration: {exc}") from exc
        bundle = base64.b64encode(authorities).decode()
        patch: list[dict[str, str]] = []
        for place, webhook in enumerate(webhooks):
            if webhook.client_config.ca_bundle != bundle:
                # The name is tested because webhooks have no key in a JSON patch but their place, which may have changed.
                patch.append({"op": "test", "path": f"/webhooks/{place}/name", "value": webhook.name})
                patch.append({"op": "add", "path": f"/webhooks/{place}/clientConfig/caBundle", "value": bundle})
        if patch:
            await self._connection.request("PATCH", path, body=patch, content_type="application/json-patch+json")
        return bool(patch)

    @property
    def _path(self) -> str:
        return f"{self._collection}/{quote(self._secret, safe='')}"
