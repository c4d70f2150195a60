# SPDX-License-Identifier: Apache-2.0
"""One line of progress on standard error, if that is a terminal."""

import sys

from aliquot_lab.simulate.run import Task


def show_line(text: str) -> None:
    """Replace the line; an empty text removes it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


class Progress:
    """The progress of many replays."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def one_done(self, task: Task) -> None:
        """Count a replay."""
        self._done += 1
        show_line(f"{self._done} of {self._total}: {task.trace} {task.policy}")

    def part_done(self, task: Task, part: float) -> None:
        """Show which replay runs, and how much of it is done."""
        show_line(f"{self._done} of {self._total}, then {task.trace} {task.policy}: {part:.0%}")

    def end(self) -> None:
        """Remove the line."""
        show_line("")
