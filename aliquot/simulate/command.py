"""The ``simulate`` command: which replays are wanted, progress on a terminal, and the result on standard output."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aliquot.cli.output import Output, document
from aliquot.simulate import report, topology
from aliquot.simulate.departures import replay_departures
from aliquot.simulate.published import ALLOCATION_FILE, FRAGMENTATION_FILE, Means, Published, read_published
from aliquot.simulate.run import Task, replay, run_all
from aliquot.simulate.trace import NODE_LIST, TraceError, pod_lists


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the user asked for."""

    directory: Path
    """Holds the lists, or has them in ``csv`` and the published results in ``expected_results``."""
    lists: Sequence[str]
    """Short names of pod lists; none: all."""
    policies: Sequence[str]
    seeds: Sequence[int]
    jobs: int
    output: Output
    load: float | None = None
    """With departures: the part of the GPUs that is asked for on average."""
    own_cores: bool = False
    """Whether pods ask for compute beside memory, drawn by the seed."""
    rates_cpu_pods: bool = True
    """Whether the extender's policies place pods without GPUs too, or kube-scheduler's defaults do."""


def run(options: SimulateOptions) -> str:
    """Replay, and return the text to print. Raises TraceError."""
    directory = options.directory / "csv" if (options.directory / "csv").is_dir() else options.directory
    tasks = _tasks(options, directory)
    show = _Progress(len(tasks))
    if options.load is not None:
        departed = run_all(partial(replay_departures, load=options.load), tasks, options.jobs, show.one_done, show.part_done)
        show.end()
        return document(departed, options.output) if options.output.for_programs else report.departures_table(departed)
    results = run_all(replay, tasks, options.jobs, show.one_done, show.part_done)
    show.end()
    published = Published(_published(directory, ALLOCATION_FILE), _published(directory, FRAGMENTATION_FILE))
    if options.output.for_programs:
        return document(report.facts(results, published), options.output)
    return report.tables(results, published)


def compare_links(output: Output) -> str:
    """Compare who chooses linked GPUs, and return the text to print."""
    found = topology.compare()
    return document(found, output) if output.for_programs else report.links_table(found)


def _tasks(options: SimulateOptions, directory: Path) -> list[Task]:
    known = pod_lists(directory)
    if not known:
        raise TraceError(f"{directory}: expected pod lists called openb_pod_list_<name>.csv, found none")
    unknown = [name for name in options.lists if name not in known]
    if unknown:
        raise TraceError(f"{directory}: expected a pod list called {', '.join(unknown)}, found {', '.join(known)}")
    return [
        Task(directory / NODE_LIST, known[name], name, policy, seed, options.own_cores, options.rates_cpu_pods)
        for name in options.lists or known
        for policy in options.policies
        for seed in options.seeds
    ]


def _published(directory: Path, name: str) -> Means:
    file = directory.parent / "expected_results" / name
    return read_published(file) if file.exists() else {}


class _Progress:
    """One line on standard error, when that is a terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._shown = total, 0, sys.stderr.isatty()

    def one_done(self, task: Task) -> None:
        """Count a replay."""
        self._done += 1
        self._show(f"{self._done} of {self._total}: {task.trace} {task.policy}")

    def part_done(self, task: Task, part: float) -> None:
        """Say which replay runs, and how much of it is done."""
        self._show(f"{self._done} of {self._total}, then {task.trace} {task.policy}: {part:.0%}")

    def end(self) -> None:
        """Remove the line."""
        self._show("")

    def _show(self, text: str) -> None:
        if self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
