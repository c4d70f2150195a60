# SPDX-License-Identifier: Apache-2.0
"""``aliquot demo`` passes on simulated nodes, fails when a limit does not hold, and always removes what it created."""

import ctypes.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "aliquot_cli", "demo", "--seconds", "1"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def place(build_dir):
    """A directory for the demo's temporary one, short enough for sockets; no file and no process that uses it may be left."""
    path = Path(tempfile.mkdtemp(prefix="aq-demo-"))
    yield path
    assert processes_of(path) == []
    assert list(path.iterdir()) == []
    path.rmdir()


def environment(place, **more):
    return {**os.environ, "TMPDIR": str(place), **more}


def run(place, *flags, **env):
    return subprocess.run([*COMMAND, *flags], cwd=ROOT, env=environment(place, **env), capture_output=True, text=True, timeout=90)


def processes_of(path):
    """Command lines of the processes that were started with this directory in their command line or environment."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            command, env = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if str(path).encode() in command + env:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


class Started:
    """A demo that runs while the test looks."""

    def __init__(self, place, *flags):
        self.output = place.parent / f"{place.name}.out"
        with self.output.open("w") as output:
            self.process = subprocess.Popen([*COMMAND, *flags], cwd=ROOT, env=environment(place), stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.output.unlink()

    def says(self, words):
        until(lambda: words in self.output.read_text() or self.process.poll() is not None)
        text = self.output.read_text()
        assert words in text, text
        return text


def check_report(result):
    report = json.loads(result.stdout)
    assert [check for check in report["checks"] if not check["passed"]] == []
    assert (result.returncode, result.stderr) == (0, "")
    assert report["passed"] is True
    assert report["seconds"] < 60
    return report


def test_every_check_passes_on_the_default_node(place):
    report = check_report(run(place, "--json"))
    pods = {row["pod"] for row in report["pods"]}
    assert {"train", "infer", "pair", "mig", "greedy", "too-big"} <= pods
    assert report["notes"] == []
    assert len({row["device"] for row in report["pods"] if row["pod"] == "pair"}) == 2
    assert len({row["limit_bytes"] for row in report["pods"]}) >= 4
    assert "aliquot_container_refusals_total" in report["metrics"]
    assert len(report["checks"]) > 20


def test_without_terminal_it_prints_lines_and_without_mig_it_reports_that(place):
    result = run(place, "--topology", "t4x2")
    assert result.returncode == 0, result.stdout
    for words in (
        "greedy",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "CreateContainerConfigError",
        "Driver Version",
        "aliquot_container_memory_used_bytes",
    ):
        assert words in result.stdout
    assert "\x1b" not in result.stdout
    assert "Note: no MIG instance" in result.stdout
    assert "FAIL" not in result.stdout


def test_shim_without_limits_fails_checks(place, build_dir):
    """The checks use measurements: with the bare driver in place of the shim, containers see the whole GPU and exceed their limit."""
    build = place / "build"
    (build / "lib").mkdir(parents=True)
    (build / "bin").symlink_to(build_dir / "bin")
    (build / "lib/sim").symlink_to(build_dir / "lib/sim")
    shutil.copytree(build_dir / "lib/shim", build / "lib/shim")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        shutil.copy(build_dir / "lib/sim" / name, build / "lib/shim" / name)
    result = run(place, "--json", "--topology", "t4x2", ALIQUOT_BUILD_DIR=str(build))
    shutil.rmtree(build)
    assert result.returncode == 1, result.stderr
    broken = {check["name"] for check in json.loads(result.stdout)["checks"] if not check["passed"]}
    assert {"train: cuMemGetInfo shows the share", "train: NVML shows the share", "greedy: exactly at its limit"} <= broken


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["Starting the agent", "Registered", "greedy:"])
def test_a_signal_ends_it_and_leaves_nothing(place, number, status, moment):
    with Started(place) as demo:
        demo.says(moment)
        demo.process.send_signal(number)
        assert demo.process.wait(30) == status
        assert "Traceback" not in demo.output.read_text()


def test_kept_containers_can_be_entered_until_ctrl_c(place):
    with Started(place, "--keep", "--topology", "t4x2") as demo:
        text = demo.says("aliquot-cuda-client info")
        command = next(line for line in text.splitlines() if "aliquot-cuda-client info" in line).partition("#")[0]
        seen = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
        device = json.loads(seen.stdout.splitlines()[1])
        assert device["event"] == "device", seen.stdout
        assert device["total_bytes"] < 15 * 2**30
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(30) == 0


def test_unknown_topology_is_reported_in_one_line(place):
    result = run(place, "--topology", "no-such-profile")
    assert result.returncode == 2
    assert "no-such-profile" in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2


def test_without_pytorch_one_line_says_how_to_install_it(place):
    result = run(place, "--torch", ALIQUOT_TORCH_PYTHON="/nowhere/python")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pip install torch==" in line


def test_real_and_topology_exclude_each_other(place):
    assert run(place, "--real", "--topology", "t4x2").returncode == 2


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has an NVIDIA driver")
def test_real_without_driver_reports_missing_driver(place):
    result = run(place, "--real")
    assert result.returncode == 2
    assert "no NVIDIA driver on this machine" in result.stderr
