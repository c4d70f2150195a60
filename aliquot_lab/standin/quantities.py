# SPDX-License-Identifier: Apache-2.0
"""Quantities in the API server's canonical form: ``4000`` becomes ``4k``.

Clients that compare a written quantity with the one they read must expect this.

Source: k8s.io/apimachinery/pkg/api/resource, CanonicalizeBytes.
"""

from fractions import Fraction
from typing import Any

from aliquot.contract.errors import QuantityError
from aliquot.contract.units import parse_quantity
from aliquot_lab.standin.errors import InvalidError

BINARY_SUFFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
DECIMAL_SUFFIXES = {18: "E", 15: "P", 12: "T", 9: "G", 6: "M", 3: "k", 0: "", -3: "m", -6: "u", -9: "n"}


def canonical(value: str | int) -> str:
    """Return a quantity in canonical form. Raises InvalidError for an invalid one."""
    text = str(value)
    try:
        amount = parse_quantity(text)
    except QuantityError as exc:
        raise InvalidError(str(exc)) from exc
    if text.endswith("i") and amount.denominator == 1 and abs(amount) >= 1024:
        return _binary(amount.numerator)
    return _decimal(amount)


def canonical_amounts(amounts: dict[str, Any]) -> None:
    """Change a map of resources to amounts to canonical form, in place."""
    for resource, amount in amounts.items():
        amounts[resource] = canonical(amount)


def _binary(amount: int) -> str:
    exponent = 0
    while amount % 1024 == 0 and exponent < len(BINARY_SUFFIXES) - 1:
        amount //= 1024
        exponent += 1
    return f"{amount}{BINARY_SUFFIXES[exponent]}"


def _decimal(amount: Fraction) -> str:
    if amount == 0:
        return "0"
    for exponent, suffix in DECIMAL_SUFFIXES.items():
        scaled = amount / Fraction(10) ** exponent
        if scaled.denominator == 1:
            return f"{scaled.numerator}{suffix}"
    raise InvalidError(f"quantity {amount}: smaller than one billionth")
