# SPDX-License-Identifier: Apache-2.0
"""The ``simulate`` command: chooses the replays, shows progress on a terminal, and returns the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aliquot_cli.output import Output, document
from aliquot_lab.simulate import report, topology
from aliquot_lab.simulate.departures import replay_departures
from aliquot_lab.simulate.progress import Progress
from aliquot_lab.simulate.published import ALLOCATION_FILE, FRAGMENTATION_FILE, Means, Published, read_published
from aliquot_lab.simulate.run import Task, replay, run_all, weights_of
from aliquot_lab.simulate.starts import StartsResult, replay_starts
from aliquot_lab.simulate.trace import NODE_LIST, TraceError, pod_lists


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of the command line."""

    directory: Path
    """Directory with the lists; or with the lists in ``csv`` and the published results in ``expected_results``."""
    lists: Sequence[str]
    """Short names of pod lists; empty: all."""
    policies: Sequence[str]
    seeds: Sequence[int]
    jobs: int
    output: Output
    load: float | None = None
    """With departures: average demand as a part of all GPUs."""
    own_cores: bool = False
    """Whether pods request compute apart from memory, drawn by the seed."""
    rates_cpu_pods: bool = True
    """Whether the extender's policies place pods without GPUs too; if not, kube-scheduler's defaults do."""
    consolidates: bool = False
    """With departures: whether the extender's policies move pods for waiting ones."""
    most_pods: int | None = None
    """With departures: how many arrivals are replayed; None: all."""
    rates_starts: bool = False
    """With departures: whether room is held for waiting pods, and the times are rated that were stated (``starts``)."""


def run(options: SimulateOptions) -> str:
    """Run the replays and return the text to print. Raises TraceError, PolicyError."""
    for policy in options.policies:
        weights_of(policy)
    directory = options.directory / "csv" if (options.directory / "csv").is_dir() else options.directory
    tasks = _tasks(options, directory)
    show = Progress(len(tasks))
    if options.load is not None and options.rates_starts:
        return _run_starts(options, options.load, tasks)
    if options.load is not None:
        replayer = partial(replay_departures, load=options.load, consolidates=options.consolidates, most_pods=options.most_pods)
        departed = run_all(replayer, tasks, options.jobs, show.one_done, show.part_done)
        show.end()
        return document(departed, options.output) if options.output.for_programs else report.departures_table(departed)
    results = run_all(replay, tasks, options.jobs, show.one_done, show.part_done)
    show.end()
    published = Published(_published(directory, ALLOCATION_FILE), _published(directory, FRAGMENTATION_FILE))
    if options.output.for_programs:
        return document(report.facts(results, published), options.output)
    return report.tables(results, published)


def _run_starts(options: SimulateOptions, load: float, tasks: Sequence[Task]) -> str:
    """Run each replay with held room and without; return the text to print."""
    show, found = Progress(2 * len(tasks)), list[Sequence[StartsResult]]()
    for holds in (True, False):
        rating = partial(replay_starts, load=load, most_pods=options.most_pods, holds=holds)
        found.append(run_all(rating, tasks, options.jobs, show.one_done, show.part_done))
    show.end()
    rated, without = found
    return document([*rated, *without], options.output) if options.output.for_programs else report.starts_table(rated, without)


def compare_links(output: Output) -> str:
    """Compare how policies choose linked GPUs; return the text to print."""
    found = topology.compare()
    return document(found, output) if output.for_programs else report.links_table(found)


def _tasks(options: SimulateOptions, directory: Path) -> list[Task]:
    known = pod_lists(directory)
    if not known:
        raise TraceError(f"{directory}: expected pod lists named openb_pod_list_<name>.csv, found no such file")
    unknown = [name for name in options.lists if name not in known]
    if unknown:
        raise TraceError(f"{directory}: expected a pod list named {', '.join(unknown)}, found {', '.join(known)}")
    return [
        Task(directory / NODE_LIST, known[name], name, policy, seed, options.rates_cpu_pods, "own-compute" if options.own_cores else "")
        for name in options.lists or known
        for policy in options.policies
        for seed in options.seeds
    ]


def _published(directory: Path, name: str) -> Means:
    file = directory.parent / "expected_results" / name
    return read_published(file) if file.exists() else {}
