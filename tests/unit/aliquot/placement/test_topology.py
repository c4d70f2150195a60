# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from aliquot.contract.model import Link, LinkKind
from aliquot.placement.topology import LinkTable, pair_quality
from tests.unit.aliquot.placement.builders import all_to_all, nvlinks


def test_better_paths_have_more_quality():
    qualities = [pair_quality(Link("a", "b", kind)) for kind in LinkKind]
    assert qualities == sorted(set(qualities), reverse=True)


def test_every_nvlink_adds_the_same():
    one, two = (pair_quality(Link("a", "b", LinkKind.NVLINK, lanes)) for lanes in (1, 2))
    assert two - one == 100


@pytest.mark.parametrize("pcie", [kind for kind in LinkKind if kind is not LinkKind.NVLINK])
def test_nvlink_counts_in_addition_to_pcie_path(pcie):
    assert pair_quality(Link("a", "b", LinkKind.NVLINK, 2, pcie)) == 200 + pair_quality(Link("a", "b", pcie))


def test_unknown_pcie_path_counts_as_switch_unless_ends_differ_in_numa():
    link = Link("a", "b", LinkKind.NVLINK, 1)
    assert pair_quality(link) == pair_quality(replace(link, pcie=LinkKind.PCIE_SWITCH))
    assert pair_quality(link, across_numa=True) == pair_quality(replace(link, pcie=LinkKind.SYSTEM))


def test_lanes_of_a_pcie_path_are_not_counted():
    assert pair_quality(Link("a", "b", LinkKind.SYSTEM, 4)) == pair_quality(Link("a", "b", LinkKind.SYSTEM))


def test_a_pair_is_unordered_and_its_best_link_counts():
    table = LinkTable.of([Link("a", "b", LinkKind.SYSTEM), Link("b", "a", LinkKind.NVLINK, 4), Link("a", "b", LinkKind.HOST_BRIDGE)])
    assert table.between("a", "b") == table.between("b", "a") == 450


def test_devices_without_a_known_link_have_no_quality():
    assert LinkTable.of([]).between("a", "b") == 0


@pytest.mark.parametrize(("devices", "pairs"), [(["GPU-0"], 0), (["GPU-0", "GPU-1"], 1), (["GPU-0", "GPU-1", "GPU-2", "GPU-3"], 6)])
def test_the_quality_of_a_set_is_the_sum_over_its_pairs(devices, pairs):
    assert LinkTable.of(all_to_all(4, lanes=1)).within(devices) == pairs * 150


def test_pairs_outside_the_set_do_not_count():
    assert LinkTable.of(nvlinks([(0, 1), (2, 3)])).within(["GPU-0", "GPU-2"]) == 0
