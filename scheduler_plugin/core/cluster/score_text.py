# SPDX-License-Identifier: Apache-2.0
"""The reply of prioritize as JSON text that is kept and updated in place.

Encoding thousands of entries costs more than the decision. So each entry has a fixed position in the text, found by its row, and its score
is a field of fixed width, padded with spaces, which JSON allows before a number. A changed score overwrites the old one, and a reply is a
copy of the text, or of the requested runs of it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from scheduler_plugin.core.cluster.columns import Bools, Rows
from scheduler_plugin.core.cluster.names import runs

WIDTH: Final = 8
MAX_SCORE_SHOWN: Final = 10**WIDTH - 1
_FEW: Final = 16
"""Up to this number of scores, writing one by one is faster than by arrays."""
_POWERS: Final = 10 ** np.arange(WIDTH - 1, -1, -1, dtype=np.int64)
_ZERO, _SPACE = b"0 "


class Skeleton:
    """The entries of all rows without their scores. All shapes of pods share it until a node comes or goes."""

    def __init__(self, names: Sequence[str]) -> None:
        """Args: names: by row; empty for a row without node, which has no entry."""
        entries = [b'{"Host":%s,"Score":%s},' % (msgspec.json.encode(name), b" " * WIDTH) if name else b"" for name in names]
        self.text = b"".join(entries)
        self.ends = np.cumsum(np.array([len(entry) for entry in entries], dtype=np.int64))
        self.starts = np.concatenate(([0], self.ends))[: len(entries)].astype(np.int64)
        self.score_at = self.ends - len("},") - WIDTH
        self.named: Bools = self.ends > self.starts
        self.entries = int(np.count_nonzero(self.named))


class ScoreText:
    """The reply on all rows for one shape of pod."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.written_at = -1
        """The state's change counter when the scores were written."""
        self._text = bytearray(skeleton.text)
        self._digits = np.frombuffer(self._text, dtype=np.uint8)

    def write(self, rows: Rows, scores: npt.NDArray[np.integer]) -> None:
        """Write the scores, 0 to MAX_SCORE_SHOWN, of rows that have an entry."""
        if len(rows) <= _FEW:
            for at, score in zip(self.skeleton.score_at[rows].tolist(), scores.tolist(), strict=True):
                self._text[at : at + WIDTH] = b"%*d" % (WIDTH, score)
            return
        shown = np.where(scores[:, None] >= _POWERS, scores[:, None] // _POWERS % 10 + _ZERO, _SPACE).astype(np.uint8)
        shown[:, -1] = scores % 10 + _ZERO
        self._digits[self.skeleton.score_at[rows][:, None] + np.arange(WIDTH)] = shown

    def answer(self, asked: Bools, winner: int, winner_score: int, rest: Iterable[bytes]) -> bytes:
        """Return the JSON list of the requested rows, one of them with another score, and of further entries.

        Args: winner: one of the requested rows. rest: entries of other nodes.
        """
        at = int(self.skeleton.score_at[winner])
        score = self._text[at : at + WIDTH]
        self._text[at : at + WIDTH] = b"%*d" % (WIDTH, winner_score)
        with memoryview(self._text) as text:
            pieces = [text[begin:end] for begin, end in self._cuts(asked)]
            pieces[-1] = pieces[-1][: -len(",")]
            listed = b"".join((b"[", *pieces, *(b"," + entry for entry in rest), b"]"))
        self._text[at : at + WIDTH] = score
        return listed

    def _cuts(self, asked: Bools) -> Iterable[tuple[int, int]]:
        if np.count_nonzero(asked) == self.skeleton.entries:
            return [(0, len(self._text))]
        first, last = runs(np.flatnonzero(asked))
        return zip(self.skeleton.starts[first].tolist(), self.skeleton.ends[last].tolist(), strict=True)
