# SPDX-License-Identifier: Apache-2.0
"""Backends other than the shim, chosen by annotation, with the real agent process: what containers get, what is refused, what is healed."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from agent.core.mps import RECORDS_DIRECTORY
from agent.core.region_layout import DeviceLimit, decode_limits
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import SOURCE_ROOT
from aliquot_lab.standin.node import Node
from tests.integration.agent_nodes import container, eventually, grants, make_node, manifest, refused, running
from tests.integration.mig_nodes import ctk, mps_program, on_host
from tests.integration.test_agent_usage import cuda, go, series, until_busy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir"), pytest.mark.asyncio(loop_scope="module")]
MPS_PIPE = contract.CONTAINER_MPS_PIPE


def isolated(name: str, isolation: str, **asked: Any) -> dict[str, Any]:
    return manifest(name, container(**asked), annotations={contract.ANNOTATION_ISOLATION: isolation})


def env(node, pod: str) -> dict[str, str]:
    return dict(node.container(pod).env)


def daemon(node, pod: str) -> Path:
    """The pipe directory, on the host, of the daemon that serves a pod."""
    ((uuid,),) = [[given["device_uuid"] for given in grant["shares"]] for grant in grants(node) if grant["pod"] == pod]
    return node.layout.run / "mps" / uuid / "pipe"


def daemon_pid(pipes: Path) -> int:
    return int((pipes / "nvidia-cuda-mps-control.pid").read_text())


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def answers(program: Path, pipes: Path) -> bool:
    """Whether a daemon answers there, as the real program would ask it."""
    directories = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "PATH": os.environ["PATH"]}
    return (
        subprocess.run([program], input="get_server_list\n", text=True, env=directories, check=False, capture_output=True).returncode == 0
    )


def mounts(node, pod: str) -> set[str]:
    """What of the shim is in a container's root."""
    root = node.container(pod).root
    return {path for path in (contract.CONTAINER_LIMITS, contract.CONTAINER_REGION) if (root / path.lstrip("/")).exists()}


async def test_whole_gpu_is_exclusive_without_shim_and_not_taken_from_others():
    async with make_node("t4x2") as node:
        node.create_pod(isolated("alone", "exclusive", mib=None))
        await running(node, "alone")
        assert mounts(node, "alone") == set()
        ((uuid,),) = [[given["device_uuid"] for given in grant["shares"]] for grant in grants(node)]
        for name in ("a", "b"):
            node.create_pod(manifest(name, container(mib=1024)))
            await running(node, name)
        assert uuid not in {given["device_uuid"] for grant in grants(node) if grant["pod"] != "alone" for given in grant["shares"]}
        node.create_pod(isolated("second", "exclusive", mib=None))
        await refused(node, "second", "2 used by other containers")
        node.delete_pod("alone")
        await running(node, "second")


class Mps(NamedTuple):
    """A node with MPS, and the stand-in for its control daemon."""

    node: Node
    program: Path

    @property
    def records(self) -> Path:
        """What agent and supervisor tell each other."""
        return self.node.layout.run / RECORDS_DIRECTORY

    def events(self, pod: str) -> list[Any]:
        return [event for event in self.node.events(pod) if event["reason"] == contract.EVENT_REASON_MPS_RESTARTED]

    async def in_force(self, *pods: str) -> None:
        """Wait until the metrics say of exactly these pods that their limits are in force."""
        async with asyncio.timeout(60):
            found: set[str] | None = None
            while found != set(pods):
                await asyncio.sleep(0.1)
                found = {pod for pod, reported in (await series(self.node, "container_enforcement_in_force")).items() if reported}

    async def no_daemon_is_left(self) -> None:
        await eventually(lambda: not list((self.node.layout.run / "mps").glob("GPU-*")), "no daemon is left")

    async def supervisor_is(self, up: str) -> None:
        line = f'aliquot_mps_supervisor_up{{node="{self.node.options.name}"}} {up}'
        for _ in range(100):
            if line in (await self.node.metrics()).splitlines():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not in the metrics: {line}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mps(build_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mps]:
    """Shared by tests that take their pods away."""
    directory = tmp_path_factory.mktemp("mps")
    program = mps_program(directory)
    async with make_node("t4x2", mps_control=program) as node:
        yield Mps(node, program)


