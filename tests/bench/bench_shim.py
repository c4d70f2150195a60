"""The shim beside the bare (simulated) driver, in one run: added nanoseconds, allocation paths, lookup routes, kills, shares.

Every row runs the same client program in two containers that differ only in the shim. Rounds of the two alternate, so that both see the
same machine; figures are medians. Run it alone: ``python -m tests.bench.bench_shim [--quick] [--json]``.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.core.region_layout import DeviceLimit, Limits
from tests.bench import nodes, report
from tests.fakes.container import MIB, Container, Interposition, Node

CLIENT = "bin/aliquot-cuda-client"
PATHS = ("alloc", "pitch", "managed", "async", "pool", "vmm", "vmm-release", "array", "mipmap", "graph", "ctx")
ROUTES = ("getproc", "dlsym", "link", "dlvsym", "deepbind", "dlmopen")
LIMIT_MIB = 4096


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    bare: float | None
    shim: float | None
    unit: str
    aim: str

    @property
    def added(self) -> float | None:
        return None if self.bare is None or self.shim is None else self.shim - self.bare


@dataclass(frozen=True)
class Share:
    """What one tenant got of a device, in percent of its time."""

    case: str
    limit: int
    got: float

    @property
    def error(self) -> float:
        return self.got - self.limit


class Bench:
    """One simulated node with the containers that rows need."""

    def __init__(self, node: Node, build: Path, rounds: int) -> None:
        self.node = node
        self.build = build
        self.rounds = rounds
        self.bare = node.container(LIMIT_MIB * 16, interposition="none")
        self.front = node.container(LIMIT_MIB * 16)

    # --- nanoseconds ----------------------------------------------------------------------------------------------

    def pair(self, what: str, unit: str, aim: str, measure: Callable[[Container], float], shim: Container | None = None) -> Row:
        """Measure the bare driver and the shim in turns."""
        shim = shim or self.front
        rounds = [(measure(self.bare), measure(shim)) for _ in range(self.rounds)]
        return Row(what, statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds), unit, aim)

    def calls(self, what: str, *arguments: str) -> Callable[[Container], float]:
        """Nanoseconds per call in one process: the best of the program's rounds, which other work on the machine disturbs least."""
        return lambda container: float(container.client("bench", what, *arguments).last["best_ns"])

    def concurrent_calls(self, what: str, processes: int) -> Callable[[Container], float]:
        """Wall-clock nanoseconds per call of several processes at once, all their calls together."""

        def measure(container: Container) -> float:
            programs = [container.start([self.build / CLIENT, "bench", what]) for _ in range(processes)]
            with ExitStack() as stack:
                each = [float(stack.enter_context(program).listen()["ns_per_call"]) for program in programs]
            return statistics.mean(each) / processes

        return measure

    def init(self, processes: int) -> Callable[[Container], float]:
        """Milliseconds of the slowest cuInit of several processes that start at once."""

        def measure(container: Container) -> float:
            programs = [container.start([self.build / CLIENT, "bench", "init"]) for _ in range(processes)]
            with ExitStack() as stack:
                return max(float(stack.enter_context(program).listen()["init_ns"]) for program in programs) / 1e6

        return measure

    def costs(self) -> Iterator[Row]:
        """What the shim adds to a call."""
        limited = self.node.container_with(Limits((DeviceLimit(self.node.uuids[0], LIMIT_MIB * 16 * MIB, sm_percent=99),)))
        yield self.pair("alloc + free", "ns", "<= 60", self.calls("alloc"))
        yield self.pair("alloc + free, 10 000 live", "ns", "<= 60", self.calls("alloc", "--mib", "40"))
        yield self.pair("alloc + free, 8 processes", "ns", "<= 250", self.concurrent_calls("alloc", 8))
        yield self.pair("launch, no ceiling", "ns", "<= 2", self.calls("launch"))
        yield self.pair("launch, ceiling 99", "ns", "<= 25", self.calls("launch"), limited)
        yield self.pair("cuMemGetInfo", "ns", "<= 20", self.calls("meminfo"))
        yield self.pair("cuInit, 1 process", "ms", "<= 2", self.init(1))
        yield self.pair("cuInit, slowest of 16", "ms", "<= 5", self.init(16))

    # --- limits ---------------------------------------------------------------------------------------------------

    def held(self, interposition: Interposition, *arguments: str) -> bool:
        """True when a program that takes all it can get ends within its limit, and its driver agrees."""
        container = self.node.container(LIMIT_MIB, interposition=interposition)
        with container.start([self.build / CLIENT, "fill", *arguments, "--hold"]) as program:
            answer = program.listen()
            physical = self.node.physical_used_bytes(self.node.uuids[0])
        return answer["event"] == "fill" and 0 < physical <= LIMIT_MIB * MIB

    def paths_held(self) -> int:
        """Allocation paths that hold the limit under the front."""
        return sum(self.held("front", "--kind", kind) for kind in PATHS)

    def routes_held(self, interposition: Interposition) -> int:
        """Ways of finding the driver that end at the shim."""
        return sum(self.held(interposition, "--via", route) for route in ROUTES)

    # --- kills ----------------------------------------------------------------------------------------------------

    def kills(self, count: int) -> tuple[int, float, int]:
        """Kill allocating neighbours at random moments; (survivor hung, slowest answer in seconds, bytes leaked at the end)."""
        container = self.node.container(LIMIT_MIB)
        rng, hung, slowest = random.Random(count), 0, 0.0
        with container.repl() as survivor:
            for _ in range(count):
                with container.start([self.build / CLIENT, "bench", "alloc"]) as victim:
                    time.sleep(rng.uniform(0.0, 0.03))
                    victim.kill()
                started = time.monotonic()
                answer = survivor.ask("info")
                elapsed = time.monotonic() - started
                slowest = max(slowest, elapsed)
                hung += elapsed > 1 or answer["event"] != "device"
            used = container.used_bytes()
            physical = self.node.physical_used_bytes(self.node.uuids[0])
        return hung, slowest, used - physical

    # --- shares ---------------------------------------------------------------------------------------------------

    def shares(self, seconds: int) -> Iterator[Share]:
        """What tenants with a compute ceiling get, alone and beside each other."""
        for case in SHARE_CASES:
            yield from self._share_case(case, seconds)

    def _share_case(self, case: "Case", seconds: int) -> Iterator[Share]:
        containers = [
            self.node.container_with(Limits((DeviceLimit(self.node.uuids[0], LIMIT_MIB * MIB, sm_percent=limit),))) for limit in case.limits
        ]
        with ExitStack() as stack:
            tenants = [
                [stack.enter_context(self._worker(container, case, seconds)) for _ in range(case.processes)] for container in containers
            ]
            for limit, programs in zip(case.limits, tenants, strict=True):
                got = sum(settled_share(list(read_all(program))) for program in programs)
                yield Share(case.name, limit, round(got * 100, 2))

    @contextmanager
    def _worker(self, container: Container, case: "Case", seconds: int) -> Iterator[object]:
        command = ["work", "--seconds", str(seconds), "--kernel-us", str(case.kernel_us), *case.arguments]
        with container.start([self.build / CLIENT, *command]) as program:
            yield program


