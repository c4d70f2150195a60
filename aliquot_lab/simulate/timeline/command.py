# SPDX-License-Identifier: Apache-2.0
"""``aliquot simulate --nodes --pods``: reads the lists, runs every policy, and returns the text to print."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from aliquot.contract.model import Policy
from aliquot_cli.output import Output, document
from aliquot_lab.simulate import baselines
from aliquot_lab.simulate.progress import show_line
from aliquot_lab.simulate.run import PolicyError, weights_of
from aliquot_lab.simulate.timeline import text
from aliquot_lab.simulate.timeline.choosers import FORMULAS
from aliquot_lab.simulate.timeline.files import load_nodes, load_pods, load_queues
from aliquot_lab.simulate.timeline.outcome import Outcome
from aliquot_lab.simulate.timeline.page import page
from aliquot_lab.simulate.timeline.run import Setting, simulate
from aliquot_lab.simulate.timeline.workloads import check_queues

POLICIES: Final = tuple(dict.fromkeys((*(policy.value for policy in Policy), *FORMULAS, *baselines.BASELINES)))


class ReportError(Exception):
    """The report cannot be written."""


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """The options of the command line."""

    nodes_file: Path
    pods_file: Path
    queues_file: Path | None
    policies: Sequence[str]
    seed: int
    jobs: int
    output: Output
    preempts: bool = True
    rates_cpu_pods: bool = True
    report: Path | None = None
    """The HTML file to write."""

    @property
    def line(self) -> str:
        """Return the command line, with file names alone."""
        words = ["aliquot simulate", f"--nodes {self.nodes_file.name}", f"--pods {self.pods_file.name}"]
        words += [f"--queues {self.queues_file.name}"] if self.queues_file else []
        words += [f"--policy {policy}" for policy in self.policies]
        words += [] if self.preempts else ["--no-preemption"]
        words += [] if self.rates_cpu_pods else ["--default-cpu-pods"]
        return " ".join((*words, f"--seed {self.seed}"))


def check_policy(policy: str) -> None:
    """Check the name of a policy, and changed weights. Raises PolicyError."""
    if policy in POLICIES:
        return
    if policy.partition(":")[0] not in [known.value for known in Policy]:
        raise PolicyError(f"expected a policy of {', '.join(POLICIES)}, found {policy!r}")
    weights_of(policy)


def run(options: TimelineOptions) -> str:
    """Run all policies, write the report, and return the text to print. Raises TraceError, PolicyError, ReportError."""
    for policy in options.policies:
        check_policy(policy)
    outcomes = run_all(options.policies, read_setting(options), options.jobs)
    if options.report is not None:
        _write(options.report, page(outcomes, options.line))
    return document(text.facts(outcomes), options.output) if options.output.for_programs else text.tables(outcomes)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ReportError(f"{file}: expected to write the report there: {exc.strerror or exc}") from exc


def read_setting(options: TimelineOptions) -> Setting:
    """Read the lists. Raises TraceError."""
    nodes = load_nodes(options.nodes_file)
    pods = load_pods(options.pods_file, nodes)
    queues = load_queues(options.queues_file) if options.queues_file is not None else []
    check_queues(pods, queues)
    return Setting(nodes, pods, queues, options.seed, options.preempts, options.rates_cpu_pods)


def run_all(policies: Sequence[str], setting: Setting, jobs: int) -> list[Outcome]:
    """Run policies in ``jobs`` processes, or in this one. Results are in the order of the policies. Raises PolicyError."""
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            return list(pool.map(partial(simulate, setting=setting), policies))
    outcomes = []
    for number, policy in enumerate(policies):
        show = partial(_show, f"{number} of {len(policies)} policies, then {policy}")
        outcomes.append(simulate(policy, setting, tick=show))
    show_line("")
    return outcomes


def _show(what: str, part: float) -> None:
    show_line(f"{what}: {part:.0%}")
