# SPDX-License-Identifier: Apache-2.0
"""Metrics of the cluster as the scheduler sees it, by GPU model, and of the scheduler's queues. They are read at each scrape."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aliquot import contract
from aliquot.contract import units
from aliquot.placement.device import UNRESERVED_MIN_PERCENT
from scheduler_plugin.core.cluster.decisions import Decisions
from scheduler_plugin.core.cluster.hold_uids import holds_of
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import FRAG_PPM

_PREFIX = f"{contract.METRIC_PREFIX}scheduler_"

QUEUES: Final = {
    "open_bindings": "Bindings without an outcome yet.",
    "waiting_gangs": "Gangs that hold room and have not started.",
    "held_seats": "Seats for pods of Kueue's workloads that are not bound yet.",
}


class ClusterCollector(Collector):
    """Yields the families."""

    def __init__(
        self,
        state: ClusterState,
        decisions: Decisions,
        queues: Mapping[str, Callable[[], int]],
        watch_lag: Callable[[], Mapping[str, float]],
    ) -> None:
        """Args: queues: the lengths of QUEUES. watch_lag: for each stream, seconds since it was current."""
        self._state = state
        self._decisions = decisions
        self._queues = queues
        self._watch_lag = watch_lag

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        yield _gauge("waiting_pods", "Pods that fitted on no node in kube-scheduler's last filter call.", len(self._decisions.queue))
        for name, text in QUEUES.items():
            yield _gauge(name, text, self._queues[name]())
        lag = GaugeMetricFamily(f"{_PREFIX}watch_lag_seconds", "Seconds since a stream of the API server was current.", labels=["source"])
        for source, seconds in self._watch_lag().items():
            lag.add_metric([source], seconds)
        yield lag
        with self._state.without_all(holds_of(self._state.reservations)):  # the owner of held room waits, and others use that room
            models = list(self._by_model())
        yield from models

    def _by_model(self) -> Iterator[Metric]:
        columns = self._state.columns
        columns.derive()
        live, rows = columns.present[: columns.rows], slice(columns.rows)
        models = columns.model[rows][live]
        allocated = columns.allocated_mib()
        capacity, used = columns.capacity_mib[rows][live], allocated[live]
        free = np.where(columns.mig[rows], columns.capacity_mib[rows] - allocated, columns.free_mib[rows])[live]
        full = (columns.free_shares[rows] < 1) | (columns.used_cores[rows] > units.WHOLE_GPU_PERCENT - UNRESERVED_MIN_PERCENT)
        closed = full | columns.cordoned[rows] | ~columns.healthy[rows]
        sums = {
            "model_gpus": ("GPUs, by model.", np.ones(len(models)), 1),
            "model_memory_bytes": ("GPU memory, by model.", capacity, units.MIB),
            "model_memory_allocated_bytes": ("GPU memory promised to pods, by model.", used, units.MIB),
            "model_memory_stranded_bytes": (
                "Free GPU memory that no pod can get: its GPU has no share or no compute left, is cordoned or unhealthy.",
                np.where(closed[live], free, 0),
                units.MIB,
            ),
            "model_fragmented_gpus": (
                "Free capacity that fits no usual pod shape, in GPUs, by model.",
                columns.fragmentation[rows][live] / FRAG_PPM,
                1,
            ),
        }
        for name, (text, amounts, unit) in sums.items():
            family = GaugeMetricFamily(_PREFIX + name, text, labels=["model"])
            totals = np.bincount(models, weights=amounts, minlength=len(columns.models))
            for model, total, count in zip(
                columns.models, totals.tolist(), np.bincount(models, minlength=len(columns.models)), strict=True
            ):
                if count:
                    family.add_metric([model], total * unit)
            yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)
