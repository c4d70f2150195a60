# SPDX-License-Identifier: Apache-2.0
"""Ways to launch work, for programs that tests run in a container: with functions, graphs, modules, threads or processes that are always
new, in every form of a launch, with durations that change.

``run`` works in one way, or in a random mix of all ways, and prints the device time that it used. Everything random comes from the seed. It
does not know the shim.
"""

import ctypes
import itertools
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.fakes import kernels
from tests.fakes.cuda import call, into, must, out, start, tell

KINDS = (
    "one function", "new function", "new shape", "new graph", "new module", "new stream", "new thread", "new process",
    "killed process", "cooperative", "cuLaunchKernelEx", "device set", "per thread",
)  # fmt: skip
ONE_PROCESS_EACH = ("new process", "killed process")
SIZES = {
    "short": (100, 100),
    "long": (50_000, 50_000),
    "changing": (20, 50_000),
}
"""The shortest and the longest launch in microseconds; in between, each order of magnitude is as frequent as another."""
MIX = "random mix"
FUNCTIONS = 2000
AT_ONCE = (1, 4, 16)
"""Launches before the program waits for the device."""


class _Launch(ctypes.Structure):
    """CUDA_LAUNCH_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("shape", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Behaviour:
    """How a program launches."""

    kind: str
    """One of KINDS, or MIX."""
    size: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}, {self.size}, seed {self.seed}"


def every_behaviour(seeds: int) -> Iterator[Behaviour]:
    """Yield each kind with each size, and that many random mixes."""
    for kind, size in itertools.product(KINDS, SIZES):
        if kind not in ONE_PROCESS_EACH or size != "short":  # processes do not begin often enough to reach a ceiling with short launches
            yield Behaviour(kind, size)
    yield from (Behaviour(MIX, "changing", seed) for seed in range(seeds))


class _Program:
    """One process that launches."""

    def __init__(self, rng: random.Random, size: str) -> None:
        self._rng = rng
        self._shortest, self._longest = SIZES[size]
        start()
        context = out()
        must("cuCtxGetCurrent", ctypes.byref(context))
        self._context = context.value
        self._function, self._stream = kernels.load(), kernels.make_stream()
        self._functions = itertools.cycle([self._function])
        self._shapes = itertools.count(2)
        self.used_us = 0

    def load_functions(self) -> None:
        """Load functions, each in a module of its own, so that launches can take a new one for long."""
        self._functions = itertools.cycle([kernels.load() for _ in range(FUNCTIONS)])

    def microseconds(self) -> int:
        """Return the length of the next launch."""
        return round(math.exp(self._rng.uniform(math.log(self._shortest), math.log(self._longest))))

    def launch(self, kind: str) -> None:
        """Launch once."""
        microseconds = self.microseconds()
        self.used_us += microseconds
        _LAUNCHES[kind](self, microseconds)

    def one_function(self, microseconds: int) -> None:
        kernels.spin(self._function, microseconds)

    def new_function(self, microseconds: int) -> None:
        kernels.spin(next(self._functions), microseconds)

    def new_shape(self, microseconds: int) -> None:
        must("cuLaunchKernel", self._function, next(self._shapes), 1, 1, 1, 1, 1, 0, 0, kernels.arguments(microseconds), None)

    def new_graph(self, microseconds: int) -> None:
        graph = kernels.capture(self._stream, lambda: kernels.spin(self._function, microseconds, self._stream))
        ready = kernels.instantiate(graph)
        must("cuGraphLaunch", ready, self._stream)
        must("cuGraphExecDestroy", ready)
        must("cuGraphDestroy", graph)

    def new_module(self, microseconds: int) -> None:
        function, module = kernels.load_module()
        kernels.spin(function, microseconds)
        must("cuCtxSynchronize")
        must("cuModuleUnload", module)

    def new_stream(self, microseconds: int) -> None:
        stream = kernels.make_stream()
        kernels.spin(self._function, microseconds, stream)
        must("cuStreamDestroy_v2", stream)

    def new_thread(self, microseconds: int) -> None:
        def launch() -> None:
            must("cuCtxSetCurrent", self._context)
            kernels.spin(self._function, microseconds)

        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()

    def cooperative(self, microseconds: int) -> None:
        kernels.spin_cooperative(self._function, microseconds)

    def ex(self, microseconds: int) -> None:
        kernels.spin_ex(self._function, microseconds)

    def device_set(self, microseconds: int) -> None:
        arguments = kernels.arguments(microseconds)
        shape = (ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, 0)
        launch = _Launch(self._function, shape, self._stream, ctypes.addressof(arguments))
        must("cuLaunchCooperativeKernelMultiDevice", ctypes.byref(launch), 1, 0)

    def per_thread(self, microseconds: int) -> None:
        kernels.spin(self._function, microseconds, suffix=kernels.PER_THREAD)


_LAUNCHES: dict[str, Callable[[_Program, int], None]] = {
    "one function": _Program.one_function, "new function": _Program.new_function, "new shape": _Program.new_shape,
    "new graph": _Program.new_graph, "new module": _Program.new_module, "new stream": _Program.new_stream,
    "new thread": _Program.new_thread, "cooperative": _Program.cooperative, "cuLaunchKernelEx": _Program.ex,
    "device set": _Program.device_set, "per thread": _Program.per_thread,
}  # fmt: skip


@dataclass
class _Tally:
    """What a program used so far."""

    begin: float
    used_us: int = 0
    first: tuple[float, float] | None = None
    """Seconds and device seconds when the first second was over and all work done."""

    def now(self) -> tuple[float, float]:
        return time.monotonic() - self.begin, self.used_us / 1e6

    def done(self) -> None:
        if self.first is None and time.monotonic() >= self.begin + 1:
            self.first = self.now()


def _work(behaviour: Behaviour, rng: random.Random, seconds: float) -> _Tally:
    """Launch in this process."""
    program = _Program(rng, behaviour.size)
    if behaviour.kind in ("new function", MIX):
        program.load_functions()
    tell(ready=True)
    tally = _Tally(time.monotonic())
    while time.monotonic() < tally.begin + seconds:
        kind = rng.choice(tuple(_LAUNCHES)) if behaviour.kind == MIX else behaviour.kind
        for _ in range(rng.choice(AT_ONCE)):
            if time.monotonic() < tally.begin + seconds:
                program.launch(kind)
        must("cuCtxSynchronize")
        tally.used_us = program.used_us
        tally.done()
    return tally


def _work_in_processes(behaviour: Behaviour, rng: random.Random, seconds: float) -> _Tally:
    """Launch each time in another process."""
    tell(ready=True)
    tally = _Tally(time.monotonic())
    while time.monotonic() < tally.begin + seconds:
        tally.used_us += _one_process(behaviour, rng)
        tally.done()
    return tally


def _one_process(behaviour: Behaviour, rng: random.Random) -> int:
    """Launch once in a process of its own, which never waits in a call and ends normally or is killed; return the microseconds."""
    microseconds = round(math.exp(rng.uniform(*map(math.log, SIZES[behaviour.size]))))
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return microseconds
    program = _Program(rng, behaviour.size)
    program.one_function(microseconds)
    event = into("cuEventCreate", 0)[1]
    must("cuEventRecord", event, 0)
    while call("cuEventQuery", event):
        time.sleep(0.0002)
    if behaviour.kind == "killed process":
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit


def run(kind: str, size: str, seed: int, seconds: float) -> None:
    """Launch for so long, and wait for the device; print the seconds and the device time used, of the first second and of all."""
    behaviour, rng = Behaviour(kind, size, seed), random.Random(seed)
    tally = (_work_in_processes if kind in ONE_PROCESS_EACH else _work)(behaviour, rng, seconds)
    tell(first=tally.first or tally.now(), all=tally.now())


def script(behaviour: Behaviour, seconds: float) -> str:
    """Return the program's text."""
    return f"from tests.fakes.behaviours import run\nrun({behaviour.kind!r}, {behaviour.size!r}, {behaviour.seed}, {seconds})\n"


STEADY = """
start()
function = load()
work_for(0.2, 200, lambda: spin(function, 200))
tell(ready=True)
while True:
    begin = time.monotonic()
    done = work_for(0.05, 200, lambda: spin(function, 200), at_once=2)
    tell(share=100 * done / 1e6 / (time.monotonic() - begin), begin=begin)
"""
"""A program that reports its share of the device about every 50 ms, until it is ended."""
