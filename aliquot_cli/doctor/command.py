# SPDX-License-Identifier: Apache-2.0
"""Runs all checks and prints the findings: a table, or JSON or YAML for scripts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from aliquot_cli.doctor import agent, driver, kubelet, runtime, shim, system
from aliquot_cli.doctor.findings import Finding, Severity, warning, worst
from aliquot_cli.doctor.host import Host, UnreadableError
from aliquot_cli.doctor.options import DoctorOptions
from aliquot_cli.output import Output, document, sentence_lines, terminal_width

Check = Callable[[Host, DoctorOptions], Iterator[Finding]]

CHECKS: Sequence[tuple[str, Check]] = (
    ("driver", driver.check),
    ("kubelet", kubelet.check),
    ("runtime", runtime.check),
    ("system", system.check),
    ("shim", shim.check),
    ("agent", agent.check),
)
_COLOURS = {Severity.OK: "green", Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "red"}


def examine(host: Host, options: DoctorOptions) -> list[Finding]:
    """Run all checks. A check that lacks permission to read becomes a warning, and the others continue."""
    findings = []
    for name, check in CHECKS:
        try:
            findings += list(check(host, options))
        except UnreadableError as exc:
            findings.append(warning(f"{name}.unreadable", str(exc), "run doctor as root"))
    return findings


def run(root: Path, options: DoctorOptions, *, output: Output, fail_on: Severity) -> bool:
    """Check the node and print the findings. Return whether all are below ``fail_on``."""
    findings = examine(Host(root.absolute()), options)
    highest = worst(findings)
    passed = highest.weight < fail_on.weight
    if output.for_programs:
        click.echo(document({"passed": passed, "worst": highest, "findings": [asdict(finding) for finding in findings]}, output))
    else:
        click.echo("\n".join(table(findings, width=terminal_width())))
    return passed


def table(findings: Sequence[Finding], *, width: int | None = None) -> Iterator[str]:
    """Yield the findings as lines of text, each with its fix below. Args: width: of the terminal; None wraps no line."""
    longest = max((len(finding.check) for finding in findings), default=0)
    margin = " " * (7 + 2 + longest + 2)
    room = None if width is None else width - len(margin)
    for finding in findings:
        mark = click.style(f"{finding.severity:<7}", fg=_COLOURS[finding.severity])
        first, *others = sentence_lines(finding.found, room)
        yield f"{mark}  {finding.check:<{longest}}  {first}"
        if finding.fix:
            others += sentence_lines(f"-> {finding.fix}", room)
        yield from (margin + line for line in others)
    counted = [(severity, sum(finding.severity is severity for finding in findings)) for severity in reversed(Severity)]
    yield ""
    yield ", ".join(f"{severity}: {number}" for severity, number in counted if number)
