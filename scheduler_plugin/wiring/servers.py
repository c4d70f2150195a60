# SPDX-License-Identifier: Apache-2.0
"""The HTTP servers of one process, and the certificates that they serve."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from aliquot.contract import units
from aliquot.process.settings import split_address
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.authority import WebhookAuthority
from scheduler_plugin.adapters.certificate import expires_at
from scheduler_plugin.adapters.http import HttpServer, TlsFiles
from scheduler_plugin.adapters.kube_certificate import KubeCertificate
from scheduler_plugin.adapters.prometheus import Prometheus
from scheduler_plugin.adapters.serving_context import ServingContext
from scheduler_plugin.core.certificate import WEBHOOK_CONFIGURATION, host_names
from scheduler_plugin.dashboard.history import History
from scheduler_plugin.dashboard.pages import Dashboard
from scheduler_plugin.dashboard.picture import Painter, Picture
from scheduler_plugin.ports import ObjectApi
from scheduler_plugin.services.certificate_controller import CertificateController
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.settings import Settings
from scheduler_plugin.webhook.amounts import no_queue
from scheduler_plugin.wiring.cluster import Cluster
from scheduler_plugin.wiring.kueue import Kueue
from scheduler_plugin.wiring.leaders import Leaders
from scheduler_plugin.wiring.pages import StatusPages, explain_pages
from scheduler_plugin.wiring.scheduling import Scheduling
from scheduler_plugin.wiring.verbs import ExtenderVerbs, Nodes, webhook_verbs

WEBHOOK_BODY_BYTES: Final = 8 << 20
"""The API server's own limit for an object is 3 MiB."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the servers present to their clients."""

    files: TlsFiles | None
    """Certificate and key from files, without a CA for clients."""
    serving: ServingContext
    """What the controller serves."""
    controller: CertificateController | None
    """None if the certificate comes from files."""


def make_certificates(settings: Settings, connection: KubeConnection, cluster: Cluster) -> Certificates:
    """Construct what the settings name: certificate files, or a Secret and its controller."""
    files = TlsFiles(Path(settings.tls_cert_file), Path(settings.tls_key_file)) if settings.tls_cert_file else None
    serving, controller = ServingContext(), None
    if settings.webhook_address and settings.webhook_certificate_secret:
        store = KubeCertificate(connection, settings.lease_namespace, settings.webhook_certificate_secret, WEBHOOK_CONFIGURATION)
        names = host_names(settings.lease_namespace)
        controller = CertificateController(store, WebhookAuthority(), serving, cluster.clock, names)
    return Certificates(files, serving, controller)


def watch_certificates(certificates: Certificates, telemetry: Telemetry) -> None:
    """Export when the first of the certificates expires."""
    ends: list[Callable[[], float]] = []
    if certificates.files is not None:
        ends.append(partial(expires_at, certificates.files.certificate))
    if certificates.controller is not None:
        ends.append(certificates.controller.ends_at)
    if ends:
        telemetry.watch_certificate(lambda: min(end() for end in ends))


class Servers:
    """The servers that the settings name: extender and status always, webhook and dashboard if they have an address."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        leaders: Leaders,
        scheduling: Scheduling,
        certificates: Certificates,
        objects: ObjectApi,
        kueue: Kueue | None,
    ) -> None:
        self._settings = settings
        self._objects = objects
        self._kueue = kueue
        self._cluster = cluster
        self._leaders = leaders
        self._scheduling = scheduling
        self._certificates = certificates
        self._prometheus = Prometheus(settings.prometheus_url) if settings.prometheus_url else None
        self._verbs = ExtenderVerbs(
            cluster.context, scheduling.binder, leaders, scheduling.telemetry, scheduling.nominator, settings.answer
        )
        self.by_name = {"extender": self._extender()}
        if settings.webhook_address:
            self.by_name["webhook"] = self._webhook()
        if settings.dashboard_address:
            self.by_name["dashboard"] = self._dashboard()
        self.by_name["status"] = self._status()

    async def stop(self) -> None:
        """Stop all servers."""
        for server in self.by_name.values():
            await server.stop()
        if self._prometheus is not None:
            await self._prometheus.close()

    def _extender(self) -> HttpServer:
        settings, files = self._settings, self._certificates.files
        host, port = split_address("extenderAddress", settings.extender_address)
        tls = TlsFiles(files.certificate, files.key, Path(settings.client_ca_file)) if files and settings.client_ca_file else None
        self._cluster.watch.on_waiting = self._verbs.expect
        return HttpServer(host, port, verbs=self._verbs.by_path(), max_body_bytes=settings.max_body_mib * units.MIB, tls=tls)

    def _webhook(self) -> HttpServer:
        host, port = split_address("webhookAddress", self._settings.webhook_address)
        certificates = self._certificates
        tls = certificates.files if certificates.controller is None else certificates.serving.context
        scheduling, cluster = self._scheduling, self._cluster
        find_queue = no_queue if self._kueue is None else self._kueue.objects.queue
        nodes, foretell = Nodes(cluster.watch.directory, find_queue), self._verbs.foretell
        verbs = webhook_verbs(self._settings, cluster.context, scheduling.telemetry, self._objects, scheduling.templates, foretell, nodes)
        return HttpServer(host, port, verbs=verbs, max_body_bytes=WEBHOOK_BODY_BYTES, tls=tls)

    def _dashboard(self) -> HttpServer:
        host, port = split_address("dashboardAddress", self._settings.dashboard_address)
        context, watch, prometheus = self._cluster.context, self._cluster.watch, self._prometheus
        painter = Painter(context.state, lambda: (context.held_room.held, context.held_room.outlook))

        def picture() -> Iterator[Picture | None]:
            waiting = context.decisions.waiting()
            return painter.draw(waiting, leads=self._leaders.leads, trouble=watch.trouble, history=prometheus is not None)

        history = None if prometheus is None else History(prometheus, self._cluster.clock.now)
        return HttpServer(host, port, pages=Dashboard(picture, history).pages())

    def _status(self) -> HttpServer:
        host, port = split_address("metricsAddress", self._settings.metrics_address)
        kueue = self._kueue if self._settings.webhook_address else None
        pages = dict(StatusPages(self._scheduling.telemetry, self._leaders, self._certificates.controller, kueue).by_path())
        if self._settings.explain_pages:
            pages |= explain_pages(self._scheduling.explainer)
        return HttpServer(host, port, pages=pages)
