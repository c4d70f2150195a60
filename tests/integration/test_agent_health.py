# SPDX-License-Identifier: Apache-2.0
"""GPUs that fall ill under a running agent: who hears of it, and that all of it passes without a restart.

The real agent process on the simulated driver, with the kubelet and API server stand-ins; faults are injected into the driver.
"""

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_lab.standin.agentprocess import AgentError
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions
from tests.integration.agent_nodes import (
    VGPU,
    assign,
    assignment,
    condition,
    container,
    eventually,
    grants,
    inject,
    log_of,
    make_node,
    manifest,
    not_ready_because,
    page,
    promised_mib,
    published,
    refused,
    running,
)
from tests.integration.agent_nodes import share as share_of

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("build_dir")]
MEMORY = contract.RESOURCE_VGPU_MEMORY
NODE = "node-1"


def states(node: Node) -> list[str]:
    found = published(node)
    return [entry.state for entry in found.devices] if found is not None else []


def install(library: Path, version: str) -> None:
    """Put a version of the driver's library at a path, as packages do it: a file of its own name, and a link that changes."""
    file = library.with_name(f"{library.name.removesuffix('.1')}.{version}")
    copied = library.with_name("new-file")
    shutil.copy(built(f"lib/sim/{contract.NVML_SONAME}"), copied)
    copied.replace(file)
    link = library.with_name("new-link")
    link.symlink_to(file.name)
    link.replace(library)


def uses(node: Node, library: Path) -> bool:
    """Whether the agent has loaded the file that a path names now."""
    maps = Path(f"/proc/{node.agent.pid}/maps").read_text().splitlines()
    return any(line.split()[4] == str(library.stat().st_ino) and not line.endswith("(deleted)") for line in maps)


def cordon(node: Node, **spec: Any) -> None:
    node.cluster.update(Kind.GPU_NODE, "", NODE, lambda item: item.update(spec=spec))


async def metric(node: Node, name: str, **labels: str) -> float:
    samples = [sample for family in text_string_to_metric_families(await node.metrics()) for sample in family.samples]
    return next((s.value for s in samples if s.name == contract.METRIC_PREFIX + name and labels.items() <= s.labels.items()), 0.0)


async def counted(node: Node, count: int, name: str, **labels: str) -> None:
    async with asyncio.timeout(60):
        while True:
            if await metric(node, name, **labels) >= count:
                return
            await asyncio.sleep(0.1)


@pytest.fixture
def seed() -> int:
    """Shown by pytest when the test fails."""
    drawn = random.SystemRandom().randrange(1 << 32)
    print(f"seed {drawn}")
    return drawn


@asynccontextmanager
async def healthy_node(profile: str = "t4x2", *flags: str, **options: Any) -> AsyncIterator[Node]:
    """A node that has published itself; at the end its agent must be the process it was at the beginning, and alive."""
    async with make_node(profile, *flags, **options) as node:
        await eventually(lambda: set(states(node)) == {"healthy"} and condition(node).get("status") == "True", "the node is published")
        pid = node.agent.pid
        yield node
        node.agent.check()
        assert node.agent.pid == pid
        assert (await page(node, "/healthz"))[0] == 200


def events_on_node(node: Node) -> Sequence[Any]:
    return node.cluster.list(Kind.EVENT, lambda event: event["involvedObject"]["kind"] == "Node")[1]


async def all_well(node: Node, gpus: int = 2) -> None:
    await eventually(lambda: node.allocatable(VGPU) == 16 * gpus, "all shares are healthy again")
    await eventually(lambda: condition(node).get("status") == "True", "the condition holds again")
    await eventually(lambda: not any(entry.trouble for entry in published(node).devices), "the gpunodes object says so")


