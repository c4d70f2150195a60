# SPDX-License-Identifier: Apache-2.0
"""The wire contract with the kubelet, checked against bytes and names written by hand rather than by the code under test."""

import grpc
import pytest
from google.protobuf import descriptor_pool

from aliquot.kubelet_api import (
    deviceplugin_pb2,
    deviceplugin_pb2_grpc,
    dra_pb2,
    dra_pb2_grpc,
    drahealth_pb2,
    drahealth_pb2_grpc,
    pluginregistration_pb2,
    pluginregistration_pb2_grpc,
    podresources_pb2,
    podresources_pb2_grpc,
)


def field(number: int, value: bytes | str | int) -> bytes:
    """Encode one field of a small message: wire type 2 for text and messages, 0 for numbers."""
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2]) + varint(len(raw)) + raw


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


class RecordingChannel:
    """Collects the paths that a stub asks a channel for."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def unary_unary(self, path, **_):
        self.paths.add(path)

    def unary_stream(self, path, **_):
        self.paths.add(path + " (stream)")


@pytest.mark.parametrize(
    ("stub", "paths"),
    [
        (deviceplugin_pb2_grpc.RegistrationStub, {"/v1beta1.Registration/Register"}),
        (
            deviceplugin_pb2_grpc.DevicePluginStub,
            {
                "/v1beta1.DevicePlugin/GetDevicePluginOptions",
                "/v1beta1.DevicePlugin/ListAndWatch (stream)",
                "/v1beta1.DevicePlugin/GetPreferredAllocation",
                "/v1beta1.DevicePlugin/Allocate",
                "/v1beta1.DevicePlugin/PreStartContainer",
            },
        ),
        (
            podresources_pb2_grpc.PodResourcesListerStub,
            {"/v1.PodResourcesLister/List", "/v1.PodResourcesLister/GetAllocatableResources", "/v1.PodResourcesLister/Get"},
        ),
        (
            pluginregistration_pb2_grpc.RegistrationStub,
            {"/pluginregistration.Registration/GetInfo", "/pluginregistration.Registration/NotifyRegistrationStatus"},
        ),
        (
            dra_pb2_grpc.DRAPluginStub,
            {
                "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
                "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            },
        ),
        (drahealth_pb2_grpc.DRAResourceHealthStub, {"/v1.DRAResourceHealth/NodeWatchResources (stream)"}),
    ],
)
def test_methods_have_the_paths_the_kubelet_uses(stub, paths):
    channel = RecordingChannel()
    stub(channel)
    assert channel.paths == paths


@pytest.mark.parametrize("name", ["deviceplugin", "dra", "drahealth", "podresources", "pluginregistration"])
def test_files_are_in_the_descriptor_pool_under_names_no_other_library_uses(name):
    assert descriptor_pool.Default().FindFileByName(f"aliquot/kubelet_api/{name}.proto")


def test_register_request():
    raw = field(1, "v1beta1") + field(2, "aliquot.sock") + field(3, "nvidia.com/vgpu") + field(4, field(1, 1) + field(2, 1))
    message = deviceplugin_pb2.RegisterRequest.FromString(raw)
    assert (message.version, message.endpoint, message.resource_name) == ("v1beta1", "aliquot.sock", "nvidia.com/vgpu")
    assert message.options.pre_start_required
    assert message.options.get_preferred_allocation_available
    assert message.SerializeToString(deterministic=True) == raw


def test_list_and_watch_response():
    device = field(1, "GPU-a::0") + field(2, "Healthy") + field(3, field(1, field(1, 1)))
    message = deviceplugin_pb2.ListAndWatchResponse.FromString(field(1, device) + field(1, field(1, "GPU-a::1")))
    assert [(found.ID, found.health) for found in message.devices] == [("GPU-a::0", "Healthy"), ("GPU-a::1", "")]
    assert [node.ID for node in message.devices[0].topology.nodes] == [1]


def test_preferred_allocation():
    asked = field(1, "GPU-a::0") + field(1, "GPU-a::1") + field(2, "GPU-a::1") + field(3, 2)
    (request,) = deviceplugin_pb2.PreferredAllocationRequest.FromString(field(1, asked)).container_requests
    assert list(request.available_deviceIDs) == ["GPU-a::0", "GPU-a::1"]
    assert list(request.must_include_deviceIDs) == ["GPU-a::1"]
    assert request.allocation_size == 2
    answer = deviceplugin_pb2.PreferredAllocationResponse()
    answer.container_responses.add(deviceIDs=["GPU-a::1", "GPU-a::0"])
    assert answer.SerializeToString() == field(1, field(1, "GPU-a::1") + field(1, "GPU-a::0"))


def test_allocate():
    request = deviceplugin_pb2.AllocateRequest.FromString(field(1, field(1, "GPU-a::0") + field(1, "GPU-b::3")))
    assert list(request.container_requests[0].devices_ids) == ["GPU-a::0", "GPU-b::3"]
    raw = field(
        1,
        field(1, field(1, "NAME") + field(2, "value"))
        + field(2, field(1, "/in") + field(2, "/out") + field(3, 1))
        + field(3, field(1, "/dev/a") + field(2, "/dev/b") + field(3, "rw"))
        + field(4, field(1, "note") + field(2, "text"))
        + field(5, field(1, "aliquot.dev/vgpu=abc")),
    )
    message = deviceplugin_pb2.AllocateResponse.FromString(raw)
    (answer,) = message.container_responses
    assert dict(answer.envs) == {"NAME": "value"}
    assert (answer.mounts[0].container_path, answer.mounts[0].host_path, answer.mounts[0].read_only) == ("/in", "/out", True)
    assert (answer.devices[0].container_path, answer.devices[0].host_path, answer.devices[0].permissions) == ("/dev/a", "/dev/b", "rw")
    assert dict(answer.annotations) == {"note": "text"}
    assert [device.name for device in answer.cdi_devices] == ["aliquot.dev/vgpu=abc"]
    assert message.SerializeToString(deterministic=True) == raw


def test_pre_start_container():
    assert list(deviceplugin_pb2.PreStartContainerRequest.FromString(field(1, "GPU-a::0")).devices_ids) == ["GPU-a::0"]


def test_pod_resources():
    devices = field(1, "nvidia.com/vgpu") + field(2, "GPU-a::0") + field(2, "GPU-a::1") + field(3, field(1, field(1, 1)))
    memory = field(1, "memory") + field(2, 1 << 33) + field(3, field(1, field(1, 0)))
    claim = (
        field(2, "claim")
        + field(3, "default")
        + field(4, field(1, field(1, "x/y=z")) + field(2, "gpu.nvidia.com") + field(3, "pool") + field(4, "gpu-0"))
    )
    container = field(1, "main") + field(2, devices) + field(3, 5) + field(4, memory) + field(5, claim)
    (pod,) = podresources_pb2.ListPodResourcesResponse.FromString(
        field(1, field(1, "train") + field(2, "team") + field(3, container))
    ).pod_resources
    assert (pod.name, pod.namespace) == ("train", "team")
    (main,) = pod.containers
    assert main.name == "main"
    assert list(main.cpu_ids) == [5]
    assert (main.devices[0].resource_name, list(main.devices[0].device_ids)) == ("nvidia.com/vgpu", ["GPU-a::0", "GPU-a::1"])
    assert [node.ID for node in main.devices[0].topology.nodes] == [1]
    assert (main.memory[0].memory_type, main.memory[0].size) == ("memory", 1 << 33)
    (dynamic,) = main.dynamic_resources
    assert (dynamic.claim_name, dynamic.claim_namespace) == ("claim", "default")
    (resource,) = dynamic.claim_resources
    assert (resource.driver_name, resource.pool_name, resource.device_name, resource.cdi_devices[0].name) == (
        "gpu.nvidia.com",
        "pool",
        "gpu-0",
        "x/y=z",
    )


def test_pod_level_resources_of_later_kubelets_are_read():
    pod = podresources_pb2.PodResources.FromString(field(1, "p") + field(4, 3) + field(5, field(1, "memory") + field(2, 7)))
    assert (list(pod.cpu_ids), pod.memory[0].size) == ([3], 7)


def test_get_pod_resources_request():
    assert podresources_pb2.GetPodResourcesRequest(pod_name="p", pod_namespace="n").SerializeToString() == field(1, "p") + field(2, "n")


def test_allocatable_resources():
    raw = field(1, field(1, "nvidia.com/vgpu") + field(2, "GPU-a::0")) + field(2, 1) + field(3, field(1, "memory") + field(2, 9))
    message = podresources_pb2.AllocatableResourcesResponse.FromString(raw)
    assert (message.devices[0].resource_name, list(message.cpu_ids), message.memory[0].size) == ("nvidia.com/vgpu", [1], 9)


def test_prepare_resources():
    (claim,) = dra_pb2.NodePrepareResourcesRequest.FromString(field(1, field(1, "ns") + field(2, "uid") + field(3, "name"))).claims
    assert (claim.namespace, claim.uid, claim.name) == ("ns", "uid", "name")
    device = field(1, "gpu") + field(2, "pool") + field(3, "gpu-0") + field(4, "x/y=z") + field(5, "share")
    raw = field(1, field(1, "uid") + field(2, field(1, device) + field(2, "why")))
    message = dra_pb2.NodePrepareResourcesResponse.FromString(raw)
    (found,) = message.claims["uid"].devices
    assert (list(found.request_names), found.pool_name, found.device_name) == (["gpu"], "pool", "gpu-0")
    assert (list(found.cdi_device_ids), found.share_id, message.claims["uid"].error) == (["x/y=z"], "share", "why")
    assert message.SerializeToString(deterministic=True) == raw


def test_unprepare_resources():
    raw = field(1, field(1, "uid") + field(2, field(1, "why")))
    assert dra_pb2.NodeUnprepareResourcesResponse.FromString(raw).claims["uid"].error == "why"


def test_health_of_devices():
    raw = field(1, field(1, field(1, "pool") + field(2, "gpu-0")) + field(2, 2) + field(3, 9) + field(4, 30) + field(5, "why"))
    (found,) = drahealth_pb2.NodeWatchResourcesResponse.FromString(raw).devices
    assert (found.device.pool_name, found.device.device_name, found.health) == ("pool", "gpu-0", drahealth_pb2.UNHEALTHY)
    assert (found.last_updated_time, found.health_check_timeout_seconds, found.message) == (9, 30, "why")


def test_plugin_registration():
    info = pluginregistration_pb2.PluginInfo(
        type="DevicePlugin", name="nvidia.com/vgpu", endpoint="/x.sock", supported_versions=["v1beta1"]
    )
    assert info.SerializeToString() == field(1, "DevicePlugin") + field(2, "nvidia.com/vgpu") + field(3, "/x.sock") + field(4, "v1beta1")
    status = pluginregistration_pb2.RegistrationStatus.FromString(field(1, 1) + field(2, "why"))
    assert (status.plugin_registered, status.error) == (True, "why")


async def test_a_plugin_serves_and_a_kubelet_calls_it_over_a_unix_socket(tmp_path):
    class Plugin(deviceplugin_pb2_grpc.DevicePluginServicer):
        async def Allocate(self, request, context):
            ids = request.container_requests[0].devices_ids
            return deviceplugin_pb2.AllocateResponse(
                container_responses=[deviceplugin_pb2.ContainerAllocateResponse(cdi_devices=[deviceplugin_pb2.CDIDevice(name=ids[0])])]
            )

        async def ListAndWatch(self, request, context):
            yield deviceplugin_pb2.ListAndWatchResponse(devices=[deviceplugin_pb2.Device(ID="GPU-a::0")])

    address = f"unix://{tmp_path}/plugin.sock"
    server = grpc.aio.server()
    deviceplugin_pb2_grpc.add_DevicePluginServicer_to_server(Plugin(), server)
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = deviceplugin_pb2_grpc.DevicePluginStub(channel)
            request = deviceplugin_pb2.AllocateRequest(
                container_requests=[deviceplugin_pb2.ContainerAllocateRequest(devices_ids=["GPU-a::0"])]
            )
            assert (await stub.Allocate(request)).container_responses[0].cdi_devices[0].name == "GPU-a::0"
            assert [message.devices[0].ID async for message in stub.ListAndWatch(deviceplugin_pb2.Empty())] == ["GPU-a::0"]
    finally:
        await server.stop(None)
