# SPDX-License-Identifier: Apache-2.0
"""Which GPU models a pod names. The one rule for placement, the scheduler's columns, the demand and the command line.

A name is compared by its words: letters and digits, in any case, with anything else between them. It has one of three forms:

H20                 the model has these words, one after the other. H20 is no H200, A10 no A100, L4 no L40S
A10*, *H20*         ``*`` stands for any text, also inside a word. Stars on both sides find a text anywhere
=NVIDIA H200        the model has these words and no others
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

EXACT: Final = "="
ANY: Final = "*"
_BETWEEN_WORDS: Final = re.compile(r"[\W_]+")


def matches(name: str, model: str) -> bool:
    """Whether a name of a pod's gpu-type means this model."""
    if not is_name(name):
        return False
    words = f" {_words(model)} "
    if name.startswith(EXACT):
        return words == f" {_words(name)} "
    # The leftmost place for each piece is the best one, so one pass is enough, with any number of stars.
    position = 0
    for piece in _pieces(name):
        found = words.find(piece, position)
        if found < 0:
            return False
        position = found + len(piece)
    return True


def wanted(model: str, names: Iterable[str], names_not: Iterable[str]) -> bool:
    """Whether a pod with these names in gpu-type and gpu-type-not can use this model. Without names in gpu-type any model is good."""
    chosen = tuple(names)
    return (not chosen or any(matches(name, model) for name in chosen)) and not any(matches(name, model) for name in names_not)


def is_name(text: str) -> bool:
    """Whether a text names any model at all: it has a letter, a digit or a star."""
    return bool(_words(text)) or (ANY in text and not text.startswith(EXACT))


@lru_cache(maxsize=4096)
def _pieces(name: str) -> tuple[str, ...]:
    """Return the texts between the stars. The blanks at both ends keep a word whole where the name has no star."""
    parts = [_BETWEEN_WORDS.sub(" ", part).lower() for part in name.strip().split(ANY)]
    return tuple(filter(None, f" {ANY.join(parts).strip()} ".split(ANY)))


@lru_cache(maxsize=4096)
def _words(text: str) -> str:
    return _BETWEEN_WORDS.sub(" ", text).strip().lower()
