# ruff: noqa
# fmt: off
"""Types of the services in dra.proto, generated beside them. Calls and handlers are asyncio's."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio

from aliquot.kubelet_api import dra_pb2

class DRAPluginStub:
    NodePrepareResources: grpc.aio.UnaryUnaryMultiCallable[dra_pb2.NodePrepareResourcesRequest, dra_pb2.NodePrepareResourcesResponse]
    NodeUnprepareResources: grpc.aio.UnaryUnaryMultiCallable[dra_pb2.NodeUnprepareResourcesRequest, dra_pb2.NodeUnprepareResourcesResponse]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class DRAPluginServicer:
    def NodePrepareResources(
        self, request: dra_pb2.NodePrepareResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[dra_pb2.NodePrepareResourcesResponse]: ...
    def NodeUnprepareResources(
        self, request: dra_pb2.NodeUnprepareResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[dra_pb2.NodeUnprepareResourcesResponse]: ...

def add_DRAPluginServicer_to_server(servicer: DRAPluginServicer, server: grpc.aio.Server) -> None: ...
