# SPDX-License-Identifier: Apache-2.0
"""A waiting agent asks the working one for its place, and after that the old pod does not repeat it."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from agent.adapters.succession import Succession

ASK = """
import sys
from pathlib import Path
from agent.adapters.succession import Succession
one = Succession(Path(sys.argv[1]), "other")
one.ask()
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def working(tmp_path: Path) -> Succession:
    return Succession(tmp_path, "agent-1")


def test_agent_is_asked_while_another_one_asks(working, tmp_path):
    other = Succession(tmp_path, "agent-2")
    assert not working.is_asked_for()
    other.ask()
    other.ask()
    assert working.is_asked_for()
    other.withdraw()
    assert not working.is_asked_for()


def test_killed_agent_asks_no_more(working, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asked\n"
        assert working.is_asked_for()
        process.kill()
        process.wait()
    assert not working.is_asked_for()


def test_only_pod_that_gave_its_place_away_last_is_retired(working, tmp_path):
    assert not working.retired
    working.retire()
    assert [Succession(tmp_path, pod).retired for pod in ("agent-1", "agent-2")] == [True, False]
    Succession(tmp_path, "agent-2").retire()
    assert not working.retired


def test_third_agent_does_not_ask_beside_the_second(working, tmp_path):
    second, third = (Succession(tmp_path, f"agent-{number}") for number in (2, 3))
    second.ask()
    third.ask()
    second.withdraw()
    assert not working.is_asked_for()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_means_no_request_and_is_logged_once(working, monkeypatch, caplog, code):
    def fails(descriptor: int, operation: int) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", fails)
    working.ask()
    working.ask()
    assert not working.is_asked_for()
    assert len(caplog.records) == 2
