"""What operators see: metrics as of the scrape, whether the process lives, and whether it is ready.

A scrape reads the board and the ledger (immutable values, safe from any thread) and the usage regions; nothing is collected while nobody
asks. Liveness is the event loop's heartbeat and not the driver's health: a restart of the agent cures no GPU.
"""

import asyncio
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
from agent.ports import Clock, ContainerFiles, Page, RegionView
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from agent.services.registrar import Registrar
from agent.services.telemetry import Telemetry

HEARTBEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 15.0
UTILIZATION_SECONDS = 5.0
"""Least time over which a container's utilisation is averaged; a scrape sooner shows the last value."""
UTILIZATION_MOST_SECONDS = 300.0
"""An average over a longer time is not of lately: nobody scraped, and what a container uses now is not known until the next look."""
WAITING_SECONDS = 1.0
"""Where a launch waited within this time, one counts as waiting still: waits are of milliseconds, and one follows the other."""


FurtherFamilies = Callable[[], Iterable[Family]]


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """What the monitor is told at the start."""

    version: str
    node: str = ""
    shares_per_gpu: int = 0
    compat: CompatMetrics = CompatMetrics.NONE


@dataclass(slots=True)
class _Watched:
    """What is kept of a container from scrape to scrape."""

    owner: tuple[str, str]
    """Pod UID and container: the next one with the same device IDs has the same grant id."""
    tally: Tally
    sample: BusySample
    utilization: tuple[float | None, ...]
    """By device; None where it worked and one look cannot tell how much lately."""
    launched_at: list[float | None]
    """By device: when work was last seen to have been launched."""


