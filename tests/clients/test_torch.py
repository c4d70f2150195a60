# SPDX-License-Identifier: Apache-2.0
"""PyTorch from PyPI, unmodified, on our runtime: its allocators stop at the share, it trains next to a greedy neighbour, limits act.

The jobs are in ``torch_jobs.py``. A Python that has PyTorch already is used (``aliquot_lab/demo/torch_wheel.py``); otherwise the wheel is
installed into ``build/clients``. With ``--gpu`` PyTorch runs on its own runtime; what the script for real GPUs measures itself is left out.
"""

import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.adapters.node_files import PageFile
from agent.core.node_pages import PRIORITY
from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from aliquot_lab.demo import torch_wheel
from tests.bench.real_clients import Clients, Place, run_client
from tests.clients.conftest import INTERPOSITION
from tests.clients.harness import LIMIT_MIB, is_limited, is_simulated, wait_for
from tests.clients.installing import NotInstallableError, install_client, machine_client
from tests.fakes.container import CLIENT, MIB, SOURCE_TREE, Container, Node, Program
from tests.fakes.prototypes import preprocessed, read_prototypes, without_comments

LIMIT_TEXT = "a total capacity of 8.00 GiB"
LIMIT_TEXT_OF_POOLS = re.compile(r"Device limit *: 8.00 GiB")
SMALLEST_MIB = 2
"""Of PyTorch's allocator: what is left of a full share is less."""
PIECE_MIB = {"expandable segments": 20, "cudaMallocAsync": 32}
"""Of PyTorch's segments and of the driver's pools: the last piece may have no room for a tensor, or not fit."""
GEMM_SECONDS = 6
ERROR_POINTS = 6
"""What a share of time may be off on a busy machine, in percent of the device."""

ALLOCATORS = {
    "native": "",
    "expandable segments": "expandable_segments:True",
    "garbage collection": "garbage_collection_threshold:0.8",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}

pytestmark = [pytest.mark.client("torch"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest, build_dir: Path) -> str:
    """A Python with PyTorch."""
    found = torch_wheel.find_python()
    try:
        if request.config.getoption("--gpu"):
            return str(machine_client("torch", build_dir, request.config.getoption("--gpu-python") or found).python)
        return found or str(install_client("torch", build_dir).python)
    except NotInstallableError as exc:
        pytest.skip(str(exc))


class Jobs:
    """Runs jobs of PyTorch in containers."""

    def __init__(self, python: str) -> None:
        self._python = python

    def start(self, container: Container, *job: str, **settings: str) -> Program:
        """Start a job; its output is one JSON object for each line."""
        runtime = torch_wheel.simulated_environment(container.environment()) if is_simulated(container) else {}
        env = {"PYTHONPATH": str(SOURCE_TREE), "HOME": str(container.root), **runtime, **settings}
        return container.start([self._python, "-m", "tests.clients.torch_jobs", *job], env)

    def run(self, container: Container, *job: str, **settings: str) -> dict[str, dict[str, Any]]:
        """Run a job to its end; return its last event of each kind."""
        with self.start(container, *job, **settings) as program:
            events = [json.loads(line) for line in program.process.stdout if line.startswith("{")]
            assert program.process.wait(30) == 0
        return {event["event"]: event for event in events}


@pytest.fixture
def jobs(python: str) -> Jobs:
    return Jobs(python)


limited = pytest.mark.parametrize("way", ["front", "preload"])
"""A limit has no meaning without the shim."""


@pytest.fixture
def tenant(node: Node, way: str) -> Callable[..., Container]:
    """Make containers with a share of one GPU: ``tenant(sm_percent=30)``."""

    def make(**fields: Any) -> Container:
        limits = Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, **fields),))
        return node.container_with(limits, interposition=INTERPOSITION[way])

    return make


