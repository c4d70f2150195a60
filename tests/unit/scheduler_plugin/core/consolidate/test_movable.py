# SPDX-License-Identifier: Apache-2.0
"""Which pods may move, and what a move loses."""

from dataclasses import replace
from typing import Any

import pytest

from aliquot import contract
from scheduler_plugin.core.cluster.budgets import Budget, Budgets
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.consolidate.movable import BEST_EFFORT_PRIORITY, AnnotationError, lost_gpu_seconds, seconds_of, staying_because
from scheduler_plugin.webhook.amounts import Options
from scheduler_plugin.webhook.normalise import Normaliser
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share

HOUR = 3600.0
NOW = 100 * HOUR
MOVABLE = {contract.ANNOTATION_MOVABLE: "true"}


def bound(annotations: dict[str, str] | None = None, *, priority: int = 0, mib: int = 500, **facts: Any) -> tuple[ClusterState, PodFacts]:
    """A pod with half a GPU that a Job made, and that runs for ten hours."""
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 1))
    stated = {**MOVABLE, **(annotations or {})}
    pod = make_pod("p", node="n1", annotations=stated, shares={"main": [make_share("n1", 0, mib)]}, priority=priority, vgpu="1")
    defaults: dict[str, Any] = {"controller_uid": "job", "controller_kind": "Job", "started_at": NOW - 10 * HOUR}
    pod = replace(pod, **(defaults | facts))
    state.set_pod(pod)
    return state, pod


def staying(state: ClusterState, pod: PodFacts, *budgets: Budget, most_priority: int | None = None) -> str:
    known = Budgets()
    known.replace(budgets)
    return staying_because(state, NodeDirectory(), known, pod, NOW, most_priority)


@pytest.mark.parametrize(
    ("annotations", "facts", "says"),
    [
        pytest.param({}, {}, "", id="movable"),
        pytest.param({contract.ANNOTATION_MOVABLE: "false"}, {}, "not marked", id="refused"),
        pytest.param({contract.ANNOTATION_MOVABLE: "false"}, {"priority": BEST_EFFORT_PRIORITY}, "not marked", id="best effort, refused"),
        pytest.param({contract.ANNOTATION_MOVABLE: "yes"}, {}, "neither true nor false", id="another word"),
        pytest.param({}, {"controller_uid": ""}, "no controller", id="no controller"),
        pytest.param({}, {"controller_kind": "DaemonSet"}, "no controller recreates it elsewhere", id="daemon set"),
        pytest.param({}, {"controller_kind": "Node"}, "no controller recreates it elsewhere", id="static pod"),
        pytest.param({}, {"deletion_requested": True}, "it is ending", id="ending"),
        pytest.param({}, {"is_picky": True, "is_confined": True}, "known to kube-scheduler only", id="volume or port"),
        pytest.param({}, {"is_confined": True}, "requires labels of its node", id="node selector without labels"),
        pytest.param({contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "1"}, {}, "gang", id="gang"),
        pytest.param({contract.ANNOTATION_MIN_RUNTIME: "10h"}, {}, "", id="ran exactly long enough"),
        pytest.param({contract.ANNOTATION_MIN_RUNTIME: "11h"}, {}, "runs for less", id="ran too short"),
        pytest.param({contract.ANNOTATION_MIN_RUNTIME: "11h"}, {"started_at": None}, "runs for less", id="not started"),
        pytest.param({contract.ANNOTATION_MIN_RUNTIME: "0s"}, {"started_at": None}, "", id="no minimum"),
        pytest.param({}, {"started_at": NOW - 299}, "runs for less", id="short run without a stated minimum"),
        pytest.param({contract.ANNOTATION_MIN_RUNTIME: "1.5h"}, {}, "not a duration", id="bad duration"),
        pytest.param({contract.ANNOTATION_LAST_CHECKPOINT: "noon"}, {}, "not a time", id="bad time"),
        pytest.param({contract.ANNOTATION_LAST_CHECKPOINT: "1970-01-05T00:00:00"}, {}, "not a time", id="time without a zone"),
    ],
)
def test_pod_moves_only_by_agreement_and_with_controller(annotations: dict[str, str], facts: dict[str, Any], says: str) -> None:
    found = staying(*bound(annotations, **facts))
    assert says in found
    assert bool(says) == bool(found)


