import pytest

from agent.adapters.mig_files import MigRecordFiles
from agent.core.mig import MigRecord

RECORD = MigRecord("GPU-1b2c/1g.10gb+me@3", "grant", "boot", "MIG-1", 9728 << 20, 1, 7, 9, 0)


@pytest.fixture
def files(tmp_path):
    return MigRecordFiles(tmp_path / "mig")


def test_a_record_outlives_the_agent_and_goes_when_it_is_removed(files, tmp_path):
    files.write(RECORD)
    assert MigRecordFiles(tmp_path / "mig").load() == [RECORD]
    files.remove(RECORD.place)
    assert files.load() == []
    files.remove(RECORD.place)


def test_a_record_is_replaced_as_a_whole_and_for_root_alone(files, tmp_path):
    files.write(MigRecord(RECORD.place, "grant", "boot"))
    files.write(RECORD)
    (path,) = (tmp_path / "mig").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert files.load() == [RECORD]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version":9}'])
def test_a_damaged_record_is_set_aside_and_the_others_are_read(files, tmp_path, content):
    files.write(RECORD)
    (tmp_path / "mig/GPU-1_1g.10gb@0.json").write_bytes(content)
    assert files.load() == [RECORD]
    assert (tmp_path / "mig/GPU-1_1g.10gb@0.damaged").exists()


def test_a_damaged_record_that_cannot_be_set_aside_is_no_reason_not_to_start(files, tmp_path, caplog):
    files.write(RECORD)
    (tmp_path / "mig/GPU-1_1g.10gb@0.json").write_bytes(b"")
    (tmp_path / "mig/GPU-1_1g.10gb@0.damaged").mkdir()
    assert files.load() == [RECORD]
    assert "it stays where it is" in caplog.text


def test_a_record_under_another_name_is_not_believed(files, tmp_path):
    files.write(RECORD)
    (path,) = (tmp_path / "mig").iterdir()
    path.rename(path.with_name("GPU-1b2c_1g.10gb@0.json"))
    assert files.load() == []
