# SPDX-License-Identifier: Apache-2.0
"""The kubelet's sockets, real gRPC on both sides."""

import errno
import os
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent.adapters import pod_resources
from agent.adapters.kubelet_grpc import KubeletDirectory
from agent.adapters.pod_resources import KubeletPodResources
from agent.core.identity import HeldDevices
from agent.errors import KubeletBusyError, KubeletError
from aliquot import contract
from aliquot.kubelet_api import deviceplugin_pb2 as pb
from aliquot.kubelet_api import podresources_pb2 as resources
from aliquot.kubelet_api.deviceplugin_pb2_grpc import (
    DevicePluginServicer,
    DevicePluginStub,
    RegistrationServicer,
    add_RegistrationServicer_to_server,
)
from aliquot.kubelet_api.podresources_pb2_grpc import PodResourcesListerServicer, add_PodResourcesListerServicer_to_server
from tests.unit.agent.fakes import FakePodResources

VGPU = contract.RESOURCE_VGPU


class Plugin(DevicePluginServicer):
    async def GetDevicePluginOptions(self, request, context):
        return pb.DevicePluginOptions(pre_start_required=True)

    async def GetPreferredAllocation(self, request, context):
        size = sum(len(asked.available_deviceIDs) for asked in request.container_requests)
        return pb.PreferredAllocationResponse(container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=[str(size)])])


class Registration(RegistrationServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.refusal: str | None = None

    async def Register(self, request, context):
        if self.refusal:
            await context.abort(grpc.StatusCode.UNKNOWN, self.refusal)
        self.requests.append(request)
        return pb.Empty()


class Lister(PodResourcesListerServicer):
    async def List(self, request, context):
        def devices(ids, numa):
            topology = resources.NUMATopology(nodes=[resources.NUMANode(ID=numa)]) if hasattr(resources, "NUMATopology") else None
            return resources.ContainerDevices(resource_name=VGPU, device_ids=ids, topology=topology)

        container = resources.ContainerResources(name="main", devices=[devices(["GPU-0::0"], 0), devices(["GPU-1::0"], 1)])
        return resources.ListPodResourcesResponse(
            pod_resources=[
                resources.PodResources(name="a", namespace="default", containers=[container, resources.ContainerResources(name="bare")])
            ]
        )

    async def GetAllocatableResources(self, request, context):
        devices = [
            resources.ContainerDevices(resource_name=VGPU, device_ids=["x", "y"]),
            resources.ContainerDevices(resource_name="other", device_ids=["z"]),
        ]
        return resources.AllocatableResourcesResponse(devices=devices)


class Serving:
    """Servers on sockets, until stopped."""

    def __init__(self) -> None:
        self._servers: list[Any] = []

    async def __call__(self, path, add, servicer):
        server = grpc.aio.server()
        add(servicer, server)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    async def stop(self):
        while self._servers:
            await self._servers.pop().stop(0)


@pytest.fixture
async def serve():
    serving = Serving()
    yield serving
    await serving.stop()


@pytest.fixture
def directory(tmp_path) -> KubeletDirectory:
    return KubeletDirectory(tmp_path, FakePodResources())


class TestPlugins:
    async def test_a_served_plugin_answers_large_requests(self, tmp_path, directory):
        server = await directory.serve("p.sock", Plugin())
        many = [f"GPU-{'0' * 36}::{number}" for number in range(150_000)]
        asked = pb.ContainerPreferredAllocationRequest(available_deviceIDs=many, allocation_size=1)
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/p.sock") as channel:
            answer = await DevicePluginStub(channel).GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[asked]))
        assert list(answer.container_responses[0].deviceIDs) == ["150000"]
        await server.stop()
        assert not (tmp_path / "p.sock").exists()

    async def test_a_path_too_long_for_a_socket_is_named(self, tmp_path):
        with pytest.raises(KubeletError, match="longer than 107 bytes"):
            await KubeletDirectory(tmp_path / ("d" * 100), FakePodResources()).serve("p.sock", Plugin())

    async def test_a_directory_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(KubeletError, match="must exist"):
            await KubeletDirectory(tmp_path / "none", FakePodResources()).serve("p.sock", Plugin())

    async def test_registration_names_socket_resource_and_options(self, tmp_path, directory, serve):
        kubelet = Registration()
        await serve(tmp_path / "kubelet.sock", add_RegistrationServicer_to_server, kubelet)
        await directory.register("p.sock", VGPU)
        (request,) = kubelet.requests
        assert (request.version, request.endpoint, request.resource_name) == ("v1beta1", "p.sock", VGPU)
        assert request.options.pre_start_required

    async def test_refusal_is_reported_in_words_of_kubelet(self, tmp_path, directory, serve):
        kubelet = Registration()
        kubelet.refusal = "failed to dial device plugin"
        await serve(tmp_path / "kubelet.sock", add_RegistrationServicer_to_server, kubelet)
        with pytest.raises(KubeletError, match="failed to dial device plugin"):
            await directory.register("p.sock", VGPU)

    async def test_a_kubelet_that_is_away_is_an_error(self, directory):
        with pytest.raises(KubeletError, match="UNAVAILABLE"):
            await directory.register("p.sock", VGPU)


