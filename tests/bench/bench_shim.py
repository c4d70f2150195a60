# SPDX-License-Identifier: Apache-2.0
"""Compares the shim with the bare (simulated) driver in one run: added nanoseconds, allocation paths, lookup routes, kills, shares.

Every row runs the same client program in containers that differ only in their limiter (``contenders.py``). All are measured alternately, so
that they see the same machine. Figures are medians of rounds: those of the bare driver, and the differences of the others to it.

Run it alone: ``python -m tests.bench.bench_shim [--quick] [--json] [--hami-core PATH]``. PATH is a libvgpu.so built from HAMi-core, which
is measured in the same run.
"""

import argparse
import json
import random
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agent.core.node_pages import PRIORITY
from agent.core.region_layout import DeviceLimit, Limits
from aliquot import contract
from tests.bench import nodes, report, shares_by_behaviour
from tests.bench.contenders import Bare, Contender, HamiCore, OnBareDriver, Shim
from tests.fakes.behaviours import every_behaviour
from tests.fakes.container import MIB, Container, Node, Program

CLIENT = "bin/aliquot-cuda-client"
PATHS = ("alloc", "pitch", "managed", "async", "pool", "vmm", "vmm-release", "array", "mipmap", "graph", "ctx")
ROUTES = ("getproc", "dlsym", "link", "dlvsym", "deepbind", "dlmopen")
LIMIT_MIB = 4096

PROCESSES, TIMES = 4, 16
"""That launch, of each contender in a round, where the best counts; and how many times as many rounds there are as for other calls.

A stream's queue bounds how many launches are timed at once, so a process is done within a millisecond. Where other guests of the host come
and go, that is quiet for some processes and a third slower for most, for a tenth of a second or for two.
"""

HANG_SECONDS = 1.0
"""A program that answers later hangs; normal is a few milliseconds."""
PATIENCE_SECONDS = 5.0
"""Longest wait for a program that hangs."""
LONG_SECONDS = 60.0
"""Longest wait for the first answer, which can take more work."""

Measure = Callable[[Container], float]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    bare: float
    shim: float
    unit: str
    aim: str
    hami_core: float | None = None


@dataclass(frozen=True)
class Share:
    """The share of a device that one tenant got, in percent of its time."""

    case: str
    limit: int
    got: float
    hami_core: float | None = None
    in_research: bool = True
    """As of its case."""


@dataclass(frozen=True)
class Survival:
    """Results of programs that survive next to killed ones."""

    trials: int
    hung: int
    slowest_seconds: float
    """Times of the answers; PATIENCE_SECONDS for a missing one."""
    leaked_bytes: int = 0

    def __str__(self) -> str:
        slowest = f"{self.slowest_seconds * 1000:.0f} ms" if self.slowest_seconds < PATIENCE_SECONDS else f"over {PATIENCE_SECONDS:.0f} s"
        return f"{self.hung} of {self.trials}, slowest answer {slowest}"


def in_batches(measures: Sequence[Callable[[], float]], rounds: int, tries: int) -> list[float]:
    """A figure for each: the median of the first, and by how much the others differ from it within a round, which is the median too.

    A round's figure is the best of its tries. Each by its own median would differ by the machine's mood: half of the rounds may be quiet.
    """

    def best() -> list[float]:
        found = [[measure() for measure in measures] for _ in range(tries)]
        return [min(one) for one in zip(*found, strict=True)]

    found = [best() for _ in range(rounds)]
    first = statistics.median(of_round[0] for of_round in found)
    return [first + statistics.median(of_round[i] - of_round[0] for of_round in found) for i in range(len(measures))]


