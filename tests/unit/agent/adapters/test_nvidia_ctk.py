# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
from pathlib import Path

import pytest

from agent.adapters import nvidia_ctk
from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.node_abilities import driver_limits_trouble, mps_trouble
from agent.adapters.nvidia_ctk import FAILED_SECONDS, FRESH_SECONDS, NvidiaCtk
from agent.errors import StorageError

MIG = "MIG-1"


def spec(*names: str, **extra: object) -> dict[str, object]:
    return {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": name, "containerEdits": {}} for name in names], **extra}


class Program:
    """A program in place of nvidia-ctk, that notes how often it was run."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "nvidia-ctk"
        self._runs = directory / "runs"
        self._output = directory / "output"
        self.answer(spec("GPU-0"))
        self.script(f'echo "$@" >> {self._runs}\ncat {self._output}\n')

    def script(self, body: str) -> None:
        self.path.write_text(f"#!/bin/sh\n{body}")
        self.path.chmod(0o755)

    def answer(self, document: object) -> None:
        self._output.write_text(document if isinstance(document, str) else json.dumps(document))

    @property
    def runs(self) -> list[str]:
        return self._runs.read_text().splitlines() if self._runs.exists() else []


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def ctk(program, now):
    return NvidiaCtk(str(program.path), 5.0, monotonic=lambda: now[0])


def test_the_spec_is_what_the_program_prints(ctk, program):
    found = ctk.host_spec()
    assert list(found.devices) == ["GPU-0"]
    assert program.runs == ["cdi generate --format=json --device-name-strategy=uuid"]


def test_result_is_reused_until_it_is_old(ctk, program, now):
    ctk.host_spec()
    ctk.host_spec(["GPU-0"])
    assert len(program.runs) == 1
    now[0] += FRESH_SECONDS + 1
    ctk.host_spec()
    assert len(program.runs) == 2


def test_new_device_is_requested_at_once(ctk, program):
    ctk.host_spec()
    program.answer(spec("GPU-0", MIG))
    assert MIG in ctk.host_spec([MIG]).devices


def test_a_host_without_the_program_has_no_spec():
    assert NvidiaCtk("/no/such/nvidia-ctk", 5.0).host_spec() is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo trouble >&2; exit 3", "ended with 3: trouble"),
        ("exit 3", "ended with 3: without a message"),
        ("echo '{'", "printed no CDI spec"),
        ('printf \'{"kind": "\\377"}\'', "printed no CDI spec"),
        ('echo \'{"kind": "other.com/thing"}\'', "printed no CDI spec of NVIDIA GPUs"),
        ('echo \'{"kind": "nvidia.com/gpu", "cdiVersion": 6}\'', "want cdiVersion"),
        ("sleep 5", "did not end within 0.3 s"),
    ],
)
def test_failing_program_is_named_with_its_output(program, body, words):
    program.script(f"{body}\n")
    with pytest.raises(StorageError, match=words):
        NvidiaCtk(str(program.path), 0.3).host_spec()


def test_a_program_that_fails_is_not_run_again_at_once(ctk, program, now):
    program.script(f"echo run >> {program.path.parent}/runs; exit 3\n")
    for _ in range(3):
        with pytest.raises(StorageError, match="ended with 3"):
            ctk.host_spec()
    assert len(program.runs) == 1
    now[0] += FAILED_SECONDS + 1
    with pytest.raises(StorageError, match="ended with 3"):
        ctk.host_spec()
    assert len(program.runs) == 2


def test_unkillable_program_delays_no_caller(program, now, monkeypatch):
    ctk = NvidiaCtk(str(program.path), 0.1, monotonic=lambda: now[0])
    program.script("exec sleep 60\n")
    monkeypatch.setattr(nvidia_ctk, "ENDING_SECONDS", 0.1)
    kill = subprocess.Popen.kill
    held: list[subprocess.Popen] = []
    monkeypatch.setattr(
        subprocess.Popen, "kill", lambda process: held.append(process)
    )  # as the kernel does with one that waits inside the driver
    with pytest.raises(StorageError, match="did not end within"):
        ctk.host_spec()
    now[0] += FAILED_SECONDS + 1
    with pytest.raises(StorageError, match=f"process {held[0].pid} of an earlier call"):
        ctk.host_spec()
    kill(held[0])
    held[0].wait()
    program.script(f"cat {program.path.parent}/output\n")
    now[0] += FAILED_SECONDS + 1
    assert ctk.host_spec() is not None


class TestOrder:
    """Files first, then the program, then device nodes."""

    @pytest.fixture
    def static(self, tmp_path):
        (tmp_path / "etc").mkdir()
        return tmp_path / "etc"

    @pytest.fixture
    def directory(self, tmp_path, static, ctk):
        return CdiDirectory(tmp_path / "run", static, generate=ctk.host_spec)

    def test_existing_file_is_used_without_running_the_program(self, directory, static, program):
        (static / "nvidia.json").write_text(json.dumps(spec("GPU-9")))
        assert list(directory.host_spec(["GPU-9"]).devices) == ["GPU-9"]
        assert program.runs == []

    def test_without_a_file_the_program_is_run(self, directory):
        assert list(directory.host_spec().devices) == ["GPU-0"]

    def test_mig_instance_newer_than_file_is_requested_from_program(self, directory, static, program):
        (static / "nvidia.json").write_text(json.dumps(spec("GPU-9")))
        program.answer(spec("GPU-9", MIG))
        assert MIG in directory.host_spec([MIG]).devices

    def test_without_program_the_file_is_used(self, tmp_path, static):
        (static / "nvidia.json").write_text(json.dumps(spec("GPU-9")))
        assert list(CdiDirectory(tmp_path / "run", static).host_spec([MIG]).devices) == ["GPU-9"]

    def test_without_either_there_is_no_spec(self, tmp_path, static):
        assert CdiDirectory(tmp_path / "run", static).host_spec() is None


def test_mps_needs_its_program():
    assert "no such program" in mps_trouble("")
    assert "no such program" in mps_trouble("/no/such/program")
    assert mps_trouble("sh") == ""


def test_the_drivers_limits_need_the_hook_and_unified_cgroups(tmp_path):
    hook, host, cgroups = "/usr/bin/nvidia-cdi-hook", tmp_path / "node", tmp_path / "cgroup"
    (host / "usr/bin").mkdir(parents=True)
    cgroups.mkdir()
    assert "names no" in driver_limits_trouble("", host, cgroups)
    assert f"no {host}{hook}" in driver_limits_trouble(hook, host, cgroups)
    (host / "usr/bin/nvidia-cdi-hook").symlink_to("/where/only/the/host/sees/it")
    assert "cgroup v2" in driver_limits_trouble(hook, host, cgroups)
    (cgroups / "cgroup.controllers").touch()
    assert driver_limits_trouble(hook, host, cgroups) == ""
