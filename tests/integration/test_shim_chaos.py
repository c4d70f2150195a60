# SPDX-License-Identifier: Apache-2.0
"""Processes of a container that fork, exec, stop and are killed: their memory comes back, no process hangs, no process gets too much.

The protocol itself is model-checked in tests/property/test_reserve_protocol.py, and the C of it driven in cuda_shim/tests/test_region.c.
"""

import contextlib
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core import region_layout
from agent.core.region_layout import DeviceLimit, Limits, RegionError
from tests.fakes import regions
from tests.fakes.container import MIB, Container, Node
from tests.fakes.stop_in_lock import StopInLock, wait_until_stopped

LIMIT_MIB = 4096
CONTEXT_MIB = 530
BOUND_SECONDS = 5.0
"""Far more than any of this takes; a hang takes longer."""

PROGRAM = "from tests.fakes.cuda import *\nimport ctypes, os, sys, time\n"


@pytest.fixture
def node(build_dir, sim_node, tmp_path) -> Node:
    return Node(build_dir, sim_node("h200x8"), tmp_path)


@pytest.fixture
def container(node) -> Container:
    return node.container(LIMIT_MIB)


@contextlib.contextmanager
def within(seconds):
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


# --- kills ------------------------------------------------------------------------------------------------------


def test_what_a_killed_process_held_is_there_for_the_next_request(container):
    with container.repl() as holder, container.repl() as survivor:
        assert holder.ask(f"alloc alloc {2500 * MIB}")["result"] == 0
        assert survivor.ask(f"alloc alloc {2500 * MIB}")["result"] == 2
        holder.kill()
        assert container.dead_slots() != ()
        with within(BOUND_SECONDS):
            assert survivor.ask(f"alloc alloc {2500 * MIB}")["result"] == 0
        assert container.dead_slots() == ()
        assert container.line_bytes() == container.used_bytes() == (2500 + CONTEXT_MIB) * MIB


def test_a_killed_siblings_memory_shows_as_free(container):
    with container.repl() as holder, container.repl() as survivor:
        assert holder.ask(f"alloc alloc {1000 * MIB}")["result"] == 0
        holder.kill()
        deadline = time.monotonic() + BOUND_SECONDS
        while survivor.ask("info")["free_bytes"] != (LIMIT_MIB - CONTEXT_MIB) * MIB:
            assert time.monotonic() < deadline, container.snapshot()


FAMILY = """
import ctypes, os, random, signal, sys
from tests.fakes.cuda import *

ctypes.CDLL("libcuda.so.1")  # before forking, so that children start fast; no call is made

def churn():
    random.seed(os.getpid())
    start()
    held = []
    while True:
        result, address = alloc(random.randrange(1, 64 * MIB))
        if result == SUCCESS:
            held.append(address)
        if result != SUCCESS or len(held) > 8:
            while held:
                must("cuMemFree_v2", held.pop())

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    count, children = int(line), []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            sys.stderr.close()
            try:
                churn()
            finally:
                os._exit(1)
        children.append(pid)
    tell(children=children)
"""
"""Children that allocate and free until they are killed; a context that does not fit ends one early."""

KILLS, AT_ONCE = 300, 10


