# SPDX-License-Identifier: Apache-2.0
import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from agent.core.mps import FAULT
from agent.errors import MpsError, StorageError
from agent.mps import control as module
from agent.mps.control import MpsControlProgram
from aliquot.paths import SOURCE_ROOT

GPU = "GPU-0"


@pytest.fixture
def control(tmp_path):
    """Daemons of the stand-in, all ended afterwards."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={SOURCE_ROOT} exec {sys.executable} -S -m tests.fakes.mps_daemon "$@"\n')
    program.chmod(0o755)
    control = Steered(str(program), tmp_path / "mps", timeout_seconds=5.0)
    yield control
    for uuid in control.known():
        control.stop(uuid)


class Steered(MpsControlProgram):
    """Speaks to the stand-in beyond what the real program knows."""

    def tell(self, command: str) -> None:
        self._run(GPU, [], f"{command}\n")

    def answers(self, device_uuid: str) -> bool:
        return self.servers(device_uuid) is not None

    @property
    def directory(self) -> Path:
        return self._directory

    def daemon_pid(self) -> int:
        return int((Path(self._pipes(GPU)) / "nvidia-cuda-mps-control.pid").read_text())


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> None:
    for _ in range(200):
        if not is_alive(pid):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_a_daemon_runs_for_one_gpu_in_its_own_directories(control):
    assert not control.answers(GPU)
    assert control.start(GPU) == control.daemon_pid()
    assert control.answers(GPU)
    assert not control.answers("GPU-1")
    assert control.known() == [GPU]
    log = (control.directory / GPU / "pipe").parent / "log/control.log"
    assert log.read_text().startswith(f"device {GPU}\n")


def test_stopped_daemon_is_removed_with_its_directories(control):
    control.start(GPU)
    pid = control.daemon_pid()
    control.stop(GPU)
    wait_gone(pid)
    assert control.known() == []


def test_stop_without_daemon_does_nothing(control):
    control.stop(GPU)
    assert control.known() == []


def test_killed_daemon_does_not_answer_and_can_be_restarted(control):
    control.start(GPU)
    pid = control.daemon_pid()
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert not control.answers(GPU)
    control.start(GPU)
    assert control.answers(GPU)


def test_a_daemon_that_hangs_is_ended_by_force(control, monkeypatch):
    control.start(GPU)
    pid = control.daemon_pid()
    control.tell("fake-hang")
    monkeypatch.setattr(control, "_timeout_seconds", 0.3)
    with pytest.raises(MpsError, match=r"has not ended within 0\.3 s"):
        control.tell("get_server_list")
    assert not control.answers(GPU)
    control.stop(GPU)
    wait_gone(pid)


class TestWhatClientsLeaveAndNobodyMayRemove:
    @pytest.fixture(autouse=True)
    def nothing_can_be_removed(self, monkeypatch):
        monkeypatch.setattr(module, "remove_tree", lambda *_, **__: None)

    def test_a_daemon_starts_again_all_the_same(self, control):
        control.start(GPU)
        pid = control.daemon_pid()
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        control.start(GPU)
        assert control.answers(GPU)

    def test_a_gpu_without_a_daemon_is_known_no_more(self, control):
        control.start(GPU)
        control.stop(GPU)
        assert control.known() == []

    def test_unremovable_directories_are_bounded(self, control, monkeypatch):
        monkeypatch.setattr(module, "_MOST_ASIDE", 2)
        for _ in range(2):
            control.start(GPU)
            control.stop(GPU)
        with pytest.raises(MpsError, match="cannot be removed"):
            control.start(GPU)


def test_what_was_left_aside_goes_when_it_can_be_removed(control, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(module, "remove_tree", lambda *_, **__: None)
        control.start(GPU)
        control.stop(GPU)
        assert list((tmp_path / "mps/aside").iterdir())
    control.start(GPU)
    assert not list((tmp_path / "mps/aside").iterdir())


def test_shared_memory_is_emptied_and_no_link_in_it_followed(tmp_path):
    shared, elsewhere = tmp_path / "shm", tmp_path / "elsewhere"
    for directory in (shared / "directory", elsewhere):
        directory.mkdir(parents=True)
        (directory / "file").write_text("x")
    (shared / "segment").write_text("x")
    (shared / "link").symlink_to(elsewhere)
    MpsControlProgram("/no-such-program", tmp_path / "mps").clear_shared_memory()
    assert len(list(shared.iterdir())) == 3
    MpsControlProgram("/no-such-program", tmp_path / "mps", shared_memory=shared).clear_shared_memory()
    assert not list(shared.iterdir())
    assert (elsewhere / "file").exists()


def test_only_daemon_of_gpu_is_ended_whatever_pid_file_says(control):
    control.start(GPU)
    control.start("GPU-1")
    ((control.directory / "GPU-1/pipe") / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    control.stop("GPU-1")
    assert control.answers(GPU)


def test_servers_are_listed_with_state_and_ended_one_by_one(control):
    control.start(GPU)
    control.tell("fake-start-server 41")
    control.tell("fake-fault 42")
    assert control.servers(GPU) == {41: "ACTIVE", 42: FAULT}
    control.shut_down_server(GPU, 42)
    assert control.servers(GPU) == {41: "ACTIVE"}


def test_no_servers_are_listed_when_no_daemon_answers(control):
    assert control.servers(GPU) is None


class TestLogs:
    MOST_BYTES = 64 << 10

    @pytest.fixture(autouse=True)
    def small_logs(self, monkeypatch):
        monkeypatch.setattr(module, "_MOST_LOG_BYTES", self.MOST_BYTES)

    def test_log_of_daemon_under_repeated_queries_stays_bounded(self, control, tmp_path):
        control.start(GPU)
        log = tmp_path / "mps" / GPU / "log/control.log"
        written = []
        for _ in range(6):
            control.tell("x" * 40_000)  # one command instead of hundreds
            control.servers(GPU)
            written.append(log.stat().st_size)
            control.trim_logs(GPU)
            assert occupied_bytes(log) <= self.MOST_BYTES
        assert written[-1] > 40_000, "the daemon writes on after its log was emptied"
        assert written[1] > 2 * 40_000, "it is not emptied while it is small"

    def test_a_small_log_is_left_alone(self, control, tmp_path):
        control.start(GPU)
        log = tmp_path / "mps" / GPU / "log/control.log"
        before = log.read_text()
        control.trim_logs(GPU)
        assert log.read_text() == before

    def test_daemon_writing_at_old_offset_has_log_emptied_once(self, control, tmp_path):
        log = tmp_path / "mps" / GPU / "log/server.log"
        log.parent.mkdir(parents=True)
        with log.open("wb", buffering=0) as writer:
            writer.write(b"x" * 4 * self.MOST_BYTES)
            os.fsync(writer.fileno())
            control.trim_logs(GPU)
            writer.write(b"last words")
            os.fsync(writer.fileno())
            control.trim_logs(GPU)
        assert log.read_bytes().endswith(b"last words")
        assert occupied_bytes(log) <= self.MOST_BYTES

    def test_without_a_daemon_there_is_nothing_to_trim(self, control):
        control.trim_logs(GPU)

    def test_a_log_that_cannot_be_emptied_is_named(self, control, tmp_path, monkeypatch):
        log = tmp_path / "mps" / GPU / "log/server.log"
        log.parent.mkdir(parents=True)
        log.write_bytes(b"x" * 2 * self.MOST_BYTES)
        monkeypatch.setattr(os, "truncate", refuse)
        with pytest.raises(StorageError, match=r"emptying .*server\.log.*: Permission denied"):
            control.trim_logs(GPU)


def occupied_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def refuse(*_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_program_that_cannot_be_run_is_named(tmp_path):
    with pytest.raises(MpsError, match="no-such-program -d for GPU-0: No such file"):
        MpsControlProgram("/no-such-program", tmp_path).start(GPU)


def printing(tmp_path, script: str) -> MpsControlProgram:
    """A control program that answers as a tenant likes who has taken the daemon's place in the pipe directory."""
    program = tmp_path / "tenants-words"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    program.chmod(0o755)
    return MpsControlProgram(str(program), tmp_path / "mps", timeout_seconds=5.0)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(r"printf '\377\376 \200'", id="bytes that are no text"),
        pytest.param(r"printf '\302\262 \331\243'", id="digits that are no numbers"),
        pytest.param("head -c 5000 /dev/zero | tr '\\0' 7", id="a number of 5000 digits"),
    ],
)
def test_invalid_process_id_is_not_listed_as_server(tmp_path, script):
    assert printing(tmp_path, script).servers(GPU) == {}


def test_a_program_that_prints_without_end_is_ended(tmp_path):
    control = printing(tmp_path, "exec yes")
    with pytest.raises(MpsError, match="printed more than 65536 bytes"):
        control.shut_down_server(GPU, 41)


def test_refusal_with_any_bytes_is_quoted_briefly(tmp_path):
    control = printing(tmp_path, r"head -c 5000 /dev/zero | tr '\0' '\377'; exit 1")
    with pytest.raises(MpsError) as caught:
        control.shut_down_server(GPU, 41)
    assert "ended with 1" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_servers_beyond_gpu_maximum_are_not_queried(tmp_path):
    control = printing(tmp_path, f"echo x >> {tmp_path}/asked; seq 1 3000")
    assert len(control.servers(GPU)) == 64
    assert len((tmp_path / "asked").read_text().splitlines()) == 65
