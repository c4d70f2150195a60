# SPDX-License-Identifier: Apache-2.0
"""The admission check ``aliquot.dev/fits`` for Kueue: a workload is admitted only when seats for all its pods are held on real GPUs.

``core.admit.answer`` decides what a workload needs, ``core.admit.seating`` plans the seats, and ``extender.workload_seats`` keeps them for
the pods. This loop joins them on the replica that leads.

Invariant: the answer Ready is written only while the seats are held, and the seats are held until the pods come or HOLD_SECONDS are over.

- A workload without room stays Pending, with the reason. Its quota stays reserved, so after WAIT_SECONDS it gives the quota back (Retry) if
  another workload waits for quota. Retry has no delay: Kueue keeps the quota during a delay.
- Seats that no pod takes in time end. If no pod came at all, Kueue gets Retry and takes the workload back: no work is lost.
- A new leader reserves the seats of all answers again before it decides about other pods.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError, KubeRefusedError
from scheduler_plugin.core.admit.answer import Step, step_for
from scheduler_plugin.core.admit.kueue import CONTROLLER_NAME, PodSet, State, Workload
from scheduler_plugin.core.admit.seating import Demand, Lacking, Seat, Seating, SeatRecord, decode_seats, encode_seats
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.workload_seats import Hold, WorkloadKey, hold_text
from scheduler_plugin.ports import CheckAnswer, CheckApi
from scheduler_plugin.services.expected_pods import ExpectedPod, ExpectedPods, Refused
from scheduler_plugin.services.kueue_objects import KueueObjects
from scheduler_plugin.services.telemetry import Telemetry

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.5
"""A change of room is seen within this time."""
REST_FACTOR: Final = 3
"""Rest after a round in proportion to its CPU time, so that planning takes at most a quarter of the process. Not to its length: on a busy
machine most of that is waiting for a CPU, and the rest would be many times as long."""
HOLD_SECONDS: Final = 60.0
"""How long seats wait for the next pod of their workload, and for the admission after Ready."""
LATE_SECONDS: Final = 15.0
"""How long a pod keeps its seat after the other seats of its workload ended: kube-scheduler retries it within this time."""
WAIT_SECONDS: Final = 30.0
"""How long a workload without room keeps quota for which another one waits."""
MESSAGE_SECONDS: Final = 10.0
"""Between two changed reasons of one workload."""
FRESH_SECONDS: Final = 5.0
"""How long an answer may take to appear in the watch before it is written again."""
REFUSED_SECONDS: Final = 10.0
"""Until the next try after the API server refused an answer."""
GRACE_SECONDS: Final = 10.0
"""How long a new leader waits for Kueue's objects before it decides without them: Kueue may be gone."""
MAX_WRITES: Final = 16
"""Answers that are written at the same time."""

_Sign = tuple[int, int, int]
"""Changes when a workload without room may have room."""


@dataclass(slots=True)
class _Known:
    """What this process knows of one workload."""

    uid: str
    since: float
    """Monotonic time at which it first needed an answer."""
    version: str = ""
    """Of the workload at the latest answer: no other answer is written for it soon."""
    written_at: float = float("-inf")
    not_before: float = float("-inf")
    """When the next plan is allowed."""
    sign: _Sign | None = None
    """At the latest plan without room."""
    reason: str = ""
    """Why the latest plan, if it was asked for the reason, found no seats."""
    reason_at: float = float("-inf")
    """When the API last took a reason."""
    is_reason_old: bool = False
    """Whether plans failed since, and the reason may be another one now."""
    is_served: bool = False
    """Whether its seats were held, or found to be used, since it was admitted."""
    expected: dict[str, ExpectedPod | Refused | None] = field(default_factory=dict)
    """By pod set."""


