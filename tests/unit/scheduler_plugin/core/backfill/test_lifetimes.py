# SPDX-License-Identifier: Apache-2.0
"""How long pods run: stated, learned by template, and with the pods that still run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot import contract
from scheduler_plugin.core.backfill.lifetimes import MIN_ENDED, Lifetime, Lifetimes, ages_by_template, runtimes, usual_end
from scheduler_plugin.core.cluster.pod_template import template_of
from scheduler_plugin.core.cluster.pods import PodFacts
from tests.unit.scheduler_plugin.builders import make_pod

HOUR = 3600.0
PARTS = np.array([0.1, 0.5, 0.9])


def job(uid: str = "u1", *, stated: str = "", vgpus: int = 1, started_at: float | None = 0.0) -> PodFacts:
    annotations = {contract.ANNOTATION_EXPECTED_RUNTIME: stated} if stated else {}
    pod = make_pod(uid, node="n1", annotations=annotations, vgpu=str(vgpus), vgpu_memory="100")
    return replace(pod, controller_kind="Job", started_at=started_at)


def learned(pods: list[tuple[PodFacts, float]]) -> Lifetimes:
    lifetimes = Lifetimes()
    for pod, seconds in pods:
        lifetimes.learn(pod, seconds)
    return lifetimes


def test_stated_runtime_says_when_pod_usually_ends() -> None:
    pod = job(stated="2h")
    assert usual_end(pod, Lifetimes().of(pod), now=HOUR) == 2 * HOUR


def test_overdue_pod_is_expected_to_end_now() -> None:
    pod, lifetime = job(stated="2h"), Lifetimes().of(job(stated="2h"))
    assert usual_end(pod, lifetime, now=3 * HOUR) == 3 * HOUR
    assert lifetime is not None
    assert lifetime.is_overdue(3 * HOUR)
    assert not lifetime.is_overdue(HOUR)


@pytest.mark.parametrize(("count", "known"), [(MIN_ENDED - 1, False), (MIN_ENDED, True)])
def test_template_is_known_from_enough_ended_pods(count: int, known: bool) -> None:
    found = learned([(job(), HOUR)] * count).of(job("next", started_at=None))
    assert (found is not None) == known


@pytest.mark.parametrize("other", [job(vgpus=2), replace(job(), namespace="other"), replace(job(), controller_kind="ReplicaSet")])
def test_other_template_learns_nothing(other: PodFacts) -> None:
    assert learned([(job(), HOUR)] * MIN_ENDED).of(other) is None


def test_stated_runtimes_are_corrected_by_ratio_of_earlier_ones() -> None:
    late = learned([(job(stated="1h"), 2 * HOUR)] * MIN_ENDED).of(job(stated="4h"))
    assert late is not None
    assert late.totals == (8 * HOUR,) * MIN_ENDED
    assert late.most == 4 * HOUR, "its owner decides whether it may backfill"


def test_pod_without_gpus_has_no_template() -> None:
    assert template_of(replace(job(), gpu=None)) is None


def test_running_pods_lengthen_estimate() -> None:
    assert np.median(runtimes([1.0] * 8, [50.0] * 24)) > np.median(runtimes([1.0] * 8, []))


def test_ages_are_those_of_pods_without_statement() -> None:
    pods = [job(started_at=0.0), job("u2", stated="1h"), job("u3", started_at=None)]
    assert ages_by_template(pods, HOUR) == {template_of(pods[0]): [HOUR]}


SECONDS = st.floats(1.0, 1e6)


@given(st.lists(SECONDS, min_size=1, max_size=40), st.lists(SECONDS, max_size=40))
def test_runtimes_are_sorted_and_not_shorter_than_shortest(ended: list[float], running: list[float]) -> None:
    found = runtimes(ended, running)
    assert list(found) == sorted(found)
    assert found[0] >= min(ended)
    assert all(np.isfinite(found))


@given(st.lists(SECONDS, min_size=1, max_size=40), st.floats(0.0, 2e6))
def test_time_left_is_never_negative_and_grows_with_part(totals: list[float], age: float) -> None:
    left = Lifetime(tuple(sorted(totals))).left_at(age, PARTS)
    assert (left >= 0).all()
    assert (np.diff(left) >= 0).all()


@given(st.lists(SECONDS, min_size=1, max_size=40))
def test_without_running_pods_runtimes_are_those_of_ended_pods(ended: list[float]) -> None:
    assert set(runtimes(ended, [])) <= set(ended)
