# SPDX-License-Identifier: Apache-2.0
"""The script for real GPUs (tests/bench/real_gpu.py) runs to its end without one, so that it works the one time there is one."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent.core.region_layout import DeviceLimit, Limits
from tests.bench import real_clients
from tests.bench.bench_shim import CLIENT
from tests.bench.real_clients import FILL, Clients, Measure, Place, last_events, reason_of_none, run_for, steps_per_second
from tests.bench.real_gpu import Guard
from tests.fakes.container import MIB, Container, Node, Program
from tests.fakes.machine import library_file
from tests.rendering import ROOT

STEPS = (
    "filled, bytes", "Shows the share, by route", "Monitoring in the container", "Calls",
    "Two tenants", "CUDA graphs", "A neighbour", "A kill", "Clients of tests/clients",
)  # fmt: skip


def run_script(*flags: str) -> list[str]:
    command = [sys.executable, "-m", "tests.bench.real_gpu", "--simulated", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_run_out_of_time_names_skipped_steps(build_dir: Path) -> None:
    said = run_script("--seconds", "0.5")
    for step in STEPS[3:]:  # the ones before may fit
        assert any(step in line and "not measured, the 0.5 s of a run were over" in line for line in said), step


def test_a_row_that_fails_or_hangs_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def fails():
        yield ("half a row",)
        raise ValueError("why")

    def hangs():
        yield ("before",)
        time.sleep(20)

    guard = Guard(60, measure_seconds=0.2)
    guard.table("One", ("what",), [fails, hangs, lambda: [("after",)]])
    guard.table("Other", ("what",), [lambda: [("all",)]])
    said = capsys.readouterr()
    for expected in ("| half a row", "| before", "| after", "One: a row failed: ValueError('why')", "One: a row hangs", "| all"):
        assert expected in said.out
    assert "Traceback" in said.err
    assert guard.failed == ["One", "One"]


def test_the_drivers_file_is_found_as_the_loader_finds_it() -> None:
    """A machine's driver may be in no cache of the loader, but where LD_LIBRARY_PATH says."""
    assert library_file("libc.so.6").name.startswith("libc")


@pytest.mark.soak
def test_every_step_of_the_script_runs_on_the_simulated_driver(build_dir: Path) -> None:
    said = run_script()
    assert "no PyTorch" in said[0]
    for step in STEPS:
        assert any(line.startswith("### ") and step in line for line in said), step
    assert not any("were over" in line for line in said)
    graphs = next(line for line in said if line.startswith("| graphs"))
    assert len(graphs.split("|")[5].split()) > 3, "an error for each second"
    by_nvml = [line.split("|")[4].strip() for line in said if line.startswith(("| 30/70", "| 50/50"))]
    assert all(20 < float(percent) < 80 for percent in by_nvml)
    assert len(by_nvml) == 4


# --- clients of others ------------------------------------------------------------------------------------------


@pytest.fixture
def node(build_dir: Path, sim_node, tmp_path: Path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


def place(node: Node, python: str | None = None, gguf: Path | None = None) -> Place:
    def container(memory_mib: int = 8192, percent: int = 0) -> Container:
        return node.container_with(Limits((DeviceLimit(node.uuids[0], memory_mib * MIB, sm_percent=percent),)))

    return Place(container, node.build / CLIENT, {}, lambda _: {}, python, gguf)


def program_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, script: str) -> None:
    folder.mkdir()
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def rows_of(measures: list[Measure]) -> list[tuple[str, ...]]:
    return [row for measure in measures for row in measure()]


def test_each_client_that_is_missing_is_named_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    clients = Clients(place(node))
    tables = (
        clients.fills, clients.libraries, clients.training, clients.collectives, clients.servers, clients.mps, clients.torch_tests,
    )  # fmt: skip
    assert [measure for table in tables for measure in table()] == []
    names = [text.partition(" (")[0] for text in clients.missing]
    assert names == ["PyTorch", "CuPy", "JAX", "vLLM", "llama.cpp", "MPS"]
    assert all(text.endswith(")") for text in clients.missing)


