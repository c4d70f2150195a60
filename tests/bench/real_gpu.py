# SPDX-License-Identifier: Apache-2.0
"""The shim under a real NVIDIA driver, in under ten minutes: limits, paths, launch cost, shares, kills, and the clients that are installed.

    python -m tests.bench.real_gpu [--python PATH] [--seconds 570] [--simulated]

Steps that do not fit the time, fail or hang are named, and the other steps are measured. Tenants of arithmetic multiply matrices with
PyTorch, if the Python of ``--python`` has it (default: the one that ``aliquot demo --torch`` takes, or this one); otherwise they use the
client's kernel. Other clients (``real_clients.py`` and ``tests/clients``) run where they are installed or small to install, and the last
line names the others. ``make clients`` installs also the large ones.

Prints Markdown with date, driver and device at the top. ``--simulated`` runs the same steps on the simulated driver: it tests the script,
and its figures are invalid. Needs `make native` and nvidia-ml-py. It needs no root: containers are unpacked roots, as in the tests.
"""

import argparse
import contextlib
import ctypes
import datetime
import functools
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from aliquot_lab.demo import torch_wheel
from tests.bench import nodes, report
from tests.bench.bench_shim import CLIENT, PATHS, ROUTES
from tests.bench.real_clients import Clients, Measure, Place, Row, start_job
from tests.fakes.container import LIBRARY_DIR, MIB, Container, Interposition, Program, make_container
from tests.fakes.machine import library_file

LIMIT_MIB = 8192
PIECES = 64
PIECES_BYTES = (1, MIB, MIB + 1, 2 * MIB + 1)
SHARE_SECONDS = 12
BURN_ROUNDS = 20000
GRAPH_KERNEL_US = 500
GRAPH_PERCENT = 30
SETTLE_LINES = 3
GUARD_SECONDS = 570.0
"""Ten minutes, minus the time to end the last programs."""
MEASURE_SECONDS = 120.0
"""A row that takes longer hangs, including the first start of PyTorch."""

VIEW = """
import json, sys, pynvml as n
n.nvmlInit()
device = n.nvmlDeviceGetHandleByUUID(sys.argv[1])
memory = n.nvmlDeviceGetMemoryInfo(device)
print(json.dumps({"total": memory.total, "used": memory.used, "pids": [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(device)]}))
"""


@dataclass(frozen=True)
class Machine:
    """The device under test, and the paths of its driver."""

    uuid: str
    title: str
    driver: Mapping[str, Path]
    node: Path
    python: str | None
    """Python with PyTorch and the other frameworks."""
    torch_env: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda _: {}
    """Further variables for PyTorch, from those of its container; empty on a real driver."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables with which programs find the driver; empty for a real one."""


