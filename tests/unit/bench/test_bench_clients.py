# SPDX-License-Identifier: Apache-2.0
"""The table of clients in the benchmarks is the page that their tests write."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import bench_clients
from tests.clients import page

PAGE = f"""{page.HEADER}
|---|---|---|---|---|---|
| nvtop | 3.0 | memory | passed | 8 GiB | – |
| mig-parted | | not run: no module | | | |
"""


@pytest.mark.parametrize(("flags", "light"), [((), False), (("--quick",), True)])
@pytest.mark.parametrize("status", [0, 1])
def test_each_row_is_printed_and_a_failed_check_ends_with_its_status(monkeypatch, capsys, flags, light, status):
    def run(command, **_):
        Path(command[command.index("--clients-page") + 1]).write_text(PAGE)
        assert ("--light" in command) == light
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_clients", *flags])
    assert bench_clients.main() == status
    printed = [page.cells_of(line) for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed[2:] == [["nvtop", "3.0", "memory", "passed", "8 GiB", "–"], ["mig-parted", "", "not run: no module", "", "", ""]]
