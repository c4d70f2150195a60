# SPDX-License-Identifier: Apache-2.0
"""The dashboard's history: a fixed set of Prometheus queries about the cluster, one GPU or one pod.

A browser sends a subject and a time span, never a query. Names are checked before they are put into a query, the number of points is fixed,
and a result is cached for a moment, so that ten open pages cause as many queries as one.
"""

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from aliquot.contract.errors import quote
from scheduler_plugin.errors import HistoryError, WireError

SPANS: Final[Mapping[str, float]] = {"1h": 3600.0, "6h": 6 * 3600.0, "24h": 24 * 3600.0, "7d": 7 * 86400.0}
"""The spans that a page can show, in seconds."""
POINTS: Final = 120
KEPT_SECONDS: Final = 15.0
MAX_KEPT: Final = 256
_LEAST_RATE_SECONDS: Final = 120.0
"""A rate needs several scrapes: eight at the interval of deploy/monitoring."""
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9./_-]{0,251}[A-Za-z0-9])?")
"""GPU UUIDs, and names of namespaces and pods."""


class MetricStore(Protocol):
    """The store of samples."""

    async def query_range(self, query: str, start: float, end: float, step_seconds: float) -> Sequence[tuple[float, float]]:
        """Return the points of the query's only series, as (seconds since 1970, value). Raises HistoryError."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a graph. In ``query``, {of} is replaced by the subject's matchers and {rate} by the window of a rate."""

    graph: str
    name: str
    query: str


class Line(msgspec.Struct):
    """One line: bytes in the graph ``memory``, a ratio or seconds per second in ``compute``, pods in ``waiting``."""

    graph: str
    name: str
    points: list[tuple[float, float]]


class Past(msgspec.Struct, rename="camel"):
    """The history for one page."""

    start: float
    end: float
    step_seconds: float
    lines: list[Line]


_THROTTLED: Final = "sum(rate(aliquot_container_throttled_seconds_total{of}[{rate}]))"
OF_CLUSTER: Final = (
    Question("memory", "total", "sum(aliquot_device_memory_total_bytes{of})"),
    Question("memory", "promised", "sum(aliquot_device_memory_allocated_bytes{of})"),
    Question("memory", "used", "sum(aliquot_device_memory_used_bytes{of})"),
    Question("compute", "busy", "avg(aliquot_device_utilization_ratio{of})"),
    Question("waiting", "waiting pods", "max(aliquot_scheduler_waiting_pods{of})"),
)
OF_GPU: Final = (
    *OF_CLUSTER[:3],
    Question("compute", "busy", "max(aliquot_device_utilization_ratio{of})"),
    Question("compute", "throttled", _THROTTLED),
)
OF_POD: Final = (
    Question("memory", "limit", "sum(aliquot_container_memory_limit_bytes{of})"),
    Question("memory", "used", "sum(aliquot_container_memory_used_bytes{of})"),
    Question("compute", "busy", "sum(aliquot_container_utilization_ratio{of})"),
    Question("compute", "throttled", _THROTTLED),
)


def queries(subject: Mapping[str, str], span_seconds: float) -> list[tuple[Question, str]]:
    """Return the lines for a subject, each with its query.

    Args: subject: ``{"gpu": UUID}``, ``{"pod": "namespace/name"}``, or empty for the cluster.
    Raises: WireError: any other subject.
    """
    if not subject:
        return _written(OF_CLUSTER, "", span_seconds)
    match dict(subject):
        case {"gpu": uuid, **further} if not further and _NAME.fullmatch(uuid):
            return _written(OF_GPU, f'{{device_uuid="{uuid}"}}', span_seconds)
        case {"pod": pod, **further} if not further and pod.count("/") == 1 and _NAME.fullmatch(pod):
            namespace, _, name = pod.partition("/")
            return _written(OF_POD, f'{{namespace="{namespace}", pod="{name}"}}', span_seconds)
    raise WireError(f"expected no subject, gpu=UUID or pod=namespace/name, found {quote(repr(dict(subject)))}")


def _written(questions: Sequence[Question], matchers: str, span_seconds: float) -> list[tuple[Question, str]]:
    window = f"{max(_LEAST_RATE_SECONDS, 2 * span_seconds / POINTS):.0f}s"
    return [(one, one.query.replace("{of}", matchers).replace("{rate}", window)) for one in questions]


class History:
    """Serves pages; each is queried at most once in ``KEPT_SECONDS``. Used on one event loop.

    Args: now: seconds since 1970.
    """

    def __init__(self, store: MetricStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._kept: OrderedDict[tuple[str, ...], tuple[float, asyncio.Task[Past]]] = OrderedDict()

    async def ask(self, parameters: Mapping[str, str]) -> Past:
        """Return the history for a page's parameters: ``span``, and at most one of ``gpu`` and ``pod``. Raises WireError, HistoryError."""
        subject = dict(parameters)
        span = subject.pop("span", "1h")
        if span not in SPANS:
            raise WireError(f"expected a span of {', '.join(SPANS)}, found {quote(span)}")
        wanted = queries(subject, SPANS[span])
        key = (span, *(query for _, query in wanted))
        now = self._now()
        if (kept := self._kept.get(key)) is None or not 0 <= now - kept[0] < KEPT_SECONDS or _failed(kept[1]):
            kept = now, asyncio.create_task(self._past(wanted, now, SPANS[span]), name="history")
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return await asyncio.shield(kept[1])

    async def _past(self, wanted: Sequence[tuple[Question, str]], now: float, span_seconds: float) -> Past:
        step = span_seconds / POINTS
        end = math.floor(now / KEPT_SECONDS) * KEPT_SECONDS
        answers = await asyncio.gather(
            *(self._store.query_range(query, end - span_seconds, end, step) for _, query in wanted), return_exceptions=True
        )
        lines = []
        for (question, _), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            points = [(at, value) for at, value in answer if math.isfinite(value)][: POINTS + 1]
            lines.append(Line(question.graph, question.name, points))
        return Past(end - span_seconds, end, step, lines)


def _failed(task: asyncio.Task[Past]) -> bool:
    return task.done() and (task.cancelled() or isinstance(task.exception(), HistoryError))
