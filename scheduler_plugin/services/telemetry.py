"""The scheduler's metrics. Counters are raised where things happen; what is a property of the state is read when somebody asks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proto import contract
from scheduler_plugin.core.decisions import Decision
from scheduler_plugin.core.score import FRAG_PPM
from scheduler_plugin.core.state import ClusterState, Stage
from scheduler_plugin.errors import NotReadyError, WireError

_PREFIX = f"{contract.METRIC_PREFIX}scheduler_"
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)


class Outcome(StrEnum):
    """What became of a call."""

    OK = "ok"
    REFUSED = "refused"
    """Answered, and the answer is that it could not be done: a binding without room, or one that has no outcome yet."""
    BAD_REQUEST = "bad_request"
    """The body could not be read: the client's fault."""
    NOT_READY = "not_ready"
    """Another replica leads, or the cluster is not known yet."""
    ERROR = "error"
    """Ours."""


@dataclass(slots=True)
class Call:
    """One call under way."""

    refused: bool = False


class Telemetry:
    """All counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verb_seconds = Histogram(
            f"{_PREFIX}verb_duration_seconds", "Time to answer one call.", ["verb"], buckets=_SECONDS, registry=self.registry
        )
        self.verbs = Counter(f"{_PREFIX}verbs", "Calls answered, by outcome.", ["verb", "outcome"], registry=self.registry)
        text = "Filter calls for GPU pods, by result: fits, fits_nowhere, or invalid where request or gang annotation cannot be honoured."
        self.attempts = Counter(f"{_PREFIX}attempts", text, ["result"], registry=self.registry)
        self.reasons = Counter(f"{_PREFIX}node_rejections", "Nodes rejected by filter.", ["reason"], registry=self.registry)
        self.admissions = Counter(f"{_PREFIX}admissions", "Pods seen by the webhook.", ["outcome"], registry=self.registry)
        self.gangs = Counter(
            f"{_PREFIX}gang_attempts", "Attempts to start a gang, by what became of them.", ["event"], registry=self.registry
        )
        self.preemptions = Counter(
            f"{_PREFIX}preemption_nodes", "Nodes offered for preemption, by answer.", ["answer"], registry=self.registry
        )
        self.victims = Counter(f"{_PREFIX}preemption_victims_added", "Pods added to kube-scheduler's victims.", registry=self.registry)
        self.preempted = Counter(
            f"{_PREFIX}pods_preempted",
            "Pods ended for more important ones where kube-scheduler found nobody to end.",
            registry=self.registry,
        )
        self.expired = Counter(f"{_PREFIX}reservations_expired", "Reservations whose time ran out.", registry=self.registry)
        self.retried = Counter(f"{_PREFIX}pods_retried", "Waiting pods that were had tried again.", registry=self.registry)

    @contextmanager
    def timing(self, verb: str) -> Iterator[Call]:
        """Measure one call and count its outcome."""
        begun, call, outcome = time.perf_counter(), Call(), Outcome.ERROR
        try:
            yield call
            outcome = Outcome.REFUSED if call.refused else Outcome.OK
        except WireError:
            outcome = Outcome.BAD_REQUEST
            raise
        except NotReadyError:
            outcome = Outcome.NOT_READY
            raise
        finally:
            self.verb_seconds.labels(verb).observe(time.perf_counter() - begun)
            self.verbs.labels(verb, outcome).inc()

    def page(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)

    def watch_state(self, state: ClusterState, age_seconds: Callable[[], float], leads: Callable[[], bool]) -> None:
        """Read these properties at every scrape."""
        self.registry.register(_StateCollector(state, age_seconds, leads))

    def watch_certificate(self, expires_at: Callable[[], float]) -> None:
        """Read at every scrape when the certificate ends; one that cannot be read counts as ended."""

        def known() -> float:
            try:
                return expires_at()
            except (OSError, ValueError):
                return 0.0

        text = "When the certificate of webhook and extender ends; 0 while it cannot be read."
        Gauge(f"{_PREFIX}certificate_expiry_timestamp_seconds", text, registry=self.registry).set_function(known)

    def count_decision(self, decision: Decision) -> None:
        """Count one filter call and the nodes it rejected."""
        self.attempts.labels("fits" if decision.fitting else "fits_nowhere").inc()
        for reason, count in decision.failed.items():
            self.reasons.labels(reason.label).inc(count)

    def count_invalid(self) -> None:
        """Count one filter call for a pod whose request or gang annotation cannot be honoured."""
        self.attempts.labels("invalid").inc()

    def count_gang(self, event: str) -> None:
        """Count an attempt to start a gang that was planned, completed or expired."""
        self.gangs.labels(event).inc()

    def count_preemption(self, kept: int, dropped: int, added: int) -> None:
        """Count one preempt call: nodes where ending pods helps and where not, and the pods added to those proposed."""
        self.preemptions.labels("helps").inc(kept)
        self.preemptions.labels("does_not_help").inc(dropped)
        self.victims.inc(added)

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
        used = int(columns.allocated_mib().sum())
        yield GaugeMetricFamily(f"{_PREFIX}memory_allocated_ratio", "Promised part of all GPU memory.", value=used / capacity)
        fragmented = float(columns.fragmentation[: columns.rows].sum()) / (FRAG_PPM * max(1, int(live.sum())))
        yield GaugeMetricFamily(f"{_PREFIX}fragmentation_ratio", "Mean part of a GPU that fits no usual shape.", value=fragmented)
