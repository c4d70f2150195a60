# SPDX-License-Identifier: Apache-2.0
"""Grants that are committed at once share one sync of the ledger's directory, and lose nothing when the agent or the machine dies."""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.core.drift import Snapshot, find_drifts
from agent.core.ledger import GRANT_ROWS, Grant
from agent.core.limits import FailPolicy, limits_of
from agent.core.planning import Planned
from agent.errors import StorageError
from agent.services import grant_manager as module
from agent.services.grant_manager import GrantManager
from aliquot.contract.model import Preferences
from tests.unit.agent.builders import BOOT, grant, ids, inventory, pod, share
from tests.unit.agent.fakes import Disk, until

GRANTS = tuple(grant(ids(f"0:{number}"), share(0, 100), of=pod(f"pod-{number}")) for number in range(3))


class Killed(BaseException):
    """Here the process ended."""


class Calls:
    """The calls that change files: each is counted and can be the last one. Also knows which rows are on disk after a power failure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ledger: Path) -> None:
        self.left: float = float("inf")
        self.made: list[str] = []
        self._ledger = ledger
        self._synced: set[int] = set()
        """Inodes with their content on disk."""
        self.on_disk: frozenset[str] = frozenset()
        """Grant ids of rows with name and content on disk."""
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._step("fsync", self._sync))
        for owner, name in ((os, "open"), (os, "write"), (os, "ftruncate"), (os, "replace"), (os, "mkdir"), (os, "unlink")):
            monkeypatch.setattr(owner, name, self._step(name, getattr(owner, name)))

    def _step(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **settings: Any) -> Any:
            if not threading.current_thread().name.startswith("disk"):
                return call(*arguments, **settings)
            if self.left <= 0:
                raise Killed
            self.left -= 1
            self.made.append(name)
            return call(*arguments, **settings)

        return step

    def _sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        inode = os.fstat(descriptor).st_ino
        self._synced.add(inode)
        if inode == self._ledger.stat().st_ino:
            self.on_disk = frozenset(row.stem for row in self._ledger.glob("*.json") if row.stat().st_ino in self._synced)


async def commit(manager: GrantManager, one: Grant) -> Grant:
    await manager.commit(Planned(one, (), Preferences()), limits_of(one, FailPolicy.CLOSED), lambda: {"kind": "x"}, inventory(), 16)
    return one


async def at_once(manager: GrantManager, *changes: Coroutine[Any, Any, Any]) -> list[Any]:
    """Make changes that all wait for one in progress, so that they become one group."""
    async with manager._changing:
        tasks = [asyncio.ensure_future(change) for change in changes]
        await until(lambda: len(manager._writes._waiting) == len(tasks))
    return await asyncio.gather(*tasks, return_exceptions=True)


async def commit_all(manager: GrantManager, grants: Sequence[Grant] = GRANTS) -> list[Any]:
    return await at_once(manager, *(commit(manager, one) for one in grants))


async def assert_whole(manager: GrantManager) -> None:
    survey = await manager.survey()
    assert set(survey.grants) == {one.grant_id for one in GRANTS}
    assert find_drifts(Snapshot(survey.grants, survey.files)) == ()


async def test_grants_at_once_share_one_directory_sync(tmp_path, monkeypatch):
    disk = Disk(tmp_path)
    calls = Calls(monkeypatch, tmp_path / "state/ledger")
    manager = disk.manager()
    assert await commit_all(manager) == list(GRANTS)
    assert calls.made.count("fsync") == len(GRANTS) + 1
    await assert_whole(manager)
    manager.close()


@pytest.mark.timeout(120)
async def test_no_kill_loses_a_grant_that_was_answered(tmp_path, monkeypatch):
    for step in itertools.count():
        base = tmp_path / str(step)
        disk = Disk(base)
        with monkeypatch.context() as patch:
            calls = Calls(patch, base / "state/ledger")
            calls.left = step
            manager = disk.manager()
            outcomes = await commit_all(manager)
            manager.close()
        answered = {one.grant_id for one in outcomes if isinstance(one, Grant)}
        assert answered <= calls.on_disk, f"killed after {calls.made}"
        specs = set(disk.cdi.ids())
        assert specs <= calls.on_disk, f"a container could start without a row, killed after {calls.made}"
        after = Disk(base).manager()
        after.load(BOOT)
        assert answered <= after.ledger.grants.keys()
        again = [one for one in GRANTS if one.grant_id not in answered]
        assert await commit_all(after, again) == again
        await assert_whole(after)
        after.close()
        if len(answered) == len(GRANTS):
            assert {"open", "write", "fsync", "replace"} <= set(calls.made)
            return


@pytest.mark.parametrize("at", ["files", "row", "spec"])
async def test_failure_of_one_grant_leaves_others_of_its_group(tmp_path, monkeypatch, at):
    disk = Disk(tmp_path)
    failing = GRANTS[1].grant_id
    prepare, write, spec = disk.files.prepare, disk.store.write, disk.cdi.write

    def refuse(identifier: str) -> None:
        if identifier == failing:
            raise StorageError("no space left on device")

    def prepare_some(one, limits, **options):
        refuse(one.grant_id)
        prepare(one, limits, **options)

    def write_some(rows):
        return {failing: StorageError("no space left on device"), **write([one for one in rows if one.grant_id != failing])}

    def spec_of_some(identifier, content):
        refuse(identifier)
        spec(identifier, content)

    broken = {
        "files": (disk.files, "prepare", prepare_some),
        "row": (disk.store, "write", write_some),
        "spec": (disk.cdi, "write", spec_of_some),
    }
    manager = disk.manager()
    with monkeypatch.context() as patch:
        patch.setattr(*broken[at])
        first, second, third = await commit_all(manager)
    assert (first, third) == (GRANTS[0], GRANTS[2])
    assert isinstance(second, StorageError)
    await commit(manager, GRANTS[1])
    await assert_whole(manager)
    manager.close()


async def test_group_is_no_larger_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_MOST", 2)
    disk = Disk(tmp_path)
    sizes: list[int] = []
    write = disk.store.write

    def counted(rows):
        sizes.append(len(rows))
        return write(rows)

    monkeypatch.setattr(disk.store, "write", counted)
    manager = disk.manager()
    await commit_all(manager)
    assert sizes == [2, 1]
    manager.close()


async def test_row_on_disk_is_that_of_the_last_write_of_a_grant(tmp_path):
    disk = Disk(tmp_path)
    manager = disk.manager()
    one = GRANTS[0]
    await commit(manager, one)
    limits = limits_of(one, FailPolicy.CLOSED)
    await at_once(manager, *(manager.rewrite(one, limits, partial(dict, kind=kind)) for kind in "yz"))
    assert disk.cdi.digest(one.grant_id) == disk.cdi.digest_of({"kind": "z"})
    row = (tmp_path / "state/ledger" / f"{one.grant_id}.json").read_bytes()
    assert GRANT_ROWS.decode(row) == one
    manager.close()