class Bench:
    """One simulated node and its contenders."""

    def __init__(self, node: Node, build: Path, rounds: int, hami_core: Path | None = None) -> None:
        self.node = node
        self.build = build
        self.rounds = rounds
        self.bare = Bare(node)
        self.shim = Shim(node)
        self.hami_core = HamiCore(node, hami_core) if hami_core else None

    # --- nanoseconds ----------------------------------------------------------------------------------------------

    def row(self, what: str, unit: str, aim: str, measure: Measure, sm_percent: int = 0, times: int = 1, tries: int = 1) -> Row:
        """Measure the bare driver, the shim and HAMi-core in turns: ``times`` as many rounds, in each the best of ``tries``."""
        contenders = [contender for contender in (self.bare, self.shim, self.hami_core) if contender]
        return self._row_of(contenders, what, unit, aim, measure, sm_percent, times, tries)

    def _row_of(
        self, contenders: Sequence[Contender], what: str, unit: str, aim: str, measure: Measure, sm_percent: int, times: int, tries: int
    ) -> Row:
        containers = [contender.container(LIMIT_MIB * 16, sm_percent) for contender in contenders]
        bare, shim, *beside = in_batches([partial(measure, container) for container in containers], self.rounds * times, tries)
        return Row(what, bare, shim, unit, aim, *beside)

    def launches(self, what: str, aim: str, *arguments: str, sm_percent: int = 0) -> Row:
        return self.row(what, "ns", aim, self.calls("launch", *arguments), sm_percent, TIMES, PROCESSES)

    def costs_on_bare_driver(self, directory: Path) -> Iterator[Row]:
        """Yield rows of added time per call on a driver that does nothing."""
        contenders = OnBareDriver.both(directory, self.build)
        launch, live = self.calls("launch"), self.calls("alloc", "--mib", "40")
        yield self._row_of(contenders, "launch, ceiling 99, on a driver that does nothing", "ns", "<= 25", launch, 99, TIMES, PROCESSES)
        yield self._row_of(contenders, "alloc + free, 10 000 live, the same driver", "ns", "<= 60", live, 0, 1, 1)

    def calls(self, what: str, *arguments: str) -> Measure:
        """Return nanoseconds per call in one process: the best of the program's rounds, which other work affects least."""
        return lambda container: float(container.client("bench", what, *arguments).last["best_ns"])

    def concurrent_calls(self, what: str, processes: int) -> Measure:
        """Return wall-clock nanoseconds per call over all calls of several parallel processes."""

        def measure(container: Container) -> float:
            answers = self._together(container, processes, "bench", what)
            return statistics.mean(float(answer["ns_per_call"]) for answer in answers) / processes

        return measure

    def init(self, processes: int) -> Measure:
        """Return the milliseconds of the slowest cuInit of several processes that start together."""

        def measure(container: Container) -> float:
            return max(float(answer["init_ns"]) for answer in self._together(container, processes, "bench", "init")) / 1e6

        return measure

    def _together(self, container: Container, processes: int, *arguments: str) -> list[dict[str, Any]]:
        """Return the first lines of programs that start together; those without one within LONG_SECONDS are ended and left out."""
        with ExitStack() as stack:
            programs = [stack.enter_context(container.start([self.build / CLIENT, *arguments])) for _ in range(processes)]
            answers = [answer for program in programs if (answer := answer_within(program, LONG_SECONDS))]
        if not answers:
            raise RuntimeError(f"none of {processes} programs said anything in {LONG_SECONDS:.0f} s: {' '.join(arguments)}")
        return answers

    def costs(self) -> Iterator[Row]:
        """Yield the rows of added time per call."""
        yield self.row("alloc + free", "ns", "<= 60", self.calls("alloc"))
        yield self.row("alloc + free, 10 000 live", "ns", "<= 60", self.calls("alloc", "--mib", "40"))
        yield self.row("alloc + free, 8 processes", "ns", "<= 250", self.concurrent_calls("alloc", 8))
        yield self.launches("launch, no ceiling", "<= 2")
        yield self.launches("launch, ceiling 99", "<= 25", sm_percent=99)
        yield self.launches("launch on a stream, ceiling 99", "<= 25", "--own-stream", sm_percent=99)
        yield self.row("cuMemGetInfo", "ns", "<= 20", self.calls("meminfo"))
        yield self.row("cuInit, 1 process", "ms", "<= 2", self.init(1))
        yield self.row("cuInit, slowest of 16", "ms", "<= 5", self.init(16))

    # --- limits ---------------------------------------------------------------------------------------------------

    def held(self, contender: Contender, *arguments: str) -> bool:
        """Whether a program that allocates all it can stays within its limit, also by the driver's count."""
        container = contender.container(LIMIT_MIB)
        with container.start([self.build / CLIENT, "fill", *arguments, "--hold"]) as program:
            answer = answer_within(program, LONG_SECONDS)
            physical = self.node.physical_used_bytes(self.node.uuids[0])
        return answer is not None and answer["event"] == "fill" and 0 < physical <= LIMIT_MIB * MIB

    def paths_held(self, contender: Contender) -> str:
        """Yield the rows of allocation paths that hold the limit."""
        return f"{sum(self.held(contender, '--kind', kind) for kind in PATHS)} of {len(PATHS)}"

    def routes_held(self, contender: Contender) -> str:
        """Yield the rows of driver lookups that end at the limiter."""
        return f"{sum(self.held(contender, '--via', route) for route in ROUTES)} of {len(ROUTES)}"

    # --- kills ----------------------------------------------------------------------------------------------------

    def kills(self, contender: Contender, count: int) -> Survival:
        """Kill allocating neighbours at random times and measure a survivor; one that hangs is replaced, with its container."""
        rng, hung, slowest = random.Random(count), 0, 0.0
        with ExitStack() as stack:
            container = contender.container(LIMIT_MIB)
            survivor = stack.enter_context(container.repl())
            for _ in range(count):
                with container.start([self.build / CLIENT, "bench", "alloc"]) as victim:
                    time.sleep(rng.uniform(0.0, 0.03))
                    victim.kill()
                elapsed = max(seconds_to_answer(survivor, f"alloc alloc {MIB}"), seconds_to_answer(survivor, "info"))
                slowest = max(slowest, elapsed)
                if elapsed > HANG_SECONDS:
                    hung += 1
                    survivor.kill()
                    container = contender.container(LIMIT_MIB)
                    survivor = stack.enter_context(container.repl())
            leaked = container.used_bytes() - self.node.physical_used_bytes(self.node.uuids[0]) if isinstance(contender, Shim) else 0
        return Survival(count, hung, slowest, leaked)

    def newcomers(self, contender: Contender, count: int) -> Survival:
        """Kill processes while they start, then start another; when that hangs, continue in a new container."""
        rng, hung, slowest = random.Random(count), 0, 0.0
        container = contender.container(LIMIT_MIB)
        for _ in range(count):
            with ExitStack() as stack:
                for _ in range(4):
                    victim = stack.enter_context(container.start([self.build / CLIENT, "repl"]))
                    time.sleep(rng.uniform(0.0, 0.01))
                    victim.kill()
            with container.start([self.build / CLIENT, "repl"]) as newcomer:
                elapsed = seconds_to_answer(newcomer)
            slowest = max(slowest, elapsed)
            if elapsed > HANG_SECONDS:
                hung += 1
                container = contender.container(LIMIT_MIB)
        return Survival(count, hung, slowest)

    def over_grant(self, contender: Contender, processes: int) -> str:
        """Return the bytes above the limit of parallel processes that allocate all they can, by the driver's count; and how many hang."""
        container = contender.container(LIMIT_MIB)
        with ExitStack() as stack:
            programs = [
                stack.enter_context(container.start([self.build / CLIENT, "fill", "--mib", "16", "--hold"])) for _ in range(processes)
            ]
            until = time.monotonic() + LONG_SECONDS
            hung = sum(answer_within(program, max(0.0, until - time.monotonic())) is None for program in programs)
            over = max(0, self.node.physical_used_bytes(self.node.uuids[0]) - LIMIT_MIB * MIB)
        return f"{over} bytes" + (f" and {hung} of {processes} hang" if hung else "")

    # --- priority -------------------------------------------------------------------------------------------------

    def priority_reaction(self, directory: Path, bursts: int, containers: int = 1, processes: int = 1) -> float:
        """Return the median delay in milliseconds of the first kernel of a high-priority burst next to busy low-priority containers."""
        page = directory / f"priority-{containers}-{processes}"
        page.write_bytes(PRIORITY.empty())
        high, *lows = (self._with_priority(priority, page) for priority in (1, *[-1] * containers))
        with ExitStack() as stack:
            program = stack.enter_context(high.start_python(FIRST_KERNEL))
            alone = self._first_kernel(program, bursts)
            for low in lows * processes:
                stack.enter_context(self._busy(low))
            return statistics.median(self._first_kernel(program, bursts)) - statistics.median(alone)

    def _with_priority(self, priority: int, page: Path) -> Container:
        device = DeviceLimit(self.node.uuids[0], 16 * LIMIT_MIB * MIB, priority=priority, priority_line=1)
        container = self.node.container_with(Limits((device,)))
        (container.root / contract.CONTAINER_PRIORITY.lstrip("/")).hardlink_to(page)
        return container

    @contextmanager
    def _busy(self, container: Container) -> Iterator[None]:
        with container.start([self.build / CLIENT, "work", "--seconds", "60", "--kernel-us", "1000"]) as program:
            program.listen()  # a second of work is done
            yield

    @staticmethod
    def _first_kernel(program: Program, bursts: int) -> list[float]:
        return [program.ask("burst")["milliseconds"] for _ in range(bursts)]

    # --- shares ---------------------------------------------------------------------------------------------------

    def shares(self, seconds: int) -> Iterator[Share]:
        """Return the shares of tenants with a compute limit, alone and together."""
        for case in SHARE_CASES:
            shim = self._share_case(self.shim, case, seconds)
            beside = self._share_case(self.hami_core, case, seconds) if self.hami_core else [None] * len(shim)
            for limit, got, other in zip(case.limits, shim, beside, strict=True):
                yield Share(case.name, limit, got, other, case.in_research)

    def _share_case(self, contender: Contender, case: "Case", seconds: int) -> list[float]:
        containers = [contender.container(LIMIT_MIB, limit) for limit in case.limits]
        with ExitStack() as stack:
            tenants = [
                [stack.enter_context(self._worker(container, case, seconds)) for _ in range(case.processes)] for container in containers
            ]
            return [round(100 * sum(settled_share(list(read_all(program))) for program in programs), 2) for programs in tenants]

    @contextmanager
    def _worker(self, container: Container, case: "Case", seconds: int) -> Iterator[object]:
        command = ["work", "--seconds", str(seconds), "--kernel-us", str(case.kernel_us), "--blocks", str(case.blocks), *case.arguments]
        with container.start([self.build / CLIENT, *command]) as program:
            yield program


