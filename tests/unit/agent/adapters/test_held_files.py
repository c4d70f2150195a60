# SPDX-License-Identifier: Apache-2.0
"""A file that the agent keeps open can have no lease that delays another program."""

import os
import threading
import time
from pathlib import Path

import pytest

from agent.adapters.held_files import HeldFiles
from agent.adapters.regular_files import read_regular
from tests.fakes.leases import KINDS, REASON, can_be_leased, lease


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    path.write_bytes(b"content")
    if not can_be_leased(path):
        pytest.skip(REASON)
    return path


@pytest.fixture
def held():
    files = HeldFiles()
    yield files
    files.close()


def until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_file_held_for_writing_can_have_no_lease(file, held, kind):
    held.hold({file: True})
    with lease(file, kind) as given:
        assert not given


def test_file_held_for_reading_can_have_only_a_harmless_lease(file, held):
    held.hold({file: False})
    with lease(file, "write") as given:
        assert not given
    with lease(file, "read"):
        assert read_regular(file) == b"content"


@pytest.mark.parametrize("kind", KINDS)
def test_file_that_is_let_go_can_have_one_again(file, held, kind):
    held.hold({file: True})
    held.hold({})
    with lease(file, kind) as given:
        assert given


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_file_is_held_too(file, held, kind):
    held.hold({file: True})
    other = file.with_name("other")
    other.write_bytes(b"new")
    other.replace(file)
    held.hold({file: True})
    with lease(file, kind) as given:
        assert not given


@pytest.mark.parametrize("kind", KINDS)
def test_lease_that_is_there_already_is_outwaited_and_never_comes_back(file, held, kind, caplog):
    """Its owner gives it up for the agent's open and tries to hold it again at once."""
    with lease(file, kind, again=True) as given:
        assert given
        begun = time.monotonic()
        held.hold({file: True})
        assert time.monotonic() - begun < 1.0
        assert "a container holds a lease on" in caplog.text
        until(lambda: not can_be_leased(file))
        held.hold({file: True})
        assert caplog.text.count("a container holds a lease on") == 1


def test_only_one_thread_waits_for_a_lease(file, held):
    with lease(file, "write"):
        for _ in range(3):
            held.hold({file: True})
        assert [thread.name for thread in threading.enumerate()].count("lease") == 1
    until(lambda: not can_be_leased(file))


@pytest.mark.parametrize("damage", ["missing", "link", "directory", "pipe"])
def test_whatever_is_no_file_is_not_waited_for(tmp_path, held, damage):
    path = tmp_path / "x"
    {"missing": lambda _: None, "link": lambda one: one.symlink_to("x"), "directory": os.mkdir, "pipe": os.mkfifo}[damage](path)
    begun = time.monotonic()
    held.hold({path: True, tmp_path / "y": False})
    assert time.monotonic() - begun < 1.0


def test_descriptors_are_closed(tmp_path, held):
    paths = [tmp_path / str(number) for number in range(20)]
    for path in paths:
        path.touch()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are wanted, not paths
    for _ in range(3):
        held.hold(dict.fromkeys(paths, True))
    assert len(os.listdir("/proc/self/fd")) == before + 20  # noqa: PTH208 - likewise
    paths[0].unlink()
    held.hold(dict.fromkeys(paths, True))
    assert len(os.listdir("/proc/self/fd")) == before + 19  # noqa: PTH208 - likewise
