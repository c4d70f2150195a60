# SPDX-License-Identifier: Apache-2.0
"""Carries out together what waits for the same lock: one expensive step, such as a sync of a disk, then serves many callers.

Invariant: items with the same key are never in one group, and are carried out in the order in which they were added.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Entry(Generic[Item, Result]):
    def __init__(self, key: Hashable, item: Item) -> None:
        self.key = key
        self.item = item
        self.outcome: list[Result | BaseException] = []
        """Empty until the item was carried out."""


class GroupQueue(Generic[Item, Result]):
    """The first caller that gets the lock carries out its item and those that wait behind it."""

    def __init__(
        self, lock: asyncio.Lock, carry_out: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]], most: int
    ) -> None:
        """Args:
        carry_out: called with the lock held; returns a result or an error for each item.
        most: items in one group. Others that wait for the lock wait for a whole group.
        """
        self._lock = lock
        self._carry_out = carry_out
        self._most = most
        self._waiting: list[_Entry[Item, Result]] = []

    async def add(self, key: Hashable, item: Item) -> Result:
        """Carry out an item, alone or with others; return its result, or raise its error."""
        entry = _Entry[Item, Result](key, item)
        self._waiting.append(entry)
        try:
            async with self._lock:
                if not entry.outcome:
                    await self._lead(self._group())
        finally:
            if entry in self._waiting:  # cancelled before its turn
                self._waiting.remove(entry)
        (outcome,) = entry.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _group(self) -> Sequence[_Entry[Item, Result]]:
        """Take the first waiting entries, one of each key. asyncio's lock is fair, so the caller's own is among them."""
        group: dict[Hashable, _Entry[Item, Result]] = {}
        for entry in self._waiting:
            if len(group) < self._most:
                group.setdefault(entry.key, entry)
        taken = list(group.values())
        self._waiting = [entry for entry in self._waiting if entry not in taken]
        return taken

    async def _lead(self, group: Sequence[_Entry[Item, Result]]) -> None:
        outcomes: Sequence[Result | BaseException] = ()
        try:
            outcomes = await self._carry_out([entry.item for entry in group])
        except BaseException as exc:
            outcomes = [exc] * len(group)
            raise
        finally:
            for entry, outcome in zip(group, outcomes, strict=True):
                entry.outcome.append(outcome)
