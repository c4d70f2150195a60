"""How answers are printed: aligned tables as kubectl's, or JSON and YAML of the same facts for scripts."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

import click

from proto.units import MIB

GIB = 1024 * MIB
_GAP = "   "
UNKNOWN = "-"

T = TypeVar("T")


class Output(StrEnum):
    """Forms of an answer."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def for_programs(self) -> bool:
        """Whether the answer is a document rather than lines for people."""
        return self in (Output.JSON, Output.YAML)


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and the colour that a terminal shows it in."""

    text: str
    colour: str | None = None


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column of a table over rows of one type."""

    title: str
    cell: Callable[[T], Cell | str]
    wide: bool = False
    """Only in the wide form."""


def table(columns: Sequence[Column[T]], rows: Iterable[T], output: Output) -> list[str]:
    """Lay rows out as lines, the titles first."""
    shown = [column for column in columns if output is Output.WIDE or not column.wide]
    lines = [[Cell(column.title) for column in shown]]
    lines += [[_cell(column.cell(row)) for column in shown] for row in rows]
    widths = [max(len(line[index].text) for line in lines) for index in range(len(shown))]
    return [_line(line, widths) for line in lines]


def document(value: Any, output: Output) -> str:
    """Encode plain data, dataclasses among it, as JSON or YAML."""
    text = json.dumps(value, indent=2, default=_plain)
    if output is Output.JSON:
        return text
    import yaml

    return str(yaml.safe_dump(json.loads(text), sort_keys=False)).rstrip()


def memory(value: float | None) -> str:
    """Write an amount of memory for people."""
    if value is None:
        return UNKNOWN
    return f"{value / GIB:.1f}Gi" if abs(value) >= GIB else f"{value / MIB:.0f}Mi"


def percent(ratio: float | None) -> str:
    """Write a share for people."""
    return UNKNOWN if ratio is None else f"{ratio * 100:.0f}%"


def number(value: float | None, unit: str = "") -> str:
    """Write a count for people."""
    return UNKNOWN if value is None else f"{value:g}{unit}"


def heat(ratio: float | None, text: str) -> Cell:
    """Colour a share: what is nearly full is to be seen at once."""
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
