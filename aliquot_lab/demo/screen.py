# SPDX-License-Identifier: Apache-2.0
"""Shows the demo: a live table on a terminal, lines elsewhere, no output for ``--json``. ``scenario`` decides what to show."""

import re
import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aliquot.contract.units import MIB, format_memory
from aliquot_lab.demo.checks import Check
from aliquot_lab.demo.metrics import Scrape
from aliquot_lab.demo.scenario import Row

BAR_CELLS = 10
METRICS_TITLE = "The agent's /metrics, for devices with shares"
SHOWN_METRICS = re.compile(r"aliquot_(device_memory_(total|used|allocated)|container_(memory|refusals))")
STATE_STYLES = {"Running": "green", "Pending": "yellow", "Succeeded": "blue", "Failed": "red"}


class LiveScreen:
    """A table that changes in place, with messages above it."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._live = Live(console=console or Console(), auto_refresh=False)
        self._started = time.monotonic()

    def __enter__(self) -> "LiveScreen":
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say(self, sentence: str) -> None:
        """Write above the table."""
        seconds = time.monotonic() - self._started
        self._live.console.print(Text.assemble((f"{seconds:5.1f}s  ", "dim"), sentence))

    def show(self, rows: Sequence[Row]) -> None:
        """Replace the table."""
        self._live.start()
        self._live.update(_table(self._title, rows), refresh=True)

    def quote(self, title: str, text: str) -> None:
        """Write another program's output above the table."""
        self._live.console.print(Text(title, style="bold"))
        self._live.console.print(Text(text, style="cyan"), soft_wrap=True)

    def metrics(self, scrape: Scrape) -> None:
        """Stop updating the table and write the metrics of the shares."""
        self._live.stop()
        self._live.console.print(Text(METRICS_TITLE, style="bold"))
        self._live.console.print(Text(_excerpt(scrape), style="dim"), soft_wrap=True)

    def result(self, checks: Sequence[Check], notes: Sequence[str]) -> None:
        """Write the results of the checks."""
        self._live.console.print(Group(_checks(checks), *(Text(f"Note: {note}", style="yellow") for note in notes)))
        held = sum(check.passed for check in checks)
        style = "bold green" if held == len(checks) else "bold red"
        self._live.console.print(Text(f"{held} of {len(checks)} checks passed.", style=style))


class PlainScreen:
    """Lines of text: messages, and a pod's line when it changes."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown: dict[tuple[str, str], str] = {}

    def __enter__(self) -> "PlainScreen":
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing."""

    def say(self, sentence: str) -> None:
        """Write a line with the time since the start."""
        print(f"{time.monotonic() - self._started:5.1f}s  {sentence}", flush=True)

    def show(self, rows: Sequence[Row]) -> None:
        """Write the lines that have changed."""
        for row in rows:
            line = _line(row)
            if self._shown.get((row.pod, row.device)) != line:
                self._shown[row.pod, row.device] = line
                self.say(f"  {line}")

    def quote(self, title: str, text: str) -> None:
        """Write another program's output."""
        print(f"{title}\n{text}", flush=True)

    def metrics(self, scrape: Scrape) -> None:
        """Write the metrics of the shares."""
        print(f"{METRICS_TITLE}\n{_excerpt(scrape)}", flush=True)

    def result(self, checks: Sequence[Check], notes: Sequence[str]) -> None:
        """Write the results of the checks."""
        for check in checks:
            print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: expected {check.expected}; found {check.found}")
        for note in notes:
            print(f"Note: {note}")
        print(f"{sum(check.passed for check in checks)} of {len(checks)} checks passed.", flush=True)


class SilentScreen:
    """Shows nothing, because the caller prints the data."""

    def __enter__(self) -> "SilentScreen":
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing."""

    def say(self, sentence: str) -> None:
        """Do nothing."""

    def show(self, rows: Sequence[Row]) -> None:
        """Do nothing."""

    def quote(self, title: str, text: str) -> None:
        """Do nothing."""

    def metrics(self, scrape: Scrape) -> None:
        """Do nothing."""

    def result(self, checks: Sequence[Check], notes: Sequence[str]) -> None:
        """Do nothing."""


AnyScreen = LiveScreen | PlainScreen | SilentScreen


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True, box=SIMPLE_HEAD)
    for name in ("pod", "device"):
        table.add_column(name, no_wrap=True)
    for name in ("limit", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", width=BAR_CELLS)
    table.add_column("refused", justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("reason", ratio=1, overflow="fold")
    for row in rows:
        style = STATE_STYLES.get(row.state.phase, "")
        table.add_row(
            row.pod,
            row.device or "-",
            format_memory(row.limit_bytes),
            "" if row.used_bytes is None else format_memory(row.used_bytes),
            _bar(row),
            "" if row.refusals is None else str(row.refusals),
            Text(row.state.phase, style=style),
            Text(_reason(row), style="dim"),
        )
    return table


def _bar(row: Row) -> Text:
    if row.used_bytes is None or row.limit_bytes == 0:
        return Text("")
    portion = min(1.0, row.used_bytes / row.limit_bytes)
    filled = round(portion * BAR_CELLS)
    style = "red" if row.limit_bytes - row.used_bytes < MIB else "green"
    return Text.assemble(("█" * filled, style), ("░" * (BAR_CELLS - filled), "dim"))


def _line(row: Row) -> str:
    used = "-" if row.used_bytes is None else format_memory(row.used_bytes)
    refused = "" if not row.refusals else f", {row.refusals} refused"
    reason = _reason(row)
    where = row.device or "no device"
    return f"{row.pod:<8} {where:<16} {used} of {format_memory(row.limit_bytes)}{refused}, {row.state.phase}" + (
        f": {reason}" if reason else ""
    )


def _reason(row: Row) -> str:
    """Return why a pod is in its state; of an RPC error only the plugin's message."""
    detail = row.state.message.rpartition(" desc = ")[2]
    return ": ".join(filter(None, (row.state.reason, detail)))


def _excerpt(scrape: Scrape) -> str:
    """Return the metrics of the shares and of their devices."""
    uuids = {item.device_uuid for item in scrape.shares}
    lines = (line for line in scrape.text.splitlines() if SHOWN_METRICS.match(line))
    return "\n".join(line for line in lines if any(uuid in line for uuid in uuids))


def _checks(checks: Sequence[Check]) -> Table:
    table = Table(title="Checks", title_justify="left", title_style="bold", expand=True, box=SIMPLE_HEAD)
    table.add_column("", width=2)
    table.add_column("check", ratio=4)
    table.add_column("expected", ratio=4)
    table.add_column("found", ratio=5)
    for check in checks:
        mark = Text("✔", style="green") if check.passed else Text("✘", style="bold red")
        table.add_row(mark, check.name, check.expected, check.found, style="" if check.passed else "red")
    return table
