# SPDX-License-Identifier: Apache-2.0
"""Model checking of the memory ledger's protocol: every interleaving of a bounded model, with a kill at every step.

The model has the atomic operations of cuda_shim/account/ledger.h (charge, uncharge) and cuda_shim/region/region.c (reap, repair), one
model step per atomic operation. Two processes share one device line; each may be killed before any step; the slot of a dead one is reaped
and taken over by a newcomer; reaper and repairer may be killed too. Checked in every reachable state:

* what living processes were granted never exceeds the line, and the line never exceeds the limit (no over-grant);

and in every state where no process is in the middle of something: one repair makes the line equal to what is held (no lasting leak).
Excluded here: the real code, step by step (cuda_shim/tests/test_ledger_steps.c) and under kills (tests/integration/test_shim_chaos.py);
limits that change meanwhile.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

LIMIT = 3

INTENDED, CHARGED, UNCHARGED, SETTLED = range(4)

NOTHING_READ: tuple[int, ...] = (0, 0, 0, 0, 0)
"""Before the first reading: a sum for each counter, and the line."""

Operation = tuple[str, int]
Program = tuple[Operation, ...]


class Process(NamedTuple):
    """One process in one slot: its program, where it stands in it, and what it was granted and still holds."""

    program: Program
    operation: int = 0
    step: int = 0
    seen: int = 0
    held: int = 0
    alive: bool = True

    @property
    def finished(self) -> bool:
        return self.operation >= len(self.program)


DEAD = Process((), alive=False)
"""Where it stood does not matter any more: all that others see of it is in its slot."""


class Walker(NamedTuple):
    """A reaper or repairer: where it stands (-1: not started) and what it has read."""

    step: int = -1
    slot: int = 0
    read: tuple[int, ...] = ()


class State(NamedTuple):
    """The shared words and everybody's private ones."""

    line: int
    slots: tuple[tuple[int, int, int, int], ...]
    processes: tuple[Process, ...]
    newcomers: tuple[Program, ...]
    reaper: Walker = Walker()
    repairer: Walker = Walker()


def added(state: State, slot: int, counter: int, amount: int) -> State:
    """Return the state after an atomic add to one counter of a slot."""
    return stored(state, slot, counter, state.slots[slot][counter] + amount)


def stored(state: State, slot: int, counter: int, value: int) -> State:
    """Return the state after an atomic store to one counter of a slot."""
    counters = list(state.slots[slot])
    counters[counter] = value
    slots = list(state.slots)
    first, second, third, fourth = counters
    slots[slot] = (first, second, third, fourth)
    return state._replace(slots=tuple(slots))


def with_process(state: State, index: int, process: Process) -> State:
    """Return the state with one process replaced."""
    processes = list(state.processes)
    processes[index] = process
    return state._replace(processes=tuple(processes))


def next_operation(process: Process, **changes: Any) -> Process:
    """Return the process at the start of its next operation."""
    return process._replace(operation=process.operation + 1, step=0, seen=0, **changes)


def charge_step(state: State, index: int, amount: int) -> State:
    """One atomic operation of aq_ledger_charge."""
    process = state.processes[index]
    match process.step:
        case 0:  # look at the line
            fits = state.line + amount <= LIMIT
            return with_process(state, index, process._replace(step=1, seen=state.line) if fits else next_operation(process))
        case 1:
            return with_process(added(state, index, INTENDED, amount), index, process._replace(step=2))
        case 2:  # compare and exchange
            if state.line == process.seen:
                return with_process(state._replace(line=state.line + amount), index, process._replace(step=3))
            fits = state.line + amount <= LIMIT
            return with_process(state, index, process._replace(step=2 if fits else 4, seen=state.line))
        case 3:
            return with_process(added(state, index, CHARGED, amount), index, next_operation(process, held=process.held + amount))
        case 4:  # refused after the intent was announced: take it back
            return with_process(added(state, index, UNCHARGED, amount), index, process._replace(step=5))
        case 5:
            return with_process(added(state, index, CHARGED, amount), index, process._replace(step=6))
        case _:
            return with_process(added(state, index, SETTLED, amount), index, next_operation(process))


def uncharge_step(state: State, index: int, amount: int) -> State:
    """One atomic operation of aq_ledger_uncharge; the memory itself is gone before its first."""
    process = state.processes[index]
    match process.step:
        case 0:
            if process.held < amount:  # the charge before was refused: nothing to free
                return with_process(state, index, next_operation(process))
            return with_process(state, index, process._replace(step=1, held=process.held - amount))
        case 1:
            return with_process(added(state, index, UNCHARGED, amount), index, process._replace(step=2))
        case 2:
            return with_process(state._replace(line=state.line - amount), index, process._replace(step=3))
        case _:
            return with_process(added(state, index, SETTLED, amount), index, next_operation(process))


def process_steps(state: State, index: int) -> Iterator[State]:
    """What one process may do next: go on, or be killed."""
    process = state.processes[index]
    if not process.alive:
        return
    yield with_process(state, index, DEAD)
    if not process.finished:
        verb, amount = process.program[process.operation]
        yield (charge_step if verb == "charge" else uncharge_step)(state, index, amount)


