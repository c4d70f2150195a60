# SPDX-License-Identifier: Apache-2.0
"""What can have become of a file: a disk that failed, an operator, a program of the host."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()
    (path / "x").touch()


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda _: None,
    "empty": lambda path: path.write_bytes(b""),
    "pipe": _pipe,
    "directory": _directory,
    "dangling-link": lambda path: path.symlink_to("nowhere"),
    "link-to-itself": lambda path: path.symlink_to(path.name),
    "nested": lambda path: path.write_bytes(b"[" * 200_000 + b"]" * 200_000),
    "nested-row": lambda path: path.write_bytes(b'{"version":1,"sha256":"","grant":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "huge": _huge,
    "wrong-types": lambda path: path.write_bytes(b'{"version":"one","sha256":[],"grant":7,"devices":{},"Data":0}'),
    "not-text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 500),
}


def damage(path: Path, how: str) -> None:
    """Put something else in the place of a file. Args: how: a key of ``DAMAGES``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    DAMAGES[how](path)
