# ruff: noqa
# fmt: off
"""Types of the services in podresources.proto, generated beside them. Calls and handlers are asyncio's."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio

from aliquot.kubelet_api import podresources_pb2

class PodResourcesListerStub:
    List: grpc.aio.UnaryUnaryMultiCallable[podresources_pb2.ListPodResourcesRequest, podresources_pb2.ListPodResourcesResponse]
    GetAllocatableResources: grpc.aio.UnaryUnaryMultiCallable[podresources_pb2.AllocatableResourcesRequest, podresources_pb2.AllocatableResourcesResponse]
    Get: grpc.aio.UnaryUnaryMultiCallable[podresources_pb2.GetPodResourcesRequest, podresources_pb2.GetPodResourcesResponse]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class PodResourcesListerServicer:
    def List(
        self, request: podresources_pb2.ListPodResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[podresources_pb2.ListPodResourcesResponse]: ...
    def GetAllocatableResources(
        self, request: podresources_pb2.AllocatableResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[podresources_pb2.AllocatableResourcesResponse]: ...
    def Get(
        self, request: podresources_pb2.GetPodResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Awaitable[podresources_pb2.GetPodResourcesResponse]: ...

def add_PodResourcesListerServicer_to_server(servicer: PodResourcesListerServicer, server: grpc.aio.Server) -> None: ...
