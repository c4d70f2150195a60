# SPDX-License-Identifier: Apache-2.0
"""Finds the rows of a list of node names directly in the list's JSON text.

kube-scheduler sends the names of all nodes with each call, in a new order each time, so this is the largest part of a call's cost. As 5,000
strings, looked up one by one, they would take five times as long as the decision itself. Here the text stays one array of bytes. Quotes
give the positions of the names, each name is read as a few words of eight bytes, and a hash of the words finds the row with the same words.

Invariant: the result equals a look-up in a dictionary of names. Text in another form than Go writes for node names (with escapes or spaces)
is left to a JSON decoder.

The text is larger than the processor's first cache, so its cost is the number of passes. Names are usually known and of equal
length. Then a grid is laid over the text: if each cell is a known name, and the usual three bytes are between the cells, no other byte
needs a check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler_plugin.core.cluster.columns import Ints, Rows
from scheduler_plugin.core.cluster.state import UNKNOWN_ROW

_WORD_BYTES: Final = 8
_SLOTS_PER_NAME: Final = 4
_MIN_SLOT_BITS: Final = 8
_MAX_SHORT: Final = np.iinfo(np.int16).max
"""Up to this number of names the slots are half as large, which saves cache."""
_QUOTE, _COMMA, _OPEN, _CLOSE = b'",[]'
_BETWEEN: Final = int.from_bytes(b'","', "little")
"""The bytes between two names."""
_BETWEEN_MASK: Final = (1 << 24) - 1
_MASKS: Final = np.array([(1 << (8 * size)) - 1 for size in range(_WORD_BYTES + 1)], dtype=np.uint64)
_MULTIPLIERS: Final = np.cumprod(np.full(256, 0x9E3779B97F4A7C15, dtype=np.uint64))
"""Odd factors of the words of a name in its hash; node names have at most 253 bytes."""
_FOLD: Final = np.uint64(29)
_UNPLAIN: Final = frozenset(map(chr, range(32))) | {'"', "\\"}
"""Characters that JSON escapes."""

Words: TypeAlias = Sequence[npt.NDArray[np.uint64]]
"""The first eight bytes of each name, the next eight, and so on. Beyond a name's end they are 0, which no name contains."""


@dataclass(frozen=True, slots=True)
class NamesText:
    """A list of names as JSON, with the position of each name, without its quotes."""

    text: bytes
    starts: Ints
    ends: Ints
    shortest: int
    longest: int

    @classmethod
    def read(cls, text: bytes) -> "NamesText | None":
        """Find the names in JSON of the plain form; None for another form, an empty list, or anything but a list of names."""
        if b"\\" in text or b"\0" in text:
            return None
        if (grid := cls.grid(text)) is not None and grid.is_plain():
            return grid
        buffer = np.frombuffer(text, dtype=np.uint8)
        quotes = np.flatnonzero(buffer == _QUOTE)
        starts, ends = quotes[0::2] + 1, quotes[1::2]
        if not len(ends) or len(starts) != len(ends) or starts[0] != 2 or ends[-1] != len(text) - 2:
            return None
        plain = buffer[0] == _OPEN and buffer[-1] == _CLOSE
        plain &= bool((starts[1:] - ends[:-1] == 3).all() and (buffer[ends[:-1] + 1] == _COMMA).all())
        sizes = ends - starts
        return cls(text, starts, ends, int(sizes.min()), int(sizes.max())) if plain else None

    @classmethod
    def of(cls, names: Sequence[bytes]) -> "NamesText":
        """Join names without JSON around them; at least one."""
        sizes = np.array([len(name) for name in names], dtype=np.int64)
        ends = np.cumsum(sizes)
        return cls(b"".join(names), ends - sizes, ends, int(sizes.min()), int(sizes.max()))

    @classmethod
    def grid(cls, text: bytes) -> "NamesText | None":
        """Read the text as names of the same length as the first; None if the bytes between them differ, or a name has a byte 0.

        Other bytes of the names are not checked.
        """
        size = text.find(b'"', 2) - 2
        stride = size + len('"",')
        if size < 1 or text[:2] != b'["' or text[-2:] != b'"]' or (len(text) - 1) % stride or b"\0" in text:
            return None
        count = (len(text) - 1) // stride
        if count > 1:
            between: npt.NDArray[np.uint32] = np.ndarray((count - 1,), "<u4", buffer=text, offset=2 + size, strides=(stride,))
            if not (between & _BETWEEN_MASK == _BETWEEN).all():
                return None
        starts = np.arange(2, 2 + stride * count, stride)
        return cls(text, starts, starts + size, size, size)

    def is_plain(self) -> bool:
        """Whether the names contain no escape and no quote."""
        return b"\\" not in self.text and np.count_nonzero(np.frombuffer(self.text, dtype=np.uint8) == _QUOTE) == 2 * len(self.starts)

    def name(self, position: int) -> str:
        """Return one name. Raises UnicodeDecodeError."""
        return self.text[self.starts[position] : self.ends[position]].decode()

    def part(self, kept: Ints) -> bytes:
        """Return the JSON list of the names at these ascending positions."""
        if not len(kept):
            return b"[]"
        first, last = runs(kept)
        cuts = zip((self.starts[first] - 1).tolist(), (self.ends[last] + 1).tolist(), strict=True)
        return b"[" + b",".join([self.text[begin:end] for begin, end in cuts]) + b"]"


