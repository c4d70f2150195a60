# SPDX-License-Identifier: Apache-2.0
"""A tenant that holds leases on files which it may open, as root in a container may on files of root."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KINDS = {"read": fcntl.F_RDLCK, "write": fcntl.F_WRLCK}
REASON = "no lease can be held here: that needs root or the file's owner, and a file system with leases"

_PROGRAM = """
import fcntl, os, signal, sys, time
path, kind, again = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "again"
signal.signal(signal.SIGIO, lambda *_: None)
descriptor = os.open(path, os.O_RDONLY)
try:
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
except OSError:
    print("refused", flush=True)
    sys.exit()
print("held", flush=True)
while True:
    time.sleep(0.02)
    if again and fcntl.fcntl(descriptor, fcntl.F_GETLEASE) != kind:  # another process waits: let it go, and be there first again
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, kind)
        except OSError:
            print("lost", flush=True)
            again = False
"""


@contextmanager
def lease(path: Path, kind: str, *, again: bool = False) -> Iterator[bool]:
    """Hold a lease in a process of its own inside the block; yield whether the kernel gave it.

    Args: kind: a key of ``KINDS``. again: give it up when another process waits, and try to hold it again at once.
    """
    command = [sys.executable, "-c", _PROGRAM, str(path), str(KINDS[kind]), "again" if again else "keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline() == "held\n"
        finally:
            process.kill()


def can_be_leased(path: Path) -> bool:
    """Whether a process can hold a lease of any kind on a file now."""
    for kind in KINDS:
        with lease(path, kind) as held:
            if held:
                return True
    return False
