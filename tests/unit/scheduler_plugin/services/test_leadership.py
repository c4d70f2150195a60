# SPDX-License-Identifier: Apache-2.0
import asyncio
from typing import Any, cast

import pytest

from aliquot.kube.errors import KubeApiError, KubeConflictError
from scheduler_plugin.ports import LeaseRecord
from scheduler_plugin.services import leadership
from scheduler_plugin.services.leadership import AGAIN_SECONDS, LEASE_SECONDS, RENEW_SECONDS, Following, Leadership


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def monotonic(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time


class Lease:
    """The stored lease; ``down`` makes the API unreachable."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.writes = 0
        self.down = False

    async def read(self) -> LeaseRecord | None:
        if self.down:
            raise KubeApiError("down")
        return self.record

    async def write(self, holder: str, duration_seconds: float, transitions: int, version: str | None) -> LeaseRecord:
        if self.down:
            raise KubeApiError("down")
        if version != (self.record and self.record.version):
            raise KubeConflictError("changed")
        self.writes += 1
        self.record = LeaseRecord(holder, duration_seconds, f"renewal {self.writes}", transitions, str(self.writes))
        return self.record


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lease():
    return Lease()


async def test_the_first_replica_leads_and_the_second_waits(clock, lease):
    first, second = Leadership(lease, clock, "a"), Leadership(lease, clock, "b")
    await first._step()
    await second._step()
    assert (first.leads, second.leads) == (True, False)


async def test_a_leader_falls_silent_before_anybody_can_take_over(clock, lease):
    first, second = Leadership(lease, clock, "a"), Leadership(lease, clock, "b")
    await first._step()
    await second._step()
    started = clock.time
    while not second.leads:
        clock.time += 0.5
        await second._step()
        assert not (first.leads and second.leads)
    assert not first.leads
    assert clock.time - started >= LEASE_SECONDS


async def test_renewal_keeps_lead_and_reports_it_once(clock, lease):
    first, reported = Leadership(lease, clock, "a"), []
    first.on_acquired = lambda: reported.append(clock.time)
    for _ in range(20):
        await first._step()
        clock.time += 2
        assert first.leads
    assert reported == [1000.0]


async def test_api_outage_ends_lead_in_time_and_lead_returns(clock, lease):
    first, reported = Leadership(lease, clock, "a"), []
    first.on_acquired = lambda: reported.append(clock.time)
    await first._step()
    lease.down = True
    clock.time += RENEW_SECONDS
    await first._step()
    assert not first.leads
    lease.down = False
    await first._step()
    assert first.leads
    assert len(reported) == 2, "the pods are listed again after every gap"


async def test_the_clock_of_the_holder_does_not_matter(clock, lease):
    lease.record = LeaseRecord("a", LEASE_SECONDS, "1970-01-01T00:00:00Z", 3, "7")
    second = Leadership(lease, clock, "b")
    await second._step()
    clock.time += LEASE_SECONDS - 0.1
    await second._step()
    assert not second.leads
    clock.time += 0.2
    await second._step()
    assert second.leads
    assert lease.record.transitions == 4


async def test_of_two_that_take_a_lease_at_once_one_does(clock, lease):
    first, second = Leadership(lease, clock, "a"), Leadership(lease, clock, "b")
    seen = lease.record

    async def stale() -> LeaseRecord | None:
        return seen

    await first._step()
    second._api = type("Stale", (), {"read": staticmethod(stale), "write": lease.write})()
    await second._step()
    assert (first.leads, second.leads) == (True, False)


async def test_follower_leads_while_kube_scheduler_on_its_host_holds_lease(clock, lease):
    following, taken = Following(lease, clock, "pod-a", clock.monotonic, retry_seconds=0.0), []
    following.on_acquired = lambda: taken.append(lease.record.holder)
    looks = asyncio.create_task(following.run())

    async def seen(holder: str) -> bool:
        lease.record = LeaseRecord(holder, 15.0, "r", 0, "1")
        await asyncio.sleep(0.01)
        return following.leads

    assert not following.leads
    assert not await seen("pod-b_0b1f")
    assert await seen("pod-a_77aa")
    assert not await seen("pod-a-2_77aa")
    assert not await seen("")
    assert await seen("pod-a_78bb")
    assert taken == ["pod-a_77aa", "pod-a_78bb"], "once each time that it took over"
    lease.down = True
    await asyncio.sleep(0.01)
    assert following.leads
    clock.time += RENEW_SECONDS
    assert not following.leads
    looks.cancel()


class Beside:
    """A Following on ``pod-a``, what it was notified of, and how often it read the lease.

    The pods are listed at once, or in ``list_seconds``.
    """

    def __init__(self, clock: Clock, lease: Lease) -> None:
        self.clock, self.lease = clock, lease
        self.reads = 0
        self.hangs = False
        self.read_seconds = 0.0
        self.list_seconds = 0.0
        self.taken: list[float] = []
        self.lists: list[tuple[float, float]] = []
        """When each list of pods began and ends."""
        self.following = Following(cast(Any, self), clock, "pod-a", self.pods_caught_up_at)
        self.following.on_acquired = self.relist

    def relist(self) -> None:
        now = self.clock.time
        self.taken.append(self.following.acquired_at)
        self.lists = [*(times for times in self.lists if times[1] <= now), (now, now + self.list_seconds)]

    def pods_caught_up_at(self) -> float:
        return max((begun for begun, ends in self.lists if ends <= self.clock.time), default=float("-inf"))

    @property
    def decides(self) -> bool:
        return self.following.leads and self.pods_caught_up_at() >= self.following.acquired_at

    async def read(self) -> LeaseRecord | None:
        self.reads += 1
        if self.hangs:
            await asyncio.sleep(3600)
        self.clock.time += self.read_seconds
        return await self.lease.read()

    def holds(self, holder: str, transitions: int = 0) -> None:
        self.lease.record = LeaseRecord(holder, 15.0, "r", transitions, "1")

    async def polls(self) -> None:
        self.clock.time += 2.0
        await self.following._read()

    async def is_called(self) -> bool:
        """Call it as a verb does; return whether it leads."""
        self.clock.time += 0.5
        await self.following.called()
        return self.following.leads


@pytest.fixture
def beside(clock, lease):
    return Beside(clock, lease)


async def test_lease_unreadable_at_first_later_shows_new_leader(beside):
    beside.lease.down = True
    await beside.polls()
    beside.lease.down = False
    beside.holds("pod-a_1")
    await beside.polls()
    assert beside.taken == [beside.clock.time]


@pytest.mark.parametrize("then", [("pod-a_2", 3), ("pod-a_1", 4)])
async def test_unseen_interim_leader_is_noticed_by_holder_or_transitions(beside, then):
    beside.holds("pod-a_1", 2)
    await beside.polls()
    await beside.polls()
    assert len(beside.taken) == 1
    beside.lease.down = True
    await beside.polls()
    beside.lease.down = False
    beside.holds(*then)
    await beside.polls()
    assert len(beside.taken) == 2


async def test_call_reads_lease_at_once_only_when_leader_is_unknown(beside):
    beside.holds("pod-b_1")
    await beside.polls()
    beside.holds("pod-a_1", 1)
    assert await beside.is_called()
    assert (beside.reads, beside.taken) == (2, [beside.clock.time])
    for _ in range(100):
        assert await beside.is_called()
    assert beside.reads == 2


@pytest.mark.parametrize("holder", ["pod-b_1", ""])
async def test_calls_of_non_leading_kube_scheduler_share_lease_read(beside, holder):
    beside.holds(holder)
    await beside.polls()
    beside.clock.time += 0.5
    await asyncio.gather(*(beside.following.called() for _ in range(50)))
    assert not beside.following.leads
    assert beside.reads <= 3
    assert beside.taken == []


@pytest.mark.parametrize("trouble", ["refuses", "hangs", "has no such lease"])
async def test_call_counts_with_silent_lease_after_earlier_changes_are_listed(beside, monkeypatch, trouble):
    monkeypatch.setattr(leadership, "LOOK_SECONDS", 0.05)
    beside.hangs, beside.lease.down = trouble == "hangs", trouble == "refuses"
    assert await beside.is_called()
    assert beside.taken == [beside.clock.time]
    for _ in range(100):
        assert await beside.is_called()
    assert (beside.reads, len(beside.taken)) == (1, 1), "while calls come it goes on as it is"
    beside.clock.time += RENEW_SECONDS
    assert not beside.following.leads
    assert await beside.is_called()
    assert len(beside.taken) == 2, "another may have led since the last call"


async def test_a_lease_that_names_another_ends_what_calls_began(beside):
    beside.lease.down = True
    assert await beside.is_called()
    beside.lease.down = False
    beside.holds("pod-b_1")
    await beside.polls()
    assert not beside.following.leads
    assert not await beside.is_called()


@pytest.mark.parametrize("between_seconds", [2.0, 12.5, 14.5])
@pytest.mark.parametrize("list_seconds", [13.0, 20.0, 41.0])
async def test_calls_rarer_than_pod_listings_get_reply(beside, list_seconds, between_seconds):
    beside.lease.down, beside.list_seconds = True, list_seconds
    while not beside.decides:
        assert beside.clock.time < 1000.0 + list_seconds + between_seconds + 1.0
        assert await beside.is_called()
        beside.clock.time += 0 if beside.decides else between_seconds
    assert len(beside.taken) == 1, "the list that is under way goes on"
    beside.clock.time += RENEW_SECONDS + AGAIN_SECONDS
    await beside.is_called()
    assert len(beside.taken) == 2, "that is over: another may have led since"


async def test_leader_seen_meanwhile_causes_new_pod_listing(beside):
    beside.lease.down, beside.list_seconds = True, 40.0
    await beside.is_called()
    beside.lease.down = False
    beside.holds("pod-b_1", 1)
    await beside.polls()
    beside.lease.down = True
    await beside.polls()
    await beside.is_called()
    assert len(beside.taken) == 2
    beside.lease.down = False
    beside.holds("pod-a_2", 2)
    await beside.polls()
    assert beside.taken[2:] == [beside.clock.time], "it may have been another that was read before, and led until now"
    while not beside.decides:
        await beside.polls()
    assert beside.lists == [(beside.taken[2], beside.taken[2] + 40.0)]


async def test_unchanged_lease_makes_up_for_unanswered_calls(beside):
    beside.holds("pod-a_1", 1)
    await beside.polls()
    assert beside.decides
    beside.lease.down, beside.list_seconds = True, 40.0
    beside.clock.time += RENEW_SECONDS
    assert await beside.is_called()
    assert not beside.decides
    beside.lease.down = False
    await beside.polls()
    assert beside.decides


async def test_leader_keeps_lead_while_lease_read_lasts_kube_scheduler_timeout(beside, monkeypatch):
    beside.read_seconds = 4.9
    beside.holds("pod-a_1")
    leads, answer = [], beside.lease.read

    async def read() -> LeaseRecord | None:
        leads.append(beside.following.leads)
        return await answer()

    async def sleep(seconds: float) -> None:
        beside.clock.time += max(0.0, seconds)
        if len(leads) == 20:
            raise asyncio.CancelledError

    beside.lease.read = read

    monkeypatch.setattr("scheduler_plugin.services.leadership.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await beside.following.run()
    assert leads == [False] + 19 * [True], "also when the next answer comes"
    assert len(beside.taken) == 1
