import asyncio

import pytest

from agent.core.cdi import HostSpecError
from agent.core.ledger import GRANT_ROWS
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.errors import StorageError
from proto.model import Preferences
from tests.unit.agent.builders import BOOT, board, grant, ids, pod, share
from tests.unit.agent.fakes import Disk, settle


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

    def refuse(*_):
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


async def test_a_damaged_row_is_set_aside_and_healed_from_its_copy(disk, caplog):
    await commit(disk.book(), ONE)
    path = disk.base / "state/ledger" / f"{ONE.grant_id}.json"
    path.write_bytes(b"torn")
    book = Disk(disk.base).book()
    book.load(BOOT)
    assert book.ledger.grants == {ONE.grant_id: ONE}
    assert path.read_bytes() == GRANT_ROWS.encode(ONE)
    assert (disk.base / "state/ledger/quarantine" / path.name).read_bytes() == b"torn"
    assert "set aside" in caplog.text


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
