# SPDX-License-Identifier: Apache-2.0
"""Honest behaviours never exceed their cores, dishonest ones do: both are generated, and sampled as the driver samples."""

import random
from collections.abc import Callable, Iterator
from itertools import count, islice, repeat

import pytest

from agent.core.cgroups import ContainerRef
from agent.core.over_cores import LEAST_SAMPLES, WINDOW_SAMPLES, BusyHistory

KEY = (ContainerRef("uid-a", "ab" * 32), "GPU-0")
STEPS = 100
"""Parts of a second: a behaviour yields whether a kernel runs in each."""
Behaviour = Iterator[bool]


def steady(percent: float, rng: random.Random) -> Behaviour:
    """Launches small kernels all the time, as the shim lets them through."""
    while True:
        yield rng.random() * 100 < percent


def bursts(percent: float, rng: random.Random, *, seconds: float) -> Behaviour:
    """Runs alone for some seconds, and rests for as long as its cores require."""
    while True:
        length = seconds * rng.uniform(0.5, 1.5)
        yield from repeat(True, int(length * STEPS))
        yield from repeat(False, int(length * STEPS * (100 / percent - 1)))


def long_kernels(percent: float, rng: random.Random) -> Behaviour:
    """Kernels of half a second, which are paid for afterwards."""
    return bursts(percent, rng, seconds=0.5)


def starts_fast(percent: float, rng: random.Random) -> Behaviour:
    """Its first second has no limit yet."""
    yield from repeat(True, STEPS)
    yield from steady(percent, rng)


def then_idle(percent: float, rng: random.Random) -> Behaviour:
    """Works for a while, waits for data, and works again."""
    while True:
        yield from islice(steady(percent, rng), int(rng.uniform(5, 20) * STEPS))
        yield from repeat(False, int(rng.uniform(1, 40) * STEPS))


HONEST: dict[str, Callable[[float, random.Random], Behaviour]] = {
    "steady": steady,
    "bursts of a tenth of a second": lambda percent, rng: bursts(percent, rng, seconds=0.1),
    "bursts of a second": lambda percent, rng: bursts(percent, rng, seconds=1.0),
    "bursts of four seconds": lambda percent, rng: bursts(percent, rng, seconds=4.0),
    "long kernels": long_kernels,
    "starts fast": starts_fast,
    "works and waits": then_idle,
    "three points above, as the shim allows": lambda percent, rng: steady(percent + 3, rng),
}


def sampled(behaviour: Behaviour, covered: float) -> Iterator[float]:
    """One sample each second, which covers this much of it: the period over which a driver measures is a second or less."""
    while True:
        second = list(islice(behaviour, STEPS))
        seen = second[-max(1, int(covered * STEPS)) :]
        yield sum(seen) / len(seen)


def exceeded(behaviour: Behaviour, cores: int, covered: float, *, samples: int = 600) -> list[int]:
    """The samples after which the container counted as above its cores."""
    history, found = BusyHistory(), []
    for index, ratio in zip(count(), islice(sampled(behaviour, covered), samples), strict=False):
        history = history.after({KEY: ratio} if ratio else {})
        busy = history.busy().get(KEY)
        if busy is not None and busy.exceeds(cores):
            found.append(index)
    return found


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 20), marks=pytest.mark.soak)], ids=["first seed", "more seeds"])
@pytest.mark.parametrize("covered", [1.0, 0.17], ids=["sampled whole", "sampled a sixth"])
@pytest.mark.parametrize("cores", [5, 10, 30, 50, 90])
@pytest.mark.parametrize("name", HONEST)
def test_honest_container_never_exceeds_its_cores(name, cores, covered, seeds):
    for seed in seeds:
        rng = random.Random(f"{name} {cores} {covered} {seed}")
        assert exceeded(HONEST[name](cores, rng), cores, covered) == [], f"seed {seed}"


@pytest.mark.parametrize("covered", [1.0, 0.17], ids=["sampled whole", "sampled a sixth"])
@pytest.mark.parametrize(
    ("cores", "really"),
    [
        pytest.param(cores, really, id=f"{really} of {cores}")
        for cores in (1, 5, 10, 30, 50)
        for really in (99, 60, 30)
        if really > cores + 20
    ],
)
def test_container_without_limit_is_found_within_two_windows(cores, really, covered):
    rng = random.Random(f"{cores} {really} {covered}")
    for behaviour in (steady(really, rng), bursts(really, rng, seconds=0.1), starts_fast(really, rng)):
        found = exceeded(behaviour, cores, covered, samples=2 * WINDOW_SAMPLES)
        assert found
        assert found[-1] == 2 * WINDOW_SAMPLES - 1


def test_half_a_minute_at_full_speed_exceeds_a_tenth():
    assert exceeded(bursts(50, random.Random(1), seconds=15), 10, 1.0, samples=300)


def test_few_samples_prove_nothing():
    history = BusyHistory()
    for _ in range(LEAST_SAMPLES - 1):
        history = history.after({KEY: 1.0})
        assert history.busy() == {}
    assert history.after({KEY: 1.0}).busy()[KEY].exceeds(10)


def test_container_that_came_later_is_judged_from_its_own_start():
    history = BusyHistory()
    for _ in range(WINDOW_SAMPLES):
        history = history.after({})
    for _ in range(WINDOW_SAMPLES // 4):
        history = history.after({KEY: 1.0})
    assert history.busy() == {}


def test_memory_of_the_window_is_bounded():
    history = BusyHistory()
    for index in range(10 * WINDOW_SAMPLES):
        history = history.after({(ContainerRef("uid", f"{index:064x}"), "GPU-0"): 1.0})
    assert len(history.samples) == WINDOW_SAMPLES