FIRST_KERNEL = """
from tests.fakes.cuda import *
from tests.fakes.kernels import *
import sys, time
start()
function = load()
work_for(0.2, 1000, lambda: spin(function, 1000))
for line in sys.stdin:
    time.sleep(0.1)  # long enough for the neighbour to have the device again
    begin = time.monotonic()
    spin(function, 1000)
    must("cuCtxSynchronize")
    tell(milliseconds=(time.monotonic() - begin) * 1000)
    work_for(0.1, 1000, lambda: spin(function, 1000))
"""


BLOCKS = 1024
"""Of a kernel's grid: a few waves of a large device. HAMi-core takes the number of blocks for a launch's cost; the shim measures it."""


@dataclass(frozen=True)
class Case:
    """Tenants that work on one device at the same time."""

    name: str
    limits: tuple[int, ...]
    kernel_us: int = 1000
    processes: int = 1
    blocks: int = BLOCKS
    arguments: tuple[str, ...] = ()
    in_research: bool = True
    """Whether it is one of the 20 rows that the target covers."""


SHARE_CASES = (
    *(Case(f"alone, limit {limit}", (limit,)) for limit in (10, 25, 50, 75)),
    Case("limit 30, 100 us kernels", (30,), kernel_us=100),
    Case("limit 30, 10 ms kernels", (30,), kernel_us=10_000),
    Case("limit 75, 10 ms kernels", (75,), kernel_us=10_000, in_research=False),
    Case("limit 30, 132 blocks (one wave)", (30,), blocks=132),
    Case("limit 30, 16,384 blocks", (30,), blocks=16_384),
    Case("limit 30, sync after every launch", (30,), arguments=("--sync-every", "1")),
    Case("limit 30, sync after every 50", (30,), arguments=("--sync-every", "50")),
    Case("limit 30, sync after every 200", (30,), kernel_us=100, arguments=("--sync-every", "200")),
    Case("limit 30, cuLaunchKernelEx", (30,), arguments=("--launch", "ex")),
    Case("limit 30, cooperative", (30,), arguments=("--launch", "cooperative")),
    Case("limit 30, graphs of 10 kernels", (30,), arguments=("--launch", "graph")),
    Case("two processes of one tenant, limit 30", (30,), processes=2),
    Case("two processes of one tenant, limit 60", (60,), processes=2),
    Case("two tenants", (30, 70)),
    Case("two tenants", (50, 50)),
    Case("two tenants", (20, 20)),
    Case("two tenants", (10, 90)),
)

