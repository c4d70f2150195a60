"""What operators see: metrics as of the scrape, whether the process lives, and whether it is ready.

A scrape reads the board and the ledger (immutable values, safe from any thread) and the usage regions; nothing is collected while nobody
asks. Liveness is the event loop's heartbeat and not the driver's health: a restart of the agent cures no GPU.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from agent.core.ledger import Grant
from agent.core.metrics import BusySample, ContainerUsage, Family, Kind, Snapshot, families, usage_of, utilization_between
from agent.ports import Clock, ContainerFiles, Page
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook
from agent.services.registrar import Registrar
from agent.services.telemetry import Telemetry

HEARTBEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 15.0
UTILIZATION_SECONDS = 5.0
"""Least time over which a container's utilisation is averaged; a scrape sooner shows the last value."""


class Monitor:
    """A collector for prometheus-client, and the pages of the HTTP server."""

    def __init__(
        self,
        version: str,
        *,
        watch: DriverWatch,
        book: GrantBook,
        files: ContainerFiles,
        registrar: Registrar,
        telemetry: Telemetry,
        overhead_bytes: Callable[[], Mapping[tuple[str, str], int]],
        troubles: Callable[[], Iterable[str]],
        clock: Clock,
    ) -> None:
        """Make the collector.

        Args: overhead_bytes: by grant id and device UUID. troubles: further reasons not to be ready, of parts the monitor does not know.
        """
        self._version = version
        self._watch = watch
        self._book = book
        self._files = files
        self._registrar = registrar
        self._telemetry = telemetry
        self._overhead_bytes = overhead_bytes
        self._troubles = troubles
        self._clock = clock
        self._beat_at = clock.monotonic()
        self._busy: dict[str, BusySample] = {}
        self._utilization: dict[str, tuple[float, ...]] = {}
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
            reasons.insert(0, self._watch.trouble or "the driver lists no GPU")
        elif not self._registrar.troubles:
            reasons.append("no resource is registered yet")
        return _text(503, "; ".join(reasons)) if reasons else _text(200, "ok")

    def collect(self) -> Iterable[Metric]:
        """Return the families of one scrape; called by prometheus-client."""
        with self._scraping:
            grants = tuple(self._book.ledger.grants.values())
            usage = self._usage(grants)
            snapshot = Snapshot(self._watch.board, grants, usage, self._sample(grants, usage), self._version, self._overhead_bytes())
        return [_metric(family) for family in families(snapshot)]

    def describe(self) -> Iterable[Metric]:
        """Keep prometheus-client from collecting at registration."""
        return ()

    def _usage(self, grants: Sequence[Grant]) -> Mapping[str, ContainerUsage]:
        usage = {}
        for grant in grants:
            if not grant.under_shim:
                continue
            view = self._files.region(grant.grant_id)
            if view is not None:
                usage[grant.grant_id] = usage_of(view.snapshot, view.dead, len(grant.shares))
        return usage

    def _sample(self, grants: Sequence[Grant], usage: Mapping[str, ContainerUsage]) -> Mapping[tuple[str, str], float]:
        now = self._clock.monotonic()
        for identifier, used in usage.items():
            sample = BusySample(now, used.busy_ns)
            earlier = self._busy.get(identifier)
            if earlier is None or len(earlier.busy_ns) != len(sample.busy_ns):
                self._busy[identifier] = sample
                self._utilization.pop(identifier, None)
            elif now - earlier.at >= UTILIZATION_SECONDS:
                self._busy[identifier] = sample
                self._utilization[identifier] = utilization_between(earlier, sample)
        for identifier in self._busy.keys() - usage.keys():
            del self._busy[identifier]
            self._utilization.pop(identifier, None)
        return {
            (grant.grant_id, share.device_uuid): ratio
            for grant in grants
            for share, ratio in zip(grant.shares, self._utilization.get(grant.grant_id, ()), strict=False)
        }


def _metric(family: Family) -> Metric:
    form = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = form(family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric


def _text(status: int, sentence: str) -> Page:
    return Page(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())
