# SPDX-License-Identifier: Apache-2.0
"""When the shim cannot limit a program it says why, once, and does what the agent wrote: refuse the GPU, or let the program run."""

import os
import re
import struct
import subprocess

import pytest

from agent.core import region_layout
from agent.core.region_layout import DeviceLimit, Limits
from tests.fakes import regions
from tests.fakes.container import MIB, Node
from tests.fakes.cuda import NOT_PERMITTED
from tests.fakes.small_disk import small_disk

LIMIT_MIB = 2048
PROGRAM = "from tests.fakes.cuda import *\nimport ctypes, os\n"


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


def patch(path, offset, data):
    descriptor = os.open(path, os.O_RDWR)
    os.pwrite(descriptor, data, offset)
    os.close(descriptor)


NO_LOCKS = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>
#include <sys/syscall.h>
static int answer(int descriptor, int command, void *argument)
{
	if (command == F_OFD_SETLK && ((struct flock *)argument)->l_type == F_WRLCK) {
		errno = ERROR;
		return -1;
	}
	return (int)syscall(SYS_fcntl, descriptor, command, argument);
}
#define WRAP(name)                                                       \
	int name(int descriptor, int command, ...)                       \
	{                                                                \
		va_list list;                                            \
		va_start(list, command);                                 \
		void *argument = va_arg(list, void *);                   \
		va_end(list);                                            \
		return answer(descriptor, command, argument);            \
	}
WRAP(fcntl)
WRAP(fcntl64)
"""
"""A process that gets no write locks, as a seccomp profile or a file system without locks would."""


@pytest.mark.parametrize(("error", "says"), [("EPERM", "Operation not permitted"), ("ENOLCK", "No locks available")])
def test_refused_lock_is_named_at_once(node, tmp_path, error, says):
    library = tmp_path / "no_locks.so"
    (tmp_path / "no_locks.c").write_text(NO_LOCKS)
    subprocess.run(["cc", "-shared", "-fPIC", f"-DERROR={error}", "-o", library, tmp_path / "no_locks.c"], check=True)
    container = node.container(LIMIT_MIB)
    script = "import time\nbegin = time.monotonic()\ntell(result=call('cuInit', 0), seconds=time.monotonic() - begin)"
    answer = container.python(PROGRAM + script, env={"LD_PRELOAD": str(library)})
    assert answer.last["result"] == NOT_PERMITTED
    assert answer.last["seconds"] < 0.9, "it does not wait for a slot"
    [line] = answer.stderr.splitlines()
    assert f"a lock on the usage region is refused ({says})" in line
    assert "slots" not in line


DAMAGES = {
    "no limits": (lambda c: c.limits_path.unlink(), "no limits file"),
    "empty limits": (lambda c: os.truncate(c.limits_path, 0), "truncated"),
    "short limits": (lambda c: os.truncate(c.limits_path, 300), "do not fit"),
    "not limits": (lambda c: patch(c.limits_path, 0, b"x"), "not a limits file"),
    "newer limits": (lambda c: patch(c.limits_path, 8, struct.pack("<H", 2)), "ABI version 2"),
    "damaged limits": (lambda c: patch(c.limits_path, 400, b"x"), "checksum"),
    "limits half written": (lambda c: patch(c.limits_path, 16, struct.pack("<Q", 3)), "being written"),
    "no region": (lambda c: c.region_path.unlink(), "cannot open the usage region"),
    "short region": (lambda c: os.truncate(c.region_path, 5000), "truncated"),
    "not a region": (lambda c: patch(c.region_path, 0, b"x"), "not a usage region"),
    "newer region": (lambda c: patch(c.region_path, 8, struct.pack("<H", 2)), "ABI version 2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("interposition", ["front", "preload"])
def test_container_that_cannot_be_limited_gets_no_gpu_and_one_reason(node, interposition, damage):
    container = node.container(LIMIT_MIB, interposition=interposition)
    break_it, says = DAMAGES[damage]
    break_it(container)
    script = "tell(results=[call('cuInit', 0), call('cuInit', 0), alloc(MIB)[0], into('cuDevicePrimaryCtxRetain', 0)[0]])"
    answer = container.python(PROGRAM + script)
    assert answer.last == {"results": [800, 800, 3, 3]}
    [line] = answer.stderr.splitlines()
    assert line.startswith("aliquot: ")
    assert says in line
    assert line.endswith("refusing the GPU")
    assert node.physical_used_bytes(node.uuids[0]) == 0


@pytest.mark.parametrize("damage", ["no region", "short region", "newer region", "damaged limits"])
def test_open_policy_runs_program_without_limits_and_logs_it(node, damage):
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB),), fail_open=True))
    break_it, says = DAMAGES[damage]
    break_it(container)
    answer = container.python(PROGRAM + f"start()\ntell(result=alloc(2 * {LIMIT_MIB} * MIB)[0])")
    assert answer.last == {"result": 0}
    [line] = answer.stderr.splitlines()
    assert says in line
    assert "without limits" in line


def test_a_full_disk_refuses_the_gpu_and_does_not_kill_the_program(node, tmp_path):
    """The agent leaves the region sparse: the first program requests its pages, and there may be no room for them."""
    container = node.container(LIMIT_MIB)
    written = container.region_path.read_bytes()
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", mib=4) as disk:
        sparse = disk.directory / "region"
        sparse.write_bytes(written[:4096])
        os.truncate(sparse, len(written))
        disk.fill()
        container.region_path.unlink()
        container.region_path.symlink_to(sparse)
        answer = container.python(PROGRAM + "tell(result=call('cuInit', 0))")
        assert answer.last == {"result": 800}
        assert "no room for the" in answer.stderr
        disk.empty()
        assert container.python(PROGRAM + "start()\ntell(result=alloc(MIB)[0])").last == {"result": 0}


def test_nvml_is_refused_with_the_rest(node):
    container = node.container(LIMIT_MIB)
    container.limits_path.unlink()
    script = "import pynvml as n\ntry:\n    n.nvmlInit()\nexcept n.NVMLError as error:\n    tell(error=error.value)"
    answer = container.python(PROGRAM + script)
    assert answer.last == {"error": 4}
    assert "no limits file" in answer.stderr


def test_a_repaired_container_works_at_the_next_try(node):
    container = node.container(LIMIT_MIB)
    container.region_path.unlink()
    script = "tell(result=call('cuInit', 0))\ninput()\nstart()\ntell(total=info()[1])"
    with container.start_python(PROGRAM + script) as program:
        assert program.listen() == {"result": 800}
        container.region_path.write_bytes(regions.empty_region())
        assert program.ask("go") == {"total": LIMIT_MIB * MIB}


def test_limit_damaged_while_program_runs_keeps_its_value(node):
    container = node.container(LIMIT_MIB)
    with container.repl() as program:
        patch(container.limits_path, 400, b"x" * 8)  # memory_bytes of the first device; the checksum no longer fits
        patch(container.limits_path, 16, struct.pack("<Q", 4))
        assert program.ask("info")["total_bytes"] == LIMIT_MIB * MIB
        assert program.ask(f"alloc alloc {LIMIT_MIB * MIB}")["result"] == 2


@pytest.mark.parametrize("name", ["ALIQUOT_LIMITS", "CUDA_DEVICE_MEMORY_LIMIT", "ALIQUOT_DISABLE", "LD_PRELOAD"])
def test_no_environment_variable_changes_the_limit(node, name):
    container = node.container(LIMIT_MIB)
    assert container.client("info", env={name: ""}).last["total_bytes"] == LIMIT_MIB * MIB
    assert container.client("info", env={name: "0"}).last["total_bytes"] == LIMIT_MIB * MIB


def test_a_refusal_is_a_line_only_when_the_agent_asks_for_it(node):
    quiet, loud = node.container(LIMIT_MIB), node.container(LIMIT_MIB, log_level=region_layout.LOG_WARN)
    script = f"start()\ntell(result=alloc({LIMIT_MIB} * MIB)[0])"
    assert quiet.python(PROGRAM + script).stderr == ""
    [line] = loud.python(PROGRAM + script).stderr.splitlines()
    assert f"{LIMIT_MIB * MIB} bytes on {node.uuids[0]} refused" in line


def test_repeated_refusals_are_logged_at_bounded_rate_with_number_skipped(node):
    container = node.container(LIMIT_MIB, log_level=region_layout.LOG_WARN)
    script = f"""
