# ruff: noqa
# fmt: off
"""Types of the services in drahealth.proto, generated beside them. Calls and handlers are asyncio's."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio

from aliquot.kubelet_api import drahealth_pb2

class DRAResourceHealthStub:
    NodeWatchResources: grpc.aio.UnaryStreamMultiCallable[drahealth_pb2.NodeWatchResourcesRequest, drahealth_pb2.NodeWatchResourcesResponse]
    def __init__(self, channel: grpc.aio.Channel) -> None: ...

class DRAResourceHealthServicer:
    def NodeWatchResources(
        self, request: drahealth_pb2.NodeWatchResourcesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[drahealth_pb2.NodeWatchResourcesResponse]: ...

def add_DRAResourceHealthServicer_to_server(servicer: DRAResourceHealthServicer, server: grpc.aio.Server) -> None: ...
