# SPDX-License-Identifier: Apache-2.0
"""Semantic versions, ordered as Kubernetes orders them. Pure.

Source: https://semver.org/spec/v2.0.0.html, and github.com/blang/semver, which Kubernetes uses
"""

import re
from functools import lru_cache
from typing import Final

from aliquot.contract.errors import ContractError, quote

Version = tuple[int, int, int, bool, tuple[tuple[bool, int, str], ...]]
"""Major, minor and patch number, whether it is a release, and the identifiers of a pre-release: numbers are before words. A build is left
out, because the order ignores it.
"""

_NUMBER: Final = "(0|[1-9][0-9]*)"
_BEFORE: Final = "(?:0|[1-9][0-9]*|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_BUILD: Final = "[0-9A-Za-z-]+"
_VERSION: Final = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-({_BEFORE}(?:\.{_BEFORE})*))?(?:\+{_BUILD}(?:\.{_BUILD})*)?")
_MOST: Final = (1 << 64) - 1


@lru_cache(maxsize=1024)
def parse_version(text: str) -> Version:
    """Read a version such as ``9.0.0`` or ``1.2.3-rc.1``. Raises ContractError for what Kubernetes cannot read."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise ContractError(f"{quote(text)} is not a semantic version such as 9.0.0")
    *numbers, before = match.groups()
    identifiers = before.split(".") if before else []
    if any(int(number) > _MOST for number in (*numbers, *filter(str.isdigit, identifiers))):
        raise ContractError(f"version {quote(text)} has a number of more than 64 bits")
    major, minor, patch = map(int, numbers)
    words = tuple((False, int(one), "") if one.isdigit() else (True, 0, one) for one in identifiers)
    return major, minor, patch, not words, words
