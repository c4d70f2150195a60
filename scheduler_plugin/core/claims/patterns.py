# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of users' selectors, in time that grows only with pattern and text. Python's own can take years. Pure.

Known is what is usual for names of models: letters, digits, blank, ``_`` and ``-``, classes of these, ``.``, ``^``, ``$``, groups, ``|``,
``*``, ``+``, and ``(?i)`` in front. A part of a pattern is a function from the places where it may begin to those where it can end.
"""

import re
from collections.abc import Callable, Set
from functools import lru_cache
from typing import Final, TypeAlias

from aliquot.contract.errors import ContractError, quote

Places: TypeAlias = Set[int]
Part: TypeAlias = Callable[[str, Places], Places]

MOST_CHARS: Final = 512
"""Of a pattern."""
MOST_DEPTH: Final = 4
"""Groups in each other: each one can double the time."""
_TOKEN: Final = re.compile(r"(?P<one>\[\^?[A-Za-z0-9 _.-]+\]|[A-Za-z0-9 _.-])|[()|*+^$]", re.ASCII)
_ASCII: Final = [chr(number) for number in range(128)]
_IGNORES_CASE: Final = "(?i)"


@lru_cache(maxsize=4096)
def finds(pattern: str, text: str) -> bool:
    """Whether a pattern matches a part of a text. Raises ContractError for what is not known here."""
    part = compiled(pattern)
    if not text.isascii():
        raise ContractError(f"text {quote(text)} is not predicted: it has more than ASCII")
    return bool(part(text, frozenset(range(len(text) + 1))))


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Part:
    """Return a pattern as a function. Raises ContractError for what is not known here."""
    return _Reader(pattern).whole()


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._flags = re.IGNORECASE if pattern.startswith(_IGNORES_CASE) else re.RegexFlag(0)
        text = pattern.removeprefix(_IGNORES_CASE)
        self._tokens = list(_TOKEN.finditer(text))
        self._at = 0
        if "".join(token[0] for token in self._tokens) != text or len(text) > MOST_CHARS:
            raise self._unknown()

    def whole(self) -> Part:
        """Read all of it."""
        part = self._any_of(0)
        if self._at < len(self._tokens):
            raise self._unknown()
        return part

    def _any_of(self, depth: int) -> Part:
        parts = [self._all_of(depth)]
        while self._takes("|"):
            parts.append(self._all_of(depth))
        return lambda text, places: frozenset[int]().union(*(part(text, places) for part in parts))

    def _all_of(self, depth: int) -> Part:
        parts = []
        while self._at < len(self._tokens) and self._tokens[self._at][0] not in "|)":
            parts.append(self._repeated(self._one(depth)))

        def one_after_the_other(text: str, places: Places) -> Places:
            for part in parts:
                places = part(text, places)
            return places

        return one_after_the_other

    def _one(self, depth: int) -> Part:
        token = self._tokens[self._at]
        self._at += 1
        if token["one"]:
            return self._character(token["one"])
        match token[0]:
            case "^":
                return lambda _, places: places & {0}
            case "$":
                return lambda text, places: places & {len(text)}
            case "(" if depth < MOST_DEPTH:
                part = self._any_of(depth + 1)
                if self._takes(")"):
                    return part
        raise self._unknown()

    def _character(self, token: str) -> Part:
        try:
            one = re.compile(token, self._flags | re.ASCII)
        except re.error as exc:
            raise self._unknown() from exc
        meant = frozenset(filter(one.fullmatch, _ASCII))
        return lambda text, places: {place + 1 for place in places if place < len(text) and text[place] in meant}

    def _repeated(self, part: Part) -> Part:
        if self._takes("*"):
            return lambda text, places: _closure(part, text, places)
        if self._takes("+"):
            return lambda text, places: _closure(part, text, part(text, places))
        return part

    def _takes(self, token: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at][0] == token
        self._at += found
        return found

    def _unknown(self) -> ContractError:
        return ContractError(f"pattern {quote(self._pattern)} in a selector is not predicted")


def _closure(part: Part, text: str, places: Places) -> Places:
    """Return where a part can end that is repeated any number of times."""
    found = new = places
    while new:
        new = part(text, new) - found
        found |= new
    return found