@dataclass(frozen=True)
class Case:
    """Tenants that work on one device at once."""

    name: str
    limits: tuple[int, ...]
    kernel_us: int = 1000
    processes: int = 1
    arguments: tuple[str, ...] = ()


SHARE_CASES = (
    *(Case(f"alone, limit {limit}", (limit,)) for limit in (10, 25, 50, 75)),
    Case("limit 30, 100 us kernels", (30,), kernel_us=100),
    Case("limit 30, 10 ms kernels", (30,), kernel_us=10_000),
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


def read_all(program: object) -> Iterator[dict[str, float]]:
    """Every event of a worker until it ends."""
    stdout = program.process.stdout  # type: ignore[attr-defined]
    return (json.loads(line) for line in stdout)


def settled_share(events: list[dict[str, float]]) -> float:
    """GPU seconds per second after the warm-up."""
    steady = [event for event in events if event["event"] == "progress" and event["seconds"] > WARM_UP_SECONDS]
    first = next(event for event in events if event["event"] == "progress" and event["seconds"] >= WARM_UP_SECONDS)
    later = [event for event in steady if event["seconds"] > first["seconds"]]
    return sum(event["gpu_seconds"] for event in later) / (later[-1]["seconds"] - first["seconds"])


def main() -> None:
    """Measure everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shorter workloads")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aliquot-bench-") as directory:
        node = nodes.simulated(Path(directory), "h200x8")
        bench = Bench(node, nodes.BUILD, rounds=3 if options.quick else 7)
        costs = list(bench.costs())
        shares = list(bench.shares(9 if options.quick else 18))
        hung, slowest, leaked = bench.kills(30 if options.quick else 300)
        errors = [abs(share.error) for share in shares]
        facts = {
            "allocation paths held": f"{bench.paths_held()} of {len(PATHS)}",
            "lookup routes held by the front": f"{bench.routes_held('front')} of {len(ROUTES)}",
            "lookup routes held by the preload": f"{bench.routes_held('preload')} of {len(ROUTES)}",
            "hangs": f"{hung} of {30 if options.quick else 300} kills, slowest answer {slowest * 1000:.0f} ms",
            "bytes counted and not held after the kills": str(leaked),
            "compute error": f"worst {max(errors):.1f}, mean {statistics.mean(errors):.1f} points",
        }
    if options.json:
        print(json.dumps({"costs": [asdict(row) for row in costs], "shares": [asdict(share) for share in shares], "facts": facts}))
        return
    report.table("Added by the shim", ("call", "bare", "with shim", "added", "aim"), [_cost_cells(row) for row in costs])
    report.table("Compute shares, percent", ("case", "limit", "got", "error"), [_share_cells(share) for share in shares])
    report.table("Limits and crashes", ("what", "found"), list(facts.items()))


def _cost_cells(row: Row) -> tuple[str, ...]:
    assert row.bare is not None
    assert row.shim is not None
    assert row.added is not None
    return (row.what, f"{row.bare:.1f} {row.unit}", f"{row.shim:.1f} {row.unit}", f"{row.added:+.1f} {row.unit}", row.aim)


def _share_cells(share: Share) -> tuple[str, ...]:
    return (share.case, str(share.limit), f"{share.got:.1f}", f"{share.error:+.1f}")


if __name__ == "__main__":
    main()
