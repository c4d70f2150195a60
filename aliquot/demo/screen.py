"""How the demo is shown: a live table on a terminal, plain lines elsewhere, nothing for ``--json``. ``story`` decides what."""

import re
import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aliquot.demo.metrics import Scrape
from aliquot.demo.promises import Promise
from aliquot.demo.story import Row
from proto.units import MIB, format_memory

BAR_CELLS = 10
METRICS_TITLE = "/metrics of the agent, where slices are"
REASON_CHARACTERS = 400
SHOWN_METRICS = re.compile(r"aliquot_(device_memory_(total|used|allocated)|container_(memory|refusals))")
STATE_STYLES = {"Running": "green", "Pending": "yellow", "Succeeded": "blue", "Failed": "red"}


class LiveScreen:
    """A table that changes in place, with what happens above it."""

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
        """Leave the table as it is and write the part of the metrics that concerns slices."""
        self._live.stop()
        self._live.console.print(Text(METRICS_TITLE, style="bold"))
        self._live.console.print(Text(_excerpt(scrape), style="dim"), soft_wrap=True)

    def judge(self, promises: Sequence[Promise], notes: Sequence[str]) -> None:
        """Write the outcome."""
        self._live.console.print(Group(_promises(promises), *(Text(f"Note: {note}", style="yellow") for note in notes)))
        held = sum(promise.held for promise in promises)
        style = "bold green" if held == len(promises) else "bold red"
        self._live.console.print(Text(f"{held} of {len(promises)} promises held.", style=style))


class PlainScreen:
    """Lines of text: what happens, and a pod's line whenever it changes."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown: dict[tuple[str, str], str] = {}

    def __enter__(self) -> "PlainScreen":
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to put back."""

    def say(self, sentence: str) -> None:
        """Write a line with the time since the beginning."""
        print(f"{time.monotonic() - self._started:5.1f}s  {sentence}", flush=True)

    def show(self, rows: Sequence[Row]) -> None:
        """Write the lines that differ from what was last written."""
        for row in rows:
            line = _line(row)
            if self._shown.get((row.pod, row.device)) != line:
                self._shown[row.pod, row.device] = line
                self.say(f"  {line}")

    def quote(self, title: str, text: str) -> None:
        """Write another program's output."""
        print(f"{title}\n{text}", flush=True)

    def metrics(self, scrape: Scrape) -> None:
        """Write the part of the metrics that concerns slices."""
        print(f"{METRICS_TITLE}\n{_excerpt(scrape)}", flush=True)

    def judge(self, promises: Sequence[Promise], notes: Sequence[str]) -> None:
        """Write the outcome."""
        for promise in promises:
            print(f"{'ok  ' if promise.held else 'FAIL'}  {promise.name}: expected {promise.expected}; found {promise.found}")
        for note in notes:
            print(f"Note: {note}")
        print(f"{sum(promise.held for promise in promises)} of {len(promises)} promises held.", flush=True)


class SilentScreen:
    """Shows nothing: the caller prints the data."""

    def __enter__(self) -> "SilentScreen":
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to put back."""

    def say(self, sentence: str) -> None:
        """Nothing."""

    def show(self, rows: Sequence[Row]) -> None:
        """Nothing."""

    def quote(self, title: str, text: str) -> None:
        """Nothing."""

    def metrics(self, scrape: Scrape) -> None:
        """Nothing."""

    def judge(self, promises: Sequence[Promise], notes: Sequence[str]) -> None:
        """Nothing."""


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
            row.device or "none",
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
    """Why a pod is in its state; of an RPC error what the plugin said, without the kubelet's wrapping."""
    said = row.state.message.rpartition(" desc = ")[2]
    message = ": ".join(filter(None, (row.state.reason, said)))
    return message if len(message) <= REASON_CHARACTERS else message[: REASON_CHARACTERS - 1] + "…"


def _excerpt(scrape: Scrape) -> str:
    """The metrics of slices and of the devices they are on."""
    uuids = {item.device_uuid for item in scrape.slices}
    lines = (line for line in scrape.text.splitlines() if SHOWN_METRICS.match(line))
    return "\n".join(line for line in lines if any(uuid in line for uuid in uuids))


def _promises(promises: Sequence[Promise]) -> Table:
    table = Table(title="Promises", title_justify="left", title_style="bold", expand=True, box=SIMPLE_HEAD)
    table.add_column("", width=2)
    table.add_column("promise", ratio=4)
    table.add_column("expected", ratio=4)
    table.add_column("found", ratio=5)
    for promise in promises:
        mark = Text("✔", style="green") if promise.held else Text("✘", style="bold red")
        table.add_row(mark, promise.name, promise.expected, promise.found, style="" if promise.held else "red")
    return table
