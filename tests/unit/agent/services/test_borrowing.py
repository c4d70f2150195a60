# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
from typing import cast

import pytest

from agent.core.borrowing import MOST_PERCENT
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.core.region_layout import MAX_DEVICES, ComputeCounters
from agent.ports.grants import ContainerFiles
from agent.services import changes
from agent.services.borrowing import Borrower, Look
from aliquot.contract.model import CoresMode, Preferences
from tests.unit.agent.builders import grant, ids, inventory, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, settle, until

WEIGHT = Preferences(cores_mode=CoresMode.WEIGHT)
A = grant(ids("0:0"), share(0, cores=30), of=pod("a"))
B = grant(ids("0:1"), share(0, cores=50), of=pod("b"))
HARD = grant(ids("0:2"), share(0, cores=20), of=pod("hard"))
OTHER = grant(ids("0:3"), share(0), of=pod("other"))


class Counted:
    """The files of the grants, with what each container paid as the test says."""

    def __init__(self, disk: Disk) -> None:
        self._files = disk.files
        self.limits = disk.files.limits
        self.amend_limits = disk.files.amend_limits
        self.paid: dict[str, ComputeCounters] = {}

    def compute(self, grant_id):
        return (self.paid.get(grant_id, ComputeCounters(0, 0)),) * MAX_DEVICES


class Harness:
    def __init__(self, base) -> None:
        self.disk = Disk(base)
        self.manager = self.disk.manager()
        self.clock = FakeClock()
        self.files = Counted(self.disk)
        # The borrower calls only the three methods that Counted has.
        self.borrower = Borrower(manager=self.manager, files=cast(ContainerFiles, self.files), clock=self.clock)

    async def granted(self, *pairs) -> None:
        for one, preferences in pairs:
            limits = limits_of(one, FailPolicy.CLOSED, preferences)
            await self.manager.commit(Planned(one, (), preferences), limits, dict, inventory(), 16)

    def period(self, current, **percent: int) -> bool:
        """Let each named container be held back at so much use for a period, and look; return whether a borrower is at work."""
        self.clock.seconds += 0.1
        for one in (A, B, HARD, OTHER):
            if used := percent.get(one.pod):
                before = self.files.paid.get(one.grant_id, ComputeCounters(0, 0))
                self.files.paid[one.grant_id] = ComputeCounters(before.paid_ns + used * 1_000_000, before.starved_at_ns + 1)
        look = self.borrower.look(current)
        self.borrower.move(look.moves)
        return look.working

    def ceiling(self, one) -> int:
        return self.disk.files.limits(one.grant_id).devices[0].sm_percent


@pytest.fixture
def node(tmp_path):
    return Harness(tmp_path)


async def test_a_busy_tenant_borrows_and_gives_back_within_a_period(node):
    await node.granted((A, WEIGHT), (B, WEIGHT))
    current = node.borrower.find()
    assert not node.period(current)  # the first look only learns where the counters stand
    assert node.period(current, a=30)
    assert (node.ceiling(A), node.ceiling(B)) == (MOST_PERCENT, 50)
    node.period(current, a=99, b=50)
    assert (node.ceiling(A), node.ceiling(B)) == (37, 62)


async def test_explicitly_requested_ceiling_is_not_changed(node):
    await node.granted((A, WEIGHT), (HARD, Preferences()))
    current = node.borrower.find()
    node.period(current)
    node.period(current, a=30, hard=20)
    assert (node.ceiling(A), node.ceiling(HARD)) == (80, 20)


async def test_container_without_cores_leaves_what_is_reserved_while_it_is_wanted(node):
    await node.granted((HARD, Preferences()), (OTHER, Preferences()))
    current = node.borrower.find()
    assert not node.period(current)
    assert node.ceiling(OTHER) == 0
    assert node.period(current, hard=20)
    assert (node.ceiling(OTHER), node.ceiling(HARD)) == (80, 20)
    for _ in range(12):
        node.period(current)
    assert node.ceiling(OTHER) == 0, "the other one rests"


