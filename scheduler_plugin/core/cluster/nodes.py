# SPDX-License-Identifier: Apache-2.0
"""Labels and taints of nodes, and which nodes a pod may use by them.

kube-scheduler checks them for a pod that exists. A seat is planned before its pod exists, so the check is made here too: node selector,
required affinity to nodes, and taints. Ports, volumes, affinity to pods and spreads are not checked here.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

HARD_EFFECTS: Final = ("NoSchedule", "NoExecute")
_CONDITIONS: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes begins its own taints with these: the node is cordoned, not ready, short of something, or new."""
_MOST_ANSWERS: Final = 64
"""A tenant chooses the rules, and an answer names up to all nodes."""


class Taint(msgspec.Struct, frozen=True):
    """A taint of a node."""

    key: str = ""
    value: str = ""
    effect: str = ""


CORDONED: Final = Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
"""The taint of a node that takes no new pods (``spec.unschedulable``)."""


class Toleration(msgspec.Struct, frozen=True):
    """A toleration of a pod. An empty key or effect matches all."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        """Whether a pod with this toleration may run on a node with the taint."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or (self.operator in ("", "Equal") and bool(self.key) and self.value == taint.value)


class Expression(msgspec.Struct, frozen=True):
    """One requirement of a node affinity."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()

    def met(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels meets it. An unknown operator is never met."""
        return _OPERATORS.get(self.operator, _never)(labels.get(self.key), self.values)


class NodeTerm(msgspec.Struct, frozen=True, rename="camel"):
    """One term of a node affinity: all of its requirements must be met. A term without any matches no node."""

    match_expressions: tuple[Expression, ...] = ()
    match_fields: tuple[Expression, ...] = ()

    def agrees_with(self, labels: Mapping[str, str], keys: Collection[str]) -> bool:
        """Whether its requirements about these keys are met by the labels."""
        return all(one.met(labels) for one in self.match_expressions if one.key in keys)

    def met(self, node: "NodeFacts") -> bool:
        """Whether a node meets the term."""
        if not self.match_expressions and not self.match_fields:
            return False
        fields = {"metadata.name": node.name}
        return all(one.met(node.labels) for one in self.match_expressions) and all(one.met(fields) for one in self.match_fields)


def _never(_: str | None, __: tuple[str, ...]) -> bool:
    return False


def _compare(value: str | None, values: tuple[str, ...], holds: Callable[[int, int], bool]) -> bool:
    try:
        return value is not None and len(values) == 1 and holds(int(value), int(values[0]))
    except ValueError:
        return False


