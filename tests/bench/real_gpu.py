"""The shim under a real NVIDIA driver, in under ten minutes: limits, paths, launch cost, shares, kills, PyTorch where it is installed.

    python -m tests.bench.real_gpu [--simulated] [--seconds 600]

What does not fit the time is cut off and named. Tenants of arithmetic multiply matrices with PyTorch where it is installed; else, and on
the simulated driver, which has no cuBLAS, the client's own kernel stands in for it.

Prints Markdown with date, driver and device on top, for docs/real-gpu.md. ``--simulated`` runs the same steps on the simulated driver: it
proves the script, and its figures mean nothing. Needs `make` first. No root: containers are unpacked roots, as in the tests.
"""

import argparse
import contextlib
import ctypes
import datetime
import importlib.util
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pynvml

from agent.core.region_layout import DeviceLimit, Limits
from aliquot.standin.hardware import driver_libraries
from proto import contract
from tests.bench import nodes, report
from tests.bench.bench_shim import CLIENT, PATHS, ROUTES
from tests.fakes.container import MIB, Container, Interposition, Program, make_container

LIMIT_MIB = 8192
SHARE_SECONDS = 12
BURN_ROUNDS = 20000
GRAPH_KERNEL_US = 500
GRAPH_PERCENT = 30
SETTLE_LINES = 3
GUARD_SECONDS = 600.0

TORCH_FILL = """
import json, torch
held, step = [], 256 * 2**20
while step >= 2 * 2**20:
    try:
        held.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
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


@dataclass(frozen=True)
class Machine:
    """The device under test and where its driver's files are."""

    uuid: str
    title: str
    driver: Mapping[str, Path]
    node: Path
    multiplies_with_torch: bool