def kill_all(pids):
    """SIGKILL, and wait until all are gone: the signal is sent at once, the death takes its time."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + BOUND_SECONDS
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.0002)


def test_survivors_of_300_kills_never_hang_lose_or_gain(container):
    """Killed at random instants: while starting, making a context, allocating, freeing, reaping."""
    chance = random.Random(20261121)
    with container.repl() as survivor, container.start_python(FAMILY) as family:
        for _ in range(KILLS // AT_ONCE):
            children = family.ask(str(AT_ONCE))["children"]
            time.sleep(chance.uniform(0, 0.03))
            kill_all(children)
            with within(BOUND_SECONDS):
                assert survivor.ask("info")["event"] == "device"
            assert container.line_bytes() <= LIMIT_MIB * MIB
        with within(BOUND_SECONDS):
            assert survivor.ask(f"alloc alloc {(LIMIT_MIB - CONTEXT_MIB) * MIB}")["result"] == 0
        assert container.line_bytes() == container.used_bytes() == LIMIT_MIB * MIB


def test_newcomers_after_kills_while_starting_are_never_stuck(container):
    chance = random.Random(7)
    with container.start_python(FAMILY) as family:
        for _ in range(20):
            children = family.ask("5")["children"]
            time.sleep(chance.uniform(0, 0.005))
            kill_all(children)
            with within(BOUND_SECONDS):
                filled = container.client("fill", "--step", "2048").last
            assert filled["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


def test_stopped_process_keeps_memory_and_delays_no_other(container):
    with container.repl() as stopped, container.repl() as other:
        assert stopped.ask(f"alloc alloc {1000 * MIB}")["result"] == 0
        os.kill(stopped.process.pid, signal.SIGSTOP)
        with within(BOUND_SECONDS):
            rest = other.ask("info")["free_bytes"]
            assert rest == (LIMIT_MIB - 1000 - 2 * CONTEXT_MIB) * MIB
            assert other.ask(f"alloc alloc {rest + 512}")["result"] == 2
            assert other.ask(f"alloc alloc {rest}")["result"] == 0
        os.kill(stopped.process.pid, signal.SIGCONT)
        assert stopped.ask("free alloc 0")["result"] == 0


REPAIR_LOCK = 0
"""AQ_REPAIR_LOCK_OFFSET of cuda_shim/region/layout.h."""


def slot_lock(index):
    return region_layout.REGION_SLOT_OFFSET + index * region_layout.SLOT_BYTES


@pytest.mark.parametrize(
    ("offset", "kept_mib"),
    [
        pytest.param(REPAIR_LOCK, 0, id="repairing"),
        pytest.param(slot_lock(0), 1000, id="reaping a dead slot"),
        pytest.param(slot_lock(0), 0, id="taking a slot"),
    ],
)
def test_process_stopped_under_region_lock_delays_no_other(offset, kept_mib, container, tmp_path):
    """It is stopped while it attaches. Memory of the dead in its hands waits for it; all the rest is granted, newcomers start."""
    dead, sibling = container.repl(), container.repl()
    with dead, sibling:
        assert dead.ask(f"alloc alloc {(1000 - CONTEXT_MIB) * MIB}")["result"] == 0
        dead.kill()
        if not kept_mib:  # its slot is free when the one to be stopped looks for work
            assert sibling.ask("info")["free_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB
        command = [container.build / "bin/aliquot-cuda-client", "repl"]
        with container.start(command, StopInLock(tmp_path).environment(offset)) as stopped:
            wait_until_stopped(stopped.process)
            with within(BOUND_SECONDS), container.repl() as newcomer:
                rest = newcomer.ask("info")["free_bytes"]
                assert rest == (LIMIT_MIB - kept_mib - 2 * CONTEXT_MIB) * MIB
                assert newcomer.ask(f"alloc alloc {rest + 512}")["result"] == 2
                assert sibling.ask(f"alloc alloc {rest + 512}")["result"] == 2
                assert sibling.ask(f"alloc alloc {rest}")["result"] == 0
                assert sibling.ask("free alloc 0")["result"] == 0
            os.kill(stopped.process.pid, signal.SIGCONT)
            assert stopped.listen()["event"] == "ready"
            assert stopped.ask("info")["free_bytes"] == (LIMIT_MIB - 2 * CONTEXT_MIB) * MIB


# --- fork and exec ------------------------------------------------------------------------------------------------


def test_child_forked_before_cuda_has_own_slot(container):
    script = """
child = os.fork()
if child == 0:
    start()
    alloc(100 * MIB)
    tell(who="child", free=info()[0])
    os._exit(0)
