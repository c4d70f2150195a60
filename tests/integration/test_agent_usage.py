# SPDX-License-Identifier: Apache-2.0
"""What containers use, by the driver's account and by their own, and what follows from it: overhead, lending, priorities."""

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from agent.adapters.container_files import GrantFiles, read_region
from agent.core.borrowing import MOST_PERCENT
from agent.core.node_pages import PRIORITY
from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_cli.__main__ import main
from aliquot_lab.demo.evidence import parse_events
from tests.integration.agent_nodes import container, eventually, grants, log_of, make_node, manifest, published, refused, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]
BINPACK = "--placement-policy=binpack"
WAIT = "while [ ! -e go ]; do sleep 0.05; done; "
"""The container's program starts once the test has made the file ``go`` in its root."""


def cuda(*arguments: str, wait: bool = False, **asked: Any) -> dict[str, Any]:
    """A container that runs the CUDA client."""
    program = f"exec {built('bin/aliquot-cuda-client')} {' '.join(arguments)}"
    return {**container(**asked), "command": ["sh", "-c", (WAIT if wait else "") + program]}


def mig(*arguments: str, profile: str = "1g.10gb") -> dict[str, Any]:
    return {**cuda(*arguments), "resources": {"limits": {contract.RESOURCE_MIG_PREFIX + profile: "1"}}}


def go(node, pod: str) -> None:
    (node.container(pod).root / "go").touch()


def files_of(node) -> GrantFiles:
    return GrantFiles(node.layout.run / "containers")


def grant_of(node, pod: str) -> str:
    (identifier,) = [grant["grant_id"] for grant in grants(node) if grant["pod"] == pod]
    return identifier


def limit_of(node, pod: str) -> DeviceLimit:
    limits = files_of(node).limits(grant_of(node, pod))
    assert limits is not None
    return limits.devices[0]


async def series(node, name: str) -> dict[str, float]:
    """The values of a family of container metrics, by pod."""
    families = {family.name: family.samples for family in text_string_to_metric_families(await node.metrics())}
    return {sample.labels["pod"]: sample.value for sample in families.get(contract.METRIC_PREFIX + name, ())}


def kernels(node, pod: str) -> list[int]:
    """Kernels that finished in each second of work so far."""
    return [event["kernels"] for event in parse_events(node.container(pod).lines()) if event["event"] == "progress"]


async def until_busy(node, pod: str) -> None:
    """Wait until the metric shows that a pod's kernels run."""
    async with asyncio.timeout(60):
        while not (await series(node, "container_utilization_ratio")).get(pod):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.1)


async def until_used(node, pod: str, least_bytes: int) -> float:
    """Wait until the metric shows that a pod holds so much; return what it shows."""
    async with asyncio.timeout(60):
        while True:
            used = (await series(node, "container_memory_used_bytes")).get(pod, 0.0)
            if used >= least_bytes:
                return used
            await asyncio.sleep(0.1)


async def test_a_mig_container_uses_what_its_instance_holds_and_has_no_refusals():
    async with make_node("a100x8-mig") as node:
        await eventually(lambda: node.allocatable(contract.RESOURCE_MIG_PREFIX + "1g.10gb"), "the kubelet counts the instances")
        node.create_pod(manifest("hard", mig("hold", "--mib", "512")))
        node.create_pod(manifest("soft", cuda("hold", "--mib", "256", mib=2048)))
        await running(node, "hard", "soft")
        assert await until_used(node, "hard", 512 * MIB) < 2048 * MIB
        assert await until_used(node, "soft", 256 * MIB) < 2048 * MIB
        refusals = await series(node, "container_refusals")
        assert refusals == {"soft": 0}
        assert "hard" not in await series(node, "container_overhead_bytes")


