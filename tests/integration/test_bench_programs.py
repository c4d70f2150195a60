# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks measure runs on a driver that does nothing too. That driver has only what the shim asks for, so a new question of the
shim fails here first.
"""

import pytest

from tests.bench.contenders import OnBareDriver

CALLS = (("launch",), ("alloc", "--mib", "40"))


@pytest.mark.parametrize("sm_percent", [0, 99])
def test_measured_calls_run_on_a_driver_that_does_nothing(build_dir, tmp_path, sm_percent):
    for contender in OnBareDriver.both(tmp_path, build_dir):
        container = contender.container(8192, sm_percent)
        for call in CALLS:
            answer = container.client("bench", *call)
            assert answer.status == 0, (contender.interposition, call, answer)
            assert answer.last["best_ns"] > 0
