# SPDX-License-Identifier: Apache-2.0
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
from aliquot.contract.model import Preferences
from tests.unit.agent.builders import BOOT, grant, ids, inventory, pod, share
from tests.unit.agent.fakes import Disk, FakeClock, settle, until


@pytest.fixture
def disk(tmp_path) -> Disk:
    return Disk(tmp_path)


async def commit(manager, one, *superseded, spec=lambda: {"kind": "x"}, start_seconds=0.0):
    planned = Planned(one, superseded, Preferences())
    await manager.commit(planned, limits_of(one, FailPolicy.CLOSED), spec, inventory(), 16, start_seconds=start_seconds)


def on_disk(disk: Disk) -> tuple[set[str], set[str], set[str]]:
    return set(disk.store.ids()), set(disk.files.ids()), set(disk.cdi.ids())


ONE = grant(ids("0:0"), share(0, 600), of=pod("a"))
OTHER = grant(ids("0:1"), share(0, 400), of=pod("b"))


async def test_pause_is_written_into_existing_limits_and_read_back(disk):
    manager = disk.manager()
    await commit(manager, ONE)
    overhead = disk.files.amend_limits(
        ONE.grant_id, lambda limits: replace(limits, devices=(replace(limits.devices[0], overhead_bytes=7),))
    )
    for paused in (True, False):
        assert await manager.pause(ONE, paused=paused)
        files = (await manager.survey()).files[ONE.grant_id]
        assert files.limits == pausing(overhead, paused=paused)
        assert files.written_limits == pausing(limits_of(ONE, FailPolicy.CLOSED), paused=paused)


async def test_a_pause_after_a_restart_is_what_is_seen_first(disk):
    await commit(disk.manager(), ONE)
    manager = disk.manager()
    manager.load(ONE.boot_id)
    (known,) = manager.ledger.grants.values()
    assert await manager.pause(known, paused=True)
    files = (await manager.survey()).files[ONE.grant_id]
    assert files.limits == files.written_limits == pausing(limits_of(ONE, FailPolicy.CLOSED), paused=True)


async def test_a_grant_that_is_over_is_not_paused(disk):
    manager = disk.manager()
    await commit(manager, ONE)
    await manager.release([ONE])
    assert not await manager.pause(ONE, paused=True)


async def test_a_grant_has_row_files_and_spec(disk):
    await commit(disk.manager(), ONE)
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_released_grant_leaves_nothing(disk):
    manager = disk.manager()
    await commit(manager, ONE)
    await manager.release([ONE])
    assert on_disk(disk) == (set(),) * 3
    assert not manager.ledger.grants


async def test_grants_that_are_over_go_even_when_others_cannot(disk, monkeypatch):
    manager = disk.manager()
    third = grant(ids("1:0"), share(1), of=pod("c"))
    for one in (ONE, OTHER, third):
        await commit(manager, one)
    remove = disk.cdi.remove

    def failing(identifier):
        if identifier != OTHER.grant_id:
            raise StorageError(f"removing {identifier}: read-only")
        remove(identifier)

    monkeypatch.setattr(disk.cdi, "remove", failing)
    with pytest.raises(StorageError, match=f"2 of 3 .*{ONE.grant_id}.*{third.grant_id}"):
        await manager.release([ONE, OTHER, third])
    assert set(manager.ledger.grants) == {ONE.grant_id, third.grant_id}


async def test_superseded_grants_go_with_their_files(disk):
    manager = disk.manager()
    await commit(manager, ONE)
    bigger = grant(ids("0:0", "1:0"), share(0, 900), share(1, 900), of=pod("a"))
    await commit(manager, bigger, ONE)
    assert on_disk(disk) == ({bigger.grant_id},) * 3


async def test_a_row_is_not_replaced_before_the_files_it_speaks_of(disk, monkeypatch):
    manager = disk.manager()
    await commit(manager, ONE)

    def refuse(*_, **__):
        raise StorageError("a process has other devices mapped")

    monkeypatch.setattr(disk.files, "prepare", refuse)
    with pytest.raises(StorageError, match="other devices"):
        await commit(manager, grant(ids("0:0"), share(1, 600), of=pod("b")))
    assert disk.store.read(ONE.grant_id) == ONE


async def test_the_next_agent_finds_the_ledger_as_it_was(disk):
    first = disk.manager()
    await commit(first, ONE)
    await commit(first, OTHER)
    second = Disk(disk.base).manager()
    second.load(BOOT)
    assert second.ledger == first.ledger


