# SPDX-License-Identifier: Apache-2.0
"""Container images made here from files of this machine, as OCI archives: there is no registry and no image builder.

The same files give the same archive. release/dockerfile.py makes those with a Dockerfile.
"""

import fcntl
import io
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from release.archive import write_archive
from tests.e2e.cluster.paths import BUILD

BUSYBOX = Path("/bin/busybox")
LIBRARY_DIR = "usr/lib/x86_64-linux-gnu"
AT_ONCE = {"StopSignal": "SIGKILL"}
"""For images with programs that have nothing to finish: a first process ignores a SIGTERM that it does not handle.

Every pod would end by waiting out its grace period."""


@contextmanager
def one_process() -> Iterator[None]:
    """Make images inside the block: each process of a run makes the same files, and another may be at it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(slots=True)
class Rootfs:
    """The files of an image, by path without a leading slash."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    """Path -> a file of this machine to copy, or contents. Executable when the source is, or when given as contents."""
    links: dict[str, str] = field(default_factory=dict)
    """Path -> what the symbolic link says."""
    folders: set[str] = field(default_factory=set)
    setuid: set[str] = field(default_factory=set)
    """Paths of files that run as their owner, root."""

    def add_busybox(self) -> None:
        """A shell and the usual commands, static."""
        self.files["bin/busybox"] = BUSYBOX
        applets = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split()
        self.links.update({f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"})
        self.files["etc/passwd"] = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
        self.files["etc/group"] = b"root:x:0:\nnogroup:x:65534:\n"
        self.folders |= {"proc", "sys", "dev", "root", "run", "tmp", "var"}

    def add_program(self, program: Path, at: str) -> None:
        """A dynamic program of this machine with the libraries its loader names."""
        self.files[at] = program
        for library in linked_libraries([program]):
            self.add_library(library)

    def add_library(self, library: Path) -> None:
        """A shared library, in the folder where Debian's loader looks; the loader itself also under the path programs name."""
        self.files[f"{LIBRARY_DIR}/{library.name}"] = library.resolve()
        if library.name.startswith("ld-linux"):
            self.links[f"lib64/{library.name}"] = f"/{LIBRARY_DIR}/{library.name}"
            self.links["lib"] = "usr/lib"

    def layer(self) -> bytes:
        """An uncompressed tar, the same for the same files."""
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for folder in sorted(self.folders | set(_parents([*self.files, *self.links])) - set(self.links)):
                _add(tar, folder, tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755)
            for path, link in sorted(self.links.items()):
                _add(tar, path, tarfile.SYMTYPE, link=link)
            for path, source in sorted(self.files.items()):
                data = source if isinstance(source, bytes) else source.read_bytes()
                executable = isinstance(source, bytes) or bool(source.stat().st_mode & 0o111)
                mode = 0o4755 if path in self.setuid else 0o755 if executable else 0o644
                _add(tar, path, tarfile.REGTYPE, mode=mode, data=data)
        return written.getvalue()


def linked_libraries(programs: Iterable[Path]) -> set[Path]:
    """What the dynamic loader would load for these programs or libraries, itself included."""
    libraries = set()
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        libraries |= {Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", listed, re.MULTILINE)}
    return libraries


def busybox_image(archive: Path, name: str, command: list[str]) -> None:
    """An image of busybox alone."""
    rootfs = Rootfs()
    rootfs.add_busybox()
    write_archive(archive, name, [rootfs.layer()], {"Cmd": command, "Env": ["PATH=/bin"], **AT_ONCE})


def _parents(paths: Iterable[str]) -> set[str]:
    return {str(parent) for path in paths for parent in Path(path).parents if str(parent) != "."}


def _add(tar: tarfile.TarFile, path: str, kind: bytes, *, mode: int = 0o755, link: str = "", data: bytes = b"") -> None:
    member = tarfile.TarInfo(path)
    member.type, member.mode, member.linkname, member.size = kind, mode, link, len(data)
    tar.addfile(member, io.BytesIO(data))
