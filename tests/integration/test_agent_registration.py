"""The agent stays registered through whatever kubelet and the driver do, and never fights over a name."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from aliquot.standin.inventory import MigDevice
from placement import mig
from proto import contract
from tests.fakes.device_plugin import ScriptedPlugin, devices
from tests.integration.agent_nodes import (
    VGPU,
    eventually,
    inject,
    log_of,
    make_node,
    manifest,
    not_ready_because,
    page,
    running,
)

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("build_dir")]


def profile_of(instance: MigDevice) -> str:
    """NVML's name of an instance ends in its profile."""
    return instance.name.rpartition("MIG ")[2]


class TestKubelet:
    async def test_it_is_ready_within_two_seconds(self):
        async with make_node("h200x8", start_agent=False) as node:
            begun = asyncio.get_running_loop().time()
            await node.agent.start()
            await node.wait_ready()
            assert asyncio.get_running_loop().time() - begun < 2
            assert node.allocatable(VGPU) == 8 * 16

    async def test_a_restarted_kubelet_has_the_devices_back_and_containers_run_on(self):
        async with make_node() as node:
            node.create_pod(manifest("before"))
            await running(node, "before")
            for _ in range(3):
                await node.kubelet.restart()
                await node.wait_ready()
            assert node.container("before").exit_code is None
            node.create_pod(manifest("after"))
            await running(node, "after")

    async def test_a_kubelet_that_lost_its_checkpoint_gets_the_capacity_back_within_a_second(self):
        async with make_node() as node:
            memory = node.allocatable(contract.RESOURCE_VGPU_MEMORY)
            await node.kubelet.restart(wipe_checkpoint=True)
            await eventually(
                lambda: node.allocatable(contract.RESOURCE_VGPU_MEMORY) == memory, "vgpu-memory is published again", timeout_seconds=1.0
            )
            await node.wait_ready()

    async def test_wiped_sockets_are_made_again(self):
        async with make_node() as node:
            for path in node.layout.plugin_dir.glob("aliquot-*.sock"):
                path.unlink()
            await eventually(lambda: list(node.layout.plugin_dir.glob("aliquot-*.sock")), "a new socket")
            await node.wait_ready()
            node.create_pod(manifest("after"))
            await running(node, "after")

    async def test_a_kubelet_that_comes_late_is_waited_for(self):
        async with make_node(start_agent=False) as node:
            await node.kubelet.stop()
            for path in node.layout.plugin_dir.glob("*.sock"):
                path.unlink()
            await node.agent.start()
            await not_ready_because(node, "waiting for the kubelet")
            await node.kubelet.start()
            await node.wait_ready()

    async def test_the_agent_killed_and_started_again_leaves_no_dead_socket(self):
        async with make_node() as node:
            for _ in range(3):
                await node.agent.kill()
                await node.agent.start()
                await node.wait_ready()
            assert len(list(node.layout.plugin_dir.glob("aliquot-*.sock"))) == 1

    async def test_sigterm_ends_it_soon_and_keeps_every_file(self):
        async with make_node() as node:
            node.create_pod(manifest("a"))
            await running(node, "a")
            before = sorted(path.name for path in node.layout.cdi_dynamic.iterdir())
            begun = asyncio.get_running_loop().time()
            os.kill(node.agent.pid, signal.SIGTERM)
            assert await node.agent.stop() == 0
            assert asyncio.get_running_loop().time() - begun < 2
            assert sorted(path.name for path in node.layout.cdi_dynamic.iterdir()) == before
            assert node.container("a").exit_code is None
            assert not list(node.layout.plugin_dir.glob("aliquot-*.sock"))


