# SPDX-License-Identifier: Apache-2.0
"""Leases by root of a container on what containers of a node share: they hold up neither its neighbours nor the agent."""

import asyncio
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from aliquot import contract
from aliquot.paths import built
from aliquot_lab.standin.node import Node
from tests.fakes.leases import KINDS, REASON, can_be_leased, lease
from tests.integration.agent_nodes import container, eventually, log_of, make_node, manifest, running
from tests.integration.mig_nodes import mps_program
from tests.integration.test_agent_usage import series, until_busy

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("build_dir")]
CLIENT = built("bin/aliquot-cuda-client")


@pytest.fixture(autouse=True)
def leases_work(tmp_path):
    probe = tmp_path / "probe"
    probe.touch()
    if not can_be_leased(probe):
        pytest.skip(REASON)


def mounts(node: Node) -> dict[Path, list[Path]]:
    """The files of the agent that each container has mounted, by its CDI spec."""
    found = {}
    for spec in node.layout.cdi_dynamic.glob("*.json"):
        edits = json.loads(spec.read_bytes())["devices"][0]["containerEdits"]["mounts"]
        own = [Path(mount["hostPath"]) for mount in edits]
        found[spec] = [path for path in own if path.is_relative_to(node.layout.state) or path.is_relative_to(node.layout.run)]
    return found


def shared(node: Node) -> list[Path]:
    """The files that two containers have mounted, by inode."""
    seen: dict[tuple[int, int], list[Path]] = {}
    for paths in mounts(node).values():
        for path in {path.resolve() for path in paths}:
            seen.setdefault((path.stat().st_dev, path.stat().st_ino), []).append(path)
    return [paths[0] for paths in seen.values() if len(paths) > 1]


def pods(node: Node) -> None:
    """Two containers of each kind that share files."""
    for name, priority in (("high", "high"), ("high-too", "high"), ("low", "low")):
        node.create_pod(manifest(name, container(mib=512), annotations={contract.ANNOTATION_PRIORITY: priority}))


@pytest.mark.parametrize("interposition", ["front", "preload"])
async def test_no_shared_file_can_have_a_lease_that_delays_anyone(interposition):
    async with make_node("t4x2", f"--interposition={interposition}", "--memory-oversubscription=1.5") as node:
        pods(node)
        node.create_pod(manifest("burst", container(mib=512), annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"}))
        node.create_pod(manifest("burst-too", container(mib=512), annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"}))
        await running(node, "high", "high-too", "low", "burst", "burst-too")
        found = shared(node)
        assert {path.relative_to(node.layout.run) for path in found} == {Path("priority/page"), Path("turns/page")}
        await asyncio.sleep(0.5)  # a period of the agent
        for path in found:
            assert not can_be_leased(path), path


async def test_mps_clients_share_two_directories_and_no_file(tmp_path):
    async with make_node("t4x2", mps_control=mps_program(tmp_path)) as node:
        for name in ("one", "two", "three"):  # on two GPUs
            node.create_pod(manifest(name, container(mib=512), annotations={contract.ANNOTATION_ISOLATION: "mps"}))
        await running(node, "one", "two", "three")
        found = shared(node)
        assert all(path.is_dir() for path in found)
        assert {path.name for path in found} == {"pipe", "mps-shm"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("interposition", ["front", "preload"])
async def test_agent_that_restarts_is_ready_whatever_is_leased(interposition, kind):
    async with make_node("t4x2", f"--interposition={interposition}") as node:
        pods(node)
        await running(node, "high", "high-too", "low")
        await node.agent.kill()
        with ExitStack() as leases:
            files = {path for path in (node.layout.state / "shim").rglob("*") if path.is_file()}
            held = [path for path in {*files, *shared(node)} if leases.enter_context(lease(path, kind, again=True))]
            assert held
            begun = time.monotonic()
            await node.agent.start()
            await node.wait_ready()
            node.create_pod(manifest("after", container(mib=512)))
            await running(node, "after")
            assert time.monotonic() - begun < 15.0
            (page,) = shared(node)
            await eventually(lambda: not can_be_leased(page), "the lease on the page has ended and does not come back")
            if kind == "write":
                assert "a container holds a lease on" in log_of(node)


async def test_high_priority_returns_when_the_lease_on_its_page_ends():
    """A tenant of low priority may read the page, and holds a read lease while the agent restarts and its neighbour starts."""
    async with make_node("t4x2", "--placement-policy=binpack") as node:
        begin = node.layout.base / "containers" / "begin"
        command = ["sh", "-c", f"until test -e {begin}; do sleep 0.05; done; exec {CLIENT} work --mib 50 --seconds 150 --kernel-us 2000"]
        for priority in ("low", "high"):
            spec = {**container(mib=512), "command": command}
            node.create_pod(manifest(priority, spec, annotations={contract.ANNOTATION_PRIORITY: priority}))
        await running(node, "low", "high")
        await node.agent.kill()
        with lease(node.layout.run / "priority" / "page", "read") as held:
            assert held
            await node.agent.start()
            await node.wait_ready()
            begin.touch()
            await until_busy(node, "low")
            await until_busy(node, "high")
        async with asyncio.timeout(30):
            while (await series(node, "container_utilization_ratio")).get("low", 1.0) > 0.1:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("interposition", ["front", "preload"])
async def test_leases_on_all_files_of_one_container_delay_no_neighbour(interposition):
    """Also while no agent runs: a neighbour waits for no file but the pages, which it opens without waiting."""
    async with make_node("t4x2", f"--interposition={interposition}") as node:
        pods(node)
        await running(node, "high", "high-too", "low")
        await node.agent.kill()
        hostile, *others = mounts(node).values()
        assert {"limits", "region"} < {path.name for path in hostile}
        neighbours = {path for paths in others for path in paths if path.name != "page"}
        with ExitStack() as leases:
            held = {path.name for path in hostile if leases.enter_context(lease(path, "write"))}
            assert {"limits", "region"} <= held, "the kernel gives none on a library that a program has mapped"
            for path in neighbours:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))  # BlockingIOError where a blocking open would wait
