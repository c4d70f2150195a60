import asyncio
import threading
from dataclasses import replace

import pytest

from agent.core.cdi import HostSpecError, file_name
from agent.core.cdi_scans import ScanPace
from agent.core.drift import DriftKind, Snapshot, find_drifts
from agent.core.ledger import GRANT_ROWS
from agent.core.limits import FailPolicy, limits_of, pausing
from agent.core.planning import Planned
from agent.errors import StorageError
from proto.model import Preferences
from tests.unit.agent.builders import BOOT, board, grant, ids, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, settle, until


@pytest.fixture
def disk(tmp_path) -> Disk:
    return Disk(tmp_path)


async def commit(book, one, *superseded, spec=lambda: {"kind": "x"}):
    planned = Planned(one, superseded, Preferences())
    await book.commit(planned, limits_of(one, FailPolicy.CLOSED), spec, board(), 16)


def on_disk(disk: Disk) -> tuple[set[str], set[str], set[str]]:
    return set(disk.store.ids()), set(disk.files.ids()), set(disk.cdi.ids())


ONE = grant(ids("0:0"), share(0, 600), of=pod("a"))
OTHER = grant(ids("0:1"), share(0, 400), of=pod("b"))


async def test_a_pause_is_written_into_what_is_there_and_is_what_was_written(disk):
    book = disk.book()
    await commit(book, ONE)
    overhead = disk.files.amend_limits(
        ONE.grant_id, lambda limits: replace(limits, devices=(replace(limits.devices[0], overhead_bytes=7),))
    )
    for paused in (True, False):
        assert await book.pause(ONE, paused=paused)
        files = (await book.survey()).files[ONE.grant_id]
        assert files.limits == pausing(overhead, paused=paused)
        assert files.written_limits == pausing(limits_of(ONE, FailPolicy.CLOSED), paused=paused)


async def test_a_pause_after_a_restart_is_what_is_seen_first(disk):
    await commit(disk.book(), ONE)
    book = disk.book()
    book.load(ONE.boot_id)
    (known,) = book.ledger.grants.values()
    assert await book.pause(known, paused=True)
    files = (await book.survey()).files[ONE.grant_id]
    assert files.limits == files.written_limits == pausing(limits_of(ONE, FailPolicy.CLOSED), paused=True)


async def test_a_grant_that_is_over_is_not_paused(disk):
    book = disk.book()
    await commit(book, ONE)
    await book.release([ONE])
    assert not await book.pause(ONE, paused=True)


async def test_a_grant_has_row_files_and_spec(disk):
    await commit(disk.book(), ONE)
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_released_grant_leaves_nothing(disk):
    book = disk.book()
    await commit(book, ONE)
    await book.release([ONE])
    assert on_disk(disk) == (set(),) * 3
    assert not book.ledger.grants


async def test_grants_that_are_over_go_even_when_others_cannot(disk, monkeypatch):
    book = disk.book()
    third = grant(ids("1:0"), share(1), of=pod("c"))
    for one in (ONE, OTHER, third):
        await commit(book, one)
    remove = disk.cdi.remove

    def failing(identifier):
        if identifier != OTHER.grant_id:
            raise StorageError(f"removing {identifier}: read-only")
        remove(identifier)

    monkeypatch.setattr(disk.cdi, "remove", failing)
    with pytest.raises(StorageError, match=f"2 of 3 .*{ONE.grant_id}.*{third.grant_id}"):
        await book.release([ONE, OTHER, third])
    assert set(book.ledger.grants) == {ONE.grant_id, third.grant_id}


async def test_superseded_grants_go_with_their_files(disk):
    book = disk.book()
    await commit(book, ONE)
    bigger = grant(ids("0:0", "1:0"), share(0, 900), share(1, 900), of=pod("a"))
    await commit(book, bigger, ONE)
    assert on_disk(disk) == ({bigger.grant_id},) * 3


async def test_a_row_is_not_replaced_before_the_files_it_speaks_of(disk, monkeypatch):
    book = disk.book()
    await commit(book, ONE)

    def refuse(*_, **__):
        raise StorageError("a process has other devices mapped")

    monkeypatch.setattr(disk.files, "prepare", refuse)
    with pytest.raises(StorageError, match="other devices"):
        await commit(book, grant(ids("0:0"), share(1, 600), of=pod("b")))
    assert disk.store.read(ONE.grant_id) == ONE


async def test_the_next_agent_finds_the_ledger_as_it_was(disk):
    first = disk.book()
    await commit(first, ONE)
    await commit(first, OTHER)
    second = Disk(disk.base).book()
    second.load(BOOT)
    assert second.ledger == first.ledger


