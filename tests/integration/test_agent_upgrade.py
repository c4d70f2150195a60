# SPDX-License-Identifier: Apache-2.0
"""The agent and its shim are replaced, or removed, under containers that run; and what the agent leaves on a node is all its own."""

import asyncio
import json
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.adapters.shim_store import CONTAINERS
from agent.adapters.spare_copies import MOST
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_lab.demo.evidence import parse_events
from aliquot_lab.standin.node import Node
from tests.integration.agent_nodes import container, eventually, grants, make_node, manifest, running
from tests.integration.mig_nodes import a100_topology, ctk, mps_program

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]
CLIENT = built("bin/aliquot-cuda-client")
NEWER = b"\n# a newer version\n"


def cuda(name: str = "main", mib: int = 1024) -> dict:
    """A container that holds memory as long as it lives."""
    return {**container(name, mib=mib), "command": ["sh", "-c", f"exec {CLIENT} hold --mib 200"]}


def newer_shim(directory: Path) -> Path:
    """The shim of the next release."""
    source = directory / "shim-of-the-next-release"
    shutil.copytree(built(f"lib/shim/{contract.CUDA_SONAME}").parent, source)
    for library in (source / contract.CUDA_SONAME, source / contract.NVML_SONAME):
        library.chmod(0o644)
        library.write_bytes(library.read_bytes() + NEWER)  # the loader reads the segments and nothing behind them
    return source


def front_of(node, pod: str) -> Path:
    (front,) = {path.resolve() for path in node.container(pod).root.glob("usr/lib/*/libcuda.so.1")}
    return front


def is_newer(node, pod: str) -> bool:
    return front_of(node, pod).read_bytes().endswith(NEWER)


def versions(node) -> list[Path]:
    return [path for path in (node.layout.state / "shim").iterdir() if path.name != CONTAINERS]


async def filled_mib(node, pod: str) -> int:
    """Run a program in the pod's container that takes what it can get; return how much it got."""
    code, output = await node.runtime.execute(node.container(pod), [str(CLIENT), "fill", "--step", "64"])
    assert code == 0, output
    (filled,) = [event for event in parse_events(output.splitlines()) if event["event"] == "fill"]
    return int(filled["held_bytes"]) // MIB


async def test_a_new_release_leaves_what_runs_alone_and_serves_what_comes():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("old", cuda()))
        await running(node, "old")
        await eventually(lambda: node.container("old").lines(), "it holds its memory")
        pid, grant = node.container("old").pid, grants(node)
        (old_version,) = versions(node)

        await node.agent.stop()
        node.agent.flags.append(f"--shim-dir={newer_shim(node.layout.base)}")
        await node.agent.start()
        await node.wait_ready()
        node.create_pod(manifest("new", cuda()))
        await running(node, "new")
        await eventually(lambda: node.container("new").lines(), "it holds its memory")

        assert (is_newer(node, "old"), is_newer(node, "new")) == (False, True)
        assert (node.container("old").pid, node.container("old").exit_code) == (pid, None)
        assert [one for one in grants(node) if one["pod"] == "old"] == grant
        await eventually(lambda: old_version not in versions(node), "no container has the installed version mounted")
        assert len(versions(node)) == 1
        for pod in ("old", "new"):
            assert 0 < await filled_mib(node, pod) < 1024 - 200

        node.container("old").signal_group(9)  # what starts again gets the new one
        await eventually(lambda: node.container("old").pid != pid and is_newer(node, "old"), "the container was started again")
        await node.agent.stop()
        await node.agent.start()
        await node.wait_ready()
        assert (is_newer(node, "old"), is_newer(node, "new")) == (True, True)
        await running(node, "old", "new")


async def test_containers_outlive_the_agent_under_their_limits():
    async with make_node("t4x2") as node:
        node.create_pod(manifest("a", cuda()))
        await running(node, "a")
        await eventually(lambda: node.container("a").lines(), "it holds its memory")
        pid = node.container("a").pid
        await node.agent.stop()
        await eventually(lambda: node.allocatable(contract.RESOURCE_VGPU) == 0, "kubelet knows that the plugin is gone")
        await asyncio.sleep(0.5)
        assert (node.container("a").pid, node.container("a").exit_code) == (pid, None)
        assert 0 < await filled_mib(node, "a") < 1024 - 200
        (spec,) = node.layout.cdi_dynamic.iterdir()
        assert all(path.exists() for path in mounted(spec))


def mounted(spec: Path) -> list[Path]:
    """The host's files that a CDI spec mounts."""
    return [Path(mount["hostPath"]) for mount in json.loads(spec.read_bytes())["devices"][0]["containerEdits"]["mounts"]]