class Run:
    """Containers on one device. Each public method lists the measures of one table."""

    def __init__(self, machine: Machine, roots: Path) -> None:
        self.machine = machine
        self._roots = roots
        self._made = 0
        self._env = {contract.ENV_CUDA_VISIBLE_DEVICES: machine.uuid}
        self._device = pynvml.nvmlDeviceGetHandleByUUID(machine.uuid)

    def place(self, gguf: Path | None = None) -> Place:
        """Return where clients of others run."""
        return Place(self.container, nodes.BUILD / CLIENT, self._env, self.machine.torch_env, self.machine.python, gguf, self.machine.env)

    def container(self, memory_mib: int = LIMIT_MIB, percent: int = 0, interposition: Interposition = "front") -> Container:
        """Create a container with a share of the device. The machine's library path, which the driver may need, follows its own."""
        self._made += 1
        limits = Limits((DeviceLimit(self.machine.uuid, memory_mib * MIB, sm_percent=percent),))
        root = self._roots / f"container{self._made}"
        container = make_container(root, nodes.BUILD, self.machine.node, limits, interposition=interposition, driver=self.machine.driver)
        container.settings["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(root / LIBRARY_DIR), os.environ.get("LD_LIBRARY_PATH"))))
        return container

    # --- limits ---------------------------------------------------------------------------------------------------

    def paths(self) -> list[Measure]:
        """Fill the share by every path, and allocate some pieces of sizes with a cost that only the driver knows.

        Also measure what NVML says the process holds, and by how much the device has less left."""
        fills = (functools.partial(self._fill, kind) for kind in PATHS)
        return [*fills, *(functools.partial(self._pieces, size) for size in PIECES_BYTES)]

    def _fill(self, kind: str) -> Iterator[Row]:
        before, container = self._device_used_bytes(), self.container()
        with container.start([nodes.BUILD / CLIENT, "fill", "--kind", kind, "--hold"], self._env) as program:
            answer = program.listen()
            used = self._device_used_bytes() - before
            held = str(answer.get("held_bytes", answer))
            yield kind, held, str(container.used_bytes()), str(self._process_bytes(program.process.pid)), str(used)

    def _pieces(self, size: int) -> Iterator[Row]:
        container = self.container()
        with container.repl(env=self._env) as program:
            program.ask("info")  # makes the context, which is not to count
            pid = program.process.pid
            device, counted, process = self._device_used_bytes(), container.used_bytes(), self._process_bytes(pid) or 0
            for _ in range(PIECES):
                program.ask(f"alloc alloc {size}")
            more = container.used_bytes() - counted, (self._process_bytes(pid) or 0) - process, self._device_used_bytes() - device
            yield f"{PIECES} pieces of {size}, more than before", str(PIECES * size), *map(str, more)

    def routes(self) -> list[Measure]:
        """Yield whether each driver lookup ends at the shim."""
        return [functools.partial(self._route, route) for route in ROUTES]

    def _route(self, route: str) -> Iterator[Row]:
        yield route, *(str(self._sees_share(interposition, route)) for interposition in ("front", "preload"))

    def _sees_share(self, interposition: Interposition, route: str) -> bool:
        answer = self.container(interposition=interposition).client("info", "--via", route, env=self._env)
        devices = [event for event in answer.events if event["event"] == "device"]
        return bool(devices) and all(event["device_total_bytes"] == LIMIT_MIB * MIB for event in devices)

    def _process_bytes(self, pid: int) -> int | None:
        """Return the process's memory; None where the driver lists it by another pid, as can happen in a container."""
        return next((p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(self._device) if p.pid == pid), None)

    def _device_used_bytes(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._device).used)

    # --- views ----------------------------------------------------------------------------------------------------

    def views(self) -> list[Measure]:
        """Yield what monitoring in a container shows while a program there holds memory."""
        return [self._view]

    def _view(self) -> Iterator[Row]:
        container = self.container()
        with container.repl(env=self._env) as program:
            program.ask(f"alloc alloc {1024 * MIB}")
            yield "the shim's own count", str(LIMIT_MIB * MIB), str(container.used_bytes()), str(program.process.pid)
            seen = container.run([sys.executable, "-c", VIEW, self.machine.uuid], self._env).last
            yield "nvidia-ml-py", str(seen["total"]), str(seen["used"]), " ".join(map(str, seen["pids"]))
            yield "nvidia-smi, MiB", *(self._smi(container, what) for what in ("gpu=memory.total", "gpu=memory.used", "compute-apps=pid"))

    def _smi(self, container: Container, what: str) -> str:
        if not shutil.which("nvidia-smi"):
            return "not installed"
        command = ["nvidia-smi", f"--id={self.machine.uuid}", f"--query-{what}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, env=container.environment(self._env), capture_output=True, text=True, check=False)
        return " ".join((done.stdout + done.stderr).split())

    # --- costs ----------------------------------------------------------------------------------------------------

    def costs(self) -> list[Measure]:
        """Yield the cost of calls bare, with the shim, and with a limit that is not reached."""
        return [functools.partial(self._cost, what) for what in ("alloc", "launch", "meminfo")]

    def _cost(self, what: str) -> Iterator[Row]:
        containers = self.container(interposition="none"), self.container(), self.container(percent=99)
        rounds = [[self._best_ns(container, what) for container in containers] for _ in range(3)]
        yield what, *(f"{statistics.median(column):.1f} ns" for column in zip(*rounds, strict=True))

    def _best_ns(self, container: Container, what: str) -> float:
        return float(container.client("bench", what, env=self._env).last["best_ns"])

    # --- shares ---------------------------------------------------------------------------------------------------

    def shares(self) -> list[Measure]:
        """Yield the rates of two tenants of arithmetic as a part of one alone without the shim, with the errors of each second."""
        return [functools.partial(self._share, percents) for percents in ((30, 70), (50, 50), (10, 90))]

    def _share(self, percents: tuple[int, ...]) -> Iterator[Row]:
        alone = self._alone
        tenants = [self.container(percent=percent) for percent in percents]
        with Utilization(self._device) as utilization:
            measured = self._rates(tenants, self._arithmetic)
        for percent, (rates, pid) in zip(percents, measured, strict=True):
            limit, got, *errors = accuracy(percent, rates, alone)
            yield "/".join(map(str, percents)), limit, got, utilization.percent(pid), *errors

    @functools.cached_property
    def _alone(self) -> float:
        return statistics.median(self._rates([self.container(interposition="none")], self._arithmetic)[0][0])

    def graphs(self) -> list[Measure]:
        """Yield the rate of one tenant with CUDA graphs and a limit, as a part of its rate without the shim."""
        return [self._graph]

    def _graph(self) -> Iterator[Row]:
        alone = statistics.median(self._rates([self.container(interposition="none")], self._launch_graphs)[0][0])
        rates, _ = self._rates([self.container(percent=GRAPH_PERCENT)], self._launch_graphs)[0]
        yield "graphs", *accuracy(GRAPH_PERCENT, rates, alone)

    def neighbour(self) -> list[Measure]:
        """Yield what a tenant without a limit loses to a neighbour with a limit of 10 percent."""
        return [self._slowdown]

    def _slowdown(self) -> Iterator[Row]:
        alone = statistics.median(self._rates([self.container()], self._arithmetic)[0][0])
        (beside, _), _ = self._rates([self.container(), self.container(percent=10)], self._arithmetic)
        yield "slowdown beside a neighbour held at 10 %", f"{100 * (1 - statistics.median(beside) / alone):.1f} %"

    def _arithmetic(self, container: Container) -> Program:
        if self.machine.python:
            return start_job(self.place(), container, "gemm", "--seconds", str(SHARE_SECONDS))
        return self._work(container, "burn", BURN_ROUNDS)

    def _launch_graphs(self, container: Container) -> Program:
        return self._work(container, "graph", GRAPH_KERNEL_US)

    def _work(self, container: Container, launch: str, size: int) -> Program:
        command = ["work", "--seconds", str(SHARE_SECONDS), "--launch", launch, "--kernel-us", str(size)]
        return container.start([nodes.BUILD / CLIENT, *command], self._env)

    @staticmethod
    def _rates(tenants: list[Container], start: Callable[[Container], Program]) -> list[tuple[list[float], int]]:
        """Return the kernels per second of each tenant, for each second after the first few, and its process ID."""
        with ExitStack() as stack:
            programs = [stack.enter_context(start(container)) for container in tenants]
            outputs = [[json.loads(line) for line in program.process.stdout or ()] for program in programs]
        return [(settled_rates(output), program.process.pid) for output, program in zip(outputs, programs, strict=True)]

    # --- kills ----------------------------------------------------------------------------------------------------

    def kills(self) -> list[Measure]:
        """Yield what siblings see one second after a program was killed while its kernels ran."""
        return [self._kill_mid_kernel]

    def _kill_mid_kernel(self) -> Iterator[Row]:
        container = self.container()
        with container.repl(env=self._env) as survivor:
            before = survivor.ask("info")["free_bytes"]
            with container.start([nodes.BUILD / CLIENT, "work", "--seconds", "60", "--mib", "1024"], self._env) as victim:
                victim.listen()
                victim.kill()
            time.sleep(1)
            missing, launched = before - survivor.ask("info")["free_bytes"], survivor.ask("launch 1000 5")["result"]
            yield "killed mid-kernel", f"{missing} bytes missing; a survivor's launches end with {launched}"


class Utilization:
    """Samples what NVML says that each process uses of the device, every second while the block runs."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._samples: dict[int, list[int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Utilization":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def percent(self, pid: int) -> str:
        """Return the median of a process's samples after the first few; empty where NVML has no samples."""
        settled = self._samples.get(pid, [])[SETTLE_LINES:]
        return f"{statistics.median(settled):.0f}" if settled else ""

    def _sample(self) -> None:
        since_us = 0
        while not self._ended.wait(1):
            with contextlib.suppress(pynvml.NVMLError_NotFound):  # no process has used the device since
                for sample in pynvml.nvmlDeviceGetProcessUtilization(self._device, since_us):
                    since_us = max(since_us, sample.timeStamp)
                    self._samples.setdefault(sample.pid, []).append(sample.smUtil)


def settled_rates(output: list[dict[str, Any]]) -> list[float]:
    """Return the kernels per second for each second after the first few."""
    progress = [event for event in output if event["event"] == "progress"]
    lengths = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(progress)]
    return [event["kernels"] / length for event, length in zip(progress[1:], lengths, strict=True)][SETTLE_LINES:]


