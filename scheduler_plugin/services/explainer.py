# SPDX-License-Identifier: Apache-2.0
"""Explains why a pod is where it is, and returns snapshots and recorded decisions, without blocking the verbs.

Only what the state alone can tell is computed between two verbs. Searches and the encoding of large documents run in a thread, on values
that never change. A budget limits how often these pages can be called.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from math import isfinite
from typing import Final, NamedTuple

import msgspec

from aliquot import contract
from aliquot.contract.model import PodRequest
from scheduler_plugin.core.cluster.gang import gang_of_pod
from scheduler_plugin.core.cluster.journal import Rules, Snapshot, snapshot_of
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.explain.one import count_reasons
from scheduler_plugin.core.explain.replay import recorded
from scheduler_plugin.core.explain.why import Start, Why, completed, explain_pod
from scheduler_plugin.core.fit.kube_filters import Scope
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.planned_why import why_without_planner

ALLOWED_PER_SECOND: Final = 2.0
ALLOWED_AT_ONCE: Final = 8.0


class Reply(NamedTuple):
    """The reply of a page."""

    status: HTTPStatus
    body: bytes


class DecisionLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One recorded decision in a list."""

    pod: str
    uid: str
    at: float
    fitting: int
    failed: dict[str, int]
    chosen: str = ""
    score: int = 0


