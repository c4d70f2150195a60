"""What differs on a node is found, told, and put right: files, rows, specs, assignments, and shares of pods that are gone."""

import asyncio
import json
import time

import pytest

from agent.core.region_layout import decode_limits
from proto import contract
from tests.integration.agent_nodes import (
    assign,
    assignment,
    drift_page,
    eventually,
    grants,
    make_node,
    manifest,
    page,
    page_shows,
    refused,
    running,
    share,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]


async def cures(node) -> dict[str, float]:
    """How many drifts of each kind were cured so far."""
    lines = [line for line in (await node.metrics()).splitlines() if line.startswith("aliquot_drift_cures_total{")]
    return {line.split('kind="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def cured(node, *kinds: str) -> None:
    async with asyncio.timeout(10):
        while not set(kinds) <= (await cures(node)).keys():  # noqa: ASYNC110 - asks another process
            await asyncio.sleep(0.05)


async def test_files_that_are_lost_or_changed_are_written_again_and_the_container_does_not_notice():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a"))
        await running(node, "a")
        (grant,) = grants(node)
        pid, name = node.container("a").pid, grant["grant_id"]
        row = node.layout.state / "ledger" / f"{name}.json"
        files = node.layout.run / "containers" / name
        (spec,) = node.layout.cdi_dynamic.iterdir()
        before = {path: path.read_bytes() for path in (row, files / "limits", spec)}
        await page_shows(node, "drifts")

        row.unlink()
        spec.unlink()
        (files / "region").unlink()
        await cured(node, "lost-row", "lost-spec", "lost-files")
        spec.write_bytes(b"{}")
        content = bytearray((files / "limits").read_bytes())
        (files / "limits").chmod(0o644)
        (files / "limits").write_bytes(content[:200])
        row.write_bytes(row.read_bytes().replace(b'"container"', b'"contained"'))
        await eventually(lambda: {path: path.exists() and path.read_bytes() for path in before} == before, "all is as it was")
        await page_shows(node, "drifts")
        assert (files / "region").is_file()
        assert (node.container("a").pid, node.container("a").exit_code) == (pid, None)
        metrics = await node.metrics()
        assert 'aliquot_drift{kind="lost-spec"} 0.0' in metrics
        await eventually(lambda: [e for e in node.events("a") if e["reason"] == contract.EVENT_REASON_DRIFT], "an event about it")


async def test_what_belongs_to_nobody_vanishes():
    async with make_node("t4x2") as node:
        shown = await drift_page(node)
        assert (shown["node"], shown["drifts"], shown["findings"]) == ("node-1", [], [])
        node.create_pod(manifest("a"))
        await running(node, "a")
        stray = "strayaaaaaaaaaaaaaaaaaaa"
        spec = node.layout.cdi_dynamic / f"{contract.CDI_FILE_PREFIX}{stray}.json"
        spec.write_text("{}")
        directory = node.layout.run / "containers" / stray
        directory.mkdir()
        (directory / "region").write_bytes(b"x" * 100)
        row = node.layout.state / "ledger" / f"{stray}.json"
        row.write_text("{}")
        other = node.layout.cdi_dynamic / "vendor.example-device.json"
        other.write_text("{}")
        await cured(node, "stray-files")
        await eventually(lambda: not any(path.exists() for path in (spec, directory, row)), "all three are gone")
        assert other.exists()  # another vendor's
        assert [grant["pod"] for grant in grants(node)] == ["a"]


async def test_an_assignment_that_changes_under_a_running_container_is_told_and_changes_nothing():
    async with make_node("t4x2", "--placement=assigned") as node:
        pod = node.create_pod(manifest("a"))
        uid = pod["metadata"]["uid"]
        assign(node, "a", assignment(uid, main=[share(node, 0)]))
        await running(node, "a")
        before = grants(node)
        assign(node, "a", assignment(uid, main=[share(node, 1)]))
        (drift,) = await page_shows(node, "drifts", "assignment-differs")
        assert node.inventory.gpus[1].uuid in str(drift["message"])
        assert (drift["pod"], drift["container"], drift["podUid"], drift["cure"]) == ("a", "main", uid, "evict")
        await asyncio.sleep(1.0)
        assert grants(node) == before
        limits = decode_limits((node.container("a").root / contract.CONTAINER_LIMITS.lstrip("/")).read_bytes())
        assert limits.devices[0].uuid == node.inventory.gpus[0].uuid
        await running(node, "a")
        assign(node, "a", assignment(uid, main=[share(node, 0)]))
        await page_shows(node, "drifts")


async def test_a_share_is_free_within_a_period_of_its_pods_end_however_it_ends():
    async with make_node("t4x2", "--reconcile-seconds=2") as node:
        for name in ("a", "b", "c"):
            node.create_pod(manifest(name))
        await running(node, "a", "b", "c")
        begun = time.monotonic()
        node.delete_pod("a")
        node.container("b").signal_group(9)  # restarts, and keeps its share
        await node.agent.kill()
        node.delete_pod("c")
        await node.wait_gone("a")
        await node.wait_gone("c")
        await node.agent.start()
        await node.wait_ready()
        await eventually(lambda: [grant["pod"] for grant in grants(node)] == ["b"], "the shares are free")
        assert time.monotonic() - begun < 8
        names = {grants(node)[0]["grant_id"]}
        assert {path.name for path in (node.layout.run / "containers").iterdir()} == names
        assert {json.loads(path.read_bytes())["devices"][0]["name"] for path in node.layout.cdi_dynamic.iterdir()} == names


async def test_a_cdi_directory_that_cannot_be_written_is_named_and_starts_go_on_once_it_can():
    async with make_node("t4x2") as node:
        directory = node.layout.cdi_dynamic
        aside = directory.with_name("aside")
        directory.rename(aside)
        directory.write_text("in the way")
        node.create_pod(manifest("a"))
        await refused(node, "a", str(directory), "tried again at the next retry")
        assert (await page(node, "/healthz"))[0] == 200
        directory.unlink()
        aside.rename(directory)
        await running(node, "a")
        await page_shows(node, "drifts")
        assert len(list(directory.iterdir())) == len(grants(node)) == 1