def allocator(setting: str) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.shows("limit", "view", "refusal")
@pytest.mark.parametrize("name", ALLOCATORS)
def test_allocator_fills_the_share_and_names_it(name: str, container: Container, jobs: Jobs) -> None:
    """each allocator fills the share, names it in OutOfMemoryError and gives it back"""
    reported = jobs.run(container, "fill", **allocator(ALLOCATORS[name]))
    start, full, end = reported["start"], reported["fill"], reported["end"]
    assert start["free_bytes"] - full["held_bytes"] < (PIECE_MIB.get(name, 0) + SMALLEST_MIB) * MIB
    assert end["free_bytes"] == start["free_bytes"]
    if is_limited(container):
        assert start["total_bytes"] == start["device_bytes"] == LIMIT_MIB * MIB
        assert LIMIT_TEXT in full["text"] or (name == "cudaMallocAsync" and LIMIT_TEXT_OF_POOLS.search(full["text"]))


@pytest.mark.simulated
def test_fraction_of_the_share_is_refused_by_pytorch(container: Container, jobs: Jobs) -> None:
    """set_per_process_memory_fraction counts in parts of the share"""
    reported = jobs.run(container, "fraction")
    half = reported["start"]["total_bytes"] / 2
    assert half - SMALLEST_MIB * MIB <= reported["fill"]["held_bytes"] <= half
    if is_limited(container):
        assert "4.00 GiB allowed" in reported["fill"]["text"]


@pytest.mark.simulated
def test_pinned_memory_takes_nothing_of_the_share(container: Container, jobs: Jobs) -> None:
    """pinned host memory is not charged"""
    reported = jobs.run(container, "pinned")
    assert reported["pinned"]["all_pinned"]
    assert reported["pinned"]["free_bytes"] == reported["start"]["free_bytes"] - reported["pinned"]["bytes"]
    assert reported["fill"]["free_bytes"] < SMALLEST_MIB * MIB


@pytest.mark.simulated
@limited
def test_private_pools_of_graphs_stop_at_the_share(container: Container, jobs: Jobs) -> None:
    """private pools of CUDA graphs fill the share and come back"""
    reported = jobs.run(container, "graphs")
    assert reported["start"]["free_bytes"] - reported["fill"]["held_bytes"] < 512 * MIB
    assert LIMIT_TEXT in reported["fill"]["text"]
    assert reported["end"]["free_bytes"] > reported["start"]["free_bytes"] - 64 * MIB


@pytest.mark.parametrize("name", ["native", "expandable segments"])
def test_tensor_handed_to_another_process_is_counted_once(name: str, container: Container, jobs: Jobs) -> None:
    """torch.multiprocessing: a shared tensor is counted once"""
    reported = jobs.run(container, "processes", **allocator(ALLOCATORS[name]))["shared"]
    assert reported["elements"] == 512 * MIB
    assert reported["exit_code"] == 0
    context_mib = reported["alone_mib"] - reported["beside_mib"]
    assert 0 < context_mib < 600
    assert reported["after_mib"] == reported["alone_mib"]


@pytest.mark.shows("processes", "kill")
def test_two_processes_share_one_limit_and_a_killed_one_gives_back(container: Container, jobs: Jobs) -> None:
    """two processes, one limit; kill -9 gives back"""
    with jobs.start(container, "commands") as first, jobs.start(container, "commands") as second:
        free_mib = min(first.listen()["free_bytes"], second.listen()["free_bytes"]) // MIB
        part_mib = free_mib * 6 // 10
        assert first.ask(f"alloc {part_mib}")["text"] == ""
        assert "out of memory" in second.ask(f"alloc {part_mib}")["text"]
        first.kill()
        wait_for(lambda: second.ask(f"alloc {part_mib}")["text"] == "")


@limited
def test_limit_is_lowered_and_raised_while_pytorch_runs(container: Container, jobs: Jobs) -> None:
    """limits lowered and raised while it runs"""
    with jobs.start(container, "commands") as program:
        program.listen()
        assert program.ask("alloc 2048")["text"] == ""
        container.set_memory(4096 * MIB)
        assert "a total capacity of 4.00 GiB" in program.ask("alloc 2048")["text"]
        container.set_memory(6144 * MIB)
        assert program.ask("alloc 2048")["text"] == ""
        assert program.ask("free")["total_bytes"] == 6144 * MIB


# --- compute ----------------------------------------------------------------------------------------------------------


