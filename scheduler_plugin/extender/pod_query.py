# SPDX-License-Identifier: Apache-2.0
"""The pod of a call, decoded and parsed once: kube-scheduler sends the same text to filter, prioritize and preempt.

Replicas have different texts but equal requests. Their request and shape are parsed once too.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from aliquot.contract.model import PodRequest
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.fit.shapes import PodShape
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.cache import keep
from scheduler_plugin.extender.verdicts import Verdicts, request_alike

_NO_GPU: Final = PodRequest(())


@dataclass(frozen=True, slots=True)
class PodQuery:
    """The pod of a call and its GPU request: None without one, the error of an invalid one."""

    pod: PodFacts
    request: PodRequest | RequestError | None
    shape: PodShape
    """What verdicts depend on. Without a valid GPU request that is its CPU and RAM."""


class PodQueries:
    """The pods of recent calls, by their JSON text."""

    def __init__(self, verdicts: Verdicts) -> None:
        self._verdicts = verdicts
        self._by_text: OrderedDict[bytes, PodQuery] = OrderedDict()

    def read(self, raw: msgspec.Raw) -> PodQuery:
        """Decode the pod of a call. Raises WireError."""
        text = bytes(raw)
        query = self._by_text.get(text)
        if query is None:
            query = self._parse(wire.decode_pod(raw))
            keep(self._by_text, text, query)
        used = self._verdicts.utilization_of(query.pod)  # it may have changed since the pod was read
        return query if used == query.shape.used else replace(query, shape=replace(query.shape, used=used))

    def _parse(self, pod: PodFacts) -> PodQuery:
        requests = self._verdicts.requests
        equal = next((other for other in self._by_text.values() if request_alike(other.pod, pod)), None)
        if equal is not None:
            requests.put(pod, equal.request)
            return replace(equal, pod=pod)
        request = requests.of(pod)
        return PodQuery(pod, request, self._verdicts.shape_of(pod, request if isinstance(request, PodRequest) else _NO_GPU))