async def test_agent_starts_when_refused_row_still_cannot_be_written(disk, monkeypatch):
    def refuse(grants):
        return {one.grant_id: StorageError("writing a row: No space left on device") for one in grants}

    with monkeypatch.context() as full:
        full.setattr(disk.store, "write", refuse)
        with pytest.raises(StorageError):
            await commit(disk.manager(), ONE)
        manager = disk.manager()
        manager.load(BOOT)
        assert manager.ledger.grants == {ONE.grant_id: ONE}
        survey = await manager.survey()
        assert DriftKind.LOST_ROW in {drift.kind for drift in find_drifts(Snapshot(survey.grants, survey.files))}
    await manager.rewrite(survey.grants[ONE.grant_id], limits_of(ONE, FailPolicy.CLOSED), lambda: {"kind": "x"})
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_damaged_row_is_set_aside_and_healed_from_its_copy(disk, caplog):
    await commit(disk.manager(), ONE)
    path = disk.base / "state/ledger" / f"{ONE.grant_id}.json"
    path.write_bytes(b"torn")
    manager = Disk(disk.base).manager()
    manager.load(BOOT)
    assert manager.ledger.grants == {ONE.grant_id: ONE}
    assert path.read_bytes() == GRANT_ROWS.encode(ONE)
    assert (disk.base / "state/ledger/quarantine" / path.name).read_bytes() == b"torn"
    assert "damaged ledger row ignored" in caplog.text