def reaper_steps(state: State) -> Iterator[State]:
    """One atomic operation of credit() on a dead slot while the reaper holds its lock; or the reaper's death."""
    walker = state.reaper
    if walker.step < 0:
        for slot, process in enumerate(state.processes):
            if not process.alive:
                yield state._replace(reaper=Walker(0, slot))
        return
    yield state._replace(reaper=Walker())
    slot = walker.slot
    used = state.slots[slot][CHARGED] - state.slots[slot][UNCHARGED]
    step = walker._replace(step=walker.step + 1)
    match walker.step:
        case 0:  # what the slot used is read once
            yield state._replace(reaper=step._replace(read=(used,)))
        case 1:
            source = CHARGED if walker.read[0] >= 0 else UNCHARGED
            yield stored(state, slot, INTENDED, state.slots[slot][source])._replace(reaper=step)
        case 2:
            if walker.read[0] < 0:
                yield stored(state, slot, CHARGED, state.slots[slot][UNCHARGED])._replace(reaper=step._replace(step=4))
            else:
                yield added(state, slot, UNCHARGED, walker.read[0])._replace(reaper=step)
        case 3:
            yield state._replace(line=state.line - walker.read[0], reaper=step)
        case 4:
            yield stored(state, slot, SETTLED, state.slots[slot][UNCHARGED])._replace(reaper=step)
        case _:  # the slot is free: a newcomer takes it, if one is left
            program = state.newcomers[0] if state.newcomers else ()
            freed = with_process(state, slot, Process(program))
            yield freed._replace(newcomers=state.newcomers[1:], reaper=Walker())


def repair_reads(state: State) -> tuple[tuple[int, int] | None, ...]:
    """The order in which measure_leak reads: early counters, the line (None), late counters."""
    slots = range(len(state.slots))
    early = [(slot, counter) for slot in slots for counter in (CHARGED, SETTLED)]
    late = [(slot, counter) for slot in slots for counter in (INTENDED, UNCHARGED)]
    return (*early, None, *late)


def with_reading(state: State, sums: tuple[int, ...], target: tuple[int, int] | None) -> tuple[int, ...]:
    """Return the sums that measure_leak keeps, after one more reading: of each counter over the slots, and the line."""
    at, value = (len(sums) - 1, state.line) if target is None else (target[1], state.slots[target[0]][target[1]])
    return (*sums[:at], sums[at] + value, *sums[at + 1 :])


def leak_found(sums: tuple[int, ...]) -> int | None:
    """What measure_leak concludes from its readings: the leak, or None when the counters were not at rest."""
    intended, charged, uncharged, settled, line = sums
    return line - (charged - uncharged) if (intended, uncharged) == (charged, settled) else None


def repairer_steps(state: State) -> Iterator[State]:
    """One atomic operation of repair_device; or the repairer's death."""
    walker, order = state.repairer, repair_reads(state)
    if walker.step < 0:
        yield state._replace(repairer=Walker(0, read=NOTHING_READ))
        return
    yield state._replace(repairer=Walker())
    if walker.step < len(order):
        yield state._replace(repairer=Walker(walker.step + 1, read=with_reading(state, walker.read, order[walker.step])))
        return
    yield state._replace(line=state.line - (leak_found(walker.read) or 0), repairer=Walker())


def successors(state: State) -> Iterator[State]:
    """Every state one atomic operation or one kill away."""
    for index in range(len(state.processes)):
        yield from process_steps(state, index)
    yield from reaper_steps(state)
    yield from repairer_steps(state)


def repaired_line(state: State) -> int:
    """Return the line after one undisturbed repair."""
    sums = NOTHING_READ
    for target in repair_reads(state):
        sums = with_reading(state, sums, target)
    return state.line - (leak_found(sums) or 0)


def at_rest(state: State) -> bool:
    """True when no process is in the middle of anything and no dead slot waits."""
    return state.reaper.step < 0 and all(process.alive and process.step == 0 for process in state.processes)


def explore(start: State) -> Iterator[State]:
    """Yield every reachable state once."""
    seen, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        yield state
        for following in successors(state):
            if following not in seen:
                seen.add(following)
                frontier.append(following)


def start_with(*programs: Program, newcomers: tuple[Program, ...] = ()) -> State:
    """Return the first state of a model: all counters zero."""
    return State(line=0, slots=tuple((0, 0, 0, 0) for _ in programs), processes=tuple(Process(p) for p in programs), newcomers=newcomers)


CHARGE_TWO = (("charge", 2),)
CHARGE_AND_FREE = (("charge", 2), ("uncharge", 2))


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start_with(CHARGE_AND_FREE, ()), id="one charges and frees"),
        pytest.param(start_with(CHARGE_TWO, CHARGE_TWO), id="two race for more than there is"),
        pytest.param(start_with((("charge", 1),), (), newcomers=((("charge", 3),),)), id="a newcomer takes a dead slot"),
        pytest.param(start_with(CHARGE_AND_FREE, CHARGE_AND_FREE), marks=pytest.mark.soak, id="two charge and free"),
        pytest.param(
            start_with((("charge", 1),), (("charge", 3),), newcomers=((("charge", 1),),)), marks=pytest.mark.soak, id="two and a newcomer"
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_no_interleaving_of_charge_kill_reap_and_repair_leaks_or_overgrants(start: State) -> None:
    states = rests = 0
    for state in explore(start):
        states += 1
        held = sum(process.held for process in state.processes)
        assert held <= state.line <= LIMIT, state
        if at_rest(state):
            rests += 1
            assert repaired_line(state) == held, state
    assert states > 1000
    assert rests > 10


def test_the_model_finds_a_protocol_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that credits the line before the memory is gone must be caught, or the check checks nothing."""

    def hasty_uncharge(state: State, index: int, amount: int) -> State:
        process = state.processes[index]
        if process.step == 0 and process.held >= amount:
            return with_process(state._replace(line=state.line - amount), index, process._replace(step=1))
        if process.step == 1:
            return with_process(state, index, next_operation(process, held=process.held - amount))
        return with_process(state, index, next_operation(process))

    monkeypatch.setitem(globals(), "uncharge_step", hasty_uncharge)
    start = start_with(CHARGE_AND_FREE, CHARGE_TWO)
    assert any(sum(process.held for process in state.processes) > state.line for state in explore(start))