class TestConflict:
    async def test_a_name_another_plugin_holds_is_reported_and_left_to_it(self):
        async with make_node(start_agent=False) as node:
            other = ScriptedPlugin(VGPU)
            await other.serve(node.layout.plugin_dir, "other.sock")
            other.advertise(devices(4))
            await other.register(node.layout.plugin_dir, "other.sock")
            await eventually(lambda: node.allocatable(VGPU) == 4, "the other plugin's devices")
            await node.agent.start()
            await not_ready_because(node, f"another device plugin holds {VGPU}")
            assert node.allocatable(VGPU) == 4
            await other.stop()

    async def test_a_second_agent_waits_for_the_first(self, tmp_path):
        async with make_node() as node:
            flags = [*node.agent.flags, f"--state-dir={tmp_path}/state", f"--runtime-dir={tmp_path}/run"]
            environ = {**os.environ, **node.hardware.agent_environment()}
            second = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agent", *flags, env=environ, stderr=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(15):
                while b"another agent on this node" not in (line := await second.stderr.readline()):
                    assert line
            second.terminate()
            await second.communicate()
            assert node.allocatable(VGPU) == 32


class TestDriver:
    async def test_a_missing_driver_is_waited_for(self):
        async with make_node(start_agent=False) as node:
            inject(node, "no-driver", "on")
            await node.agent.start()
            await not_ready_because(node, "kernel module is not loaded")
            assert (await page(node, "/healthz"))[0] == 200
            assert node.allocatable(VGPU) == 0
            inject(node, "no-driver", "off")
            await node.wait_ready()
            assert log_of(node).count("kernel module is not loaded") == 1

    async def test_a_lost_gpu_is_unhealthy_until_it_answers_again(self):
        async with make_node() as node:
            memory = node.allocatable(contract.RESOURCE_VGPU_MEMORY)
            inject(node, "lost", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "half of the devices are unhealthy")
            await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU_MEMORY) == memory // 2, "half of the memory is offered")
            assert node.status["capacity"][VGPU] == "32"
            inject(node, "recover", "--gpu", "1")
            inject(node, "clear")
            await eventually(lambda: node.allocatable(VGPU) == 32, "all devices are healthy again")
            await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU_MEMORY) == memory, "all memory is offered again")

    async def test_a_hanging_gpu_holds_up_nothing_else(self):
        async with make_node() as node:
            inject(node, "hang", "20000", "--gpu", "1")
            await eventually(lambda: node.allocatable(VGPU) == 16, "the hanging GPU's devices are unhealthy")
            assert (await page(node, "/healthz"))[0] == 200
            node.create_pod(manifest("a"))
            await running(node, "a")


class TestMig:
    async def test_every_profile_is_a_resource_of_its_own(self):
        async with make_node("a100x8-mig") as node:
            counts: dict[str, int] = {}
            for gpu in node.inventory.gpus:
                for instance in gpu.mig_devices:
                    resource = mig.resource_of_profile(profile_of(instance))
                    counts[resource] = counts.get(resource, 0) + 1
            assert counts
            assert {resource: node.allocatable(resource) for resource in counts} == counts
            assert node.allocatable(VGPU) == 16 * sum(not gpu.mig_enabled for gpu in node.inventory.gpus)

    async def test_a_container_gets_the_instance_its_id_names(self):
        async with make_node("a100x8-mig") as node:
            resource = contract.RESOURCE_MIG_PREFIX + "1g.10gb"
            wanted = {instance.uuid for gpu in node.inventory.gpus for instance in gpu.mig_devices if profile_of(instance) == "1g.10gb"}
            one = {"name": "main", "command": ["sleep", "600"], "resources": {"limits": {resource: "1"}}}
            node.create_pod(manifest("mig", one))
            await running(node, "mig")
            visible = [value for name, value in node.container("mig").env.items() if name.startswith(contract.ENV_SIM_DEVICE_PREFIX)]
            assert len(visible) == 1
            assert visible[0] in wanted


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--shares-per-gpu=none"], "want an integer from 1 to 1000"),
        (["--kube-api-url="], "set kubeApiUrl"),
        (["--simulate=no-such-profile", "--kube-api-url=http://127.0.0.1:1"], "no-such-profile"),
    ],
)
def test_wrong_settings_end_the_process_with_one_sentence(tmp_path, flags, sentence):
    command = [sys.executable, "-m", "agent", f"--state-dir={tmp_path}/state", f"--runtime-dir={tmp_path}/run", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
