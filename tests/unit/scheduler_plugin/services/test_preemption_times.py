# SPDX-License-Identifier: Apache-2.0
"""Pods that may not end yet, pods that must wait before others end for them, and the moment when that is over."""

import json
from dataclasses import replace
from typing import Any

import pytest

from aliquot import contract
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.durations import check_durations, parse_duration
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.services.preemption_times import PreemptionTimes
from tests.unit.scheduler_plugin.builders import make_pod, make_share
from tests.unit.scheduler_plugin.services.test_preemptor import Scene, asked_pod

MIN_RUNTIME, DELAY = contract.ANNOTATION_MIN_RUNTIME, contract.ANNOTATION_PREEMPTION_DELAY


def service_of(scene: Scene) -> PreemptionTimes:
    return PreemptionTimes(scene.context, scene._retry, lambda: scene.leads)


def protect(scene: Scene, uid: str, started_at: float | None, least: str = "60s") -> None:
    """Let a pod say how long it runs at least."""
    node, _, minor = uid.partition("-")
    shares = {"main": [make_share(node, int(minor), 600)]}
    fields: dict[str, Any] = {"vgpu": "1", "vgpu_memory": "600"}
    pod = make_pod(uid, node=node, shares=shares, annotations={MIN_RUNTIME: least}, priority=int(minor), **fields)
    scene.state.set_pod(replace(pod, started_at=started_at))


async def proposed(scene: Scene, annotations: dict[str, str] | None = None, victims: tuple[str, ...] = ("n1-0",), **metadata: str) -> dict:
    pod = asked_pod("important", annotations)
    pod["metadata"] |= metadata
    body = {"Pod": pod, "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": uid} for uid in victims], "NumPDBViolations": 0}}}
    return json.loads(await choose_victims(scene.context, json.dumps(body).encode()))["NodeNameToMetaVictims"]


@pytest.mark.parametrize(("started_at", "helps"), [(None, False), (0.0, False), (-61.0, True)])
async def test_pod_ends_only_after_its_minimum(started_at, helps):
    scene = Scene()
    protect(scene, "n1-0", started_at)
    assert bool(await proposed(scene)) == helps
    scene.refused("important")
    assert await scene.after(5) == (["n1-0"] if helps else ["n1-1"]), "the other pod is more important, and may end"


async def test_waiting_pods_are_tried_when_the_minimum_is_over():
    scene = Scene()
    for uid in ("n1-0", "n1-1"):
        protect(scene, uid, 0.0)
    service = service_of(scene)
    scene.refused("important")
    assert await scene.after(30) == []
    await service.step()
    count = scene.state.pod_change_count
    scene.now = 61.0
    await service.step()
    assert scene.state.pod_change_count == count + 2
    scene.preemptor.look_again("important")
    assert await scene.after(1) == ["n1-0"]
    count = scene.state.pod_change_count
    await service.step()
    assert scene.state.pod_change_count == count, "once"


@pytest.mark.parametrize(
    ("started_at", "annotations", "from_then"),
    [
        pytest.param(0.0, {}, 60.0, id="victim runs for its minimum"),
        pytest.param(-100.0, {DELAY: "30s"}, 40.0, id="pod waits for its delay"),
    ],
)
async def test_pods_end_in_time_for_pod_that_filter_never_saw(started_at, annotations, from_then):
    """kube-scheduler refused the node by its own sums: it proposes victims once, and there is no decision."""
    scene = Scene()
    protect(scene, "n1-0", started_at)
    uid = scene.refused("important", annotations)
    scene.context.decisions.forget(uid)
    created = "1970-01-01T00:00:10Z"
    assert await proposed(scene, annotations, uid=uid, creationTimestamp=created) == {}
    scene.state.set_pod(replace(scene.state.pods[uid], created_at=10.0))
    assert await scene.after(from_then - 1.0) == []
    assert await scene.after(2.0) == ["n1-0"]
    assert await scene.after(2.0) == ["n1-0"], "once"


async def test_no_pod_ends_before_the_delay_is_over():
    scene, created = Scene(), "1970-01-01T00:00:10Z"
    annotations = {DELAY: "30s"}
    service = service_of(scene)
    assert await proposed(scene, annotations, creationTimestamp=created) == {}
    uid = scene.refused("important", annotations)
    scene.state.set_pod(replace(scene.state.pods[uid], created_at=10.0))
    scene.context.decisions.record(replace(scene.context.decisions.by_uid[uid], pod=scene.state.pods[uid]))
    assert await scene.after(35) == []
    await service.step()
    assert scene.retried == []
    scene.now = 41.0
    await service.step()
    assert scene.retried == [uid]
    assert await proposed(scene, annotations, creationTimestamp=created) != {}


async def test_replica_that_does_not_lead_retries_no_pod():
    scene = Scene()
    service, uid = service_of(scene), scene.refused("important", {DELAY: "30s"})
    scene.state.set_pod(replace(scene.state.pods[uid], created_at=0.0))
    scene.leads = False
    scene.now = 31.0
    await service.step()
    assert scene.retried == []


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43_200), ("2d", 172_800), ("0s", 0)])
def test_duration_is_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "1.5h", "1h30m", "-1s", "٣s", "1 h", "99999999s"])
@pytest.mark.parametrize("name", [MIN_RUNTIME, DELAY, contract.ANNOTATION_EXPECTED_RUNTIME])
def test_wrong_duration_is_refused(name, text):
    assert parse_duration(text) is None
    with pytest.raises(RequestError, match="expected a duration"):
        check_durations({name: text})


def test_expected_runtime_of_nothing_is_refused():
    with pytest.raises(RequestError, match="expected more than 0 seconds"):
        check_durations({contract.ANNOTATION_EXPECTED_RUNTIME: "0m"})
