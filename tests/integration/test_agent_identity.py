# SPDX-License-Identifier: Apache-2.0
"""Owner of a container that starts: init containers, sidecars, namesakes, static pods, reused IDs; kubelets that forget, reboots."""

import asyncio
import shutil
from functools import partial
from typing import Any

import pytest

from agent.core.region_layout import decode_limits
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.paths import built
from aliquot_lab.demo.evidence import parse_events
from aliquot_lab.standin.cluster import Kind
from aliquot_lab.standin.plugins import Behaviour
from tests.integration.agent_nodes import (
    assign,
    assignment,
    container,
    eventually,
    grants,
    log_of,
    make_node,
    manifest,
    page_shows,
    refused,
    running,
    share,
    usable_mib,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("build_dir")]
ASSIGNED = "--placement=assigned"
SOON = ["sh", "-c", "sleep 0.3"]


def limits_of(node, pod: str, name: str | None = None) -> list[tuple[str, int]]:
    path = node.container(pod, name).root / contract.CONTAINER_LIMITS.lstrip("/")
    return [(device.uuid, device.memory_bytes // MIB) for device in decode_limits(path.read_bytes()).devices]


def memory_of(node, pod: str, name: str | None = None) -> list[int]:
    return [mib for _, mib in limits_of(node, pod, name)]


def visible(node, pod: str) -> set[str]:
    """UUIDs of the GPUs that a container can open."""
    return {value for name, value in node.container(pod).env.items() if name.startswith(contract.ENV_SIM_DEVICE_PREFIX)}


async def test_every_container_of_pod_gets_own_share_with_any_inherited_ids():
    async with make_node("t4x2") as node:
        same = [container("first", mib=1001, command=SOON), container("second", mib=1002, command=SOON)]
        side = container("side", mib=1003, restartPolicy="Always")
        bare = {"name": "bare", "command": SOON}
        node.create_pod(manifest("a", container("main", mib=1004), container("other", vgpus=2, mib=2010), init=[*same, bare, side]))
        node.create_pod(
            manifest("init-only", {"name": "main", "command": ["sleep", "600"]}, init=[container("warm", mib=1005, command=SOON)])
        )
        node.create_pod(
            manifest("init-too", {"name": "main", "command": ["sleep", "600"]}, init=[container("warm", mib=1006, command=SOON)])
        )
        await running(node, "a", "init-only", "init-too")
        found = {name: memory_of(node, "a", name) for name in ("first", "second", "side", "main", "other")}
        assert found == {"first": [1001], "second": [1002], "side": [1003], "main": [1004], "other": [1005, 1005]}
        assert memory_of(node, "init-only", "warm") == [1005]
        assert memory_of(node, "init-too", "warm") == [1006]
        await eventually(
            lambda: {grant["container"] for grant in grants(node) if grant["pod"] == "a"} == {"side", "main", "other"},
            "what the init containers held is the others'",
        )


async def test_init_containers_and_sidecars_that_start_again_have_their_own_shares_again(tmp_path):
    async with make_node("t4x2") as node:
        fails_once = ["sh", "-c", f"sleep 0.2; test -e {tmp_path}/tried || {{ touch {tmp_path}/tried; exit 1; }}"]
        side = container("side", mib=1002, restartPolicy="Always")
        node.create_pod(manifest("a", container("main", mib=1003), init=[container("first", mib=1001, command=fails_once), side]))
        await running(node, "a")
        runs = [one.config.container for one in node.runtime.history]
        assert runs == ["first", "first", "side", "main"]
        assert [memory_of(node, "a", name) for name in ("first", "side", "main")] == [[1001], [1002], [1003]]
        before = grants(node)

        def is_another_than(ended_id: str, name: str) -> bool:
            return node.container("a", name).id != ended_id

        for name in ("side", "main"):
            ended = node.container("a", name)
            ended.signal_group(9)
            await eventually(partial(is_another_than, ended.id, name), f"{name} is started again")
        assert [memory_of(node, "a", name) for name in ("side", "main")] == [[1002], [1003]]
        assert sorted(grants(node), key=str) == sorted(before, key=str)


async def test_pod_admitted_before_first_agent_has_no_devices_and_policy_evicts_it():
    """Kubelet does not know the resource yet, and counts nothing that it does not know."""
    async with make_node("t4x2", "--drift-policy=evict", start_agent=False) as node:
        node.create_pod(manifest("early"))
        node.create_pod(manifest("other", {"name": "main", "command": ["sleep", "600"]}))
        await running(node, "early", "other")
        assert not [name for name in node.container("early").env if name.startswith(contract.ENV_SIM_DEVICE_PREFIX)]
        await node.agent.start()
        await node.wait_ready()
        await eventually(lambda: [e for e in node.events("early") if e["reason"] == contract.EVENT_REASON_DRIFT], "an event about it")
        await node.wait_gone("early")
        assert [path for verb, path in node.api.requests if path.endswith("/eviction")] == [
            "/api/v1/namespaces/default/pods/early/eviction"
        ]
        node.create_pod(manifest("early"))  # by its owner
        await running(node, "early", "other")
        assert memory_of(node, "early") == [1024]


async def test_immediate_namesake_is_distinguished_from_previous_pod():
    def runs_under(uid: str, pod: dict[str, Any]) -> bool:
        return pod["metadata"]["uid"] == uid and pod["status"]["phase"] == "Running"

    async with make_node("t4x2", ASSIGNED) as node:
        for number in range(4):
            uid = f"uid-{number}"
            text = assignment(uid, main=[share(node, number % 2, 1000 + number)])
            metadata: dict[str, Any] = {"uid": uid, "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}
            node.create_pod(manifest("web-0", container(mib=1000 + number), **metadata))
            await node.wait_for_pod("web-0", partial(runs_under, uid))
            assert limits_of(node, "web-0") == [(node.inventory.gpus[number % 2].uuid, 1000 + number)]
            node.cluster.delete(Kind.POD, "default", "web-0")  # as kubectl delete --force does, and the StatefulSet makes the next
        await eventually(lambda: not grants(node), "nothing of them is left")


async def test_static_pod_is_served_with_local_placement_and_outlives_its_mirror():
    async with make_node("t4x2") as node:
        name = node.kubelet.run_static(manifest("monitor"))
        await running(node, name)
        (grant,) = grants(node)
        pid = node.container(name).pid
        mirror = node.pod(name)["metadata"]["uid"]
        assert grant["pod_uid"] != mirror
        node.delete_pod(name)
        await node.wait_for_pod(name, lambda pod: pod["metadata"]["uid"] != mirror)
        await running(node, name)
        await asyncio.sleep(1.0)  # three periods of the reconciler
        assert grants(node) == [grant]
        assert (node.container(name).pid, node.container(name).exit_code) == (pid, None)
        node.create_pod(manifest("b"))
        await running(node, "b")


async def test_pods_that_our_scheduler_did_not_place_fail_closed_by_name():
    async with make_node("t4x2", ASSIGNED) as node:
        preset = manifest("preset")
        other = manifest("other")
        other["spec"]["schedulerName"] = "default-scheduler"
        node.create_pod(preset)
        node.create_pod(other)
        static = node.kubelet.run_static(manifest("static"))
        for name in ("preset", "other", static):
            await refused(node, name, contract.ANNOTATION_ASSIGNMENT, "placement: local")
        assert grants(node) == []
        assert not list(node.layout.cdi_dynamic.iterdir())


async def test_ids_that_go_round_serve_each_container_with_its_own_share():
    async with make_node("t4x2", "--shares-per-gpu=1") as node:
        node.create_pod(manifest("keeper"))
        await running(node, "keeper")
        for number in range(3):
            name = f"p{number}"
            node.create_pod(manifest(name, container(mib=2000 + number)))
            await running(node, name)
            assert memory_of(node, name) == [2000 + number]
            node.delete_pod(name)
            await node.wait_gone(name)
        assert memory_of(node, "keeper") == [1024]


class TestKubeletThatForgot:
    async def test_running_pods_keep_devices_and_get_event(self):
        async with make_node("t4x2", "--shares-per-gpu=1") as node:
            node.create_pod(manifest("a"))
            await running(node, "a")
            before, pid = limits_of(node, "a"), node.container("a").pid
            await node.kubelet.restart(wipe_checkpoint=True)
            await node.wait_ready()
            node.create_pod(manifest("b"))  # there are two IDs, and kubelet thinks that both are free
            await running(node, "b")
            await page_shows(node, "drifts", "unlisted")
            assert f'aliquot_drift{{kind="unlisted",node="{node.options.name}"}} 1.0' in await node.metrics()
            assert (limits_of(node, "a"), node.container("a").pid) == (before, pid)
            assert limits_of(node, "b") != before
            await eventually(lambda: [e for e in node.events("a") if e["reason"] == contract.EVENT_REASON_DRIFT], "an event")

    async def test_policy_evict_evicts_only_its_own_pods(self):
        async with make_node("t4x2", "--drift-policy=evict") as node:
            node.create_pod(manifest("a"))
            await running(node, "a")
            await node.kubelet.restart(wipe_checkpoint=True)
            await node.wait_ready()
            node.create_pod(manifest("b"))
            await running(node, "b")
            await node.wait_gone("a")
            assert any(path.endswith("/pods/a/eviction") for _, path in node.api.requests)
            await eventually(lambda: [grant["pod"] for grant in grants(node)] == ["b"], "its share is free")
            await running(node, "b")


async def test_after_reboot_old_shares_are_free_and_next_pod_gets_them():
    """Kubelet is up before the agent: it fails the pods it had, as it does on a real node, and their owners make others."""
    async with make_node("t4x2", ASSIGNED) as node:
        whole = await usable_mib(node)

        def place(name: str, index: int) -> None:
            text = assignment(f"uid-{name}", main=[share(node, index, whole)])
            metadata: dict[str, Any] = {"uid": f"uid-{name}", "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}
            node.create_pod(manifest(name, container(mib=whole), **metadata))

        place("a", 0)
        place("b", 1)
        await running(node, "a", "b")
        await node.agent.kill()
        await node.kubelet.stop()
        await node.runtime.kill_all()
        for directory in (node.layout.run, node.layout.cdi_dynamic):  # both are in memory on a real node
            shutil.rmtree(directory)
            directory.mkdir()
        await node.kubelet.start()
        for name in ("a", "b"):
            await node.wait_for_pod(name, lambda pod: pod["status"].get("reason") == "UnexpectedAdmissionError")
        await node.agent.start()
        await node.wait_ready()
        await eventually(lambda: not grants(node), "nothing of the boot before is held")
        place("a2", 0)
        place("b2", 1)
        await running(node, "a2", "b2")
        assert limits_of(node, "a2") == [(node.inventory.gpus[0].uuid, whole)]
        assert limits_of(node, "b2") == [(node.inventory.gpus[1].uuid, whole)]


class TestDeviceInjection:
    @pytest.mark.parametrize(
        ("runtime", "by_cdi", "flags"),
        [
            pytest.param("containerd://1.7.27", True, [], id="a runtime that is configured for CDI, as the host's spec shows"),
            pytest.param("containerd://2.1.4", False, ["--device-injection=legacy"], id="as configured, whatever the runtime could"),
        ],
    )
    async def test_the_node_or_the_configuration_decides(self, runtime, by_cdi, flags):
        behaviour = Behaviour(retry_seconds=0.5, align_numa=False, runtime_version=runtime, cdi=by_cdi)
        async with make_node("t4x2", *flags, behaviour=behaviour) as node:
            node.create_pod(manifest("a", container(mib=1001)))
            await running(node, "a")
            assert bool(node.container("a").env.get(contract.ENV_NVIDIA_VISIBLE_DEVICES, "void") != "void") is not by_cdi
            ((uuid, mib),) = limits_of(node, "a")
            assert mib == 1001
            assert visible(node, "a") == {uuid}

    async def test_runtime_ignoring_cdi_names_starts_containers_without_gpu_whatever_image_requests(self):
        """containerd 1.7 as it comes, on a node where the container toolkit has written its spec."""
        asking = ((contract.ENV_NVIDIA_VISIBLE_DEVICES, "all"),)
        behaviour = Behaviour(retry_seconds=0.5, align_numa=False, runtime_version="containerd://1.7.28", cdi=False, image_env=asking)
        async with make_node("t4x2", behaviour=behaviour) as node:
            node.create_pod(manifest("a"))
            node.create_pod(manifest("unmanaged", {"name": "main", "command": ["sleep", "600"]}))
            await running(node, "a", "unmanaged")
            assert len(visible(node, "unmanaged")) == 2, "that is what its image asks NVIDIA's runtime for"
            assert visible(node, "a") == set()


class TestWithoutCdi:
    """A node older than CDI: containerd 1.6, and NVIDIA's runtime gives devices by the environment."""

    OLD = Behaviour(retry_seconds=0.5, crash_backoff_seconds=0.5, align_numa=False, runtime_version="containerd://1.6.33", cdi=False)

    async def test_containers_get_their_gpus_and_limits_by_the_answer_of_allocate(self):
        async with make_node("t4x2", ASSIGNED, behaviour=self.OLD) as node:
            for number in range(6):
                uid = f"uid-{number}"
                text = assignment(uid, main=[share(node, number % 2, 1000 + number)])
                fill = ["sh", "-c", f"{built('bin/aliquot-cuda-client')} fill --step 64; exec sleep 600"]
                metadata: dict[str, Any] = {"uid": uid, "annotations": {contract.ANNOTATION_ASSIGNMENT: text}}
                node.create_pod(manifest(f"p{number}", container(mib=1000 + number, command=fill), **metadata))
            await running(node, *(f"p{number}" for number in range(6)))
            for number in range(6):
                one = node.container(f"p{number}")
                uuid = node.inventory.gpus[number % 2].uuid
                assert limits_of(node, f"p{number}") == [(uuid, 1000 + number)]
                assert visible(node, f"p{number}") == {uuid}
                await eventually(one.lines, "the program has taken what it could get")
                (filled,) = parse_events(one.lines())
                assert 0 < filled["held_bytes"] <= (1000 + number) * MIB
            assert "by the reply of Allocate (legacy)" in log_of(node)

    async def test_container_with_ids_of_other_gpu_fails_closed_and_successor_is_served(self):
        async with make_node("t4x2", ASSIGNED, behaviour=self.OLD) as node:
            late = node.create_pod(manifest("a"))  # admitted before it was placed: kubelet took IDs of any GPU
            await refused(node, "a", contract.ANNOTATION_ASSIGNMENT)
            (held,) = node.kubelet.devices.table.held(late["metadata"]["uid"], "main")
            other = 1 if held.ids[0].startswith(node.inventory.gpus[0].uuid) else 0
            assign(node, "a", assignment(late["metadata"]["uid"], main=[share(node, other)]))
            await refused(node, "a", "deviceInjection: legacy", "Delete the pod")
            assert grants(node) == []
            node.delete_pod("a")
            await node.wait_gone("a")
            metadata: dict[str, Any] = {
                "uid": "uid-b",
                "annotations": {contract.ANNOTATION_ASSIGNMENT: assignment("uid-b", main=[share(node, other)])},
            }
            node.create_pod(manifest("b", **metadata))
            await running(node, "b")
            assert limits_of(node, "b") == [(node.inventory.gpus[other].uuid, 1024)]

    async def test_container_admitted_before_cdi_restarts_with_its_limits_and_shim(self):
        """containerd was upgraded under it, and kubelet repeats what Allocate answered then."""
        async with make_node("t4x2", ASSIGNED, behaviour=self.OLD) as node:
            metadata: dict[str, Any] = {
                "uid": "uid-a",
                "annotations": {contract.ANNOTATION_ASSIGNMENT: assignment("uid-a", main=[share(node, 0, 1001)])},
            }
            node.create_pod(manifest("a", container(mib=1001, command=["sh", "-c", "sleep 1"]), **metadata))
            await running(node, "a")
            await node.agent.kill()
            versions = {"containerRuntimeVersion": "containerd://2.1.4", "kubeletVersion": "v1.34.1"}
            node.cluster.update(Kind.NODE, "", node.options.name, lambda item: item["status"].update(nodeInfo=versions))
            lost = [path for path in node.layout.run.rglob("*") if path.is_symlink() or path.name == "ld.so.preload"]
            assert {path.name for path in lost} == {"libaliquot-preload.so", "ld.so.preload"}
            for path in lost:
                path.unlink()
            await node.agent.start()
            await node.wait_ready()
            known = node.layout.state / "node-versions"
            await eventually(lambda: "containerd://2.1.4" in known.read_text(), "the agent has heard of the node as it is now")
            run = node.container("a").id
            await eventually(lambda: node.container("a").id != run, "the container was started again")
            assert all(path.exists() for path in lost)
            assert limits_of(node, "a") == [(node.inventory.gpus[0].uuid, 1001)]
            assert contract.CONTAINER_PRELOAD in (node.container("a").root / contract.LD_SO_PRELOAD.lstrip("/")).read_text()