WARM_UP_SECONDS = 3


def read_all(program: object) -> Iterator[dict[str, Any]]:
    """Return all events of a worker until it ends."""
    stdout = program.process.stdout  # type: ignore[attr-defined]
    return (json.loads(line) for line in stdout)


def settled_share(events: list[dict[str, Any]]) -> float:
    """Return GPU seconds per second after the warm-up; of the whole run if there are fewer than two reports after it."""
    progress = [event for event in events if event["event"] == "progress"]
    steady = [event for event in progress if event["seconds"] >= WARM_UP_SECONDS]
    if len(steady) < 2:
        steady = [{"seconds": 0.0, "gpu_seconds": 0.0}, *progress]
    if len(steady) < 2:
        raise ValueError(f"a worker reported no progress at all: {events}")
    first, *later = steady
    return float(sum(event["gpu_seconds"] for event in later) / (later[-1]["seconds"] - first["seconds"]))


def answer_within(program: Program, seconds: float) -> dict[str, Any] | None:
    """Return a program's next line; None when it is late or the program has ended."""
    stdout = program.process.stdout
    assert stdout is not None
    ready, _, _ = select.select([stdout], [], [], seconds)
    line = stdout.readline() if ready else ""
    return json.loads(line) if line else None


def seconds_to_answer(program: Program, command: str | None = None) -> float:
    """Return the seconds until a program's next line; PATIENCE_SECONDS when it is late or the program has ended."""
    begun = time.monotonic()
    if command is not None and program.process.poll() is None:
        program.tell(command)
    return time.monotonic() - begun if answer_within(program, PATIENCE_SECONDS) else PATIENCE_SECONDS