class Run:
    """Containers on one device."""

    def __init__(self, machine: Machine, roots: Path) -> None:
        self.machine = machine
        self._roots = roots
        self._made = 0
        self._env = {contract.ENV_CUDA_VISIBLE_DEVICES: machine.uuid}

    def container(self, memory_mib: int = LIMIT_MIB, percent: int = 0, interposition: Interposition = "front") -> Container:
        """A container with a slice of the device."""
        self._made += 1
        limits = Limits((DeviceLimit(self.machine.uuid, memory_mib * MIB, sm_percent=percent),))
        root = self._roots / f"container{self._made}"
        return make_container(root, nodes.BUILD, self.machine.node, limits, interposition=interposition, driver=self.machine.driver)

    # --- limits ---------------------------------------------------------------------------------------------------

    def paths(self) -> Iterator[tuple[str, str, str, str]]:
        """Fill the slice by every path; beside it what NVML says the process holds."""
        for kind in PATHS:
            container = self.container()
            with container.start([nodes.BUILD / CLIENT, "fill", "--kind", kind, "--hold"], self._env) as program:
                answer = program.listen()
                counted = container.used_bytes()
                yield kind, str(answer.get("held_bytes", answer)), str(counted), str(self._process_bytes(program.process.pid))

    def routes(self) -> Iterator[tuple[str, str, str]]:
        """Whether each way of finding the driver ends at the shim."""
        for route in ROUTES:
            yield route, *(str(self._sees_slice(interposition, route)) for interposition in ("front", "preload"))

    def _sees_slice(self, interposition: Interposition, route: str) -> bool:
        answer = self.container(interposition=interposition).client("info", "--via", route, env=self._env)
        devices = [event for event in answer.events if event["event"] == "device"]
        return bool(devices) and all(event["device_total_bytes"] == LIMIT_MIB * MIB for event in devices)

    def _process_bytes(self, pid: int) -> int | None:
        handle = pynvml.nvmlDeviceGetHandleByUUID(self.machine.uuid)
        return next((p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == pid), None)

    # --- costs ----------------------------------------------------------------------------------------------------

    def costs(self) -> Iterator[tuple[str, str, str, str]]:
        """Calls bare, under the shim, and under a ceiling that is not reached."""
        bare, free, limited = self.container(interposition="none"), self.container(), self.container(percent=99)
        for what in ("alloc", "launch", "meminfo"):
            rounds = [[self._best_ns(container, what) for container in (bare, free, limited)] for _ in range(3)]
            yield what, *(f"{statistics.median(column):.1f} ns" for column in zip(*rounds, strict=True))

    def _best_ns(self, container: Container, what: str) -> float:
        return float(container.client("bench", what, env=self._env).last["best_ns"])

    # --- shares ---------------------------------------------------------------------------------------------------

    def shares(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Two tenants of arithmetic, each rate as a part of what one alone gets without the shim; errors second by second."""
        alone = statistics.median(self._rates([self.container(interposition="none")], self._arithmetic)[0])
        for percents in ((30, 70), (50, 50), (10, 90)):
            tenants = [self.container(percent=percent) for percent in percents]
            for percent, rates in zip(percents, self._rates(tenants, self._arithmetic), strict=True):
                yield f"{percents[0]}/{percents[1]}", *accuracy(percent, rates, alone)

    def graphs(self) -> Iterator[tuple[str, str, str, str, str]]:
        """CUDA graphs of kernels, paced: one tenant under a ceiling, as a part of what it gets without the shim."""
        alone = statistics.median(self._rates([self.container(interposition="none")], self._launch_graphs)[0])
        rates = self._rates([self.container(percent=GRAPH_PERCENT)], self._launch_graphs)[0]
        yield "graphs", *accuracy(GRAPH_PERCENT, rates, alone)

    def slowdown(self) -> Iterator[tuple[str, str]]:
        """What a free tenant loses to a neighbour held at 10 percent."""
        alone = statistics.median(self._rates([self.container()], self._arithmetic)[0])
        beside, _ = self._rates([self.container(), self.container(percent=10)], self._arithmetic)
        yield "slowdown beside a neighbour held at 10 %", f"{100 * (1 - statistics.median(beside) / alone):.1f} %"

    def _arithmetic(self, container: Container) -> Program:
        if self.machine.multiplies_with_torch:
            return container.start_python(TORCH_GEMM, env=self._env)
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

    def kill_mid_kernel(self) -> Iterator[tuple[str, str]]:
        """A program killed while its kernels run: what its siblings see of it a second later."""
        container = self.container()
        with container.repl(env=self._env) as survivor:
            before = survivor.ask("info")["free_bytes"]
            with container.start([nodes.BUILD / CLIENT, "work", "--seconds", "60", "--mib", "1024"], self._env) as victim:
                victim.listen()
                victim.kill()
            time.sleep(1)
            yield "killed mid-kernel", f"{before - survivor.ask('info')['free_bytes']} bytes missing"

    # --- PyTorch --------------------------------------------------------------------------------------------------

    def torch(self) -> Iterator[tuple[str, str, str]]:
        """PyTorch fills the slice with each of its allocators."""
        for name, setting in ALLOCATORS.items():
            env = self._env | ({"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {})
            answer = self.container().python(TORCH_FILL, env=env)
            told = answer.last if answer.events else {"held_bytes": f"failed: {answer.stderr[-200:]}", "total_bytes": ""}
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
    """The guard's time is over."""


class Guard:
    """Runs steps until the time is over; after that it only names them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_over = False
        self._is_in_step = False
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _ring(self, _signal: int, _frame: object) -> None:
        self._is_over = True
        if self._is_in_step:
            self._is_in_step = False
            raise OutOfTimeError

    def table(self, title: str, header: tuple[str, ...], step: Callable[[], Iterator[tuple[str, ...]]]) -> None:
        """Print what the step yields; when the time ends meanwhile, the rows it had."""
        rows: list[tuple[str, ...]] = []
        with contextlib.suppress(OutOfTimeError):  # the rows it had stay
            self._is_in_step = not self._is_over
            rows.extend(step() if self._is_in_step else ())
        is_cut = not self._is_in_step
        self._is_in_step = False
        if rows:
            report.table(title, header, rows)
        if is_cut:
            print(f"\n{title}: {'cut off' if rows else 'not measured'}, the {self._seconds:g} s of a run were over.")


def real_machine(directory: Path) -> Machine:
    """The first GPU of this machine, under its own driver."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    title = f"{pynvml.nvmlDeviceGetName(handle)}, driver {pynvml.nvmlSystemGetDriverVersion()}"
    files = driver_libraries()
    sonames = (contract.CUDA_SONAME, contract.NVML_SONAME)
    driver = {soname: next(path for path in files if path.name.startswith(soname.removesuffix("1"))) for soname in sonames}
    return Machine(pynvml.nvmlDeviceGetUUID(handle), title, driver, directory, importlib.util.find_spec("torch") is not None)


def simulated_machine(directory: Path) -> Machine:
    """The first GPU of a simulated H200 node, its driver loaded into this process."""
    node = nodes.simulated(directory, "h200x8")
    os.environ[contract.ENV_SIM_DIR] = str(node.directory)
    pynvml.nvmlLib = ctypes.CDLL(str(nodes.BUILD / "lib/sim" / contract.NVML_SONAME))
    pynvml.nvmlInit()
    driver = {soname: nodes.BUILD / "lib/sim" / soname for soname in (contract.CUDA_SONAME, contract.NVML_SONAME)}
    return Machine(node.uuids[0], "SIMULATED H200: the figures mean nothing", driver, node.directory, multiplies_with_torch=False)


def main() -> None:
    """Run every step and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="prove the script without a GPU")
    parser.add_argument(
        "--seconds", type=float, default=GUARD_SECONDS, help="what does not fit is cut off and named (default: %(default)g)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aliquot-real-") as name:
        directory = Path(name)
        machine = simulated_machine(directory) if options.simulated else real_machine(directory)
        run = Run(machine, directory)
        print(f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {machine.title}, `{' '.join(sys.orig_argv[1:])}`")
        shares = ("limits", "limit", "got", "error", "error of each second")
        kernel = "matrix products by PyTorch" if machine.multiplies_with_torch else "the client's own kernel"
        guard = Guard(options.seconds)
        guard.table(f"A slice of {LIMIT_MIB} MiB filled, bytes", ("path", "allocated", "counted", "by NVML"), run.paths)
        guard.table("Shows the slice, by route", ("route", "front", "preload"), run.routes)
        guard.table("Calls", ("call", "bare", "shim", "ceiling 99"), run.costs)
        guard.table(f"Two tenants of arithmetic ({kernel}), percent", shares, run.shares)
        guard.table("CUDA graphs, percent", shares, run.graphs)
        guard.table("A neighbour", ("what", "found"), run.slowdown)
        guard.table("A kill", ("what", "found"), run.kill_mid_kernel)
        if importlib.util.find_spec("torch"):
            guard.table("PyTorch fills the slice, bytes", ("allocator", "held", "total it sees"), run.torch)
        else:
            print("\nPyTorch is not installed here: its rows were skipped.")


if __name__ == "__main__":
    main()
