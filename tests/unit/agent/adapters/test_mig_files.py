# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.adapters.mig_files import MigRecordFiles
from agent.core.mig import MigRecord

RECORD = MigRecord("GPU-1b2c/1g.10gb+me@3", "grant", "boot", "MIG-1", 9728 << 20, 1, 7, 9, 0)


@pytest.fixture
def files(tmp_path):
    return MigRecordFiles(tmp_path / "mig")


def test_record_survives_the_agent_until_removed(files, tmp_path):
    files.write(RECORD)
    assert MigRecordFiles(tmp_path / "mig").load() == [RECORD]
    files.remove(RECORD.place)
    assert files.load() == []
    files.remove(RECORD.place)


def test_record_is_replaced_atomically_and_readable_by_root_only(files, tmp_path):
    files.write(MigRecord(RECORD.place, "grant", "boot"))
    files.write(RECORD)
    (path,) = (tmp_path / "mig").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.load() == [RECORD]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version":9}'])
def test_damaged_record_is_renamed_and_others_are_read(files, tmp_path, content):
    files.write(RECORD)
    (tmp_path / "mig/GPU-1_1g.10gb@0.json").write_bytes(content)
    assert files.load() == [RECORD]
    assert (tmp_path / "mig/GPU-1_1g.10gb@0.damaged").exists()


def test_damaged_record_that_cannot_be_moved_does_not_stop_start(files, tmp_path, caplog):
    files.write(RECORD)
    (tmp_path / "mig/GPU-1_1g.10gb@0.json").write_bytes(b"")
    (tmp_path / "mig/GPU-1_1g.10gb@0.damaged").mkdir()
    assert files.load() == [RECORD]
    assert "the damaged MIG record cannot be moved" in caplog.text


def test_record_under_another_name_is_refused(files, tmp_path):
    files.write(RECORD)
    (path,) = (tmp_path / "mig").iterdir()
    path.rename(path.with_name("GPU-1b2c_1g.10gb@0.json"))
    assert files.load() == []