def change(container: Container, **fields: Any) -> None:
    """Rewrite the first device's limits, as the agent does."""
    limits = container.limits()
    container.set_limits(replace(limits, devices=(replace(limits.devices[0], **fields),)))


def products_per_second(jobs: Jobs, *tenants: Container) -> list[float]:
    """Return the median rate of each tenant while all of them multiply matrices."""
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(jobs.start(one, "gemm", "--seconds", str(GEMM_SECONDS))) for one in tenants]
        outputs = [[json.loads(line) for line in program.process.stdout if line.startswith("{")] for program in programs]
    return [rate(output) for output in outputs]


def rate(events: list[Mapping[str, Any]]) -> float:
    """Return the median of the rates after the first reports."""
    progress = [event for event in events if event["event"] == "progress"]
    pairs = itertools.pairwise(progress)
    return statistics.median(after["kernels"] / (after["seconds"] - before["seconds"]) for before, after in pairs)


@pytest.mark.simulated
@limited
def test_products_of_matrices_get_their_share_of_time(tenant: Callable[..., Container], jobs: Jobs) -> None:
    """cuBLAS products keep to sm_percent, alone and next to a neighbour"""
    (alone,) = products_per_second(jobs, tenant())
    (held,) = products_per_second(jobs, tenant(sm_percent=30))
    small, large = products_per_second(jobs, tenant(sm_percent=20), tenant(sm_percent=50))
    got = {30: 100 * held / alone, 20: 100 * small / alone, 50: 100 * large / alone}
    assert all(percent / 2 < share <= percent + ERROR_POINTS for percent, share in got.items()), got


@limited
def test_low_priority_yields_to_high_priority(tenant: Callable[..., Container], jobs: Jobs, tmp_path: Path) -> None:
    """priority: high keeps its speed beside low"""
    page = PageFile(tmp_path / "shared", PRIORITY).make()
    high, low = (tenant(priority=priority, priority_line=1) for priority in (10, -10))
    for container in (high, low):
        (container.root / "run/aliquot/priority").hardlink_to(page)
    (alone,) = products_per_second(jobs, high)
    fast, slow = products_per_second(jobs, high, low)
    assert fast > 0.7 * alone
    assert slow < 0.3 * alone


@limited
def test_paused_pytorch_waits_and_goes_on(container: Container, jobs: Jobs) -> None:
    """pause and resume"""
    with jobs.start(container, "commands") as program:
        program.listen()
        program.ask("step")
        change(container, paused=True)
        time.sleep(0.5)
        program.tell("step")
        time.sleep(1)
        change(container, paused=False)
        assert program.listen()["seconds"] > 0.9
        assert program.ask("step")["seconds"] < 0.9


@pytest.mark.simulated
@limited
def test_transformer_trains_beside_a_greedy_neighbour(tenant: Callable[..., Container], jobs: Jobs) -> None:
    """a transformer trains (AdamW, autocast, GradScaler, checkpoint) next to a greedy neighbour"""
    with jobs.start(tenant(), "train", "--seconds", "8") as training, greedy_neighbour(jobs, tenant()):
        events = [json.loads(line) for line in training.process.stdout if line.startswith("{")]
        assert training.process.wait(30) == 0
    assert next(event for event in events if event["event"] == "checkpoint")["bytes"] > MIB
    assert len([event for event in events if event["event"] == "progress" and event["kernels"] > 0]) >= 3
    assert events[-1]["event"] == "trained"


@contextlib.contextmanager
def greedy_neighbour(jobs: Jobs, container: Container) -> Iterator[None]:
    """Fill a share and multiply matrices in it, until the end of the block."""
    with jobs.start(container, "fill") as filling, jobs.start(container, "gemm"):
        assert filling.listen()["event"] == "start"
        yield


# --- the demo and the script for real GPUs ---------------------------------------------------------------------------------


