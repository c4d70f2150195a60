# SPDX-License-Identifier: Apache-2.0
"""Evaluates the part of CEL that selectors of GPUs usually have: comparisons of attributes and capacities, joined by &&, || and !. Pure.

Known are ``device.driver``, ``device.attributes['<domain>'].<name>``, ``device.capacity['<domain>'].<name>``, texts, whole numbers, true
and false, ``semver('<version>')`` and ``quantity('<amount>')``; ``==``, ``!=``, ``in [...]``, and ``<``, ``<=``, ``>`` and ``>=`` of
numbers; ``matches('<regular expression>')``, ``lowerAscii``, ``startsWith``, ``endsWith`` and ``contains`` of texts; ``compareTo``,
``isGreaterThan`` and ``isLessThan`` of versions and quantities. Anything else raises ContractError, so a wrong prediction is never made
from it. An attribute that a device lacks raises too: kube-scheduler then fails for the whole node.
tests/property/test_first_fit.py compares it with Kubernetes' own evaluation.
No CEL library for Python has Kubernetes' functions and its limit of costs, and the small ones take 30 MiB and 50 us for each device.
Source: https://kubernetes.io/docs/reference/using-api/cel/ and k8s.io/dynamic-resource-allocation/cel
"""

import ast
import operator
import re
import string
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import re2  # type: ignore[import-untyped]

from aliquot.contract.errors import ContractError, quote
from aliquot.contract.units import parse_quantity
from scheduler_plugin.core.claims.first_fit import Device
from scheduler_plugin.core.claims.versions import parse_version

Operand = tuple[str, Any]
"""A value with its kind: the text "1" is not the number 1."""
Value = Callable[[Device], Operand]

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>-?\d+)|(?P<word>[A-Za-z_]\w*)|(?P<sign>&&|\|\||[=!<>]=|[!<>()\[\].,]))""",
    re.ASCII,
)
_TEXT: Final = re.compile(
    r"""(?:[^\\]|\\(?:[abfnrtv\\'"]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3][0-7]{2}))*""",
)
"""Escapes that mean the same to CEL and Python."""
_MOST_CHARS: Final = 4096
_PATTERN_OPTIONS: Final = re2.Options()
_PATTERN_OPTIONS.log_errors = False
_PATTERN_OPTIONS.max_mem = 1 << 18
"""Bytes for each pattern that is kept. Names of models need a few thousand."""
_EQUALITIES: Final[Mapping[str, Callable[[Any, Any], bool]]] = {"==": operator.eq, "!=": operator.ne}
_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_OBJECTS: Final = frozenset({"version", "quantity"})
"""Kinds that cannot be compared with others, and not be searched in a list."""
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Operand]]] = {
    "compareTo": lambda left, right: ("int", (left > right) - (left < right)),
    "isGreaterThan": lambda left, right: ("bool", left > right),
    "isLessThan": lambda left, right: ("bool", left < right),
}
_OF_TEXT: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "contains": str.__contains__,
    "endsWith": str.endswith,
    "startsWith": str.startswith,
}
_LOWER: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def meets(expression: str, device: Device) -> bool:
    """Whether a device meets an expression. Raises ContractError for an expression, or an attribute, that is not known here."""
    return _truth(_compiled(expression)(device), expression)


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
        return parts[0] if len(parts) == 1 else lambda device: ("bool", any(_truth(part(device), self._text) for part in parts))

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at < len(self._tokens):
            raise self._unknown()

    def _all_of(self) -> Value:
        parts = [self._comparison()]
        while self._takes("&&"):
            parts.append(self._comparison())
        return parts[0] if len(parts) == 1 else lambda device: ("bool", all(_truth(part(device), self._text) for part in parts))

    def _comparison(self) -> Value:
        left = self._term()
        if self._takes("in"):
            choices = self._list()
            return lambda device: self._among(left(device), [choice(device) for choice in choices])
        sign = next((one for one in (*_EQUALITIES, *_ORDERS) if self._takes(one)), None)
        if sign is None:
            return left
        right = self._term()
        if sign in _ORDERS:
            return lambda device: self._ordered(_ORDERS[sign], left(device), right(device))
        return lambda device: self._equal(_EQUALITIES[sign], left(device), right(device))

    def _among(self, value: Operand, choices: Sequence[Operand]) -> Operand:
        if _OBJECTS.intersection([value[0], *(kind for kind, _ in choices)]):
            raise self._unknown()
        return "bool", value in choices

    def _equal(self, holds: Callable[[Any, Any], bool], left: Operand, right: Operand) -> Operand:
        if left[0] != right[0] and not _OBJECTS.isdisjoint((left[0], right[0])):
            raise self._unknown()
        return "bool", holds(left, right)

    def _ordered(self, holds: Callable[[Any, Any], bool], left: Operand, right: Operand) -> Operand:
        if (left[0], right[0]) != ("int", "int"):
            raise self._unknown()
        return "bool", holds(left[1], right[1])

    def _term(self) -> Value:
        """Read a value with the ! before it, which is for the value alone, not for a comparison."""
        negations = 0
        while self._takes("!"):
            negations += 1
        value = self._operand()
        while self._takes("."):
            value = self._call(value)
        return value if not negations else lambda device: ("bool", _truth(value(device), self._text) is (negations % 2 == 0))

    def _list(self) -> list[Value]:
        self._expect("[")
        found: list[Value] = []
        while not self._takes("]"):
            if found:
                self._expect(",")
            found.append(self._term())
        return found

    def _operand(self) -> Value:
        if self._takes("("):
            group = self.any_of()
            self._expect(")")
            return group
        kind, token = self._next()
        if (kind, token) == ("word", "device"):
            return self._of_device()
        constant = self._constant(kind, token)
        return lambda _: constant

    def _constant(self, kind: str, token: str) -> Operand:
        if kind == "text":
            return "string", _literal(token)
        if kind == "number":
            return "int", int(token)
        if token in ("true", "false"):
            return "bool", token == "true"  # noqa: S105 - a word of CEL
        if token == "semver":  # noqa: S105 - a word of CEL
            return "version", parse_version(self._argument())
        if token == "quantity":  # noqa: S105 - a word of CEL
            return "quantity", _quantity(self._argument())
        raise self._unknown()

    def _argument(self) -> str:
        self._expect("(")
        text = _literal(self._next_text())
        self._expect(")")
        return text

    def _of_device(self) -> Value:
        self._expect(".")
        _, part = self._next()
        if part == "driver":
            return lambda device: ("string", device.key[0])
        if part not in ("attributes", "capacity"):
            raise self._unknown()
        self._expect("[")
        domain = _literal(self._next_text())
        self._expect("]")
        self._expect(".")
        _, name = self._next()
        return _attribute(f"{domain}/{name}") if part == "attributes" else _capacity(domain, name)

    def _call(self, receiver: Value) -> Value:
        """Read a function of a value."""
        _, name = self._next()
        if name in _COMPARISONS:
            self._expect("(")
            other = self._term()
            self._expect(")")
            return lambda device: self._compared(_COMPARISONS[name], receiver(device), other(device))
        if name == "lowerAscii":
            self._expect("(")
            self._expect(")")
            return lambda device: ("string", self._string(receiver(device)).translate(_LOWER))
        if name == "matches":
            pattern = self._argument()
            _pattern(pattern)
            return lambda device: ("bool", _pattern(pattern).search(self._string(receiver(device))) is not None)
        if name not in _OF_TEXT:
            raise self._unknown()
        argument, holds = self._argument(), _OF_TEXT[name]
        return lambda device: ("bool", holds(self._string(receiver(device)), argument))

    def _compared(self, function: Callable[[Any, Any], Operand], left: Operand, right: Operand) -> Operand:
        if left[0] != right[0] or left[0] not in _OBJECTS:
            raise self._unknown()
        return function(left[1], right[1])

    def _string(self, value: Operand) -> str:
        if value[0] != "string":
            raise self._unknown()
        return str(value[1])

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
        return ContractError(f"selector {quote(self._text)} is not predicted: it has more than the comparisons that are known here")