class AdmissionCheckController:
    """The loop."""

    def __init__(
        self,
        context: ExtenderContext,
        nodes: NodeDirectory,
        objects: KueueObjects,
        expected: ExpectedPods,
        api: CheckApi,
        term: Callable[[], float | None],
        telemetry: Telemetry,
    ) -> None:
        """Make it.

        Args: term: the monotonic time since which this replica leads, once it knows all pods; None while it does not lead.
        """
        self._context = context
        self._nodes = nodes
        self._objects = objects
        self._expected = expected
        self._api = api
        self._term = term
        self._telemetry = telemetry
        self._seating = Seating(context.gangs.planner, nodes)
        self._known: dict[WorkloadKey, _Known] = {}
        self._rebuilt: float | None = None
        """The term for which the holds were rebuilt."""
        self._busy_seconds = 0.0
        """CPU time that the present round spent on plans."""
        self._growing: set[WorkloadKey] = set()
        """Workloads of elastic jobs that are being replaced by larger ones."""
        self._is_quota_wanted = False
        """Whether a workload without quota waits."""
        self._own_changes = 0
        """Changes of the state by plans without room, which free nothing."""
        self._answers: list[tuple[Workload, CheckAnswer]] = []
        self._bound: Mapping[tuple[str, str, str], list[PodFacts]] | None = None
        """Bound pods by namespace, workload or controller, and pod set. Read again in each round, and when a pod has ended."""
        self._bound_at = -1
        """The state's ``freed_count`` when they were read."""

    @property
    def is_prepared(self) -> bool:
        """Whether all seats that earlier answers promised are reserved, as far as Kueue's objects are known."""
        term = self._term()
        return term is None or self._rebuilt == term or self._now() - term > GRACE_SECONDS

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(REST_FACTOR * self._busy_seconds)
            await self._objects.next_change(PERIOD_SECONDS)

    async def step(self) -> None:
        """Look at all workloads once, and write what changed."""
        term = self._term()
        if term is None or (self._rebuilt is not None and self._rebuilt != term):
            self._let_go()
        if term is None:
            return
        if self._rebuilt is None:
            if not self._objects.listed_since(term):
                return
            self._rebuild()
            self._rebuilt = term
        await self._activate()
        self._bound, self._busy_seconds = None, 0.0
        self._find_growing()
        self._is_quota_wanted = any(other.waits_for_quota for other in self._objects.workloads.by_key.values())
        for workload in sorted(self._objects.workloads.by_key.values(), key=self._order):
            busy_seconds = self._busy_seconds
            if self._objects.workloads.by_key.get(workload.key) is workload:
                self._look(workload)
            if self._busy_seconds > busy_seconds:
                await asyncio.sleep(0)  # kube-scheduler may call between two plans
            if len(self._answers) >= MAX_WRITES:
                await self._write()
        self._forget_gone()
        await self._write()

    def _now(self) -> float:
        return self._context.clock.monotonic()

    def _order(self, workload: Workload) -> tuple[int, float, float]:
        known = self._known.get(workload.key)
        return -workload.priority, self._now() if known is None else known.since, workload.created_at

    def _let_go(self) -> None:
        """Release everything, without a call to the API: another replica leads."""
        self._context.workload_seats.clear()
        self._known.clear()
        self._answers.clear()
        self._rebuilt = None

    def _find_growing(self) -> None:
        self._growing = {other.replaced_key for other in self._objects.workloads.by_key.values() if other.is_growing}

    def _forget_gone(self) -> None:
        workloads = self._objects.workloads.by_key
        uids = {workload.uid for workload in workloads.values()}
        for key in [key for key, hold in self._context.workload_seats.all() if hold.workload_uid not in uids]:
            self._context.workload_seats.drop(key)
        for key in self._known.keys() - workloads.keys():
            del self._known[key]

    @property
    def _names(self) -> frozenset[str]:
        """The names of the checks that this controller answers."""
        return frozenset(one.name for one in self._objects.checks.by_key.values() if one.controller_name == CONTROLLER_NAME)

    async def _activate(self) -> None:
        for check in list(self._objects.checks.by_key.values()):
            if check.controller_name != CONTROLLER_NAME or check.active_generation == check.generation:
                continue
            try:
                await self._api.activate(check.name, check.generation)
            except KubeApiError as exc:
                logger.warning("admission check %s cannot be set Active: %s", check.name, exc)

    # --- after a change of leader ---

    def _rebuild(self) -> None:
        """Reserve again the seats of all answers that are Ready, those of admitted workloads first."""
        steps = dict[Step, list[Workload]]()
        self._find_growing()
        for workload in self._objects.workloads.by_key.values():
            steps.setdefault(self._step_for(workload), []).append(workload)
        self._bound = None
        for workload in steps.get(Step.SERVE, ()):
            known = self._note(workload)
            known.is_served = True
            if any(pod_set.count > len(self._bound_nodes(workload, pod_set)) for pod_set in workload.pod_sets):
                self._restore(workload, known)
        for workload in steps.get(Step.HOLD, ()):
            self._restore(workload, self._note(workload))

    def _restore(self, workload: Workload, known: _Known) -> bool:
        """Hold the seats of an earlier answer again; return whether all are held."""
        demands = self._demands(workload, known)
        if isinstance(demands, Refused):
            return False
        records = [record for entry in workload.checks.values() for record in decode_seats(entry.message)]
        seats = self._seating.seat_again(workload.uid, demands, self._unused(workload, records))
        if isinstance(seats, Lacking):
            logger.warning("seats cannot be held again: %s", seats.sentence, extra=_extra(workload))
            return False
        if seats:
            self._hold(workload, seats, is_rebuilt=True)
        return True

    def _unused(self, workload: Workload, records: Iterable[SeatRecord]) -> list[SeatRecord]:
        """Return the recorded seats without those on which pods run."""
        used = {pod_set.name: Counter(self._bound_nodes(workload, pod_set)) for pod_set in workload.pod_sets}
        left: list[SeatRecord] = []
        for record in records:
            nodes = used.get(record.pod_set, Counter[str]())
            if nodes[record.node] > 0:
                nodes[record.node] -= 1
            else:
                left.append(record)
        return left

    # --- one workload ---

    def _note(self, workload: Workload) -> _Known:
        known = self._known.get(workload.key)
        if known is None or known.uid != workload.uid:
            known = self._known[workload.key] = _Known(workload.uid, self._now())
        return known

    def _look(self, workload: Workload) -> None:
        """Do what a workload needs."""
        step = self._step_for(workload)
        hold = self._context.workload_seats.get(workload.hold_key)
        is_of_other = hold is not None and hold.workload_uid != workload.uid
        if is_of_other and step is Step.PLAN and self._is_of_old_size(hold, workload):
            self._stay(workload, self._note(workload), "it waits until the pods of its old size have come to their seats")
            return
        if step in (Step.IGNORE, Step.LEAVE) or is_of_other:
            if not is_of_other:  # another size of an elastic job decides on its own seats
                self._context.workload_seats.drop(workload.hold_key)
            self._known.pop(workload.key, None)
            return
        known = self._note(workload)
        if known.version == workload.version and self._now() - known.written_at < FRESH_SECONDS:
            return  # its answer is on the way, or was refused: wait for the next version
        self._do(step, workload, known)

    def _do(self, step: Step, workload: Workload, known: _Known) -> None:
        match step:
            case Step.RESET:
                self._context.workload_seats.drop(workload.hold_key)
                self._answer(workload, State.PENDING, "the answer was for an earlier reservation")
            case Step.WAIT:
                self._context.workload_seats.drop(workload.hold_key)
                known.since = self._now()
                self._stay(workload, known, "it waits until the other admission checks are Ready")
            case Step.PLAN:
                self._plan(workload, known)
            case Step.HOLD:
                self._keep(workload, known)
            case _:
                self._serve(workload, known)

    def _step_for(self, workload: Workload) -> Step:
        """Return what a workload needs. An old size keeps its seats until the larger one has seats, though Kueue finishes it before."""
        step = step_for(workload, self._names)
        return Step.SERVE if step is Step.IGNORE and workload.is_admitted and workload.key in self._growing else step

    def _is_of_old_size(self, hold: Hold | None, workload: Workload) -> bool:
        """Whether seats are those of the size that a workload replaces."""
        replaced = self._objects.workloads.by_key.get((workload.namespace, workload.replaces))
        return hold is not None and replaced is not None and replaced.uid == hold.workload_uid

    def _plan(self, workload: Workload, known: _Known) -> None:
        """Hold seats and answer Ready, or stay Pending with the reason."""
        now, hold = self._now(), self._context.workload_seats.get(workload.hold_key)
        if hold is not None and known.version == workload.version and self._context.workload_seats.mend(hold):
            self._answer_ready(workload, hold.seats)  # there was no reply to the first answer, and it did not arrive
            return
        if hold is not None or known.is_served:
            # The answer was refused, or it was for a reservation whose end the watch did not show by itself: its pods may have come.
            self._context.workload_seats.drop(workload.hold_key)
            known = self._known[workload.key] = _Known(workload.uid, known.since if hold is not None and not known.is_served else now)
        if now < known.not_before:
            self._give_up(workload, known)
            return
        if not self._may_fit(known):
            self._stay(workload, known, "")
            return
        found = self._seats_for(workload, known)
        if isinstance(found, Refused):
            if found.is_final:
                self._answer(workload, State.REJECTED, found.sentence)
            else:
                self._stay(workload, known, found.sentence)
        elif isinstance(found, Lacking):
            known.is_reason_old = not found.sentence
            self._stay(workload, known, found.sentence)
        else:
            self._hold(workload, found)
            self._answer_ready(workload, found)

    def _may_fit(self, known: _Known) -> bool:
        """Whether a plan may find room that the latest one did not find, or is needed for the reason."""
        return known.sign != self._sign() or (known.is_reason_old and self._is_reason_due(known))

    def _is_reason_due(self, known: _Known) -> bool:
        return self._now() - known.reason_at >= MESSAGE_SECONDS

    def _seats_for(self, workload: Workload, known: _Known) -> list[Seat] | Lacking | Refused:
        """Reserve all seats now, or say why there are none."""
        begun, before = time.thread_time(), self._context.state.columns.change_count
        known.sign = self._sign()
        demands = self._demands(workload, known)
        if isinstance(demands, Refused):
            return demands
        explain = self._is_reason_due(known)
        found = self._seating.seat(workload.uid, demands, explain=explain)
        if isinstance(found, Lacking):
            self._own_changes += self._context.state.columns.change_count - before
        self._busy_seconds += time.thread_time() - begun
        return found

    def _stay(self, workload: Workload, known: _Known, reason: str) -> None:
        """Keep a workload Pending, and write the reason if the workload does not show it: Kueue may have written in between.

        Args: reason: empty for the reason of an earlier plan.
        """
        known.reason = reason or known.reason
        is_shown = all(workload.checks[name].message == known.reason for name in self._names & workload.checks.keys())
        if known.reason and not is_shown and self._is_reason_due(known):
            self._answer(workload, State.PENDING, known.reason)
        else:
            self._give_up(workload, known)

    def _give_up(self, workload: Workload, known: _Known) -> None:
        """Give back the quota of a workload that found no room for WAIT_SECONDS, if another workload waits for quota."""
        if not self._is_quota_wanted or not known.reason or self._now() - known.since < WAIT_SECONDS:
            return
        if not self._has_pods(workload):  # a check that was added later finds pods that run: Retry would end them
            self._answer(workload, State.RETRY, f"it gave its quota back, because another workload waits for quota: {known.reason}")

    def _keep(self, workload: Workload, known: _Known) -> None:
        """Keep the seats of a workload with the answer Ready until it is admitted; take the answer back if they end."""
        now, holds = self._now(), self._context.workload_seats
        hold = holds.get(workload.hold_key)
        if hold is None or not holds.mend(hold):
            holds.drop(workload.hold_key)
            if not self._needs_none(workload, known) and not self._restore(workload, known):
                self._answer(workload, State.PENDING, "its seats were lost")
        elif now >= hold.deadline:
            holds.drop(workload.hold_key)
            known.not_before = now + HOLD_SECONDS
            self._telemetry.workload_seats_expired.inc()
            self._answer(workload, State.PENDING, f"its seats were held for {HOLD_SECONDS:.0f} s, and it was not admitted")

    def _serve(self, workload: Workload, known: _Known) -> None:
        """Keep the seats of an admitted workload until its pods have come, or for HOLD_SECONDS after the latest one."""
        now, hold = self._now(), self._context.workload_seats.get(workload.hold_key)
        if not known.is_served:
            known.is_served = True
            if hold is not None:
                hold.deadline = now + HOLD_SECONDS
            elif not self._needs_none(workload, known):
                self._restore(workload, known)  # the previous leader's answer arrived late
            return
        if hold is None:
            return
        if len(hold.pods) > hold.came:
            hold.came, hold.deadline = len(hold.pods), now + HOLD_SECONDS
        if not hold.seats:
            self._context.workload_seats.drop(workload.hold_key)
        elif now >= hold.deadline:
            self._expire(workload, hold)
        else:
            self._context.workload_seats.mend(hold)

    def _expire(self, workload: Workload, hold: Hold) -> None:
        """End the seats of an admitted workload whose pods do not come."""
        self._context.workload_seats.end(workload.hold_key, self._now() + LATE_SECONDS)
        self._telemetry.workload_seats_expired.inc()
        if not hold.pods and not hold.is_rebuilt and not self._has_pods(workload):
            self._answer(workload, State.RETRY, f"no pod came to its seats within {HOLD_SECONDS:.0f} s")
        else:
            logger.warning("%d seats expired, because their pods do not come", len(hold.seats), extra=_extra(workload))

    # --- seats ---

    def _hold(self, workload: Workload, seats: list[Seat], *, is_rebuilt: bool = False) -> None:
        hold = Hold(workload.uid, seats, self._now() + HOLD_SECONDS, is_rebuilt=is_rebuilt)
        self._context.workload_seats.put(workload.hold_key, hold)

    def _needs_none(self, workload: Workload, known: _Known) -> bool:
        demands = self._demands(workload, known)
        return not isinstance(demands, Refused) and not any(demand.count for demand in demands)

    def _demands(self, workload: Workload, known: _Known) -> list[Demand] | Refused:
        """Return the pods that need seats: those with GPUs, without those that run."""
        demands: list[Demand] = []
        for pod_set in workload.pod_sets:
            if pod_set.name not in known.expected:
                known.expected[pod_set.name] = self._expected.of(workload, pod_set)
            expected = known.expected[pod_set.name]
            if isinstance(expected, Refused):
                return expected
            if expected is None:
                continue
            rules = expected.rules
            for name in sorted(pod_set.flavors):
                flavor = self._objects.flavors.by_key.get(name)
                if flavor is None:
                    return Refused(f"pod set {pod_set.name}: its flavor {name} is unknown", is_final=False)
                rules = rules.narrowed(flavor.labels, flavor.tolerations)
            missing = max(0, pod_set.count - len(self._bound_nodes(workload, pod_set)))
            demands.append(Demand(pod_set.name, expected.pod, missing, rules, pod_set.domains))
        return demands

    def _bound_nodes(self, workload: Workload, pod_set: PodSet) -> list[str]:
        """Return the nodes of the pods of a pod set that are bound: they need no seat.

        The watch may still show pods of an earlier reservation. They are older than the present one.
        """
        state = self._context.state
        if self._bound is None or self._bound_at != state.freed_count:
            self._bound, self._bound_at = _bound_pods(state.pods.values()), state.freed_count
        found = list(self._bound.get((*workload.hold_key, pod_set.name), ()))
        if not found and len(workload.pod_sets) == 1:
            found = [pod for uid in workload.owner_uids for pod in self._bound.get((workload.namespace, uid, ""), ())]
        since = workload.own_pods_since
        return [pod.node_name for pod in found if (pod.created_at or 0.0) >= since]

    def _has_pods(self, workload: Workload) -> bool:
        """Whether any pod of a workload exists."""
        texts = {hold_text(workload.hold_name, pod_set.name) for pod_set in workload.pod_sets}
        return any(
            pod.namespace == workload.namespace
            and (_hold_of(pod) in texts or pod.controller_uid in workload.owner_uids or pod.uid in workload.owner_uids)
            for pod in self._context.state.pods.values()
        )

    def _sign(self) -> _Sign:
        changes = self._context.state.columns.change_count - self._own_changes
        return changes, self._nodes.version, self._objects.flavors.version

    # --- answers ---

    def _answer_ready(self, workload: Workload, seats: list[Seat]) -> None:
        pod_sets = dict.fromkeys(seat.pod_set for seat in seats)
        holds = {name: hold_text(workload.hold_name, name) for name in pod_sets}
        self._answer(workload, State.READY, encode_seats(self._context.state, seats), holds)

    def _answer(self, workload: Workload, state: State, message: str, holds: Mapping[str, str] | None = None) -> None:
        checks = tuple(sorted(self._names & workload.checks.keys()))
        answer = CheckAnswer(workload.namespace, workload.name, workload.version, checks, state, message, holds or {})
        self._answers.append((workload, answer))

    async def _write(self) -> None:
        answers, self._answers = self._answers, []
        await asyncio.gather(*(self._write_one(workload, answer) for workload, answer in answers))

    async def _write_one(self, workload: Workload, answer: CheckAnswer) -> None:
        """Write an answer. After a conflict the next version of the workload is looked at; after no reply the same one again."""
        known = self._known.get(workload.key)
        if known is None or self._term() != self._rebuilt:
            return
        known.version, known.written_at = workload.version, self._now()
        try:
            await self._api.answer(answer)
        except (KubeConflictError, KubeNotFoundError):
            return
        except KubeRefusedError as exc:
            logger.warning("an answer to Kueue was refused: %s", exc, extra=_extra(workload))
            known.not_before = self._now() + REFUSED_SECONDS
            if answer.state is State.READY:
                self._context.workload_seats.drop(workload.hold_key)
            return
        except KubeApiError as exc:
            logger.warning("an answer to Kueue has no outcome yet: %s", exc, extra=_extra(workload))
            return
        self._telemetry.check_answers.labels(answer.state).inc()
        if answer.message == known.reason:
            known.reason_at = self._now()
        if answer.state is State.READY:
            self._telemetry.check_seconds.observe(self._now() - known.since)
        logger.info("answered %s: %s", answer.state, answer.message, extra=_extra(workload))


def _bound_pods(pods: Iterable[PodFacts]) -> Mapping[tuple[str, str, str], list[PodFacts]]:
    """Return the bound pods with GPUs that are not ending, by what their annotation names, and by their controller."""
    bound: dict[tuple[str, str, str], list[PodFacts]] = {}
    for pod in pods:
        if pod.gpu is None or not pod.node_name or pod.deletion_requested:
            continue
        name, _, pod_set = _hold_of(pod).rpartition("/")
        if name:
            bound.setdefault((pod.namespace, name, pod_set), []).append(pod)
        bound.setdefault((pod.namespace, pod.controller_uid or pod.uid, ""), []).append(pod)
    return bound


def _hold_of(pod: PodFacts) -> str:
    return "" if pod.gpu is None else pod.gpu.annotations.get(contract.ANNOTATION_HOLD, "")


def _extra(workload: Workload) -> Mapping[str, str]:
    return {"workload": f"{workload.namespace}/{workload.name}"}