async def test_an_agent_starts_where_a_row_that_was_refused_still_cannot_be_written(disk, monkeypatch):
    def refuse(*_):
        raise StorageError("writing a row: No space left on device")

    with monkeypatch.context() as full:
        full.setattr(disk.store, "write", refuse)
        with pytest.raises(StorageError):
            await commit(disk.book(), ONE)
        book = disk.book()
        book.load(BOOT)
        assert book.ledger.grants == {ONE.grant_id: ONE}
        survey = await book.survey()
        assert DriftKind.LOST_ROW in {drift.kind for drift in find_drifts(Snapshot(survey.grants, survey.files))}
    await book.rewrite(survey.grants[ONE.grant_id], limits_of(ONE, FailPolicy.CLOSED), lambda: {"kind": "x"})
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_damaged_row_is_set_aside_and_healed_from_its_copy(disk, caplog):
    await commit(disk.book(), ONE)
    path = disk.base / "state/ledger" / f"{ONE.grant_id}.json"
    path.write_bytes(b"torn")
    book = Disk(disk.base).book()
    book.load(BOOT)
    assert book.ledger.grants == {ONE.grant_id: ONE}
    assert path.read_bytes() == GRANT_ROWS.encode(ONE)
    assert (disk.base / "state/ledger/quarantine" / path.name).read_bytes() == b"torn"
    assert "does not count" in caplog.text


