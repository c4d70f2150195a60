import os
import subprocess
import sys

from agent.adapters.processes import ProcProcesses


def test_this_process_is_who_it_is():
    (found,) = ProcProcesses().read([os.getpid()])
    assert found.pid == os.getpid()
    assert found.namespace_pids[-1] == os.getpid()
    assert found.start_ticks > 0
    assert found.cgroup


def test_a_process_that_is_gone_is_left_out():
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
