# SPDX-License-Identifier: Apache-2.0
"""The page ``docs/measurements/clients.md``: each client, what was checked, and the result in each way.

A run replaces the rows of the clients that it ran and keeps the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.clients.installing import Pin

WAYS = ("bare", "front", "preload")
HEADER = "| client | version | checked | bare | front | preload |"
INTRODUCTION = """# Clients

Programs that others wrote, unmodified, on the [simulated driver](../development/simulated-driver.md). `make clients` runs them and
writes this page. *bare* is the driver alone, *front* and *preload* are the shim as the agent mounts it, with 8,192 MiB of an H200. The
versions are those of `tests/clients/clients.toml`. A dash: the check has no meaning in that way.
PyTorch runs on the project's own stand-ins for libcudart and cuBLAS. Nothing here says what a real GPU does.
"""
Row = tuple[str, str, str]
"""Client, check and way."""


@dataclass
class Results:
    """The outcomes of one run, by client, check and way."""

    cells: dict[Row, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    """By client; a machine's own ones are not those of the pin table."""

    def add(self, client: str, check: str, way: str, text: str) -> None:
        """Keep an outcome; a failure stays if another case of the same row passed."""
        held = self.cells.get((client, check, way), "")
        if not held.startswith(("failed", "not run")):
            self.cells[client, check, way] = text if not held or text.startswith(("failed", "not run")) else held


def cell(report: pytest.TestReport) -> str:
    """Return the text of an outcome: what the test found, if it recorded that."""
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return f"not run: {reason.removeprefix('Skipped: ').splitlines()[0]}".replace("|", "/")
    found = [str(value) for name, value in report.user_properties if name == "found"]
    return ", ".join(found).replace("|", "/") or report.outcome if report.outcome == "passed" else "failed"


def render(results: Results, pins: Mapping[str, Pin], kept: Mapping[str, list[str]]) -> str:
    """Return the page. Args: kept: rows of clients that did not run, by client."""
    lines = []
    for name, pin in pins.items():
        checks = list(dict.fromkeys(check for client, check, _ in results.cells if client == name))
        if pin.kind == "missing":
            lines.append(f"| {name} | | not run: {pin.why} | | | |")
        elif not checks:
            lines += kept.get(name) or [f"| {name} | {pin.version} | not run yet | | | |"]
        for check in checks:
            cells = [results.cells.get((name, check, way), "–") for way in WAYS]
            lines.append(f"| {name} | {results.versions.get(name, pin.version)} | {check} | {' | '.join(cells)} |")
    day = datetime.now(UTC).date().isoformat()
    return f"{INTRODUCTION}\nLast run: {day}.\n\n{HEADER}\n|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"


def read_rows(file: Path) -> dict[str, list[str]]:
    """Return the rows of a page by client; empty for a page that does not exist."""
    rows: dict[str, list[str]] = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        words = line.split(" | ")
        if line.startswith("| ") and line != HEADER:
            rows.setdefault(words[0].removeprefix("| "), []).append(line)
    return rows


def cells_of(row: str) -> list[str]:
    """Return the cells of a row of ``read_rows``."""
    return [cell.strip() for cell in row.split("|")[1:-1]]


def update(file: Path, results: Results, pins: Mapping[str, Pin]) -> None:
    """Write the page with the rows of this run."""
    file.write_text(render(results, pins, read_rows(file)))