class TestMps:
    async def test_a_client_gets_the_daemon_of_its_gpu_and_its_limits(self, mps):
        node, program = mps
        node.create_pod(isolated("a", "mps", mib=4096, cores=30))
        await running(node, "a")
        given = env(node, "a")
        assert given["CUDA_MPS_PIPE_DIRECTORY"] == MPS_PIPE
        assert given["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
        assert given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        assert mounts(node, "a") == set()
        assert answers(program, daemon(node, "a"))
        pid = daemon_pid(daemon(node, "a"))
        node.delete_pod("a")
        await eventually(lambda: not is_there(pid), "the daemon is gone with its last client")

    @pytest.mark.parametrize("isolation", ["mps", "exclusive"])
    async def test_usage_of_container_without_shim_comes_from_driver(self, mps, isolation):
        node, _ = mps
        asked = {"mib": 4096} if isolation == "mps" else {"mib": None}
        spec = cuda("work", "--mib", "512", "--seconds", "60", "--kernel-us", "1000", wait=True, **asked)
        node.create_pod(manifest("counted", spec, annotations={contract.ANNOTATION_ISOLATION: isolation}))
        await running(node, "counted")
        names = ("memory_used_bytes", "memory_driver_bytes", "processes", "utilization_ratio")
        assert [await series(node, f"container_{name}") for name in names] == [{"counted": 0}] * len(names)
        go(node, "counted")
        await until_busy(node, "counted")
        for name in ("memory_used_bytes", "memory_driver_bytes"):
            assert await series(node, f"container_{name}") == {"counted": pytest.approx(512 * MIB, rel=0.9)}
        assert await series(node, "container_processes") == {"counted": 1}
        node.delete_pod("counted")
        await eventually(lambda: not grants(node), "its GPU is free")
        await mps.no_daemon_is_left()

    async def test_only_root_reads_messages_between_agent_and_supervisor(self, mps):
        node, _ = mps
        node.create_pod(isolated("private", "mps"))
        await running(node, "private")
        paths = [mps.records, *mps.records.rglob("*")]
        assert {path.name for path in paths} >= {"wanted", "state", "supervisor.lock", "supervisor.json"}
        assert [path.name for path in paths if path.stat().st_mode & 0o077] == []
        node.delete_pod("private")
        await mps.no_daemon_is_left()

    async def test_killed_daemon_returns_and_its_clients_get_events(self, mps):
        node, program = mps
        node.create_pod(isolated("reported", "mps"))
        await running(node, "reported")
        pipes = daemon(node, "reported")
        killed = daemon_pid(pipes)
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: answers(program, pipes) and daemon_pid(pipes) != killed, "another daemon answers")
        await eventually(lambda: mps.events("reported"), "an event about it")
        node.delete_pod("reported")
        await eventually(lambda: not pipes.exists(), "the daemon is gone")

    @pytest.mark.parametrize("end", ["kill", "stop"])
    async def test_agent_restart_leaves_daemons_and_clients_alone(self, mps, end):
        node, program = mps
        node.create_pod(isolated("before", "mps"))
        await running(node, "before")
        pipes, client = daemon(node, "before"), node.container("before")
        pid = daemon_pid(pipes)
        await getattr(node.agent, end)()
        assert answers(program, pipes)
        await node.agent.start()
        await node.wait_ready()
        node.create_pod(isolated("after", "mps"))
        node.create_pod(isolated("more", "mps"))  # two GPUs: one of them is the first one's
        await running(node, "after", "more")
        assert daemon_pid(pipes) == pid
        assert node.container("before") is client
        assert is_there(client.pid)
        assert mps.events("before") == []
        for name in ("before", "after", "more"):
            node.delete_pod(name)
        await mps.no_daemon_is_left()

    async def test_client_that_ends_without_agent_is_missed_by_next_agent(self, mps):
        node, _ = mps
        node.create_pod(isolated("missed", "mps"))
        await running(node, "missed")
        await node.agent.kill()
        node.delete_pod("missed")
        await node.wait_gone("missed")
        await node.agent.start()
        await node.wait_ready()
        await mps.no_daemon_is_left()

    async def test_daemons_return_with_killed_supervisor_and_agent_reports_it(self, mps):
        node, program = mps
        node.create_pod(isolated("lost", "mps"))
        await running(node, "lost")
        pipes, client = daemon(node, "lost"), node.container("lost")
        pid = daemon_pid(pipes)
        await mps.in_force("lost")
        await node.mps.kill()
        await mps.supervisor_is("0.0")
        await mps.in_force()
        node.create_pod(isolated("refused", "mps"))
        await refused(node, "refused", "no aliquot-mps runs on this node", "It offers shim, exclusive")
        await node.mps.start()
        await eventually(lambda: pipes.exists() and answers(program, pipes) and daemon_pid(pipes) != pid, "another daemon answers")
        await eventually(lambda: not is_there(pid), "the first one has ended with its container")
        await running(node, "refused")
        await eventually(lambda: mps.events("lost"), "an event about it")
        assert mps.events("refused") == []
        assert node.container("lost") is client
        await mps.supervisor_is("1.0")
        await mps.in_force("refused")
        client.signal_group(signal.SIGKILL)
        await mps.in_force("lost", "refused")
        for name in ("lost", "refused"):
            node.delete_pod(name)
        await mps.no_daemon_is_left()

    async def test_agent_absent_during_daemon_restart_still_notifies_clients(self, mps):
        node, program = mps
        node.create_pod(isolated("both", "mps"))
        await running(node, "both")
        pipes = daemon(node, "both")
        pid = daemon_pid(pipes)
        await node.agent.kill()
        await node.mps.stop()
        await eventually(lambda: not is_there(pid), "asked to end, it ends its daemons")
        await node.mps.start()
        await eventually(lambda: pipes.exists() and answers(program, pipes), "another daemon answers")
        await node.agent.start()
        await eventually(lambda: mps.events("both"), "an event about it")
        await node.wait_ready()
        node.delete_pod("both")
        await mps.no_daemon_is_left()

    async def test_foreign_and_damaged_files_are_refused_with_message_and_kept(self, mps):
        node, program = mps
        node.create_pod(isolated("kept", "mps"))
        await running(node, "kept")
        pipes = daemon(node, "kept")
        pid, uuid = daemon_pid(pipes), pipes.parent.name
        foreign, damaged = mps.records / "wanted/notes.txt", mps.records / f"wanted/{uuid}.json"
        foreign.write_text("what am I doing here")
        damaged.write_bytes(damaged.read_bytes()[:-9])

        def is_ignored(path: Path) -> bool:
            return f"a file is ignored: {path}" in node.layout.mps_log.read_text()

        for path in (foreign, damaged):
            await eventually(partial(is_ignored, path), f"{path.name} is refused")
        node.create_pod(manifest("other", container(mib=1024)))
        await running(node, "other")
        assert daemon_pid(pipes) == pid
        assert answers(program, pipes)
        assert foreign.exists()
        foreign.unlink()
        for name in ("kept", "other"):
            node.delete_pod(name)
        await mps.no_daemon_is_left()

    async def test_failing_program_is_reported_in_pod_events(self, mps):
        node, program = mps
        works = program.read_text()
        program.write_text("#!/bin/sh\necho no MPS here; exit 1\n")
        node.create_pod(isolated("fails", "mps"))
        await refused(node, "fails", "no MPS here")
        assert grants(node) == []
        node.create_pod(isolated("two", "mps", vgpus=2, mib=2048))
        await refused(node, "two", "allows one GPU per container")
        program.write_text(works)
        await running(node, "fails")
        for name in ("fails", "two"):
            node.delete_pod(name)
        await mps.no_daemon_is_left()


