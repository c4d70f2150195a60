# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: aligned tables in kubectl's style, or the same data as JSON or YAML for scripts."""

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import click

from aliquot.contract.units import MIB

GIB = 1024 * MIB
_GAP = "   "
_BELOW = "    "
_NARROWEST = 30
"""Characters that a column of sentences has at least."""
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
    is_sentence: bool = False
    """Its texts are sentences: never cut, and wrapped where the table is wider than the terminal."""


def terminal_width() -> int | None:
    """Return the columns of the terminal; None where standard output is a file or a pipe, in which no line is wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(columns: Sequence[Column[T]], rows: Iterable[T], output: Output, *, width: int | None = None, indent: str = "") -> list[str]:
    """Return the lines of the table, the titles first.

    Args: width: of the terminal, within which sentences are wrapped; None wraps no line. indent: what each line begins with.
    """
    shown = [column for column in columns if output is Output.WIDE or not column.wide]
    lines = [[Cell(column.title) for column in shown], *([_cell(column.cell(row)) for column in shown] for row in rows)]
    return [indent + text for text in _layout(shown, lines, None if width is None else width - len(indent))]


def _layout(columns: Sequence[Column[T]], lines: Sequence[Sequence[Cell]], width: int | None) -> Iterator[str]:
    widths = [max(len(cell.text) for cell in cells) for cells in zip(*lines, strict=True)]
    sentences = [index for index, column in enumerate(columns) if column.is_sentence]
    if sentences and width is not None:
        yield from _Wrapping(widths, sentences, width).lines(lines)
    else:
        yield from (_line(line, widths) for line in lines)


class _Wrapping:
    """Lays out a table with sentences on a terminal: they stand in their columns, or below their row where these would be too narrow."""

    def __init__(self, widths: Sequence[int], sentences: Sequence[int], width: int) -> None:
        self._sentences = sentences
        self._width = width
        self._widths = list(widths)
        left = width - len(_GAP) * (len(widths) - 1) - sum(size for index, size in enumerate(widths) if index not in sentences)
        for position, index in enumerate(sorted(sentences, key=lambda index: widths[index])):  # a short one leaves more to the long ones
            self._widths[index] = min(widths[index], left // (len(sentences) - position))
            left -= self._widths[index]
        self._is_below = any(self._widths[index] < min(widths[index], _NARROWEST) for index in sentences)

    def lines(self, rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
        """Yield the lines of all rows. The first row has the titles."""
        titles = rows[0]
        for row in rows:
            yield from self._row_with_sentences_below(titles, row) if self._is_below else self._wrapped(row)

    def _wrapped(self, row: Sequence[Cell]) -> Iterator[str]:
        parts = [sentence_lines(cell.text, self._widths[at]) if at in self._sentences else [cell.text] for at, cell in enumerate(row)]
        for texts in zip_longest(*parts, fillvalue=""):
            yield _line([Cell(text, cell.colour) for text, cell in zip(texts, row, strict=True)], self._widths)

    def _row_with_sentences_below(self, titles: Sequence[Cell], row: Sequence[Cell]) -> Iterator[str]:
        others = [at for at in range(len(row)) if at not in self._sentences]
        yield _line([row[at] for at in others], [self._widths[at] for at in others])
        for at in self._sentences:
            if row is not titles and row[at].text not in ("", UNKNOWN):
                yield from (_BELOW + line for line in sentence_lines(f"{titles[at].text}: {row[at].text}", self._width - len(_BELOW)))


def sentence_lines(text: str, width: int | None) -> list[str]:
    """Break a sentence between words, so that its lines have at most ``width`` characters; None breaks it nowhere.

    A longer word, such as a path, stays whole: it is there to be copied.
    """
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, _NARROWEST), break_long_words=False, break_on_hyphens=False) or [""]


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
    cell = value if isinstance(value, Cell) else Cell(value)
    return dataclasses.replace(cell, text=" ".join(cell.text.split())) if "\n" in cell.text else cell


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
