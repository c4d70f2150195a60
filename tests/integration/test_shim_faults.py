# SPDX-License-Identifier: Apache-2.0
"""No memory passes uncharged because a query to the driver failed: each query with errors of each class, in every way to take memory.

A few cases of each query here; ``make bench`` runs all of them.
"""

import re

import pytest

from tests.fakes import faults
from tests.fakes.container import SOURCE_TREE, Node
from tests.fakes.cuda import SUCCESS

EACH = 3
"""Cases of each query."""


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def faulty(node, tmp_path) -> faults.Faults:
    return faults.Faults(node, tmp_path)


def called_by_shim() -> set[str]:
    """Functions of the driver that the shim's sources call, by the way they call them; names that a macro builds are cut short."""
    text = "".join(path.read_text() for path in (SOURCE_TREE / "cuda_shim").rglob("*.[ch]"))
    return set(re.findall(r"\baq_cuda\.(cu\w+)", text))


def test_every_call_of_shim_to_driver_is_asked_about():
    asked = faults.questions()
    assert len(asked) > 150
    assert {name for name in called_by_shim() if not any(question.startswith(name) for question in asked)} == set()
    assert {"cuStreamIsCapturing", "cuCtxGetCurrent", "cuMemAlloc_v2"} <= set(asked)


def test_without_fault_every_way_takes_memory_up_to_limit(faulty):
    """Otherwise the cases below would test nothing."""
    case = faults.Case("cuDriverGetVersion", SUCCESS, faults.AFTER_START, 1)
    outcome = faulty.run([case])
    assert outcome.findings == ()
    assert outcome.taken >= 4 * len(faults.WAYS)
    assert outcome.refused == len(faults.WAYS), "each way ends at the limit"


@pytest.mark.parametrize("start", faults.STARTS)
def test_failed_query_for_capture_lets_no_memory_pass(faulty, start):
    cases = [
        faults.Case(question, error, start, period)
        for question in ("cuStreamIsCapturing", "cuStreamIsCapturing_ptsz")
        for error in faults.ERRORS
        for period in faults.PERIODS
    ]
    assert faulty.run(cases).findings == ()


def test_no_failed_query_lets_memory_pass_without_nvml(node, tmp_path):
    """Then only what the device lacks bounds the cost of a context; to see its size, a module is unloaded."""
    faulty = faults.Faults(node, tmp_path, nvml=False)
    outcome = faulty.run(faults.some_cases(seed=1))
    assert outcome.findings == ()
    assert outcome.taken > outcome.cases


def test_no_failed_query_lets_memory_pass(faulty):
    outcome = faulty.run(faults.some_cases(seed=len(faults.questions()), each=EACH))
    assert outcome.findings == ()
    assert outcome.cases == EACH * len(faults.questions())
    assert outcome.taken > outcome.cases, "the program does get memory"