class TestFanOut:
    async def test_hard_xid_is_reported_everywhere_and_passes(self):
        async with healthy_node() as node:
            ill = node.inventory.gpus[1].uuid
            node.create_pod(manifest("works", container(vgpus=2, mib=2048)))
            await running(node, "works")
            inject(node, "xid", "62", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "its shares are unhealthy")
            await eventually(lambda: condition(node)["status"] == "False", "the condition says so")
            assert ill in condition(node)["message"]
            assert "XID 62" in condition(node)["message"]
            await eventually(lambda: published(node).devices[1].trouble != "", "the gpunodes object says so")
            await eventually(lambda: events_on_node(node), "an event tells of it")
            on_node = events_on_node(node)
            assert [(event["reason"], ill in event["message"]) for event in on_node] == [(contract.EVENT_REASON_GPU_UNHEALTHY, True)]
            assert on_node[0]["involvedObject"]["uid"] == node.cluster.get(Kind.NODE, "", NODE)["metadata"]["uid"]
            await eventually(
                lambda: [e for e in node.events("works") if e["reason"] == contract.EVENT_REASON_GPU_UNHEALTHY], "an event on the pod"
            )
            assert await metric(node, "device_health", device_uuid=ill) == 0
            assert await metric(node, "xids_total", device_uuid=ill, xid="62") == 1
            assert await metric(node, "device_health_transitions_total", device_uuid=ill, state="quarantined") == 1
            await all_well(node)
            assert await metric(node, "device_health_state", device_uuid=ill, state="healthy") == 1
            assert node.container("works").exit_code is None

    async def test_storm_of_program_xids_changes_nothing_and_hard_ones_are_one_incident(self):
        async with healthy_node("t4x2", "--health-quarantine-seconds=600", "--health-max-recovery-seconds=600") as node:
            for _ in range(30):
                inject(node, "xid", "31", "--gpu", "0")
            await counted(node, 30, "xids_total", xid="31")
            assert node.allocatable(VGPU) == 32
            assert states(node) == ["healthy", "healthy"]
            ill, begun = node.inventory.gpus[1].uuid, len(node.api.requests)
            for _ in range(10):
                for xid in ("62", "95", "31"):
                    inject(node, "xid", xid, "--gpu", "1")
            await counted(node, 10, "xids_total", device_uuid=ill, xid="95")
            await eventually(lambda: states(node) == ["healthy", "quarantined"], "it is out of service")
            await eventually(lambda: node.allocatable(VGPU) == 16, "kubelet knows")
            await eventually(lambda: condition(node).get("status") == "False", "the node says so")
            assert await metric(node, "device_health_transitions_total", device_uuid=ill, state="quarantined") == 1
            await eventually(
                lambda: [event["reason"] for event in events_on_node(node)] == [contract.EVENT_REASON_GPU_UNHEALTHY],
                "one event tells of it",
            )
            assert len(writes(node, begun)) <= 3  # condition, capacity, gpunodes object

    async def test_all_instances_of_a_partitioned_gpu_are_published_and_fall_with_it(self):
        async with healthy_node("a100x8-mig") as node:
            ill = next(gpu for gpu in node.inventory.gpus if gpu.mig_devices)
            every = sum(len(gpu.mig_devices) for gpu in node.inventory.gpus)

            def offered() -> int:
                return sum(node.allocatable(name) for name in node.status["allocatable"] if name.startswith(contract.RESOURCE_MIG_PREFIX))

            await eventually(lambda: offered() == every, "all instances are offered")
            instances = {instance.uuid for entry in published(node).devices for instance in entry.device.mig_instances}
            assert instances == {mig.uuid for gpu in node.inventory.gpus for mig in gpu.mig_devices}
            inject(node, "xid", "95", "--gpu", str(ill.minor))
            await eventually(lambda: offered() == every - len(ill.mig_devices), "each instance on it is unhealthy")
            await eventually(lambda: offered() == every, "they are back")

    async def test_a_gpu_in_trouble_is_refused_at_prestart(self):
        async with healthy_node("t4x2", "--placement=assigned") as node:
            inject(node, "ecc", "uncorrected", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "its shares are unhealthy")
            pod = node.create_pod(manifest("placed-before", container()))
            assign(node, "placed-before", assignment(pod["metadata"]["uid"], main=[share_of(node, 1)]))
            await refused(node, "placed-before", "unhealthy")


