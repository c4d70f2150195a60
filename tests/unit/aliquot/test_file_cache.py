# SPDX-License-Identifier: Apache-2.0
import os
import time
from pathlib import Path

import pytest

from aliquot.file_cache import SETTLED_NS, FileCache


class Reader:
    def __init__(self) -> None:
        self.reads = 0
        self.files = FileCache(self.read)

    def read(self, path: str) -> str:
        self.reads += 1
        return Path(path).read_text()


@pytest.fixture
def reader(monkeypatch):
    """A reader that treats every file as old, so that only the signature decides."""
    monkeypatch.setattr("aliquot.file_cache.SETTLED_NS", -SETTLED_NS)
    return Reader()


def test_a_file_that_stays_as_it_is_is_read_once(reader, tmp_path):
    path = tmp_path / "row"
    path.write_text("one")
    assert [reader.files.read(str(path)) for _ in range(3)] == ["one"] * 3
    assert reader.reads == 1


@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "written in place, with its times put back"])
def test_a_file_that_changes_is_read_again(reader, tmp_path, replace):
    path = tmp_path / "row"
    path.write_text("one")
    assert reader.files.read(str(path)) == "one"
    times = path.stat()
    deadline = time.monotonic() + 60
    while path.stat().st_ctime_ns == times.st_ctime_ns and time.monotonic() < deadline:  # until the file system's clock has ticked
        if replace:
            (tmp_path / "new").write_text("two")
            (tmp_path / "new").replace(path)
        else:
            path.write_text("two")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert reader.files.read(str(path)) == "two"


def test_recently_changed_file_is_reread_because_ticks_are_coarse(tmp_path):
    reader, path = Reader(), tmp_path / "row"
    path.write_text("one")
    reader.files.read(str(path))
    reader.files.read(str(path))
    assert reader.reads == 2


def test_missing_file_is_not_cached(reader, tmp_path):
    path = tmp_path / "row"
    path.write_text("one")
    reader.files.read(str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reader.files.read(str(path))
    path.write_text("two")
    assert reader.files.read(str(path)) == "two"
