# SPDX-License-Identifier: Apache-2.0
"""What the admission check must do about a workload, from the workload alone.

Kueue writes the conditions and the checks of a workload in several requests, in any order. These rules hold for each order:

- Only a workload with quota that Kueue does not evict gets an answer. While Kueue evicts one, its check may be Pending and its quota
  reserved.
- An answer that is left over from an earlier reservation is set back to Pending. Kueue resets answers only when it evicts, and admits a
  workload whose old answer is Ready without a question.
- This check answers last: it holds GPUs, and another check can take long.
- The answer on an admitted workload is not changed because of room: Retry would end its pods.
"""

from collections.abc import Collection
from enum import Enum, auto

from scheduler_plugin.core.admit.kueue import State, Workload


class Step(Enum):
    """What to do."""

    IGNORE = auto()
    """Nothing: it does not have this check, or needs no answer. It holds no seats."""
    LEAVE = auto()
    """Nothing: Kueue ends its reservation. It holds no seats."""
    RESET = auto()
    """Set the check to Pending: the answer is left over. It holds no seats."""
    WAIT = auto()
    """Answer later: other checks are not Ready. It holds no seats."""
    PLAN = auto()
    """Plan its seats, and answer."""
    HOLD = auto()
    """The answer is Ready and it is not admitted yet: it must hold seats."""
    SERVE = auto()
    """It is admitted: it holds the seats of pods that have not come."""


def state_of(workload: Workload, names: Collection[str]) -> State | None:
    """Return the state of the checks with these names, taken together; None if the workload has none of them."""
    states = {entry.state for name, entry in workload.checks.items() if name in names}
    return next((state for state in (State.REJECTED, State.RETRY, State.PENDING, State.READY) if state in states), None)


def step_for(workload: Workload, names: Collection[str]) -> Step:
    """Decide what to do. Args: names: of the admission checks that this controller answers."""
    state = state_of(workload, names)
    if state is None or workload.is_finished:
        return Step.IGNORE
    if not workload.is_reserved:
        return Step.RESET if state in (State.READY, State.RETRY) else Step.IGNORE
    if workload.is_evicted or not workload.is_active or state in (State.RETRY, State.REJECTED):
        return Step.LEAVE
    if state is State.READY:
        return Step.SERVE if workload.is_admitted else Step.HOLD
    others = (entry.state for name, entry in workload.checks.items() if name not in names)
    return Step.PLAN if all(other is State.READY for other in others) else Step.WAIT
