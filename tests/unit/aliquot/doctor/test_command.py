import json

import pytest
import yaml
from click.testing import CliRunner

from aliquot.__main__ import main
from aliquot.cli import exit_codes
from aliquot.doctor import command, driver
from aliquot.doctor.cri import decode_texts
from aliquot.doctor.findings import Severity, error, ok, warning, worst
from aliquot.doctor.host import Host, UnreadableError
from aliquot.doctor.options import DoctorOptions
from tests.unit.aliquot.doctor.roots import healthy


@pytest.fixture
def root(monkeypatch, build_dir):
    answer = {"driver": "580.159.03", "gpus": [{"index": 0, "uuid": "GPU-0", "model": "NVIDIA H200", "compute_mode": 0}]}
    monkeypatch.setattr(driver, "probe", lambda _library: answer)
    with healthy() as made:
        yield made


def doctor(root, *arguments: str):
    return CliRunner().invoke(main, ["doctor", "--root", str(root.base), "--nvml", "libnvidia-ml.so.1", *arguments])


def test_a_healthy_node_passes(root):
    done = doctor(root)
    assert done.exit_code == exit_codes.OK, done.output
    assert "driver.module" in done.output
    assert "\x1b" not in done.output
    assert doctor(root, "-o", "wide").output == done.output


def test_errors_end_with_their_own_status_and_each_has_a_cure(root):
    root.remove("/dev/nvidiactl")
    done = doctor(root, "-o", "json")
    assert done.exit_code == exit_codes.FINDINGS
    document = json.loads(done.output)
    assert document["worst"] == "error"
    (found,) = [one for one in document["findings"] if one["severity"] == "error"]
    assert found["check"] == "driver.device-nodes"
    assert found["fix"]


def test_warnings_fail_only_where_that_is_asked_for(root):
    root.write("/proc/sys/fs/inotify/max_user_instances", "1\n")
    assert doctor(root).exit_code == exit_codes.OK
    assert doctor(root, "--fail-on", "warning").exit_code == exit_codes.FINDINGS
    assert yaml.safe_load(doctor(root, "-o", "yaml").output)["passed"] is True


def test_what_may_not_be_read_keeps_nothing_else_from_being_examined(root, monkeypatch):
    def unreadable(_host, _options):
        raise UnreadableError("/etc/secret: Permission denied")
        yield

    monkeypatch.setattr(command, "CHECKS", [("kubelet", unreadable), ("driver", driver.check)])
    found = command.examine(Host(root.base), DoctorOptions(nvml_library="x"))
    assert found[0].check == "kubelet.unreadable"
    assert any(finding.check == "driver.module" for finding in found)


def test_doctor_writes_nothing(root):
    def listing():
        return sorted((str(path), path.lstat().st_mtime_ns) for path in root.base.rglob("*"))

    before = listing()
    doctor(root)
    assert listing() == before


def test_the_gravest_finding_counts():
    assert worst([]) is Severity.OK
    assert worst([ok("a", ""), error("b", "", ""), warning("c", "", "")]) is Severity.ERROR


@pytest.mark.parametrize("message", [b"\x12", b"\x12\x05ab", b"\x08\x01", b"\xff" * 12])
def test_a_runtime_that_answers_something_else_is_noticed(message):
    with pytest.raises(ValueError, match=r"want texts only|cut short"):
        decode_texts(message)
