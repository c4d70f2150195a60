"""The agent's own counters and timers, kept while it runs. What is read at scrape time instead is in ``monitor``."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from proto.contract import METRIC_PREFIX

_ALLOCATE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_PRESTART_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0)


class Telemetry:
    """Counters and histograms in one registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.allocate_seconds = Histogram(
            f"{METRIC_PREFIX}allocate_duration_seconds", "Time to answer Allocate.", buckets=_ALLOCATE_BUCKETS, registry=self.registry
        )
        self.prestart_seconds = Histogram(
            f"{METRIC_PREFIX}prestart_duration_seconds",
            "Time to answer PreStartContainer, waiting for the pod included.",
            buckets=_PRESTART_BUCKETS,
            registry=self.registry,
        )
        self._registrations = Counter(
            f"{METRIC_PREFIX}registrations", "Registrations with the kubelet.", ("resource", "result"), registry=self.registry
        )
        self._refusals = Counter(f"{METRIC_PREFIX}refusals", "Containers refused at PreStart.", ("reason",), registry=self.registry)
        self._nvml_errors = Counter(f"{METRIC_PREFIX}nvml_errors", "Failed NVML calls.", ("call", "code"), registry=self.registry)

    def registration(self, resource: str, *, succeeded: bool) -> None:
        """Count one attempt to register."""
        self._registrations.labels(resource, "success" if succeeded else "failure").inc()

    def refusal(self, reason: str) -> None:
        """Count one refused container start."""
        self._refusals.labels(reason).inc()

    def nvml_error(self, call: str, code: int) -> None:
        """Count one failed NVML call; from the NVML thread."""
        self._nvml_errors.labels(call, str(code)).inc()
