"""Runs every examination and prints the findings: a table for people, JSON or YAML for scripts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from aliquot.cli.output import Output, document
from aliquot.doctor import agent, driver, kubelet, runtime, shim, system
from aliquot.doctor.findings import Finding, Severity, warning, worst
from aliquot.doctor.host import Host, UnreadableError
from aliquot.doctor.options import DoctorOptions

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
    """Run all examinations; one that may not read something says so, and the others go on."""
    findings = []
    for name, check in CHECKS:
        try:
            findings += list(check(host, options))
        except UnreadableError as exc:
            findings.append(warning(f"{name}.unreadable", str(exc), "run doctor as root"))
    return findings


def run(root: Path, options: DoctorOptions, *, output: Output, fail_on: Severity) -> bool:
    """Examine and print; return whether the node passes."""
    findings = examine(Host(root.absolute()), options)
    gravest = worst(findings)
    passed = gravest.weight < fail_on.weight
    if output.for_programs:
        click.echo(document({"passed": passed, "worst": gravest, "findings": [asdict(finding) for finding in findings]}, output))
    else:
        click.echo("\n".join(table(findings)))
    return passed


def table(findings: Sequence[Finding]) -> Iterator[str]:
    """Lay the findings out for people, the cure below each."""
    width = max((len(finding.check) for finding in findings), default=0)
    for finding in findings:
        mark = click.style(f"{finding.severity:<7}", fg=_COLOURS[finding.severity])
        yield f"{mark}  {finding.check:<{width}}  {finding.found}"
        if finding.fix:
            yield f"{'':7}  {'':{width}}  -> {finding.fix}"
    counted = [(severity, sum(finding.severity is severity for finding in findings)) for severity in reversed(Severity)]
    yield ""
    yield ", ".join(f"{severity}: {number}" for severity, number in counted if number)
