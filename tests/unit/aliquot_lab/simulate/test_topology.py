# SPDX-License-Identifier: Apache-2.0
from itertools import combinations

import pytest

from aliquot_lab.simulate.topology import GPUS, choosers, machines, measure

BRIDGED = machines()[1]
EVERY = tuple(range(GPUS))


@pytest.mark.parametrize("machine", machines(), ids=lambda machine: machine.name)
@pytest.mark.parametrize("name", ["ours", "nvidia", "hami", "first-fit"])
def test_chooser_gives_as_many_free_gpus_as_requested(machine, name):
    chooser = choosers(machine)[name]
    for free in (EVERY, (1, 2, 5, 6, 7), (0, 7)):
        for count in range(1, len(free) + 1):
            chosen = chooser(free, count)
            assert len(set(chosen)) == count
            assert set(chosen) <= set(free)


@pytest.mark.parametrize("name", ["ours", "nvidia", "hami"])
def test_a_pair_is_a_bridged_one_while_there_is_one(name):
    assert choosers(BRIDGED)[name]((0, 2, 3, 5, 6), 2) == (2, 3)


@pytest.mark.parametrize("name", ["ours", "hami"])
def test_one_gpu_does_not_break_a_pair_when_a_single_is_there(name):
    assert choosers(BRIDGED)[name]((0, 1, 3), 1) == (3,)


@pytest.mark.parametrize("machine", machines(), ids=lambda machine: machine.name)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ours_is_a_best_linked_set_by_nvlinks_and_pcie_paths(machine, count):
    for free in combinations(EVERY, 6):
        best = max(machine.score(gpus) for gpus in combinations(free, count))
        assert machine.score(choosers(machine)["ours"](free, count)) == best


def test_nvidias_pairs_divide_all_free_gpus_at_best():
    def best(free):
        if not free:
            return 0
        return max(BRIDGED.score((free[0], other)) + best(tuple(gpu for gpu in free[1:] if gpu != other)) for other in free[1:])

    for free in combinations(EVERY, 6):
        chosen = choosers(BRIDGED)["nvidia"](free, 2)
        assert BRIDGED.score(chosen) >= best(free) / 3


def test_ours_is_far_above_first_fit():
    ours, first = (measure(BRIDGED, name, choosers(BRIDGED)[name], 2000, 1) for name in ("ours", "first-fit"))
    assert ours.placed_part == first.placed_part
    assert ours.mean_quality > 1.5 * first.mean_quality
