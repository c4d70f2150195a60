"""Answers why a pod is where it is, and hands out snapshots and recorded decisions, without holding up the verbs.

Only what the state alone can tell is worked out between two verbs; searches and the writing of large documents happen in a thread, on
values that never change. An allowance bounds how often anybody can ask.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from math import isfinite
from typing import Final, NamedTuple

import msgspec

from scheduler_plugin.core.gang import gang_of_pod
from scheduler_plugin.core.journal import Rules, snapshot_of
from scheduler_plugin.core.pods import PodFacts
from scheduler_plugin.core.replay import recorded
from scheduler_plugin.core.why import Why, completed, explain_pod
from scheduler_plugin.extender.desk import Desk

ALLOWED_PER_SECOND: Final = 2.0
ALLOWED_AT_ONCE: Final = 8.0


class Answer(NamedTuple):
    """What a page says."""

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
    """The answers, over one desk."""

    def __init__(self, desk: Desk, rules: Rules, now: Callable[[], float], age_seconds: Callable[[], float]) -> None:
        """Args: now: seconds since 1970. age_seconds: how long ago the oldest stream was current; infinite before all were."""
        self._desk = desk
        self._rules = rules
        self._now = now
        self._age_seconds = age_seconds
        self._allowance = ALLOWED_AT_ONCE
        self._counted_at = desk.monotonic()

    async def why(self, namespace: str, name: str) -> Answer:
        """Explain a pod."""
        if (refused := self._spend()) is not None:
            return refused
        pod = self._find(namespace, name)
        if pod is None:
            return _not_found(f"no pod {namespace}/{name} is known here; is the name right, and has it not ended?")
        return Answer(HTTPStatus.OK, msgspec.json.encode(await self.explain(pod)))

    async def explain(self, pod: PodFacts) -> Why:
        """Work out the whole explanation."""
        decision, gang = self._desk.decisions.by_uid.get(pod.uid), gang_of_pod(pod)
        asked = None if decision is None else decision.asked
        generation, age_seconds = self._as_of()
        why, questions = explain_pod(self._desk.state, self._desk.shapes, self._rules.default_policy, pod, asked)
        why = msgspec.structs.replace(why, generation=generation, age_seconds=age_seconds)
        return completed(why, await asyncio.to_thread(questions.answered), "" if gang is None else self._desk.gangs.why(pod, gang))

    async def snapshot(self) -> Answer:
        """Write down the cluster as it is."""
        if (refused := self._spend()) is not None:
            return refused
        document = snapshot_of(self._desk.state.moment(), self._rules, self._now(), *self._as_of())
        return Answer(HTTPStatus.OK, await asyncio.to_thread(msgspec.json.encode, document))

    async def decisions(self) -> Answer:
        """List the recorded decisions, the newest first."""
        if (refused := self._spend()) is not None:
            return refused
        lines = []
        for record in reversed(self._desk.decisions.recorded.values()):
            decision, choice = record.decision, record.choice
            pod, failed = decision.pod, {reason.label: count for reason, count in decision.failed.items()}
            chosen = (choice.node, choice.score) if choice is not None else ("", 0)
            lines.append(DecisionLine(f"{pod.namespace}/{pod.name}", pod.uid, decision.at, decision.fitting, failed, *chosen))
        return Answer(HTTPStatus.OK, msgspec.json.encode(lines))

    async def record(self, namespace: str, name: str) -> Answer:
        """Write down the latest recorded decision on a pod, with all that is needed to decide again."""
        if (refused := self._spend()) is not None:
            return refused
        for record in reversed(self._desk.decisions.recorded.values()):
            if (record.decision.pod.namespace, record.decision.pod.name) == (namespace, name):
                return Answer(HTTPStatus.OK, await asyncio.to_thread(msgspec.json.encode, recorded(record, self._rules)))
        return _not_found(f"no recent decision on pod {namespace}/{name} is recorded here")

    def _as_of(self) -> tuple[int, float | None]:
        """Return the generation of the state and its age in seconds; None before everything was told once."""
        age_seconds = self._age_seconds()
        return self._desk.state.columns.change_count, age_seconds if isfinite(age_seconds) else None

    def _find(self, namespace: str, name: str) -> PodFacts | None:
        found = [pod for pod in self._desk.state.pods.values() if (pod.namespace, pod.name) == (namespace, name)]
        if not found:
            decided = (decision.pod for decision in self._desk.decisions.by_uid.values())
            found = [pod for pod in decided if (pod.namespace, pod.name) == (namespace, name)]
        return found[-1] if found else None

    def _spend(self) -> Answer | None:
        """Count one question; refuse it when there were too many."""
        now = self._desk.monotonic()
        self._allowance = min(ALLOWED_AT_ONCE, self._allowance + (now - self._counted_at) * ALLOWED_PER_SECOND)
        self._counted_at = now
        if self._allowance < 1:
            return Answer(HTTPStatus.TOO_MANY_REQUESTS, b"too many questions at once: ask again in a second\n")
        self._allowance -= 1
        return None


def _not_found(sentence: str) -> Answer:
    return Answer(HTTPStatus.NOT_FOUND, f"{sentence}\n".encode())
