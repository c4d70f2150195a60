# SPDX-License-Identifier: Apache-2.0
"""The simulation: arrivals, quotas, starts, preemption and ends on a simulated clock.

At each moment, pods that end leave first, then workloads arrive, then queues admit, then what waits is tried: by priority, and by arrival
among equals. A workload that does not fit does not hold up those behind it, as in kube-scheduler. It is tried again when something ended.
Preempted workloads end at once, wait with their first time of arrival, and start again from their beginning.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from aliquot.contract.model import Policy
from aliquot_lab.simulate.run import Tick, no_progress, weights_of
from aliquot_lab.simulate.timeline.choosers import FORMULAS, make_chooser
from aliquot_lab.simulate.timeline.cluster import SimulatedCluster
from aliquot_lab.simulate.timeline.model import PodKind, Queue, SimNode, SimPod, Workload
from aliquot_lab.simulate.timeline.outcome import End, Outcome, Record, Sample
from aliquot_lab.simulate.timeline.quotas import Quotas
from aliquot_lab.simulate.timeline.victims import SimulatedClock, Victims
from aliquot_lab.simulate.timeline.waiting import Waiting
from aliquot_lab.simulate.timeline.workloads import workloads_of
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS

TICK_WORKLOADS: Final = 50
MAX_EVICTIONS_TRIED: Final = 8
"""For a gang, an eviction can turn out not to help its other members; then the next cheapest is tried."""
NO_QUOTA: Final = "no quota in the queue"
NO_EMPTY_NODE: Final = "no node could take it, even without other pods"
_Group: TypeAlias = tuple[int, tuple[PodKind, ...]]
"""Priority and kinds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all policies of one simulation have in common."""

    nodes: Sequence[SimNode]
    pods: Sequence[SimPod]
    queues: Sequence[Queue] = ()
    seed: int = 42
    preempts: bool = True
    """Whether more important workloads end less important ones."""
    rates_cpu_pods: bool = True
    """Whether our own policies place pods without GPUs; if not, kube-scheduler's defaults do."""


@dataclass(slots=True)
class _Progress:
    """What is known of one workload so far."""

    workload: Workload
    started: float | None = None
    runs_since: float | None = None
    starts: int = 0
    preempted: int = 0
    reason: str = ""
    end: End | None = None


def simulate(policy: str, setting: Setting, *, tick: Tick = no_progress, watch: "Watch | None" = None) -> Outcome:
    """Run one policy. Args: watch: called after every moment. Raises PolicyError: the policy is unknown or does not suit the nodes."""
    simulation = Simulation(policy, setting)
    for number, workload in enumerate(simulation.workloads):
        if not number % TICK_WORKLOADS:
            tick(number / len(simulation.workloads))
        simulation.run_until(workload.arrival_seconds, watch)
        simulation.arrive(workload)
    simulation.run_until(None, watch)
    return simulation.outcome()


