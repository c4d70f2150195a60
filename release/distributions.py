# SPDX-License-Identifier: Apache-2.0
"""The Python distributions: a wheel, and an sdist with everything that builds and tests the product."""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from release.source import Source
from release.tarball import Entry, write_tarball

_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def write_distributions(source: Source, out: Path) -> list[Path]:
    """Write the sdist, and the wheel that is built from it as an installer would; return their paths."""
    sdist = _write_sdist(source, out)
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as tar:
            tar.extractall(scratch, filter="data")
        [unpacked] = Path(scratch).iterdir()
        wheel = out / _build("build_wheel", unpacked, out, source.epoch)
    return [sdist, wheel]


def _write_sdist(source: Source, out: Path) -> Path:
    """Build the sdist by setuptools and MANIFEST.in, then write it again without the times and owners of this run."""
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / _build("build_sdist", source.root, Path(scratch), source.epoch)
        entries = {}
        with tarfile.open(built) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    entries[member.name] = Entry(content.read(), bool(member.mode & 0o100))
        target = out / built.name
    write_tarball(target, entries, epoch=source.epoch)
    return target


def _build(hook: str, tree: Path, out: Path, epoch: int) -> str:
    """Call a build hook of setuptools in a tree; return the name of the file it wrote."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", _BUILD, hook, str(out)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{hook} failed in {tree}:\n{done.stderr[-3000:]}")
    return done.stdout.splitlines()[-1]
