# SPDX-License-Identifier: Apache-2.0
"""The pages of the status address: metrics, health, readiness and explanations."""

import importlib.metadata
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from aliquot import contract
from scheduler_plugin.adapters.http import Page, PageMaker
from scheduler_plugin.services.certificate_controller import CertificateController
from scheduler_plugin.services.explainer import Explainer, Reply
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.wiring.kueue import Kueue
from scheduler_plugin.wiring.leaders import Leaders


class StatusPages:
    """/metrics, /healthz and /readyz."""

    def __init__(self, telemetry: Telemetry, leaders: Leaders, certificate: CertificateController | None, kueue: Kueue | None) -> None:
        """Args: certificate, kueue: what the webhook needs; None if it needs none."""
        self._telemetry = telemetry
        self._leaders = leaders
        self._certificate = certificate
        self._kueue = kueue

    def by_path(self) -> Mapping[str, PageMaker]:
        """Return the pages by path."""
        return {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._ready}

    def _metrics(self, request: web.Request) -> Page:
        del request
        return Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, self._telemetry.page())

    def _health(self, request: web.Request) -> Page:
        del request
        version = importlib.metadata.version(contract.PRODUCT)
        return Page(HTTPStatus.OK, "text/plain", f"aliquot scheduler {version}\n".encode())

    def _ready(self, request: web.Request) -> Page:
        del request
        trouble = self._webhook_trouble() if self._leaders.ready else self._leaders.trouble
        if trouble:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{trouble}\n".encode())
        return Page(HTTPStatus.OK, "text/plain", b"ready\n")

    def _webhook_trouble(self) -> str:
        if self._certificate is not None and not self._certificate.serves:
            return f"the webhook has no certificate: {self._certificate.trouble or 'it is being created'}"
        return self._kueue.trouble if self._kueue is not None else ""


def explain_pages(explainer: Explainer) -> Mapping[str, PageMaker]:
    """Return the pages that explain decisions, by path."""

    async def of_pod(request: web.Request, query: Callable[[str, str], Awaitable[Reply]]) -> Page:
        namespace, pod = request.query.get("namespace", "default"), request.query.get("pod", "")
        if not pod:
            return Page(HTTPStatus.BAD_REQUEST, "text/plain", b"expected ?namespace=...&pod=...\n")
        return _page(await query(namespace, pod))

    async def of_cluster(request: web.Request, query: Callable[[], Awaitable[Reply]]) -> Page:
        del request
        return _page(await query())

    return {
        "/explain/why": partial(of_pod, query=explainer.why),
        "/explain/snapshot": partial(of_cluster, query=explainer.snapshot),
        "/decisions": partial(of_cluster, query=explainer.decisions),
        "/decisions/record": partial(of_pod, query=explainer.record),
    }


def _page(reply: Reply) -> Page:
    content_type = "application/json" if reply.status == HTTPStatus.OK else "text/plain"
    return Page(reply.status, content_type, reply.body)
