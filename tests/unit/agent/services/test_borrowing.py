import asyncio
import threading

import pytest

from agent.core.borrowing import MOST_PERCENT
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.core.region_layout import MAX_DEVICES, ComputeCounters
from agent.services.borrowing import Borrower, Look
from proto.model import CoresMode, Preferences
from tests.unit.agent.builders import board, grant, ids, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, settle, until

WEIGHT = Preferences(cores_mode=CoresMode.WEIGHT)
A = grant(ids("0:0"), share(0, cores=30), of=pod("a"))
B = grant(ids("0:1"), share(0, cores=50), of=pod("b"))
HARD = grant(ids("0:2"), share(0, cores=20), of=pod("hard"))


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
        self.book = self.disk.book()
        self.clock = FakeClock()
        self.files = Counted(self.disk)
        self.borrower = Borrower(book=self.book, files=self.files, clock=self.clock)

    async def granted(self, *pairs) -> None:
        for one, preferences in pairs:
            limits = limits_of(one, FailPolicy.CLOSED, preferences)
            await self.book.commit(Planned(one, (), preferences), limits, dict, board(), 16)

    def period(self, current, **percent: int) -> bool:
        """Let each named container be held back at so much use for a period, and look; return whether a borrower is at work."""
        self.clock.seconds += 0.1
        for one in (A, B, HARD):
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


async def test_a_ceiling_asked_for_as_one_is_not_touched(node):
    await node.granted((A, WEIGHT), (HARD, Preferences()))
    current = node.borrower.find()
    node.period(current)
    node.period(current, a=30, hard=20)
    assert (node.ceiling(A), node.ceiling(HARD)) == (80, 20)


async def test_devices_without_a_borrower_are_not_looked_at(node):
    await node.granted((B, Preferences()), (HARD, Preferences()))
    assert node.borrower.find().devices == {}


@pytest.mark.parametrize(
    "following",
    [grant(ids("0:0"), share(1, cores=20), of=pod("next")), grant(ids("0:0"), share(0, cores=20), of=pod("next"))],
    ids=["of another device", "of the same device"],
)
async def test_limits_that_were_written_anew_between_two_looks_are_left_alone(node, following):
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


async def test_a_grant_that_is_gone_between_two_looks_harms_nobody(node):
    await node.granted((A, WEIGHT), (B, WEIGHT))
    current = node.borrower.find()
    node.period(current)
    node.disk.files.remove(A.grant_id)
    node.period(current, a=30, b=50)
    assert node.ceiling(B) == 62


async def test_the_loop_sleeps_until_there_is_a_borrower(node):
    looks = []
    node.borrower.look = lambda current: looks.append(current) or Look((), working=False)
    running = asyncio.ensure_future(node.borrower.run())
    await node.granted((HARD, Preferences()))
    await asyncio.sleep(0.05)
    await settle()
    assert looks == []
    await node.granted((A, WEIGHT))
    await until(lambda: looks)
    await node.book.release([A])
    await asyncio.sleep(0.05)
    count = len(looks)
    await asyncio.sleep(0.7)
    assert len(looks) == count
    running.cancel()


@pytest.mark.timeout(60)
async def test_a_region_that_takes_long_to_look_at_holds_up_no_file_work(node, monkeypatch):
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
    await node.book.on_disk(lambda: None)
    done.set()
    running.cancel()