async def test_container_without_cores_has_no_limit_after_the_others_are_gone(node):
    await node.granted((HARD, Preferences()), (OTHER, Preferences()))
    current = node.borrower.find()
    node.period(current)
    node.period(current, hard=20)
    await node.manager.release([HARD])
    node.period(node.borrower.find())
    assert node.ceiling(OTHER) == 0
    assert node.borrower.find().devices == {}


async def test_devices_without_borrower_are_skipped(node):
    await node.granted((B, Preferences()), (HARD, Preferences()))
    assert node.borrower.find().devices == {}


@pytest.mark.parametrize(
    "following",
    [grant(ids("0:0"), share(1, cores=20), of=pod("next")), grant(ids("0:0"), share(0, cores=20), of=pod("next"))],
    ids=["of another device", "of the same device"],
)
async def test_limits_rewritten_between_checks_are_kept(node, following):
    await node.granted((A, WEIGHT), (B, WEIGHT))
    current = node.borrower.find()
    node.period(current)
    await node.granted((following, Preferences()))
    node.period(current, a=30)
    assert node.ceiling(following) == 20


async def test_limits_with_fewer_devices_than_before_end_no_look(node):
    two = grant(ids("0:0", "1:0"), share(0, cores=30), share(1, cores=30), of=pod("a"))
    await node.granted((two, WEIGHT), (B, WEIGHT))
    current = node.borrower.find()
    node.period(current)
    node.disk.files.remove(two.grant_id)
    node.disk.files.prepare(two, limits_of(grant(ids("0:0"), share(0, cores=30)), FailPolicy.CLOSED, WEIGHT))
    node.files.paid[two.grant_id] = ComputeCounters(30_000_000, 1)
    assert node.period(current)


async def test_grant_removed_between_checks_is_harmless(node):
    await node.granted((A, WEIGHT), (B, WEIGHT))
    current = node.borrower.find()
    node.period(current)
    node.disk.files.remove(A.grant_id)
    node.period(current, a=30, b=50)
    assert node.ceiling(B) == 62


async def test_the_loop_sleeps_until_there_is_a_borrower(node):
    looks = []

    def noted(current):
        looks.append(current)
        return Look((), working=False)

    node.borrower.look = noted
    running = asyncio.ensure_future(node.borrower.run())
    await node.granted((HARD, Preferences()))
    await asyncio.sleep(0.05)
    await settle()
    assert looks == []
    await node.granted((A, WEIGHT))
    await until(lambda: looks)
    await node.manager.release([A])
    await asyncio.sleep(0.05)
    count = len(looks)
    await asyncio.sleep(0.7)
    assert len(looks) == count
    running.cancel()


@pytest.mark.timeout(60)
async def test_slow_region_does_not_delay_file_work(node, monkeypatch):
    await node.granted((A, WEIGHT), (B, WEIGHT))
    looking, done = threading.Event(), threading.Event()

    def takes_long(grant_id):
        looking.set()
        done.wait()

    monkeypatch.setattr(node.files, "compute", takes_long)
    running = asyncio.ensure_future(node.borrower.run())

    def has_begun() -> bool:
        node.clock.seconds += 0.1
        return looking.is_set()

    await until(has_begun)
    await node.manager.on_disk(lambda: None)
    done.set()
    running.cancel()


async def test_grants_of_a_burst_do_not_each_start_a_look_at_all(node, monkeypatch):
    monkeypatch.setattr(changes, "PACE_SECONDS", 3600)
    finds: list[None] = []
    find = node.borrower.find

    def noted():
        finds.append(None)
        return find()

    monkeypatch.setattr(node.borrower, "find", noted)
    await node.granted((A, WEIGHT))
    running = asyncio.ensure_future(node.borrower.run())
    await until(lambda: finds)
    for one in (B, HARD):
        await node.granted((one, WEIGHT))
        await settle()
    assert len(finds) == 1
    running.cancel()
