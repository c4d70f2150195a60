# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import yaml
from click.testing import CliRunner

from aliquot_cli import exit_codes
from aliquot_cli.__main__ import main
from aliquot_cli.doctor import command, driver
from aliquot_cli.doctor.cri import decode_strings
from aliquot_cli.doctor.findings import Severity, error, ok, warning, worst
from aliquot_cli.doctor.host import Host, UnreadableError
from aliquot_cli.doctor.options import DoctorOptions
from tests.unit.aliquot_cli.doctor.roots import healthy


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


def test_warnings_fail_only_on_request(root):
    root.write("/proc/sys/fs/inotify/max_user_instances", "1\n")
    assert doctor(root).exit_code == exit_codes.OK
    assert doctor(root, "--fail-on", "warning").exit_code == exit_codes.FINDINGS
    assert yaml.safe_load(doctor(root, "-o", "yaml").output)["passed"] is True


def test_unreadable_file_does_not_stop_other_checks(root, monkeypatch):
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


def test_highest_severity_counts():
    assert worst([]) is Severity.OK
    assert worst([ok("a", ""), error("b", "", ""), warning("c", "", "")]) is Severity.ERROR


@pytest.mark.parametrize("message", [b"\x12", b"\x12\x05ab", b"\x08\x01", b"\xff" * 12])
def test_invalid_runtime_reply_is_error(message):
    with pytest.raises(ValueError, match=r"expected string fields only|truncated"):
        decode_strings(message)
