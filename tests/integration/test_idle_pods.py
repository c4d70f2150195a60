# SPDX-License-Identifier: Apache-2.0
"""The idle policy in the whole scheduler, over HTTP: what an agent reports, a pod that waits, evictions and events."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.gpunode import IdlePod, encode_gpu_node
from aliquot.contract.model import ContainerAssignment, PodAssignment
from aliquot.kube.requests import timestamp
from scheduler_plugin.core.classes import parse_classes
from tests.integration.test_extender import running
from tests.unit.scheduler_plugin.api import FakeApi, node_object, pod_object
from tests.unit.scheduler_plugin.builders import make_node, make_share

HOUR = 3600
SECONDS = 30.0


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    """A node with two GPUs. A notebook has the first one; the second is taken by a pod without a class."""
    async with FakeApi() as served:
        await served.put("nodes", node_object("n1"))
        for minor, (name, labels) in enumerate({"notebook": {contract.LABEL_CLASS: "interactive"}, "other": {}}.items()):
            shares = ContainerAssignment("main", (make_share("n1", minor, 1000),))
            annotations = {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(PodAssignment(f"uid-{name}", (shares,)))}
            pod = pod_object(name, node="n1", annotations=annotations, vgpu="1", vgpu_memory="1000")
            pod["metadata"]["labels"], pod["spec"]["priority"] = labels, 50_000
            await served.put("pods", pod)
        yield served


async def report(api: FakeApi, *idle: str, hours: float = 2.0) -> None:
    """Have the agent report pods that are idle since then."""
    now = int(time.time())
    reports = tuple(IdlePod(f"uid-{name}", now - int(hours * HOUR), now + HOUR) for name in sorted(idle))
    await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 2, idle=reports))))


def waiting(name: str = "training") -> dict[str, Any]:
    """A pod of low priority that kube-scheduler refuses by the node's sums, so it calls no filter for it."""
    pod = pod_object(name, vgpu="1", vgpu_memory="1000")
    pod["metadata"]["creationTimestamp"] = timestamp(time.time() - 60)
    pod["spec"] |= {"schedulerName": contract.SCHEDULER_NAME, "priority": -10}
    return pod


def is_ending(api: FakeApi, name: str) -> bool:
    return "deletionTimestamp" in api.pod(name)["metadata"]


def events(api: FakeApi) -> set[tuple[str, str]]:
    """Pod and reason of each event."""
    return {(event["involvedObject"]["name"], event["reason"]) for event in api.events}


async def test_idle_notebook_ends_for_waiting_pod_and_not_before(api):
    await report(api, "notebook", "other")
    async with running(api) as scheduler:
        await scheduler.until(lambda: ("notebook", contract.EVENT_REASON_IDLE) in events(api), SECONDS)
        assert not is_ending(api, "notebook")
        await api.put("pods", waiting())
        await scheduler.until(lambda: is_ending(api, "notebook"), SECONDS)
        await scheduler.until(lambda: ("notebook", contract.EVENT_REASON_PREEMPTED) in events(api), SECONDS)
    assert not is_ending(api, "other")
    assert {pod for pod, _ in events(api)} <= {"notebook", "training"}


async def test_notebook_that_works_again_does_not_give_way(api):
    await report(api, "notebook")
    async with running(api) as scheduler:
        await scheduler.until(lambda: ("notebook", contract.EVENT_REASON_IDLE) in events(api), SECONDS)
        await report(api)
        context = scheduler.scheduler.cluster.context
        await scheduler.until(lambda: not context.idle, SECONDS)
        await api.put("pods", waiting())
        await scheduler.until(lambda: "uid-training" in context.state.pods, SECONDS)
    assert not is_ending(api, "notebook")


async def test_class_ends_idle_pod_though_no_pod_waits(api):
    await report(api, "notebook", hours=0.5)
    async with running(api, classes=parse_classes({"interactive": {"idleEndAfter": "20m"}})) as scheduler:
        await scheduler.until(lambda: is_ending(api, "notebook"), SECONDS)
        await scheduler.until(lambda: ("notebook", contract.EVENT_REASON_IDLE) in events(api), SECONDS)
