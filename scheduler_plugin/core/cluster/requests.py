# SPDX-License-Identifier: Apache-2.0
"""Reads what pods request of GPUs.

Invariant: a pod is parsed once, and again only after its limits or annotations changed. Filter, bind, preemption, gangs, retries and
explanations share the result.
"""

from collections import OrderedDict
from typing import Final

from aliquot.contract.model import Pod, PodRequest
from aliquot.placement.request import RequestError, pod_request
from scheduler_plugin.core.cluster.pods import PodFacts

MAX_KEPT: Final = 20_000


class PodRequests:
    """A bounded cache of parsed requests, by pod UID."""

    def __init__(self) -> None:
        self._read: OrderedDict[str, tuple[Pod, PodRequest | RequestError]] = OrderedDict()

    def of(self, pod: PodFacts) -> PodRequest | RequestError | None:
        """Return what a pod requests: None without a GPU request, the error of an invalid one."""
        if pod.gpu is None:
            return None
        known = self._read.get(pod.uid)
        if known is not None and (known[0] is pod.gpu or known[0] == pod.gpu):
            return known[1]
        request = _parse(pod.gpu)
        self._keep(pod.uid, pod.gpu, request)
        return request

    def put(self, pod: PodFacts, request: PodRequest | RequestError | None) -> None:
        """Keep what is known to be the request of a pod."""
        if pod.gpu is not None and request is not None:
            self._keep(pod.uid, pod.gpu, request)

    def _keep(self, uid: str, gpu: Pod, request: PodRequest | RequestError) -> None:
        self._read[uid] = gpu, request
        self._read.move_to_end(uid)
        if len(self._read) > MAX_KEPT:
            self._read.popitem(last=False)


def _parse(gpu: Pod) -> PodRequest | RequestError:
    try:
        return pod_request(gpu)
    except RequestError as exc:
        return exc
