# SPDX-License-Identifier: Apache-2.0
"""Kubelet's own fault, as far as we can cause it: a list between the choice of IDs and their record makes it give them out twice."""

import asyncio
import time

import pytest

from agent.errors import KubeletError
from agent.services import admissions as under_test
from agent.services.admissions import Admissions
from tests.unit.agent.fakes import FakeKubeletCheckpoint, FakePodResources, settle

SLOW_SECONDS = 0.03


class Kubelet(FakePodResources):
    """Notes what happens in which order; a list takes a while, and kubelet counts what is allocated at any moment of it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = FakeKubeletCheckpoint()
        self.record_seconds = 0.001
        self.noted: list[str] = []
        self.chosen_unrecorded = False
        self.given_twice = 0

    async def held(self):
        unrecorded = self.chosen_unrecorded
        await asyncio.sleep(SLOW_SECONDS)
        self.noted.append("listed")
        self.given_twice += unrecorded or self.chosen_unrecorded
        return await super().held()

    async def admit(self, admissions: Admissions) -> None:
        """Ask for preferred IDs, choose some, have them allocated, and record them a moment after the answer."""
        await admissions.announced()
        self.chosen_unrecorded = True
        await asyncio.sleep(0.002)  # on the way to us
        with admissions.allocating():
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.record_seconds)
        self.chosen_unrecorded = False
        self.noted.append("recorded")
        if self.memory.writes is not None:
            self.memory.writes += 1


@pytest.fixture
def kubelet() -> Kubelet:
    return Kubelet()


@pytest.fixture
def admissions(kubelet: Kubelet) -> Admissions:
    return Admissions(kubelet, kubelet.memory, time.monotonic)


async def test_requests_during_allocation_are_listed_after_its_record(kubelet, admissions):
    admitting = asyncio.create_task(kubelet.admit(admissions))
    await asyncio.sleep(0)
    await admissions.held()
    await admitting
    assert kubelet.noted == ["recorded", "listed"]


async def test_busy_node_may_record_allocation_long_after_reply(kubelet, admissions):
    kubelet.memory.writes = 0
    kubelet.record_seconds = 5 * under_test.RECORDED_SECONDS
    admitting = asyncio.create_task(kubelet.admit(admissions))
    await asyncio.sleep(0)
    await admissions.held()
    await admitting
    assert kubelet.noted == ["recorded", "listed"]


async def test_allocation_abandoned_by_kubelet_delays_others_briefly(kubelet, admissions, monkeypatch):
    monkeypatch.setattr(under_test, "GIVEN_UP_SECONDS", 0.05)
    monkeypatch.setattr(under_test, "MOST_SECONDS", 60.0)
    kubelet.memory.writes = 0
    with admissions.allocating():
        pass
    await asyncio.wait_for(admissions.held(), 30)
    assert kubelet.noted == ["listed"]


async def test_kubelet_chooses_no_ids_while_something_is_being_listed(kubelet, admissions):
    listing = asyncio.create_task(admissions.held())
    await settle()
    await kubelet.admit(admissions)
    await listing
    assert kubelet.noted == ["listed", "recorded"]


async def test_many_pods_and_many_lists_do_not_meet(kubelet, admissions):
    async def list_often() -> None:
        for _ in range(5):
            await admissions.held()

    async def admit_all() -> None:
        for _ in range(10):
            await kubelet.admit(admissions)
            await asyncio.sleep(0.03)

    await asyncio.gather(admit_all(), *(list_often() for _ in range(4)))
    assert kubelet.noted.count("listed") >= 5
    assert (kubelet.noted.count("recorded"), kubelet.given_twice) == (10, 0)


async def test_all_who_wait_for_the_end_of_an_allocation_share_one_list(kubelet, admissions):
    admitting = asyncio.create_task(kubelet.admit(admissions))
    await asyncio.sleep(0.01)
    await asyncio.gather(*(admissions.held() for _ in range(20)), admitting)
    assert kubelet.noted == ["recorded", "listed"]


async def test_in_a_burst_of_pods_many_are_allocated_between_two_lists(kubelet, admissions):
    async def list_for_ever() -> None:
        while True:
            await admissions.held()

    listing = asyncio.create_task(list_for_ever())
    await asyncio.sleep(0)
    for _ in range(60):
        await kubelet.admit(admissions)
    listing.cancel()
    lists = kubelet.noted.count("listed")
    assert 1 <= lists <= 60 / 3
    assert kubelet.given_twice == 0


async def test_continuous_pods_and_list_alternate(kubelet, admissions, monkeypatch):
    monkeypatch.setattr(under_test, "RECORDED_SECONDS", 0.01)
    monkeypatch.setattr(under_test, "BURST_SECONDS", 0.05)
    ends = asyncio.Event()

    async def admit_all() -> None:
        while not ends.is_set():
            await kubelet.admit(admissions)

    admitting = asyncio.create_task(admit_all())
    async with asyncio.timeout(60):
        for _ in range(10):
            await admissions.held()
        ends.set()
        await admitting
    assert kubelet.noted.count("recorded") >= 9
    assert kubelet.given_twice == 0


async def test_announced_allocation_that_never_comes_delays_others_briefly(kubelet, admissions, monkeypatch):
    monkeypatch.setattr(under_test, "ANNOUNCED_SECONDS", 0.05)
    await admissions.announced()
    await asyncio.wait_for(admissions.held(), 30)
    assert kubelet.noted == ["listed"]


async def test_hung_allocation_delays_list_only_for_limited_time(kubelet, admissions, monkeypatch):
    monkeypatch.setattr(under_test, "MOST_SECONDS", 0.05)
    with admissions.allocating():
        await asyncio.wait_for(admissions.held(), 30)
    assert kubelet.noted == ["listed"]


async def test_a_list_that_fails_is_over(kubelet, admissions):
    kubelet.listing = None
    with pytest.raises(KubeletError):
        await admissions.held()
    await asyncio.wait_for(admissions.announced(), 0.5)


async def test_ids_offered_by_kubelet_can_be_requested_any_time(kubelet, admissions):
    kubelet.offered = ["GPU-0::0"]
    with admissions.allocating():
        assert await admissions.allocatable_ids("nvidia.com/vgpu") == ["GPU-0::0"]
