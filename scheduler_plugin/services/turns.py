"""Work in pieces: verbs are answered in the same loop, and whoever looks at thousands of pods must not hold them up."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeVar

_Item = TypeVar("_Item")

MAX_PASSED: Final = 1000
"""Pods that are passed without a pause when something is looked up for each: a millisecond."""


async def in_turns(items: Sequence[_Item], most: int) -> AsyncIterator[_Item]:
    """Go through items, and let others work after so many of them: what was true of the next one may not be any more."""
    for number, item in enumerate(items, 1):
        yield item
        if number % most == 0:
            await asyncio.sleep(0)
