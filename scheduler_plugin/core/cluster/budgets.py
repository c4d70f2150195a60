# SPDX-License-Identifier: Apache-2.0
"""PodDisruptionBudgets: how many pods of a group may end at the same time.

Preemption may violate a budget. kube-scheduler does so only if no other victims help, and the victims that we add follow the same order.
The API server counts how many more pods a budget allows to end; pods with a granted eviction are included.

The violations of a budget are the pods that end beyond its allowance. A pod that two budgets cover is one violation for kube-scheduler and
two for us; the API server refuses to evict such pods at all.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.selectors import Selector, covers

BudgetKey: TypeAlias = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One PodDisruptionBudget."""

    namespace: str
    name: str
    selector: Selector
    allowed: int
    """How many more of its pods may end now."""
    let_go: frozenset[str] = frozenset()
    """Names of pods with a granted eviction that have not ended yet."""

    @property
    def key(self) -> BudgetKey:
        """Namespace and name."""
        return self.namespace, self.name

    def covers(self, pod: PodFacts, labels: Mapping[str, str]) -> bool:
        """Whether the end of a pod of this namespace, with these labels, counts."""
        return pod.name not in self.let_go and covers(self.selector, labels)

    def counts(self, pod: PodFacts) -> bool:
        """Whether the end of a pod of any namespace counts."""
        return pod.namespace == self.namespace and self.covers(pod, dict(pod.labels))


class Budgets:
    """All budgets of the cluster."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[str, Budget]] = {}
        self._loosened: dict[BudgetKey, Budget] = {}
        """Budgets that now allow more pods to end, or other pods, as they were before the change."""
        self._counted: dict[BudgetKey, tuple[float, Budget]] = {}
        """Budgets for which evictions are counted that the watch has not reported: until when, and the last report."""

    def put(self, budget: Budget) -> None:
        """Store a new or changed budget."""
        self._counted.pop(budget.key, None)
        of_namespace = self._by_namespace.setdefault(budget.namespace, {})
        before = of_namespace.get(budget.name)
        if before is not None and (budget.allowed > before.allowed or budget.selector != before.selector):
            self._loosened[budget.key] = before
        of_namespace[budget.name] = budget

    def drop(self, budget: Budget) -> None:
        """Forget a budget."""
        self._counted.pop(budget.key, None)
        before = self._by_namespace.get(budget.namespace, {}).pop(budget.name, None)
        if before is not None:
            self._loosened[before.key] = before

    def replace(self, budgets: Iterable[Budget]) -> None:
        """Store a full list: budgets that are not in it are gone."""
        listed = {budget.key: budget for budget in budgets}
        for before in list(self.all()):
            if before.key not in listed:
                self.drop(before)
        for budget in listed.values():
            self.put(budget)

    def all(self) -> Iterator[Budget]:
        """Yield all budgets."""
        return (budget for known in self._by_namespace.values() for budget in known.values())

    def count_eviction(self, pod: PodFacts, until: float) -> None:
        """Count a pod for which an eviction was granted, as the API server does at that moment: the watch reports it later.

        Args: until: as for ``expire_counted``. The server does not count a pod that is pending or not ready, and then reports nothing.
        """
        for key in self.covering(pod):
            budget = self._by_namespace[key[0]][key[1]]
            _, reported = self._counted.get(key, (until, budget))
            self.put(replace(budget, allowed=max(0, budget.allowed - 1), let_go=budget.let_go | {pod.name}))
            self._counted[key] = until, reported

    def expire_counted(self, now: float) -> None:
        """Return to the last report of each budget for which the watch should have reported a newer one by now."""
        for until, reported in list(self._counted.values()):
            if until <= now:
                self.put(reported)

    def take_loosened(self) -> Collection[Budget]:
        """Return the budgets that allow more pods to end, or other pods, than at the previous call, as they were then."""
        loosened, self._loosened = self._loosened, {}
        return loosened.values()

    def covering(self, pod: PodFacts) -> frozenset[BudgetKey]:
        """Return the budgets that count a pod's end."""
        budgets = self._by_namespace.get(pod.namespace)
        if not budgets:
            return frozenset()
        labels = dict(pod.labels)
        return frozenset(budget.key for budget in budgets.values() if budget.covers(pod, labels))

    def allowed_after(self, ended: Iterable[PodFacts], keys: Iterable[BudgetKey]) -> Mapping[BudgetKey, int]:
        """Return how many more pods each of some budgets allows to end, once these pods have ended."""
        counts = Counter(key for pod in ended for key in self.covering(pod))
        budgets = [self._by_namespace[namespace][name] for namespace, name in set(keys)]
        return {budget.key: max(0, budget.allowed - counts[budget.key]) for budget in budgets}


def violations(covered: Iterable[Iterable[BudgetKey]], allowed: Mapping[BudgetKey, int]) -> int:
    """Return by how many pods budgets are exceeded.

    Args: covered: of each pod that ends, the budgets that count it. allowed: as ``Budgets.allowed_after`` returns it.
    """
    counts = Counter(key for keys in covered for key in keys)
    return sum(max(0, count - allowed[key]) for key, count in counts.items())
