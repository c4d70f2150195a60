# SPDX-License-Identifier: Apache-2.0
"""Compressed tar archives that are the same bytes for the same content."""

import gzip
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file."""

    data: bytes
    executable: bool = False


def write_tarball(target: Path, entries: Mapping[str, Entry], *, epoch: int) -> None:
    """Write a ``.tar.gz`` or ``.tgz`` of regular files, sorted by path, owned by root."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, entry in sorted(entries.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode, member.mtime = len(entry.data), 0o755 if entry.executable else 0o644, epoch
            tar.addfile(member, io.BytesIO(entry.data))
    target.write_bytes(gzip.compress(written.getvalue(), compresslevel=6, mtime=0))


def entries_below(folder: Path, prefix: str) -> dict[str, Entry]:
    """Return every file below a folder, links followed, by its path under ``prefix``."""
    found: dict[str, Entry] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found |= entries_below(path, f"{prefix}/{path.name}")
        else:
            found[f"{prefix}/{path.name}"] = Entry(path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found
