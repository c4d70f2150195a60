# SPDX-License-Identifier: Apache-2.0
"""Trouble without a bug, from the disk, the API, the clock and the driver.

Disks fill up or turn read-only, the API is away for minutes, the clock is set, the driver hangs, errors come in storms, the driver is
upgraded.

Nothing that runs notices, new work waits with the reason, and all passes without a restart.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from agent.adapters.durable import TEMPORARY_SUFFIX
from aliquot import contract
from aliquot.paths import built
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions
from tests.fakes.mounted_directory import mounted_directory
from tests.fakes.small_disk import small_disk
from tests.fakes.wall_clock import WallClock
from tests.integration.agent_nodes import (
    QUICK,
    VGPU,
    condition,
    container,
    eventually,
    grants,
    inject,
    log_of,
    make_node,
    manifest,
    page,
    page_shows,
    refused,
    running,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]
CLIENT = built("bin/aliquot-cuda-client")


def cuda(mib: int = 1024) -> dict[str, Any]:
    """A container that holds memory as long as it lives."""
    return {**container(mib=mib), "command": ["sh", "-c", f"exec {CLIENT} hold --mib 200"]}


async def working(node: Node, pod: str) -> None:
    """Wait until a pod's program holds its memory."""
    await running(node, pod)
    await eventually(lambda: node.container(pod).lines(), "it holds its memory")


@asynccontextmanager
async def undisturbed(node: Node, *pods: str) -> AsyncIterator[None]:
    """At the end agent and containers are the processes they were at the beginning."""
    agent, before = node.agent.pid, {name: node.container(name).pid for name in pods}
    yield
    node.agent.check()
    assert node.agent.pid == agent
    assert (await page(node, "/healthz"))[0] == 200
    assert {name: node.container(name).pid for name in pods} == before
    assert all(node.container(name).exit_code is None for name in pods)


async def killed(node: Node) -> None:
    """Kill the agent and wait until kubelet has noticed."""
    await node.agent.kill()
    await eventually(lambda: node.allocatable(VGPU) == 0, "kubelet notices that the agent is gone")


class TestDisks:
    async def test_a_full_disk_is_named_and_holds_up_new_containers_alone(self):
        async with make_node("t4x2", start_agent=False) as node:
            layout = node.layout
            with ExitStack() as stack:
                disks = [stack.enter_context(small_disk(path)) for path in (layout.state, layout.run, layout.cdi_dynamic)]
                await node.agent.start()
                await node.wait_ready()
                node.create_pod(manifest("before", cuda()))
                node.create_pod(manifest("ends"))
                await running(node, "ends")
                await working(node, "before")
                async with undisturbed(node, "before"):
                    for number, disk in enumerate(disks):
                        disk.fill()
                        node.create_pod(manifest(f"p{number}"))
                        await refused(node, f"p{number}", str(disk.directory), "No space left on device")
                        assert not list(disk.directory.rglob(f"*{TEMPORARY_SUFFIX}"))
                        disk.empty()
                        await running(node, f"p{number}")
                    for disk in disks:
                        disk.fill()
                    node.delete_pod("ends")
                    await eventually(lambda: "ends" not in {grant["pod"] for grant in grants(node)}, "its share is free all the same")
                    for disk in disks:
                        disk.empty()
                    await page_shows(node, "drifts")

    async def test_an_agent_that_starts_on_full_disks_serves_what_it_can(self):
        async with make_node("t4x2", start_agent=False) as node:
            layout = node.layout
            with ExitStack() as stack:
                disks = [stack.enter_context(small_disk(path)) for path in (layout.state, layout.run, layout.cdi_dynamic)]
                await node.agent.start()
                await node.wait_ready()
                node.create_pod(manifest("before", cuda()))
                await working(node, "before")
                before, held = node.container("before").pid, grants(node)
                disks[0].fill()
                node.create_pod(manifest("refused"))  # its files are there, and its row is not
                await refused(node, "refused", str(disks[0].directory), "No space left on device")
                await killed(node)
                (layout.run / "metrics-address").unlink()
                for disk in disks[1:]:
                    disk.fill()
                await node.agent.start()
                await eventually(lambda: node.allocatable(VGPU) == 32, "kubelet has the devices back")
                node.create_pod(manifest("after"))
                await refused(node, "after", "No space left on device")
                assert grants(node) == held
                for disk in disks:
                    disk.empty()
                await running(node, "after", "refused")
                assert (node.container("before").pid, node.container("before").exit_code) == (before, None)

    async def test_killed_agent_starts_on_state_directory_turned_read_only(self):
        async with make_node("t4x2", start_agent=False) as node:
            with small_disk(node.layout.state) as disk:
                await node.agent.start()
                await node.wait_ready()
                node.create_pod(manifest("before", cuda()))
                await working(node, "before")
                before = node.container("before").pid
                await killed(node)
                for directory in ("ledger", "mig"):  # as a kill in the middle of writing leaves it
                    (disk.directory / directory / f".row.json.1.0{TEMPORARY_SUFFIX}").write_text("half")
                (disk.directory / "ledger" / "damaged.json").write_text("half")
                disk.set_read_only(True)
                await node.agent.start()
                await eventually(lambda: node.allocatable(VGPU) == 32, "kubelet has the devices back")
                async with undisturbed(node, "before"):
                    node.create_pod(manifest("after"))
                    await refused(node, "after", str(disk.directory), "Read-only file system")
                    assert 'namespace="default",node="node-1",pod="before"' in await node.metrics()
                    disk.set_read_only(False)
                    await running(node, "after")
                    assert (node.container("before").pid, node.container("before").exit_code) == (before, None)

    async def test_read_only_cdi_directory_is_named_and_repaired_once_writable(self):
        async with make_node("t4x2", start_agent=False) as node:
            with small_disk(node.layout.cdi_dynamic) as disk:
                await node.agent.start()
                await node.wait_ready()
                for name in ("stays", "ends"):
                    node.create_pod(manifest(name, cuda()))
                await running(node, "stays", "ends")
                async with undisturbed(node, "stays"):
                    disk.set_read_only(True)
                    node.create_pod(manifest("waits"))
                    await refused(node, "waits", str(disk.directory), "Read-only file system")
                    node.delete_pod("ends")
                    await node.wait_gone("ends")
                    await eventually(lambda: "cannot be released" in log_of(node), "it is said that the share of the pod that ended stays")
                    assert "ends" in {grant["pod"] for grant in grants(node)}  # whose spec is there may still be started
                    disk.set_read_only(False)
                    await running(node, "waits")
                    await eventually(lambda: {grant["pod"] for grant in grants(node)} == {"stays", "waits"}, "its share is free")
                    await page_shows(node, "drifts")
                    assert len(list(disk.directory.glob("*.json"))) == 2