async def test_a_failing_file_keeps_the_promise_for_the_next_attempt(disk):
    book = disk.book()

    def fails():
        raise HostSpecError("no libcuda")

    with pytest.raises(HostSpecError):
        await commit(book, ONE, spec=fails)
    assert ONE.grant_id in book.ledger.grants
    await commit(book, ONE)
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_cancelled_call_leaves_a_complete_grant(disk):
    book = disk.book()
    task = asyncio.ensure_future(commit(book, ONE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await book.on_disk(lambda: None)
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_why_the_change_of_a_cancelled_call_failed_is_said(disk, caplog):
    def fails():
        raise HostSpecError("no libcuda")

    book = disk.book()
    task = asyncio.ensure_future(commit(book, ONE, spec=fails))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await book.on_disk(lambda: None)
    await settle()
    assert "no libcuda" in caplog.text


async def test_a_grant_that_is_over_before_it_is_ready_is_a_change_for_those_who_made_it_ready(disk):
    book = disk.book()
    seen = []

    async def ready():
        book.ledger = book.ledger.releasing([ONE.grant_id])
        seen.append(book.changes.count)

    await book.commit(Planned(ONE, (), Preferences()), limits_of(ONE, FailPolicy.CLOSED), dict, board(), 16, ready)
    assert on_disk(disk) == (set(), set(), set())
    assert book.changes.count > seen[0]


async def test_a_grant_renewed_while_it_is_released_stays(disk):
    book = disk.book()
    await commit(book, ONE)
    renewed = grant(ids("0:0"), share(0, 500), of=pod("c"))
    await asyncio.gather(book.release([ONE]), commit(book, renewed))
    assert book.ledger.grants == {renewed.grant_id: renewed}
    assert on_disk(disk) == ({renewed.grant_id},) * 3


async def test_a_sweep_removes_what_belongs_to_no_grant_and_nothing_else(disk):
    book = disk.book()
    await commit(book, ONE)
    disk.store.write(OTHER)
    disk.files.prepare(OTHER, limits_of(OTHER, FailPolicy.CLOSED))
    disk.cdi.write("stray", {})
    assert set(await book.sweep()) == {OTHER.grant_id, "stray"}
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_row_that_cannot_be_written_is_an_error(disk, monkeypatch):
    def full(grant):
        raise StorageError("no space left on device")

    monkeypatch.setattr(disk.store, "write", full)
    with pytest.raises(StorageError):
        await commit(disk.book(), ONE)
    assert on_disk(disk)[2] == set()


class Patience:
    """Looks at the clock again and again, however long it is to wait."""

    def __init__(self) -> None:
        self._pauses = 0

    async def pause(self, seconds: float) -> None:
        self._pauses += 1
        await asyncio.sleep(0.01)

    async def is_tried(self) -> None:
        """Return when somebody has looked at the clock, as it is now, and waits."""
        wanted = self._pauses + 2
        await until(lambda: self._pauses >= wanted)


class TestWhatTheRuntimeStillHas:
    """With a runtime that takes 10 s for a scan, by a clock that stands still."""

    PACE = ScanPace(seconds_per_byte=0.0, least_forgetting_seconds=20.0, most_forgetting_seconds=20.0)
    ANOTHER = grant(ids("0:0"), share(1, 600), of=pod("b"))

    @pytest.fixture
    async def clock(self):
        return FakeClock()

    @pytest.fixture
    async def patience(self):
        return Patience()

    @pytest.fixture
    async def book(self, disk, clock, patience):
        return disk.book(clock, self.PACE, patience.pause)

    def content(self, disk) -> bytes | None:
        path = disk.base / "cdi" / file_name(ONE.grant_id)
        return path.read_bytes() if path.exists() else None

    async def test_an_earlier_spec_is_removed_and_forgotten_before_the_new_one_is_written(self, disk, book, clock, patience):
        await commit(book, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(book, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        assert self.content(disk) is None
        assert disk.store.read(ONE.grant_id) == self.ANOTHER
        clock.seconds += 19.9
        await patience.is_tried()
        assert self.content(disk) is None
        clock.seconds += 0.1
        await asyncio.wait_for(starting, 60)
        assert self.content(disk) == b'{"gpu":1}'

    async def test_others_start_while_one_waits(self, disk, book, clock, patience):
        await commit(book, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(book, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        await asyncio.wait_for(commit(book, OTHER), 60)
        assert OTHER.grant_id in disk.cdi.ids()
        assert not starting.done()
        clock.seconds += 20
        await asyncio.wait_for(starting, 60)

    async def test_a_spec_that_stays_as_it_is_is_not_touched(self, disk, book):
        await commit(book, ONE)
        path = disk.base / "cdi" / file_name(ONE.grant_id)
        before = path.stat()
        await commit(book, replace(ONE, container="restarted"))
        assert (path.stat().st_ino, path.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
        survey = await book.survey()
        assert survey.files[ONE.grant_id].written_spec == survey.files[ONE.grant_id].spec

    async def test_ids_that_were_just_released_wait_as_well(self, disk, book, clock, patience):
        await commit(book, ONE)
        await book.release([ONE])
        starting = asyncio.ensure_future(commit(book, self.ANOTHER))
        await patience.is_tried()
        assert self.content(disk) is None
        clock.seconds += 20
        await asyncio.wait_for(starting, 60)
        assert self.content(disk) is not None

    async def test_a_start_that_is_over_before_it_may_write_writes_nothing(self, disk, book, clock, patience):
        await commit(book, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(book, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        await book.release([self.ANOTHER])
        clock.seconds += 20
        await asyncio.wait_for(starting, 60)
        assert on_disk(disk) == (set(),) * 3

    async def test_a_start_that_is_given_up_leaves_a_grant_that_the_next_try_and_the_reconciler_find_whole(
        self, disk, book, clock, patience
    ):
        await commit(book, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(book, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        starting.cancel()
        clock.seconds += 20
        await until(lambda: self.content(disk) == b'{"gpu":1}')

    async def test_an_agent_that_was_killed_between_removal_and_writing_leaves_no_spec_and_the_next_one_waits(
        self, disk, book, clock, patience
    ):
        await commit(book, ONE, spec=lambda: {"gpu": 0})
        killed = asyncio.ensure_future(commit(book, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        after = Disk(disk.base)
        book = after.book(clock, self.PACE, patience.pause)
        book.load(BOOT)
        assert book.ledger.grants == {ONE.grant_id: self.ANOTHER}
        survey = await book.survey()
        (drift,) = find_drifts(Snapshot(survey.grants, survey.files))
        assert drift.kind is DriftKind.LOST_SPEC
        cure = asyncio.ensure_future(book.rewrite(self.ANOTHER, limits_of(self.ANOTHER, FailPolicy.CLOSED), lambda: {"gpu": 1}))
        await patience.is_tried()
        assert self.content(disk) is None
        clock.seconds += 20
        await asyncio.wait_for(asyncio.gather(cure, killed), 60)
        assert self.content(disk) == b'{"gpu":1}'

    async def test_of_starts_in_a_burst_each_is_answered_when_the_scan_before_it_is_over(self, disk, clock, patience):
        book = disk.book(clock, ScanPace(seconds_per_byte=1.0, least_forgetting_seconds=0.0, most_forgetting_seconds=20.0), patience.pause)
        await asyncio.wait_for(commit(book, ONE, spec=lambda: {"kind": "as large as a spec is"}), 60)  # a scan of 10 s
        second = asyncio.ensure_future(commit(book, OTHER))
        await patience.is_tried()
        assert OTHER.grant_id in disk.cdi.ids()
        clock.seconds += 10
        await asyncio.wait_for(second, 60)


@pytest.mark.timeout(60)
async def test_a_look_at_a_region_holds_up_no_file_work(tmp_path):
    book = Disk(tmp_path).book()
    done = threading.Event()
    look = asyncio.ensure_future(book.on_regions(done.wait))
    await book.on_disk(lambda: None)
    assert not look.done()
    done.set()
    assert await look