os.waitpid(child, 0)
start()
tell(who="parent", free=info()[0])
"""
    child, parent = container.python(PROGRAM + script).events
    assert child == {"who": "child", "free": (LIMIT_MIB - CONTEXT_MIB - 100) * MIB}
    assert parent == {"who": "parent", "free": (LIMIT_MIB - CONTEXT_MIB) * MIB}


def test_memory_of_dead_parent_is_credited_although_child_lives(container):
    script = """
start()
alloc(1000 * MIB)
if os.fork() == 0:
    tell(child=os.getpid())
    sys.stdin.read()
    os._exit(0)
time.sleep(60)
"""
    with container.start_python(PROGRAM + script) as program:
        child = program.listen()["child"]
        program.kill()
        os.kill(child, 0)
        filled = container.client("fill").last
        os.kill(child, signal.SIGKILL)
    assert filled["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


def test_child_forked_while_thread_takes_slot_does_not_hold_it(container):
    container.region_path.write_bytes(regions.foreign_region(slots=1))
    script = """
import threading
def begin():
    while call("cuInit", 0):
        pass
    start()
thread = threading.Thread(target=begin)
tell(begins=True)
thread.start()
time.sleep(0.2)  # of the second that a newcomer waits for a slot
child = os.fork()
if child:
    thread.join()
    tell(child=child)
sys.stdin.read()
"""
    with contextlib.ExitStack() as programs:
        holder = programs.enter_context(container.repl())
        program = programs.enter_context(container.start_python(PROGRAM + script))
        assert program.listen() == {"begins": True}
        time.sleep(0.4)
        holder.kill()
        child = program.listen()["child"]
        program.kill()
        os.kill(child, 0)
        filled = container.client("fill").last
        os.kill(child, signal.SIGKILL)
    assert filled["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


def test_exec_gives_back_what_the_program_before_held(container):
    script = f"""
start()
alloc(1000 * MIB)
os.execv({str(container.build / "bin/aliquot-cuda-client")!r}, ["client", "info"])
"""
    assert container.python(PROGRAM + script).last["free_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


def test_a_program_started_by_one_that_holds_memory_counts_for_itself(container):
    script = f"""
import subprocess
start()
alloc(1000 * MIB)
subprocess.run([{str(container.build / "bin/aliquot-cuda-client")!r}, "info"])
tell(free=info()[0])
"""
    *_, inner, outer = container.python(PROGRAM + script).events
    assert inner["free_bytes"] == (LIMIT_MIB - 1000 - 2 * CONTEXT_MIB) * MIB
    assert outer["free"] == (LIMIT_MIB - 1000 - CONTEXT_MIB) * MIB


# --- many -----------------------------------------------------------------------------------------------------------


def test_sixteen_processes_start_together_at_once(node):
    container = node.container(16 * CONTEXT_MIB)
    with contextlib.ExitStack() as stack, within(BOUND_SECONDS):
        programs = [stack.enter_context(container.start([container.build / "bin/aliquot-cuda-client", "repl"])) for _ in range(16)]
        assert {program.listen()["event"] for program in programs} == {"ready"}
        assert container.line_bytes() == 16 * CONTEXT_MIB * MIB
        assert len(container.snapshot().slots) == 16
        assert container.dead_slots() == ()


def test_threads_of_one_process_share_its_slot_and_its_limit(container):
    script = """
