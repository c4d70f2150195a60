# SPDX-License-Identifier: Apache-2.0
"""Evaluates the part of CEL that selectors of GPUs usually have: comparisons of attributes, joined by &&, || and !. Pure.

Known are ``device.driver``, ``device.attributes['<domain>'].<name>``, texts, whole numbers, true and false, ``==``, ``!=``,
``in [...]`` and ``.matches('<regular expression>')``. Anything else raises ContractError, so a wrong prediction is never made from it. An
attribute that a device lacks raises too: kube-scheduler then fails for the whole node.
No CEL library for Python has Kubernetes' functions and its limit of costs, and the small ones take 30 MiB and 50 us for each device.
Source: https://kubernetes.io/docs/reference/using-api/cel/ and k8s.io/dynamic-resource-allocation/cel
"""

import ast
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import re2  # type: ignore[import-untyped]

from aliquot.contract.errors import ContractError, quote
from scheduler_plugin.core.claims.first_fit import Device

Value = Callable[[Device], object]

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>\d+)|(?P<word>[A-Za-z_]\w*)|(?P<sign>&&|\|\||==|!=|[!()\[\].,]))""",
    re.ASCII,
)
_MOST_CHARS: Final = 4096
_PATTERN_OPTIONS: Final = re2.Options()
_PATTERN_OPTIONS.log_errors = False
_PATTERN_OPTIONS.max_mem = 1 << 18
"""Bytes for each pattern that is kept. Names of models need a few thousand."""


def meets(expression: str, device: Device) -> bool:
    """Whether a device meets an expression. Raises ContractError for an expression, or an attribute, that is not known here."""
    return bool(_compiled(expression)(device))


def check(expression: str) -> None:
    """Raise ContractError for an expression that is not known here."""
    _compiled(expression)


@lru_cache(maxsize=1024)
def _compiled(expression: str) -> Value:
    if len(expression) > _MOST_CHARS:
        raise ContractError(f"expected a selector of at most {_MOST_CHARS} characters, found {len(expression)}")
    parser = _Parser(expression)
    try:
        value = parser.any_of()
    except RecursionError as exc:
        raise ContractError(f"selector {quote(expression)} is not predicted: it has too many parentheses") from exc
    parser.end()
    return value


class _Parser:
    """Reads one expression from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0

    def any_of(self) -> Value:
        """Read terms joined by ||."""
        parts = [self._all_of()]
        while self._takes("||"):
            parts.append(self._all_of())
        return parts[0] if len(parts) == 1 else lambda device: any(part(device) for part in parts)

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at < len(self._tokens):
            raise self._unknown()

    def _all_of(self) -> Value:
        parts = [self._term()]
        while self._takes("&&"):
            parts.append(self._term())
        return parts[0] if len(parts) == 1 else lambda device: all(part(device) for part in parts)

    def _term(self) -> Value:
        if self._takes("!"):
            inner = self._term()
            return lambda device: not inner(device)
        if self._takes("("):
            group = self.any_of()
            self._expect(")")
            return group
        return self._comparison()

    def _comparison(self) -> Value:
        left = self._operand()
        if self._takes("=="):
            right = self._operand()
            return lambda device: left(device) == right(device)
        if self._takes("!="):
            right = self._operand()
            return lambda device: left(device) != right(device)
        if self._takes("in"):
            choices = self._list()
            return lambda device: any(left(device) == choice(device) for choice in choices)
        return lambda device: _truth(left(device), self._text)

    def _list(self) -> list[Value]:
        self._expect("[")
        found: list[Value] = []
        while not self._takes("]"):
            if found:
                self._expect(",")
            found.append(self._operand())
        return found

    def _operand(self) -> Value:
        kind, token = self._next()
        if kind == "text":
            literal = ("string", _literal(token))
            return lambda _: literal
        if kind == "number":
            number = ("int", int(token))
            return lambda _: number
        if token in ("true", "false"):
            flag = ("bool", token == "true")  # noqa: S105 - a word of CEL
            return lambda _: flag
        if token != "device":  # noqa: S105 - a word of CEL
            raise self._unknown()
        return self._of_device()

    def _of_device(self) -> Value:
        self._expect(".")
        _, part = self._next()
        if part == "driver":
            return lambda device: ("string", device.key[0])
        if part != "attributes":
            raise self._unknown()
        self._expect("[")
        domain = _literal(self._next_text())
        self._expect("]")
        self._expect(".")
        _, name = self._next()
        whole = f"{domain}/{name}"

        def attribute(device: Device) -> object:
            value = device.attributes.get(whole)
            if value is None:
                raise ContractError(f"device {device.key[2]} of pool {device.key[1]} has no attribute {whole} of a known kind")
            return value

        return self._matching(attribute) if self._takes(".") else attribute

    def _matching(self, attribute: Value) -> Value:
        self._expect("matches")
        self._expect("(")
        text = _literal(self._next_text())
        self._expect(")")
        _pattern(text)

        def matches(device: Device) -> object:
            value = attribute(device)
            if not isinstance(value, tuple) or value[0] != "string":
                raise self._unknown()
            return ("bool", _pattern(text).search(str(value[1])) is not None)

        return matches

    def _next(self) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise self._unknown()
        self._at += 1
        return self._tokens[self._at - 1]

    def _next_text(self) -> str:
        kind, token = self._next()
        if kind != "text":
            raise self._unknown()
        return token

    def _takes(self, token: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at] in (("sign", token), ("word", token))
        self._at += found
        return found

    def _expect(self, token: str) -> None:
        if not self._takes(token):
            raise self._unknown()

    def _unknown(self) -> ContractError:
        return ContractError(f"selector {quote(self._text)} is not predicted: it has more than comparisons of attributes")


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(text.rstrip()):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ContractError(f"selector {quote(text)} is not predicted: it has more than comparisons of attributes")
        found.append((token.lastgroup or "", token[token.lastgroup or 0]))
        at = token.end()
    return found


def _literal(token: str) -> str:
    """Read a text. Its escapes are JSON's, which CEL and Python share."""
    try:
        return str(ast.literal_eval(token))
    except (SyntaxError, ValueError) as exc:
        raise ContractError(f"text {quote(token)} in a selector is not predicted") from exc


@lru_cache(maxsize=256)
def _pattern(text: str) -> Any:
    """Compile a regular expression."""
    try:
        return re2.compile(text, _PATTERN_OPTIONS)
    except (re2.error, UnicodeError) as exc:
        raise ContractError(f"pattern {quote(text)} in a selector is not predicted") from exc


def _truth(value: object, text: str) -> bool:
    """Return a condition's value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple) and value[0] == "bool":
        return bool(value[1])
    raise ContractError(f"selector {quote(text)} is not predicted: it has a value that is no condition")
