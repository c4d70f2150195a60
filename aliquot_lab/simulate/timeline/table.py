# SPDX-License-Identifier: Apache-2.0
"""Reads rows of a CSV file. An error names file, line, column, what was expected and what was found."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final, TypeVar

from aliquot.contract.errors import quote
from aliquot_lab.simulate.trace import TraceError

MAX_AMOUNT: Final = 10**12
"""More than any amount of a node; larger numbers are mistakes and would not fit into the arrays."""
_T = TypeVar("_T")
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Empty cells and missing columns have the default of the call."""

    file: Path
    line: int
    cells: Mapping[str, str]

    def error(self, column: str, expected: str, found: str = "") -> TraceError:
        """Return the error of a cell. Args: found: what else to name than the cell itself."""
        return TraceError(f"{self.file}, line {self.line}, column {column}: expected {expected}, found {found or quote(self.text(column))}")

    def text(self, column: str, default: str = "") -> str:
        """Return a text without the spaces around it."""
        return self.cells.get(column, "").strip() or default

    def required(self, column: str) -> str:
        """Return a text that must not be empty. Raises TraceError."""
        if not (text := self.text(column)):
            raise self.error(column, "a name")
        return text

    def whole(self, column: str, default: int | None = None, least: int = 0, most: int = MAX_AMOUNT) -> int:
        """Return a whole number. Raises TraceError, also for an empty cell without default."""
        expected = f"a whole number from {least} to {most}" if most < MAX_AMOUNT else f"a whole number of at least {least}"
        return self._parsed(column, default, expected, lambda text: _checked(int(text), least, most))

    def whole_or_none(self, column: str, least: int = 0, most: int = MAX_AMOUNT) -> int | None:
        """Return a whole number, or None for an empty cell. Raises TraceError."""
        return self.whole(column, least=least, most=most) if self.text(column) else None

    def number(self, column: str, default: float | None = None) -> float:
        """Return a number of at least 0. Raises TraceError, also for an empty cell without default."""
        return self._parsed(column, default, "a number of at least 0", lambda text: _checked(float(text), 0.0, float(MAX_AMOUNT)))

    def number_or_none(self, column: str) -> float | None:
        """Return a number of at least 0, or None for an empty cell. Raises TraceError."""
        return self.number(column) if self.text(column) else None

    def choice(self, column: str, options: Sequence[str]) -> str:
        """Return one of several words; the first is the default. Raises TraceError."""
        if (text := self.text(column, options[0])) not in options:
            raise self.error(column, f"one of {', '.join(options)}")
        return text

    def _parsed(self, column: str, default: _T | None, expected: str, parse: Callable[[str], _T]) -> _T:
        text = self.text(column)
        if not text and default is not None:
            return default
        try:
            return parse(text)
        except ValueError as exc:
            raise self.error(column, expected) from exc


@dataclass(frozen=True, slots=True)
class Table:
    """A file: the names of its columns and its rows."""

    file: Path
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def expect(self, needed: Sequence[str], known: Sequence[str]) -> None:
        """Check the columns. Raises TraceError: one of ``needed`` is missing, or one is not in ``known``."""
        if missing := [column for column in needed if column not in self.columns]:
            raise TraceError(f"{self.file}, line 1: expected the columns {', '.join(needed)}, found no {', '.join(missing)}")
        if unknown := [column for column in self.columns if column not in known]:
            raise TraceError(f"{self.file}, line 1: expected columns of {', '.join(known)}, found {', '.join(map(quote, unknown))}")


def read_table(file: Path) -> Table:
    """Read a file with a header. Raises TraceError."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            return _table(file, stream)
    except OSError as exc:
        raise TraceError(f"{file}: expected a CSV file: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise TraceError(f"{file}: expected text in UTF-8: {exc.reason} at byte {exc.start}") from exc
    except csv.Error as exc:
        raise TraceError(f"{file}: expected a CSV file: {exc}") from exc


def _table(file: Path, lines: Iterable[str]) -> Table:
    reader = csv.reader(lines, strict=True)
    header = tuple(name.strip() for name in next(reader, ()))
    if not header:
        raise TraceError(f"{file}, line 1: expected the names of the columns, found an empty file")
    if len(set(header)) < len(header):
        raise TraceError(f"{file}, line 1: expected each column once, found {', '.join(header)}")
    rows = []
    for cells in reader:
        if not any(cells):
            continue
        if len(cells) != len(header):
            raise TraceError(f"{file}, line {reader.line_num}: expected {len(header)} cells as in the header, found {len(cells)}")
        rows.append(Row(file, reader.line_num, dict(zip(header, cells, strict=True))))
    return Table(file, header, tuple(rows))


def _checked(value: _N, least: _N, most: _N) -> _N:
    """Return a value within the bounds. Raises ValueError."""
    if not isfinite(value) or not least <= value <= most:
        raise ValueError(value)
    return value
