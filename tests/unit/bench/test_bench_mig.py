# SPDX-License-Identifier: Apache-2.0
"""The benchmark of MIG placement simulates the pods that it announces, and judges by their mean."""

import pytest

from tests.bench import bench_mig
from tests.bench.bench_mig import Accepted, Run


@pytest.mark.parametrize("policy", bench_mig.POLICIES)
def test_simulation_is_repeatable_and_accepts_all_pods_while_gpus_are_free(policy, monkeypatch):
    monkeypatch.setattr(bench_mig, "WARM_PODS", 0)
    run = Run("small", "ample", policy, 1, 20)
    assert bench_mig.simulate(run) == bench_mig.simulate(run) == Accepted(100, 100)


def test_tight_hosts_refuse_pods_that_ample_hosts_accept():
    ample, tight = (bench_mig.simulate(Run("large", host, bench_mig.OURS, 1, 60)) for host in ("ample", "tight"))
    assert tight.pods <= ample.pods < 100


@pytest.mark.parametrize(("lead", "status"), [(0.9, 1), (1.1, 0)])
def test_exit_status_says_whether_lead_in_pods_is_large_enough(lead, status, monkeypatch, capsys):
    found = {Run("small", "ample", policy, 42, 1): Accepted(90 + lead * (policy == bench_mig.OURS), 80) for policy in bench_mig.POLICIES}
    assert bench_mig.show(found) == pytest.approx(lead)
    monkeypatch.setattr(bench_mig, "show", lambda _: lead)
    monkeypatch.setattr(bench_mig, "simulate", lambda run: Accepted(0, 0))
    monkeypatch.setattr(bench_mig, "ProcessPoolExecutor", InProcess)
    assert bench_mig.main(["--seeds", "1", "--mix", "small", "--pods", "1"]) == status
    assert f"{lead:+.2f}" in capsys.readouterr().out


class InProcess:
    """A pool without processes."""

    def __init__(self, jobs):
        del jobs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    @staticmethod
    def map(function, items):
        return map(function, items)