_OPERATORS: Final[Mapping[str, Callable[[str | None, tuple[str, ...]], bool]]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
    "Gt": lambda value, values: _compare(value, values, int.__gt__),
    "Lt": lambda value, values: _compare(value, values, int.__lt__),
}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether Kubernetes lets the node take new pods: it has no hard taint for its condition."""
        return not any(taint.effect in HARD_EFFECTS and taint.key.startswith(_CONDITIONS) for taint in self.taints)


@dataclass(frozen=True, slots=True)
class NodeRules:
    """Which nodes a pod may use."""

    selector: tuple[tuple[str, str], ...] = ()
    """Labels that a node must have."""
    terms: tuple[NodeTerm, ...] | None = None
    """The required affinity: one of these terms must be met; None without one."""
    tolerations: tuple[Toleration, ...] = ()

    @property
    def selects(self) -> bool:
        """Whether they require something of a node besides that its taints are tolerated."""
        return bool(self.selector) or self.terms is not None

    def narrowed(self, labels: Mapping[str, str], tolerations: Iterable[Toleration] = ()) -> "NodeRules":
        """Return the rules of a pod that also requires these labels, and has these tolerations too."""
        return NodeRules(tuple(sorted({*self.selector, *labels.items()})), self.terms, (*self.tolerations, *tolerations))

    def agree_with(self, labels: Mapping[str, str], keys: Collection[str]) -> bool:
        """Whether the rules about these keys allow nodes that have, of these keys, the labels."""
        if any(labels.get(key) != value for key, value in self.selector if key in keys):
            return False
        return self.terms is None or any(term.agrees_with(labels, keys) for term in self.terms)

    def tolerate(self, taints: Iterable[Taint]) -> bool:
        """Whether a pod with these rules may run in spite of some taints."""
        hard = (taint for taint in taints if taint.effect in HARD_EFFECTS)
        return all(any(toleration.covers(taint) for toleration in self.tolerations) for taint in hard)

    def allow(self, node: NodeFacts) -> bool:
        """Whether a pod with these rules may use a node."""
        if any(node.labels.get(key) != value for key, value in self.selector):
            return False
        if self.terms is not None and not any(term.met(node) for term in self.terms):
            return False
        return self.tolerate(node.taints)


class NodeDirectory:
    """All nodes, with their labels and taints."""

    def __init__(self) -> None:
        self.version = 0
        """Grows when the rules of a pod may allow a node that they did not allow before."""
        self._nodes: dict[str, NodeFacts] = {}
        self._allowed: dict[NodeRules, frozenset[str]] = {}
        """Answers for the present nodes: pods of a template have the same rules."""

    def put(self, node: NodeFacts) -> None:
        """Store a new or changed node."""
        if self._nodes.get(node.name) != node:
            self._nodes[node.name] = node
            self.version += 1
            self._allowed.clear()

    def drop(self, name: str) -> None:
        """Forget a node."""
        if self._nodes.pop(name, None) is not None:
            self._allowed.clear()

    def keep(self, names: Collection[str]) -> None:
        """Forget all nodes but these."""
        for name in self._nodes.keys() - set(names):
            self.drop(name)

    def knows(self, name: str) -> bool:
        """Whether a node exists."""
        return name in self._nodes

    @property
    def is_empty(self) -> bool:
        """Whether no labels and taints are known: they are not read, or no node was listed yet."""
        return not self._nodes

    def all(self) -> tuple[NodeFacts, ...]:
        """Return all nodes."""
        return tuple(self._nodes.values())

    def are_ready(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of some nodes that take new pods."""
        return frozenset(name for name in names if name in self._nodes and self._nodes[name].is_ready)

    def allowed(self, rules: NodeRules) -> frozenset[str]:
        """Return the names of the nodes that a pod with these rules may use."""
        found = self._allowed.get(rules)
        if found is None:
            if len(self._allowed) >= _MOST_ANSWERS:
                self._allowed.clear()
            found = self._allowed[rules] = frozenset(name for name, node in self._nodes.items() if rules.allow(node))
        return found


def rules_from(selector: Mapping[str, str] | None, required: Any, tolerations: Iterable[Toleration] | None) -> NodeRules:
    """Put rules together. Args: required: the node affinity's required part, as JSON. Raises msgspec.ValidationError."""
    terms = None if required is None else msgspec.convert(required, _Required).node_selector_terms
    return NodeRules(tuple(sorted((selector or {}).items())), terms, tuple(tolerations or ()))


class _NodeAffinity(msgspec.Struct):
    required: Any = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class _Affinity(msgspec.Struct, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _Required(msgspec.Struct, rename="camel"):
    node_selector_terms: tuple[NodeTerm, ...] = ()


class _Spec(msgspec.Struct, rename="camel"):
    node_selector: dict[str, str] | None = None
    affinity: _Affinity | None = None
    tolerations: list[Toleration] | None = None


def rules_of(spec: Mapping[str, Any]) -> NodeRules:
    """Read the rules of a pod's spec. Raises msgspec.ValidationError."""
    read = msgspec.convert(spec, _Spec)
    affinity = None if read.affinity is None else read.affinity.node_affinity
    return rules_from(read.node_selector, None if affinity is None else affinity.required, read.tolerations)
