# SPDX-License-Identifier: Apache-2.0
"""What the verbs and the services of one scheduler share, by subject."""

from dataclasses import dataclass, field

from scheduler_plugin.core.claims.planned import PlannedPod
from scheduler_plugin.core.cluster.budgets import Budgets
from scheduler_plugin.core.cluster.decisions import Decisions
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.requests import PodRequests
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.shapes import Shapes
from scheduler_plugin.core.gang.plan import Planner
from scheduler_plugin.core.gang.preempt import LOWEST_PRIORITY
from scheduler_plugin.extender.claims import ClaimVerdicts
from scheduler_plugin.extender.decision_log import DecisionLog
from scheduler_plugin.extender.gang import Gangs
from scheduler_plugin.extender.group_rounds import GroupRounds
from scheduler_plugin.extender.held_room import HeldRoom
from scheduler_plugin.extender.node_list import NodeLists
from scheduler_plugin.extender.pod_query import PodQueries
from scheduler_plugin.extender.put_off import PutOff
from scheduler_plugin.extender.reservations import Reservations
from scheduler_plugin.extender.score_texts import ScoreTexts
from scheduler_plugin.extender.seats import Seats
from scheduler_plugin.extender.verdicts import Verdicts
from scheduler_plugin.extender.workload_seats import WorkloadSeats
from scheduler_plugin.ports import Clock


@dataclass(frozen=True, slots=True)
class CallCache:
    """What is kept from one call of kube-scheduler for the next."""

    pods: PodQueries
    nodes: NodeLists
    scores: ScoreTexts


@dataclass(frozen=True, slots=True)
class ExtenderContext:
    """One scheduler's picture of the cluster, and how it decides."""

    state: ClusterState
    clock: Clock
    verdicts: Verdicts
    claims: ClaimVerdicts
    calls: CallCache
    log: DecisionLog
    reservations: Reservations
    seats: Seats
    workload_seats: WorkloadSeats
    held_room: HeldRoom
    gangs: Gangs
    groups: GroupRounds
    put_off: PutOff
    budgets: Budgets
    directory: NodeDirectory = field(default_factory=NodeDirectory)
    """Labels and taints of all nodes; empty where they are not read."""
    idle: set[str] = field(default_factory=set)
    """UIDs of the bound pods that give way because they do not use their GPUs. ``services.idle_pods`` keeps it up to date."""
    planned: dict[str, PlannedPod] = field(default_factory=dict)
    """The pods with claims that are allocated here, by UID. ``services.planned_pods`` keeps it up to date."""

    @classmethod
    def create(
        cls, state: ClusterState, rules: Rules, clock: Clock, *, soft_seconds: float = 10.0, gang_seconds: float = 60.0
    ) -> "ExtenderContext":
        """Join the parts. Args: soft_seconds: as for ``Reservations``. gang_seconds: as for ``Gangs``."""
        state.utilizations.weigh(rules.weights)
        shapes, requests, nodes = Shapes(state, rules.weights), PodRequests(), NodeLists(state)
        verdicts = Verdicts(state, shapes, requests, rules.default_policy)
        planner = Planner(state, shapes, rules.default_policy, requests)
        workload_seats, gangs = WorkloadSeats(state, planner), Gangs(planner, gang_seconds, clock.monotonic)
        gangs.has_seat = workload_seats.has_seat
        return cls(
            state,
            clock,
            verdicts,
            ClaimVerdicts(state, shapes, rules.default_policy, clock, soft_seconds),
            CallCache(PodQueries(verdicts), nodes, ScoreTexts(state)),
            DecisionLog(state, nodes),
            Reservations(planner, clock, soft_seconds),
            Seats(state, planner),
            workload_seats,
            HeldRoom(state, shapes),
            gangs,
            GroupRounds(state, clock.monotonic),
            PutOff(),
            Budgets(),
        )

    def is_less_important(self, pod: PodFacts, other: PodFacts) -> bool:
        """Whether a bound pod may end for another one.

        An idle pod gives way to every pod. But if it has a controller, which creates it again at once, only to those that it would not
        end in turn.
        """
        if pod.uid in self.idle:
            return pod.priority <= other.priority or not pod.controller_uid
        return pod.priority < other.priority

    def annotated(self, pod: PodFacts) -> PodFacts:
        """Return a pod with its annotations and times, also one that asks for GPUs by claims only."""
        planned = self.planned.get(pod.uid)
        return pod if planned is None or pod.gpu is not None else planned.facts

    def cost_of(self, pod: PodFacts) -> int:
        """Return the priority by which pods that may end are compared: idle ones end first."""
        return LOWEST_PRIORITY if pod.uid in self.idle else pod.priority

    @property
    def decisions(self) -> Decisions:
        """The latest decision on each pod."""
        return self.log.decisions

    def prepare(self) -> bool:
        """Do one piece of work that coming calls probably need, usually within a millisecond. Returns: whether there was work.

        It plans the binding of a pod that was just rated, or judges the shape of pod that probably comes next. This changes no reply:
        the result is used while the state stays the same, and computed again otherwise.
        """
        return self.reservations.prepare() or self.verdicts.prepare()
