# SPDX-License-Identifier: Apache-2.0
"""What the clients' tests share: programs in a client's environment, neighbours, and what a container may see.

The ways are those of ``tests.fakes.container``; without the shim, a container shows the whole GPU.
"""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aliquot import contract
from tests.clients.installing import ROOT, Client
from tests.fakes.container import MIB, Answer, Container, Node, Program

LIMIT_MIB = 8192
CONTEXT_MIB = 530
"""Of an H200, as the simulated driver has it."""
KEPT_MIB = 256
"""Of a real GPU without the shim: free memory that a driver may refuse to give."""
CONTEXT_ERROR_MIB = 64
PATIENCE_SECONDS = 200
"""Large packages take long to import on a busy machine."""
ALLOCATED_MIB = 100
PROFILES = sorted(path.name for path in (ROOT / "simulated_driver/profiles").iterdir())


def is_limited(container: Container) -> bool:
    """Whether the shim is in the container."""
    return container.interposition != "none"


def is_simulated(container: Container) -> bool:
    """Whether the driver is the simulated one, possibly as this machine's own."""
    return not container.on_machine or contract.ENV_SIM_DIR in os.environ


def total_bytes(container: Container) -> int:
    """Return the memory that CUDA shows: the limit, or without the shim what our own client reads from the driver."""
    return LIMIT_MIB * MIB if is_limited(container) else int(container.client("info").last["total_bytes"])


def knows_sizes(container: Container) -> bool:
    """Whether nothing but the program itself takes of the memory that it sees: not so on a whole real GPU."""
    return is_limited(container) or not container.on_machine


def context_bytes(container: Container) -> int:
    """Return the memory that the context of one process takes."""
    return CONTEXT_MIB * MIB if container.measured_context_bytes is None else container.measured_context_bytes


def fill_step(container: Container) -> tuple[int, int]:
    """Return the unit in which memory is taken, and how much of the free memory may not be had, both in bytes.

    A simulated limit ends at a byte and a GPU at a block of 2 MiB. A real driver takes blocks, and of a whole GPU it keeps some.
    """
    block = 1 if is_limited(container) and not container.on_machine else 2 * MIB
    return block, 0 if knows_sizes(container) else KEPT_MIB * MIB


FIT = """
def fit(free, block, kept):
    return max(0, free - kept) // block * block, block + kept
"""
"""What a client takes of free bytes, and the least that is too much then; with the two values of ``fill_step``."""


def is_given_back(container: Container, before: int, free: int) -> bool:
    """Whether a process that was killed gave its memory and its context back. Args: before: free bytes before it took memory."""
    return free >= before if not knows_sizes(container) else free == before + context_bytes(container)


def in_mib(count: int) -> str:
    """Return an amount of bytes for the page."""
    return f"{count // MIB:,} MiB"


def environment(client: Client) -> Mapping[str, str]:
    """Return the variables that a Python client needs beyond the container's own."""
    return {"HOME": str(client.root), "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}


def run_python(
    client: Client, container: Container, program: str, arguments: Sequence[object] = (), env: Mapping[str, str] | None = None
) -> Answer:
    """Run a program in the client's environment; it must end with success."""
    return run(client, container, [client.python, "-c", program, *(str(argument) for argument in arguments)], env)


def start_python(client: Client, container: Container, program: str, env: Mapping[str, str] | None = None) -> Program:
    """Start a program in the client's environment that reads commands and answers each with one line of JSON."""
    return container.start([client.python, "-c", program], {**environment(client), **(env or {})})


def run(client: Client, container: Container, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Answer:
    """Run one of the client's commands; it must end with success."""
    answer = container.run(command, {**environment(client), **(env or {})}, patience=PATIENCE_SECONDS)
    assert answer.status == 0, f"{command[0]} ended with {answer.status}:\n{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    return answer


@contextmanager
def own_and_foreign(node: Node, container: Container) -> Iterator[tuple[int, int]]:
    """Run a process in the container that holds 100 MiB and one in another container of the same GPU; yield their pids."""
    neighbour = node.container(LIMIT_MIB)
    with container.repl() as own, neighbour.repl() as foreign:
        assert own.ask(f"alloc alloc {ALLOCATED_MIB * MIB}")["result"] == 0
        listed = listed_pids(node) if container.on_machine else {own.process.pid}
        if own.process.pid not in listed:
            pytest.skip("NVML lists no process by its pid here: run it outside a container")
        yield own.process.pid, foreign.process.pid


def listed_pids(node: Node) -> set[int]:
    """Return the pids of all processes on the node's first GPU, by NVML on the node itself."""
    return set(host_json(node, _PIDS.format(uuid=node.uuids[0])))


_PIDS = """
import json, pynvml as n
n.nvmlInit()
print(json.dumps([p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(n.nvmlDeviceGetHandleByUUID({uuid!r}))]))
"""


def visible_pids(node: Node, container: Container, own: int, foreign: int) -> set[int]:
    """Return the pids that a container may see now: its own; without the shim all, on a real GPU also those of other programs."""
    if is_limited(container):
        return {own}
    return {own, foreign} | (listed_pids(node) if container.on_machine else set())


def visible_gpus(node: Node, container: Container) -> int:
    """Return how many GPUs NVML shows: those with a device node, so on a machine all, because its containers are only unpacked roots."""
    return int(host_json(node, "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())")) if container.on_machine else 1


def used_mib(container: Container) -> int:
    """Return what the process of ``own_and_foreign`` holds, in MiB."""
    return ALLOCATED_MIB + context_bytes(container) // MIB


def is_own_memory(container: Container, mib: int) -> bool:
    """Whether a monitor shows the memory of the process of ``own_and_foreign``. On a real GPU contexts differ a little."""
    return abs(mib - used_mib(container)) <= (CONTEXT_ERROR_MIB if container.on_machine else 0)


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until a condition holds. Raises: AssertionError when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.05)


def run_on_node(node: Node, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> str:
    """Run a program on the node itself; return its output. It must end with success."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env={**node.host_environment(), **(env or {})}, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def host_json(node: Node, program: str) -> Any:
    """Run a Python program of the tests' own environment on the node; return the JSON that it prints."""
    return json.loads(node.host(program))


QUIT = "q"
"""The key that ends a program with a screen."""
SHOWN_SECONDS = 3.0
ROWS, COLUMNS = 60, 200
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]|[\x00-\x08\x0e-\x1f]")


def on_terminal(client: Client, container: Container, command: Sequence[str | Path], key: str | None) -> str:
    """Run a program on a terminal; return the text that it showed, without the control sequences.

    Args: key: what ends it after it has shown its screen; without one it ends by itself.
    """
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    settings = {**environment(client), "TERM": "xterm", "LINES": str(ROWS), "COLUMNS": str(COLUMNS)}
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, env=container.environment(settings), start_new_session=True)
    os.close(side)
    try:
        shown = _read_for(main, SHOWN_SECONDS if key else PATIENCE_SECONDS)
        if key:
            os.write(main, key.encode())
            shown += _read_for(main, PATIENCE_SECONDS)
        assert process.wait(PATIENCE_SECONDS) == 0, shown.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(main)
    return _CONTROL.sub(b" ", shown).decode(errors="replace")


def _read_for(terminal: int, seconds: float) -> bytes:
    """Read until the program ends or the time is over."""
    shown, deadline = b"", time.monotonic() + seconds
    while (rest := deadline - time.monotonic()) > 0:
        if not select.select([terminal], [], [], rest)[0]:
            break
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # EIO: the other side is closed
            break
    return shown
