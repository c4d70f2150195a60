# SPDX-License-Identifier: Apache-2.0
"""A stand-in node with an agent process in DRA mode, and a kubelet that registers and calls the driver as the real one does."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from agent.adapters.dra_grpc import DRIVER_PACKAGES, driver_directory
from agent.core.region_layout import decode_limits
from aliquot import contract
from aliquot.contract.units import MIB
from aliquot.kubelet_api import dra_pb2, drahealth_pb2, pluginregistration_pb2
from aliquot.kubelet_api.pluginregistration_pb2_grpc import RegistrationStub
from aliquot_lab.standin.cdi import load_registry, resolve
from aliquot_lab.standin.cluster import Kind, Object
from aliquot_lab.standin.hardware import SimulatedHardware
from aliquot_lab.standin.node import Node, NodeOptions
from tests.unit.agent.fakes import until

CALL_SECONDS = 20
KUBELET_SECONDS = 45
"""How long the real kubelet waits for a reply."""


class FakeKubelet:
    """Registers the drivers that it finds, and calls them."""

    def __init__(self, directory: Path) -> None:
        self.registry = directory / "plugins_registry"
        self.endpoint = ""
        self.versions: list[str] = []

    async def register(self, *, error: str = "") -> None:
        """Register the one driver in the registry, or refuse it with an error."""
        await until(lambda: list(self.registry.glob("*-reg.sock")))
        (path,) = self.registry.glob("*-reg.sock")
        await self._register(path, error)

    async def _register(self, path: Path, error: str) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = RegistrationStub(channel)
            # The socket's file exists a moment before its server accepts calls. The real kubelet waits too.
            info = await stub.GetInfo(pluginregistration_pb2.InfoRequest(), wait_for_ready=True, timeout=CALL_SECONDS)
            assert (info.type, info.name) == ("DRAPlugin", contract.DRA_DRIVER)
            self.endpoint, self.versions = info.endpoint, list(info.supported_versions)
            status = pluginregistration_pb2.RegistrationStatus(plugin_registered=not error, error=error)
            await stub.NotifyRegistrationStatus(status)

    async def register_all(self, known: set[Path]) -> None:
        """Register the drivers that are not known yet, until cancelled. Calls go to the last one, as the real kubelet's do."""
        while True:
            for path in sorted(set(self.registry.glob("*-reg.sock")) - known):
                await self._register(path, "")
                known.add(path)
            await asyncio.sleep(0.02)

    async def prepare(
        self, *claims: dra_pb2.Claim, package: str = DRIVER_PACKAGES[0], seconds: float = KUBELET_SECONDS
    ) -> dra_pb2.NodePrepareResourcesResponse:
        """Prepare claims in one call. Args: seconds: after which the call is given up."""
        request = dra_pb2.NodePrepareResourcesRequest(claims=claims)
        return await self._call(f"/{package}.DRAPlugin/NodePrepareResources", request, dra_pb2.NodePrepareResourcesResponse, seconds)

    async def unprepare(self, *claims: dra_pb2.Claim, package: str = DRIVER_PACKAGES[0]) -> dra_pb2.NodeUnprepareResourcesResponse:
        """Release claims in one call."""
        request = dra_pb2.NodeUnprepareResourcesRequest(claims=claims)
        return await self._call(f"/{package}.DRAPlugin/NodeUnprepareResources", request, dra_pb2.NodeUnprepareResourcesResponse)

    @asynccontextmanager
    async def health(self, package: str) -> AsyncIterator[Any]:
        """The stream of the devices' health."""
        async with grpc.aio.insecure_channel(f"unix:{self.endpoint}") as channel:
            call = channel.unary_stream(
                f"/{package}.DRAResourceHealth/NodeWatchResources",
                request_serializer=drahealth_pb2.NodeWatchResourcesRequest.SerializeToString,
                response_deserializer=drahealth_pb2.NodeWatchResourcesResponse.FromString,
            )
            yield call(drahealth_pb2.NodeWatchResourcesRequest())

    async def _call(self, path: str, request: Any, reply: Any, seconds: float = KUBELET_SECONDS) -> Any:
        async with grpc.aio.insecure_channel(f"unix:{self.endpoint}") as channel:
            call = channel.unary_unary(path, request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString)
            return await call(request, timeout=seconds)


