# SPDX-License-Identifier: Apache-2.0
"""The scheduler's metrics. Counters are raised where the events happen; values of the state are read at each scrape."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aliquot import contract
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.hold_uids import is_of_claim
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.errors import NotReadyError, WireError

_PREFIX = f"{contract.METRIC_PREFIX}scheduler_"
_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)

_CHECK_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200)


class Outcome(StrEnum):
    """The outcome of a call."""

    OK = "ok"
    REFUSED = "refused"
    """The reply is an error: a binding without room, or one without an outcome yet."""
    BAD_REQUEST = "bad_request"
    """The body could not be read: an error of the client."""
    NOT_READY = "not_ready"
    """Another replica leads, or the objects of the cluster are not listed yet."""
    ERROR = "error"
    """An error of the scheduler."""


@dataclass(slots=True)
class Call:
    """One call under way."""

    refused: bool = False


class Telemetry:
    """All counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verb_seconds = Histogram(
            f"{_PREFIX}verb_duration_seconds", "Seconds to reply to one call.", ["verb"], buckets=_SECONDS, registry=self.registry
        )
        self.verbs = self._counter("verbs", "Calls, by outcome.", "verb", "outcome")
        self.attempts = self._counter(
            "attempts", "Filter calls for GPU pods, by result: fits, fits_nowhere, or invalid (GPU request or gang annotation).", "result"
        )
        self.reasons = self._counter("node_rejections", "Nodes rejected by filter, by reason.", "reason")
        self.admissions = self._counter("admissions", "Pods and objects with pod templates reviewed by the webhook, by outcome.", "outcome")
        self.adoptions = self._counter(
            "adoptions",
            "Pods reviewed that ask for GPUs in another system's words, by outcome: adopted, refused, left, would_adopt or would_refuse.",
            "system",
            "outcome",
        )
        self.gangs = self._counter("gang_attempts", "Attempts to start a gang, by event: planned, completed or expired.", "event")
        self.preempted = self._counter(
            "pods_preempted", "Pods evicted for a more important pod when kube-scheduler found no victims for it."
        )
        self.consolidation_moves = self._counter("consolidation_moves", "Pods evicted by consolidation.")
        self.consolidations = self._counter(
            "consolidations",
            "Searches for moves for a waiting pod (found or none), and runs of moves (completed, given_up, or resumed after a restart).",
            "outcome",
        )
        self.check_answers = self._counter(
            "admission_check_answers", "Answers to the admission check of Kueue's workloads, by state.", "state"
        )
        self.check_seconds = Histogram(
            f"{_PREFIX}admission_check_duration_seconds",
            "Seconds from the reserved quota of a workload to the answer Ready.",
            buckets=_CHECK_SECONDS,
            registry=self.registry,
        )
        self.workload_seats_expired = self._counter(
            "workload_seats_expired", "Workloads with seats that expired because no pod came for them."
        )
        self.expired = self._counter("reservations_expired", "Reservations that expired.")
        self.retried = self._counter("pods_retried", "Waiting pods that kube-scheduler was made to retry.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

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
        """Return all metrics in the text format."""
        return generate_latest(self.registry)

    def watch_state(self, state: ClusterState, leads: Callable[[], bool]) -> None:
        """Read these values at each scrape."""
        self.registry.register(_StateCollector(state, leads))

    def watch_certificate(self, expires_at: Callable[[], float]) -> None:
        """Read at each scrape when the certificate expires; one that cannot be read counts as expired."""

        def known() -> float:
            try:
                return expires_at()
            except (OSError, ValueError):
                return 0.0

        text = "When the certificate of webhook and extender expires, in seconds since 1970; 0 while it cannot be read."
        Gauge(f"{_PREFIX}certificate_expiry_timestamp_seconds", text, registry=self.registry).set_function(known)

    def count_decision(self, decision: Decision) -> None:
        """Count one filter call and the nodes it rejected."""
        self.attempts.labels("fits" if decision.fitting else "fits_nowhere").inc()
        for reason, count in decision.failed.items():
            self.reasons.labels(reason.label).inc(count)

    def count_invalid(self) -> None:
        """Count one filter call for a pod with an invalid GPU request or gang annotation."""
        self.attempts.labels("invalid").inc()

    def count_gang(self, event: str) -> None:
        """Count an attempt to start a gang that was planned, completed or expired."""
        self.gangs.labels(event).inc()

    def count_admission(self, outcome: str) -> None:
        """Count one pod that the webhook reviewed."""
        self.admissions.labels(outcome).inc()

    def count_adoption(self, system: str, outcome: str) -> None:
        """Count one reviewed pod that asks for GPUs in another system's words."""
        self.adoptions.labels(system, outcome).inc()


class _StateCollector(Collector):
    def __init__(self, state: ClusterState, leads: Callable[[], bool]) -> None:
        self._state = state
        self._leads = leads

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield _gauge("leader", "1 while this replica leads, else 0.", float(self._leads()))
        yield _gauge("unaccounted_pods", "Bound GPU pods without a valid assignment annotation.", len(state.unaccounted))
        held = GaugeMetricFamily(f"{_PREFIX}reservations", "Reservations of pods that are not bound yet, by stage.", labels=["stage"])
        of_pods = [one.stage for one in state.reservations.values() if not is_of_claim(one.pod_uid)]
        for stage in Stage:
            held.add_metric([stage.name.lower()], of_pods.count(stage))
        yield held


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)
