# ruff: noqa
# fmt: off
"""Types of the services in deviceplugin.proto, generated beside them. Calls and handlers are asyncio's."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio

from aliquot.kubelet_api import deviceplugin_pb2

class RegistrationStub:
    Register: grpc.aio.UnaryUnaryMultiCallable[deviceplugin_pb2.RegisterRequest, deviceplugin_pb2.Empty]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class RegistrationServicer:
    def Register(
        self, request: deviceplugin_pb2.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[deviceplugin_pb2.Empty]: ...

def add_RegistrationServicer_to_server(servicer: RegistrationServicer, server: grpc.aio.Server) -> None: ...

class DevicePluginStub:
    GetDevicePluginOptions: grpc.aio.UnaryUnaryMultiCallable[deviceplugin_pb2.Empty, deviceplugin_pb2.DevicePluginOptions]
    ListAndWatch: grpc.aio.UnaryStreamMultiCallable[deviceplugin_pb2.Empty, deviceplugin_pb2.ListAndWatchResponse]
    GetPreferredAllocation: grpc.aio.UnaryUnaryMultiCallable[deviceplugin_pb2.PreferredAllocationRequest, deviceplugin_pb2.PreferredAllocationResponse]
    Allocate: grpc.aio.UnaryUnaryMultiCallable[deviceplugin_pb2.AllocateRequest, deviceplugin_pb2.AllocateResponse]
    PreStartContainer: grpc.aio.UnaryUnaryMultiCallable[deviceplugin_pb2.PreStartContainerRequest, deviceplugin_pb2.PreStartContainerResponse]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class DevicePluginServicer:
    def GetDevicePluginOptions(
        self, request: deviceplugin_pb2.Empty, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[deviceplugin_pb2.DevicePluginOptions]: ...
    def ListAndWatch(
        self, request: deviceplugin_pb2.Empty, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[deviceplugin_pb2.ListAndWatchResponse]: ...
    def GetPreferredAllocation(
        self, request: deviceplugin_pb2.PreferredAllocationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[deviceplugin_pb2.PreferredAllocationResponse]: ...
    def Allocate(
        self, request: deviceplugin_pb2.AllocateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[deviceplugin_pb2.AllocateResponse]: ...
    def PreStartContainer(
        self, request: deviceplugin_pb2.PreStartContainerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[deviceplugin_pb2.PreStartContainerResponse]: ...

def add_DevicePluginServicer_to_server(servicer: DevicePluginServicer, server: grpc.aio.Server) -> None: ...
