# SPDX-License-Identifier: Apache-2.0
"""Decides how long the agent does not read a usage region after its locks made a reading slow.

A container may put any number of locks on its region. The kernel walks through all of them for each probed slot, and again when the file is
closed. So a reading stops when it has used up its budget, and the next one comes after a hundred times the cost, later after each slow
reading in a row. The cost is CPU time, so a busy node makes no container look slow.
"""

from dataclasses import dataclass

LOCK_BUDGET_SECONDS = 0.01
"""CPU time that the locks of a region may cost in one reading: ten times the cost of 256 processes, which is the most that fit."""
REST_RATIO = 100
REST_MOST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Rest:
    """A period in which the agent does not open a region."""

    seconds: float
    until: float
    """Monotonic."""


def rest_after(cost_seconds: float, before: Rest | None, now: float) -> Rest | None:
    """Return how long not to open a region after a reading; None if its locks stayed within the budget.

    Args: cost_seconds: CPU time of the locks. before: the rest before this reading, if the previous reading was slow as well.
    """
    if cost_seconds <= LOCK_BUDGET_SECONDS:
        return None
    longer = 2 * before.seconds if before is not None else 0.0
    seconds = min(max(REST_RATIO * cost_seconds, longer), REST_MOST_SECONDS)
    return Rest(seconds, now + seconds)