DIRECTORY, FILE, SOCKET = stat.S_IFDIR, stat.S_IFREG, stat.S_IFSOCK
WRITTEN = {
    "state": DIRECTORY | 0o700,
    "state/agent-holder": FILE | 0o644,
    "state/agent-successor": FILE | 0o600,
    "state/secret": FILE | 0o600,
    "state/node-versions": FILE | 0o600,
    "state/ledger": DIRECTORY | 0o700,
    "state/ledger/*.json": FILE | 0o600,
    "state/mig": DIRECTORY | 0o700,
    "state/shim": DIRECTORY | 0o755,  # below a directory of 0700: containers reach it by their mounts only
    "state/shim/*": DIRECTORY | 0o755,
    "state/shim/*/*.so*": FILE | 0o555,
    "state/shim/*/ld.so.preload": FILE | 0o444,
    "state/shim/containers/*.so*": FILE | 0o555,
    "run": DIRECTORY | 0o755,
    "run/agent-holder": FILE | 0o644,
    "run/metrics-address": FILE | 0o644,
    "run/health": FILE | 0o600,
    "run/containers": DIRECTORY | 0o700,
    "run/containers/*": DIRECTORY | 0o700,
    "run/containers/*/grant.json": FILE | 0o600,
    "run/containers/*/limits": FILE | 0o444,
    "run/containers/*/region": FILE | 0o666,  # the container's user writes it, where it is mounted; 0700 above keeps others out
    "run-cdi/aliquot.dev-vgpu-*.json": FILE | 0o644,  # runtimes read it; its name cannot be guessed
    "device-plugins/aliquot-vgpu-*.sock": SOCKET | 0o755,
}
WRITTEN_FOR_PRELOAD = {"run/containers/*/ld.so.preload": FILE | 0o444}
SHARED_PAGES = {"run/*": DIRECTORY | 0o700, "run/*/page": FILE | 0o666}
OTHERS = ("containers", "proc", "sim", "token", "etc-cdi", "pod-resources", "agent.log", "mps.log", "device-plugins/kubelet*", "shim-*")


WRITTEN_FOR_BACKENDS = {
    "state/mig/*.json": FILE | 0o600,
    "run/mps-daemons": DIRECTORY | 0o700,
    "run/mps-daemons/*": DIRECTORY | 0o700,
    "run/mps-daemons/supervisor.*": FILE | 0o600,
    "run/mps-daemons/*/GPU-*.json": FILE | 0o600,
    "run/mps-shm": DIRECTORY | 0o1777,
    "run/mps": DIRECTORY | 0o755,
    "run/mps/aside": DIRECTORY | 0o700,
    "run/mps/GPU-*": DIRECTORY | 0o755,
    "run/mps/GPU-*/pipe": DIRECTORY | 0o755,  # a container's user looks for the daemon there
    "run/mps/GPU-*/log": DIRECTORY | 0o700,
    "run/turns": DIRECTORY | 0o700,
    "run/turns/page": FILE | 0o666,
    "device-plugins/aliquot-mig-*.sock": SOCKET | 0o755,
}


def check_modes(node: Node, written: Mapping[str, int], *others: str) -> None:
    """Compare everything below the node's directories with what is documented; each pattern has to name something."""
    base = node.layout.base
    excepted = {path for pattern in (*OTHERS, *others) for top in base.glob(pattern) for path in (top, *top.rglob("*"))}
    made = {path: path.lstat().st_mode for path in base.rglob("*") if path not in excepted}
    expected: dict[Path, int] = {}
    for pattern, mode in (*SHARED_PAGES.items(), *written.items()):  # the particular after the general
        expected |= dict.fromkeys(base.glob(pattern), mode)
    expected |= {base / name: made[base / name] for name in ("run-cdi", "device-plugins")}  # kubelet's and the runtime's own
    assert {str(path): oct(mode) for path, mode in made.items() if mode != expected.get(path)} == {}
    assert [pattern for pattern in written if not list(base.glob(pattern))] == []


async def spares_are_made(node: Node, libraries: int) -> None:
    """Wait until the agent has made copies of the shim ahead: it writes each under another name first."""
    directory = node.layout.base / "state/shim/containers"
    await eventually(lambda: len(list(directory.glob(".[!.]*.spare.*"))) == libraries * MOST, "all copies are made")


@pytest.mark.parametrize(("interposition", "more", "libraries"), [("front", {}, 2), ("preload", WRITTEN_FOR_PRELOAD, 1)])
async def test_agent_files_have_tightest_mode_and_documented_place(interposition: str, more: dict[str, int], libraries: int):
    async with make_node("t4x2", f"--interposition={interposition}") as node:
        node.create_pod(manifest("a", cuda(), annotations={contract.ANNOTATION_PRIORITY: "high"}))
        node.create_pod(manifest("b", cuda()))
        await running(node, "a", "b")
        await asyncio.sleep(1.0)  # some passes of everything that runs by itself
        await spares_are_made(node, libraries)
        check_modes(node, WRITTEN | more)


async def test_so_has_what_it_writes_for_mig_mps_and_burst(tmp_path):
    flags = ("--mig-strategy=dynamic", "--memory-oversubscription=1.5", f"--nvidia-ctk={ctk(tmp_path)}")
    async with make_node(a100_topology(tmp_path, whole=2), *flags, mps_control=mps_program(tmp_path)) as node:
        profile = contract.RESOURCE_MIG_PREFIX + "1g.10gb"
        await eventually(lambda: node.allocatable(profile) and node.allocatable(contract.RESOURCE_VGPU), "both kinds are offered")
        instance = {"name": "main", "command": ["sleep", "600"], "resources": {"limits": {profile: "1"}}}
        node.create_pod(manifest("instance", instance))
        node.create_pod(manifest("client", container(), annotations={contract.ANNOTATION_ISOLATION: "mps"}))
        node.create_pod(manifest("bursts", cuda(), annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"}))
        await running(node, "instance", "client", "bursts")
        await asyncio.sleep(1.0)
        await spares_are_made(node, 2)
        check_modes(node, WRITTEN | WRITTEN_FOR_BACKENDS, "run/mps/*/pipe/*", "run/mps/*/log/*")  # the daemon's own
