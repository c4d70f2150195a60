# SPDX-License-Identifier: Apache-2.0
"""Kubelet's calls wait until the agent has the ledger, and an agent that leaves finishes them."""

import asyncio

import pytest

from agent.services import driver_front as module
from agent.services.driver_front import DriverFront
from agent.services.telemetry import Telemetry
from aliquot.kubelet_api import dra_pb2 as pb
from aliquot.kubelet_api import drahealth_pb2
from tests.unit.agent.fakes import settle


class FakeDriver:
    """Answers when it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def NodePrepareResources(self, request, context):
        await self.may_answer.wait()
        return pb.NodePrepareResourcesResponse(claims={one.uid: pb.NodePrepareResourceResponse() for one in request.claims})

    async def NodeUnprepareResources(self, request, context):
        await self.may_answer.wait()
        return pb.NodeUnprepareResourcesResponse(claims={one.uid: pb.NodeUnprepareResourceResponse() for one in request.claims})


class FakeHealth:
    """Sends one message."""

    def end_streams(self) -> None:
        pass

    async def NodeWatchResources(self, request, context):
        yield drahealth_pb2.NodeWatchResourcesResponse()


@pytest.fixture
async def front():
    return DriverFront(None, Telemetry())


def calls_of(front: DriverFront):
    claim = pb.Claim(namespace="default", name="train", uid="u")
    return [
        asyncio.ensure_future(front.NodePrepareResources(pb.NodePrepareResourcesRequest(claims=[claim]), None)),
        asyncio.ensure_future(front.NodeUnprepareResources(pb.NodeUnprepareResourcesRequest(claims=[claim]), None)),
    ]


async def test_calls_wait_for_ledger_and_are_answered_then(front):
    waiting = calls_of(front)
    await settle()
    assert not any(one.done() for one in waiting)
    driver = FakeDriver()
    driver.may_answer.set()
    front.open(driver, FakeHealth())
    assert [(await one).claims["u"].error for one in waiting] == ["", ""]


async def test_call_that_waits_too_long_has_the_reason(front, monkeypatch):
    monkeypatch.setattr(module, "HOLD_SECONDS", 0.01)
    for call in calls_of(front):
        assert "another agent of this node still has its ledger" in (await call).claims["u"].error


async def test_agent_leaves_when_its_calls_are_finished(front, monkeypatch):
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)
    driver = FakeDriver()
    front.open(driver, FakeHealth())
    calls = calls_of(front)
    await settle()
    leaving = asyncio.ensure_future(front.drain())
    await settle()
    assert not leaving.done()
    driver.may_answer.set()
    await asyncio.gather(*calls, leaving)


async def test_agent_does_not_wait_for_a_call_that_never_ends(front, monkeypatch):
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.05)
    front.open(FakeDriver(), FakeHealth())
    calls = calls_of(front)
    await front.drain()
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()


async def test_stream_of_health_begins_with_the_ledger_or_ends_without_it(front):
    async def messages() -> int:
        return len([one async for one in front.NodeWatchResources(drahealth_pb2.NodeWatchResourcesRequest(), None)])

    first = asyncio.ensure_future(messages())
    await settle()
    front.end_streams()
    assert await first == 0
    second = asyncio.ensure_future(messages())
    await settle()
    front.open(FakeDriver(), FakeHealth())
    assert await second == 1
