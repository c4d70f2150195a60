# SPDX-License-Identifier: Apache-2.0
import mmap
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from agent.adapters.processes import ProcProcesses
from agent.core.overhead import HostProcess
from agent.errors import ProcessError

NOBODY = 65534
ANSWERS = (True, False, None)
EXITING = 0x4
ROOT_OF_VERSION_1 = "4:memory:/\n1:name=systemd:/\n0::/system.slice\n"


def test_own_process_is_identified():
    (found,) = ProcProcesses().read([os.getpid()])
    assert found.pid == os.getpid()
    assert found.namespace_pids[-1] == os.getpid()
    assert found.start_ticks > 0
    assert found.cgroup


def test_the_agents_own_cgroup_is_that_of_its_process(tmp_path):
    (found,) = ProcProcesses().read([os.getpid()])
    assert ProcProcesses().own_cgroup() == found.cgroup
    assert ProcProcesses(tmp_path).own_cgroup() == ""


def test_ended_process_is_left_out():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert ProcProcesses().read([gone.pid]) == []


def test_names_with_spaces_and_namespaces_are_read(tmp_path):
    directory = tmp_path / "12"
    directory.mkdir()
    fields = " ".join(str(number) for number in range(3, 53))
    (directory / "stat").write_text(f"12 (a) b (c) {fields}\n")
    (directory / "status").write_text("Name:\ta\nNSpid:\t12\t5\t1\n")
    (directory / "cgroup").write_text("0::/x\n")
    (found,) = ProcProcesses(tmp_path).read([12])
    assert (found.start_ticks, found.namespace_pids, found.cgroup) == (22, (12, 5, 1), "0::/x\n")


def entry(proc, pid: int, cgroup: str, *, state: str = "S", flags: int = 0, threads: int = 1) -> None:
    """Add a process to a made-up /proc."""
    directory = proc / str(pid)
    directory.mkdir()
    fields = [state, *map(str, range(4, 53))]
    fields[9 - 3], fields[20 - 3] = str(flags), str(threads)
    (directory / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
    (directory / "cgroup").write_text(cgroup)


def test_cgroups_of_all_processes_are_reported(tmp_path):
    (tmp_path / "sys").mkdir()
    (tmp_path / "99").mkdir()  # one that has gone meanwhile
    entry(tmp_path, 1, "0::/init.scope\n")
    entry(tmp_path, 2, "0::/\n", flags=EXITING)
    entry(tmp_path, 3, "0::/\n")
    assert ProcProcesses(tmp_path).cgroups() == {"0::/init.scope\n", "0::/\n"}
    assert ProcProcesses().own_cgroup() in ProcProcesses().cgroups()


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        pytest.param({"state": "D", "flags": EXITING | 0x400000}, "", id="hangs while it ends"),
        pytest.param({"state": "Z", "flags": EXITING, "threads": 2}, "", id="another thread of it does"),
        pytest.param({"state": "Z", "flags": EXITING}, ROOT_OF_VERSION_1, id="has ended"),
        pytest.param({"state": "S"}, ROOT_OF_VERSION_1, id="runs there"),
    ],
)
def test_cgroup_version_1_reports_nothing_for_ending_process(tmp_path, found, reported):
    entry(tmp_path, 1, ROOT_OF_VERSION_1, **found)
    assert ProcProcesses(tmp_path).cgroups() == {reported}


def test_file_is_recognised_among_mapped_ones_under_any_name(tmp_path):
    mapped, other = tmp_path / "region", tmp_path / "other"
    for path in (mapped, other):
        path.write_bytes(b"x" * 4096)
    alias = tmp_path / "alias"
    alias.hardlink_to(mapped)
    with alias.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert ProcProcesses().maps(os.getpid(), str(mapped)) is True
        assert ProcProcesses().maps(os.getpid(), str(other)) is False
    assert ProcProcesses().maps(os.getpid(), str(mapped)) is False


def test_missing_file_is_not_mapped(tmp_path):
    assert ProcProcesses(tmp_path).maps(1, str(tmp_path)) is False
    assert ProcProcesses().maps(os.getpid(), str(tmp_path / "missing")) is False


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_hidden_maps_are_unknown(tmp_path):
    """As an agent without SYS_PTRACE sees a process of another user."""
    other = os.getpid()
    looking = os.fork()
    if not looking:
        os.setgroups([])
        os.setuid(NOBODY)
        os._exit(ANSWERS.index(ProcProcesses().maps(other, "/")))
    _, status = os.waitpid(looking, 0)
    assert ANSWERS[os.waitstatus_to_exitcode(status)] is None


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_process_is_ended(sleeper):
    (found,) = ProcProcesses().read([sleeper.pid])
    assert ProcProcesses().kill(found)
    assert sleeper.wait(5) == -9


def test_process_with_reused_pid_is_not_ended(sleeper):
    (found,) = ProcProcesses().read([sleeper.pid])
    assert not ProcProcesses().kill(replace(found, start_ticks=found.start_ticks - 1))
    assert sleeper.poll() is None


def test_already_ended_process_needs_no_kill(sleeper):
    (found,) = ProcProcesses().read([sleeper.pid])
    sleeper.kill()
    sleeper.wait()
    assert not ProcProcesses().kill(found)


def host_process(proc, pid: int) -> HostProcess:
    """A process of the host. The host's /proc is mounted here while the agent has process ids of its own."""
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "stat").write_text(f"{pid} (train) {' '.join(str(number) for number in range(3, 53))}\n")
    (directory / "status").write_text(f"Name:\ttrain\nNSpid:\t{pid}\n")
    (directory / "cgroup").write_text("0::/x\n")
    (found,) = ProcProcesses(proc).read([pid])
    return found


def test_other_process_with_that_pid_in_agents_namespace_is_not_ended(sleeper, tmp_path):
    of_host = host_process(tmp_path, sleeper.pid)
    with pytest.raises(ProcessError, match="auditPolicy: kill needs hostPID"):
        ProcProcesses(tmp_path).kill(of_host)
    assert sleeper.poll() is None


def test_process_missing_in_agent_namespace_does_not_count_as_ended(sleeper, tmp_path):
    sleeper.kill()
    sleeper.wait()
    of_host = host_process(tmp_path, sleeper.pid)
    with pytest.raises(ProcessError, match="auditPolicy: kill needs hostPID"):
        ProcProcesses(tmp_path).kill(of_host)


def test_missing_capability_is_reported_with_what_to_do(sleeper, monkeypatch):
    (found,) = ProcProcesses().read([sleeper.pid])

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("signal.pidfd_send_signal", refuse)
    with pytest.raises(ProcessError, match="capability KILL"):
        ProcProcesses().kill(found)