import threading
start()
free = info()[0]
context = out()
must("cuCtxGetCurrent", ctypes.byref(context))
held = []
def churn():
    must("cuCtxSetCurrent", context.value)
    for _ in range(300):
        result, address = alloc(free // 6)
        if result == SUCCESS:
            must("cuMemFree_v2", address)
threads = [threading.Thread(target=churn) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
tell(same=info()[0] == free)
"""
    assert container.python(PROGRAM + script).last == {"same": True}
    assert len(container.snapshot().slots) == 1


def test_sixty_four_processes_start_together_and_all_are_accepted(node):
    container = node.container(64 * CONTEXT_MIB)
    with contextlib.ExitStack() as stack, within(6 * BOUND_SECONDS):
        programs = [stack.enter_context(container.start([container.build / "bin/aliquot-cuda-client", "repl"])) for _ in range(64)]
        assert {program.listen()["event"] for program in programs} == {"ready"}
        assert container.line_bytes() == container.used_bytes() == 64 * CONTEXT_MIB * MIB
        assert programs[0].ask(f"alloc alloc {MIB}")["result"] == 2
    assert container.client("fill").last["held_bytes"] == 63 * CONTEXT_MIB * MIB


FORK_STORM = """
import ctypes, os, sys, time
from tests.fakes.cuda import *

ctypes.CDLL("libcuda.so.1")

def breed(depth):
    # Each generation forks two, uses CUDA for itself, and ends without waiting for anybody.
    for _ in range(2 if depth else 0):
        if os.fork() == 0:
            breed(depth - 1)
    if call("cuInit", 0) == 0:
        result, context = into("cuDevicePrimaryCtxRetain", 0)
        if result == SUCCESS:
            must("cuCtxSetCurrent", context)
            alloc(10 * MIB)
    os._exit(0)

if os.fork() == 0:
    breed(5)
os.wait()
tell(done=True)
"""


def test_a_fork_storm_leaves_nothing_behind(container):
    """63 processes; the limit has room for a few at a time. All of them end."""
    with within(4 * BOUND_SECONDS):
        assert container.python(FORK_STORM).last == {"done": True}
        deadline = time.monotonic() + 3 * BOUND_SECONDS
        while len(container.dead_slots()) != len(container.snapshot().slots):
            assert time.monotonic() < deadline, container.snapshot()
            time.sleep(0.05)
    filled = container.client("fill").last
    assert filled["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


# --- kills under a ceiling ------------------------------------------------------------------------------------------


def kill_launchers(node, kills):
    """Kill programs that launch under a ceiling at random moments: while starting, paying, waiting, timing; and look at a survivor."""
    container = node.container_with(Limits((DeviceLimit(node.uuids[0], LIMIT_MIB * MIB, sm_percent=20),)))
    command = [container.build / "bin/aliquot-cuda-client", "work", "--seconds", "60", "--kernel-us", "500", "--mib", "100"]
    chance = random.Random(20261122)
    with container.repl() as survivor:
        assert survivor.ask("launch 500 2")["result"] == 0
        free = survivor.ask("info")["free_bytes"]  # its module counts too
        for _ in range(kills):
            with container.start(command) as victim:
                time.sleep(chance.uniform(0, 0.12))
                victim.kill()
            with within(BOUND_SECONDS):
                assert survivor.ask("launch 500 2")["result"] == 0
        with within(BOUND_SECONDS):
            assert survivor.ask(f"alloc alloc {free}")["result"] == 0
        assert container.line_bytes() == container.used_bytes() == LIMIT_MIB * MIB


def test_kills_of_paced_programs_neither_stop_nor_slow_a_survivor(node):
    kill_launchers(node, 25)


@pytest.mark.soak
def test_a_thousand_kills_of_paced_programs_neither_stop_nor_slow_a_survivor(node):
    kill_launchers(node, 1000)


@pytest.mark.soak
def test_survivors_of_ten_thousand_kills_never_hang_lose_or_gain(container):
    chance = random.Random(1)
    with container.repl() as survivor, container.start_python(FAMILY) as family:
        for _ in range(1000):
            children = family.ask("10")["children"]
            time.sleep(chance.uniform(0, 0.05))
            kill_all(children)
            with within(BOUND_SECONDS):
                assert survivor.ask("info")["event"] == "device"
            assert container.line_bytes() <= LIMIT_MIB * MIB
        assert survivor.ask(f"alloc alloc {(LIMIT_MIB - CONTEXT_MIB) * MIB}")["result"] == 0


# --- a tenant against its own files -----------------------------------------------------------------------------------


CHURN = """
from tests.fakes.cuda import *
import time
start()
tell(ready=True)
end = time.monotonic() + 2
while time.monotonic() < end:
    result, address = alloc(MIB)
    if result == SUCCESS:
        must("cuMemFree_v2", address)
    info()
tell(ended=True)
"""


def scribble(path, chance, words, size):
    descriptor = os.open(path, os.O_RDWR)
    try:
        for _ in range(words):
            os.pwrite(descriptor, chance.randbytes(8), chance.randrange(0, size - 8))
    finally:
        os.close(descriptor)


def test_region_corrupted_while_running_harms_only_its_own_container(node):
    """No crash, no hang: its own numbers may be wrong. A sibling container on the same device does not notice."""
    victim, sibling = node.container(LIMIT_MIB), node.container(LIMIT_MIB)
    chance, size = random.Random(3), victim.region_path.stat().st_size
    with victim.start_python(CHURN) as program, sibling.repl() as other:
        assert program.listen() == {"ready": True}
        end = time.monotonic() + 1
        while time.monotonic() < end:
            scribble(victim.region_path, chance, 200, size)
            assert other.ask("info")["free_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB
        with within(2 * BOUND_SECONDS):
            assert program.listen() == {"ended": True}
        assert other.ask(f"alloc alloc {(LIMIT_MIB - CONTEXT_MIB) * MIB}")["result"] == 0


def test_a_region_that_is_truncated_while_running_ends_only_who_touches_it(node):
    """The kernel's answer to a missing page is SIGBUS, to the process that reads it; siblings and the reader's side go on."""
    victim, sibling = node.container(LIMIT_MIB), node.container(LIMIT_MIB)
    with victim.repl() as program, sibling.repl() as other:
        os.truncate(victim.region_path, 0)
        program.tell(f"alloc alloc {MIB}")
        assert program.process.wait(BOUND_SECONDS) == -signal.SIGBUS
        with pytest.raises(RegionError):
            victim.snapshot()
        assert other.ask("info")["free_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB
        assert other.ask(f"alloc alloc {(LIMIT_MIB - CONTEXT_MIB) * MIB}")["result"] == 0
    answer = victim.client("info")
    assert answer.last["result_name"] == "CUDA_ERROR_NOT_PERMITTED"
    assert "truncated" in answer.stderr


def test_writer_dying_during_limit_change_leaves_old_limits_in_force(container):
    """Killed after each of its writes in turn; its successor's change is then taken."""
    with container.repl() as program:
        for writes in (1, 2):
            limits, current = container.limits(), container.limits_path.read_bytes()
            raised = replace(limits, devices=(replace(limits.devices[0], memory_bytes=limits.devices[0].memory_bytes + 64 * MIB),))
            with container.limits_path.open("r+b") as file:
                for write in region_layout.limits_update(raised, current=current)[:writes]:
                    file.seek(write.offset)
                    file.write(write.data)
            with within(BOUND_SECONDS):
                assert program.ask("info")["total_bytes"] == limits.devices[0].memory_bytes
            container.set_limits(raised)
            assert program.ask("info")["total_bytes"] == raised.devices[0].memory_bytes


def test_a_full_disk_keeps_no_program_from_starting(container):
    """The shim writes no file: with no byte left to write it attaches, charges and is reaped as ever."""
    client = container.build / "bin/aliquot-cuda-client"
    answer = container.run(["sh", "-c", f"ulimit -f 0; exec '{client}' fill"])
    assert answer.status == 0, answer.stderr
    assert answer.last["held_bytes"] == (LIMIT_MIB - CONTEXT_MIB) * MIB


def test_program_without_file_descriptors_is_refused_with_reason(container):
    """All descriptors in use at cuInit: refused with its reason, not let in without a limit; and with room again it works."""
    script = """
import resource
library = ctypes.CDLL("libcuda.so.1")
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
refused = call("cuInit", 0)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
start()
tell(refused=refused, total=info()[1])
"""
    answer = container.python(PROGRAM + script)
    assert answer.last == {"refused": 800, "total": LIMIT_MIB * MIB}
    assert "cannot open the limits file" in answer.stderr
