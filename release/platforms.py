# SPDX-License-Identifier: Apache-2.0
"""The platforms of the images, and how this machine runs programs of another one: qemu's user emulation by binfmt_misc."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_BINFMT = "/proc/sys/fs/binfmt_misc"


class PlatformError(Exception):
    """This machine cannot run programs of a platform; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A Linux platform. OCI and Debian use the same name for its architecture."""

    architecture: str
    machine: str
    """The kernel's name, as ``uname -m`` prints it."""

    @property
    def is_native(self) -> bool:
        """This machine's processor runs it without emulation."""
        return os.uname().machine == self.machine

    @property
    def oci(self) -> dict[str, str]:
        """The platform as OCI documents name it."""
        return {"architecture": self.architecture, "os": "linux"}


AMD64 = Platform("amd64", "x86_64")
ARM64 = Platform("arm64", "aarch64")
ALL = {platform.architecture: platform for platform in (AMD64, ARM64)}


def host() -> Platform:
    """Return this machine's platform."""
    return next((platform for platform in ALL.values() if platform.is_native), AMD64)


@contextmanager
def runnable(platform: Platform) -> Iterator[None]:
    """Let the kernel run programs of the platform inside the block.

    A process holds binfmt_misc mounted in a mount namespace of its own, because newer kernels forget the entries with the last mount. An
    entry that was there before is used and stays.
    Raises: PlatformError when this machine has no emulator or no right to register it.
    """
    if platform.is_native:
        yield
        return
    entry = f"qemu-{platform.machine}"
    rule = Path("/usr/lib/binfmt.d") / f"{entry}.conf"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _HOLD, "sh", str(rule), entry]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        if holder.stdout is None or holder.stdout.readline().strip() != "ready":
            _, complaint = holder.communicate()
            hint = "" if rule.exists() else f"; {rule} is missing: install Debian's package qemu-user-static"
            raise PlatformError(f"this machine cannot run programs for {platform.architecture}: {complaint.strip()}{hint}")
        try:
            yield
        finally:
            holder.communicate("done\n")


_HOLD = """\
cd /proc/sys/fs/binfmt_misc
if ! [ -e register ]; then
    mount -n -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    cd /proc/sys/fs/binfmt_misc
fi
if ! [ -e "$2" ]; then
    cat "$1" > register
    mine=yes
fi
echo ready
read -r _ || true
[ -z "$mine" ] || echo -1 > "$2"
"""
"""Shell script that registers the emulator, and removes its entry when standard input ends.

$1 is the emulator's rule file. Its flag F opens the emulator at once, so it also works below a chroot. $2 is the name of the entry.
"""