class TestRecovery:
    async def test_a_fault_that_stands_keeps_the_gpu_out_until_it_was_reset(self):
        async with healthy_node() as node:
            inject(node, "ecc", "uncorrected", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "its shares are unhealthy")
            await asyncio.sleep(1.2)  # longer than a recovery takes here
            assert node.allocatable(VGPU) == 16
            assert published(node).devices[1].trouble
            inject(node, "clear", "--gpu", "1")
            await all_well(node)

    async def test_a_lost_gpu_is_lost_and_comes_back(self):
        async with healthy_node() as node:
            inject(node, "lost", "--gpu", "1")
            await eventually(lambda: states(node) == ["healthy", "lost"], "it is lost")
            await eventually(lambda: node.allocatable(MEMORY) * 2 == memory_of(node), "half of the memory is offered")
            assert node.status["capacity"][VGPU] == "32"
            inject(node, "recover", "--gpu", "1")
            await all_well(node)

    async def test_gpu_lost_at_agent_start_is_missed_and_added_on_return(self):
        async with make_node(start_agent=False) as node:
            inject(node, "lost", "--gpu", "1")
            await node.agent.start()
            await node.wait_ready()
            await eventually(lambda: condition(node).get("status") == "False", "the condition says so")
            assert condition(node)["message"].startswith("1 of 2 GPUs get no new work: GPU with NVML index 1")
            inject(node, "clear")
            await all_well(node)

    async def test_gpu_hanging_for_long_delays_no_other_and_returns(self):
        async with healthy_node() as node:
            ill = node.inventory.gpus[1].uuid
            inject(node, "hang", "30000", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "the hanging GPU's shares are unhealthy")
            for name in ("one", "two"):
                node.create_pod(manifest(name))
            await running(node, "one", "two")
            await eventually(lambda: condition(node)["status"] == "False", "the condition says so")
            assert f"{ill} is " in condition(node)["message"]
            await eventually(lambda: "does not answer" in published(node).devices[1].trouble, "the gpunodes object says so")
            assert await metric(node, "device_health", device_uuid=ill) == 0
            inject(node, "clear", "--gpu", "1")
            await all_well(node)

    @pytest.mark.soak
    @pytest.mark.timeout(600)
    async def test_hang_of_half_minute_is_survived_end_to_end(self):
        """With the periods that are shipped. A GPU that made a call wait is left alone for twice as long, and then proves itself."""
        hang_seconds, recovery_seconds = 30, 240
        async with Node(SimulatedHardware("t4x2"), NodeOptions(agent_flags=("--log-format=text",))) as node:
            await eventually(lambda: set(states(node)) == {"healthy"} and node.allocatable(VGPU) == 32, "the node is published")
            pid, ill = node.agent.pid, node.inventory.gpus[1].uuid
            begun = time.monotonic()
            inject(node, "hang", "600000", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "the hanging GPU's shares are unhealthy", hang_seconds - 5)
            number = 0
            while time.monotonic() - begun < hang_seconds:
                node.create_pod(manifest(f"p{number}"))
                await running(node, f"p{number}", timeout_seconds=10)
                assert (await page(node, "/healthz"))[0] == 200
                assert await metric(node, "device_health", device_uuid=ill) == 0
                assert node.allocatable(VGPU) == 16
                number += 1
                await asyncio.sleep(4)
            assert states(node)[1] != "healthy"
            inject(node, "hang", "0", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 32, "its shares are back", recovery_seconds)
            await eventually(lambda: set(states(node)) == {"healthy"}, "the gpunodes object says so", 60)
            await eventually(lambda: condition(node)["status"] == "True", "the condition holds again", 60)
            node.create_pod(manifest("both", container(vgpus=2, mib=2048)))
            await running(node, "both")
            node.agent.check()
            assert node.agent.pid == pid

    async def test_while_one_gpu_call_hangs_others_fail_recover_and_are_read(self):
        async with healthy_node() as node:
            other, stuck = (gpu.uuid for gpu in node.inventory.gpus)
            inject(node, "hang", str(86_400_000), "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "the hanging GPU's shares are unhealthy")
            for _ in range(2):
                inject(node, "xid", "62", "--gpu", "0")
                await eventually(lambda: node.allocatable(VGPU) == 0, "the XID of the other is heard")
                await eventually(lambda: node.allocatable(VGPU) == 16, "the other is read, and recovers")
            inject(node, "ecc", "uncorrected", "--gpu", "0")
            await eventually(lambda: node.allocatable(VGPU) == 0, "the other's readings are heeded")
            assert await metric(node, "device_health_state", device_uuid=stuck, state="quarantined") == 1
            inject(node, "clear")
            await all_well(node)
            assert await metric(node, "device_health_state", device_uuid=other, state="healthy") == 1

    @pytest.mark.parametrize("at_start", [False, True], ids=["entered again", "at the start"])
    async def test_inaccessible_driver_is_reported_with_call_and_running_containers_are_served(self, at_start):
        async with make_node() as node:
            node.create_pod(manifest("works"))
            await running(node, "works")
            if at_start:
                await node.agent.kill()
            else:
                inject(node, "no-driver", "on")
                await eventually(lambda: node.allocatable(VGPU) == 0, "the driver was left")
            inject(node, "hang", str(86_400_000), "--gpu", "1")
            if at_start:
                await node.agent.start()
            else:
                inject(node, "no-driver", "off")
            await counted(node, 1, "nvml_call_overdue_seconds", call="nvmlInitWithFlags", device_uuid="")
            await eventually(lambda: "nvmlInitWithFlags has not returned" in log_of(node), "the log names the call")
            assert node.allocatable(VGPU) == 0
            assert await metric(node, "container_memory_limit_bytes", pod="works") == 1024 * MIB
            assert (await page(node, "/healthz"))[0] == 200
            if at_start:
                await not_ready_because(node, "nvmlInitWithFlags has not returned for")
            node.delete_pod("works")
            await eventually(lambda: not grants(node), "a share is free after its pod")
            agent = node.agent.pid
            inject(node, "clear")
            await all_well(node)
            assert await metric(node, "nvml_call_overdue_seconds") == 0
            assert node.agent.pid == agent

    async def test_agent_kept_waiting_by_driver_ends_for_restart(self, tmp_path):
        """The call never comes back in this process; another one, which the agent asks, is let in."""
        stuck = tmp_path / "stuck"
        (tmp_path / "sitecustomize.py").write_text(
            "import os, sys, time\n"
            "if 'agent' in sys.orig_argv:\n"
            "    import pynvml\n"
            "    import agent.services.driver_watchdog as guard\n"
            "    guard.PATIENCE_SECONDS, guard.LOOK_SECONDS = 0.5, 0.1\n"
            "    enter = pynvml.nvmlInitWithFlags\n"
            f"    def stuck(flags):\n        while os.path.exists({str(stuck)!r}):\n            time.sleep(0.05)\n        enter(flags)\n"
            "    pynvml.nvmlInitWithFlags = stuck\n"
        )
        async with make_node(start_agent=False) as node:
            node.agent.env["PYTHONPATH"] += f":{tmp_path}"
            await node.agent.start()
            await node.wait_ready()
            node.create_pod(manifest("works"))
            await running(node, "works")
            pid = node.container("works").pid
            stuck.touch()
            inject(node, "no-driver", "on")
            await eventually(lambda: node.allocatable(VGPU) == 0, "the driver was left")
            inject(node, "no-driver", "off")
            await eventually(lambda: not node.agent.running, "the agent ends", timeout_seconds=60)
            with pytest.raises(AgentError, match=r"exit code 1:(?s:.*)nvmlInitWithFlags has not returned(?s:.*)The agent exits"):
                node.agent.check()
            stuck.unlink()
            await node.agent.start()
            await all_well(node)
            assert (node.container("works").pid, node.container("works").exit_code) == (pid, None)

    @pytest.mark.parametrize("version", ["590.10.01", "580.159.03"], ids=["under a name of its own", "under the name of the one before"])
    async def test_a_driver_upgrade_underneath_is_survived(self, tmp_path, version):
        library = tmp_path / contract.NVML_SONAME
        install(library, "580.159.03")
        async with healthy_node("t4x2", f"--nvml-library={library}") as node:
            node.create_pod(manifest("works"))
            await running(node, "works")
            install(library, version)
            assert not uses(node, library)
            inject(node, "mismatch", "on")
            await eventually(lambda: node.allocatable(VGPU) == 0, "no GPU takes work")
            await eventually(lambda: "different versions" in condition(node)["message"], "the condition says what to do")
            assert node.container("works").exit_code is None
            inject(node, "mismatch", "off")
            await all_well(node)
            assert uses(node, library), "the library of the new driver is loaded"
            inject(node, "xid", "62", "--gpu", "0")  # events are heard in the new session
            await eventually(lambda: node.allocatable(VGPU) == 16, "an XID after the upgrade is heard")

    async def test_agent_unable_to_follow_driver_upgrade_ends_for_restart(self, tmp_path):
        hurry = "import agent.services.driver_watchdog as guard\nguard.PATIENCE_SECONDS, guard.LOOK_SECONDS = 0.5, 0.1\n"
        (tmp_path / "sitecustomize.py").write_text(hurry)
        async with make_node(start_agent=False) as node:
            node.agent.env["PYTHONPATH"] += f":{tmp_path}"
            await node.agent.start()
            await node.wait_ready()
            node.create_pod(manifest("works"))
            await running(node, "works")
            inject(node, "mismatch", "on")
            await eventually(lambda: not node.agent.running, "the agent ends")
            with pytest.raises(AgentError, match=r"exit code 1:(?s:.*)The agent exits, so that kubelet restarts it with the node"):
                node.agent.check()
            assert node.container("works").exit_code is None
            await node.agent.start()  # with the module and the library still apart: it waits
            await eventually(lambda: "different versions" in condition(node)["message"], "the condition says what to do")
            inject(node, "mismatch", "off")
            await all_well(node)
            assert node.container("works").exit_code is None

    async def test_an_agent_that_was_killed_remembers_a_quarantine(self):
        async with make_node("t4x2", "--health-quarantine-seconds=600", "--health-max-recovery-seconds=600") as node:
            inject(node, "xid", "62", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "its shares are unhealthy")
            await eventually((node.layout.run / "health").exists, "it is written down")
            await node.agent.kill()
            await node.agent.start()
            await node.wait_ready()
            await eventually(lambda: node.allocatable(VGPU) > 0, "the shares are offered again")
            assert node.allocatable(VGPU) == 16
            assert await metric(node, "device_health_state", device_uuid=node.inventory.gpus[1].uuid, state="quarantined") == 1

    async def test_all_fault_orders_end_in_recovery(self, seed):
        chance = random.Random(seed)
        faults = [
            ("xid", "31"), ("xid", "92"), ("xid", "62"), ("xid", "79"), ("lost",), ("recover",), ("hang", "30000"), ("hang", "0"),
            ("ecc", "uncorrected"), ("ecc", "corrected", "9"), ("clear",),
        ]  # fmt: skip
        async with healthy_node() as node:
            for _ in range(14):
                if chance.random() < 0.2:
                    inject(node, chance.choice(("mismatch", "no-driver")), chance.choice(("on", "off")))
                else:
                    inject(node, *chance.choice(faults), "--gpu", chance.choice("01"))
                await asyncio.sleep(chance.uniform(0, 0.4))
            for fault in (("mismatch", "off"), ("no-driver", "off"), ("clear",)):
                inject(node, *fault)
            await all_well(node)
            node.create_pod(manifest("afterwards", container(vgpus=2, mib=2048)))
            await running(node, "afterwards")


class TestCordon:
    async def test_a_gpu_is_cordoned_by_name_and_live(self):
        async with healthy_node() as node:
            node.create_pod(manifest("before", container(vgpus=2, mib=2048)))
            await running(node, "before")
            cordoned = node.inventory.gpus[0].uuid
            cordon(node, cordonedDevices=[cordoned])
            await eventually(lambda: node.allocatable(VGPU) == 16, "its shares are not offered")
            for name in ("one", "two"):
                node.create_pod(manifest(name))
            await running(node, "one", "two")
            for name in ("one", "two"):
                visible = [value for key, value in node.container(name).env.items() if key.startswith(contract.ENV_SIM_DEVICE_PREFIX)]
                assert visible == [node.inventory.gpus[1].uuid]
            assert node.container("before").exit_code is None
            assert condition(node)["status"] == "True"
            assert await metric(node, "device_cordoned", device_uuid=cordoned) == 1
            cordon(node)
            await all_well(node)

    async def test_pod_on_cordoned_gpu_is_refused_but_running_one_may_restart(self):
        async with healthy_node("t4x2", "--placement=assigned") as node:
            there = node.create_pod(manifest("there", container()))
            assign(node, "there", assignment(there["metadata"]["uid"], main=[share_of(node, 0)]))
            await running(node, "there")
            cordon(node, cordonedDevices=[node.inventory.gpus[0].uuid])
            await eventually(lambda: node.allocatable(VGPU) == 16, "its shares are not offered")
            first = node.container("there")
            os.kill(first.pid, signal.SIGKILL)
            await eventually(lambda: node.container("there") is not first, "it is started again")
            await running(node, "there")
            pod = node.create_pod(manifest("late", container()))
            assign(node, "late", assignment(pod["metadata"]["uid"], main=[share_of(node, 0)]))
            await refused(node, "late", "cordoned")

    async def test_starting_agent_knows_last_cordon_when_api_serves_only_pods(self):
        async with make_node() as node:
            await eventually(lambda: len(states(node)) == 2, "the node is published")
            cordoned, other = (gpu.uuid for gpu in node.inventory.gpus)
            cordon(node, cordonedDevices=[cordoned])
            await eventually(lambda: node.allocatable(VGPU) == 16, "its shares are not offered")
            await node.agent.kill()
            await eventually(lambda: node.allocatable(VGPU) == 0, "kubelet notices that the agent is gone")
            node.api.gpu_nodes = False
            await node.agent.start()
            await eventually(lambda: node.allocatable(VGPU) > 0, "kubelet has the devices back")
            assert node.allocatable(VGPU) == 16
            for name in ("one", "two", "three"):
                node.create_pod(manifest(name))
            await running(node, "one", "two", "three")
            assert promised_mib(node) == {cordoned: 0, other: 3 * 1024}

    async def test_a_cordon_that_cannot_be_understood_changes_nothing(self):
        async with healthy_node() as node:
            cordon(node, cordoned=True)
            await eventually(lambda: node.allocatable(VGPU) == 0, "the node is cordoned")
            cordon(node, cordonedDevices=["all of them!"])
            await eventually(lambda: "stays in force" in node.layout.agent_log.read_text(), "it is reported")
            assert node.allocatable(VGPU) == 0
            cordon(node)
            await all_well(node)


def memory_of(node: Node) -> int:
    found = published(node)
    return sum(entry.device.memory_bytes >> 20 for entry in found.devices) if found is not None else 0


def writes(node: Node, since: int = 0) -> list[str]:
    """The writing requests of the agent, without events."""
    asked = list(node.api.requests)[since:]
    return [f"{verb} {path}" for verb, path in asked if verb != "GET" and not path.endswith("/events")]


class TestPublishing:
    async def test_the_object_is_what_the_scheduler_reads(self):
        async with healthy_node("h200x8") as node:
            found = published(node)
            assert [entry.device.uuid for entry in found.devices] == [gpu.uuid for gpu in node.inventory.gpus]
            assert {entry.device.model for entry in found.devices} == {"NVIDIA H200"}
            assert len(found.links) == 28
            assert {(link.kind.value, link.lanes) for link in found.links} == {("nvlink", 18)}
            assert sum(entry.device.memory_bytes >> 20 for entry in found.devices) == node.allocatable(MEMORY)
            assert found.driver_version == "580.159.03"
            assert found.agent_version
            assert found.isolation
            item = node.cluster.get(Kind.GPU_NODE, "", NODE)
            assert item["metadata"]["ownerReferences"][0]["uid"] == node.cluster.get(Kind.NODE, "", NODE)["metadata"]["uid"]

    async def test_idle_node_sends_no_api_calls_and_gpu_failure_costs_few_writes(self):
        async with healthy_node() as node:
            await asyncio.sleep(0.5)
            begun = len(node.api.requests)
            await asyncio.sleep(2)
            assert list(node.api.requests)[begun:] == []
            inject(node, "lost", "--gpu", "1")
            await eventually(lambda: states(node) == ["healthy", "lost"], "it is lost")
            inject(node, "recover", "--gpu", "1")
            await all_well(node)
            made = writes(node, begun)
            by_object = {name: sum(name in write for write in made) for name in ("/gpunodes/", "/nodes/")}
            assert by_object["/gpunodes/"] == 2  # out and back
            assert by_object["/nodes/"] <= 4  # capacity and condition, out and back
            assert all(write.startswith("PATCH ") for write in made)

    async def test_events_during_api_outage_are_sent_when_it_returns(self):
        async with healthy_node() as node:
            with node.api.outage():
                inject(node, "lost", "--gpu", "1")
                await eventually(lambda: node.allocatable(VGPU) == 16, "the kubelet hears of it all the same")
                await asyncio.sleep(1)
                assert states(node) == ["healthy", "healthy"]
            await eventually(lambda: states(node) == ["healthy", "lost"], "the API to have it")
            await eventually(lambda: condition(node)["status"] == "False", "the condition to have it")
            inject(node, "recover", "--gpu", "1")
            await all_well(node)

    async def test_an_object_that_was_deleted_is_made_again(self):
        async with healthy_node() as node:
            cordon(node, cordoned=True)
            await eventually(lambda: node.allocatable(VGPU) == 0, "the node is cordoned")
            node.cluster.delete(Kind.GPU_NODE, "", NODE)
            await eventually(lambda: len(states(node)) == 2, "it is published again")
            await all_well(node)

    async def test_without_the_resource_definition_all_else_works(self):
        async with make_node(start_agent=False) as node:
            node.api.gpu_nodes = False
            await node.agent.start()
            await node.wait_ready()
            await eventually(lambda: condition(node).get("status") == "True", "the condition is published")
            node.create_pod(manifest("a"))
            await running(node, "a")
            assert published(node) is None
            assert sum("gpunodes" in path for _, path in node.api.requests) == 1  # looked for once a minute