async def test_agent_with_replaced_host_directory_ends_and_next_one_uses_new(tmp_path):
    async with make_node("t4x2", start_agent=False) as node:
        with mounted_directory(tmp_path / "run-cdi", node.layout.cdi_dynamic) as directory:
            await node.agent.start()
            await node.wait_ready()
            node.create_pod(manifest("before", cuda()))
            await working(node, "before")
            before = node.container("before").pid
            directory.replace()
            await eventually(lambda: not node.agent.running, "the agent ends")
            assert await node.agent.kill() == 1
            assert f"removed on the host: {node.layout.cdi_dynamic}" in log_of(node)
            directory.mount_again()
            await eventually(lambda: node.allocatable(VGPU) == 0, "kubelet notices that the agent is gone")
            await node.agent.start()
            await eventually(lambda: node.allocatable(VGPU) == 32, "kubelet has the devices back")
            node.create_pod(manifest("after"))
            await running(node, "after")
            await page_shows(node, "drifts")
            assert (node.container("before").pid, node.container("before").exit_code) == (before, None)


DEFAULT_PERIODS = ("--pod-wait-seconds=3", "--log-format=text")
"""As the agent is shipped, except for how long a start waits for a pod that the API does not report."""


class TestApi:
    @pytest.mark.parametrize(
        ("flags", "outage_seconds", "most_asked"),
        [
            pytest.param((*QUICK, "--reconcile-seconds=0.1", "--driver-poll-seconds=0.1"), 3, 60, id="thirty short periods"),
            pytest.param(DEFAULT_PERIODS, 300, 250, marks=[pytest.mark.soak, pytest.mark.timeout(900)], id="five minutes"),
        ],
    )
    async def test_api_outage_of_minutes_keeps_known_state_and_is_caught_up(self, flags, outage_seconds, most_asked):
        """Five minutes of the default period of ten seconds are thirty passes."""
        async with Node(SimulatedHardware("t4x2"), NodeOptions(agent_flags=flags)) as node:
            first_gpu = {contract.ANNOTATION_GPU_UUID: node.inventory.gpus[0].uuid}  # the other is going to be lost
            for name in ("stays", "ends"):
                node.create_pod(manifest(name, cuda(), annotations=first_gpu))
            node.create_pod(manifest("restarts", container(command=["sh", "-c", "sleep 1"]), annotations=first_gpu))
            await running(node, "stays", "ends", "restarts")
            held = grants(node)
            async with undisturbed(node, "stays"):
                with node.api.outage():
                    begun = len(node.api.unanswered)
                    silent = asyncio.create_task(asyncio.sleep(outage_seconds))
                    first = node.container("restarts").id
                    await eventually(lambda: node.container("restarts").id != first, "a container starts again")
                    inject(node, "lost", "--gpu", "1")
                    await eventually(lambda: node.allocatable(VGPU) == 16, "kubelet hears of a lost GPU")
                    node.create_pod(manifest("new"))
                    await refused(node, "new", "did not appear in the Kubernetes API")
                    node.delete_pod("ends")
                    await node.wait_gone("ends")
                    await silent
                    assert sorted(grants(node), key=str) == sorted(held, key=str)
                    asked = len(node.api.unanswered) - begun
                    assert 0 < asked < most_asked, "it asks ever more rarely"
                await running(node, "new", timeout_seconds=60)
                await eventually(
                    lambda: {grant["pod"] for grant in grants(node)} == {"stays", "restarts", "new"}, "the pod that ended let go", 40
                )
                await eventually(lambda: condition(node)["status"] == "False", "the lost GPU is reported")

    async def test_gpu_changes_during_api_outage_are_reported_afterwards(self):
        async with make_node("t4x2") as node:
            node.create_pod(manifest("works", container(mib=1024), annotations={contract.ANNOTATION_GPU_UUID: node.inventory.gpus[0].uuid}))
            await running(node, "works")
            reported = (contract.EVENT_REASON_GPU_UNHEALTHY, contract.EVENT_REASON_GPU_HEALTHY)
            with node.api.outage():
                inject(node, "xid", "62", "--gpu", "0")
                await eventually(lambda: node.allocatable(VGPU) == 16, "a GPU is quarantined")
                await eventually(lambda: node.allocatable(VGPU) == 32, "it has recovered")
                over = datetime.now(UTC)
                await asyncio.sleep(1.1)  # a tick of the clock that events are stamped with

            def about_the_pod() -> list[Mapping[str, Any]]:
                return [event for event in node.events("works") if event["reason"] in reported]

            await eventually(lambda: len(about_the_pod()) == 2, "its pod's owner reads of both", 60)
            assert [event["reason"] for event in about_the_pod()] == list(reported)
            assert all(datetime.fromisoformat(event["firstTimestamp"]) <= over for event in about_the_pod())

    async def test_agent_starting_without_api_serves_kubelet_and_knows_grants(self):
        async with make_node("t4x2") as node:
            node.create_pod(manifest("stays", cuda()))
            await running(node, "stays")
            pid, held = node.container("stays").pid, grants(node)
            await killed(node)
            with node.api.outage():
                await node.agent.start()
                await eventually(lambda: node.allocatable(VGPU) == 32, "kubelet has the devices back")
                await asyncio.sleep(1.0)  # three periods of the reconciler
                assert grants(node) == held
                assert (node.container("stays").pid, node.container("stays").exit_code) == (pid, None)
                assert (await page(node, "/healthz"))[0] == 200
            node.create_pod(manifest("new"))
            await running(node, "new")


