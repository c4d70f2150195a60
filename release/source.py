# SPDX-License-Identifier: Apache-2.0
"""The source tree that a release is made of: a copy in which only their content varies."""

import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

_NOT_TRACKED = {".git", ".venv", "build", "__pycache__"}
"""Left out of a tree without git, such as an unpacked sdist."""


class SourceError(Exception):
    """The tree cannot be released; the message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A clean copy of the tree."""

    root: Path
    epoch: int
    """SOURCE_DATE_EPOCH: the time of the commit, in seconds since 1970. Every file has it as its time."""
    changed: bool
    """The tree differed from its commit."""

    @property
    def version(self) -> str:
        """The version of the release, which pyproject.toml states."""
        return str(tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["version"])


def export(tree: Path, folder: Path) -> Source:
    """Copy the files of a tree that git does not ignore into a folder, which is emptied first.

    Raises: SourceError when the tree has no commit and SOURCE_DATE_EPOCH is not set.
    """
    names, commit_time, changed = _tracked(tree)
    stated = os.environ.get("SOURCE_DATE_EPOCH", commit_time)
    if not stated:
        raise SourceError(f"{tree} has no git commit to take the time of the release from: set SOURCE_DATE_EPOCH")
    epoch = int(stated)
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        copied = folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, copied, follow_symlinks=False)
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)
    return Source(folder, epoch, changed)


def _tracked(tree: Path) -> tuple[list[str], str, bool]:
    """Return the files, the time of the commit (empty without one), and whether the tree differs from it."""
    if not (tree / ".git").exists():
        paths = [path.relative_to(tree) for path in tree.rglob("*") if path.is_file() or path.is_symlink()]
        return sorted(str(path) for path in paths if not _NOT_TRACKED & set(path.parts)), "", False
    listed = _git(tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    names = [name for name in listed if name and os.path.lexists(tree / name)]
    return sorted(names), _git(tree, "log", "-1", "--format=%ct").strip(), bool(_git(tree, "status", "--porcelain"))


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True).stdout
