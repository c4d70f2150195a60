# SPDX-License-Identifier: Apache-2.0
import asyncio
from pathlib import Path

from agent.services.file_holder import FileHolder
from tests.unit.agent.fakes import until


class FakeHeld:
    """Remembers what it has to hold."""

    def __init__(self) -> None:
        self.asked: list[dict[Path, bool]] = []

    def hold(self, files):
        self.asked.append(dict(files))

    def close(self):
        self.asked.clear()


async def test_files_are_looked_for_at_the_start_and_each_period():
    held, files = FakeHeld(), {Path("/page"): True}
    running = asyncio.ensure_future(FileHolder(held, lambda: files, 0.01).run())
    await until(lambda: len(held.asked) >= 2)
    files[Path("/new")] = False
    await until(lambda: held.asked[-1] == {Path("/page"): True, Path("/new"): False})
    running.cancel()
    assert held.asked[0] == {Path("/page"): True}
