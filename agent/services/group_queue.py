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
        self.outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()


class GroupQueue(Generic[Item, Result]):
    """Carries out what waits, a group at a time. Others that wait for the lock get it between two groups."""

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
        self._worker: asyncio.Task[None] | None = None

    async def add(self, key: Hashable, item: Item) -> Result:
        """Carry out an item, alone or with others; return its result, or raise its error."""
        entry = _Entry[Item, Result](key, item)
        self._waiting.append(entry)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await entry.outcome

    async def _work(self) -> None:
        # One task for all groups: it starts the next group before the callers of this one go on, so nothing stands idle meanwhile.
        try:
            while self._waiting:
                async with self._lock:
                    if group := self._group():
                        await self._lead(group)
        finally:
            self._worker = None

    def _group(self) -> Sequence[_Entry[Item, Result]]:
        """Take the first waiting entries, at most one per key. Drop those of cancelled callers."""
        group: dict[Hashable, _Entry[Item, Result]] = {}
        left = []
        for entry in self._waiting:
            if entry.outcome.done():
                continue
            if len(group) < self._most and entry.key not in group:
                group[entry.key] = entry
            else:
                left.append(entry)
        self._waiting = left
        return list(group.values())

    async def _lead(self, group: Sequence[_Entry[Item, Result]]) -> None:
        outcomes: Sequence[Result | BaseException]
        try:
            outcomes = await self._carry_out([entry.item for entry in group])
        except Exception as exc:  # noqa: BLE001 - raised where the items are awaited
            outcomes = [exc] * len(group)
        except BaseException as exc:  # the process is ending: let the callers end, too
            _settle(group, [exc] * len(group))
            raise
        _settle(group, outcomes)


def _settle(group: Sequence[_Entry[Item, Result]], outcomes: Sequence[Result | BaseException]) -> None:
    for entry, outcome in zip(group, outcomes, strict=True):
        if entry.outcome.done():  # its caller was cancelled
            continue
        if isinstance(outcome, BaseException):
            entry.outcome.set_exception(outcome)
        else:
            entry.outcome.set_result(outcome)
