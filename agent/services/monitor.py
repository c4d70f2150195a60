# SPDX-License-Identifier: Apache-2.0
"""What operators see: metrics, liveness and readiness.

A scrape reads the GPUs, the ledger (immutable values, safe from any thread) and the usage regions; the agent collects nothing between
scrapes. Liveness is the heartbeat of the event loop and not the driver's health: a restart of the agent cures no GPU.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from agent.core.compat_metrics import CompatFacts, CompatMetrics, hami_families
from agent.core.holdings import Holdings
from agent.core.ledger import Grant
from agent.core.metrics import NANOSECONDS, Family, Kind, Snapshot, families
from agent.core.mig import MigRecord
from agent.core.tally import Tally
from agent.core.usage import BusySample, ContainerUsage, usage_of, utilization_between
from agent.ports.clock import Clock
from agent.ports.grants import ContainerFiles, RegionView
from agent.ports.status_page import Page
from agent.services.state import AgentState
from agent.services.telemetry import Telemetry

HEARTBEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 15.0
UTILIZATION_SECONDS = 5.0
"""Least time over which a container's utilisation is averaged. An earlier scrape shows the last value."""
UTILIZATION_MOST_SECONDS = 300.0
"""An average over a longer time is outdated: after a pause between scrapes, utilisation is unknown until the next look."""
WAITING_SECONDS = 1.0
"""A launch counts as waiting if one waited within this time: waits last milliseconds and follow each other."""
_VERSION = re.compile(r"version=([^;]*)")
_NUMBER = re.compile(r"\d{1,3}(\.\d{1,3})*\s*", re.ASCII)


FurtherFamilies = Callable[[], Iterable[Family]]


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """What is configured."""

    version: str
    node: str = ""
    shares_per_gpu: int = 0
    compat: CompatMetrics = CompatMetrics.NONE


@dataclass(frozen=True, slots=True)
class ScrapeSources:
    """What other services contribute to a scrape; called each time."""

    overhead_bytes: Callable[[], Mapping[tuple[str, str], int]]
    """By grant id and device UUID, as fresh as possible."""
    holdings: Callable[[], Holdings]
    """As of the same moment."""
    bypassed: Callable[[], Set[str]] = frozenset
    """Ids of grants with a process that its backend does not limit."""
    mig_records: Callable[[], Mapping[str, MigRecord]] = dict
    """The MIG instances that were created for containers, by place."""
    further: Sequence[FurtherFamilies] = ()
    """Families of services that the monitor does not know."""


@dataclass(frozen=True, slots=True)
class ReadinessSources:
    """What decides whether this node is ready."""

    registrations: Callable[[], Mapping[str, str]]
    """Returns why each resource is not registered with kubelet; an empty text for a registered one."""
    troubles: Callable[[], Iterable[str]]
    """Returns further reasons not to be ready, of services that the monitor does not know."""


@dataclass(slots=True)
class _Watched:
    """The state of a container from scrape to scrape."""

    owner: tuple[str, str]
    """Pod UID and container. The next container with the same device IDs has the same grant id."""
    tally: Tally
    sample: BusySample
    utilization: tuple[float | None, ...]
    """By device; None after the first look at a container that has worked, since one look shows no recent use."""
    launched_at: list[float | None]
    """By device: when a new launch was last seen."""