class Explainer:
    """Explains the decisions of one scheduler."""

    def __init__(
        self,
        context: ExtenderContext,
        rules: Rules,
        age_seconds: Callable[[], float],
        why_planned: Callable[[PodFacts], str] = why_without_planner,
    ) -> None:
        """Make it.

        Args:
            age_seconds: how long ago the oldest stream was current; infinite before all were.
            why_planned: says what a pod with planned claims waits for; empty if it does not wait for the planner.
        """
        self._context = context
        self._rules = rules
        self._age_seconds = age_seconds
        self._why_planned = why_planned
        self._allowance = ALLOWED_AT_ONCE
        self._counted_at = context.clock.monotonic()

    async def why(self, namespace: str, name: str) -> Reply:
        """Explain a pod."""
        if (refused := self._spend()) is not None:
            return refused
        pod = self._find(namespace, name)
        if pod is None:
            return _not_found(f"pod {namespace}/{name} is unknown here: check its name and namespace, and whether it has ended")
        return Reply(HTTPStatus.OK, msgspec.json.encode(await self.explain(pod)))

    async def explain(self, pod: PodFacts) -> Why:
        """Return the whole explanation of a pod."""
        decision, gang = self._context.decisions.by_uid.get(pod.uid), gang_of_pod(pod)
        asked = None if decision is None else decision.asked
        generation, age_seconds = self._as_of()
        if (pod.claims or pod.extended) and pod.gpu is None:
            why = self._claimed(pod)
            return msgspec.structs.replace(why, generation=generation, age_seconds=age_seconds)
        request = self._context.verdicts.requests.of(pod)
        why, questions = explain_pod(self._context.state, self._context.verdicts.shapes, self._rules.default_policy, pod, asked, request)
        why = msgspec.structs.replace(why, generation=generation, age_seconds=age_seconds)
        found = await asyncio.to_thread(questions.answered)
        why = msgspec.structs.replace(why, start=self._start(pod), held=self._held(pod, why))
        return completed(why, found, *(("", "") if gang is None else self._context.gangs.explain(pod, gang)))

    def _claimed(self, pod: PodFacts) -> Why:
        """Explain a pod with ResourceClaims: kube-scheduler only says that it cannot allocate all claims."""
        claims, name = self._context.claims, f"{pod.namespace}/{pod.name}"
        if pod.node_name:
            return Why(name, pod.uid, pod.node_name, claims.devices_of(pod))
        if planned := self._why_planned(pod):
            return Why(name, pod.uid, refusal=planned, gates=pod.gates, by_claims=True)
        query = claims.query(pod)
        if isinstance(query, str):
            why = Why(name, pod.uid, gates=pod.gates)
            return msgspec.structs.replace(why, refusal=f"{why.held_back}{query}")
        state, scope = self._context.state, Scope.of(self._context.state)
        verdict = claims.judge(pod, query)
        with state.without(pod.uid):
            state.columns.derive()
            fitting, reasons = count_reasons(state, verdict, query.demand, scope)
        return Why(name, pod.uid, nodes=state.node_count, fitting=fitting, reasons=reasons, gates=pod.gates, by_claims=True)

    def _start(self, pod: PodFacts) -> Start | None:
        """Return when a pod probably starts, if room is held for it."""
        holds, outlook = self._context.held_room, self._context.held_room.outlook
        if holds.held is None or pod.uid not in holds.held.owners or pod.node_name:
            return None
        times = (outlook.middle, outlook.low, outlook.high)
        return Start(tuple(sorted(holds.held.nodes)), *times, outlook.unknown, len(outlook.overdue))

    def _held(self, pod: PodFacts, why: Why) -> str:
        """Say that a pod would fit if no room were held for another; empty otherwise."""
        holds, request = self._context.held_room, self._context.verdicts.requests.of(pod)
        if holds.held is None or why.fitting or pod.node_name or not isinstance(request, PodRequest):
            return ""
        nodes = holds.kept_from(pod, self._context.verdicts.shape_of(pod, request))
        if not nodes:
            return ""
        where = f"room on node{'s' * (len(nodes) > 1)} {', '.join(sorted(nodes))}"
        cure = f"a pod that is expected to end before that may use it ({contract.ANNOTATION_EXPECTED_RUNTIME})"
        return f"{where} is held for {holds.held.pod}, which waits longer; {cure}"

    async def snapshot(self) -> Reply:
        """Return a snapshot of the cluster."""
        if (refused := self._spend()) is not None:
            return refused
        return Reply(HTTPStatus.OK, await asyncio.to_thread(msgspec.json.encode, self.full_snapshot()))

    def full_snapshot(self) -> Snapshot:
        """Return this moment with all that trials need; cheap, because the entries are shared."""
        state = self._context.state
        taken = snapshot_of(state.moment(), self._rules, self._context.clock.now(), *self._as_of())
        budgets, closed = tuple(self._context.budgets.all()), tuple(sorted(state.closed_nodes))
        return msgspec.structs.replace(taken, budgets=budgets, closed_nodes=closed, node_facts=self._context.directory.all())

    async def decisions(self) -> Reply:
        """List the recorded decisions, the newest first."""
        if (refused := self._spend()) is not None:
            return refused
        lines = []
        for record in reversed(self._context.decisions.recorded.values()):
            decision, choice = record.decision, record.choice
            pod, failed = decision.pod, {reason.label: count for reason, count in decision.failed.items()}
            chosen = (choice.node, choice.score) if choice is not None else ("", 0)
            lines.append(DecisionLine(f"{pod.namespace}/{pod.name}", pod.uid, decision.at, decision.fitting, failed, *chosen))
        return Reply(HTTPStatus.OK, msgspec.json.encode(lines))

    async def record(self, namespace: str, name: str) -> Reply:
        """Return the latest recorded decision on a pod, with all inputs of the decision."""
        if (refused := self._spend()) is not None:
            return refused
        for record in reversed(self._context.decisions.recorded.values()):
            if (record.decision.pod.namespace, record.decision.pod.name) == (namespace, name):
                return Reply(HTTPStatus.OK, await asyncio.to_thread(msgspec.json.encode, recorded(record, self._rules)))
        return _not_found(f"no recent decision on pod {namespace}/{name} is recorded here")

    def _as_of(self) -> tuple[int, float | None]:
        """Return the generation of the state and its age in seconds; None before all streams have listed their objects."""
        age_seconds = self._age_seconds()
        return self._context.state.columns.change_count, age_seconds if isfinite(age_seconds) else None

    def _find(self, namespace: str, name: str) -> PodFacts | None:
        found = [pod for pod in self._context.state.pods.values() if (pod.namespace, pod.name) == (namespace, name)]
        if not found:
            decided = (decision.pod for decision in self._context.decisions.by_uid.values())
            found = [pod for pod in decided if (pod.namespace, pod.name) == (namespace, name)]
        return found[-1] if found else None

    def _spend(self) -> Reply | None:
        """Count one query, and refuse it if there were too many."""
        now = self._context.clock.monotonic()
        self._allowance = min(ALLOWED_AT_ONCE, self._allowance + (now - self._counted_at) * ALLOWED_PER_SECOND)
        self._counted_at = now
        if self._allowance < 1:
            return Reply(HTTPStatus.TOO_MANY_REQUESTS, b"too many queries at once: retry in a second\n")
        self._allowance -= 1
        return None


def _not_found(sentence: str) -> Reply:
    return Reply(HTTPStatus.NOT_FOUND, f"{sentence}\n".encode())
