# SPDX-License-Identifier: Apache-2.0
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from agent.adapters.processes import ProcProcesses
from agent.core.cgroups import ContainerRef, container_of
from aliquot_lab.standin.processes import ProcessTable

UID = "0c3c9f4e-6f0a-4a52-8f5e-5f6c2a1d9b77"
ID = "ab" * 16
FAMILY = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('up', flush=True); input()"


@pytest.fixture
def leader():
    command = [sys.executable, "-c", FAMILY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_cgroup_lists_every_process_of_its_container_and_no_other(tmp_path, leader):
    table = ProcessTable(tmp_path / "proc")
    table.add(leader.pid, UID, ID)
    pids = [int(path.name) for path in (tmp_path / "proc").iterdir()]
    assert len(pids) == 2
    for process in ProcProcesses(tmp_path / "proc").read(pids):
        assert container_of(process.cgroup) == ContainerRef(UID, ID)
        assert process.start_ticks == ProcProcesses().read([process.pid])[0].start_ticks


def test_ended_process_is_removed(tmp_path, leader):
    table = ProcessTable(tmp_path / "proc")
    table.add(leader.pid, UID, ID)
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + 60
    while list((tmp_path / "proc").iterdir()):
        assert time.monotonic() < deadline
        table.refresh()
    table.remove(leader.pid)