class Monitor:
    """A collector for prometheus-client, and the pages of the HTTP server."""

    def __init__(
        self,
        options: MonitorOptions,
        *,
        state: AgentState,
        files: ContainerFiles,
        sources: ScrapeSources,
        readiness: ReadinessSources,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._options = options
        self._watch = state.watch
        self._pods = state.pods
        self._manager = state.manager
        self._files = files
        self._telemetry = telemetry
        self._sources = sources
        self._registrations = readiness.registrations
        self._troubles = readiness.troubles
        self._clock = clock
        self._beat_at = clock.monotonic()
        self._watched: dict[str, _Watched] = {}
        self._scraping = threading.Lock()
        telemetry.registry.register(self)

    async def run(self) -> None:
        """Keep the heartbeat."""
        while True:
            self._beat_at = self._clock.monotonic()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    # --- called in the HTTP server's threads ---

    def metrics(self, accept: str) -> Page:
        """Return /metrics in the format the scraper accepts."""
        encode, content_type = choose_encoder(with_readable_versions(accept))
        return Page(200, content_type, encode(self._telemetry.registry))

    def health(self, accept: str) -> Page:
        """Return /healthz: whether the event loop runs."""
        del accept
        silent_seconds = self._clock.monotonic() - self._beat_at
        if silent_seconds > DEAD_AFTER_SECONDS:
            return _text(503, f"the event loop has not run for {silent_seconds:.0f} s")
        return _text(200, "ok")

    def readiness(self, accept: str) -> Page:
        """Return /readyz: whether all resources are registered with kubelet, and if not, why."""
        del accept
        registrations = self._registrations()
        reasons = [*self._troubles(), *(f"{resource}: {trouble}" for resource, trouble in registrations.items() if trouble)]
        if not self._watch.inventory.devices:
            reasons.insert(0, self._watch.trouble or self._without_devices())
        elif not registrations:
            reasons.append("no resource is registered yet")
        return _text(503, "; ".join(reasons)) if reasons else _text(200, "ok")

    def _without_devices(self) -> str:
        unusable = self._watch.inventory.unidentified
        return f"no GPU of this node can be shared: {'; '.join(unusable)}" if unusable else "the driver lists no GPU"

    def utilization(self) -> Mapping[tuple[str, str], float]:
        """Return how busy containers keep their GPUs, by grant id and GPU UUID, as in the metrics; unknown ones are missing."""
        with self._scraping:
            return self._snapshot(tuple(self._manager.ledger.grants.values()), self._clock.monotonic()).utilization

    def collect(self) -> Iterable[Metric]:
        """Return the families of one scrape; called by prometheus-client."""
        with self._scraping:
            found = list(self._families(self._clock.monotonic()))
        return [_metric(family) for family in found]

    def describe(self) -> Iterable[Metric]:
        """Keep prometheus-client from collecting at registration."""
        return ()

    def _families(self, now: float) -> Iterable[Family]:
        grants = tuple(self._manager.ledger.grants.values())
        snapshot = self._snapshot(grants, now)
        yield from families(snapshot)
        if self._options.compat is CompatMetrics.HAMI:
            yield from hami_families(snapshot, self._compat_facts(grants, now))
        for more in self._sources.further:
            yield from more()

    def _snapshot(self, grants: Sequence[Grant], now: float) -> Snapshot:
        """Read everything that a scrape shows of GPUs and containers."""
        overhead_bytes = self._sources.overhead_bytes()
        holdings = self._sources.holdings()
        self._forget_others(grants)
        ended = frozenset(grant.grant_id for grant in grants if self._has_ended(grant))
        shimmed = [grant for grant in grants if grant.under_shim and grant.grant_id not in ended]
        usage = {grant.grant_id: used for grant in shimmed if (used := self._usage(grant, now)) is not None}
        limits = {grant.grant_id: held for grant in shimmed if (held := self._files.limits(grant.grant_id)) is not None}
        return Snapshot(
            self._watch.inventory,
            tuple(grants),
            node=self._options.node,
            version=self._options.version,
            shares_per_gpu=self._options.shares_per_gpu,
            usage=usage,
            limits=limits,
            utilization=self._utilization(grants, usage, holdings),
            overhead_bytes=overhead_bytes,
            holdings=holdings,
            bypassed=self._sources.bypassed(),
            ended=ended,
            mig_records=self._sources.mig_records(),
        )

    def _forget_others(self, grants: Sequence[Grant]) -> None:
        """Drop the state of containers without a grant, also when another container has the same grant id now."""
        owners = {grant.grant_id: (grant.owner_uid, grant.container) for grant in grants}
        self._watched = {identifier: one for identifier, one in self._watched.items() if owners.get(identifier) == one.owner}

    def _has_ended(self, grant: Grant) -> bool:
        pod = self._pods.by_uid.get(grant.pod_uid)
        return pod is not None and grant.claim is None and pod.has_ended(grant.container)

    def _usage(self, grant: Grant, now: float) -> ContainerUsage | None:
        """Read a container's region; keep the earlier state when it cannot be read."""
        view = self._files.region(grant.grant_id)
        if view is None:
            return None
        watched = self._watched.get(grant.grant_id)
        if watched is None or len(watched.tally.totals) != len(grant.shares):
            owner = (grant.owner_uid, grant.container)
            watched = self._watched[grant.grant_id] = _first_look(owner, Tally.empty(len(grant.shares)).after(view.snapshot), now)
        else:
            _look_again(watched, watched.tally.after(view.snapshot), now)
        return usage_of(view.snapshot, view.dead, watched.tally, self._starved(grant, view, now))

    def _starved(self, grant: Grant, view: RegionView, now: float) -> Sequence[int]:
        """Return the positions of devices on which a launch waited recently; only an SM limit makes launches wait."""
        if not view.live:
            return ()
        counters = self._files.compute(grant.grant_id) or ()
        since_ns = (now - WAITING_SECONDS) * NANOSECONDS
        return [position for position, one in enumerate(counters[: len(grant.shares)]) if one.starved_at_ns > since_ns]

    def _utilization(
        self, grants: Sequence[Grant], usage: Mapping[str, ContainerUsage], holdings: Holdings
    ) -> Mapping[tuple[str, str], float]:
        """Return how busy containers were recently: by the driver's samples, else by charged GPU time where launches are throttled."""
        found: dict[tuple[str, str], float] = {}
        for grant in grants:
            for position, share in enumerate(grant.shares):
                key = (grant.grant_id, share.device_uuid)
                ratio = holdings.utilization_ratio(*key)
                if grant.under_shim and (ratio is None or key not in holdings.listed):
                    charged = self._charged(grant, position, usage, holdings)
                    ratio = charged if charged is not None else ratio
                if ratio is not None:
                    found[key] = ratio
        return found

    def _charged(self, grant: Grant, position: int, usage: Mapping[str, ContainerUsage], holdings: Holdings) -> float | None:
        """Return the part of time that was charged to a container; None if its processes launch, or may launch, uncharged."""
        used = usage.get(grant.grant_id)
        if used is None or grant.grant_id in holdings.uncounted:
            return None
        watched = self._watched[grant.grant_id]
        return watched.utilization[position] if watched.tally.totals[position].busy_ns > 0 or not used.processes else None

    def _compat_facts(self, grants: Sequence[Grant], now: float) -> CompatFacts:
        """Return what HAMI's metrics need beyond the snapshot."""
        container_index = {grant.grant_id: position for grant in grants if (position := self._container_position(grant)) is not None}
        idle_seconds = {
            (grant.grant_id, share.device_uuid): now - launched_at
            for grant in grants
            if (watched := self._watched.get(grant.grant_id)) is not None
            for share, launched_at in zip(grant.shares, watched.launched_at, strict=True)
            if launched_at is not None
        }
        return CompatFacts(container_index, idle_seconds)

    def _container_position(self, grant: Grant) -> int | None:
        """Return the position of a container among the app containers of its pod; None when it is not one of them."""
        pod = self._pods.by_uid.get(grant.pod_uid)
        names = [one.name for one in pod.containers if not one.init] if pod is not None else []
        return names.index(grant.container) if grant.container in names else None


def _first_look(owner: tuple[str, str], tally: Tally, now: float) -> _Watched:
    launched_at = [now if counts.launches else None for counts in tally.totals]
    return _Watched(owner, tally, _busy(tally, now), tuple(None if counts.busy_ns else 0.0 for counts in tally.totals), launched_at)


def _look_again(watched: _Watched, tally: Tally, now: float) -> None:
    for position, (before, after) in enumerate(zip(watched.tally.totals, tally.totals, strict=True)):
        if after.launches > before.launches:
            watched.launched_at[position] = now
    watched.tally = tally
    if now - watched.sample.at >= UTILIZATION_SECONDS:
        sample = _busy(tally, now)
        lately = now - watched.sample.at <= UTILIZATION_MOST_SECONDS
        ratios = utilization_between(watched.sample, sample)
        watched.utilization = tuple(ratio if lately or not ratio else None for ratio in ratios)
        watched.sample = sample


def _busy(tally: Tally, now: float) -> BusySample:
    return BusySample(now, tuple(counts.busy_ns for counts in tally.totals))


def _metric(family: Family) -> Metric:
    form = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = form(family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric


def with_readable_versions(accept: str) -> str:
    """Drop the media types with a version that is not a number: prometheus-client cannot compare those."""
    versions = ((media, _VERSION.findall(media)) for media in accept.split(","))
    return ",".join(media for media, found in versions if all(_NUMBER.fullmatch(version) for version in found))


def _text(status: int, sentence: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())
