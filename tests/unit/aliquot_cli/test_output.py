# SPDX-License-Identifier: Apache-2.0
"""Tables: no sentence is cut, and a terminal gets it wrapped."""

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import pytest

import aliquot_cli
from aliquot_cli import drift, get, top
from aliquot_cli.doctor.command import table as doctor_table
from aliquot_cli.doctor.findings import error
from aliquot_cli.explain import adopt, adoption
from aliquot_cli.model import Gpu, Node
from aliquot_cli.output import Column, Output, table
from aliquot_cli.pods import GpuPod

ROWS: Mapping[int, type] = {
    id(adopt.COLUMNS): adoption.Row,
    id(drift.COLUMNS): drift.Difference,
    id(get.POD_COLUMNS): GpuPod,
    id(top.SHARE_COLUMNS): top.Row,
    id(top.GPU_COLUMNS): Gpu,
    id(top.NODE_COLUMNS): Node,
}
SENTENCE = " ".join(f"word{number}" for number in range(60)) + ", so the cure is here"


def _tables() -> Iterator[Any]:
    """Yield all tables of the commands, each once."""
    seen = set()
    for module in pkgutil.walk_packages(aliquot_cli.__path__, "aliquot_cli."):
        if module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, tuple) and value and all(isinstance(one, Column) for one in value) and id(value) not in seen:
                seen.add(id(value))
                yield pytest.param(value, id=f"{module.name}.{name}")


TABLES = list(_tables())


def filled(kind: Any, name: str = "") -> Any:
    """Return a value in which each text is a long sentence that begins with its field's name."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: filled(hints[field.name], field.name) for field in dataclasses.fields(kind)})
    if origin is tuple:
        return (filled(arguments[0], name),)
    if origin is not None and issubclass(origin if isinstance(origin, type) else int, Mapping):
        return {}
    if arguments:  # an optional value
        return filled(arguments[0], name)
    return f"{name}: {SENTENCE}" if kind is str else kind(1)


@pytest.mark.parametrize("columns", TABLES)
def test_every_text_of_a_row_is_whole_in_a_file(columns: Sequence[Column[Any]]) -> None:
    row = filled(ROWS[id(columns)])
    text = "\n".join(table(columns, [row], Output.WIDE))
    started = [field.name for field in dataclasses.fields(row) if f"{field.name}: word0" in text]
    assert started or columns is top.SHARE_COLUMNS  # its texts are in the share and the GPU of the row
    assert text.count("word0 ") == text.count("so the cure is here") >= 1
    assert "…" not in text


@pytest.mark.parametrize("columns", [one for one in TABLES if any(column.is_sentence for column in one.values[0])])
@pytest.mark.parametrize("width", [80, 100, 140, 250])
def test_terminal_gets_whole_sentences_within_its_width(columns: Sequence[Column[Any]], width: int) -> None:
    short = [dataclasses.replace(one, cell=(lambda _: SENTENCE) if one.is_sentence else (lambda _: "name")) for one in columns]
    for output in (Output.TABLE, Output.WIDE):
        lines = table(short, [None, None], output, width=width)
        words = " ".join(lines).replace(",", "").split()
        sentences = sum(column.is_sentence for column in columns if output is Output.WIDE or not column.wide)
        assert max(map(len, lines)) <= width
        assert all(words.count(f"word{number}") == 2 * sentences for number in range(60))


def test_sentence_stands_below_its_row_on_a_narrow_terminal() -> None:
    columns: Sequence[Column[str]] = (Column("NAME", lambda _: "n" * 40), Column("MESSAGE", lambda row: row, is_sentence=True))
    lines = table(columns, ["why it waits, what was expected, and what to do about it", ""], Output.TABLE, width=60)
    assert lines == [
        "NAME",
        "n" * 40,
        "    MESSAGE: why it waits, what was expected, and what to do",
        "    about it",
        "n" * 40,
    ]


def test_line_break_in_a_sentence_becomes_a_space() -> None:
    columns: Sequence[Column[str]] = [Column("MESSAGE", lambda row: row, is_sentence=True)]
    assert table(columns, ["one\n  two"], Output.TABLE) == ["MESSAGE", "one two"]


@pytest.mark.parametrize("width", [None, 80, 200])
def test_doctor_prints_whole_findings(width: int | None) -> None:
    lines = [click.unstyle(line) for line in doctor_table([error("runtime.cdi", SENTENCE, SENTENCE)], width=width)]
    assert " ".join(" ".join(lines).split()).count(SENTENCE) == 2
    assert width is None or max(map(len, lines)) <= width
