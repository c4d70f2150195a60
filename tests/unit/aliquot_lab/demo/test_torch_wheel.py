# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aliquot.paths import SOURCE_ROOT
from aliquot_lab.demo import torch_wheel
from aliquot_lab.demo.torch_wheel import NoTorchError, find_python, program_command, simulated_environment, torch_version


@pytest.fixture(autouse=True)
def no_torch_here(monkeypatch, tmp_path):
    """A machine without PyTorch, whatever this one has."""
    monkeypatch.delenv(torch_wheel.ENV_PYTHON, raising=False)
    monkeypatch.setattr(torch_wheel, "PLACE", tmp_path / "venv")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    torch_version.cache_clear()


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    """A build directory with the runtime's libraries."""
    (tmp_path / "lib/runtime").mkdir(parents=True)
    for name in torch_wheel.RUNTIME_LIBRARIES:
        library = tmp_path / "lib/runtime" / name
        library.parent.mkdir(exist_ok=True)
        library.touch()
    monkeypatch.setenv("ALIQUOT_BUILD_DIR", str(tmp_path))
    return tmp_path / "lib/runtime"


def python_with_torch(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\necho 2.15.0\n")
    path.chmod(0o755)
    return str(path)


def test_without_pytorch_the_message_has_the_command_that_installs_it():
    with pytest.raises(NoTorchError) as raised:
        program_command(simulated=True)
    assert torch_wheel.INSTALL in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_named_python_goes_before_others(monkeypatch, tmp_path):
    installed = python_with_torch(tmp_path / "venv/bin/python")
    assert find_python() == installed
    named = python_with_torch(tmp_path / "named")
    monkeypatch.setenv(torch_wheel.ENV_PYTHON, named)
    assert find_python() == named
    torch_version.cache_clear()
    monkeypatch.setenv(torch_wheel.ENV_PYTHON, "/nowhere/python")
    assert find_python() is None


def test_simulated_driver_gets_the_runtime_beside_what_is_preloaded(libraries):
    alone = simulated_environment({})["LD_PRELOAD"].split(":")
    assert alone == [str(libraries / name) for name in torch_wheel.RUNTIME_LIBRARIES]
    assert simulated_environment({"LD_PRELOAD": "/shim.so"})["LD_PRELOAD"].split(":") == ["/shim.so", *alone]


def test_command_keeps_what_a_container_preloads(libraries, tmp_path):
    python = python_with_torch(tmp_path / "venv/bin/python")
    Path(python).write_text('#!/bin/sh\n[ "$1" = -c ] && echo 2.15.0 && exit\necho "$LD_PRELOAD $1 $2"\n')
    command = f"{program_command(simulated=True)} fill"
    (preloaded, program, argument) = subprocess.run(
        ["/bin/sh", "-c", command], env={"LD_PRELOAD": ""}, capture_output=True, text=True, check=False
    ).stdout.split()
    assert preloaded.removeprefix(":").split(":") == [str(libraries / name) for name in torch_wheel.RUNTIME_LIBRARIES]
    assert (program, argument) == (str(torch_wheel.PROGRAM), "fill")


def test_real_driver_gets_no_library_of_ours(tmp_path):
    python = python_with_torch(tmp_path / "venv/bin/python")
    assert program_command(simulated=False) == f"exec {python} {torch_wheel.PROGRAM}"


def test_the_demo_installs_the_version_that_the_tests_run():
    pins = tomllib.loads((SOURCE_ROOT / "tests/clients/clients.toml").read_text())
    assert pins["torch"]["version"] == torch_wheel.VERSION