def _attribute(whole: str) -> Value:
    def attribute(device: Device) -> Operand:
        value = device.attributes.get(whole)
        if not isinstance(value, tuple):
            raise ContractError(f"device {device.key[2]} of pool {device.key[1]} has no attribute {whole} of a known kind")
        return value if value[0] != "version" else ("version", parse_version(value[1]))

    return attribute


def _capacity(domain: str, name: str) -> Value:
    def capacity(device: Device) -> Operand:
        names = (f"{domain}/{name}", name) if domain == device.key[0] else (f"{domain}/{name}",)
        found = [device.capacity[one].value for one in names if one in device.capacity]
        if len(found) != 1:
            raise ContractError(f"device {device.key[2]} of pool {device.key[1]} has {len(found)} capacities {domain}/{name}, expected one")
        return "quantity", found[0]

    return capacity


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(text.rstrip()):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ContractError(f"selector {quote(text)} is not predicted: it has signs that are not known here")
        found.append((token.lastgroup or "", token[token.lastgroup or 0]))
        at = token.end()
    return found


def _literal(token: str) -> str:
    """Read a text."""
    try:
        if _TEXT.fullmatch(token):
            return str(ast.literal_eval(token))
    except (SyntaxError, ValueError) as exc:
        raise ContractError(f"text {quote(token)} in a selector is not predicted") from exc
    raise ContractError(f"text {quote(token)} in a selector is not predicted: it has an escape that is not known here")


def _quantity(text: str) -> Fraction:
    """Read an amount. Kubernetes rounds what is no multiple of a billionth."""
    found = parse_quantity(text)
    if (found * 10**9).denominator != 1:
        raise ContractError(f"quantity {quote(text)} in a selector is not predicted: Kubernetes rounds it")
    return found


@lru_cache(maxsize=256)
def _pattern(text: str) -> Any:
    """Compile a regular expression."""
    try:
        return re2.compile(text, _PATTERN_OPTIONS)
    except (re2.error, UnicodeError) as exc:
        raise ContractError(f"pattern {quote(text)} in a selector is not predicted") from exc


def _truth(value: Operand, text: str) -> bool:
    """Return a condition's value."""
    kind, found = value
    if kind != "bool":
        raise ContractError(f"selector {quote(text)} is not predicted: it has a value that is no condition")
    return bool(found)
