# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: aligned tables in kubectl's style, or the same data as JSON or YAML for scripts."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

import click

from aliquot.contract.units import MIB

GIB = 1024 * MIB
_GAP = "   "
UNKNOWN = "-"

T = TypeVar("T")


class Output(StrEnum):
    """Output formats."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def for_programs(self) -> bool:
        """Whether the output is a document for scripts."""
        return self in (Output.JSON, Output.YAML)


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and its colour on a terminal."""

    text: str
    colour: str | None = None


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table. All rows have one type."""

    title: str
    cell: Callable[[T], Cell | str]
    wide: bool = False
    """Only shown in the wide format."""


def table(columns: Sequence[Column[T]], rows: Iterable[T], output: Output) -> list[str]:
    """Return the lines of the table, the titles first."""
    shown = [column for column in columns if output is Output.WIDE or not column.wide]
    lines = [[Cell(column.title) for column in shown]]
    lines += [[_cell(column.cell(row)) for column in shown] for row in rows]
    widths = [max(len(line[index].text) for line in lines) for index in range(len(shown))]
    return [_line(line, widths) for line in lines]


def document(value: Any, output: Output) -> str:
    """Encode plain data and dataclasses as JSON or YAML."""
    text = json.dumps(value, indent=2, default=_plain)
    if output is Output.JSON:
        return text
    import yaml

    return str(yaml.safe_dump(json.loads(text), sort_keys=False)).rstrip()


def memory(value: float | None) -> str:
    """Format an amount of memory in Mi or Gi."""
    if value is None:
        return UNKNOWN
    return f"{value / GIB:.1f}Gi" if abs(value) >= GIB else f"{value / MIB:.0f}Mi"


def percent(ratio: float | None) -> str:
    """Format a ratio in percent."""
    return UNKNOWN if ratio is None else f"{ratio * 100:.0f}%"


def number(value: float | None, unit: str = "") -> str:
    """Format a number with its unit."""
    return UNKNOWN if value is None else f"{value:g}{unit}"


def heat(ratio: float | None, text: str) -> Cell:
    """Colour a ratio by how full it is: yellow from 80 percent, red from 95."""
    if ratio is None:
        return Cell(text)
    return Cell(text, "red" if ratio >= 0.95 else "yellow" if ratio >= 0.8 else None)


def _cell(value: Cell | str) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def _line(cells: Sequence[Cell], widths: Sequence[int]) -> str:
    texts = []
    for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        padding = " " * (width - len(cell.text)) if index < len(cells) - 1 else ""
        texts.append((click.style(cell.text, fg=cell.colour) if cell.colour else cell.text) + padding)
    return _GAP.join(texts).rstrip()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")