@pytest.mark.simulated
def test_script_for_real_gpus_measures_pytorch(node: Node, python: str) -> None:
    """the script for real GPUs measures it"""

    def container(memory_mib: int = LIMIT_MIB, percent: int = 0) -> Container:
        return node.container_with(Limits((DeviceLimit(node.uuids[0], memory_mib * MIB, sm_percent=percent),)))

    clients = Clients(Place(container, node.build / CLIENT, {}, torch_wheel.simulated_environment, python, None))
    libraries = {name: result for measure in clients.libraries() for name, result in measure()}
    assert libraries["cuBLAS"] == libraries["cuBLASLt"] == "works"
    assert "NOT_INITIALIZED" in libraries["cuDNN"]
    ((title, held, total, text),) = clients.fills()[0]()
    assert (title, total, text) == ("PyTorch, native", str(LIMIT_MIB * MIB), "total capacity of 8.00 GiB")
    assert int(held) > LIMIT_MIB * MIB * 0.9
    assert [what for measure in clients.training() for what, _ in measure()] == ["alone", "beside a neighbour that fills its share"]


@pytest.mark.timeout(400)
@pytest.mark.simulated
def test_checks_pass_on_the_machines_own_driver(python: str, build_dir: Path, sim_node, tmp_path: Path) -> None:
    """its tests on a machine's own driver, here the simulated one"""
    env = {**os.environ, contract.ENV_SIM_DIR: str(sim_node("h200x8")), "LD_LIBRARY_PATH": str(build_dir / "lib/sim")}
    rows, output = run_client("torch", python, env, 300, "(lowered or two_processes or allocator) and not bare")
    checked = {row[2]: row[3:] for row in rows}
    assert set(checked) == {"limits lowered and raised while it runs", "two processes, one limit; kill -9 gives back"}, output
    assert set(map(tuple, checked.values())) == {("–", "passed", "passed")}, output


@pytest.mark.simulated
def test_demo_passes_every_check_with_pytorch(python: str, build_dir: Path) -> None:
    """aliquot demo --torch passes its checks"""
    command = [sys.executable, "-m", "aliquot_cli", "demo", "--torch", "--json", "--seconds", "1"]
    env = {**os.environ, torch_wheel.ENV_PYTHON: python, "ALIQUOT_BUILD_DIR": str(build_dir)}
    done = subprocess.run(command, cwd=SOURCE_TREE, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert [check for check in checks if not check["passed"]] == []
    assert "greedy: PyTorch's message names the share" in {check["name"] for check in checks}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.simulated
def test_every_name_that_pytorch_imports_is_exported(python: str, build_dir: Path) -> None:
    """imports of the wheel's libraries are exported"""
    libraries = (package_folder(python, "torch") / "lib").glob("*.so")
    imported = {name for file in libraries for name in versioned_names(file, "--undefined-only")}
    ours = [build_dir / "lib/runtime" / name for name in torch_wheel.RUNTIME_LIBRARIES]
    exported = {name for file in ours for name in versioned_names(file, "--defined-only")}
    wanted = {name for name in imported if name.rpartition("@")[2] in {file.name for file in ours}}
    assert len(wanted) > 250
    assert wanted <= exported, sorted(wanted - exported)


@pytest.mark.simulated
def test_prototypes_of_the_stand_in_are_those_of_nvidias_headers(python: str) -> None:
    """the stand-in's cuBLAS prototypes agree with NVIDIA's headers"""
    headers = package_folder(python, "nvidia") / "cu13/include"
    theirs = read_prototypes("".join(without_comments(headers / name) for name in ("cublas_api.h", "cublasLt.h")))
    ours = read_prototypes(preprocessed("simulated_runtime/blas/calls.h", [SOURCE_TREE, SOURCE_TREE / "cuda_shim/abi"]))
    kinds = {name: [one.kind for one in parameters] for name, parameters in ours.items()}
    assert len(kinds) > 180
    assert kinds == {name: [one.kind for one in theirs[name]] for name in ours}


def package_folder(python: str, package: str) -> Path:
    """Return the folder of an installed package."""
    script = f"import importlib.util as u; print(u.find_spec({package!r}).submodule_search_locations[0])"
    return Path(subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip())


def versioned_names(file: Path, which: str) -> set[str]:
    """Return the dynamic symbols with their version nodes, as ``name@node``."""
    done = subprocess.run(["nm", "-D", which, file], capture_output=True, text=True, check=True)
    return {line.split()[-1].replace("@@", "@") for line in done.stdout.splitlines() if "@" in line}
