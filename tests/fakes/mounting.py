"""Mounts for tests of what becomes of directories. Who may not mount skips the test; a mount that fails otherwise fails it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SYS_ADMIN = 1 << 21
"""CAP_SYS_ADMIN of linux/capability.h."""


@contextmanager
def mounted(directory: Path, *arguments: str | Path) -> Iterator[None]:
    """Mount something over an empty directory, as mount(8) does by these arguments. Skips the test where nothing may be mounted."""
    done = subprocess.run(["mount", *arguments, directory], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip()
        if not _may_mount() or "permission denied" in said:
            pytest.skip(f"needs a mount, which takes root with SYS_ADMIN: {said}")
        pytest.fail(f"mount {' '.join(map(str, arguments))} {directory}: {said}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)  # whoever still has a file open there keeps it


def _may_mount() -> bool:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return bool(int(status["CapEff"], 16) & _SYS_ADMIN)
