# SPDX-License-Identifier: Apache-2.0
"""``aliquot simulate --trace DIR --benchmark``: the replays of docs/measurements/placement.md, in the order of the page.

Each section is a call of the same command with other options, so its title names what to run for this section alone. Sections of the page
that name another command are not part of it: side mixes, MIG, claims and partners.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from aliquot_cli.output import Output, document
from aliquot_lab.simulate.command import SimulateOptions, compare_links, run

SEARCH_LISTS: Final = ("default", "cpu050", "cpu250", "gpushare40", "gpushare100", "multigpu20", "multigpu50", "gpuspec33")
"""The lists on which the default weights were searched."""
HELD_OUT: Final = (
    *("cpu0", "cpu037", "cpu072", "cpu100", "cpu200", "cpu235", "cpu300", "gpushare20", "gpushare60", "gpushare80"),
    *("gpuspec05", "gpuspec10", "gpuspec20", "gpuspec25", "multigpu30", "multigpu40"),
)
SEARCH_SEEDS: Final = range(1000, 1001)
HELD_OUT_SEEDS: Final = range(42, 43)
QUICK_LISTS: Final = ("default", "cpu250")
QUICK_PODS: Final = 2000
"""How many arrivals a quick run replays with departures."""
LINKS: Final = "Links"


class Extent(StrEnum):
    """How much is run."""

    QUICK = "quick"
    """One seed, two lists, few pods with departures: whether the commands work and the order of magnitude is right."""
    FULL = "full"
    """What the page has: hours on two cores."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page."""

    title: str
    policies: Sequence[str]
    seeds: range
    lists: Sequence[str] = ()
    """Empty: all."""
    load: float | None = None
    own_cores: bool = False
    rates_cpu_pods: bool = True
    consolidates: bool = False
    most_pods: int | None = None

    def options(self, directory: Path, extent: Extent, jobs: int, output: Output) -> SimulateOptions:
        """Return the options of its replays."""
        lists, seeds, most_pods = self.lists, self.seeds, self.most_pods
        if extent is Extent.QUICK:
            lists, seeds = [name for name in QUICK_LISTS if not lists or name in lists] or lists[:1], seeds[:1]
            most_pods = None if self.load is None else QUICK_PODS
        how = (self.load, self.own_cores, self.rates_cpu_pods, self.consolidates, most_pods)
        return SimulateOptions(directory, lists, self.policies, seeds, jobs, output, *how)


def _moves(policy: str, load: float, *, consolidates: bool) -> Section:
    title = f"Moves for waiting pods: {policy} at {load}, {'with' if consolidates else 'without'} moves"
    return Section(title, (policy,), range(42, 43), ("default",), load, consolidates=consolidates, most_pods=6000)


def _departures(load: float, lists: Sequence[str], seeds: range) -> Section:
    title = f"With departures: {', '.join(lists)} at {load}, seed {seeds[0]}"
    return Section(title, COMPARED, seeds, lists, load=load)


COMPARED: Final = ("frag", "fgd", "bestfit")
SECTIONS: Final = (
    Section("Result at full load, and whole nodes: search lists", COMPARED, SEARCH_SEEDS, SEARCH_LISTS),
    Section("Result at full load, and whole nodes: held-out lists", COMPARED, HELD_OUT_SEEDS, HELD_OUT),
    *(_departures(load, ("default",), SEARCH_SEEDS) for load in (0.4, 0.7)),
    *(_departures(load, ("default", "cpu200", "gpushare60", "gpuspec20"), HELD_OUT_SEEDS) for load in (0.4, 0.7, 0.9)),
    _moves("frag", 1.0, consolidates=False),
    _moves("frag", 1.0, consolidates=True),
    _moves("spread", 0.9, consolidates=False),
    _moves("spread", 0.9, consolidates=True),
    Section("The other policies", ("random", "dotprod", "bestfit", "gpuclustering", "gpupacking", "fgd"), range(42, 45)),
    Section("Pods without GPUs, rated by the extender", ("frag",), SEARCH_SEEDS, SEARCH_LISTS),
    Section("Pods without GPUs, placed by kube-scheduler's defaults", ("frag",), SEARCH_SEEDS, SEARCH_LISTS, rates_cpu_pods=False),
    Section("Compute and memory apart", COMPARED, HELD_OUT_SEEDS, ("default",), own_cores=True),
)


def run_benchmark(directory: Path, extent: Extent, jobs: int, output: Output) -> str:
    """Run all sections; return the text to print. Raises TraceError."""
    if output.for_programs:
        found = {section.title: json.loads(run(section.options(directory, extent, jobs, Output.JSON))) for section in SECTIONS}
        return document({**found, LINKS: json.loads(compare_links(Output.JSON))}, output)
    parts = [f"## {section.title}\n\n{run(section.options(directory, extent, jobs, output))}" for section in SECTIONS]
    return "\n\n".join((*parts, f"## {LINKS}\n\n{compare_links(output)}"))
