# SPDX-License-Identifier: Apache-2.0
"""Draw docs/figures/demo.svg from a real run of ``aliquot demo``: what the terminal shows while all pods work, and the verdict.

Run it again after a change of the demo: ``.venv/bin/python docs/figures/make_demo.py``. The figure loads no fonts: the viewer has some.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from aliquot_lab.demo import command, screen
from aliquot_lab.demo.checks import Check
from aliquot_lab.demo.scenario import Row

WIDTH = 118
FONT_FACES = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)


class FigureScreen(screen.SilentScreen):
    """Keeps what a reader should see: the sentences, the table while all pods work, one listing, the verdict."""

    def __init__(self, console: Console) -> None:
        """Record on this console."""
        self._console = console
        self._rows: Sequence[Row] = ()

    def say(self, sentence: str) -> None:
        """Record a sentence."""
        self._console.print(Text(sentence))

    def show(self, rows: Sequence[Row]) -> None:
        """Keep the newest table that has every pod."""
        if len(rows) >= len(self._rows):
            self._rows = rows

    def quote(self, title: str, text: str) -> None:
        """Record the table as it stands, and the listing of the pod with two vGPUs."""
        if "pair" in title:
            self._console.print(screen._table("", self._rows))
            self._console.print(Text(title, style="bold"))
            self._console.print(Text(text, style="cyan"))

    def result(self, checks: Sequence[Check], notes: Sequence[str]) -> None:
        """Record the verdict."""
        held = sum(check.passed for check in checks)
        self._console.print(Text(f"{held} of {len(checks)} checks passed.", style="bold green" if held == len(checks) else "bold red"))


def main() -> None:
    """Run the demo and write the figure beside this script."""
    console = Console(record=True, force_terminal=True, width=WIDTH, file=io.StringIO())
    with patch.object(command, "_screen", lambda *_: FigureScreen(console)):
        status = command.run(command.DemoOptions(topology="a100x8-mig", real=False, as_json=False, keep=False, seconds=3.0))
    if status:
        raise SystemExit(f"the demo ended with status {status}: no figure written")
    svg = console.export_svg(title="aliquot demo", code_format=FONT_FACES.sub("", CONSOLE_SVG_FORMAT), unique_id="aliquot-demo")
    Path(__file__).with_name("demo.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
