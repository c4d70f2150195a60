# SPDX-License-Identifier: Apache-2.0
"""Packages that only the scheduler's code needs. A program that lacks them names the extra to install."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SCHEDULER_PACKAGES: Final = {"aiohttp": "aiohttp", "cryptography": "cryptography", "re2": "google-re2", "numpy": "numpy"}
"""The extra ``scheduler`` of pyproject.toml: its packages by their modules."""


class MissingExtraError(Exception):
    """A package is not installed; the message says what to install."""


@contextmanager
def scheduler_extra(what: str) -> Iterator[None]:
    """Import the scheduler's code inside the block. Raises MissingExtraError; ModuleNotFoundError for any other package.

    Args: what: the program or command, for the message.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        package = SCHEDULER_PACKAGES.get((exc.name or "").partition(".")[0])
        if package is None:
            raise
        raise MissingExtraError(
            f"{what} runs the scheduler's code, which needs {package}, and that is not installed: install aliquot[scheduler]"
        ) from exc
