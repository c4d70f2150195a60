# SPDX-License-Identifier: Apache-2.0
"""``aliquot simulate --trace DIR --benchmark``: every figure of docs/measurements/placement.md, in the order of the page.

Each section is a call of the same command with other options, so its title names what to run for this section alone.
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
            lists, seeds = [name for name in QUICK_LISTS if not lists or name in lists], seeds[:1]
            most_pods = None if self.load is None else QUICK_PODS
        how = (self.load, self.own_cores, self.rates_cpu_pods, self.consolidates, most_pods)
        return SimulateOptions(directory, lists, self.policies, seeds, jobs, output, *how)


def _moves(policy: str, load: float, *, consolidates: bool) -> Section:
    title = f"Moves for waiting pods: {policy} at {load}, {'with' if consolidates else 'without'} moves"
    return Section(title, (policy,), range(42, 43), ("default",), load, consolidates=consolidates, most_pods=6000)


SECTIONS: Final = (
    Section("Result at full load, and whole nodes", ("frag", "fgd"), range(42, 52)),
    Section("With departures", ("frag", "fgd", "bestfit"), range(42, 45), ("default",), load=0.9),
    _moves("frag", 1.0, consolidates=False),
    _moves("frag", 1.0, consolidates=True),
    _moves("spread", 0.9, consolidates=False),
    _moves("spread", 0.9, consolidates=True),
    Section("The other policies", ("random", "dotprod", "bestfit", "gpuclustering", "gpupacking"), range(42, 45)),
    Section("Pods without GPUs, rated by the extender", ("frag",), range(1000, 1001), SEARCH_LISTS),
    Section("Pods without GPUs, placed by kube-scheduler's defaults", ("frag",), range(1000, 1001), SEARCH_LISTS, rates_cpu_pods=False),
    Section("Compute and memory apart", ("frag", "fgd", "bestfit"), range(42, 43), ("default",), own_cores=True),
)


def run_benchmark(directory: Path, extent: Extent, jobs: int, output: Output) -> str:
    """Run all sections; return the text to print. Raises TraceError."""
    if output.for_programs:
        found = {section.title: json.loads(run(section.options(directory, extent, jobs, Output.JSON))) for section in SECTIONS}
        return document({**found, LINKS: json.loads(compare_links(Output.JSON))}, output)
    parts = [f"## {section.title}\n\n{run(section.options(directory, extent, jobs, output))}" for section in SECTIONS]
    return "\n\n".join((*parts, f"## {LINKS}\n\n{compare_links(output)}"))