async def test_memory_not_counted_by_shim_is_deducted_from_limit_and_returned():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", cuda("hold", "--mib", "64", wait=True, mib=4096)))
        await running(node, "a")

        def too_cheap(limits: Limits) -> Limits:
            """A context is said to cost next to nothing, so that the driver uses more than is counted."""
            return replace(limits, devices=tuple(replace(device, context_bytes=MIB) for device in limits.devices))

        files_of(node).amend_limits(grant_of(node, "a"), too_cheap)
        go(node, "a")
        counted = await until_used(node, "a", 64 * MIB)
        assert counted < 80 * MIB
        await eventually(lambda: limit_of(node, "a").overhead_bytes > 16 * MIB, "the context's true cost is in the limits")
        overhead = limit_of(node, "a").overhead_bytes
        async with asyncio.timeout(60):
            while (await series(node, "container_overhead_bytes")).get("a") != overhead:  # noqa: ASYNC110 - asks another process
                await asyncio.sleep(0.1)
        (slot,) = read_region(node.container("a").root / contract.CONTAINER_REGION.lstrip("/")).snapshot.slots
        assert slot.host_pid == node.container("a").pid
        node.container("a").signal_group(9)
        await eventually(lambda: limit_of(node, "a").overhead_bytes == 0, "the container that starts again has none")


async def test_what_a_context_costs_is_learnt_from_one_container_for_the_next():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", cuda("hold", "--mib", "0", mib=2048)))
        await running(node, "a")
        used = await until_used(node, "a", MIB)
        await eventually(lambda: "memory of a CUDA context corrected" in log_of(node), "it is learnt")
        node.create_pod(manifest("b", cuda("hold", "--mib", "0", mib=2048)))
        await running(node, "b")
        assert limit_of(node, "a").context_bytes == 0
        assert limit_of(node, "b").context_bytes == pytest.approx(used, rel=0.05)


async def test_weights_share_what_is_idle_and_give_it_back():
    async with make_node("t4x2", BINPACK) as node:
        weight = {contract.ANNOTATION_CORES_MODE: "weight"}
        work = ("work", "--seconds", "60", "--kernel-us", "1000")
        node.create_pod(manifest("a", cuda(*work, cores=20), annotations=weight))
        node.create_pod(manifest("b", cuda(*work, wait=True, cores=60), annotations=weight))
        await running(node, "a", "b")
        await eventually(lambda: limit_of(node, "a").sm_percent == MOST_PERCENT, "a borrows what b leaves idle")
        assert limit_of(node, "b").sm_percent == 60
        await eventually(lambda: len(kernels(node, "a")) >= 2, "a works alone")
        alone = kernels(node, "a")[-1]
        go(node, "b")
        await eventually(
            lambda: (limit_of(node, "a").sm_percent, limit_of(node, "b").sm_percent) == (25, 75), "by weight when both want it"
        )
        await eventually(lambda: kernels(node, "a")[-1] < alone * 0.6, "a does less beside b")
        node.delete_pod("b")
        await eventually(lambda: limit_of(node, "a").sm_percent == MOST_PERCENT, "a has it back")


async def test_reserved_cores_are_kept_against_container_without_cores():
    async with make_node("t4x2", BINPACK) as node:
        work = ("work", "--seconds", "60", "--kernel-us", "1000")
        node.create_pod(manifest("free", cuda(*work)))
        node.create_pod(manifest("reserved", cuda(*work, wait=True, cores=90)))
        await running(node, "free", "reserved")
        await eventually(lambda: len(kernels(node, "free")) >= 2, "it works alone")
        assert limit_of(node, "free").sm_percent == 0
        alone = kernels(node, "free")[-1]
        go(node, "reserved")
        await eventually(lambda: limit_of(node, "free").sm_percent in range(1, 15), "it leaves what is reserved")
        since = len(kernels(node, "reserved")) + 1
        await eventually(lambda: len(kernels(node, "reserved")) >= since + 6, "both work")
        assert max(kernels(node, "reserved")[since:]) > 0.85 * alone
        assert min(kernels(node, "free")[-4:]) < 0.2 * alone
        node.delete_pod("reserved")
        await eventually(lambda: limit_of(node, "free").sm_percent == 0, "it has all back")


async def test_weight_without_cores_is_refused_with_what_to_write():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", annotations={contract.ANNOTATION_CORES_MODE: "weight"}))
        await refused(node, "a", contract.ANNOTATION_CORES_MODE, contract.RESOURCE_VGPU_CORES)


