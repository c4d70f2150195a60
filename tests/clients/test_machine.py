# SPDX-License-Identifier: Apache-2.0
"""The tests of the clients run on a machine's own driver too; here the simulated driver takes its place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aliquot import contract
from tests.clients import installing, page
from tests.clients.installing import ROOT, NotInstallableError, machine_client


@pytest.mark.timeout(400)
def test_checks_of_a_client_pass_on_the_machines_own_driver(build_dir: Path, sim_node, tmp_path: Path) -> None:
    """All GPUs are visible there, contexts are measured, and what needs the simulator is left out."""
    env = {**os.environ, contract.ENV_SIM_DIR: str(sim_node("h200x8")), "LD_LIBRARY_PATH": str(build_dir / "lib/sim")}
    rows = {}
    for client in ("cuda-bindings", "nvidia-smi"):
        file = tmp_path / f"{client}.md"
        options = ["--gpu", "--client", client, "--clients-page", str(file)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/clients", *options]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        rows[client] = [page.cells_of(row) for row in page.read_rows(file)[client]]
    assert rows["cuda-bindings"][0][2:] == ["cuMemAlloc to the last byte; one more is refused", "142,364 MiB", "7,662 MiB", "7,662 MiB"]
    assert not any("mig" in cells[2] for cells in rows["nvidia-smi"]), "a test changes no setting of a real GPU"


def test_program_of_the_machine_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvtop").write_text("#!/bin/sh\necho its own\n")
    (tmp_path / "nvtop").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    client = machine_client("nvtop", tmp_path)
    assert subprocess.check_output([client.program("nvtop")], text=True) == "its own\n"
    assert client.pin.version == "of this machine"


def test_packages_of_a_given_python_are_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "install_client", lambda name, build: pytest.fail(f"{name} was installed"))
    client = machine_client("nvitop", tmp_path, sys.executable)  # a package of the tests' own environment
    script = "import importlib.metadata as m; print(m.version('nvitop'))"
    assert subprocess.check_output([client.python, "-c", script], text=True).strip() == client.pin.version


def test_large_client_is_not_installed_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "install_client", lambda name, build: pytest.fail(f"{name} was installed"))
    with pytest.raises(NotInstallableError, match="make clients ARGS='--client pycuda'"):
        machine_client("pycuda", tmp_path, sys.executable)


def test_small_client_without_a_network_is_named_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(name: str, build: Path) -> None:
        raise AssertionError(f"found that installing {name} ended with 1")

    monkeypatch.setattr(installing, "install_client", no_network)
    with pytest.raises(NotInstallableError, match="installing py3nvml ended with 1"):
        machine_client("py3nvml", tmp_path)
