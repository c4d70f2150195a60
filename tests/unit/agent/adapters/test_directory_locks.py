# SPDX-License-Identifier: Apache-2.0
"""Only one agent holds a node's directories, and the kernel knows when it has ended."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.adapters.directory_locks import HOLDER_FILE, DirectoryLocks
from agent.errors import StorageError

HOLD = """
import sys
from pathlib import Path
from agent.adapters.directory_locks import DirectoryLocks
locks = DirectoryLocks([Path(one) for one in sys.argv[1:]], [Path(sys.argv[1])], "the other, process 7")
print(locks.take() or "held", flush=True)
sys.stdin.read()
"""


def make(*directories: Path, holder: str = "this one") -> DirectoryLocks:
    return DirectoryLocks(directories, directories[:1], holder)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("state", "run", "cdi")]
    for place in found:
        place.mkdir()
    return found


def test_second_agent_is_told_the_name_of_the_first(places):
    first, second = make(*places, holder="aliquot-agent-a, process 7"), make(*places)
    assert first.take() == ""
    assert second.take() == f"another agent (aliquot-agent-a, process 7) uses {places[0]}"
    assert (places[0] / HOLDER_FILE).read_text() == "aliquot-agent-a, process 7\n"
    first.close()
    assert second.take() == ""
    assert (places[0] / HOLDER_FILE).read_text() == "this one\n"
    second.close()


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_one_shared_directory_is_enough_to_wait(places, tmp_path, shared):
    others = [tmp_path / f"other-{number}" for number in range(3)]
    for other in others:
        other.mkdir()
    others[shared] = places[shared]
    first, second = make(*places), make(*others)
    assert first.take() == ""
    assert second.take().endswith(f"uses {places[shared]}")
    first.close()
    assert second.take() == ""
    second.close()


def test_taking_twice_keeps_the_locks(places):
    first = make(*places)
    assert (first.take(), first.take()) == ("", "")
    assert make(*places).take() != ""
    first.close()


def test_killed_process_holds_nothing(places):
    command = [sys.executable, "-c", HOLD, *map(str, places)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        mine = make(*places)
        assert mine.take() == f"another agent (the other, process 7) uses {places[0]}"
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert mine.take() == ""
        mine.close()


def test_files_in_the_directory_decide_nothing(places):
    """No lock, lease or removal of a file in it lets a second agent in, or keeps the first out."""
    first, second = make(*places), make(*places)
    assert first.take() == ""
    with (places[0] / HOLDER_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for place in places:
            for path in place.iterdir():
                path.unlink()
        assert second.take() == f"another agent uses {places[0]}"
        first.close()
        assert second.take() == ""
    second.close()


@pytest.mark.parametrize("damage", ["pipe", "directory", "huge"])
def test_damaged_name_of_the_holder_is_not_waited_for(places, damage):
    first = make(*places)
    assert first.take() == ""
    name = places[0] / HOLDER_FILE
    name.unlink()
    if damage == "pipe":
        os.mkfifo(name)
    elif damage == "directory":
        name.mkdir()
    else:
        name.write_bytes(b"x" * 5000)
    assert make(*places).take() == f"another agent uses {places[0]}"
    first.close()


def test_disk_that_refuses_the_name_does_not_refuse_the_lock(places, caplog):
    (places[0] / HOLDER_FILE).mkdir()
    (places[0] / HOLDER_FILE / "x").touch()
    first = make(*places)
    assert first.take() == ""
    assert "other agents do not see the name" in caplog.text
    assert make(*places).take() != ""
    first.close()


def test_missing_directory_is_storage_error(tmp_path):
    with pytest.raises(StorageError, match="opening"):
        make(tmp_path / "missing").take()


@pytest.mark.parametrize("code", [errno.EBADF, errno.ENOLCK])
def test_file_system_without_directory_locks_leaves_it_to_the_others(places, monkeypatch, caplog, code):
    state, flock = places[0].stat().st_ino, fcntl.flock

    def as_on_nfs(descriptor: int, operation: int) -> None:
        if os.fstat(descriptor).st_ino == state:
            raise OSError(code, os.strerror(code))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    first, second = make(*places), make(*places)
    assert first.take() == ""
    assert f"{places[0]} is on a file system without locks" in caplog.text
    assert second.take().endswith(f"uses {places[1]}")
    first.close()
    second.close()


def test_lock_that_the_kernel_refuses_is_storage_error(places, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="locking"):
        make(*places).take()