class NameTable:
    """The rows of all known names."""

    def __init__(self, names: Sequence[str]) -> None:
        """Args: names: by row, each once; empty for a row without a node."""
        joined = NamesText.of([b"" if _UNPLAIN.intersection(name) else name.encode() for name in names] or [b""])  # JSON escapes these
        sizes = joined.ends - joined.starts
        self._word_count = -(-joined.longest // _WORD_BYTES)
        self._words = [np.ascontiguousarray(word) for word in self._split(joined)]
        named = np.flatnonzero(sizes)
        self._common = {at: word[named[0]] for at, word in enumerate(self._words) if len(named) and (word[named] == word[named[0]]).all()}
        """Words that are equal in all names, such as those of a domain."""
        self._slot_bits = max(_MIN_SLOT_BITS, (_SLOTS_PER_NAME * len(names)).bit_length())
        self._tables: list[npt.NDArray[np.int16 | np.int32]] = []
        hashes = self._hash(self._words, len(sizes))
        for _ in range(2):
            table: npt.NDArray[np.int16 | np.int32] = np.full(
                1 << self._slot_bits, UNKNOWN_ROW, dtype=np.int16 if len(names) <= _MAX_SHORT else np.int32
            )
            slots = self._slots(hashes[named])
            table[slots] = named
            self._tables.append(table)
            named = named[table[slots] != named]
            hashes = _mixed(hashes)
        self._left_out = {names[row]: row for row in named.tolist()}
        """Names without a slot in either table: a few in thousands."""

    def read(self, text: bytes) -> tuple[NamesText, Rows] | None:
        """Find the names in JSON of the plain form, with the row of each, or UNKNOWN_ROW; None for another form.

        Raises: UnicodeDecodeError.
        """
        grid = NamesText.grid(text)
        if grid is not None:
            rows = self.rows_of(grid)
            if rows.min() != UNKNOWN_ROW or grid.is_plain():  # a known name is plain
                return grid, rows
        names = NamesText.read(text)
        return None if names is None else (names, self.rows_of(names))

    def rows_of(self, names: NamesText) -> Rows:
        """Return each name's row, or UNKNOWN_ROW. Raises UnicodeDecodeError."""
        words = self._split(names)
        hashes = self._hash(words, len(names.starts))
        rows, missed = self._look_up(words, hashes, 0)
        # Names that share a slot with another are in the second table, under another hash.
        if len(missed):
            other = [word if at in self._common else word[missed] for at, word in enumerate(words)]
            rows[missed], still = self._look_up(other, _mixed(hashes[missed]), 1)
            missed = missed[still]
            rows[missed] = UNKNOWN_ROW
        for position in missed.tolist() if self._left_out else ():
            rows[position] = self._left_out.get(names.name(position), UNKNOWN_ROW)
        # The look-up did not compare the words that all known names share, nor those beyond the longest known name.
        for at, common in self._common.items():
            if not (usual := words[at] == common).all():
                rows[~usual] = UNKNOWN_ROW
        if names.longest > _WORD_BYTES * self._word_count:
            rows[names.ends - names.starts > _WORD_BYTES * self._word_count] = UNKNOWN_ROW
        return rows

    def _split(self, names: NamesText) -> Words:
        """Split names into as many words as the longest known name has."""
        text, starts, shortest, words = names.text, names.starts, names.shortest, []
        beyond = int(starts[-1]) + _WORD_BYTES * max(1, self._word_count) - len(text)
        padded = text + bytes(beyond) if beyond > 0 else text
        at_every_byte: npt.NDArray[np.uint64] = np.ndarray((len(padded) - _WORD_BYTES + 1,), dtype="<u8", buffer=padded, strides=(1,))
        is_grid = len(starts) > 1 and shortest == names.longest  # a strided view, without a copy
        for offset in range(0, _WORD_BYTES * self._word_count, _WORD_BYTES):
            places = slice(starts[0] + offset, starts[-1] + offset + 1, starts[1] - starts[0]) if is_grid else starts + offset
            word = at_every_byte[places]
            if shortest - offset < _WORD_BYTES:
                kept = max(shortest - offset, 0) if is_grid else np.clip(names.ends - starts - offset, 0, _WORD_BYTES)
                word = word & _MASKS[kept]
            words.append(word)
        return words

    def _hash(self, words: Words, count: int) -> npt.NDArray[np.uint64]:
        """Add up the words in which names differ, each times its own factor: differences show in the highest bits."""
        counted = [word * factor for at, (word, factor) in enumerate(zip(words, _MULTIPLIERS, strict=False)) if at not in self._common]
        return reduce(np.add, counted) if counted else np.zeros(count, dtype=np.uint64)

    def _slots(self, hashes: npt.NDArray[np.uint64]) -> Ints:
        return (hashes >> np.uint64(64 - self._slot_bits)).view(np.int64)

    def _look_up(self, words: Words, hashes: npt.NDArray[np.uint64], level: int) -> tuple[Rows, Ints]:
        """Return rows, and the positions at which they are wrong. Words that are equal in all known names are not compared."""
        rows: Rows = self._tables[level].take(self._slots(hashes)).astype(np.int64)
        same = rows != UNKNOWN_ROW
        for at, asked in enumerate(words):
            if at not in self._common:
                same &= self._words[at].take(rows) == asked
        return rows, np.flatnonzero(~same)


def _mixed(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash again, so that names that shared a slot hardly share the next one."""
    mixed: npt.NDArray[np.uint64] = (hashes ^ (hashes >> _FOLD)) * _MULTIPLIERS[0]
    return mixed


def runs(ascending: Ints) -> tuple[Ints, Ints]:
    """Return the first and the last number of each run of consecutive numbers; there must be at least one number."""
    breaks = np.flatnonzero(np.diff(ascending) != 1)
    return ascending[np.concatenate(([0], breaks + 1))], ascending[np.concatenate((breaks, [len(ascending) - 1]))]
