"""Starts the scheduler: reads the settings, makes every adapter, and runs the services until it is told to stop.

Ready means: the state was built from full lists, and, where replicas elect their leader, this one leads and has listed the pods since it
does: behind a Service, readiness sends the calls to the leader. Beside kube-scheduler on loopback a lease of ours is not needed, and all
replicas are ready, for the webhook; decisions are made where kube-scheduler leads and the pods were listed since it does.
"""

import asyncio
import gc
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from program.api_server import find_api_server
from program.log_format import configure_logging
from program.settings import SettingsError, split_address
from proto import contract, gpunode, units
from proto.model import Preferences
from scheduler_plugin.adapters.authority import WebhookAuthority
from scheduler_plugin.adapters.certificate import expires_at
from scheduler_plugin.adapters.clock import SystemClock
from scheduler_plugin.adapters.http import HttpServer, Page, PageMaker, TlsFiles, Verb
from scheduler_plugin.adapters.kube import KubeConnection, KubeEvents, KubeLease, KubePods
from scheduler_plugin.adapters.kube_certificate import KubeCertificate
from scheduler_plugin.adapters.kube_watch import Stream
from scheduler_plugin.adapters.prometheus import Prometheus
from scheduler_plugin.adapters.serving_context import ServingContext
from scheduler_plugin.core.budgets import Budget
from scheduler_plugin.core.certificate import WEBHOOK_CONFIGURATION, host_names
from scheduler_plugin.core.columnar import device_sizes
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.journal import Rules
from scheduler_plugin.core.objects import BudgetObject, NodeObject, PodObject, budget_facts, host_amounts, pod_facts
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.shapes import Shapes
from scheduler_plugin.core.state import ClusterState
from scheduler_plugin.dashboard.history import History
from scheduler_plugin.dashboard.pages import Dashboard
from scheduler_plugin.dashboard.picture import Painter, Picture
from scheduler_plugin.errors import NotReadyError, SchedulerError
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.ahead import plan_ahead
from scheduler_plugin.extender.bind import BOUND, Binder
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.services.certificate_keeper import CertificateKeeper
from scheduler_plugin.services.cluster_metrics import ClusterCollector
from scheduler_plugin.services.cluster_watch import ClusterWatch, NamedHost, Source
from scheduler_plugin.services.explainer import Answer, Explainer
from scheduler_plugin.services.forethought import Forethought
from scheduler_plugin.services.leadership import FOLLOW_SECONDS, Following, Leadership
from scheduler_plugin.services.new_victims import NewVictims
from scheduler_plugin.services.preemptor import Preemptor
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.succeeded_members import SucceededMembers
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.services.waiting_events import WaitingEvents
from scheduler_plugin.settings import Settings
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.review import Reviews
from scheduler_plugin.webhook.vocabularies import Options

logger = logging.getLogger("scheduler_plugin")

PODS_PATH = "/api/v1/pods?fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
NODES_PATH = "/api/v1/nodes"
BUDGETS_PATH = "/apis/policy/v1/poddisruptionbudgets"
GPU_NODES_PATH = f"/apis/{gpunode.API_VERSION}/{contract.GPU_NODE_PLURAL}"
YOUNG_OBJECTS = 20_000
"""How many more objects there must be than at its last look before the garbage collector looks again."""
WEBHOOK_BODY_BYTES = 8 << 20
"""The API server's own limit is 3 MiB for an object."""
TAKEOVER_SECONDS = 3.0
"""How long a call waits after a takeover until the pods are listed; kube-scheduler waits 5 s for its answer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scheduler; return the exit code: 2 for wrong settings, 1 for a failure, 0 after a signal."""
    try:
        settings = Settings.load(sys.argv[1:] if argv is None else argv, os.environ)
        configure_logging(settings.log_level, settings.log_format)
        asyncio.run(_run(settings, os.environ))
    except SettingsError as exc:
        print(f"aliquot scheduler: {exc}", file=sys.stderr)
        return 2
    except SchedulerError as exc:
        logger.critical("%s", exc)
        return 1
    return 0