DAY = 86_400


class TestClock:
    async def test_clock_change_moves_only_event_times(self, tmp_path):
        clock, quarantine_seconds = WallClock(tmp_path), 2
        async with make_node("t4x2", f"--health-quarantine-seconds={quarantine_seconds}", start_agent=False) as node:
            node.agent.env.update(clock.environment)
            await node.agent.start()
            await node.wait_ready()
            node.create_pod(manifest("before", cuda()))
            await running(node, "before")
            async with undisturbed(node, "before"):
                for name, seconds in (("forwards", 400 * DAY), ("backwards", -400 * DAY)):
                    begun = time.monotonic()
                    inject(node, "xid", "62", "--gpu", "1")
                    await eventually(lambda: node.allocatable(VGPU) == 16, "a GPU waits for the end of its quarantine")
                    clock.jump(seconds)
                    node.create_pod(manifest(name))
                    await running(node, name)
                    await eventually(partial(granted_at, node, name), "an event about it")
                    shown = granted_at(node, name) - datetime.now(UTC)
                    assert abs(shown - timedelta(seconds=seconds)) < timedelta(minutes=5), "the agent sees the clock that was set"
                    await eventually(lambda: node.allocatable(VGPU) == 32, "the quarantine ends all the same")
                    assert time.monotonic() - begun >= quarantine_seconds, "and not before"
                    node.delete_pod(name)
                    await eventually(lambda: [grant["pod"] for grant in grants(node)] == ["before"], "a share is free after its pod")
                await page_shows(node, "drifts")


def granted_at(node: Node, pod: str) -> datetime | None:
    """When the agent says that it granted the pod's container its share."""
    when = [event["lastTimestamp"] for event in node.events(pod) if event["reason"] == contract.EVENT_REASON_GRANTED]
    return datetime.fromisoformat(when[0]) if when else None
