# SPDX-License-Identifier: Apache-2.0
"""No memory passes uncharged because a query to the driver failed: each query with each error, in every way to take memory.

A few cases of each query here; ``make bench`` runs all of them.
"""

import itertools
import re
from pathlib import Path

import pytest

from cuda_shim.coverage.tables import INTERPOSE_DIR
from tests.fakes import faults
from tests.fakes.container import SOURCE_TREE, Node
from tests.fakes.cuda import SUCCESS

pytestmark = [pytest.mark.timeout(300)]
"""A hundred programs take a while on a busy machine, and so does the compiler before them."""

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))]
"""Of the cases that are drawn, one of each query."""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture(scope="module")
def drivers(tmp_path_factory) -> Path:
    """Where the drivers that can fail are compiled, once."""
    return tmp_path_factory.mktemp("drivers")


@pytest.fixture
def faulty(node, drivers) -> faults.Faults:
    return faults.Faults(node, drivers)


def called_by_shim() -> set[str]:
    """Functions of the driver that the shim's sources call, by the way they call them; names that a macro builds are cut short."""
    text = "".join(path.read_text() for path in (SOURCE_TREE / "cuda_shim").rglob("*.[ch]"))
    return set(re.findall(r"\baq_cuda\.(cu\w+)", text))


def test_every_call_of_shim_to_driver_is_asked_about():
    asked = faults.questions()
    assert len(asked) > 150
    assert {name for name in called_by_shim() if not any(question.startswith(name) for question in asked)} == set()
    assert {"cuStreamIsCapturing", "cuCtxGetCurrent", "cuMemAlloc_v2"} <= set(asked)


def test_every_call_of_shim_to_nvml_is_asked_about():
    """A row in driver_nvml.h for each."""
    functions = re.findall(r"nvmlReturn_t \(\*(\w+)\)", (INTERPOSE_DIR / "driver_nvml.h").read_text())
    assert len(functions) == len(faults.nvml_questions()) > 5
    assert len(faults.nvml_errors()) > 30


def test_errors_that_shim_tells_apart_come_in_every_way():
    numbers = {
        name: int(number)
        for name, number in re.findall(r"\b(CUDA_ERROR_\w+) = (\d+)", (SOURCE_TREE / "cuda_shim/abi/cuda_abi.h").read_text())
    }
    sources = "".join(path.read_text() for path in INTERPOSE_DIR.glob("*.c"))
    compared = set(re.findall(r"[=!]= (CUDA_ERROR_\w+)", sources)) | set(re.findall(r"case (CUDA_ERROR_\w+)", sources))
    assert {"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_READY"} <= compared
    assert {numbers[name] for name in compared} <= set(faults.ERRORS)


def test_each_query_gets_each_error_of_cuda():
    assert set(faults.ERRORS) < set(faults.cuda_errors())
    pairs = {(case.question, case.error) for case in faults.all_cases()}
    assert pairs == set(itertools.product(faults.questions(), faults.cuda_errors()))


def test_without_fault_every_way_takes_memory_up_to_limit(faulty):
    """Otherwise the cases below would test nothing."""
    case = faults.Case("cuDriverGetVersion", SUCCESS, faults.AFTER_START, 1)
    outcome = faulty.run([case])
    assert outcome.findings == ()
    assert outcome.taken >= 4 * len(faults.WAYS)
    assert outcome.refused == len(faults.WAYS), "each way ends at the limit"


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.soak)], ids=["a third", "all"])
@pytest.mark.parametrize("start", faults.STARTS)
def test_failed_query_for_capture_lets_no_memory_pass(faulty, start, share):
    """A third of the cases from each start, together each case once."""
    cases = [
        faults.Case(question, error, start, period)
        for question in ("cuStreamIsCapturing", "cuStreamIsCapturing_ptsz")
        for error in faults.ERRORS
        for period in faults.PERIODS
    ]
    assert faulty.run(cases[faults.STARTS.index(start) % share :: share]).findings == ()


def test_no_failed_query_lets_memory_pass_without_nvml(node, drivers):
    """Then only what the device lacks bounds the cost of a context; to see its size, a module is unloaded."""
    faulty = faults.Faults(node, drivers, nvml=False)
    outcome = faulty.run(faults.some_cases(seed=1))
    assert outcome.findings == ()
    assert outcome.taken > outcome.cases


@pytest.mark.parametrize("seed", SEEDS)
def test_no_failed_query_lets_memory_pass(faulty, seed):
    outcome = faulty.run(faults.some_cases(seed))
    assert outcome.findings == ()
    assert outcome.cases == len(faults.questions())
    assert outcome.taken > outcome.cases, "the program does get memory"


def test_no_failed_query_to_nvml_lets_memory_pass(faulty):
    """With NVML the shim measures what a context or code takes. The shim queries how a process uses the GPU under an SM limit only."""
    counting = [case for case in faults.nvml_cases() if case.question not in ("nvmlShutdown", "nvmlDeviceGetProcessUtilization")]
    outcome = faulty.run(faults.some_cases(seed=2, each=6, of=counting))
    assert outcome.findings == ()
    assert outcome.asked >= outcome.cases - 6, "only a late failure of nvmlInit may come too late"
    assert outcome.taken > outcome.cases
