"""PodDisruptionBudgets: how many pods of a group may end before their owner is harmed.

Preemption may go beyond a budget, and kube-scheduler does so only when nobody else's end helps; the pods that we add keep to the same
order. The API server counts what a budget still allows; a pod that it let go already is counted there.

A budget goes beyond its allowance by as many pods as end too many. Of a pod that two budgets cover, kube-scheduler counts one violation and
we two; the API server refuses to evict such pods at all.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from scheduler_plugin.core.pods import PodFacts

BudgetKey: TypeAlias = tuple[str, str]
"""Namespace and name."""


class Operator(StrEnum):
    """What a requirement asks of a label."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement of a label selector."""

    label: str
    operator: Operator
    values: frozenset[str] = frozenset()

    def met(self, labels: Mapping[str, str]) -> bool:
        """Whether labels are as it asks."""
        match self.operator:
            case Operator.EXISTS:
                return self.label in labels
            case Operator.DOES_NOT_EXIST:
                return self.label not in labels
            case Operator.IN:
                return labels.get(self.label) in self.values
            case Operator.NOT_IN:
                return labels.get(self.label) not in self.values


@dataclass(frozen=True, slots=True)
class Budget:
    """One PodDisruptionBudget."""

    namespace: str
    name: str
    selector: tuple[Requirement, ...] | None
    """All must be met: none at all covers every pod of the namespace. None covers no pod."""
    allowed: int
    """How many more of its pods may end now."""
    let_go: frozenset[str] = frozenset()
    """Names of pods whose end was granted and has not come yet."""

    @property
    def key(self) -> BudgetKey:
        """What tells it from others."""
        return self.namespace, self.name

    def covers(self, pod: PodFacts, labels: Mapping[str, str]) -> bool:
        """Whether the end of a pod of this namespace, with these labels, counts."""
        if self.selector is None or pod.name in self.let_go:
            return False
        return all(requirement.met(labels) for requirement in self.selector)

    def counts(self, pod: PodFacts) -> bool:
        """Whether the end of a pod of any namespace counts."""
        return pod.namespace == self.namespace and self.covers(pod, dict(pod.labels))


class Budgets:
    """All budgets of the cluster."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[str, Budget]] = {}
        self._loosened: dict[BudgetKey, Budget] = {}
        """Those that let more pods go, or others, as they were before."""

    def put(self, budget: Budget) -> None:
        """Take a new or changed budget."""
        of_namespace = self._by_namespace.setdefault(budget.namespace, {})
        before = of_namespace.get(budget.name)
        if before is not None and (budget.allowed > before.allowed or budget.selector != before.selector):
            self._loosened[budget.key] = before
        of_namespace[budget.name] = budget

    def drop(self, budget: Budget) -> None:
        """Forget a budget."""
        before = self._by_namespace.get(budget.namespace, {}).pop(budget.name, None)
        if before is not None:
            self._loosened[before.key] = before

    def replace(self, budgets: Iterable[Budget]) -> None:
        """Take a full list: what is not in it is gone."""
        listed = {budget.key: budget for budget in budgets}
        for before in [budget for known in self._by_namespace.values() for budget in known.values()]:
            if before.key not in listed:
                self.drop(before)
        for budget in listed.values():
            self.put(budget)

    def take_loosened(self) -> Collection[Budget]:
        """Return the budgets that let more pods go, or others, than when this was last asked, as they were before."""
        loosened, self._loosened = self._loosened, {}
        return loosened.values()

    def covering(self, pod: PodFacts) -> frozenset[BudgetKey]:
        """Return the budgets by which a pod's end counts."""
        budgets = self._by_namespace.get(pod.namespace)
        if not budgets:
            return frozenset()
        labels = dict(pod.labels)
        return frozenset(budget.key for budget in budgets.values() if budget.covers(pod, labels))

    def allowed_after(self, ended: Iterable[PodFacts], keys: Iterable[BudgetKey]) -> Mapping[BudgetKey, int]:
        """Return how many pods each of some budgets still allows to end once these have."""
        counts = Counter(key for pod in ended for key in self.covering(pod))
        budgets = [self._by_namespace[namespace][name] for namespace, name in set(keys)]
        return {budget.key: max(0, budget.allowed - counts[budget.key]) for budget in budgets}


def violations(covered: Iterable[Iterable[BudgetKey]], allowed: Mapping[BudgetKey, int]) -> int:
    """Return by how many pods too many budgets are exceeded.

    Args: covered: of each pod that ends, the budgets that count it. allowed: as ``Budgets.allowed_after`` says.
    """
    counts = Counter(key for keys in covered for key in keys)
    return sum(max(0, count - allowed[key]) for key, count in counts.items())