def test_llama_needs_a_model_and_reports_its_speed(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program_on_path(monkeypatch, tmp_path / "bin", "llama-bench", """echo '[{"n_prompt": 512, "n_gen": 0, "avg_ts": 1234.5}]'""")
    without = Clients(place(node))
    assert without.servers() == []
    assert "llama.cpp (--gguf names no model)" in without.missing
    assert rows_of(Clients(place(node, gguf=Path("model.gguf"))).servers()) == [("llama.cpp, 512 + 0 tokens", "1234 tokens/s")]


def test_mps_daemon_is_started_and_ended_around_its_client(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = 'if [ "$1" = -d ]; then echo start >> {0}; else read word; echo $word >> {0}; fi'.format(tmp_path / "calls")
    program_on_path(monkeypatch, tmp_path / "bin", "nvidia-cuda-mps-control", script)
    ((title, held, counted),) = rows_of(Clients(place(node)).mps())
    assert title == "held, counted"
    assert 7000 * MIB < int(held) < int(counted) <= 8192 * MIB
    assert (tmp_path / "calls").read_text().split() == ["start", "quit"]


def test_framework_that_is_installed_fills_its_share(node: Node, tmp_path: Path) -> None:
    """The script of a framework runs; here it is one that takes memory from the driver."""
    setup = """
import ctypes
from tests.fakes import cuda
cuda.start()
def take(size):
    result, pointer = cuda.into("cuMemAlloc_v2", size)
    if result:
        raise MemoryError("out of memory" if result == cuda.OUT_OF_MEMORY else f"error {result}")
    return pointer
total = lambda: cuda.info()[1]
"""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    clients = Clients(place(node, str(python)))
    ((name, held, total, _),) = clients._fill_by_script("a framework", FILL.format(setup=setup))
    assert (name, int(total)) == ("a framework", 8192 * MIB)
    assert 7000 * MIB < int(held) < 8192 * MIB


WHY = "not run: no network"


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        pytest.param([("4 MiB", "failed", "–")], "", id="one has a result"),
        pytest.param([(WHY, "–", "–"), (WHY, WHY, WHY)], WHY, id="one reason for all"),
        pytest.param([(WHY, "passed", "passed")], "", id="one way left out"),
        pytest.param([("", "", "")], "no check ended in time", id="cut off at once"),
    ],
)
def test_client_without_any_result_is_named_with_its_reason(cells, reason) -> None:
    assert reason_of_none([("nvtop", "3.0", "memory", *row) for row in cells]) == reason


def test_rows_of_other_clients_are_those_of_their_tests(node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each client of the pin table has a row for each check; PyTorch, where it is, has a table of its own."""

    def run(command, env, seconds):
        name, file = command[command.index("--client") + 1], Path(command[command.index("--clients-page") + 1])
        cells = {"nvtop": "failed", "pycuda": "not run: large"}.get(name, "passed")
        file.write_text(f"| {name} | 1.0 | views | {cells} | {cells} | – |\n")
        return None if name == "nvitop" else f"output of {name}"

    monkeypatch.setattr(real_clients, "run_for", run)
    clients = Clients(place(node, "/usr/bin/python3"))
    found = {str(measure.args[0]): measure for measure in clients.others() if isinstance(measure, functools.partial)}
    assert {"nvidia-smi", "nvtop", "go-nvml", "nvidia-ctk", "cuda-core", "numba-cuda"} < set(found)
    assert not {"torch", "mig-parted"} & set(found)
    assert list(found["py3nvml"]()) == [("py3nvml 1.0", "views", "passed", "passed", "–")]
    assert [row[:2] for row in found["nvitop"]()] == [("nvitop 1.0", "views"), ("nvitop", "the rest was cut off after 40 s")]
    assert list(found["pycuda"]()) == []
    assert clients.missing == ["pycuda (not run: large)"]
    with pytest.raises(AssertionError, match="a check of nvtop failed"):
        list(found["nvtop"]())
    monkeypatch.setattr(real_clients, "distribution_version", lambda _, name: "1.0" if name == "torch" else None)
    (torch,) = clients.torch_tests()
    assert list(torch()) == [("torch 1.0", "views", "passed", "passed", "–")]


@pytest.mark.parametrize("ours", [signal.default_int_handler, signal.SIG_IGN], ids=["in front", "in background"])
def test_command_is_cut_off_with_its_children_and_what_it_wrote_stays(tmp_path: Path, ours: Any) -> None:
    before = signal.signal(signal.SIGINT, ours)
    try:
        cut_off(tmp_path)
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)


def cut_off(tmp_path: Path) -> None:
    """Run a command that writes a file when it is interrupted, and check what is left of it."""
    script = f"trap 'echo done > {tmp_path}/end; exit' INT; sleep 60 & echo $! > {tmp_path}/child; wait"
    begun = time.monotonic()
    assert run_for(["sh", "-c", script], dict(os.environ), 0.5) is None
    assert time.monotonic() - begun < 30
    assert (tmp_path / "end").read_text() == "done\n"
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 60
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "a child still runs"
        time.sleep(0.02)
    assert run_for(["sh", "-c", "echo all; echo more >&2"], dict(os.environ), 60) == "all\nmore\n"


def test_rate_of_training_is_the_median_of_its_reports() -> None:
    lines = ["warning", *(json.dumps({"event": "progress", "seconds": at, "kernels": count}) for at, count in ((1, 4), (3, 12), (4, 5)))]
    with Program(subprocess.Popen(["printf", "%s\\n", *lines], stdout=subprocess.PIPE, text=True)) as program:
        assert steps_per_second(program) == 5


def test_failed_program_names_its_status_and_last_event() -> None:
    command = ["sh", "-c", """echo '{"event": "start"}'; exit 3"""]
    with (
        Program(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as program,
        pytest.raises(AssertionError, match=r"ended with 3, after \[\{'event': 'start'\}\]"),
    ):
        last_events(program)