class TestDriver:
    @staticmethod
    def topology(tmp_path: Path) -> str:
        """Two T4s with a driver that has limits of its own."""
        profile = SOURCE_ROOT / "simulated_driver/profiles/t4x2"
        path = tmp_path / "t4x2-615"
        path.write_text(profile.read_text().replace("version=580.159.03", "version=615.10.01"))
        return str(path)

    @staticmethod
    def limit_mib(node, uuid: str, cgroup: Path) -> int | None:
        """The limit that the driver has for a cgroup, asked as an administrator would."""
        script = f"""
limits = nv.c_nvmlGetMemoryLimits_v1_t(nameSpace={os.fsencode(cgroup)!r})
try:
    nv.nvmlDeviceGetMemoryLimits_v1(nv.nvmlDeviceGetHandleByUUID({uuid!r}), limits)
    result = limits.hardLimit >> 20
except nv.NVMLError_NotFound:
    result = None
"""
        found = on_host(node, script, gpu=0)
        return None if found is None else int(found)

    async def test_toolkit_hook_receives_limit_and_agent_sets_it_when_hook_was_skipped(self, tmp_path):
        cgroups = tmp_path / "cgroup"
        cgroups.mkdir()
        (cgroups / "cgroup.controllers").touch()
        hook = tmp_path / "node/usr/bin/nvidia-cdi-hook"
        hook.parent.mkdir(parents=True)
        flags = ("--driver-limits-hook=/usr/bin/nvidia-cdi-hook", f"--host-dir={tmp_path}/node", f"--cgroup-dir={cgroups}")
        async with make_node(self.topology(tmp_path), *flags) as node:
            node.create_pod(isolated("too-early", "driver", mib=2048))
            await refused(node, "too-early", f"no {hook} when the agent started")
            node.delete_pod("too-early")  # kubelet would try it again, and it would have a spec as well
            hook.touch(0o755)
            await node.agent.stop()
            await node.agent.start()
            await node.wait_ready()
            node.create_pod(isolated("a", "driver", vgpus=2, mib=4096))
            await running(node, "a")
            assert env(node, "a")["NVIDIA_GPU_MEMORY_LIMIT"] == "2048"
            (spec,) = node.layout.cdi_dynamic.glob(f"{contract.CDI_FILE_PREFIX}*.json")
            assert "apply-cuda-memory-limits" in spec.read_text()
            assert mounts(node, "a") == set()
            uid, (status,) = node.pod("a")["metadata"]["uid"], node.pod("a")["status"]["containerStatuses"]
            cgroup = cgroups / f"kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice"
            cgroup /= f"cri-containerd-{status['containerID'].rpartition('://')[2]}.scope"
            cgroup.mkdir(parents=True)
            (cgroup / "cgroup.procs").touch()  # the stand-in runtime runs no hooks, so that nobody has limited it yet

            def is_limited(uuid: str, cgroup: Path) -> bool:
                return self.limit_mib(node, uuid, cgroup) == 2048

            for gpu in node.inventory.gpus:
                await eventually(partial(is_limited, gpu.uuid, cgroup), "the driver limits it")

    @staticmethod
    def hook(node, uuid: str, cgroup: Path, environment: dict[str, str]) -> None:
        """Do what ``apply-cuda-memory-limits`` of NVIDIA's toolkit does with a container's environment."""
        soft, hard = (int(environment[f"NVIDIA_GPU_MEMORY_{name}"]) << 20 for name in ("REQUEST", "LIMIT"))
        limits = f"nv.c_nvmlSetMemoryLimits_v1_t({os.fsencode(cgroup)!r}, {soft}, {hard})"
        assert on_host(node, f"result = nv.nvmlDeviceSetMemoryLimits_v1(nv.nvmlDeviceGetHandleByUUID({uuid!r}), {limits})", gpu=0) is None

    async def test_hook_and_agent_set_one_limit_that_no_variable_of_pod_raises(self, tmp_path):
        cgroups, hook = tmp_path / "cgroup", tmp_path / "node/usr/bin/nvidia-cdi-hook"
        for directory in (cgroups, hook.parent):
            directory.mkdir(parents=True)
        (cgroups / "cgroup.controllers").touch()
        hook.touch(0o755)
        flags = ("--driver-limits-hook=/usr/bin/nvidia-cdi-hook", f"--host-dir={tmp_path}/node", f"--cgroup-dir={cgroups}")
        async with make_node(self.topology(tmp_path), *flags) as node:
            theirs = [{"name": f"NVIDIA_GPU_MEMORY_{name}", "value": "15000"} for name in ("LIMIT", "REQUEST")]
            node.create_pod(isolated("a", "driver", mib=2048, env=theirs))
            await running(node, "a")
            given = env(node, "a")
            assert (given["NVIDIA_GPU_MEMORY_LIMIT"], given["NVIDIA_GPU_MEMORY_REQUEST"]) == ("2048", "0")
            ((uuid,),) = [[share["device_uuid"] for share in grant["shares"]] for grant in grants(node)]
            await node.agent.stop()
            uid, (status,) = node.pod("a")["metadata"]["uid"], node.pod("a")["status"]["containerStatuses"]
            cgroup = cgroups / f"kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice"
            cgroup /= f"cri-containerd-{status['containerID'].rpartition('://')[2]}.scope"
            cgroup.mkdir(parents=True)
            (cgroup / "cgroup.procs").touch()
            self.hook(node, uuid, cgroup, given)
            await node.agent.start()
            await node.wait_ready()
            await self.is_in_force(node)
            assert self.limit_mib(node, uuid, cgroup) == 2048
            assert "driver limit: found" not in node.layout.agent_log.read_text()
            self.hook(node, uuid, cgroup, {**given, "NVIDIA_GPU_MEMORY_LIMIT": "9000"})
            await eventually(lambda: self.limit_mib(node, uuid, cgroup) == 2048, "the agent corrects a limit that is not its own")

    @staticmethod
    async def is_in_force(node) -> None:
        async with asyncio.timeout(30):
            while list((await series(node, "container_driver_limit_in_force")).values()) != [1.0]:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)