async def test_low_priority_yields_while_high_priority_works():
    async with make_node("t4x2", BINPACK) as node:
        work = ("work", "--seconds", "60", "--kernel-us", "1000", "--sync-every", "5")
        node.create_pod(manifest("low", cuda(*work), annotations={contract.ANNOTATION_PRIORITY: "low"}))
        node.create_pod(manifest("high", cuda(*work, wait=True), annotations={contract.ANNOTATION_PRIORITY: "high"}))
        await running(node, "low", "high")
        page = node.layout.run / "priority/page"
        for pod in ("low", "high"):
            assert (node.container(pod).root / contract.CONTAINER_PRIORITY.lstrip("/")).samefile(page)
        lines = {limit_of(node, pod).priority_line for pod in ("low", "high")}
        assert len(lines) == 1
        assert lines != {0}
        await eventually(lambda: len(kernels(node, "low")) >= 2, "low works alone")
        alone = kernels(node, "low")[-1]
        go(node, "high")
        await eventually(lambda: kernels(node, "low")[-1] < alone / 4, "low does little beside high")


async def test_page_truncated_by_container_is_repaired_while_agent_runs():
    async with make_node("t4x2") as node:
        page = node.layout.run / "priority/page"
        before = page.stat().st_ino
        os.truncate(page, 0)
        await eventually(lambda: page.read_bytes() == PRIORITY.empty(), "the page is whole again")
        assert page.stat().st_ino == before, "those who have it open have it again"


async def test_a_region_is_shown_by_directory_and_by_process():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", cuda("fill", "--hold", mib=1024, cores=40)))
        await running(node, "a")
        await eventually(lambda: parse_events(node.container("a").lines()), "it is full")

        def dump(*arguments: str) -> str:
            result = CliRunner().invoke(main, ["region", "dump", *arguments], catch_exceptions=False)
            assert result.exit_code == 0, result.output
            return result.stdout

        directory = node.layout.run / "containers" / grant_of(node, "a")
        await eventually(
            lambda: all(one["host_pid"] for one in json.loads(dump(str(directory), "--json"))["processes"]), "the host pid is known"
        )
        by_pid, by_directory = (json.loads(dump(*way, "--json")) for way in (("--pid", str(node.container("a").pid)), (str(directory),)))
        assert by_pid | {"directory": ""} == by_directory | {"directory": ""}
        (device,), (process,) = by_pid["devices"], by_pid["processes"]
        assert (device["memory_bytes"], device["sm_percent"]) == (1024 * MIB, 40)
        assert process["alive"]
        assert process["pid"] == node.container("a").pid
        held = process["devices"][device["uuid"]]
        assert held["refusals"] > 0
        assert held["contexts"] == 1
        assert device["line_used_bytes"] == held["used_bytes"]
        text = dump(str(directory))
        for words in ("1 GiB", "40 percent of the cores", f"process  {process['pid']}", "alive", "refused"):
            assert words in text

        wrong = CliRunner().invoke(main, ["region", "dump", "/nowhere"])
        assert wrong.exit_code == 1
        assert "/nowhere/limits" in wrong.stderr


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_only_pods_without_work_are_reported_to_be_idle():
    kernel_us = {"short": 1000, "long": 90_000_000}
    """A launch is counted when it begins and when it ends: while a kernel runs for long, only the driver shows work."""
    pods = {name: cuda("work", "--seconds", "600", "--kernel-us", str(us), "--sync-every", "1") for name, us in kernel_us.items()}
    pods |= {"holds": cuda("hold", "--mib", "64"), "sleeps": container()}
    async with make_node("t4x2") as node:
        uids = {name: node.create_pod(manifest(name, spec))["metadata"]["uid"] for name, spec in pods.items()}
        await running(node, *pods)

        seen: set[str] = set()

        def all_seen() -> bool:
            found = published(node)
            seen.update(name for name, uid in uids.items() if found is not None and uid in {pod.pod_uid for pod in found.idle})
            return {"holds", "sleeps"} <= seen

        await eventually(all_seen, "the pods without work are reported", timeout_seconds=200)
        assert seen == {"holds", "sleeps"}
