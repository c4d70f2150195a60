# SPDX-License-Identifier: Apache-2.0
"""Workloads that wait, in groups of interchangeable ones: if the first of a group cannot start, the others cannot either."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from aliquot_lab.simulate.timeline.model import Workload

_G = TypeVar("_G", bound=Hashable)


class Waiting(Generic[_G]):
    """The groups, each in the order of arrival."""

    def __init__(self) -> None:
        self._groups: dict[_G, list[int]] = {}
        self._members: dict[int, Workload] = {}
        """By number."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, workload: Workload) -> bool:
        return workload.number in self._members

    def __iter__(self) -> Iterator[Workload]:
        return iter(self._members.values())

    def add(self, group: _G, workload: Workload) -> None:
        """Add a workload."""
        insort(self._groups.setdefault(group, []), workload.number)
        self._members[workload.number] = workload

    def remove(self, group: _G, workload: Workload) -> None:
        """Remove a workload."""
        numbers = self._groups[group]
        numbers.pop(bisect_left(numbers, workload.number))
        del self._members[workload.number]
        if not numbers:
            del self._groups[group]

    def heads(self) -> Iterator[tuple[_G, Workload]]:
        """Return the first workload of each group."""
        return ((group, self._members[numbers[0]]) for group, numbers in self._groups.items())
