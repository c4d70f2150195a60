# SPDX-License-Identifier: Apache-2.0
"""The agent as a DRA driver, as kubelet calls it. Kubelet reads only the entries of the claims it named, so each has one."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

import grpc.aio

from agent.core.claims import ClaimRef
from agent.core.identity import cdi_devices, cdi_name
from agent.core.ledger import ClaimRequest, Grant
from agent.core.refusal import Refusal
from agent.services.claims import LAST_TRY_SECONDS, WAIT_SECONDS, ClaimManager
from aliquot import contract
from aliquot.kubelet_api import dra_pb2 as pb
from aliquot.kubelet_api.dra_pb2_grpc import DRAPluginServicer

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
REPLY_SECONDS: Final = 2.0
"""How long before kubelet gives up a call its reply must leave, because kubelet then shows no reason."""


class DraPlugin(DRAPluginServicer):
    """Serves claims. The claims of one call are prepared side by side."""

    def __init__(self, claims: ClaimManager) -> None:
        self._claims = claims

    async def NodePrepareResources(self, request: pb.NodePrepareResourcesRequest, context: Context) -> pb.NodePrepareResourcesResponse:
        """Prepare claims; a claim that is not prepared has the reason in its entry."""
        refs = [_ref(claim) for claim in request.claims]
        wait_seconds = _wait_seconds(context.time_remaining())
        outcomes = await _side_by_side([self._claims.prepare(ref, wait_seconds) for ref in refs])
        return pb.NodePrepareResourcesResponse(
            claims={
                ref.uid: pb.NodePrepareResourceResponse(error=f"{contract.PRODUCT}: {outcome.message}")
                if isinstance(outcome, Refusal)
                else pb.NodePrepareResourceResponse(devices=devices_of(outcome))
                for ref, outcome in zip(refs, outcomes, strict=True)
            }
        )

    async def NodeUnprepareResources(
        self, request: pb.NodeUnprepareResourcesRequest, context: Context
    ) -> pb.NodeUnprepareResourcesResponse:
        """Release claims; unknown ones are released already."""
        refs = [_ref(claim) for claim in request.claims]
        troubles = await _side_by_side([self._claims.unprepare(ref) for ref in refs])
        return pb.NodeUnprepareResourcesResponse(
            claims={ref.uid: pb.NodeUnprepareResourceResponse(error=trouble) for ref, trouble in zip(refs, troubles, strict=True)}
        )


def devices_of(grants: Iterable[Grant]) -> list[pb.Device]:
    """Return the devices of prepared requests. A request has one CDI device for all its GPUs; it is listed with the first.

    Requests that a container uses together have a CDI device each, for the same grant: kubelet passes on those of all requests that the
    container names, and not every runtime drops a name that comes twice.
    """
    return [device for grant in grants if grant.claim is not None for device in _devices_of(grant.grant_id, grant.claim)]


def _devices_of(grant_id: str, claim: ClaimRequest) -> Iterable[pb.Device]:
    names = dict(zip(claim.names, cdi_devices(grant_id, len(claim.names)), strict=True))
    for device in claim.devices:
        request = device.request or claim.request
        name = names.pop(request, None)
        yield pb.Device(
            request_names=[request],
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=[cdi_name(name)] if name is not None else [],
            share_id=device.share_id or None,
        )


def _wait_seconds(left_seconds: float | None) -> float:
    """Return how long a call may wait. Args: left_seconds: until kubelet gives up; None without a limit."""
    return WAIT_SECONDS if left_seconds is None else max(0.0, min(WAIT_SECONDS, left_seconds - LAST_TRY_SECONDS - REPLY_SECONDS))


async def _side_by_side(calls: Sequence[Coroutine[None, None, T]]) -> Sequence[T]:
    if len(calls) == 1:  # nearly always, and without a task of its own it is faster
        return [await calls[0]]
    return await asyncio.gather(*calls)


def _ref(claim: pb.Claim) -> ClaimRef:
    return ClaimRef(claim.namespace, claim.name, claim.uid)
