"""The shim under a real NVIDIA driver, in under ten minutes: limits, paths, launch cost, shares, kills, PyTorch where it is installed.

    python -m tests.bench.real_gpu [--python PATH] [--seconds 570] [--simulated]

What does not fit the time is cut off and named; what fails or hangs is named too, and the rest is measured all the same. Tenants of
arithmetic multiply matrices with PyTorch where the Python of ``--python`` has it (without the flag, the one that runs this script; a
machine's PyTorch is seldom in a virtual environment of ours); else the client's own kernel stands in for it.

Prints Markdown with date, driver and device on top, for docs/real-gpu.md. ``--simulated`` runs the same steps on the simulated driver:
it proves the script, and its figures mean nothing. Needs `make native` and nvidia-ml-py. No root: containers are unpacked roots, as in
the tests.
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
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pynvml

from agent.core.region_layout import DeviceLimit, Limits
from proto import contract
from tests.bench import nodes, report
from tests.bench.bench_shim import CLIENT, PATHS, ROUTES
from tests.fakes.container import LIBRARY_DIR, MIB, Container, Interposition, Program, make_container

LIMIT_MIB = 8192
PIECES = 64
PIECES_BYTES = (1, MIB, MIB + 1, 2 * MIB + 1)
SHARE_SECONDS = 12
BURN_ROUNDS = 20000
GRAPH_KERNEL_US = 500
GRAPH_PERCENT = 30
SETTLE_LINES = 3
GUARD_SECONDS = 570.0
"""Ten minutes, less what ends the last programs."""
MEASURE_SECONDS = 120.0
"""No row takes as long, the first start of PyTorch included: one that does hangs."""

VIEW = """
import json, sys, pynvml as n
n.nvmlInit()
device = n.nvmlDeviceGetHandleByUUID(sys.argv[1])
memory = n.nvmlDeviceGetMemoryInfo(device)
print(json.dumps({"total": memory.total, "used": memory.used, "pids": [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(device)]}))
"""
TORCH_FILL = """
import json, torch
held, step = [], 256 * 2**20
while step >= 2 * 2**20:
    try:
        held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        step //= 2
free, total = torch.cuda.mem_get_info()
print(json.dumps({"held_bytes": sum(t.numel() for t in held), "free_bytes": free, "total_bytes": total}))
"""
TORCH_GEMM = f"""
import json, time, torch
a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.float16) for _ in range(2))
begin = last = time.monotonic()
kernels = 0
while last - begin < {SHARE_SECONDS}:
    for _ in range(10):
        torch.mm(a, b)
    torch.cuda.synchronize()
    kernels, now = kernels + 10, time.monotonic()
    if now - last >= 1:
        print(json.dumps({{"event": "progress", "seconds": now - begin, "kernels": kernels}}), flush=True)
        kernels, last = 0, now
"""
ALLOCATORS = {"native": "", "expandable segments": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}


Row = tuple[str, ...]
Measure = Callable[[], Iterable[Row]]
"""Measures some rows of a table, independently of the others."""


@dataclass(frozen=True)
class Machine:
    """The device under test and where its driver's files are."""

    uuid: str
    title: str
    driver: Mapping[str, Path]
    node: Path
    python: str | None
    """That has PyTorch."""


