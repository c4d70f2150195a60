# SPDX-License-Identifier: Apache-2.0
"""Pids that NVML tells are of the caller's namespace, also where a container's programs have pid namespaces of their own."""

import pytest

from tests.fakes.container import MIB, Node
from tests.fakes.pid_namespaces import pid_of_first, unshare_or_skip

LIMIT_MIB = 4096
CONTEXT_MIB = 530
FIRST = 1
"""The pid of the first process of a namespace, within."""

LOOK = """
from tests.fakes.cuda import tell
import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
def pids(get):
    try:
        return sorted(entry.pid for entry in get(h))
    except n.NVMLError_NotFound:
        return []
def details(h):
    return n.nvmlDeviceGetRunningProcessDetailList(h, n.nvmlProcessDetailList_v1, n.NVML_PROCESS_MODE_ALL)
lists = [pids(get) for get in (
    n.nvmlDeviceGetComputeRunningProcesses, n.nvmlDeviceGetComputeRunningProcesses_v2, n.nvmlDeviceGetComputeRunningProcesses_v3, details)]
samples = [pids(lambda h: n.nvmlDeviceGetProcessUtilization(h, 0)), pids(lambda h: n.nvmlDeviceGetProcessesUtilizationInfo(h, 0))]
tell(lists=lists, samples=samples, used=n.nvmlDeviceGetMemoryInfo(h).used)
"""
LISTS, SAMPLES = 4, 2


@pytest.fixture(params=["front", "preload"])
def container(request, build_dir, sim_node, tmp_path):
    return Node(build_dir, sim_node("h200x8"), tmp_path).container(LIMIT_MIB, interposition=request.param)


def looked(answer):
    assert answer.status == 0, answer
    return answer.last


def test_each_namespace_sees_its_own_pids(container):
    """Two of the processes are number 1 to themselves."""
    unshare = unshare_or_skip()
    repl = [container.build / "bin/aliquot-cuda-client", "repl"]
    with container.repl() as outer, container.start([*unshare, *repl]) as one, container.start([*unshare, *repl]) as other:
        one.listen()
        other.listen()
        seen = {"outer": looked(container.python(LOOK))}
        for name, program in {"one": one, "other": other}.items():
            enter = ["nsenter", "--target", str(pid_of_first(program)), "--pid", "--mount"]
            seen[name] = looked(container.python(LOOK, behind=enter))
        seen["a third"] = looked(container.python(LOOK, behind=unshare))
        all_of_them = sorted([outer.process.pid, pid_of_first(one), pid_of_first(other)])
    known = {"outer": all_of_them, "one": [FIRST], "other": [FIRST], "a third": []}
    assert {name: reported["lists"] for name, reported in seen.items()} == {name: [pids] * LISTS for name, pids in known.items()}
    assert {reported["used"] for reported in seen.values()} == {3 * CONTEXT_MIB * MIB}, (
        "each process must see the same usage of the container"
    )


def test_samples_too_have_the_pids_that_the_caller_knows(container):
    unshare = unshare_or_skip()
    work = [container.build / "bin/aliquot-cuda-client", "work", "--seconds", "20", "--kernel-us", "2000"]
    with container.start([*unshare, *work]) as program:
        program.listen()
        inner = pid_of_first(program)
        outside = looked(container.python(LOOK))
        inside = looked(container.python(LOOK, behind=["nsenter", "--target", str(inner), "--pid", "--mount"]))
    assert outside["samples"] == [[inner]] * SAMPLES
    assert inside["samples"] == [[FIRST]] * SAMPLES


def test_a_process_keeps_its_name_when_it_asks_nvml_itself(container):
    """To read the region it is opened once more, and closing what was opened would let go of the lock by which the kernel names it."""
    unshare = unshare_or_skip()
    script = f"from tests.fakes.cuda import start\nstart()\n{LOOK}\nimport sys\nsys.stdin.readline()"
    with container.start_python(script, behind=unshare) as program:
        inside = program.listen()
        outside = looked(container.python(LOOK))
        inner = pid_of_first(program)
    assert inside["lists"] == [[FIRST]] * LISTS
    assert outside["lists"] == [[inner]] * LISTS