import time
start()
begun = time.monotonic()
for _ in range(5000):
    alloc({LIMIT_MIB} * MIB)
time.sleep(1)
alloc({LIMIT_MIB} * MIB)
tell(seconds=time.monotonic() - begun)
"""
    answer = container.python(PROGRAM + script)
    lines = answer.stderr.splitlines()
    burst, per_second = 30, 3
    assert burst < len(lines) <= burst + per_second * (answer.last["seconds"] + 1)
    left_out = [
        int(reported.group(1))
        for line in lines
        if (reported := re.search(r"\((\d+) similar lines before this one were not printed\)$", line))
    ]
    assert len(lines) + sum(left_out) == 5001


# --- hostile regions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 20, 24, 28, 32, 36, 256, 4096, 4224, 300000])
def test_a_scribbled_region_never_crashes_or_hangs_a_program(node, offset):
    container = node.container(LIMIT_MIB)
    patch(container.region_path, offset, b"\xff" * 64)
    answer = container.client("fill")
    assert answer.status in (0, 1)
    assert answer.last["event"] in ("fill", "error")


def test_line_zeroed_by_tenant_is_corrected_when_memory_runs_out(node):
    container = node.container(LIMIT_MIB)
    with container.repl() as program:
        assert program.ask(f"alloc alloc {1024 * MIB}")["result"] == 0
        patch(container.region_path, region_layout.REGION_DEVICE_OFFSET, b"\0" * 8)
        assert program.ask(f"alloc alloc {LIMIT_MIB * MIB + MIB}")["result"] == 2
        assert program.ask(f"alloc alloc {1024 * MIB}")["result"] == 2
