# SPDX-License-Identifier: Apache-2.0
"""Whatever has become of the agent's files: it starts, says what is damaged, and grants nothing twice."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.adapters.durable import TEMPORARY_SUFFIX
from aliquot import contract
from aliquot_cli.doctor.agent import check as check_agent
from aliquot_cli.doctor.host import Host
from aliquot_cli.doctor.options import DoctorOptions
from aliquot_lab.standin.node import Node
from tests.fakes.damage import DAMAGES, damage
from tests.integration.agent_nodes import (
    container,
    eventually,
    grants,
    log_of,
    make_node,
    manifest,
    page_shows,
    promised_mib,
    refused,
    running,
)

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("build_dir")]


def read_at_start(node: Node) -> Iterator[Path]:
    """Every file of its own that an agent reads when it starts, without the secret, which it does not replace."""
    state, run = node.layout.state, node.layout.run
    (grant_directory,) = (run / "containers").iterdir()
    yield from (state / "ledger").glob("*.json")
    yield from (grant_directory / name for name in ("grant.json", "limits", "region"))
    yield from node.layout.cdi_dynamic.glob("*.json")
    copies = (path for path in (state / "shim").rglob("*") if path.suffix != TEMPORARY_SUFFIX)  # spare ones come and go
    yield from (path for path in copies if path.is_file())
    yield from (path for path in (state / "node-versions", state / "cordon", run / "health") if path.exists())
    yield from (state / "agent-holder", run / "agent-holder", run / "priority/page")
    yield node.layout.plugin_dir / "kubelet_internal_checkpoint"


async def restart(node: Node) -> None:
    await node.agent.start()
    await node.wait_ready()


KINDS = tuple(DAMAGES)
MIXED = {f"mixed {first}": KINDS[first:] + KINDS[:first] for first in (0, 4, 8)}
"""Another damage for each file."""
ALIKE = {how: (how,) for how in KINDS}
"""The same damage for all files."""


@pytest.mark.parametrize(
    "hows", [*MIXED.values(), *(pytest.param(alike, marks=pytest.mark.soak) for alike in ALIKE.values())], ids=[*MIXED, *ALIKE]
)
async def test_agent_becomes_ready_whatever_its_files_are(hows):
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a"))
        await running(node, "a")
        paths = list(read_at_start(node))
        assert len(paths) > 12
        await node.agent.kill()
        for path, how in zip(paths, itertools.cycle(hows), strict=False):
            if path.name != "kubelet_internal_checkpoint" or how != "directory":
                damage(path, how)
        (node.layout.state / "shim" / "stray").mkdir()
        damage(node.layout.state / "shim" / "stray", hows[0])
        await restart(node)
        await running(node, "a")
        assert node.container("a").exit_code is None
        await eventually(lambda: "damaged" in log_of(node), "the log says what is damaged")
        node.delete_pod("a")
        await node.wait_gone("a")
        await page_shows(node, "drifts")
        node.create_pod(manifest("b"))
        await running(node, "b")
        assert [grant["pod"] for grant in grants(node)] == ["b"]


@pytest.mark.parametrize("how", ["pipe", "empty"])
async def test_agent_without_readable_secret_ends_with_its_path(how):
    async with make_node("t4x2") as node:
        await node.agent.kill()
        damage(node.layout.state / "secret", how)
        await node.agent.start()
        await eventually(lambda: not node.agent.running, "the agent ends")
        assert f"{node.layout.state / 'secret'}" in node.agent.log_tail()


def flip(path: Path) -> None:
    """Damage one bit of a file's content."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


async def damage_both(node: Node, *, limits: bool) -> None:
    """Damage the row and its copy of the only grant, while no agent runs."""
    (row,) = (node.layout.state / "ledger").glob("*.json")
    directory = node.layout.run / "containers" / row.stem
    await node.agent.kill()
    flip(row)
    flip(directory / "grant.json")
    if limits:
        (directory / "limits").chmod(0o644)
        (directory / "limits").write_bytes(b"")


class TestRowAndCopyDamaged:
    """No further grant where the container may run; its files stay until its pod ends."""

    @pytest.mark.parametrize("limits", [False, True], ids=["limits readable", "limits damaged too"])
    async def test_gpu_is_closed_until_the_pod_is_gone(self, limits):
        async with make_node("t4x2", "--audit-policy=kill") as node:
            node.create_pod(manifest("a", container(mib=8192)))
            await running(node, "a")
            (given,) = [uuid for uuid, mib in promised_mib(node).items() if mib]
            files = {path: path.lstat().st_ino for path in (node.layout.run / "containers").rglob("*") if path.name in ("limits", "region")}
            (spec,) = node.layout.cdi_dynamic.iterdir()
            await damage_both(node, limits=limits)
            await restart(node)
            other = next(gpu.uuid for gpu in node.inventory.gpus if gpu.uuid != given)
            await eventually(lambda: "ledger row and its copy are damaged" in log_of(node), "the log says so")
            (found,) = await page_shows(node, "drifts", "damaged-grant")
            assert found["pod"] == "a"
            await eventually(lambda: [e for e in node.events("a") if "damaged" in e["message"]], "an event on the pod")
            assert 'aliquot_drift{kind="damaged-grant"' in await node.metrics()
            options = DoctorOptions(state_dir=str(node.layout.state), runtime_dir=str(node.layout.run))
            reported = await asyncio.to_thread(
                lambda: [one for one in check_agent(Host(Path("/")), options) if one.check == "agent.ledger"]
            )
            assert [one.found for one in reported] == [f"a: {found['message']}"]

            node.create_pod(manifest("b", container(mib=1024), annotations={contract.ANNOTATION_GPU_UUID: given}))
            await refused(node, "b", "nothing more is granted on", given, "damaged-grant")
            node.create_pod(manifest("c", container(mib=1024), annotations={contract.ANNOTATION_GPU_UUID: other}))
            if limits:
                await refused(node, "c", "nothing more is granted on", other)
            else:
                await running(node, "c")
            assert {path: path.lstat().st_ino for path in files} == files
            assert spec.exists()
            assert node.container("a").exit_code is None

            node.delete_pod("a")
            await node.wait_gone("a")
            await running(node, "b", "c")
            await page_shows(node, "drifts")

    async def test_restarted_container_gets_its_grant_again(self):
        async with make_node("t4x2") as node:
            node.create_pod(manifest("a"))
            await running(node, "a")
            before = grants(node)
            await damage_both(node, limits=False)
            await restart(node)
            await page_shows(node, "drifts", "damaged-grant")
            pid = node.container("a").pid
            node.container("a").signal_group(9)
            await eventually(lambda: node.container("a").pid != pid and grants(node), "it was started again")
            await page_shows(node, "drifts")
            assert [(one["pod"], one["grant_id"]) for one in grants(node)] == [("a", before[0]["grant_id"])]