class TestSockets:
    def test_recreated_file_has_new_identity(self, tmp_path, directory):
        assert directory.identity("s") is None
        (tmp_path / "s").touch()
        first = directory.identity("s")
        assert directory.identity("s") == first
        (tmp_path / "s").unlink()
        (tmp_path / "s").touch()
        assert directory.identity("s") != first

    async def test_evidence_has_the_plugins_that_answer(self, tmp_path, directory):
        servers = [await directory.serve(name, Plugin()) for name in ("nvidia-gpu.sock", "own.sock")]
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(tmp_path / "dead.sock"))
        dead.close()
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        (tmp_path / "file").touch()
        evidence = await directory.evidence(VGPU, frozenset({"own.sock"}))
        assert evidence.answering_sockets == ("nvidia-gpu.sock",)
        silent.close()
        for server in servers:
            await server.stop()

    async def test_dead_sockets_of_ours_are_removed_and_living_ones_are_not(self, tmp_path, directory):
        server = await directory.serve("aliquot-vgpu-1.sock", Plugin())
        for name in ("aliquot-vgpu-0.sock", "other-0.sock"):
            dead = socket.socket(socket.AF_UNIX)
            dead.bind(str(tmp_path / name))
            dead.close()
        await directory.remove_dead_sockets("aliquot-")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["aliquot-vgpu-1.sock", "other-0.sock"]
        await server.stop()

    async def test_sockets_that_cannot_be_removed_are_named_and_hold_up_no_stop(self, tmp_path, directory, monkeypatch):
        server = await directory.serve("aliquot-vgpu-1.sock", Plugin())
        dead = socket.socket(socket.AF_UNIX)
        dead.bind(str(tmp_path / "aliquot-vgpu-0.sock"))
        dead.close()

        def read_only(path, missing_ok=False):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(Path, "unlink", read_only)
        with pytest.raises(KubeletError, match=r"aliquot-vgpu-0\.sock: Read-only file system"):
            await directory.remove_dead_sockets("aliquot-")
        await server.stop()


class TestPodResources:
    @pytest.fixture
    async def api(self, tmp_path, monkeypatch):
        monkeypatch.setattr(pod_resources, "TIMEOUT_SECONDS", 1.0)
        one = KubeletPodResources(tmp_path / "pr.sock")
        yield one
        await one.close()

    async def test_ids_of_one_container_are_joined_over_numa_nodes(self, tmp_path, serve, api):
        await serve(tmp_path / "pr.sock", add_PodResourcesListerServicer_to_server, Lister())
        held = await api.held()
        assert held == [HeldDevices("default", "a", "main", VGPU, frozenset({"GPU-0::0", "GPU-1::0"}))]

    async def test_a_kubelet_that_had_too_many_calls_is_busy(self, tmp_path, serve, api):
        class Limited(Lister):
            async def List(self, request, context):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

        await serve(tmp_path / "pr.sock", add_PodResourcesListerServicer_to_server, Limited())
        with pytest.raises(KubeletBusyError, match="rejected by rate limit"):
            await api.held()

    async def test_allocatable_ids_are_those_of_the_resource(self, tmp_path, serve, api):
        await serve(tmp_path / "pr.sock", add_PodResourcesListerServicer_to_server, Lister())
        assert await api.allocatable_ids(VGPU) == ["x", "y"]

    async def test_absent_kubelet_is_error_immediately_or_after_wait(self, api):
        with pytest.raises(KubeletError, match="UNAVAILABLE"):
            await api.allocatable_ids(VGPU)
        with pytest.raises(KubeletError, match=r"pr\.sock"):
            await api.held()

    async def test_a_restarted_kubelet_is_found_again(self, tmp_path, serve, api):
        await serve(tmp_path / "pr.sock", add_PodResourcesListerServicer_to_server, Lister())
        await api.held()
        await serve.stop()
        with pytest.raises(KubeletError):
            await api.allocatable_ids(VGPU)
        await serve(tmp_path / "pr.sock", add_PodResourcesListerServicer_to_server, Lister())
        assert await api.held()