def test_best_effort_pod_moves_without_annotation() -> None:
    state, pod = bound()
    assert pod.gpu is not None
    plain = replace(pod, gpu=replace(pod.gpu, annotations={contract.ANNOTATION_ASSIGNMENT: "{}"}))
    assert "not marked" in staying(state, plain)
    assert staying(state, replace(plain, priority=BEST_EFFORT_PRIORITY)) == ""


def test_more_important_pod_stays() -> None:
    state, pod = bound(priority=5)
    assert staying(state, pod, most_priority=5) == ""
    assert staying(state, pod, most_priority=4) == "more important than the waiting pod"


@pytest.mark.parametrize(("allowed", "says"), [((1,), ""), ((0,), "allows no disruption"), ((1, 1), "two disruption budgets")])
def test_budgets_keep_a_pod(allowed: tuple[int, ...], says: str) -> None:
    budgets = [Budget("team", f"b{number}", (), count) for number, count in enumerate(allowed)]
    found = staying(*bound(), *budgets)
    assert says in found
    assert bool(says) == bool(found)


def test_pod_with_mig_instance_stays() -> None:
    state = ClusterState()
    device = make_device("n1", 0, instances=2)
    state.set_gpu_node(make_node("n1", [device]))
    share = replace(make_share("n1", 0), device_uuid=device.mig_instances[0].uuid)
    limits: dict[str, Any] = {"mig_1g.10gb": "1"}
    pod = make_pod("p", node="n1", annotations=MOVABLE, shares={"main": [share]}, **limits)
    pod = replace(pod, controller_uid="job", controller_kind="Job", started_at=0.0)
    state.set_pod(pod)
    assert "MIG" in staying(state, pod)


@pytest.mark.parametrize(
    ("checkpoint", "hours"),
    [
        pytest.param(None, 10, id="never saved"),
        pytest.param("1970-01-05T02:00:00Z", 2, id="saved two hours ago"),
        pytest.param("1970-01-05T03:00:00+01:00", 2, id="another zone"),
        pytest.param("1970-01-01T00:00:00Z", 10, id="saved by an earlier run"),
        pytest.param("1971-01-01T00:00:00Z", 0, id="a clock that is ahead"),
    ],
)
def test_work_since_last_checkpoint_is_lost(checkpoint: str | None, hours: float) -> None:
    annotations = {} if checkpoint is None else {contract.ANNOTATION_LAST_CHECKPOINT: checkpoint}
    state, pod = bound(annotations)
    assert lost_gpu_seconds(state, pod, NOW) == 0.5 * hours * HOUR


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43_200), ("2d", 172_800), ("0s", 0)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1h30m", "1 h", "12345678s", "١h"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(AnnotationError):
        seconds_of(text)


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        pytest.param({contract.ANNOTATION_MOVABLE: "yes"}, "expected true or false, found 'yes'", id="movable"),
        pytest.param({contract.ANNOTATION_MOVABLE: ""}, "expected true or false", id="empty"),
        pytest.param({contract.ANNOTATION_LAST_CHECKPOINT: "noon"}, "expected a time such as", id="time"),
        pytest.param({contract.ANNOTATION_LAST_CHECKPOINT: "0001-01-01T00:00:00+14:00"}, "", id="time out of range or early"),
    ],
)
def test_webhook_refuses_words_that_mean_nothing(annotations: dict[str, str], says: str) -> None:
    outcome = Normaliser(Options(lambda _: {1000})).admit(pod_object(annotations=annotations, vgpu="1"))
    assert says in outcome.refusal
    assert bool(says) == bool(outcome.refusal)
