# SPDX-License-Identifier: Apache-2.0
"""The benchmark of large clusters says whether our scheduler keeps up with the others."""

import pytest

from aliquot import contract
from tests.bench.bench_scale import show
from tests.e2e.scale import PLAIN_SCHEDULER, STOCK_SCHEDULER, Figures


@pytest.mark.parametrize(
    ("plain", "stock", "missed"),
    [
        pytest.param(100.0, 150.0, [], id="both"),
        pytest.param(101.0, 150.0, [PLAIN_SCHEDULER], id="plain"),
        pytest.param(100.0, 151.0, [STOCK_SCHEDULER], id="stock"),
        pytest.param(None, 151.0, [STOCK_SCHEDULER], id="only those that were measured"),
    ],
)
def test_aims_are_missed_below_their_part_of_each_scheduler(plain, stock, missed, capsys):
    speeds = {PLAIN_SCHEDULER: plain, STOCK_SCHEDULER: stock, contract.SCHEDULER_NAME: 90.0}
    figures = {name: Figures(speed, (0.0, 0.0), {}, {"extender": 1.0}) for name, speed in speeds.items() if speed is not None}
    assert show(1000, 300, figures) == (not missed)
    assert [line.split()[7].rstrip(",") for line in capsys.readouterr().out.splitlines() if line.endswith("MISSED")] == missed
