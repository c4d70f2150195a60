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
_TOKENS: Final = re.compile(r"(?P<words>(?<![^ ])\*(?![^ ]))|(?P<text>\*)|(?P<blank> )")
_PATTERNS: Final = {"words": "[a-z0-9].*", "text": ".*", "blank": "[^a-z0-9]+"}
"""Between two blanks a star stands for one word at least, because blanks that follow each other are one."""


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


def pattern(name: str) -> str:
    """Return a regular expression that finds the models that a name means, for a search without regard to case.

    It has no backslash and uses what Python's ``re`` and RE2 share. Names of GPUs are ASCII; between other words it may differ.
    """
    between = _PATTERNS["blank"]
    if name.startswith(EXACT):
        return "^[^a-z0-9]*" + between.join(_words(name).split(" ")) + "[^a-z0-9]*$"
    parts = [_BETWEEN_WORDS.sub(" ", part).lower() for part in name.strip().split(ANY)]
    inner = re.sub(r"\*+", ANY, ANY.join(parts).strip())
    inner = _TOKENS.sub(lambda token: _PATTERNS[token.lastgroup or ""], inner)
    first = "" if inner.startswith(".*") else "(^|[^a-z0-9])"
    last = "" if inner.endswith(".*") else "([^a-z0-9]|$)"
    return first + inner + last


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
