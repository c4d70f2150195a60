# SPDX-License-Identifier: Apache-2.0
"""Tables for a terminal and for docs: plain Markdown, so that a run can be pasted into docs/measurements/benchmarks.md."""

from collections.abc import Sequence


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str | int | float]]) -> None:
    """Print one table."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    print(f"\n### {title}\n", lines[0], rule, *lines[1:], sep="\n", flush=True)
