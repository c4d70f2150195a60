# SPDX-License-Identifier: Apache-2.0
"""Judges all nodes for a pod, and brings the verdict that the next pod probably needs up to date in advance."""

from collections import OrderedDict, deque
from itertools import chain, islice
from typing import Final

from aliquot.contract.model import PodRequest, Policy, Utilization
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.requests import PodRequests
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.shapes import MAX_KEPT, PodShape, Shapes, Verdict
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.cache import keep

MAX_UNREAD: Final = 20_000
"""Most pods that wait for a look at their shape."""


class Verdicts:
    """The verdicts on the state as it is now, and the requests that they depend on."""

    def __init__(self, state: ClusterState, shapes: Shapes, requests: PodRequests, default_policy: Policy) -> None:
        self.shapes = shapes
        self.requests = requests
        self.default_policy = default_policy
        self._state = state
        self._latest: tuple[str, PodShape] | None = None
        """UID and shape of the pod that was judged last."""
        self._next: OrderedDict[PodShape, PodShape] = OrderedDict()
        """By shape, the shape of the pod that followed it last time: pods come in series and in similar rounds."""
        self._queue: dict[int, OrderedDict[str, PodFacts]] = {}
        """New pods that wait for a node, by priority and UID, in the order in which the watch showed them."""
        self._unread: deque[PodFacts] = deque(maxlen=MAX_UNREAD)
        """Those of them for which the shape was not looked at yet."""

    def of(self, pod: PodFacts, shape: PodShape) -> Verdict:
        """Judge all nodes for a pod, as if it held no device yet. The verdict is valid until the state changes."""
        self.note_call(pod, shape)
        with self._state.without(pod.uid):
            return self.shapes.verdict(shape)

    def note_call(self, pod: PodFacts, shape: PodShape) -> None:
        """Note that kube-scheduler has come to a pod."""
        if self._latest is not None and self._latest[0] != pod.uid:
            keep(self._next, self._latest[1], shape, MAX_KEPT)
        self._latest = pod.uid, shape
        self._drop_up_to(pod)

    def shape_of(self, pod: PodFacts, request: PodRequest) -> PodShape:
        """Reduce a pod to what verdicts depend on."""
        demand, used = HostDemand(pod.cpu_milli, pod.memory_mib), self._state.utilizations.of(pod)
        return PodShape.of(request, self.default_policy, demand, used)

    def utilization_of(self, pod: PodFacts) -> Utilization:
        """Return what a pod will probably use of each of its GPUs, as far as that counts."""
        return self._state.utilizations.of(pod)

    def expect(self, pod: PodFacts) -> None:
        """Note a new pod that waits for a node: kube-scheduler takes pods by priority, and equal ones in the order of the watch."""
        if pod.gpu is not None:
            self._queue.setdefault(pod.priority, OrderedDict())[pod.uid] = pod
            self.foretell(pod)

    def foretell(self, pod: PodFacts) -> None:
        """Note a pod that the watch has not shown yet: only its shape matters."""
        if pod.gpu is not None:
            self._unread.append(pod)

    def next_pods(self, count: int) -> list[PodFacts]:
        """Return the pods that kube-scheduler takes next, in its order, at most ``count``."""
        queues = (self._queue[priority] for priority in sorted(self._queue, reverse=True))
        return list(islice(chain.from_iterable(queue.values() for queue in queues), count))

    def prepare(self) -> bool:
        """Judge in advance, in pieces: changed nodes for the pod that probably comes next, then all nodes for a new shape among the pods
        that wait. Returns: whether there was work."""
        likely = self._likely()
        if likely is not None and self.shapes.catch_up(likely):
            return True
        if self.shapes.foresee():
            return True
        if not self._unread:
            return False
        pod = self._unread.popleft()
        request = self.requests.of(pod)
        if isinstance(request, PodRequest):
            self.shapes.expect(self.shape_of(pod, request))
        return True

    def _likely(self) -> PodShape | None:
        """Return the shape of the pod that probably comes next, or of the one that followed the latest pod's shape before.

        For a pod with room on its nominated node, no verdict is needed.
        """
        for priority in sorted(self._queue, reverse=True):
            queue = self._queue[priority]
            while queue:
                uid, pod = next(iter(queue.items()))
                known, request = self._state.pods.get(uid), self.requests.of(pod)
                if known is not None and not known.node_name and isinstance(request, PodRequest):
                    held = self._state.reservations.get(uid)
                    return None if held is not None and held.node == known.nominated_node else self.shape_of(pod, request)
                queue.popitem(last=False)
            del self._queue[priority]
        return None if self._latest is None else self._next.get(self._latest[1])

    def _drop_up_to(self, pod: PodFacts) -> None:
        """Expect no more a pod that came, and those before it: kube-scheduler has them behind it, or another scheduler places them."""
        queue = self._queue.get(pod.priority)
        while queue and pod.uid in queue:
            queue.popitem(last=False)


def request_alike(one: PodFacts, other: PodFacts) -> bool:
    """Whether two pods have equal limits, annotations, CPU and RAM: request and shape depend on these only."""
    if (one.cpu_milli, one.memory_mib) != (other.cpu_milli, other.memory_mib):
        return False
    if one.gpu is None or other.gpu is None:
        return one.gpu is other.gpu
    return one.gpu.containers == other.gpu.containers and one.gpu.annotations == other.gpu.annotations