def accuracy(percent: int, rates: list[float], alone: float) -> tuple[str, str, str, str]:
    """Return the limit, the median rate, its error, and the error of each second; in percent of a tenant's rate alone."""
    got = [100 * rate / alone for rate in rates]
    middle = statistics.median(got)
    return f"{percent}", f"{middle:.1f}", f"{middle - percent:+.1f}", " ".join(f"{one - percent:+.1f}" for one in got)


class OutOfTimeError(Exception):
    """A measurement reached its time limit."""


class Guard:
    """Measures tables row by row until the time is over, and then only names the rest. A row that fails or hangs does not affect others."""

    def __init__(self, seconds: float, measure_seconds: float = MEASURE_SECONDS) -> None:
        self.failed: list[str] = []
        """Titles of tables with missing rows for other reasons than time."""
        self._seconds = seconds
        self._measure_seconds = measure_seconds
        self._ends = time.monotonic() + seconds

    def table(self, title: str, header: Row, measures: Iterable[Measure]) -> None:
        """Print the rows; then what is missing, and why."""
        rows: list[Row] = []
        missing: list[str] = []
        for measure in measures:
            try:
                self._measure(measure, rows)
            except OutOfTimeError:
                if self._left() <= 0:
                    missing.append(f"{'cut off' if rows else 'not measured'}, the {self._seconds:g} s of a run were over.")
                    break
                missing.append(f"a row hangs: it was given up after {self._measure_seconds:g} s.")
                self.failed.append(title)
            except Exception as exc:  # noqa: BLE001  (reported below; the machine may be at hand just once)
                traceback.print_exc()
                missing.append(f"a row failed: {exc!r}")
                self.failed.append(title)
        if rows:
            report.table(title, header, rows)
        for reason in missing:
            print(f"\n{title}: {reason}", flush=True)

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _measure(self, measure: Measure, rows: list[Row]) -> None:
        """Add the rows of a measurement, also those before a failure or the time limit."""
        if self._left() <= 0:
            raise OutOfTimeError
        with alarm(min(self._left(), self._measure_seconds)):
            rows.extend(measure())


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError inside the block after this time."""

    def ring(_signal: int, _frame: object) -> None:
        raise OutOfTimeError

    handler, timer = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def real_machine(directory: Path, python: str | None) -> Machine:
    """Return the first GPU of this machine, with its driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        sys.exit(
            f"expected a machine with an NVIDIA driver, found none that starts ({exc}): run it there, or try the script with --simulated"
        )
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    title = f"{pynvml.nvmlDeviceGetName(handle)}, driver {pynvml.nvmlSystemGetDriverVersion()}"
    driver = {soname: library_file(soname) for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
    return Machine(pynvml.nvmlDeviceGetUUID(handle), title, driver, directory, python)


def simulated_machine(directory: Path, python: str | None) -> Machine:
    """Return the first GPU of a simulated H200 node; its driver is loaded into this process."""
    node, libraries = nodes.simulated(directory, "h200x8"), nodes.BUILD / "lib/sim"
    os.environ[contract.ENV_SIM_DIR] = str(node.directory)
    pynvml.nvmlLib = ctypes.CDLL(str(libraries / contract.NVML_SONAME))
    pynvml.nvmlInit()
    driver = {soname: libraries / soname for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
    env = {contract.ENV_SIM_DIR: str(node.directory), "LD_LIBRARY_PATH": str(libraries)}
    title = "SIMULATED H200: the figures mean nothing"
    return Machine(node.uuids[0], title, driver, node.directory, python, torch_wheel.simulated_environment, env)


def measure(run: Run, clients: Clients, guard: Guard) -> None:
    """Measure every table, the most telling first."""
    shares = ("limits", "limit", "got", "error", "error of each second")
    shares_by_nvml = ("limits", "limit", "got", "by NVML", "error", "error of each second")
    kernel = "matrix products by PyTorch" if run.machine.python else "the client's own kernel"
    filled = ("path", "allocated", "counted", "by NVML, of the process", "by NVML, more of the device")
    guard.table(f"A share of {LIMIT_MIB} MiB filled, bytes", filled, run.paths())
    guard.table("Shows the share, by route", ("route", "front", "preload"), run.routes())
    guard.table("Monitoring in the container", ("by", "total", "used", "processes"), run.views())
    guard.table("Calls", ("call", "bare", "shim", "ceiling 99"), run.costs())
    guard.table(f"Two tenants of arithmetic ({kernel}), percent", shares_by_nvml, run.shares())
    guard.table("CUDA graphs, percent", shares, run.graphs())
    guard.table("A neighbour", ("what", "found"), run.neighbour())
    guard.table("A kill", ("what", "found"), run.kills())
    guard.table("Frameworks fill the share, bytes", ("client", "held", "total it sees", "PyTorch's message"), clients.fills())
    guard.table("Libraries under PyTorch", ("library", "result"), clients.libraries())
    guard.table("PyTorch trains a transformer", ("", "steps/s"), clients.training())
    guard.table("Two processes by NCCL", ("what", "found"), clients.collectives())
    by_tests = ("client", "checked", "bare", "front", "preload")
    guard.table("Clients of tests/clients", by_tests, clients.others())
    guard.table("Inference", ("what", "found"), clients.servers())
    guard.table("Under MPS, bytes", ("what", "held", "counted"), clients.mps())
    guard.table("PyTorch by its tests", by_tests, clients.torch_tests())
    if clients.missing:
        print(f"\nNot here, so not measured: {', '.join(clients.missing)}. --python names a Python that has the frameworks.")


def main() -> None:
    """Run every step and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="prove the script without a GPU")
    parser.add_argument("--python", help="the Python that has PyTorch (default: one that has it; with --simulated, none)")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="a model for llama.cpp")
    parser.add_argument(
        "--seconds", type=float, default=GUARD_SECONDS, help="what does not fit is cut off and named (default: %(default)g)"
    )
    options = parser.parse_args()
    guard = Guard(options.seconds)
    with tempfile.TemporaryDirectory(prefix="aliquot-real-") as name:
        directory = Path(name)
        python = options.python if options.simulated else options.python or torch_wheel.find_python()
        machine = simulated_machine(directory, python) if options.simulated else real_machine(directory, python)
        run = Run(machine, directory)
        torch = f"PyTorch {torch_wheel.torch_version(python)}" if python else "no PyTorch"
        command = " ".join(sys.orig_argv[1:])
        print(f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {machine.title}, {torch}, `{command}`", flush=True)
        measure(run, Clients(run.place(options.gguf)), guard)
    if guard.failed:
        sys.exit(f"failed: {'; '.join(dict.fromkeys(guard.failed))}")


if __name__ == "__main__":
    main()
