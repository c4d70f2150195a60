# SPDX-License-Identifier: Apache-2.0
"""Finds the cheapest victims for a whole gang, on any number of nodes.

A set of victims is judged as a whole: by planning all members of the gang as if the set had ended. The search starts from a set that works,
drops what is not needed, and then looks for a cheaper set, the cheapest first. It is exact up to MAX_CHECKS plans.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from scheduler_plugin.core.cluster.budgets import BudgetKey
from scheduler_plugin.core.gang.plan import Steps
from scheduler_plugin.core.gang.preempt import Band, Cost, Victim, cost_of, moves_of

MAX_CHECKS: Final = 400
"""Plans of one member, 2 ms each: the search plans the whole gang as many times as that allows."""
MAX_MOVES: Final = 64
"""The cheapest moves are tried in the search for a cheaper set."""


@dataclass(frozen=True, slots=True)
class OverNodes:
    """The input of one search: the candidates on all nodes that are looked at, and the test whether the gang fits without some of them."""

    candidates: tuple[Victim, ...]
    bands: tuple[Band, ...]
    allowed: Mapping[BudgetKey, int]
    """How many more pods each budget of a candidate allows to end. No budget is exceeded."""
    fits: Callable[[frozenset[str]], bool]

    def keeps_gangs(self, ended: frozenset[str]) -> bool:
        """Whether each other gang keeps its minimum or ends whole."""
        return all(band.spares(band.members & ended) for band in self.bands)


def cheapest_over_nodes(question: OverNodes, found: frozenset[str] | None, max_checks: int = MAX_CHECKS) -> Steps[frozenset[str] | None]:
    """Return the UIDs of the cheapest victims, with a step after each plan; None if no set was found.

    Args: found: a set that works; None if none is known.
    """
    search = _Search(question, max_checks)
    if found is not None:
        found = yield from search.without_needless(found)
    return (yield from search.cheaper_than(found))


class _Search:
    def __init__(self, question: OverNodes, max_checks: int) -> None:
        self._question = question
        self._checks_left = max_checks
        self._victims = {victim.uid: victim for victim in question.candidates}
        moves = {frozenset(victim.uid for victim in move) for move in moves_of(question.candidates, question.bands)}
        self._moves = sorted(moves, key=lambda move: (self._cost(move), sorted(move)))

    def without_needless(self, ended: frozenset[str]) -> Steps[frozenset[str]]:
        """Drop the moves, the most costly first, that the others make needless."""
        for move in reversed(self._moves):
            rest = ended - move
            if move <= ended and self._question.keeps_gangs(rest) and self._checks_left > 0:
                if self._fits(rest):
                    ended = rest
                yield
        return ended

    def cheaper_than(self, best: frozenset[str] | None) -> Steps[frozenset[str] | None]:
        """Return the cheapest set that works and costs less than the best so far, or else the best so far."""
        moves = self._moves[:MAX_MOVES]
        heap: list[tuple[Cost, tuple[int, ...]]] = [(self._cost(frozenset()), ())]
        while heap and self._checks_left > 0:
            cost, taken = heappop(heap)
            if best is not None and cost >= self._cost(best):
                break
            ended = frozenset[str]().union(*(moves[position] for position in taken))
            if self._question.keeps_gangs(ended):
                if self._fits(ended):
                    return ended
                yield
            for larger in self._larger(moves, taken, ended):
                heappush(heap, larger)
        return best

    def _larger(
        self, moves: Sequence[frozenset[str]], taken: tuple[int, ...], ended: frozenset[str]
    ) -> Iterator[tuple[Cost, tuple[int, ...]]]:
        """Yield the sets with one more move. Moves are added in ascending order, so that each set comes once."""
        for position in range(taken[-1] + 1 if taken else 0, len(moves)):
            cost = self._cost(ended | moves[position])
            if not cost[0] and ended.isdisjoint(moves[position]):
                yield cost, (*taken, position)

    def _fits(self, ended: frozenset[str]) -> bool:
        self._checks_left -= 1
        return self._question.fits(ended)

    def _cost(self, ended: frozenset[str]) -> Cost:
        return cost_of([self._victims[uid] for uid in ended], self._question.allowed)