class Monitor:
    """A collector for prometheus-client, and the pages of the HTTP server."""

    def __init__(
        self,
        options: MonitorOptions,
        *,
        watch: DriverWatch,
        book: GrantBook,
        pods: PodCache,
        files: ContainerFiles,
        registrar: Registrar,
        telemetry: Telemetry,
        overhead_bytes: Callable[[], Mapping[tuple[str, str], int]],
        holdings: Callable[[], Holdings],
        troubles: Callable[[], Iterable[str]],
        clock: Clock,
        bypassed: Callable[[], Set[str]] = frozenset,
        mig_records: Callable[[], Mapping[str, MigRecord]] = dict,
        further: Sequence[FurtherFamilies] = (),
    ) -> None:
        """Make the collector.

        Args:
            overhead_bytes: by grant id and device UUID, as fresh as it can be had. holdings: as of then.
            bypassed: ids of grants that their backend does not hold, or not every process of.
            mig_records: the MIG instances that were made for containers, by place.
            further: families of parts the monitor does not know.
            troubles: further reasons not to be ready, of parts the monitor does not know.
        """
        self._options = options
        self._watch = watch
        self._book = book
        self._pods = pods
        self._files = files
        self._registrar = registrar
        self._telemetry = telemetry
        self._overhead_bytes = overhead_bytes
        self._holdings = holdings
        self._bypassed = bypassed
        self._mig_records = mig_records
        self._further = further
        self._troubles = troubles
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
        encode, content_type = choose_encoder(accept)
        return Page(200, content_type, encode(self._telemetry.registry))

    def health(self, accept: str) -> Page:
        """Return /healthz: whether the event loop turns."""
        del accept
        silent_seconds = self._clock.monotonic() - self._beat_at
        if silent_seconds > DEAD_AFTER_SECONDS:
            return _text(503, f"the event loop has not turned for {silent_seconds:.0f} s")
        return _text(200, "ok")

    def readiness(self, accept: str) -> Page:
        """Return /readyz: whether kubelet knows all our resources, and if not, why."""
        del accept
        reasons = [*self._troubles(), *(f"{resource}: {trouble}" for resource, trouble in self._registrar.troubles.items() if trouble)]
        if not self._watch.board.devices:
            reasons.insert(0, self._watch.trouble or self._without_devices())
        elif not self._registrar.troubles:
            reasons.append("no resource is registered yet")
        return _text(503, "; ".join(reasons)) if reasons else _text(200, "ok")

    def _without_devices(self) -> str:
        unusable = self._watch.board.unidentified
        return f"no GPU of this node can be shared: {'; '.join(unusable)}" if unusable else "the driver lists no GPU"

    def collect(self) -> Iterable[Metric]:
        """Return the families of one scrape; called by prometheus-client."""
        begun = self._clock.monotonic()
        with self._scraping:
            found = list(self._families(begun))
        self._telemetry.scrape_seconds.set(self._clock.monotonic() - begun)
        return [_metric(family) for family in found]

    def describe(self) -> Iterable[Metric]:
        """Keep prometheus-client from collecting at registration."""
        return ()

    def _families(self, now: float) -> Iterable[Family]:
        overhead_bytes = self._overhead_bytes()
        holdings = self._holdings()
        grants = tuple(self._book.ledger.grants.values())
        owners = {grant.grant_id: (grant.pod_uid, grant.container) for grant in grants}
        self._watched = {identifier: one for identifier, one in self._watched.items() if owners.get(identifier) == one.owner}
        ended = frozenset(grant.grant_id for grant in grants if self._has_ended(grant))
        shimmed = [grant for grant in grants if grant.under_shim and grant.grant_id not in ended]
        usage = {grant.grant_id: used for grant in shimmed if (used := self._usage(grant, now)) is not None}
        limits = {grant.grant_id: held for grant in shimmed if (held := self._files.limits(grant.grant_id)) is not None}
        snapshot = Snapshot(
            self._watch.board,
            grants,
            node=self._options.node,
            version=self._options.version,
            shares_per_gpu=self._options.shares_per_gpu,
            usage=usage,
            limits=limits,
            utilization=self._utilization(grants, usage, holdings),
            overhead_bytes=overhead_bytes,
            holdings=holdings,
            bypassed=self._bypassed(),
            ended=ended,
            mig_records=self._mig_records(),
        )
        yield from families(snapshot)
        if self._options.compat is CompatMetrics.HAMI:
            yield from hami_families(snapshot, self._compat_facts(grants, now))
        for more in self._further:
            yield from more()

    def _has_ended(self, grant: Grant) -> bool:
        pod = self._pods.by_uid.get(grant.pod_uid)
        return pod is not None and pod.has_ended(grant.container)

    def _usage(self, grant: Grant, now: float) -> ContainerUsage | None:
        """Read a container's region; what is kept of it stays when it cannot be read."""
        view = self._files.region(grant.grant_id)
        if view is None:
            return None
        watched = self._watched.get(grant.grant_id)
        if watched is None or len(watched.tally.totals) != len(grant.shares):
            owner = (grant.pod_uid, grant.container)
            watched = self._watched[grant.grant_id] = _first_look(owner, Tally.empty(len(grant.shares)).after(view.snapshot), now)
        else:
            _look_again(watched, watched.tally.after(view.snapshot), now)
        return usage_of(view.snapshot, view.dead, watched.tally, self._starved(grant, view, now))

    def _starved(self, grant: Grant, view: RegionView, now: float) -> Sequence[int]:
        """Return the positions of devices on which a launch waited a moment ago; only a ceiling makes launches wait."""
        if not view.live:
            return ()
        counters = self._files.compute(grant.grant_id) or ()
        since_ns = (now - WAITING_SECONDS) * NANOSECONDS
        return [position for position, one in enumerate(counters[: len(grant.shares)]) if one.starved_at_ns > since_ns]

    def _utilization(
        self, grants: Sequence[Grant], usage: Mapping[str, ContainerUsage], holdings: Holdings
    ) -> Mapping[tuple[str, str], float]:
        """Say how busy containers were lately: as the driver has it, else by what they paid for, where launches are paced."""
        found: dict[tuple[str, str], float] = {}
        for grant in grants:
            for position, share in enumerate(grant.shares):
                key = (grant.grant_id, share.device_uuid)
                ratio = holdings.utilization_ratio(*key)
                if grant.under_shim and (ratio is None or key not in holdings.listed):
                    paid = self._paid(grant, position, usage, holdings)
                    ratio = paid if paid is not None else ratio
                if ratio is not None:
                    found[key] = ratio
        return found

    def _paid(self, grant: Grant, position: int, usage: Mapping[str, ContainerUsage], holdings: Holdings) -> float | None:
        """Return the share of time that a container paid for; None where its processes launch, or may launch, without paying."""
        used = usage.get(grant.grant_id)
        if used is None or grant.grant_id in holdings.uncounted:
            return None
        watched = self._watched[grant.grant_id]
        return watched.utilization[position] if watched.tally.totals[position].busy_ns > 0 or not used.processes else None

    def _compat_facts(self, grants: Sequence[Grant], now: float) -> CompatFacts:
        pods = self._pods.by_uid
        container_index = {
            grant.grant_id: position
            for grant in grants
            if (pod := pods.get(grant.pod_uid)) is not None
            for position, container in enumerate(one.name for one in pod.containers if not one.init)
            if container == grant.container
        }
        idle_seconds = {
            (grant.grant_id, share.device_uuid): now - launched_at
            for grant in grants
            if (watched := self._watched.get(grant.grant_id)) is not None
            for share, launched_at in zip(grant.shares, watched.launched_at, strict=True)
            if launched_at is not None
        }
        return CompatFacts(container_index, idle_seconds)


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


def _text(status: int, sentence: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())