class Simulation:
    """One policy on one cluster."""

    def __init__(self, policy: str, setting: Setting) -> None:
        self.setting = setting
        self.workloads = workloads_of(setting.pods, setting.seed)
        self.cluster = _cluster(policy, setting)
        self.clock = SimulatedClock()
        self.quotas = Quotas(setting.queues, max(node.gpu_memory_mib for node in setting.nodes))
        self.progress = [_Progress(workload) for workload in self.workloads]
        self.waiting = Waiting[_Group]()
        """Workloads that may start and have no room."""
        self._policy = policy
        self._victims = Victims(self.cluster, self.clock)
        self._failed: dict[_Group, int] = {}
        """By group, the value of ``_freed`` at the last failed attempt."""
        self._why: dict[_Group, str] = {}
        """By group, why the last attempt failed."""
        self._freed = 0
        """Grows when something ended."""
        self._ending: list[tuple[float, int, int]] = []
        """When workloads end, their numbers and starts."""
        self._arrived: list[Workload] = []
        self._workload_of = {self.cluster.uid_of(pod): workload for workload in self.workloads for pod in workload.pods}
        self._preemptions = self._reclaims = 0
        self._lost = 0.0
        self._begin = self.workloads[0].arrival_seconds
        self.clock.seconds = self._begin
        self._samples = [Sample(self._begin, 0, self.cluster.whole_nodes, 0)]

    def arrive(self, workload: Workload) -> None:
        """Note that a workload arrives now; it is tried when the clock moves on."""
        self._arrived.append(workload)

    def run_until(self, seconds: float | None, watch: "Watch | None" = None) -> None:
        """Do everything that happens before a moment; None: everything."""
        if seconds is not None and seconds == self.clock.seconds:
            return
        self._decide(watch)
        while (due := self._next_end()) is not None and (seconds is None or due < seconds):
            self.clock.seconds = due
            self._end_due()
            self._decide(watch)
        if seconds is not None:
            self.clock.seconds = seconds
            self._end_due()

    def outcome(self) -> Outcome:
        """Return what was found."""
        return Outcome(
            self._policy,
            self.setting.seed,
            len(self.setting.nodes),
            sum(node.gpus for node in self.setting.nodes),
            [self._record(known) for known in self.progress],
            self._samples,
            self._begin,
            self.workloads[-1].arrival_seconds,
            self.clock.seconds,
            self._preemptions,
            self._reclaims,
            self._lost,
        )

    def state_of(self, workload: Workload) -> End | None:
        """Return the present state of a workload; None before its arrival."""
        known = self.progress[workload.number]
        if known.end is not None:
            return known.end
        if known.runs_since is not None:
            return End.RUNNING
        if workload in self.waiting:
            return End.WAITING
        return End.QUEUED if workload in self.quotas.waiting else None

    def _record(self, known: _Progress) -> Record:
        workload, end = known.workload, self.state_of(known.workload)
        if end is None:
            raise AssertionError(f"{workload.name} has no state at the end")
        if known.started is None and not known.reason:
            known.reason = NO_QUOTA if end is End.QUEUED else self._why[_group(workload)]
        until = self.clock.seconds if known.started is None else known.started
        return Record(workload, end, known.started, until - workload.arrival_seconds, known.preempted, known.reason)

    def _decide(self, watch: "Watch | None") -> None:
        """Do what this moment allows: queues admit, workloads start."""
        for workload in self._arrived:
            self._enter(workload)
        self._arrived.clear()
        self._admit()
        while (following := self._next()) is not None:
            group, workload = following
            why = self._try(workload)
            if why:
                self._failed[group], self._why[group] = self._freed, why
        self._note()
        if watch is not None:
            watch(self)

    def _enter(self, workload: Workload) -> None:
        known = self.progress[workload.number]
        if not self.cluster.could_ever_start(workload):
            known.end, known.reason = End.REFUSED, NO_EMPTY_NODE
        elif workload.queue:
            self.quotas.add(workload)
        else:
            self._wait(workload)

    def _admit(self) -> None:
        admitted, reclaimed = self.quotas.admit()
        for workload in reclaimed:
            if workload in self.waiting:
                self.waiting.remove(_group(workload), workload)
                self.cluster.withdraw(workload)
            elif self.progress[workload.number].runs_since is not None:
                self._reclaims += 1
                self._interrupt(workload)
        for workload in admitted:
            self._note_late(workload, NO_QUOTA)
            self._wait(workload)

    def _wait(self, workload: Workload) -> None:
        self.cluster.announce(workload)
        self.waiting.add(_group(workload), workload)

    def _next(self) -> tuple[_Group, Workload] | None:
        """Return what is tried next: the most important, then the first to arrive, without those that cannot fit now."""
        heads = [(group, workload) for group, workload in self.waiting.heads() if self._failed.get(group) != self._freed]
        return min(heads, key=lambda head: (-head[1].priority, head[1].number), default=None)

    def _try(self, workload: Workload) -> str:
        """Start a workload, with preemption if that is allowed and helps. Returns: why it cannot start; empty if it started."""
        why = self.cluster.start(workload)
        if why and not (self.setting.preempts and self._preempt(workload)):
            return why
        known, group = self.progress[workload.number], _group(workload)
        self._note_late(workload, self._why.get(group, ""))
        self.waiting.remove(group, workload)
        self._victims.note_started(workload)
        known.runs_since, known.starts = self.clock.seconds, known.starts + 1
        if known.started is None:
            known.started = self.clock.seconds
        if workload.duration_seconds is not None:
            heapq.heappush(self._ending, (self.clock.seconds + workload.duration_seconds, workload.number, known.starts))
        return ""

    def _preempt(self, workload: Workload) -> bool:
        """End less important workloads, and start this one in their place; or leave everything as it was."""
        for eviction in self._victims.evictions(workload)[:MAX_EVICTIONS_TRIED]:
            victims = list({self._workload_of[uid].number: self._workload_of[uid] for uid in sorted(eviction.uids)}.values())
            if sum(len(victim.pods) for victim in victims) != len(eviction.uids):
                raise AssertionError(f"an eviction for {workload.name} would end a part of a gang")
            if self._replace(victims, workload):
                return True
        return False

    def _replace(self, victims: Sequence[Workload], workload: Workload) -> bool:
        """Start a workload in the place of running ones; return whether that works. If not, everything is as before."""
        placements = [self.cluster.stop(victim) for victim in victims]
        if self.cluster.start(workload):
            for victim, held in zip(victims, placements, strict=True):
                self.cluster.restore(victim, held)
            return False
        for victim, held in zip(victims, placements, strict=True):
            self._preemptions += 1
            self._set_back(victim, sum(placement.milli for placement in held))
            self._wait(victim)
        return True

    def _interrupt(self, workload: Workload) -> None:
        """End a running workload before its time."""
        held = self.cluster.stop(workload)
        self._set_back(workload, sum(placement.milli for placement in held))

    def _set_back(self, workload: Workload, milli: int) -> None:
        """Count what a workload loses that was ended. Args: milli: thousandths of GPUs that it held."""
        known = self.progress[workload.number]
        if known.runs_since is None:
            raise AssertionError(f"{workload.name} does not run")
        self._lost += (self.clock.seconds - known.runs_since) * milli / 1000
        known.runs_since, known.preempted = None, known.preempted + 1
        self._victims.note_ended(workload)
        self._freed += 1

    def _next_end(self) -> float | None:
        """Return when the next workload ends; None without one. Forgets the ends of workloads that were ended before."""
        while self._ending:
            seconds, number, start = self._ending[0]
            known = self.progress[number]
            if known.runs_since is not None and known.starts == start:
                return seconds
            heapq.heappop(self._ending)
        return None

    def _end_due(self) -> None:
        """End the workloads that are due now."""
        while (due := self._next_end()) is not None and due <= self.clock.seconds:
            known = self.progress[heapq.heappop(self._ending)[1]]
            self.cluster.stop(known.workload)
            self.quotas.release(known.workload)
            self._victims.note_ended(known.workload)
            known.runs_since, known.end = None, End.ENDED
            self._freed += 1

    def _note_late(self, workload: Workload, why: str) -> None:
        """Note why a workload did not start, or was not admitted, in the moment of its arrival; the first reason stays."""
        known = self.progress[workload.number]
        if not known.reason and known.starts == 0 and self.clock.seconds > workload.arrival_seconds:
            known.reason = why

    def _note(self) -> None:
        sample = Sample(self.clock.seconds, self.cluster.held_milli, self.cluster.whole_nodes, len(self.waiting) + len(self.quotas.waiting))
        if self._samples[-1].seconds == sample.seconds:
            self._samples.pop()
        self._samples.append(sample)


Watch = Callable[[Simulation], None]


def _group(workload: Workload) -> _Group:
    return workload.priority, workload.kinds


def _cluster(policy: str, setting: Setting) -> SimulatedCluster:
    ours = None if policy in FORMULAS else weights_of(policy)
    name, weights = ours or (Policy.FRAG, DEFAULT_WEIGHTS[Policy.FRAG])
    chooser = partial(make_chooser, policy=policy, pods=list(setting.pods), seed=setting.seed, rates_cpu_pods=setting.rates_cpu_pods)
    return SimulatedCluster(setting.nodes, name, {**DEFAULT_WEIGHTS, name: weights}, chooser, setting.seed)
