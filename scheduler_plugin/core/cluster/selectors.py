# SPDX-License-Identifier: Apache-2.0
"""Label selectors of the Kubernetes API."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Operator(StrEnum):
    """How a requirement compares a label."""

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
        """Whether labels meet the requirement."""
        match self.operator:
            case Operator.EXISTS:
                return self.label in labels
            case Operator.DOES_NOT_EXIST:
                return self.label not in labels
            case Operator.IN:
                return labels.get(self.label) in self.values
            case Operator.NOT_IN:
                return labels.get(self.label) not in self.values


Selector: TypeAlias = tuple[Requirement, ...] | None
"""All must be met, so an empty selector covers every pod. ``None`` covers no pod."""


def covers(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Whether a selector covers a pod with these labels."""
    return selector is not None and all(requirement.met(labels) for requirement in selector)


def exactly(labels: Mapping[str, str]) -> Iterable[Requirement]:
    """Return the requirements that ``matchLabels`` stands for."""
    return (Requirement(label, Operator.IN, frozenset((value,))) for label, value in labels.items())
