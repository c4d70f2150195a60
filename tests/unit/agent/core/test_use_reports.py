# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.holdings import Holdings
from agent.core.ledger import ClaimRequest, Grant
from agent.core.overhead import GpuProcess
from agent.core.sensors import DeviceSensors
from agent.core.use_reports import CHANGE_PERCENT, LEAST_SAMPLES, WINDOW_SAMPLES, UseHistory, UseSample, next_reports, sample_of
from aliquot.contract.gpunode import MAX_UTILIZATIONS, PodUtilization
from aliquot.contract.model import ContainerSpec, Utilization
from tests.unit.agent.builders import gpu, grant, ids, instance, inventory, limits, pod, share

TRAIN, SERVE = pod("train"), pod("serve", ContainerSpec("main", limits(mib=200)))
DEVICES = inventory().devices


def listed(*entries: tuple[Grant, str, float | None, float | None]) -> Holdings:
    """Holdings with one process for each grant and device."""
    found = {(one.grant_id, uuid): [GpuProcess(uuid, 10, 0, sm, dram)] for one, uuid, sm, dram in entries}
    return Holdings({"GPU-0", "GPU-1"}, found)


def sampled(holdings, *grants, devices=DEVICES, **sm):
    ratios = {(one.grant_id, s.device_uuid): ratio for one in grants for s in one.shares if (ratio := sm.get(one.container)) is not None}
    return sample_of(grants, devices, ratios, holdings)


def test_containers_of_pod_add_up_on_each_gpu_and_gpus_are_averaged():
    one = grant(ids("0:0", "1:0"), share(0), share(1), of=TRAIN)
    web = grant(ids("0:1"), share(0), of=TRAIN, container="web")
    holdings = listed((one, "GPU-0", 0.5, 0.25), (one, "GPU-1", 0.5, 0.25), (web, "GPU-0", 0.25, 0.5))
    assert sampled(holdings, one, web, main=0.5, web=0.25) == {TRAIN.uid: UseSample((0.75 + 0.5) / 2, (0.75 + 0.25) / 2)}


@pytest.mark.parametrize(
    ("holdings_of", "sm"),
    [
        pytest.param(lambda one: listed((one, "GPU-0", None, None)), None, id="unknown to the driver and the shim"),
        pytest.param(lambda one: Holdings(), 0.0, id="no process yet"),
    ],
)
def test_pod_without_known_process_gives_no_sample(holdings_of, sm):
    one = grant(ids("0:0"), share(0), of=TRAIN)
    assert sampled(holdings_of(one), one, main=sm) == {}


def test_idle_process_is_a_sample_of_nothing():
    one = grant(ids("0:0"), share(0), of=TRAIN)
    assert sampled(listed((one, "GPU-0", 0.0, 0.0)), one, main=0.0) == {TRAIN.uid: UseSample(0.0, 0.0)}


def test_charged_time_counts_with_part_of_gpu_memory_use():
    one, other = grant(ids("0:0"), share(0), of=TRAIN), grant(ids("0:1"), share(0), of=SERVE, container="web")
    devices = [replace(entry, sensors=DeviceSensors(memory_utilization_ratio=0.5)) for entry in DEVICES]
    found = sampled(Holdings(), one, other, devices=devices, main=0.75, web=0.25)
    assert found == {TRAIN.uid: UseSample(0.75, 0.375), SERVE.uid: UseSample(0.25, 0.125)}


def test_mig_instances_and_claims_give_no_sample():
    mig = inventory(gpu(0, mig=[instance(0, 1)])).devices
    on_instance = grant(ids("0:0"), share("MIG-0-1"), of=TRAIN)
    assert sampled(Holdings(), on_instance, devices=mig, main=0.5) == {}
    claimed = replace(grant(ids("0:0"), share(0), of=TRAIN), claim=ClaimRequest("claim-uid", "claim", "gpus", ()))
    assert sampled(listed((claimed, "GPU-0", 0.5, 0.5)), claimed, main=0.5) == {}


def test_mean_needs_samples_and_forgets_old_ones_and_gone_pods():
    history = UseHistory()
    for number in range(LEAST_SAMPLES):
        assert history.means() == {}
        history.add({"u": UseSample(1.0, 0.5)}, {"u"})
        del number
    assert history.means() == {"u": UseSample(1.0, 0.5)}
    for _ in range(WINDOW_SAMPLES):
        history.add({"u": UseSample(0.0, 0.0)}, {"u"})
    assert history.means() == {"u": UseSample(0.0, 0.0)}
    history.add({}, set())
    assert history.means() == {}


def test_equal_pods_give_one_report_with_their_mean():
    pods = {one.uid: one for one in (TRAIN, SERVE, pod("train-2"))}
    means = {TRAIN.uid: UseSample(0.9, 0.5), "uid-train-2": UseSample(0.7, 0.3), SERVE.uid: UseSample(0.12, 0.0)}
    reports = next_reports((), means, pods)
    assert reports == (PodUtilization("uid-serve", Utilization(10, 0)), PodUtilization("uid-train", Utilization(80, 40)))


def test_report_changes_only_when_mean_moves_far():
    pods, near, far = {TRAIN.uid: TRAIN}, (CHANGE_PERCENT - 1) / 100, (CHANGE_PERCENT + 1) / 100
    first = next_reports((), {TRAIN.uid: UseSample(0.5, 0.5)}, pods)
    assert next_reports(first, {TRAIN.uid: UseSample(0.5 + near, 0.5 - near)}, pods) == first
    assert next_reports(first, {TRAIN.uid: UseSample(0.5, 0.5 + far)}, pods) == (PodUtilization(TRAIN.uid, Utilization(50, 60)),)


def test_report_stays_until_its_pod_is_gone():
    first = next_reports((), {TRAIN.uid: UseSample(0.5, 0.5)}, {TRAIN.uid: TRAIN})
    assert next_reports(first, {}, {TRAIN.uid: TRAIN}) == first
    assert next_reports(first, {}, {}) == ()


@given(st.lists(st.integers(0, 99), max_size=90, unique=True), st.lists(st.integers(0, 99), max_size=90, unique=True))
def test_reports_are_bounded_and_known_templates_stay(first_names, second_names):
    def known(names):
        pods = {f"u{name}": pod(f"p{name}", ContainerSpec("main", limits(mib=100 + name)), uid=f"u{name}") for name in names}
        return dict.fromkeys(pods, UseSample(0.5, 0.5)), pods

    first = next_reports((), *known(first_names))
    means, pods = known({*first_names, *second_names})
    second = next_reports(first, means, pods)
    assert len(second) == min(MAX_UTILIZATIONS, len(pods))
    assert set(first) <= set(second)