async def test_what_a_node_does_not_offer_is_refused_with_what_it_does():
    async with make_node("t4x2") as node:
        offered = "It offers shim, exclusive"
        node.create_pod(isolated("a", "mps"))
        node.create_pod(isolated("b", "driver"))
        node.create_pod(manifest("c", container(mib=1024), annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"}))
        await refused(node, "a", "no aliquot-mps runs on this node", offered)
        await refused(node, "b", "driverLimitsHook of its agent names no nvidia-cdi-hook", offered)
        await refused(node, "c", "memory-burst", "memoryOversubscription of its agent")


async def test_a_host_without_a_cdi_spec_has_one_made_by_the_toolkit(tmp_path):
    async with make_node("t4x2", f"--nvidia-ctk={ctk(tmp_path)}", start_agent=False) as node:
        (node.layout.cdi_static / "nvidia.json").unlink()
        await node.agent.start()
        await node.wait_ready()
        node.create_pod(manifest("a"))
        await running(node, "a")
        assert mounts(node, "a") == {contract.CONTAINER_LIMITS, contract.CONTAINER_REGION}
        (root,) = {node.container("a").root}
        assert (root / contract.CONTAINER_DRIVER_DIR.lstrip("/") / contract.CUDA_DRIVER_SONAME).exists()  # the front stands before it


def limit_in(node, pod: str) -> DeviceLimit:
    """The limit that a pod's one container sees."""
    path = node.container(pod).root / contract.CONTAINER_LIMITS.lstrip("/")
    (limit,) = decode_limits(path.read_bytes()).devices
    return limit


async def test_containers_know_who_waits_and_how_far_they_may_burst():
    async with make_node("t4x2", "--placement-policy=binpack", "--memory-oversubscription=1.5") as node:
        for name, priority in (("first", "high"), ("second", "low"), ("third", None)):
            annotations = {contract.ANNOTATION_PRIORITY: priority} if priority else {}
            node.create_pod(manifest(name, container(mib=1024, cores=20), annotations=annotations))
            await running(node, name)
        limits = {name: limit_in(node, name) for name in ("first", "second", "third")}
        assert [limits[name].priority for name in ("first", "second", "third")] == [1, -1, 0]
        assert limits["first"].priority_line == limits["second"].priority_line > 0
        assert limits["third"].priority_line == 0
        page = {name: (node.container(name).root / contract.CONTAINER_PRIORITY.lstrip("/")).exists() for name in limits}
        assert page == {"first": True, "second": True, "third": False}
        node.create_pod(manifest("fourth", container(mib=1024), annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"}))
        await running(node, "fourth")
        assert (limit_in(node, "fourth").memory_bytes // MIB, limit_in(node, "fourth").burst_bytes // MIB) == (1024, 1536)
