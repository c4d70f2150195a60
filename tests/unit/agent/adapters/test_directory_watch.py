# SPDX-License-Identifier: Apache-2.0
import asyncio
import logging
import os

import pytest

from agent.adapters.directory_watch import DirectoryWatch

PACE_SECONDS = 0.002


class Watching:
    """A watch over ``flat`` and the subdirectories of ``nested``, and how often it reported a change."""

    def __init__(self, base, pace_seconds=PACE_SECONDS) -> None:
        self.flat, self.nested = base / "flat", base / "nested"
        self.reported = 0
        self.watch = DirectoryWatch([self.flat], nested=self.nested, pace_seconds=pace_seconds)

    def tell(self) -> None:
        self.reported += 1

    async def tells(self) -> bool:
        """Whether it reported a change since the last time; the kernel has it by now, the loop needs its turn."""
        for _ in range(5):
            await asyncio.sleep(PACE_SECONDS)
        reported, self.reported = self.reported, 0
        return reported > 0


@pytest.fixture
async def there(tmp_path):
    watching = Watching(tmp_path)
    watching.flat.mkdir()
    (watching.nested / "old").mkdir(parents=True)
    (watching.nested / "old/region").write_text("")
    watching.watch.start(watching.tell)
    yield watching
    watching.watch.close()


async def test_no_event_without_change(there):
    assert not await there.tells()


@pytest.mark.parametrize("where", ["flat", "nested", "nested/old"])
async def test_created_and_removed_files_are_reported(there, where, tmp_path):
    path = tmp_path / where / "file"
    path.write_text("")
    assert await there.tells()
    path.rename(path.with_name("other"))
    assert await there.tells()
    path.with_name("other").unlink()
    assert await there.tells()


async def test_later_subdirectory_is_watched_and_may_be_removed(there):
    (there.nested / "new").mkdir()
    assert await there.tells()
    (there.nested / "new/limits").write_text("")
    assert await there.tells()
    (there.nested / "new/limits").unlink()
    (there.nested / "new").rmdir()
    assert await there.tells()


async def test_what_is_written_in_place_is_a_change_except_where_containers_write(there):
    (there.flat / "spec").write_text("1")
    assert await there.tells()
    (there.flat / "spec").write_text("2")
    assert await there.tells()
    (there.nested / "old/region").write_text("a tenant's")
    assert not await there.tells()


async def test_what_has_happened_can_be_forgotten(there):
    (there.flat / "spec").write_text("1")
    there.watch.forget()
    assert not await there.tells()
    (there.flat / "spec").unlink()
    assert await there.tells()


async def test_a_directory_that_was_made_again_is_watched_once_more(there):
    (there.nested / "old/region").unlink()
    (there.nested / "old").rmdir()
    there.nested.rmdir()
    (there.nested / "old").mkdir(parents=True)
    there.watch.forget()
    (there.nested / "old/limits").write_text("")
    assert await there.tells()


async def test_changes_that_follow_another_are_reported_together(tmp_path):
    watching = Watching(tmp_path, pace_seconds=60.0)
    watching.flat.mkdir()
    watching.watch.start(watching.tell)
    for number in range(20):
        (watching.flat / f"spec-{number}").write_text("")
        await asyncio.sleep(0.001)
    assert watching.reported == 1
    watching.watch.close()


async def test_missing_directory_is_no_error(tmp_path, caplog):
    watching = Watching(tmp_path)
    watching.watch.start(watching.tell)
    assert caplog.messages == []
    watching.flat.mkdir()
    watching.watch.forget()
    (watching.flat / "spec").write_text("")
    assert await watching.tells()
    watching.watch.close()


async def test_kernel_without_free_watches_is_logged_once(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    watching = Watching(tmp_path)
    monkeypatch.setattr(watching.watch, "_libc", _NoMore())
    watching.watch.start(watching.tell)
    watching.watch.forget()
    watching.watch.close()
    (message,) = caplog.messages
    assert "fs.inotify.max_user_instances" in message


class _NoMore:
    def inotify_init1(self, flags: int) -> int:
        assert flags & os.O_NONBLOCK
        return -1