async def test_a_failing_file_keeps_the_promise_for_the_next_attempt(disk):
    manager = disk.manager()

    def fails():
        raise HostSpecError("no libcuda")

    with pytest.raises(HostSpecError):
        await commit(manager, ONE, spec=fails)
    assert ONE.grant_id in manager.ledger.grants
    await commit(manager, ONE)
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_cancelled_call_leaves_a_complete_grant(disk):
    manager = disk.manager()
    task = asyncio.ensure_future(commit(manager, ONE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await manager.on_disk(lambda: None)
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_failed_change_of_cancelled_call_is_logged_with_reason(disk, caplog):
    def fails():
        raise HostSpecError("no libcuda")

    manager = disk.manager()
    task = asyncio.ensure_future(commit(manager, ONE, spec=fails))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await manager.on_disk(lambda: None)
    await settle()
    assert "no libcuda" in caplog.text


async def test_grant_ended_before_ready_is_change_for_its_creator(disk):
    manager = disk.manager()
    seen = []

    async def ready():
        manager.ledger = manager.ledger.releasing([ONE.grant_id])
        seen.append(manager.changes.count)

    await manager.commit(Planned(ONE, (), Preferences()), limits_of(ONE, FailPolicy.CLOSED), dict, inventory(), 16, ready)
    assert on_disk(disk) == (set(), set(), set())
    assert manager.changes.count > seen[0]


async def test_a_grant_renewed_while_it_is_released_stays(disk):
    manager = disk.manager()
    await commit(manager, ONE)
    renewed = grant(ids("0:0"), share(0, 500), of=pod("c"))
    await asyncio.gather(manager.release([ONE]), commit(manager, renewed))
    assert manager.ledger.grants == {renewed.grant_id: renewed}
    assert on_disk(disk) == ({renewed.grant_id},) * 3


async def test_a_sweep_removes_what_belongs_to_no_grant_and_nothing_else(disk):
    manager = disk.manager()
    await commit(manager, ONE)
    disk.store.write([OTHER])
    disk.files.prepare(OTHER, limits_of(OTHER, FailPolicy.CLOSED))
    disk.cdi.write("stray", {})
    assert set(await manager.sweep()) == {OTHER.grant_id, "stray"}
    assert on_disk(disk) == ({ONE.grant_id},) * 3


async def test_a_row_that_cannot_be_written_is_an_error(disk, monkeypatch):
    def full(grants):
        return {one.grant_id: StorageError("no space left on device") for one in grants}

    monkeypatch.setattr(disk.store, "write", full)
    with pytest.raises(StorageError):
        await commit(disk.manager(), ONE)
    assert on_disk(disk)[2] == set()


class Patience:
    """Looks at the clock again and again, even if it has long to wait."""

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
    async def manager(self, disk, clock, patience):
        return disk.manager(clock, self.PACE, patience.pause)

    def content(self, disk) -> bytes | None:
        path = disk.base / "cdi" / file_name(ONE.grant_id)
        return path.read_bytes() if path.exists() else None

    async def test_earlier_spec_is_removed_and_forgotten_before_new_one_is_written(self, disk, manager, clock, patience):
        await commit(manager, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(manager, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        assert self.content(disk) is None
        assert disk.store.read(ONE.grant_id) == self.ANOTHER
        clock.seconds += 19.9
        await patience.is_tried()
        assert self.content(disk) is None
        clock.seconds += 0.1
        await asyncio.wait_for(starting, 60)
        assert self.content(disk) == b'{"gpu":1}'

    async def test_others_start_while_one_waits(self, disk, manager, clock, patience):
        await commit(manager, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(manager, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        await asyncio.wait_for(commit(manager, OTHER), 60)
        assert OTHER.grant_id in disk.cdi.ids()
        assert not starting.done()
        clock.seconds += 20
        await asyncio.wait_for(starting, 60)

    async def test_a_spec_that_stays_as_it_is_is_not_touched(self, disk, manager):
        await commit(manager, ONE)
        path = disk.base / "cdi" / file_name(ONE.grant_id)
        before = path.stat()
        await commit(manager, replace(ONE, container="restarted"))
        assert (path.stat().st_ino, path.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
        survey = await manager.survey()
        assert survey.files[ONE.grant_id].written_spec == survey.files[ONE.grant_id].spec

    async def test_ids_that_were_just_released_wait_as_well(self, disk, manager, clock, patience):
        await commit(manager, ONE)
        await manager.release([ONE])
        starting = asyncio.ensure_future(commit(manager, self.ANOTHER))
        await patience.is_tried()
        assert self.content(disk) is None
        clock.seconds += 20
        await asyncio.wait_for(starting, 60)
        assert self.content(disk) is not None

    async def test_a_start_that_is_over_before_it_may_write_writes_nothing(self, disk, manager, clock, patience):
        await commit(manager, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(manager, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        await manager.release([self.ANOTHER])
        clock.seconds += 20
        await asyncio.wait_for(starting, 60)
        assert on_disk(disk) == (set(),) * 3

    async def test_abandoned_start_leaves_complete_grant_for_retry_and_reconciler(self, disk, manager, clock, patience):
        await commit(manager, ONE, spec=lambda: {"gpu": 0})
        starting = asyncio.ensure_future(commit(manager, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        starting.cancel()
        clock.seconds += 20
        await until(lambda: self.content(disk) == b'{"gpu":1}')

    async def test_agent_killed_between_removal_and_writing_leaves_no_spec_and_next_waits(self, disk, manager, clock, patience):
        await commit(manager, ONE, spec=lambda: {"gpu": 0})
        killed = asyncio.ensure_future(commit(manager, self.ANOTHER, spec=lambda: {"gpu": 1}))
        await patience.is_tried()
        after = Disk(disk.base)
        manager = after.manager(clock, self.PACE, patience.pause)
        manager.load(BOOT)
        assert manager.ledger.grants == {ONE.grant_id: self.ANOTHER}
        survey = await manager.survey()
        (drift,) = find_drifts(Snapshot(survey.grants, survey.files))
        assert drift.kind is DriftKind.LOST_SPEC
        cure = asyncio.ensure_future(manager.rewrite(self.ANOTHER, limits_of(self.ANOTHER, FailPolicy.CLOSED), lambda: {"gpu": 1}))
        await patience.is_tried()
        assert self.content(disk) is None
        clock.seconds += 20
        await asyncio.wait_for(asyncio.gather(cure, killed), 60)
        assert self.content(disk) == b'{"gpu":1}'

    async def test_each_start_in_burst_is_answered_after_scan_before_it(self, disk, clock, patience):
        manager = disk.manager(
            clock, ScanPace(seconds_per_byte=1.0, least_forgetting_seconds=0.0, most_forgetting_seconds=20.0), patience.pause
        )
        await asyncio.wait_for(commit(manager, ONE, spec=lambda: {"kind": "as large as a spec is"}), 60)  # a scan of 10 s
        second = asyncio.ensure_future(commit(manager, OTHER))
        await patience.is_tried()
        assert OTHER.grant_id in disk.cdi.ids()
        clock.seconds += 10
        await asyncio.wait_for(second, 60)

    async def test_scan_may_end_while_runtime_prepares_start(self, disk, clock, patience):
        manager = disk.manager(
            clock, ScanPace(seconds_per_byte=1.0, least_forgetting_seconds=0.0, most_forgetting_seconds=20.0), patience.pause
        )
        await asyncio.wait_for(commit(manager, ONE, spec=lambda: {"kind": "as large as a spec is"}), 60)  # a scan of 10 s
        await asyncio.wait_for(commit(manager, OTHER, start_seconds=10.0), 60)


@pytest.mark.timeout(60)
async def test_a_look_at_a_region_holds_up_no_file_work(tmp_path):
    manager = Disk(tmp_path).manager()
    done = threading.Event()
    look = asyncio.ensure_future(manager.on_regions(done.wait))
    await manager.on_disk(lambda: None)
    assert not look.done()
    done.set()
    assert await look
