# SPDX-License-Identifier: Apache-2.0
"""The agent's own counters and timers, kept while it runs. ``monitor`` reads the other values at scrape time."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from aliquot.contract import METRIC_PREFIX

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0)


class Telemetry:
    """Counters and histograms in one registry."""

    def __init__(self, node_name: str = "") -> None:
        self._node_name = node_name
        self.registry = CollectorRegistry()
        seconds = Histogram(
            f"{METRIC_PREFIX}operation_duration_seconds",
            "Time of one operation: a call of kubelet with its wait for the pod, a claim's preparation, reading all GPUs, one reconcile.",
            ("operation",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.allocate_seconds, self.preferred_allocation_seconds, self.prestart_seconds = (
            seconds.labels(call) for call in ("Allocate", "GetPreferredAllocation", "PreStartContainer")
        )
        self.prepare_seconds, self.driver_read_seconds, self.reconcile_seconds = (
            seconds.labels(work) for work in ("prepare-claim", "read-driver", "reconcile")
        )
        ProcessCollector(registry=self.registry)
        self._registrations = Counter(
            f"{METRIC_PREFIX}registrations", "Registrations with kubelet.", ("resource", "result"), registry=self.registry
        )
        self._refusals = Counter(
            f"{METRIC_PREFIX}refusals",
            "Containers refused at PreStart, and claims refused at Prepare.",
            ("reason",),
            registry=self.registry,
        )
        self.grants_without_host_spec = Counter(
            f"{METRIC_PREFIX}grants_without_host_spec",
            "Grants on a node without a CDI spec of NVIDIA's: the container gets the driver's files only from NVIDIA's container runtime.",
            registry=self.registry,
        )
        self._drift = Gauge(
            f"{METRIC_PREFIX}drift", "Differences between ledger, files, pods and kubelet now.", ("node", "kind"), registry=self.registry
        )
        self.drift_cures = Counter(
            f"{METRIC_PREFIX}drift_cures", "Differences that were cured, by cure.", ("kind", "cure"), registry=self.registry
        )
        self.audit_actions = Counter(
            f"{METRIC_PREFIX}audit_actions",
            "Actions against containers that use more than their grant.",
            ("kind", "action"),
            registry=self.registry,
        )
        self._health_transitions = Counter(
            f"{METRIC_PREFIX}device_health_transitions",
            "Changes of a device's state, by the new state.",
            ("node", "device_uuid", "model", "state"),
            registry=self.registry,
        )
        self._xids = Counter(
            f"{METRIC_PREFIX}xids", "XIDs that a device reported.", ("node", "device_uuid", "model", "xid"), registry=self.registry
        )
        self._nvml_errors = Counter(f"{METRIC_PREFIX}nvml_errors", "Failed NVML calls.", ("call", "code"), registry=self.registry)

    def registration(self, resource: str, *, succeeded: bool) -> None:
        """Count one attempt to register."""
        self._registrations.labels(resource, "success" if succeeded else "failure").inc()

    def refusal(self, reason: str) -> None:
        """Count one refused container start."""
        self._refusals.labels(reason).inc()

    def health_transition(self, device_uuid: str, model: str, state: str) -> None:
        """Count one change of a device's state."""
        self._health_transitions.labels(self._node_name, device_uuid, model, state).inc()

    def xid(self, device_uuid: str, model: str, xid: int) -> None:
        """Count one XID."""
        self._xids.labels(self._node_name, device_uuid, model, str(xid)).inc()

    def drift(self, kind: str, count: int) -> None:
        """Set how many drifts of a kind exist."""
        self._drift.labels(self._node_name, kind).set(count)

    def nvml_error(self, call: str, code: int) -> None:
        """Count one failed NVML call; from the NVML thread."""
        self._nvml_errors.labels(call, str(code)).inc()
