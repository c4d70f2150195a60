# SPDX-License-Identifier: Apache-2.0
"""What kube-scheduler weighs besides our score: preferences of pods for or near other pods, and soft taints of nodes.

If they do not concern a pod, the best node by our score is the node that kube-scheduler would choose, so filter may return it
alone. A preference counts wherever it might apply: its topology and the nodes of the call are not compared.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_plugin.core.cluster.pods import PodFacts, PodTerm
from scheduler_plugin.core.cluster.selectors import covers


@dataclass(slots=True)
class SoftWishes:
    """The preferences of bound pods towards other pods, and the nodes with a ``PreferNoSchedule`` taint."""

    _terms: Counter[PodTerm]
    _of_pods: dict[str, tuple[PodTerm, ...]]
    """By the UID of the pod that states them; pods without any are missing."""
    tainted: set[str]
    """Names of nodes."""

    def __init__(self) -> None:
        self._terms = Counter()
        self._of_pods = {}
        self.tainted = set()

    def put(self, pod: PodFacts) -> None:
        """Store what a bound pod states."""
        if pod.near or pod.uid in self._of_pods:
            self.drop(pod.uid)
        if pod.near:
            self._of_pods[pod.uid] = pod.near
            self._terms.update(pod.near)

    def drop(self, uid: str) -> None:
        """Forget a pod."""
        terms = self._of_pods.pop(uid, ())
        self._terms.subtract(terms)
        for term in terms:
            if not self._terms[term]:
                del self._terms[term]

    def set_tainted(self, node: str, *, tainted: bool) -> None:
        """Store whether a node has a ``PreferNoSchedule`` taint."""
        if tainted:
            self.tainted.add(node)
        else:
            self.tainted.discard(node)

    def concern(self, pod: PodFacts) -> bool:
        """Whether a bound pod states a preference that covers this pod."""
        if not self._terms:
            return False
        labels = dict(pod.labels)
        return any(_covers(term, pod, labels) for term in self._terms)


def _covers(term: PodTerm, pod: PodFacts, labels: Mapping[str, str]) -> bool:
    in_namespace = term.namespaces is None or pod.namespace in term.namespaces
    return in_namespace and covers(term.selector, labels)
