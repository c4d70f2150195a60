"""What happened to the cluster's state, so that any recent moment can be made again: the ground of replay, what-if and explanations.

A picture is a shallow copy of the state's tables, whose rows never change; between two pictures every event is kept as it came. Noting an
event costs an append, so it is always on. Kept true: a state made from a moment answers every question as the state did at that moment;
tests/unit/scheduler_plugin/core/test_replay.py compares them over random histories.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from placement.demand import Demand, Shape
from proto.gpunode import GpuNode
from proto.model import Policy
from scheduler_plugin.core.pods import PodFacts, Use
from scheduler_plugin.core.score import HostDemand, Weights

MAX_EVENTS: Final = 20_000
"""Then a new picture is taken: a copy of three tables, a few milliseconds for 50,000 pods."""
VERSION: Final = 1


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where a pod that is not seen bound is expected, with what."""

    pod_uid: str
    node: str
    footprint: Mapping[str, Use]
    demand: HostDemand
    firm: bool = False
    """Whether its binding is under way."""
    ready: bool = False
    """Whether it waits there for the rest of its gang."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A node's allocatable CPU and RAM; none: forgotten."""

    name: str
    cpu_milli: int | None = None
    ram_mib: int | None = None


class Event(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One change: exactly one field is set. Thousands are kept and none is part of a cycle, so the garbage collector need not look."""

    node: GpuNode | None = None
    node_gone: str | None = None
    host: Host | None = None
    pod: PodFacts | None = None
    pod_gone: str | None = None
    held: Held | None = None
    let_go: str | None = None


class Picture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the state knows, at one moment."""

    nodes: Mapping[str, GpuNode] = {}
    hosts: Mapping[str, tuple[int, int]] = {}
    pods: Mapping[str, PodFacts] = {}
    held: Mapping[str, Held] = {}


@dataclass(frozen=True, slots=True)
class Part:
    """A picture, and what happened since."""

    picture: Picture = field(default_factory=Picture)
    events: list[Event] = field(default_factory=list)


class Moment(NamedTuple):
    """A point in the history, and the demand by which free room was rated then."""

    part: Part
    position: int
    demand: Demand


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a decision depends on besides the state."""

    default_policy: Policy
    weights: Mapping[Policy, Weights]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A moment as a document: enough to decide anew as it was decided then."""

    version: int
    taken_at: float
    """Seconds since 1970."""
    rules: Rules
    shapes: tuple[tuple[Shape, int], ...]
    """The demand: shapes and their weights."""
    picture: Picture
    events: list[Event]
    generation: int | None = None
    """The state's change counter at that moment; None where it was not kept."""
    age_seconds: float | None = None
    """How long before ``taken_at`` the stream furthest behind brought anything; None where not all had yet, or it was not kept."""


def snapshot_of(moment: Moment, rules: Rules, taken_at: float, generation: int | None = None, age_seconds: float | None = None) -> Snapshot:
    """Write down a moment; cheap, because the rows are shared."""
    picture, events = moment.part.picture, moment.part.events[: moment.position]
    return Snapshot(VERSION, taken_at, rules, moment.demand.shapes, picture, events, generation, age_seconds)
