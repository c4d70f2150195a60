# SPDX-License-Identifier: Apache-2.0
"""What pods use of their GPUs, learned by template from what the agents report (``GpuNode.utilization``).

Of each template the latest pods count, each with its latest report; the template has their mean. A template without a report counts as
three quarters of the known ones are or less: a careful guess. Means are rounded, so that small changes have no effect.

Invariant: nothing is learned and all pods count as idle unless a policy has a weight for the term ``interference``.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from aliquot.contract.model import IDLE, Policy, Utilization
from scheduler_plugin.core.cluster.pod_template import MAX_TEMPLATES, Template, template_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.score.cost import Weights
from scheduler_plugin.core.score.interference import NO_AVERSION, Aversion

KEPT: Final = 16
"""Pods that count for a template."""
STEP_PERCENT: Final = 5
_TYPICAL_QUARTERS: Final = 3


class Utilizations:
    """What is known."""

    def __init__(self) -> None:
        self._weights: Mapping[Policy, float] = {}
        self._reports: OrderedDict[Template, OrderedDict[str, Utilization]] = OrderedDict()
        """By template and pod UID."""
        self._known: dict[Template, Utilization] = {}
        self._unknown = IDLE
        self._changed = False

    @property
    def matter(self) -> bool:
        """Whether a policy has a weight for interference."""
        return bool(self._weights)

    def weigh(self, weights: Mapping[Policy, Weights]) -> None:
        """Use these weights of the policies from now on; call it before the first pod is known."""
        self._weights = {policy: own.interference for policy, own in weights.items() if own.interference}

    def learn(self, pod: PodFacts, found: Utilization) -> None:
        """Note what an agent reported of a pod. It counts from the next call of ``settle``."""
        template = template_of(pod)
        if template is None or not self.matter:
            return
        reports = self._reports.setdefault(template, OrderedDict())
        self._reports.move_to_end(template)
        if reports.get(pod.uid) != found:
            reports[pod.uid] = found
            self._changed = True
        reports.move_to_end(pod.uid)
        if len(reports) > KEPT:
            reports.popitem(last=False)
        if len(self._reports) > MAX_TEMPLATES:
            self._reports.popitem(last=False)

    def settle(self) -> bool:
        """Compute what templates use from the latest reports; return whether anything changed."""
        if not self._changed:
            return False
        self._changed = False
        before = self._known, self._unknown
        self._known = {template: _mean(reports) for template, reports in self._reports.items()}
        self._unknown = Utilization(*map(_upper_quartile, zip(*self._known.values(), strict=True)))
        return before != (self._known, self._unknown)

    def of(self, pod: PodFacts | None) -> Utilization:
        """Return what a pod uses, or will use, of each of its GPUs; idle unless interference matters. Args: pod: None if unknown."""
        if not self._weights or (pod is not None and pod.gpu is None):
            return IDLE
        template = None if pod is None else template_of(pod)
        return self._unknown if template is None else self._known.get(template, self._unknown)

    def aversion(self, used: Utilization, policy: Policy) -> Aversion:
        """Return how much a pod that uses this much avoids busy GPUs under a policy."""
        weight = self._weights.get(policy)
        return NO_AVERSION if weight is None else Aversion.of(used, weight, policy)


def _mean(reports: Mapping[str, Utilization]) -> Utilization:
    return Utilization(*(_rounded(sum(amounts), len(amounts)) for amounts in zip(*reports.values(), strict=True)))


def _rounded(total: int, count: int) -> int:
    """Return a mean, to the nearest step."""
    return (2 * total + count * STEP_PERCENT) // (2 * count * STEP_PERCENT) * STEP_PERCENT


def _upper_quartile(amounts: tuple[int, ...]) -> int:
    """Return the smallest amount that three quarters of all amounts do not exceed."""
    return sorted(amounts)[-(-len(amounts) * _TYPICAL_QUARTERS // 4) - 1]