def facts_of(bench: Bench, contender: Contender, quick: bool) -> dict[str, str]:
    """Return the properties of a contender's limits by name."""
    kills, starts = (30, 10) if quick else (300, 60)
    survival = bench.kills(contender, kills)
    facts = {
        "allocation paths held": bench.paths_held(contender),
        "survivors that hang beside killed neighbours (aim 0)": str(survival),
        "newcomers that hang after four were killed while starting (aim 0)": str(bench.newcomers(contender, starts)),
        "over-grant, 2 processes that race (aim 0)": bench.over_grant(contender, 2),
        "over-grant, 8 processes that race (aim 0)": bench.over_grant(contender, 8),
    }
    if isinstance(contender, Shim):
        facts["bytes counted and not held after the kills (aim 0)"] = str(survival.leaked_bytes)
    return facts


def errors_of(shares: Sequence[Share], of_hami_core: bool = False) -> str:
    """Return the tenants' distance from their limits."""
    got = [share.hami_core if of_hami_core else share.got for share in shares]
    errors = [abs(one - share.limit) for one, share in zip(got, shares, strict=True) if one is not None]
    return f"worst {max(errors):.1f}, mean {statistics.mean(errors):.1f} points"


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter workloads")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.add_argument("--hami-core", type=Path, metavar="PATH", help="a build of HAMi-core's libvgpu.so, to be measured beside")
    options = parser.parse_args()
    if options.hami_core and not options.hami_core.is_file():
        parser.error(f"--hami-core {options.hami_core}: there is no such file; build HAMi-core and name its libvgpu.so")
    beside = bool(options.hami_core)
    with tempfile.TemporaryDirectory(prefix="aliquot-bench-") as directory:
        node = nodes.simulated(Path(directory), "h200x8")
        bench = Bench(node, nodes.BUILD, rounds=3 if options.quick else 7, hami_core=options.hami_core and options.hami_core.resolve())
        costs = [*bench.costs(), *bench.costs_on_bare_driver(Path(directory))]
        if not options.json:
            cost_header = ("call", "bare", "with shim", "ratio", "added", "aim", *(("HAMi-core", "ratio", "added") if beside else ()))
            report.table("Added by the shim", cost_header, [_cost_cells(row) for row in costs])
        shares = list(bench.shares(9 if options.quick else 18))
        if not options.json:
            share_header = ("case", "limit", "got", "error", *(("HAMi-core", "error") if beside else ()))
            report.table("Compute shares, percent", share_header, [_share_cells(share) for share in shares])
        compute, beside_research = "compute error over the 20 rows of the research (aim 3 and 1)", "compute error over the other rows"
        aimed, others = [share for share in shares if share.in_research], [share for share in shares if not share.in_research]
        behaviours = list(every_behaviour(2 if options.quick else 10))
        by_behaviour = list(shares_by_behaviour.measure(node, behaviours[:: 4 if options.quick else 1], 5 if options.quick else 10))
        if not options.json:
            behaviour_header = ("behaviour", "limit 10", "its first second", "neighbour, limit 90", "without a limit")
            report.table("Compute shares by behaviour, percent", behaviour_header, [_behaviour_cells(one) for one in by_behaviour])
        bursts = 5 if options.quick else 20
        shim = {
            **facts_of(bench, bench.shim, options.quick),
            "lookup routes held by the front": bench.routes_held(bench.shim),
            "lookup routes held by the preload": bench.routes_held(Shim(node, "preload")),
            compute: errors_of(aimed),
            beside_research: errors_of(others),
            "shares by behaviour: worst, mean (aim 3)": shares_by_behaviour.summary(by_behaviour),
            "priority reaction (aim <= 10 ms)": f"{bench.priority_reaction(Path(directory), bursts):.1f} ms",
            "… beside a low container of 16 processes": f"{bench.priority_reaction(Path(directory), bursts, 1, 16):.1f} ms",
            "… beside 4 low containers of 4": f"{bench.priority_reaction(Path(directory), bursts, 4, 4):.1f} ms",
        }
        hami: dict[str, str] = {}
        if bench.hami_core:
            hami = {
                **facts_of(bench, bench.hami_core, options.quick),
                "lookup routes held by the preload": bench.routes_held(bench.hami_core),
                compute: errors_of(aimed, of_hami_core=True),
                beside_research: errors_of(others, of_hami_core=True),
            }
    if options.json:
        data = {"costs": [asdict(row) for row in costs], "shares": [asdict(share) for share in shares], "facts": shim, "hami_core": hami}
        print(json.dumps(data))
        return
    fact_cells = [(what, found, *((hami.get(what, "-"),) if beside else ())) for what, found in shim.items()]
    report.table("Limits and crashes", ("what", "found", *(("HAMi-core",) if beside else ())), fact_cells)


def _cost_cells(row: Row) -> tuple[str, ...]:
    beside = () if row.hami_core is None else _beside_bare(row, row.hami_core)
    shim, ratio, added = _beside_bare(row, row.shim)
    return (row.what, f"{row.bare:.1f} {row.unit}", shim, ratio, added, row.aim, *beside)


def _beside_bare(row: Row, found: float) -> tuple[str, str, str]:
    return f"{found:.1f} {row.unit}", f"{found / row.bare:.2f}", f"{found - row.bare:+.1f} {row.unit}"


def _behaviour_cells(one: shares_by_behaviour.Result) -> tuple[str, ...]:
    return (str(one.behaviour), f"{one.tenant:.1f}", f"{one.first_second:.1f}", f"{one.neighbour:.1f}", f"{one.unlimited:.1f}")


def _share_cells(share: Share) -> tuple[str, ...]:
    beside = () if share.hami_core is None else (f"{share.hami_core:.1f}", f"{share.hami_core - share.limit:+.1f}")
    return (share.case, str(share.limit), f"{share.got:.1f}", f"{share.got - share.limit:+.1f}", *beside)


if __name__ == "__main__":
    main()
