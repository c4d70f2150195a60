# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from agent.errors import StorageError
from agent.services import directory_watchdog
from agent.services.directory_watchdog import DirectoryWatchdog


class FakeDirectories:
    """One is removed at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def removed(self) -> list[Path]:
        self.looks += 1
        return [Path("/var/run/cdi")] if self.looks == 3 else []


async def test_the_agent_ends_once_a_directory_was_removed_on_the_host(monkeypatch):
    monkeypatch.setattr(directory_watchdog, "LOOK_SECONDS", 0.0)
    directories = FakeDirectories()
    with pytest.raises(StorageError, match=r"removed on the host.*: /var/run/cdi\."):
        await DirectoryWatchdog(directories).run()
    assert directories.looks == 3
