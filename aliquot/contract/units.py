# SPDX-License-Identifier: Apache-2.0
"""Amounts: memory in bytes and MiB, cores in percent of one GPU, and the Kubernetes quantities in which users write them.

Invariant: all arithmetic is exact. An amount that is not whole in its unit is refused, never rounded. Inside the programs memory is in
bytes; MiB are used in resources, annotations and text only.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Final

from aliquot.contract.errors import QuantityError, quote

MIB: Final = 1 << 20
GIB: Final = 1 << 30
WHOLE_GPU_PERCENT: Final = 100

MAX_QUANTITY_CHARS: Final = 64
MAX_QUANTITY: Final = (1 << 63) - 1
"""Kubernetes stores quantities in 64 bits; a larger one is a mistake."""
MAX_MEMORY_BYTES: Final = 1 << 50
"""1 PiB: far above any container's device memory, far below a decimal suffix on MiB (``16G`` MiB is 15 PiB)."""

_QUANTITIES_KEPT: Final = 4096
_BINARY: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_DECIMAL_EXPONENT: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_QUANTITY: Final = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)(?:([KMGTPE]i)|([numkMGTPE]?)|[eE]([+-]?[0-9]{1,2}))", re.ASCII)


@lru_cache(maxsize=_QUANTITIES_KEPT)
def parse_quantity(text: str) -> Fraction:
    """Parse a Kubernetes quantity such as ``4``, ``1.5Gi``, ``2k``, ``500m`` or ``1e3``. Results are cached.

    Raises: QuantityError: not a quantity, or beyond 64 bits.
    Source: k8s.io/apimachinery/pkg/api/resource.Quantity (its serialised forms).
    """
    match = _QUANTITY.fullmatch(text) if len(text) <= MAX_QUANTITY_CHARS else None
    if match is None:
        raise QuantityError(f"{quote(text)} is not a Kubernetes quantity: write a number such as 4 or 4Gi")
    sign, number, binary, decimal, exponent = match.groups()
    if binary is not None:
        scale = Fraction(_BINARY[binary])
    else:
        scale = Fraction(10) ** (int(exponent) if exponent is not None else _DECIMAL_EXPONENT[decimal])
    value = Fraction(number) * scale
    if value > MAX_QUANTITY:
        raise QuantityError(f"{quote(text)} is larger than any Kubernetes quantity (at most {MAX_QUANTITY})")
    return -value if sign == "-" else value


def parse_count(text: str) -> int:
    """Parse a quantity that counts things. Raises QuantityError unless it is a whole number of at least 1."""
    value = parse_quantity(text)
    if value.denominator != 1 or value < 1:
        raise QuantityError(f"expected a whole number of at least 1, found {quote(text)}")
    return value.numerator


def parse_memory_bytes(text: str) -> int:
    """Parse an amount of device memory as pods write it; return bytes.

    A binary suffix means bytes (``4Gi`` is 4 GiB). Every other form counts MiB, including decimal suffixes, because the API server rewrites
    ``4000`` as ``4k``.

    Raises: QuantityError: not a quantity, not a whole number of MiB, less than 1 MiB or more than 1 PiB.
    """
    value = parse_quantity(text)
    memory_bytes = value if text.endswith("i") else value * MIB
    if memory_bytes > MAX_MEMORY_BYTES:
        raise QuantityError(
            f"{quote(text)} is more than 1 PiB of device memory: without a binary suffix it counts MiB; write 16384 or 16Gi for 16 GiB"
        )
    if memory_bytes < MIB or (memory_bytes % MIB) != 0:
        raise QuantityError(f"expected device memory in whole MiB, at least 1, found {quote(text)}: write 4096 or 4Gi for 4 GiB")
    return int(memory_bytes)


def parse_percent(text: str) -> int:
    """Parse an amount of cores, 100 = one whole GPU. Raises QuantityError unless it is a whole percentage of at least 1."""
    try:
        return parse_count(text)
    except QuantityError as exc:
        raise QuantityError(
            f"expected compute in whole percent of one GPU, at least 1, found {quote(text)}: write 50 for half of the SM time of one GPU"
        ) from exc


def mib_to_bytes(mib: int) -> int:
    """Convert MiB to bytes."""
    return mib * MIB


def bytes_to_mib(memory_bytes: int) -> int:
    """Convert bytes to MiB. Raises QuantityError if they are not whole MiB."""
    mib, rest = divmod(memory_bytes, MIB)
    if rest != 0:
        raise QuantityError(f"expected a whole number of MiB, found {memory_bytes} bytes, {rest} more than {mib} MiB")
    return mib


def floor_to_mib(memory_bytes: int) -> int:
    """Round bytes down to whole MiB; the result is in bytes. Only this part of a device's memory can be promised."""
    return memory_bytes - memory_bytes % MIB


def format_mib(memory_bytes: int) -> str:
    """Write bytes as a plain number of MiB, as resources do. Raises QuantityError if they are not whole MiB."""
    return str(bytes_to_mib(memory_bytes))


def format_memory(memory_bytes: int) -> str:
    """Write bytes for people, ``4 GiB`` or ``1536 MiB``, rounded down to MiB."""
    mib = memory_bytes // MIB
    return f"{mib // 1024} GiB" if mib and mib % 1024 == 0 else f"{mib} MiB"