class Run:
    """Containers on one device. Each public method lists the measures of one table."""

    def __init__(self, machine: Machine, roots: Path) -> None:
        self.machine = machine
        self._roots = roots
        self._made = 0
        self._env = {contract.ENV_CUDA_VISIBLE_DEVICES: machine.uuid}
        self._device = pynvml.nvmlDeviceGetHandleByUUID(machine.uuid)

    def container(self, memory_mib: int = LIMIT_MIB, percent: int = 0, interposition: Interposition = "front") -> Container:
        """A container with a slice of the device; what this machine's library path names, which the driver may need, is behind its own."""
        self._made += 1
        limits = Limits((DeviceLimit(self.machine.uuid, memory_mib * MIB, sm_percent=percent),))
        root = self._roots / f"container{self._made}"
        container = make_container(root, nodes.BUILD, self.machine.node, limits, interposition=interposition, driver=self.machine.driver)
        container.settings["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(root / LIBRARY_DIR), os.environ.get("LD_LIBRARY_PATH"))))
        return container

    # --- limits ---------------------------------------------------------------------------------------------------

    def paths(self) -> list[Measure]:
        """Fill the slice by every path, and allocate some pieces of sizes whose cost only the driver knows; beside it what NVML says the
        process holds, and by how much the device has less left."""
        return [functools.partial(self._fill, kind) for kind in PATHS] + [functools.partial(self._pieces, size) for size in PIECES_BYTES]

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
        """Whether each way of finding the driver ends at the shim."""
        return [functools.partial(self._route, route) for route in ROUTES]

    def _route(self, route: str) -> Iterator[Row]:
        yield route, *(str(self._sees_slice(interposition, route)) for interposition in ("front", "preload"))

    def _sees_slice(self, interposition: Interposition, route: str) -> bool:
        answer = self.container(interposition=interposition).client("info", "--via", route, env=self._env)
        devices = [event for event in answer.events if event["event"] == "device"]
        return bool(devices) and all(event["device_total_bytes"] == LIMIT_MIB * MIB for event in devices)

    def _process_bytes(self, pid: int) -> int | None:
        """None where the driver does not name the process by the pid it has here: in a container it may not."""
        return next((p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(self._device) if p.pid == pid), None)

    def _device_used_bytes(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._device).used)

    # --- views ----------------------------------------------------------------------------------------------------

    def views(self) -> list[Measure]:
        """What monitoring in a container shows while a program there holds memory."""
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
        """Calls bare, under the shim, and under a ceiling that is not reached."""
        return [functools.partial(self._cost, what) for what in ("alloc", "launch", "meminfo")]

    def _cost(self, what: str) -> Iterator[Row]:
        containers = self.container(interposition="none"), self.container(), self.container(percent=99)
        rounds = [[self._best_ns(container, what) for container in containers] for _ in range(3)]
        yield what, *(f"{statistics.median(column):.1f} ns" for column in zip(*rounds, strict=True))

    def _best_ns(self, container: Container, what: str) -> float:
        return float(container.client("bench", what, env=self._env).last["best_ns"])

    # --- shares ---------------------------------------------------------------------------------------------------

    def shares(self) -> list[Measure]:
        """Two tenants of arithmetic, each rate as a part of what one alone gets without the shim; errors second by second."""
        return [functools.partial(self._share, percents) for percents in ((30, 70), (50, 50), (10, 90))]

    def _share(self, percents: tuple[int, ...]) -> Iterator[Row]:
        alone = self._alone
        tenants = [self.container(percent=percent) for percent in percents]
        for percent, rates in zip(percents, self._rates(tenants, self._arithmetic), strict=True):
            yield "/".join(map(str, percents)), *accuracy(percent, rates, alone)

    @functools.cached_property
    def _alone(self) -> float:
        return statistics.median(self._rates([self.container(interposition="none")], self._arithmetic)[0])

    def graphs(self) -> list[Measure]:
        """CUDA graphs of kernels, paced: one tenant under a ceiling, as a part of what it gets without the shim."""
        return [self._graph]

    def _graph(self) -> Iterator[Row]:
        alone = statistics.median(self._rates([self.container(interposition="none")], self._launch_graphs)[0])
        rates = self._rates([self.container(percent=GRAPH_PERCENT)], self._launch_graphs)[0]
        yield "graphs", *accuracy(GRAPH_PERCENT, rates, alone)

    def neighbour(self) -> list[Measure]:
        """What a free tenant loses to a neighbour held at 10 percent."""
        return [self._slowdown]

    def _slowdown(self) -> Iterator[Row]:
        alone = statistics.median(self._rates([self.container()], self._arithmetic)[0])
        beside, _ = self._rates([self.container(), self.container(percent=10)], self._arithmetic)
        yield "slowdown beside a neighbour held at 10 %", f"{100 * (1 - statistics.median(beside) / alone):.1f} %"

    def _arithmetic(self, container: Container) -> Program:
        if self.machine.python:
            return container.start([self.machine.python, "-c", TORCH_GEMM], self._env)
        return self._work(container, "burn", BURN_ROUNDS)

    def _launch_graphs(self, container: Container) -> Program:
        return self._work(container, "graph", GRAPH_KERNEL_US)

    def _work(self, container: Container, launch: str, size: int) -> Program:
        command = ["work", "--seconds", str(SHARE_SECONDS), "--launch", launch, "--kernel-us", str(size)]
        return container.start([nodes.BUILD / CLIENT, *command], self._env)

    @staticmethod
    def _rates(tenants: list[Container], start: Callable[[Container], Program]) -> list[list[float]]:
        """Kernels per second of each tenant in each second after the first few."""
        with ExitStack() as stack:
            programs = [stack.enter_context(start(container)) for container in tenants]
            outputs = [[json.loads(line) for line in program.process.stdout or ()] for program in programs]
        return [settled_rates(output) for output in outputs]

    # --- kills ----------------------------------------------------------------------------------------------------

    def kills(self) -> list[Measure]:
        """A program killed while its kernels run: what its siblings see of it a second later."""
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

    # --- PyTorch --------------------------------------------------------------------------------------------------

    def torch(self, python: str) -> list[Measure]:
        """PyTorch fills the slice with each of its allocators."""
        return [functools.partial(self._fill_by_torch, python, name) for name in ALLOCATORS]

    def _fill_by_torch(self, python: str, name: str) -> Iterator[Row]:
        setting = ALLOCATORS[name]
        env = self._env | ({"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {})
        with self.container().start([python, "-c", TORCH_FILL], env) as program:
            told = program.listen()
        yield name, str(told["held_bytes"]), str(told["total_bytes"])


def settled_rates(output: list[dict[str, float]]) -> list[float]:
    """Kernels per second in each second after the first few."""
    progress = [event for event in output if event["event"] == "progress"]
    lengths = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(progress)]
    return [event["kernels"] / length for event, length in zip(progress[1:], lengths, strict=True)][SETTLE_LINES:]


def accuracy(percent: int, rates: list[float], alone: float) -> tuple[str, str, str, str]:
    """The limit, what was got in the middle, its error, and the error of each second; in percent of a tenant's rate alone."""
    got = [100 * rate / alone for rate in rates]
    middle = statistics.median(got)
    return f"{percent}", f"{middle:.1f}", f"{middle - percent:+.1f}", " ".join(f"{one - percent:+.1f}" for one in got)


class OutOfTimeError(Exception):
    """What was measured took all the time it had."""


class Guard:
    """Measures tables row by row until the time is over; after that it only names them. A row that fails or hangs costs no other."""

    def __init__(self, seconds: float, measure_seconds: float = MEASURE_SECONDS) -> None:
        self.failed: list[str] = []
        """Titles of tables that lack rows for another reason than time."""
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
            except Exception as exc:  # noqa: BLE001  (told below; the machine may be at hand just once)
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
        """Add the rows of a measure; those before it ran out of time, or failed, too."""
        if self._left() <= 0:
            raise OutOfTimeError
        with alarm(min(self._left(), self._measure_seconds)):
            rows.extend(measure())


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """OutOfTimeError in here after that time."""

    def ring(_signal: int, _frame: object) -> None:
        raise OutOfTimeError

    handler, timer = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def real_machine(directory: Path, python: str) -> Machine:
    """The first GPU of this machine, under its own driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        sys.exit(
            f"expected a machine with an NVIDIA driver, found none that starts ({exc}): run it there, or try the script with --simulated"
        )
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    title = f"{pynvml.nvmlDeviceGetName(handle)}, driver {pynvml.nvmlSystemGetDriverVersion()}"
    driver = {soname: library_file(soname) for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
    return Machine(pynvml.nvmlDeviceGetUUID(handle), title, driver, directory, python if torch_version(python) else None)


def simulated_machine(directory: Path, python: str | None) -> Machine:
    """The first GPU of a simulated H200 node, its driver loaded into this process."""
    node = nodes.simulated(directory, "h200x8")
    os.environ[contract.ENV_SIM_DIR] = str(node.directory)
    pynvml.nvmlLib = ctypes.CDLL(str(nodes.BUILD / "lib/sim" / contract.NVML_SONAME))
    pynvml.nvmlInit()
    driver = {soname: nodes.BUILD / "lib/sim" / soname for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
    title = "SIMULATED H200: the figures mean nothing"
    return Machine(node.uuids[0], title, driver, node.directory, python if python and torch_version(python) else None)


def library_file(soname: str) -> Path:
    """The file that programs here get by that name, however this machine has it found."""
    ctypes.CDLL(soname)
    stem = soname.removesuffix("1")
    mapped = (Path(line.split(maxsplit=5)[5].strip()) for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line)
    return next(path for path in mapped if path.name.startswith(stem))


def torch_version(python: str) -> str | None:
    """Of the PyTorch that this Python has; None = it has none."""
    script = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """Run every step and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="prove the script without a GPU")
    parser.add_argument("--python", help="the Python that has PyTorch (default: this one; with --simulated, none)")
    parser.add_argument(
        "--seconds", type=float, default=GUARD_SECONDS, help="what does not fit is cut off and named (default: %(default)g)"
    )
    options = parser.parse_args()
    guard = Guard(options.seconds)
    with tempfile.TemporaryDirectory(prefix="aliquot-real-") as name:
        directory = Path(name)
        machine = (
            simulated_machine(directory, options.python) if options.simulated else real_machine(directory, options.python or sys.executable)
        )
        run, python = Run(machine, directory), machine.python
        torch = f"PyTorch {torch_version(python)}" if python else None
        command = " ".join(sys.orig_argv[1:])
        print(f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {machine.title}, {torch or 'no PyTorch'}, `{command}`", flush=True)
        shares = ("limits", "limit", "got", "error", "error of each second")
        kernel = "matrix products by PyTorch" if torch else "the client's own kernel"
        filled = ("path", "allocated", "counted", "by NVML, of the process", "by NVML, more of the device")
        guard.table(f"A slice of {LIMIT_MIB} MiB filled, bytes", filled, run.paths())
        guard.table("Shows the slice, by route", ("route", "front", "preload"), run.routes())
        guard.table("Monitoring in the container", ("by", "total", "used", "processes"), run.views())
        guard.table("Calls", ("call", "bare", "shim", "ceiling 99"), run.costs())
        guard.table(f"Two tenants of arithmetic ({kernel}), percent", shares, run.shares())
        guard.table("CUDA graphs, percent", shares, run.graphs())
        guard.table("A neighbour", ("what", "found"), run.neighbour())
        guard.table("A kill", ("what", "found"), run.kills())
        if python:
            guard.table("PyTorch fills the slice, bytes", ("allocator", "held", "total it sees"), run.torch(python))
        else:
            print("\nThere is no PyTorch here: its rows were skipped. --python names the Python that has it.")
    if guard.failed:
        sys.exit(f"failed: {'; '.join(dict.fromkeys(guard.failed))}")


if __name__ == "__main__":
    main()
