# SPDX-License-Identifier: Apache-2.0
"""A list of names read as bytes means what a JSON decoder and a dictionary make of it."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugin.core.cluster.names import NamesText, NameTable, runs
from scheduler_plugin.core.cluster.state import UNKNOWN_ROW

names = st.text(st.sampled_from("ab-.9é"), max_size=20)


def plain(listed: list[str]) -> bytes:
    return json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode()


@given(known=st.lists(names, max_size=30, unique=True), asked=st.lists(names, min_size=1, max_size=60))
def test_every_name_gets_the_row_that_a_dictionary_would_give(known, asked):
    read = NamesText.read(plain(asked))
    assert read is not None
    rows = {name: row for row, name in enumerate(known) if name}
    assert NameTable(known).rows_of(read).tolist() == [rows.get(name, UNKNOWN_ROW) for name in asked]
    assert [read.name(position) for position in range(len(asked))] == asked


odd_names = st.text(st.sampled_from(["a", "b", "é", '"', "\\", ",", "\0"]), max_size=4)


@given(st.lists(odd_names, max_size=6, unique=True), st.lists(odd_names, min_size=1, max_size=6))
def test_json_control_bytes_are_never_part_of_name(known, written):
    text = b'["' + '","'.join(written).encode() + b'"]'
    found = NameTable(known).read(text)
    if found is not None:
        read, rows = found
        meant = json.loads(text)
        assert [read.name(position) for position in range(len(rows))] == meant
        assert rows.tolist() == [known.index(name) if name and name in known else UNKNOWN_ROW for name in meant]


def test_known_names_of_equal_length_are_checked_together(monkeypatch):
    known = [f"node-{number:04d}" for number in range(100)]
    table = NameTable(known)
    monkeypatch.setattr(NamesText, "is_plain", lambda _: pytest.fail("the text was searched for quotes"))
    _, rows = table.read(plain(known[::-1]))
    assert rows.tolist() == list(range(99, -1, -1))


@given(st.lists(st.text(st.sampled_from("ab"), min_size=9, max_size=9), min_size=1, max_size=30), st.data())
def test_equally_long_names_are_read_like_others(asked, data):
    known = sorted(set(data.draw(st.lists(st.sampled_from([*asked, "short"]), max_size=10))))
    read = NamesText.read(plain(asked))
    assert read is not None
    assert [read.name(position) for position in range(len(asked))] == asked
    assert NameTable(known).rows_of(read).tolist() == [known.index(name) if name in known else UNKNOWN_ROW for name in asked]


def test_names_that_share_a_slot_are_all_found():
    known = [f"node-{number:04d}" for number in range(3000)]
    table = NameTable(known)
    for slots in table._tables:  # as if every hash had met another
        slots[: len(slots) // 2] = UNKNOWN_ROW
    table._left_out = {name: row for row, name in enumerate(known)}
    read = NamesText.read(plain(known[::-1]))
    assert read is not None
    assert table.rows_of(read).tolist() == list(range(2999, -1, -1))


@given(st.lists(names, min_size=1, max_size=20), st.data())
def test_a_part_of_a_list_is_the_list_of_the_kept_names(listed, data):
    kept = sorted(data.draw(st.sets(st.sampled_from(range(len(listed))))))
    read = NamesText.read(plain(listed))
    assert read is not None
    assert json.loads(read.part(np.array(kept, dtype=np.int64))) == [listed[position] for position in kept]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b'["a", "b"]',
        b'[ "a"]',
        b'["a\\u0062"]',
        b'["a"',
        b'"a"]',
        b'["a"]]',
        b'["a",]',
        b'["a"x"b"]',
        b'["a""b"]',
        b'[["a"]]',
        b'["a',
        b'{"a"}',
        b'["a\0"]',
        b'["ab","c""]',
        b'["ab","cd"}',
        b'["ab";"cd"]',
    ],
)
def test_text_that_is_not_plain_name_list_goes_to_decoder(text):
    assert NamesText.read(text) is None


@pytest.mark.parametrize(("numbers", "want"), [([3], ([3], [3])), ([1, 2, 5, 6, 9], ([1, 5, 9], [2, 6, 9])), ([0, 1, 2], ([0], [2]))])
def test_runs_are_the_gapless_parts(numbers, want):
    first, last = runs(np.array(numbers))
    assert (first.tolist(), last.tolist()) == want
