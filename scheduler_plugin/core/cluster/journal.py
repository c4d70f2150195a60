# SPDX-License-Identifier: Apache-2.0
"""The history of the cluster's state, from which any recent moment can be rebuilt for replay, what-if and explanations.

A picture is a shallow copy of the state's tables; their entries never change. Between two pictures each event is kept. Adding an event
costs one append, so the history is always on. Invariant: a state rebuilt from a moment decides as the state did at that moment;
tests/unit/scheduler_plugin/core/explain/test_replay.py compares both over random histories.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import Policy
from aliquot.placement.demand import Demand, Shape
from scheduler_plugin.core.cluster.budgets import Budget
from scheduler_plugin.core.cluster.nodes import NodeFacts
from scheduler_plugin.core.cluster.pods import PodFacts, Use
from scheduler_plugin.core.score.cost import HostDemand, Weights

MAX_EVENTS: Final = 20_000
"""Events after which a new picture is taken: a copy of three tables, a few milliseconds for 50,000 pods."""
VERSION: Final = 1


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A reservation: where a pod is expected, and what it takes there."""

    pod_uid: str
    node: str
    footprint: Mapping[str, Use]
    demand: HostDemand
    firm: bool = False
    """Whether its stage is firm."""
    ready: bool = False
    """Whether its stage is READY: it waits there for the rest of its gang."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A node's allocatable CPU and RAM; ``None`` for a node that is gone."""

    name: str
    cpu_milli: int | None = None
    ram_mib: int | None = None


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The labels that say where a node is."""

    name: str
    labels: Mapping[str, str]


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The held room that a pod may use: the UIDs of the reservations that do not count for it."""

    pod_uid: str
    holds: frozenset[str]


class Event(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One change: exactly one field is set. Thousands are kept without cycles, so the garbage collector can skip them."""

    node: GpuNode | None = None
    node_gone: str | None = None
    host: Host | None = None
    place: Place | None = None
    pod: PodFacts | None = None
    pod_gone: str | None = None
    held: Held | None = None
    let_go: str | None = None
    let_pass: Pass | None = None


class Picture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the state at one moment."""

    nodes: Mapping[str, GpuNode] = {}
    hosts: Mapping[str, tuple[int, int]] = {}
    pods: Mapping[str, PodFacts] = {}
    held: Mapping[str, Held] = {}
    places: Mapping[str, Mapping[str, str]] = {}
    passes: Mapping[str, frozenset[str]] = {}


@dataclass(frozen=True, slots=True)
class Part:
    """A picture, and the events since."""

    picture: Picture = field(default_factory=Picture)
    events: list[Event] = field(default_factory=list)


class Moment(NamedTuple):
    """A point in the history, and the demand at that time."""

    part: Part
    position: int
    demand: Demand


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings on which a decision depends."""

    default_policy: Policy
    weights: Mapping[Policy, Weights]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A moment as a document, with all that is needed to repeat a decision."""

    version: int
    taken_at: float
    """Seconds since 1970."""
    rules: Rules
    shapes: tuple[tuple[Shape, int], ...]
    """The demand: shapes and their weights."""
    picture: Picture
    events: list[Event]
    generation: int | None = None
    """The state's change counter at that moment; None if it was not recorded."""
    age_seconds: float | None = None
    """Seconds from the last event of the watch that is furthest behind to ``taken_at``; None if a watch had no event yet, or if it was not
    recorded."""
    budgets: tuple[Budget, ...] = ()
    """The disruption budgets; only in snapshots for consolidation and what-if, as are the two fields below."""
    closed_nodes: tuple[str, ...] = ()
    """``ClusterState.closed_nodes``."""
    node_facts: tuple[NodeFacts, ...] = ()
    """Labels and taints of all nodes; empty where they are not read."""


def snapshot_of(moment: Moment, rules: Rules, taken_at: float, generation: int | None = None, age_seconds: float | None = None) -> Snapshot:
    """Return a moment as a document; cheap, because the entries are shared."""
    picture, events = moment.part.picture, moment.part.events[: moment.position]
    return Snapshot(VERSION, taken_at, rules, moment.demand.shapes, picture, events, generation, age_seconds)
