import os
import time
from pathlib import Path

import pytest

from agent.adapters.unchanged import SETTLED_NS, Unchanged


class Reader:
    def __init__(self) -> None:
        self.reads = 0
        self.files = Unchanged(self.read)

    def read(self, path: str) -> str:
        self.reads += 1
        return Path(path).read_text()


@pytest.fixture
def reader(monkeypatch):
    """A reader for whom every file is old: only the signature tells."""
    monkeypatch.setattr("agent.adapters.unchanged.SETTLED_NS", -SETTLED_NS)
    return Reader()


def test_a_file_that_stays_as_it_is_is_read_once(reader, tmp_path):
    path = tmp_path / "row"
    path.write_text("one")
    assert [reader.files.of(str(path)) for _ in range(3)] == ["one"] * 3
    assert reader.reads == 1


@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "written in place, with its times put back"])
def test_a_file_that_changes_is_read_again(reader, tmp_path, replace):
    path = tmp_path / "row"
    path.write_text("one")
    assert reader.files.of(str(path)) == "one"
    times = path.stat()
    deadline = time.monotonic() + 5
    while path.stat().st_ctime_ns == times.st_ctime_ns and time.monotonic() < deadline:  # until the file system's clock has ticked
        if replace:
            (tmp_path / "new").write_text("two")
            (tmp_path / "new").replace(path)
        else:
            path.write_text("two")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert reader.files.of(str(path)) == "two"


def test_what_has_just_changed_is_read_again_because_it_may_change_within_the_same_tick(tmp_path):
    reader, path = Reader(), tmp_path / "row"
    path.write_text("one")
    reader.files.of(str(path))
    reader.files.of(str(path))
    assert reader.reads == 2


def test_a_file_that_is_gone_is_not_remembered(reader, tmp_path):
    path = tmp_path / "row"
    path.write_text("one")
    reader.files.of(str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        reader.files.of(str(path))
    path.write_text("two")
    assert reader.files.of(str(path)) == "two"
