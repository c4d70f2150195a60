# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import dataclass

import pytest

from agent.core.rows import RowFormat
from agent.errors import StorageError


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    amount: int


NOTES = RowFormat("note", "note", Note, version=3)
LINE = NOTES.encode(Note("käse", 7))


def test_value_round_trips_and_line_is_readable():
    assert NOTES.decode(LINE) == Note("käse", 7)
    assert json.loads(LINE)["note"] == {"text": "käse", "amount": 7}
    assert LINE.count(b"\n") == 1


@pytest.mark.parametrize("at", range(len(LINE) - 1))
def test_no_byte_of_a_line_can_change_its_value(at):
    for byte in (0x00, 0x30, 0x22, 0xFF):
        damaged = LINE[:at] + bytes([byte]) + LINE[at + 1 :]
        try:
            assert NOTES.decode(damaged) == Note("käse", 7)
        except StorageError:
            continue


def test_every_incomplete_line_is_detected():
    for length in range(len(LINE) - 1):
        with pytest.raises(StorageError):
            NOTES.decode(LINE[:length])


def test_error_is_reported():
    with pytest.raises(StorageError, match="want a note of version 4, found version 3"):
        RowFormat("note", "note", Note, version=4).decode(LINE)
    with pytest.raises(StorageError, match="the content of this note does not match its digest"):
        NOTES.decode(LINE.replace(b"7}", b"8}"))
    with pytest.raises(StorageError, match="not a receipt"):
        RowFormat("receipt", "receipt", Note, version=3).decode(LINE)
