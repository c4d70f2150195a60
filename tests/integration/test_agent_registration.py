# SPDX-License-Identifier: Apache-2.0
"""The agent stays registered through whatever kubelet and the driver do, and never fights over a name."""

import asyncio
import os
import subprocess
import sys

import pytest

from aliquot import contract
from aliquot.placement import mig
from aliquot_lab.standin.inventory import MigDevice
from tests.bench.bench_agent import cpu_seconds
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
    async def test_it_takes_less_than_two_seconds_of_work_to_be_ready(self):
        async with make_node("h200x8") as node:
            assert cpu_seconds(node.agent.pid) < 2
            assert node.allocatable(VGPU) == 8 * 16

    async def test_a_restarted_kubelet_has_the_devices_back_and_containers_run_on(self):
        async with make_node() as node:
            node.create_pod(manifest("before"))
            await running(node, "before")
            for _ in range(2):
                await node.kubelet.restart()
                await node.wait_ready()
            for path in node.layout.plugin_dir.glob("aliquot-*.sock"):  # as a reinstalled kubelet does
                path.unlink()
            await eventually(lambda: list(node.layout.plugin_dir.glob("aliquot-*.sock")), "a new socket")
            await node.wait_ready()
            await eventually(lambda: node.allocatable(VGPU) == 32, "kubelet has the devices")
            assert node.container("before").exit_code is None
            node.create_pod(manifest("after"))
            await running(node, "after")

    async def test_a_kubelet_that_lost_its_checkpoint_gets_the_capacity_back_within_seconds(self):
        async with make_node() as node:
            memory = node.allocatable(contract.RESOURCE_VGPU_MEMORY)
            await node.kubelet.restart(wipe_checkpoint=True)
            await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU_MEMORY) == memory, "vgpu-memory is published again", 5)
            await node.wait_ready()

    async def test_a_kubelet_that_comes_late_is_waited_for(self):
        async with make_node(start_agent=False) as node:
            await node.kubelet.stop()
            for path in node.layout.plugin_dir.glob("*.sock"):
                path.unlink()
            await node.agent.start()
            await not_ready_because(node, "waiting for kubelet")
            await node.kubelet.start()
            await node.wait_ready()

    async def test_the_agent_killed_and_started_again_leaves_no_dead_socket(self):
        async with make_node() as node:
            for _ in range(2):
                await node.agent.kill()
                await node.agent.start()
                await node.wait_ready()
            assert len(list(node.layout.plugin_dir.glob("aliquot-*.sock"))) == 1

    async def test_sigterm_ends_it_soon_and_keeps_every_file(self):
        async with make_node() as node:
            node.create_pod(manifest("a"))
            await running(node, "a")
            before = sorted(path.name for path in node.layout.cdi_dynamic.iterdir())
            assert await node.agent.stop() == 0  # it is killed when it takes more than a few seconds
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
            own = [f"--{name}-dir={tmp_path}/{name}" for name in ("state", "runtime", "cdi")]  # so that no lock keeps it from registering
            flags = [*node.agent.flags, *own]
            environ = {**os.environ, **node.hardware.agent_environment()}
            second = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agent", *flags, env=environ, stderr=asyncio.subprocess.PIPE
            )
            try:
                async with asyncio.timeout(60):
                    while b"another agent on this node" not in (line := await second.stderr.readline()):
                        assert line
            finally:
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


class TestMig:
    async def test_each_profile_is_resource_and_container_gets_instance_of_its_id(self):
        async with make_node("a100x8-mig") as node:
            counts: dict[str, int] = {}
            for gpu in node.inventory.gpus:
                for instance in gpu.mig_devices:
                    resource = mig.resource_of_profile(profile_of(instance))
                    counts[resource] = counts.get(resource, 0) + 1
            assert counts
            await eventually(lambda: {resource: node.allocatable(resource) for resource in counts} == counts, "every instance is offered")
            assert node.allocatable(VGPU) == 16 * sum(not gpu.mig_enabled for gpu in node.inventory.gpus)

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
