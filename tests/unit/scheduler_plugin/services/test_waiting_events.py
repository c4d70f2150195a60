# SPDX-License-Identifier: Apache-2.0
"""Events on pods that wait are a service to people; the scheduler goes on without them."""

import logging
from typing import Any, cast

from aliquot.placement.request import pod_request
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.services.waiting_events import WaitingEvents
from tests.unit.scheduler_plugin.builders import make_pod


class BrokenExplainer:
    def __init__(self) -> None:
        self.asked = 0

    async def explain(self, pod: object) -> None:
        self.asked += 1
        raise RuntimeError("a bug in the search")


async def test_failing_explanation_is_logged_and_ends_no_other_work(caplog):
    pods = [make_pod(uid, vgpu="1") for uid in ("a", "b")]
    decisions = {pod.uid: Decision(pod, pod_request(pod.gpu), 0.0, 0, 0, {NodeReason.MEMORY: 1}) for pod in pods}
    explainer = BrokenExplainer()
    events = WaitingEvents(cast(Any, explainer), None, decisions, lambda: 0.0)
    for decision in decisions.values():
        events.note(decision)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await events.step()
    assert explainer.asked == 2, "each pod once"
    assert [str(record.exc_info[1]) for record in caplog.records] == ["a bug in the search"] * 2
