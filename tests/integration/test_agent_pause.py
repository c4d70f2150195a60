# SPDX-License-Identifier: Apache-2.0
"""A pod's annotation lets the launches of its running containers wait and go on, through restarts of container and agent and an outage."""

import asyncio
from functools import partial
from typing import Any

import pytest

from agent.core.limits import pausing
from aliquot import contract
from aliquot_lab.demo.evidence import parse_events
from aliquot_lab.standin.cluster import Kind
from tests.integration.agent_nodes import drift_page, eventually, grants, log_of, make_node, manifest, refused, running
from tests.integration.test_agent_metrics import scrape
from tests.integration.test_agent_usage import cuda, files_of, grant_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]
WORK = ("work", "--seconds", "600", "--kernel-us", "1000")
PAUSED = {contract.ANNOTATION_PAUSED: "true"}
STOOD_STILL_SECONDS = 2.5
"""A client at work reports every second."""


def annotate(node, pod: str, value: str | None) -> None:
    """Change the annotation of a pod that runs, as kubectl annotate does."""

    def change(found: Any) -> None:
        annotations = found["metadata"].setdefault("annotations", {})
        annotations.pop(contract.ANNOTATION_PAUSED, None)
        annotations.update({} if value is None else {contract.ANNOTATION_PAUSED: value})

    node.cluster.update(Kind.POD, "default", pod, change)


def paused(node, pod: str) -> set[bool]:
    """What the limits of the pod's containers say."""
    pages = [files_of(node).limits(grant["grant_id"]) for grant in grants(node) if grant["pod"] == pod]
    return {device.paused for page in pages if page is not None for device in page.devices}


def reported(node, pod: str) -> list[str]:
    """The reasons of the pod's events about pausing, in order."""
    reasons = (contract.EVENT_REASON_PAUSED, contract.EVENT_REASON_RESUMED, contract.EVENT_REASON_PAUSE_IGNORED)
    return [event["reason"] for event in node.events(pod) if event["reason"] in reasons]


def kernels(node, pod: str) -> list[int]:
    """Kernels of the pod's main container that finished in each second of work so far."""
    return [event["kernels"] for event in parse_events(node.container(pod, "main").lines()) if event["event"] == "progress"]


async def metric(node, name: str, pod: str) -> list[float]:
    """What the agent shows of the pod's main container."""
    samples = (await scrape(node)).get(contract.METRIC_PREFIX + name, ())
    return [value for labels, value in samples if (labels["pod"], labels["container"]) == (pod, "main")]


async def waits(node, pod: str) -> None:
    """Wait for a launch to wait, and then check that no kernel was launched meanwhile and no kernel is."""
    async with asyncio.timeout(60):
        while await metric(node, "container_launches_waiting", pod) != [1]:  # noqa: ASYNC110 - asks another process
            await asyncio.sleep(0.05)
    before = kernels(node, pod)
    await asyncio.sleep(STOOD_STILL_SECONDS)
    assert kernels(node, pod) == before
    assert await metric(node, "container_paused", pod) == [1]


async def works(node, pod: str) -> None:
    before = len(kernels(node, pod))
    await eventually(lambda: len(kernels(node, pod)) > before + 1, f"{pod} works")


async def make_paused(node) -> None:
    """Make pod a with a container that works, and pause it."""
    node.create_pod(manifest("a", cuda(*WORK)))
    await running(node, "a")
    annotate(node, "a", "true")
    await waits(node, "a")


@pytest.mark.parametrize("cores", [None, 50], ids=["without a limit of compute", "with one"])
async def test_running_pod_is_paused_by_annotation_and_resumes_without_it(cores):
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", cuda(*WORK, cores=cores), {**cuda("hold", "--mib", "64", mib=512), "name": "beside"}))
        node.create_pod(manifest("other", cuda(*WORK)))
        await running(node, "a", "other")
        await works(node, "a")
        pid = node.container("a", "main").pid
        for value in (None, "false"):
            annotate(node, "a", "true")
            await waits(node, "a")
            assert paused(node, "a") == {True}
            await works(node, "other")
            annotate(node, "a", value)
            await works(node, "a")
            assert paused(node, "a") == {False}
        assert node.container("a", "main").pid == pid
        both = [contract.EVENT_REASON_PAUSED] * 2 + [contract.EVENT_REASON_RESUMED] * 2
        await eventually(lambda: reported(node, "a") == both * 2, "each container's change is reported, also the second time")
        assert reported(node, "other") == []
        assert contract.EVENT_REASON_DRIFT not in {event["reason"] for event in node.events("a")}
        assert (await drift_page(node))["drifts"] == []


async def test_pause_outlives_agent_and_ends_when_annotation_was_removed_meanwhile():
    async with make_node("t4x2") as node:
        await make_paused(node)
        await node.agent.kill()
        await node.agent.start()
        await node.wait_ready()
        await waits(node, "a")
        assert reported(node, "a") == [contract.EVENT_REASON_PAUSED], "a restart is no news"
        await node.agent.stop()
        annotate(node, "a", None)
        assert paused(node, "a") == {True}
        await node.agent.start()
        await works(node, "a")
        assert paused(node, "a") == {False}
        assert (await drift_page(node))["drifts"] == []


async def test_last_known_pause_survives_agent_restart_during_api_outage():
    async with make_node("t4x2") as node:
        await make_paused(node)
        with node.api.outage():
            await eventually(lambda: "watching pods: " in log_of(node), "the agent hears nothing any more")
            annotate(node, "a", None)
            await waits(node, "a")
            await node.agent.kill()
            await node.agent.start()
            await node.agent.metrics_url(60)
            await waits(node, "a")
        await works(node, "a")


async def test_a_container_of_a_paused_pod_starts_paused_and_starts_so_again():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", cuda(*WORK), annotations=PAUSED))
        await running(node, "a")
        await waits(node, "a")
        granted = [event["message"] for event in node.events("a") if event["reason"] == contract.EVENT_REASON_GRANTED]
        assert ["starts paused" in message for message in granted] == [True]
        pid = node.container("a").pid
        node.container("a").signal_group(9)
        await eventually(lambda: node.container("a").pid != pid, "the container was started again")
        await running(node, "a")
        await waits(node, "a")
        assert kernels(node, "a") == []
        annotate(node, "a", None)
        await works(node, "a")


async def test_changed_limits_of_paused_container_are_drift_and_rewritten_with_pause():
    async with make_node("t4x2") as node:
        await make_paused(node)
        files_of(node).amend_limits(grant_of(node, "a"), partial(pausing, paused=False))
        await eventually(lambda: contract.EVENT_REASON_DRIFT in {event["reason"] for event in node.events("a")}, "it is drift")
        await eventually(lambda: paused(node, "a") == {True}, "the limits are written again")
        await waits(node, "a")


async def test_invalid_value_changes_nothing_and_gives_event():
    async with make_node("t4x2") as node:
        await make_paused(node)
        annotate(node, "a", "maybe")
        await eventually(
            lambda: reported(node, "a") == [contract.EVENT_REASON_PAUSED, contract.EVENT_REASON_PAUSE_IGNORED], "it is reported"
        )
        await waits(node, "a")
        annotate(node, "a", None)
        await works(node, "a")


async def test_a_pod_that_the_shim_does_not_hold_is_not_started_paused():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", annotations=PAUSED | {contract.ANNOTATION_ISOLATION: "exclusive"}))
        await refused(node, "a", "only the shim can pause", "remove one of the two")
