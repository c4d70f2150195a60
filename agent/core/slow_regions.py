"""How long a usage region is left alone after its locks made a look at it slow.

A container may put any number of locks on its region, and the kernel goes through all of them for each slot that is probed, and once more
when the file is closed. So one look ends when it has cost its budget, and the next comes after a hundred times what it cost, later each
time in a row. It is the CPU time that counts: a node that is busy makes no container look slow.
"""

from dataclasses import dataclass

LOCK_BUDGET_SECONDS = 0.01
"""CPU time that the locks of one region may cost in one look; ten times what those of 256 processes cost, which are as many as fit."""
REST_RATIO = 100
REST_MOST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Rest:
    """A while in which a region is not opened."""

    seconds: float
    until: float
    """Monotonic."""


def rest_after(cost_seconds: float, before: Rest | None, now: float) -> Rest | None:
    """Return how long to leave a region alone after a look; None when its locks kept to the budget.

    Args: cost_seconds: CPU time that the locks took. before: the rest before this look, when the look before was slow as well.
    """
    if cost_seconds <= LOCK_BUDGET_SECONDS:
        return None
    longer = 2 * before.seconds if before is not None else 0.0
    seconds = min(max(REST_RATIO * cost_seconds, longer), REST_MOST_SECONDS)
    return Rest(seconds, now + seconds)
