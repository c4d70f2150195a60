# SPDX-License-Identifier: Apache-2.0
"""The kubelet stand-in keeps the contracts of the real one: one test per point of its behaviour that we rely on."""

import asyncio
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from aliquot import contract
from aliquot.kubelet_api import deviceplugin_pb2 as pb
from aliquot.kubelet_api import podresources_pb2 as podresources
from aliquot.kubelet_api import podresources_pb2_grpc as podresources_rpc
from aliquot_lab.standin import plugins
from aliquot_lab.standin.apiserver import request_pod_deletion
from aliquot_lab.standin.cluster import Kind
from tests.fakes.device_plugin import NODE, QUICK, RESOURCE, ScriptedPlugin, container, device, devices, kubelet_harness

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def node():
    async with kubelet_harness() as harness:
        yield harness


class TestRegistration:
    async def test_register_asks_for_the_options_before_it_answers(self, node):
        plugin = await node.plugin(devices(1))
        assert [name for name, _ in plugin.calls] == ["GetDevicePluginOptions", "Registered"]

    async def test_register_fails_when_the_plugin_does_not_serve_in_time(self, node, monkeypatch):
        monkeypatch.setattr(plugins, "DIAL_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(grpc.aio.AioRpcError, match="failed to dial device plugin"):
            await ScriptedPlugin().register(node.plugin_dir, "nobody.sock")

    async def test_the_real_limit_for_dialling_back_is_ten_seconds(self):
        assert plugins.DIAL_TIMEOUT_SECONDS == 10

    async def test_another_api_version_is_refused(self, node):
        with pytest.raises(grpc.aio.AioRpcError, match="v1alpha"):
            await ScriptedPlugin().register(node.plugin_dir, version="v1alpha")

    @pytest.mark.parametrize("name", ["device", "kubernetes.io/device", "example.com/", "example.com/" + "x" * 64])
    async def test_a_name_that_is_no_extended_resource_is_refused(self, node, name):
        with pytest.raises(grpc.aio.AioRpcError, match="extended resource"):
            await ScriptedPlugin(resource=name).register(node.plugin_dir)

    async def test_options_come_from_the_plugin_and_not_from_the_request(self, node):
        plugin = await node.plugin(devices(1), options=pb.DevicePluginOptions(pre_start_required=False))
        node.create("pod")
        await node.running("pod")
        assert plugin.called("PreStartContainer") == []

    async def test_the_last_plugin_to_register_a_resource_owns_it(self, node):
        first = await node.plugin(devices(1), "first.sock")
        second = await node.plugin(devices(2), "second.sock")
        node.create("pod")
        await node.running("pod")
        assert (len(first.called("Allocate")), len(second.called("Allocate"))) == (0, 1)

    async def test_the_end_of_a_replaced_plugin_does_not_matter(self, node):
        first = await node.plugin(devices(1), "first.sock")
        await node.plugin(devices(2), "second.sock")
        await first.stop()
        await asyncio.sleep(0.1)
        assert node.allocatable() == 2

    async def test_an_old_kubelet_lets_the_replaced_stream_take_the_new_devices_along(self):
        async with kubelet_harness(replace(QUICK, reregistration_race=True)) as node:
            first = await node.plugin(devices(1), "first.sock")
            second = await node.plugin(devices(2), "second.sock")
            await first.stop()
            await node.until(lambda: node.allocatable() == 0)
            second.advertise(devices(2))
            await node.until(lambda: node.allocatable() == 2)


class TestListAndWatch:
    async def test_each_message_replaces_the_whole_set(self, node):
        plugin = await node.plugin(devices(3))
        plugin.advertise([device("d1"), device("other")])
        await node.until(lambda: node.capacity() == 2)
        assert node.kubelet.devices.table.healthy(RESOURCE) == {"d1", "other"}

    async def test_unhealthy_devices_count_in_capacity_only(self, node):
        await node.plugin([device("a"), device("b", healthy=False)])
        assert (node.capacity(), node.allocatable()) == (2, 1)

    async def test_a_message_of_more_than_four_mebibytes_ends_the_stream(self, node):
        plugin = await node.plugin(devices(1))
        plugin.advertise([device(f"{number:063d}") for number in range(4 * 1024 * 1024 // 63)])
        await node.until(lambda: node.allocatable() == 0)
        assert node.capacity() == 1

    async def test_a_message_just_below_four_mebibytes_arrives(self, node):
        plugin = await node.plugin(devices(1))
        many = [device(f"{number:063d}") for number in range(50_000)]
        assert 3.5 * 2**20 < pb.ListAndWatchResponse(devices=many).ByteSize() < 4 * 2**20
        plugin.advertise(many)
        await node.until(lambda: node.capacity() == 50_000)

    async def test_the_end_of_the_stream_makes_all_devices_unhealthy(self, node):
        plugin = await node.plugin(devices(2))
        plugin.advertise(None)
        await node.until(lambda: node.allocatable() == 0)
        assert node.capacity() == 2

    async def test_resource_is_removed_after_grace_time(self):
        async with kubelet_harness(replace(QUICK, endpoint_grace_seconds=0.1)) as node:
            plugin = await node.plugin(devices(2))
            await plugin.stop()
            await node.until(lambda: node.capacity() == 0)

    async def test_a_plugin_that_returns_within_the_grace_time_has_its_devices_back(self, node):
        plugin = await node.plugin(devices(2))
        await plugin.stop()
        await node.until(lambda: node.allocatable() == 0)
        await node.plugin(devices(2), "again.sock")
        await node.until(lambda: node.allocatable() == 2)


class TestAdmission:
    async def test_allocate_is_called_once_and_prestart_at_every_start(self, node):
        plugin = await node.plugin(devices(4))
        node.create("pod", containers=[container("main", 2, command="sleep 0.05")])
        await node.until(lambda: len(plugin.called("PreStartContainer")) >= 3)
        (allocated,) = plugin.called("Allocate")
        assert {frozenset(ids) for ids in plugin.called("PreStartContainer")} == {frozenset(allocated)}

    async def test_failed_allocate_ends_pod_permanently(self, node):
        plugin = await node.plugin(devices(1), allocate_error="no such thing")
        node.create("pod")
        await node.until(lambda: node.status("pod")["phase"] == "Failed")
        plugin.allocate_error = ""
        await asyncio.sleep(0.2)
        status = node.status("pod")
        assert (status["phase"], status["reason"]) == ("Failed", "UnexpectedAdmissionError")
        assert "rpc error: code = Internal desc = no such thing" in status["message"]
        assert len(plugin.called("Allocate")) == 1

    async def test_a_failed_allocate_holds_no_devices(self, node):
        plugin = await node.plugin(devices(1), allocate_error="not now")
        node.create("first")
        await node.until(lambda: node.status("first")["phase"] == "Failed")
        plugin.allocate_error = ""
        node.create("second")
        await node.running("second")

    async def test_a_failed_prestart_is_shown_and_tried_again(self, node):
        plugin = await node.plugin(devices(1), prestart_error="24 GiB are free, 40 asked")
        node.create("pod")
        await node.until(lambda: len(plugin.called("PreStartContainer")) >= 2)
        waiting = node.waiting("pod")
        assert waiting["reason"] == "CreateContainerConfigError"
        assert "code = FailedPrecondition desc = 24 GiB are free, 40 asked" in waiting["message"]
        assert node.status("pod")["phase"] == "Pending"
        assert any(reason == "Failed" and "24 GiB are free" in message for reason, message in node.events("pod"))
        plugin.prestart_error = ""
        await node.running("pod")
        assert len(plugin.called("Allocate")) == 1

    async def test_a_prestart_that_takes_too_long_is_a_failed_one(self, node, monkeypatch):
        monkeypatch.setattr(contract, "PRESTART_TIMEOUT_SECONDS", 0.1)
        plugin = await node.plugin(devices(1), prestart_seconds=5)
        node.create("pod")
        await node.until(lambda: "DeadlineExceeded" in node.waiting("pod").get("message", ""))
        plugin.prestart_seconds = 0
        await node.running("pod")

    async def test_more_devices_than_are_free_fail_admission(self, node):
        await node.plugin(devices(3))
        node.create("first", 2)
        await node.running("first")
        node.create("second", 2)
        await node.until(lambda: node.status("second")["phase"] == "Failed")
        assert node.status("second")["reason"] == f"OutOf{RESOURCE}"

    async def test_resources_that_others_published_on_the_node_are_counted(self, node):
        def publish(body):
            body["status"]["capacity"]["nvidia.com/vgpu-memory"] = "1000"

        node.cluster.update(Kind.NODE, "", NODE, publish)
        await node.until(lambda: node.allocatable("nvidia.com/vgpu-memory") == 1000)
        limits = {"resources": {"limits": {"nvidia.com/vgpu-memory": "600"}}}
        for name in ("first", "second"):
            node.create(name, containers=[{**container("main", 0), **limits}])
        await node.until(lambda: node.status("second")["phase"] == "Failed")
        assert node.status("second")["reason"] == "OutOfnvidia.com/vgpu-memory"
        assert "requested: 600, used: 600, capacity: 1000" in node.status("second")["message"]
        await node.running("first")

    async def test_a_resource_the_node_does_not_know_is_ignored(self, node):
        node.create("pod", containers=[{**container("main", 0), "resources": {"limits": {"example.com/unknown": 1}}}])
        await node.running("pod")

    async def test_no_device_is_given_to_two_pods(self, node):
        await node.plugin(devices(12))
        for number in range(6):
            node.create(f"pod-{number}", 2)
        for number in range(6):
            await node.running(f"pod-{number}")
        held = [node.ids(f"pod-{number}") for number in range(6)]
        assert len(set().union(*held)) == 12

    async def test_devices_of_a_deleted_pod_are_free_again(self, node):
        await node.plugin(devices(1))
        node.create("first")
        await node.running("first")
        request_pod_deletion(node.cluster, "default", "first")
        await node.until(lambda: not node.cluster.list(Kind.POD)[1])
        node.create("second")
        await node.running("second")


class TestChoiceOfDevices:
    async def test_ids_are_picked_in_an_order_that_depends_on_the_seed(self):
        async def first_pick(seed):
            async with kubelet_harness(replace(QUICK, seed=seed)) as node:
                plugin = await node.plugin(devices(40))
                node.create("pod", 5)
                await node.running("pod")
                return plugin.called("Allocate")[0]

        picks = [await first_pick(seed) for seed in (1, 1, 2)]
        assert picks[0] == picks[1]
        assert picks[0] != picks[2]
        assert list(picks[0]) != sorted(picks[0])

    async def test_preferred_ids_are_taken_as_far_as_they_are_free(self, node):
        options = pb.DevicePluginOptions(get_preferred_allocation_available=True)
        plugin = await node.plugin(devices(6), options=options, preferred=["d5"])
        node.create("first")
        await node.running("first")
        plugin.preferred = ["d5", "d4", "unheard-of"]
        node.create("second", 2)
        await node.running("second")
        assert node.ids("first") == {"d5"}
        assert "d4" in node.ids("second")
        assert node.ids("second") <= {f"d{number}" for number in range(5)}
        assert "d5" not in plugin.called("GetPreferredAllocation")[1]

    async def test_preferences_are_not_requested_from_plugin_without_them(self, node):
        plugin = await node.plugin(devices(2))
        node.create("pod")
        await node.running("pod")
        assert plugin.called("GetPreferredAllocation") == []

    @pytest.mark.parametrize("seed", range(4))
    async def test_devices_of_one_numa_node_are_taken_together(self, seed):
        async with kubelet_harness(replace(QUICK, seed=seed)) as node:
            await node.plugin([device(f"n{number % 2}-{number}", numa=number % 2) for number in range(16)])
            node.create("pod", 4)
            await node.running("pod")
            assert len({device_id[:2] for device_id in node.ids("pod")}) == 1

    async def test_devices_are_mixed_when_no_numa_node_has_enough(self, node):
        await node.plugin([device(f"n{number}", numa=number) for number in range(3)])
        node.create("pod", 3)
        await node.running("pod")
        assert len(node.ids("pod")) == 3


class TestContainers:
    async def test_app_containers_reuse_the_devices_of_init_containers(self, node):
        plugin = await node.plugin(devices(4))
        node.create("pod", initContainers=[container("init", 1, command="true")], containers=[container("main", 2)])
        await node.running("pod")
        init, main = plugin.called("Allocate")
        assert set(init) < set(main)
        assert len(node.ids("pod")) == 2

    async def test_sidecars_keep_their_devices_to_themselves(self, node):
        await node.plugin(devices(4))
        node.create("pod", initContainers=[container("sidecar", 1, restartPolicy="Always")], containers=[container("main", 2)])
        await node.running("pod")
        assert len(node.ids("pod")) == 3

    async def test_a_failed_init_container_is_repeated_before_the_others_start(self, node):
        plugin = await node.plugin(devices(2))
        node.create("pod", initContainers=[container("init", 1, command="test -e done || { touch ../done; ln -s ../done done; exit 1; }")])
        await asyncio.sleep(0.3)
        assert len(plugin.called("PreStartContainer")) >= 2
        assert node.runtime.find("pod", "main") is None

    async def test_pod_environment_wins_over_the_plugins_and_cdi_over_both(self, node):
        (node.cdi_dir / "test.json").write_text(
            '{"cdiVersion":"0.6.0","kind":"example.com/device","devices":[{"name":"x","containerEdits":{"env":["C=cdi"]}}]}'
        )
        answer = pb.ContainerAllocateResponse(envs={"A": "plugin", "B": "plugin", "C": "plugin"})
        answer.cdi_devices.add(name="example.com/device=x")
        await node.plugin(devices(1), on_allocate=lambda _: answer)
        env = [{"name": "B", "value": "pod"}, {"name": "C", "value": "pod"}]
        node.create("pod", containers=[container("main", env=env)])
        await node.running("pod")
        found = node.runtime.find("pod").env
        assert (found["A"], found["B"], found["C"]) == ("plugin", "pod", "cdi")

    async def test_a_clash_of_plugins_over_a_variable_keeps_one_of_them(self, node):
        for number in (1, 2):
            answer = pb.ContainerAllocateResponse(envs={"X": str(number)})
            await node.plugin(devices(1), f"p{number}.sock", resource=f"example.com/r{number}", on_allocate=lambda _, answer=answer: answer)
        limits = {"limits": {"example.com/r1": 1, "example.com/r2": 1}}
        node.create("pod", containers=[{**container("main", 0), "resources": limits}])
        await node.running("pod")
        assert node.runtime.find("pod").env["X"] in ("1", "2")

    async def test_an_unresolvable_cdi_name_is_shown_and_tried_again(self, node):
        answer = pb.ContainerAllocateResponse()
        answer.cdi_devices.add(name="example.com/device=late")
        await node.plugin(devices(1), on_allocate=lambda _: answer)
        node.create("pod")
        await node.until(lambda: node.waiting("pod").get("reason") == "CreateContainerError")
        assert "unresolvable CDI devices example.com/device=late" in node.waiting("pod")["message"]
        (node.cdi_dir / "late.json").write_text(
            '{"cdiVersion":"0.6.0","kind":"example.com/device","devices":[{"name":"late","containerEdits":{}}]}'
        )
        await node.running("pod")

    async def test_a_container_that_exits_is_reported_and_restarted_by_the_pods_policy(self, node):
        node.create(
            "pod",
            restartPolicy="OnFailure",
            containers=[container("main", 0, command="test -e ../../again || { touch ../../again; exit 3; }")],
        )
        await node.until(lambda: node.status("pod")["phase"] == "Succeeded")
        status = node.status("pod")["containerStatuses"][0]
        assert status["restartCount"] == 1
        assert status["lastState"]["terminated"]["exitCode"] == 3
        assert status["state"]["terminated"]["exitCode"] == 0

    async def test_a_pod_that_never_restarts_fails_with_its_container(self, node):
        node.create("pod", restartPolicy="Never", containers=[container("main", 0, command="exit 7")])
        await node.until(lambda: node.status("pod")["phase"] == "Failed")
        assert node.status("pod")["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7

    async def test_deletion_gives_the_container_time_to_end(self, node):
        node.create(
            "pod", 0, containers=[container("main", 0, command="trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done")]
        )
        await node.running("pod")
        found = node.runtime.find("pod")
        await node.until(lambda: "up" in found.lines())
        request_pod_deletion(node.cluster, "default", "pod")
        await node.until(lambda: not node.cluster.list(Kind.POD)[1])
        assert found.lines()[-1] == "bye"
        assert found.exit_code == 0


class TestPodResources:
    async def test_list_has_the_containers_but_not_the_ordinary_init_containers(self, node):
        await node.plugin(devices(8))
        init = [container("init", 1, command="true"), container("sidecar", 1, restartPolicy="Always")]
        node.create("pod", initContainers=init, containers=[container("main", 2), container("plain", 0)])
        await node.running("pod")
        pod = (await node.list_pod_resources())["pod"]
        assert [(item.name, len(item.devices)) for item in pod.containers] == [("sidecar", 1), ("main", 2), ("plain", 0)]
        assert pod.namespace == "default"

    async def test_list_has_the_container_that_is_being_prepared(self, node):
        plugin = await node.plugin(devices(4), prestart_error="wait")
        node.create("pod", 2)
        await node.until(lambda: bool(plugin.called("PreStartContainer")))
        pod = (await node.list_pod_resources())["pod"]
        held = {device_id for item in pod.containers[0].devices for device_id in item.device_ids}
        assert held == set(plugin.called("PreStartContainer")[0])

    async def test_list_has_one_entry_per_device_and_numa_node(self, node):
        both = pb.Device(ID="both", health="Healthy", topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=0), pb.NUMANode(ID=1)]))
        await node.plugin([both])
        node.create("pod")
        await node.running("pod")
        entries = (await node.list_pod_resources())["pod"].containers[0].devices
        assert [(list(entry.device_ids), [numa.ID for numa in entry.topology.nodes]) for entry in entries] == [
            (["both"], [0]),
            (["both"], [1]),
        ]

    async def test_list_leaves_out_pods_that_ended(self, node):
        node.create("pod", restartPolicy="Never", containers=[container("main", 0, command="true")])
        await node.until(lambda: node.status("pod")["phase"] == "Succeeded")
        assert await node.list_pod_resources() == {}

    async def test_get_answers_for_one_pod_and_refuses_an_unknown_one(self, node):
        await node.plugin(devices(1))
        node.create("pod")
        await node.running("pod")
        async with grpc.aio.insecure_channel(f"unix://{node.kubelet.pod_resources.socket}") as channel:
            stub = podresources_rpc.PodResourcesListerStub(channel)
            answer = await stub.Get(podresources.GetPodResourcesRequest(pod_name="pod", pod_namespace="default"))
            assert len(answer.pod_resources.containers[0].devices) == 1
            with pytest.raises(grpc.aio.AioRpcError, match="not found"):
                await stub.Get(podresources.GetPodResourcesRequest(pod_name="other", pod_namespace="default"))

    async def test_allocatable_resources_are_the_healthy_devices(self, node):
        await node.plugin([device("a", numa=0), device("b", healthy=False)])
        async with grpc.aio.insecure_channel(f"unix://{node.kubelet.pod_resources.socket}") as channel:
            answer = await podresources_rpc.PodResourcesListerStub(channel).GetAllocatableResources(
                podresources.AllocatableResourcesRequest()
            )
        assert [(item.resource_name, list(item.device_ids)) for item in answer.devices] == [(RESOURCE, ["a"])]


class TestRestart:
    async def test_all_sockets_are_removed_and_plugins_can_register_again(self, node):
        await node.plugin(devices(1))
        (node.plugin_dir / "left-over.sock").touch()
        await node.kubelet.restart()
        assert {path.name for path in node.plugin_dir.iterdir()} <= {"kubelet.sock", "kubelet_internal_checkpoint"}
        await node.plugin(devices(2), "again.sock")

    async def test_containers_run_on_and_keep_their_devices(self, node):
        plugin = await node.plugin(devices(2))
        node.create("pod")
        await node.running("pod")
        found, held = node.runtime.find("pod"), node.ids("pod")
        await node.kubelet.restart()
        assert node.allocatable() == 0
        await node.plugin(devices(2), "again.sock")
        assert found.exit_code is None
        assert node.ids("pod") == held
        node.create("second")
        await node.running("second")
        assert node.ids("second").isdisjoint(held)
        assert len(plugin.called("Allocate")) == 1

    async def test_a_restarted_container_uses_the_kept_answer(self, node):
        await node.plugin(devices(1), on_allocate=lambda _: pb.ContainerAllocateResponse(envs={"WHO": "first"}))
        node.create("pod", containers=[container("main", command="sleep 0.4")])
        await node.running("pod")
        await node.kubelet.restart()
        second = await node.plugin(devices(1), "again.sock", on_allocate=lambda _: pb.ContainerAllocateResponse(envs={"WHO": "second"}))
        await node.until(lambda: bool(second.called("PreStartContainer")))
        await node.until(lambda: len(node.runtime.history) >= 2)
        assert node.runtime.find("pod").env["WHO"] == "first"
        assert second.called("Allocate") == []

    async def test_a_pod_that_waits_fails_admission_when_its_plugin_is_not_back(self, node):
        plugin = await node.plugin(devices(1), prestart_error="wait")
        node.create("pod")
        await node.until(lambda: bool(plugin.called("PreStartContainer")))
        await plugin.stop()
        await node.kubelet.restart()
        await node.until(lambda: node.status("pod")["phase"] == "Failed")
        assert "no healthy devices present" in node.status("pod")["message"]

    async def test_without_a_checkpoint_devices_are_forgotten_and_published_resources_are_zeroed(self, node):
        def publish(body):
            body["status"]["capacity"]["nvidia.com/vgpu-memory"] = "1000"

        await node.plugin(devices(1))
        node.create("pod")
        await node.running("pod")
        node.cluster.update(Kind.NODE, "", NODE, publish)
        await node.kubelet.restart()
        assert node.capacity("nvidia.com/vgpu-memory") == 1000
        await node.kubelet.restart(wipe_checkpoint=True)
        assert node.capacity("nvidia.com/vgpu-memory") == 0
        assert node.ids("pod") == set()

    async def test_a_damaged_checkpoint_is_ignored_and_removed(self, node):
        await node.plugin(devices(1))
        node.create("pod")
        await node.running("pod")
        await node.kubelet.stop()
        checkpoint = node.kubelet.devices.checkpoint
        checkpoint.write_bytes(checkpoint.read_bytes().replace(b'"d0"', b'"d9"'))
        await node.kubelet.start()
        assert not checkpoint.exists()
        assert node.ids("pod") == set()

    async def test_pods_created_while_it_was_down_are_taken(self, node):
        await node.kubelet.stop()
        node.create("pod", 0)
        await node.kubelet.start()
        await node.running("pod")
