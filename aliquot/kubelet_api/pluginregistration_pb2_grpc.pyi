# ruff: noqa
# fmt: off
"""Types of the services in pluginregistration.proto, generated beside them. Calls and handlers are asyncio's."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio

from aliquot.kubelet_api import pluginregistration_pb2

class RegistrationStub:
    GetInfo: grpc.aio.UnaryUnaryMultiCallable[pluginregistration_pb2.InfoRequest, pluginregistration_pb2.PluginInfo]
    NotifyRegistrationStatus: grpc.aio.UnaryUnaryMultiCallable[pluginregistration_pb2.RegistrationStatus, pluginregistration_pb2.RegistrationStatusResponse]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class RegistrationServicer:
    def GetInfo(
        self, request: pluginregistration_pb2.InfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[pluginregistration_pb2.PluginInfo]: ...
    def NotifyRegistrationStatus(
        self, request: pluginregistration_pb2.RegistrationStatus, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[pluginregistration_pb2.RegistrationStatusResponse]: ...

def add_RegistrationServicer_to_server(servicer: RegistrationServicer, server: grpc.aio.Server) -> None: ...
