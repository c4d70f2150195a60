# SPDX-License-Identifier: Apache-2.0
"""Links are worth their cost only where they can decide; what is best among sets is compared with brute force in tests/property."""

import pytest

from aliquot.contract import units
from aliquot.contract.model import Device
from aliquot.placement.device import DeviceState
from aliquot.placement.search import Candidate, Search
from aliquot.placement.topology import LinkTable


def candidate(minor: int, cost: int, *, empty: bool = True) -> Candidate:
    device = Device(f"GPU-{minor}", "NVIDIA A100", minor, "", 80 * units.MIB)
    return Candidate(device.uuid, 0, preferred=False, cost=cost, empty=empty, after=DeviceState(device))


@pytest.mark.parametrize(
    ("candidates", "count", "want"),
    [
        pytest.param([candidate(0, 3), candidate(1, 1), candidate(2, 2)], 2, ["GPU-1", "GPU-2"], id="cost decides"),
        pytest.param([candidate(0, 1), candidate(1, 1)], 2, ["GPU-0", "GPU-1"], id="all are needed"),
        pytest.param([candidate(0, 1, empty=False), candidate(1, 1, empty=False)], 1, ["GPU-0"], id="one that is in use"),
    ],
)
def test_links_are_ignored_where_they_cannot_decide(candidates, count, want):
    chosen = Search(candidates, lambda: pytest.fail("the links were looked at")).best(count, None)
    assert [one.device_uuid for one in chosen] == want


def test_links_decide_between_sets_of_equal_cost():
    table = LinkTable({("GPU-1", "GPU-2"): 100, ("GPU-2", "GPU-1"): 100})
    chosen = Search([candidate(minor, 1) for minor in range(3)], lambda: table).best(2, None)
    assert [one.device_uuid for one in chosen] == ["GPU-1", "GPU-2"]