async def _run(settings: Settings, environ: Mapping[str, str]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = find_api_server(settings.kube_api_url, settings.kube_token_file, settings.kube_ca_file, environ)
    connection = KubeConnection(server)
    try:
        await Scheduler(settings, connection).run(stop)
    finally:
        await connection.close()


class Scheduler:
    """All parts of one scheduler, wired."""

    def __init__(self, settings: Settings, connection: KubeConnection) -> None:
        clock = SystemClock()
        self._clock = clock
        self._settings = settings
        self.addresses: dict[str, str] = {}
        """Where each server listens, once it does."""
        self._telemetry = Telemetry()
        self._state = ClusterState()
        self._painter = Painter(self._state)
        self._prometheus = Prometheus(settings.prometheus_url) if settings.prometheus_url else None
        self._desk = Desk(
            self._state,
            Shapes(self._state, settings.weights),
            settings.policy,
            settings.soft_seconds,
            monotonic=clock.monotonic,
            now=clock.now,
            gang_seconds=settings.gang_seconds,
        )
        self._forethought = Forethought(self._desk.prepare)
        self._desk.gangs.on_attempt = self._telemetry.count_gang
        self._watch = ClusterWatch(self._state, self._desk.budgets, clock)
        self._watch.on_pod_gone = self._desk.decisions.forget
        self._watch.on_nominated = self._desk.follow
        self._watch.on_synced = settle_memory
        self._explainer = Explainer(self._desk, Rules(settings.policy, settings.weights), clock.now, self._watch.age_seconds)
        events = KubeEvents(connection, clock)
        self._events = WaitingEvents(self._explainer, events, self._desk.decisions.by_uid, clock.monotonic)
        self._desk.on_decision = self._on_decision
        self._desk.on_invalid = self._telemetry.count_invalid
        pods = KubePods(connection)
        self._pods_stream = Stream("pods", PODS_PATH, decode_pod, connection, self._watch.pods)
        self._streams = (
            Stream("gpunodes", GPU_NODES_PATH, gpunode.decode_gpu_node, connection, self._watch.inventories),
            Stream("nodes", NODES_PATH, decode_host, connection, self._watch.hosts),
            Stream("poddisruptionbudgets", BUDGETS_PATH, decode_budget, connection, self._watch.budgets),
            self._pods_stream,
        )
        self._leadership: Leadership | None = None
        if settings.lease_name:
            lease = KubeLease(connection, settings.lease_namespace, settings.lease_name, clock)
            self._leadership = Leadership(lease, clock, f"{socket.gethostname()}_{uuid.uuid4()}")
            self._leadership.on_acquired = self._pods_stream.relist
        self._following: Following | None = None
        if settings.scheduler_lease:
            lease = KubeLease(connection, settings.lease_namespace, settings.scheduler_lease, clock, FOLLOW_SECONDS)
            self._following = Following(lease, clock, socket.gethostname(), lambda: self._watch.told_at(Source.PODS))
            self._following.on_acquired = self._pods_stream.relist
        self._binder = Binder(self._desk, pods, lambda: self.decides, self._look_who_leads)
        self._retry = Retry(
            self._desk, pods, lambda: self.decides, lambda: self._watch.told_at(Source.PODS), self._telemetry, settings.scheduler_name
        )
        self._preemptor = Preemptor(self._desk, pods, events, self._retry.poke, lambda: self.decides, clock.now, self._telemetry)
        self._new_victims = NewVictims(
            self._desk, self._retry.poke, lambda: self._retry.undecided, self._preemptor.look_again, lambda: self.decides
        )
        self._succeeded = SucceededMembers(self._desk, pods, lambda: self.decides)
        self._desk.on_preemption = self._telemetry.count_preemption
        queues = {"open_bindings": lambda: self._binder.open_bindings, "waiting_gangs": lambda: self._desk.gangs.waiting}
        self._telemetry.registry.register(ClusterCollector(self._state, self._desk.decisions, queues, self._watch.lag_seconds))
        self._telemetry.watch_state(self._state, self._watch.age_seconds, lambda: self.leads and self._is_beside_leader)
        self._ending = False
        self._serving = ServingContext()
        self._keeper: CertificateKeeper | None = None
        if settings.webhook_address and settings.webhook_certificate_secret:
            store = KubeCertificate(connection, settings.lease_namespace, settings.webhook_certificate_secret, WEBHOOK_CONFIGURATION)
            self._keeper = CertificateKeeper(store, WebhookAuthority(), self._serving, clock, host_names(settings.lease_namespace))
        self._servers = self._make_servers()

    @property
    def leads(self) -> bool:
        """Whether this replica is the leader."""
        return self._leadership is None or self._leadership.leads

    @property
    def ready(self) -> bool:
        """Whether this replica may be called."""
        if self._ending or not self._watch.synced or not self.leads:
            return False
        return self._leadership is None or self._has_listed_since(self._leadership.acquired_at)

    @property
    def decides(self) -> bool:
        """Whether decisions of this replica may be acted upon."""
        if not self.ready or not self._is_beside_leader:
            return False
        return self._following is None or self._has_listed_since(self._following.acquired_at)

    @property
    def _is_beside_leader(self) -> bool:
        return self._following is None or self._following.leads

    def _has_listed_since(self, moment: float) -> bool:
        return self._watch.told_at(Source.PODS) >= moment

    async def _look_who_leads(self) -> None:
        if self._following is not None:
            await self._following.look()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``."""
        for name, server in self._servers.items():
            self.addresses[name] = await server.start()
            logger.info("%s listens on %s", name, self.addresses[name])
        await self._look_who_leads()  # beside a leader the first list is enough
        loops = [
            *(stream.run() for stream in self._streams),
            self._retry.run(),
            self._events.run(),
            self._succeeded.run(),
            self._new_victims.run(),
        ]
        if self._settings.gpu_preemption:
            loops.append(self._preemptor.run())
        if self._leadership is not None:
            loops.append(self._leadership.run())
        if self._following is not None:
            loops.append(self._following.run())
        if self._keeper is not None:
            loops.append(self._keeper.run())
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ending = True
            await self._binder.stop()
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            if stop.is_set() and "webhook" in self._servers:
                await asyncio.sleep(self._settings.linger_seconds)
            for server in self._servers.values():
                await server.stop()
            if self._prometheus is not None:
                await self._prometheus.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    # --- servers ---

    def _make_servers(self) -> dict[str, HttpServer]:
        settings = self._settings
        tls = TlsFiles(Path(settings.tls_cert_file), Path(settings.tls_key_file)) if settings.tls_cert_file else None
        ends: list[Callable[[], float]] = [] if tls is None else [partial(expires_at, tls.certificate)]
        if self._keeper is not None:
            ends.append(self._keeper.ends_at)
        if ends:
            self._telemetry.watch_certificate(lambda: min(end() for end in ends))
        host, port = split_address("extenderAddress", settings.extender_address)
        mutual = tls and settings.client_ca_file
        extender_tls = TlsFiles(tls.certificate, tls.key, Path(settings.client_ca_file)) if tls and mutual else None
        servers = {
            "extender": HttpServer(
                host, port, verbs=self._extender_verbs(), max_body_bytes=settings.max_body_mib * units.MIB, tls=extender_tls
            )
        }
        if settings.webhook_address:
            host, port = split_address("webhookAddress", settings.webhook_address)
            webhook_tls = tls if self._keeper is None else self._serving.context
            servers["webhook"] = HttpServer(host, port, verbs=self._webhook_verbs(), max_body_bytes=WEBHOOK_BODY_BYTES, tls=webhook_tls)
        if settings.dashboard_address:
            host, port = split_address("dashboardAddress", settings.dashboard_address)
            history = None if self._prometheus is None else History(self._prometheus, self._clock.now)
            servers["dashboard"] = HttpServer(host, port, pages=Dashboard(self._picture, history).pages())
        host, port = split_address("metricsAddress", settings.metrics_address)
        pages: dict[str, PageMaker] = {"/metrics": self._metrics_page, "/healthz": self._health_page, "/readyz": self._ready_page}
        servers["status"] = HttpServer(host, port, pages=pages | (self._explain_pages() if settings.explain_pages else {}))
        return servers

    def _extender_verbs(self) -> dict[str, Verb]:
        return {
            "/filter": _telling(self._timed_filter, wire.filter_failure),
            "/prioritize": self._timed("prioritize", self._prioritize),
            "/preempt": self._timed_preempt,
            "/bind": _telling(self._timed_bind, wire.bind_result),
        }

    def _timed(self, name: str, verb: Callable[[bytes], bytes]) -> Verb:
        async def handle(body: bytes) -> bytes:
            with self._telemetry.timing(name):
                await self._check_decides()
                return verb(body)

        return handle

    async def _timed_filter(self, body: bytes) -> bytes:
        with self._telemetry.timing("filter"):
            await self._check_decides()
            await plan_ahead(self._desk, body)
            return filter_nodes(self._desk, body, self._clock.now())

    def _prioritize(self, body: bytes) -> bytes:
        answer = prioritize_nodes(self._desk, body)
        self._forethought.called()
        return answer

    async def _timed_preempt(self, body: bytes) -> bytes:
        with self._telemetry.timing("preempt"):
            await self._check_decides()
            return await choose_victims(self._desk, body)

    async def _timed_bind(self, body: bytes) -> bytes:
        with self._telemetry.timing("bind") as call:
            await self._check_decides()
            self._forethought.called()  # other calls come while the API takes the binding
            answer = await self._binder.bind(body)
            call.refused = answer != BOUND
            return answer

    async def _check_decides(self) -> None:
        """Check that this call may be answered, once the pods are listed after a takeover. Raises NotReadyError."""
        if self._following is not None:
            await self._following.called()
        with suppress(TimeoutError):
            async with asyncio.timeout(TAKEOVER_SECONDS):
                while self.ready and self._is_beside_leader and not self.decides:
                    await self._watch.next_answer()
        if not self.decides:
            raise NotReadyError(self._trouble())

    def _webhook_verbs(self) -> dict[str, Verb]:
        options = Options(self._device_sizes, self._settings.adopt_nvidia_gpu, self._settings.count_whole_gpus)
        normaliser = Normaliser(options, self._settings.scheduler_name, tolerate_gpu_taint=self._settings.tolerate_gpu_taint)
        reviews = Reviews(normaliser, self._telemetry.count_admission)
        return {"/mutate": reviews.mutate, "/validate": reviews.validate}

    def _device_sizes(self, preferences: Preferences) -> Collection[int]:
        return device_sizes(self._state.columns, preferences)

    def _on_decision(self, decision: Decision) -> None:
        self._telemetry.count_decision(decision)
        self._events.note(decision)

    # --- pages ---

    def _explain_pages(self) -> dict[str, PageMaker]:
        async def of_pod(request: web.Request, ask: Callable[[str, str], Awaitable[Answer]]) -> Page:
            namespace, pod = request.query.get("namespace", "default"), request.query.get("pod", "")
            if not pod:
                return Page(HTTPStatus.BAD_REQUEST, "text/plain", b"expected ?namespace=...&pod=...\n")
            return _page(await ask(namespace, pod))

        async def whole(request: web.Request, ask: Callable[[], Awaitable[Answer]]) -> Page:
            del request
            return _page(await ask())

        explainer = self._explainer
        return {
            "/explain/why": partial(of_pod, ask=explainer.why),
            "/explain/snapshot": partial(whole, ask=explainer.snapshot),
            "/decisions": partial(whole, ask=explainer.decisions),
            "/decisions/record": partial(of_pod, ask=explainer.record),
        }

    def _picture(self) -> Iterator[Picture | None]:
        waiting, history = self._desk.decisions.waiting(), self._prometheus is not None
        return self._painter.draw(waiting, leads=self.leads, trouble=self._watch.trouble, history=history)

    def _trouble(self) -> str:
        if self._ending:
            return "this replica was told to end"
        if self._watch.trouble:
            return self._watch.trouble
        leads = self.leads and self._is_beside_leader
        return "the pods are being listed after the lease was taken" if leads else "another replica leads"

    def _webhook_trouble(self) -> str:
        if self._keeper is None or self._keeper.serves:
            return ""
        return f"the webhook has no certificate: {self._keeper.trouble or 'it is being made'}"

    def _metrics_page(self, request: web.Request) -> Page:
        del request
        return Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, self._telemetry.page())

    def _health_page(self, request: web.Request) -> Page:
        del request
        version = importlib.metadata.version(contract.PRODUCT)
        return Page(HTTPStatus.OK, "text/plain", f"aliquot scheduler {version}\n".encode())

    def _ready_page(self, request: web.Request) -> Page:
        del request
        trouble = self._webhook_trouble() if self.ready else self._trouble()
        if trouble:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{trouble}\n".encode())
        return Page(HTTPStatus.OK, "text/plain", b"ready\n")


def _telling(verb: Verb, answer: Callable[[str], bytes]) -> Verb:
    """Have a verb say in its answer why it is not answered now: kube-scheduler tells pods of that, and of a 503 only the number."""

    async def handle(body: bytes) -> bytes:
        try:
            return await verb(body)
        except NotReadyError as exc:
            return answer(f"the extender of {contract.PRODUCT}-scheduler decides nothing now: {exc}")

    return handle


def _page(answer: Answer) -> Page:
    content_type = "application/json" if answer.status == HTTPStatus.OK else "text/plain"
    return Page(answer.status, content_type, answer.body)


def settle_memory() -> None:
    """Take what the first lists made out of the garbage collector's sight: scanning it costs 100 ms pauses and frees nothing.

    From then on it looks less often, because a call makes thousands of objects that are gone when it ends, and no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def decode_pod(raw: msgspec.Raw) -> PodFacts:
    """Read a pod off its stream."""
    return pod_facts(msgspec.json.decode(raw, type=PodObject))


def decode_budget(raw: msgspec.Raw) -> Budget:
    """Read a PodDisruptionBudget off its stream."""
    return budget_facts(msgspec.json.decode(raw, type=BudgetObject))


def decode_host(raw: msgspec.Raw) -> NamedHost:
    """Read a node off its stream."""
    node = msgspec.json.decode(raw, type=NodeObject)
    return NamedHost(node.metadata.name, host_amounts(node))


if __name__ == "__main__":
    sys.exit(main())