@asynccontextmanager
async def dra_node(directory: Path, *flags: str, hardware: SimulatedHardware | None = None) -> AsyncIterator[tuple[Node, FakeKubelet]]:
    """A node of eight H200, or another one, with a registered agent in DRA mode. Args: directory: of kubelet, with a short path."""
    kubelet = FakeKubelet(directory)
    kubelet.registry.mkdir()
    driver_directory(directory).mkdir(parents=True)
    own = ("--allocation=dra", "--feature-gates=DynamicResourceAllocation=true", *flags)
    async with Node(hardware or SimulatedHardware("h200x8"), NodeOptions(agent_flags=own, start_agent=False, directory=directory)) as node:
        await node.agent.start()
        await kubelet.register()
        await until(lambda: offered(node) or "--allocation=plugin" in flags)
        yield node, kubelet


def offered(node: Node) -> Sequence[Mapping[str, Any]]:
    """The devices in the node's slices."""
    _, slices = node.cluster.list(Kind.RESOURCE_SLICE)
    return [device for one in slices for device in one["spec"].get("devices", ())]


def allocate(node: Node, name: str, device: str, mib: int | None) -> dra_pb2.Claim:
    """Create a claim that is allocated a part of a device, or all of it; return it as kubelet names it."""
    return allocate_requests(node, name, {"gpu": (device, mib)})


def allocate_requests(node: Node, name: str, parts: Mapping[str, tuple[str, int | None]], pod: Object | None = None) -> dra_pb2.Claim:
    """Create a claim that is allocated a part of a device, in MiB, for each request. Args: pod: for which it is reserved."""
    body = {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": request, "exactly": {"deviceClassName": contract.DRA_CLASS}} for request in parts]}},
        "status": {
            "allocation": {"devices": {"results": [_result(node, name, request, *part) for request, part in parts.items()]}},
            **({"reservedFor": [{"resource": "pods", **_named(pod)}]} if pod is not None else {}),
        },
    }
    return claim_of(node.cluster.create(Kind.RESOURCE_CLAIM, body))


def _result(node: Node, claim: str, request: str, device: str, mib: int | None) -> Mapping[str, Any]:
    pool = node.cluster.list(Kind.NODE)[1][0]["metadata"]["name"]
    share = {"shareID": f"share-{claim}-{request}", "consumedCapacity": {"memory": f"{mib}Mi", "cores": "1", "shares": "1"}}
    return {"request": request, "driver": contract.DRA_DRIVER, "pool": pool, "device": device, **(share if mib else {})}


def _named(item: Object) -> Mapping[str, str]:
    return {key: item["metadata"][key] for key in ("name", "uid")}


def passed_on(reply: dra_pb2.NodePrepareResourceResponse, *named: str) -> Sequence[str]:
    """The CDI names that kubelet gives a container which names these requests of a claim, or all of them by one empty name."""
    return [
        name for request in named for device in reply.devices if request in ("", *device.request_names) for name in device.cdi_device_ids
    ]


def limits_in(node: Node, names: Sequence[str]) -> Mapping[str, int]:
    """What a container with these CDI names may hold, in MiB by UUID: its one limits file has it."""
    edits = resolve(load_registry([node.layout.cdi_static, node.layout.cdi_dynamic]), names)
    (path,) = [mount.host_path for mount in edits.mounts if mount.container_path == contract.CONTAINER_LIMITS]
    return {device.uuid: device.memory_bytes // MIB for device in decode_limits(Path(path).read_bytes()).devices}


def claim_of(item: Object) -> dra_pb2.Claim:
    """A claim as kubelet names it."""
    metadata = item["metadata"]
    return dra_pb2.Claim(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
