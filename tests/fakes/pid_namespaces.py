# SPDX-License-Identifier: Apache-2.0
"""Programs in their own pid namespace, as a container's programs can start them."""

import subprocess
from pathlib import Path

import pytest

from tests.fakes.container import Program

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Command prefix: the program gets pid 1 of a new namespace, and a /proc with this namespace only."""


def unshare_or_skip() -> tuple[str, ...]:
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    if "not permitted" in tried.stderr:
        pytest.skip(f"no pid namespace may be made here: {tried.stderr.strip()}")
    tried.check_returncode()
    return UNSHARE


def pid_of_first(program: Program) -> int:
    """Return the pid, as this process sees it, of the first process in the namespace of a program started with UNSHARE."""
    pid = program.process.pid
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
