# SPDX-License-Identifier: Apache-2.0
"""Mounts for tests. Without the right to mount, the test is skipped; any other failed mount fails it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SYS_ADMIN = 1 << 21
"""CAP_SYS_ADMIN from linux/capability.h."""


@contextmanager
def mounted(directory: Path, *arguments: str | Path) -> Iterator[None]:
    """Mount over an empty directory with the arguments of mount(8). Skips the test without the right to mount."""
    done = subprocess.run(["mount", *arguments, directory], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        error = done.stderr.strip()
        if not _may_mount() or "permission denied" in error:
            pytest.skip(f"needs a mount, which takes root with SYS_ADMIN: {error}")
        pytest.fail(f"mount {' '.join(map(str, arguments))} {directory}: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)  # processes with an open file keep it


def _may_mount() -> bool:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return bool(int(status["CapEff"], 16) & _SYS_ADMIN)
