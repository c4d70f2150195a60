"""The scheduler's metrics. Counters are raised where things happen; what is a property of the state is read when somebody asks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proto import contract
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.score import FRAG_PPM
from scheduler_plugin.core.state import ClusterState, Stage

_PREFIX = f"{contract.METRIC_PREFIX}scheduler_"
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)


class Telemetry:
    """All counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verb_seconds = Histogram(
            f"{_PREFIX}verb_duration_seconds", "Time to answer one call.", ["verb"], buckets=_SECONDS, registry=self.registry
        )
        self.verbs = Counter(f"{_PREFIX}verbs", "Calls answered, by outcome.", ["verb", "outcome"], registry=self.registry)
        self.attempts = Counter(f"{_PREFIX}attempts", "Filter calls for GPU pods, by result.", ["result"], registry=self.registry)
        self.reasons = Counter(f"{_PREFIX}node_rejections", "Nodes rejected by filter.", ["reason"], registry=self.registry)
        self.admissions = Counter(f"{_PREFIX}admissions", "Pods seen by the webhook.", ["outcome"], registry=self.registry)
        self.expired = Counter(f"{_PREFIX}reservations_expired", "Reservations whose time ran out.", registry=self.registry)
        self.retried = Counter(f"{_PREFIX}pods_retried", "Waiting pods that were had tried again.", registry=self.registry)

    @contextmanager
    def timing(self, verb: str) -> Iterator[None]:
        """Measure one call and count its outcome."""
        begun, outcome = time.perf_counter(), "error"
        try:
            yield
            outcome = "ok"
        finally:
            self.verb_seconds.labels(verb).observe(time.perf_counter() - begun)
            self.verbs.labels(verb, outcome).inc()

    def page(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)

    def watch_state(self, state: ClusterState, age_seconds: Callable[[], float], leads: Callable[[], bool]) -> None:
        """Read these properties at every scrape."""
        self.registry.register(_StateCollector(state, age_seconds, leads))

    def count_decision(self, decision: Decision) -> None:
        """Count one filter call and the nodes it rejected."""
        self.attempts.labels("fits" if decision.fitting else "fits_nowhere").inc()
        for reason, count in decision.failed.items():
            self.reasons.labels(reason.label).inc(count)

    def count_admission(self, outcome: str) -> None:
        """Count one pod that the webhook saw."""
        self.admissions.labels(outcome).inc()


class _StateCollector(Collector):
    def __init__(self, state: ClusterState, age_seconds: Callable[[], float], leads: Callable[[], bool]) -> None:
        self._state = state
        self._age_seconds = age_seconds
        self._leads = leads

    def collect(self) -> Iterator[Metric]:
        state, columns = self._state, self._state.columns
        columns.derive()
        yield GaugeMetricFamily(f"{_PREFIX}state_age_seconds", "Time since the oldest stream was current.", value=self._age_seconds())
        yield GaugeMetricFamily(f"{_PREFIX}leader", "1 while this replica leads.", value=float(self._leads()))
        yield GaugeMetricFamily(f"{_PREFIX}nodes", "Nodes with an inventory.", value=state.node_count)
        yield GaugeMetricFamily(f"{_PREFIX}unaccounted_pods", "Bound GPU pods without a valid assignment.", value=len(state.unaccounted))
        held = GaugeMetricFamily(f"{_PREFIX}reservations", "Reservations held.", labels=["stage"])
        for stage in Stage:
            held.add_metric([stage.name.lower()], sum(reservation.stage is stage for reservation in state.reservations.values()))
        yield held
        live = columns.present[: columns.rows]
        capacity = max(1, int(columns.capacity_mib[: columns.rows].sum()))
        used = int(columns.used_mib[: columns.rows].sum())
        yield GaugeMetricFamily(f"{_PREFIX}memory_allocated_ratio", "Promised part of all GPU memory.", value=used / capacity)
        fragmented = float(columns.fragmentation[: columns.rows].sum()) / (FRAG_PPM * max(1, int(live.sum())))
        yield GaugeMetricFamily(f"{_PREFIX}fragmentation_ratio", "Mean part of a GPU that fits no usual shape.", value=fragmented)
