# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for every cluster, list and policy."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aliquot_lab.simulate.timeline.command import POLICIES
from aliquot_lab.simulate.timeline.model import Queue
from aliquot_lab.simulate.timeline.outcome import End
from aliquot_lab.simulate.timeline.run import NO_QUOTA, Setting, simulate
from aliquot_lab.simulate.timeline.text import facts
from tests.unit.aliquot_lab.simulate.timeline.clusters import Watcher, could_give_way, node, pod, settings_of, share


@given(settings_of(), st.sampled_from(POLICIES))
def test_nothing_is_given_twice_and_every_workload_has_one_end(setting, policy):
    watcher = Watcher()
    outcome = simulate(policy, setting, watch=watcher)
    assert watcher.moments
    workloads = {record.workload.number for record in outcome.records}
    assert len(outcome.records) == len(workloads) == sum(outcome.ends.values())
    assert sum(len(record.workload.pods) for record in outcome.records) == len(setting.pods)
    for record in outcome.records:
        assert record.wait_seconds >= 0
        assert (record.end is End.ENDED) <= (record.workload.duration_seconds is not None)
        assert (record.end in (End.ENDED, End.RUNNING)) <= (record.started_seconds is not None)
        assert (record.started_seconds is None or record.started_seconds > record.workload.arrival_seconds) <= bool(record.reason)


@settings(max_examples=25)
@given(settings_of(), st.sampled_from(POLICIES))
def test_same_lists_and_seed_give_the_same_bytes(setting, policy):
    first, again = (json.dumps(facts([simulate(policy, setting)]), default=str) for _ in range(2))
    assert first == again


@given(settings_of(gangs=False, queues=False, mig=False), st.sampled_from(["frag", "binpack", "hami-default", "kai-binpack"]))
def test_no_pod_waits_for_less_important_pods_that_could_give_way(setting, policy):
    def check(simulation):
        for workload in simulation.waiting:
            assert not could_give_way(simulation, workload)

    simulate(policy, replace(setting, preempts=True), watch=check)


@given(settings_of(), st.sampled_from(POLICIES))
def test_only_preemption_and_reclaiming_end_pods_early(setting, policy):
    lenders = [replace(queue, reclaims=False) for queue in setting.queues]
    outcome = simulate(policy, replace(setting, preempts=False, queues=lenders))
    assert outcome.preemptions == outcome.reclaims == outcome.lost_gpu_seconds == 0
    assert not any(record.preempted for record in outcome.records)


@pytest.mark.parametrize("policy", POLICIES)
def test_gang_waits_until_all_members_fit(policy):
    blocker = pod("blocker", at=0, lasts=10, gpus=2)
    members = [pod(f"m{number}", at=1, lasts=5, gpus=2, gang="g") for number in range(2)]
    outcome = simulate(policy, Setting([node(gpus=4)], [blocker, *members]), watch=Watcher())
    (gang,) = [record for record in outcome.records if record.workload.is_gang]
    assert (gang.started_seconds, gang.wait_seconds) == (10, 9)
    assert gang.reason.startswith("gang: ")
    assert gang.workload.size == "gang 2 x 2 GPUs"


@pytest.mark.parametrize("policy", POLICIES)
def test_important_pod_ends_the_cheapest_victims_and_they_run_again(policy):
    pods = [pod(f"low-{number}", lasts=100, **share()) for number in range(4)]
    pods.append(pod("high", at=40, lasts=10, priority=5, gpus=1))
    outcome = simulate(policy, Setting([node(gpus=2)], pods))
    records = {record.workload.name: record for record in outcome.records}
    ended = [name for name, record in records.items() if record.preempted]
    assert len(ended) == 2
    assert records["high"].wait_seconds == 0
    assert outcome.lost_gpu_seconds == pytest.approx(2 * 40 * 0.5)
    assert {record.end for record in outcome.records} == {End.ENDED}
    assert outcome.end_seconds == 150


def test_important_gang_frees_several_nodes_at_once():
    low = [pod(f"low-{number}", lasts=100, gpus=2) for number in range(3)]
    gang = [pod(f"high-{number}", at=5, lasts=10, priority=1, gpus=2, gang="g") for number in range(2)]
    outcome = simulate("frag", Setting([node(name, gpus=2) for name in "abc"], [*low, *gang]), watch=Watcher())
    assert outcome.preemptions == 2
    assert {record.wait_seconds for record in outcome.records} == {0}


def test_victim_in_a_gang_ends_with_its_whole_gang():
    gang = [pod(f"low-{number}", lasts=100, gpus=2, gang="g") for number in range(2)]
    outcome = simulate(
        "frag", Setting([node(name, gpus=2) for name in "ab"], [*gang, pod("high", at=5, priority=1, gpus=2)]), watch=Watcher()
    )
    assert outcome.preemptions == 1
    assert outcome.lost_gpu_seconds == pytest.approx(4 * 5)


def test_part_of_a_model_name_selects_gpus_for_every_policy():
    nodes = [node("a", gpus=1, model="A100-80GB"), node("b", gpus=1, model="T4")]
    pods = [pod(f"p{number}", models=frozenset({"a100"})) for number in range(2)]
    for policy in POLICIES:
        outcome = simulate(policy, Setting(nodes, pods))
        assert sorted(record.wait_seconds for record in outcome.records) == [0, 10]


def test_end_of_a_preempted_pod_does_not_count_as_time():
    pods = [pod("low", lasts=100), pod("high", at=5, lasts=None, priority=1)]
    outcome = simulate("frag", Setting([node(gpus=1)], pods))
    assert outcome.end_seconds == 5
    assert {record.end for record in outcome.records} == {End.RUNNING, End.WAITING}


def test_without_preemption_important_pod_waits_and_goes_first():
    pods = [pod("low", lasts=100), pod("next-low", at=1, lasts=10), pod("high", at=2, lasts=10, priority=5)]
    outcome = simulate("frag", Setting([node(gpus=1)], pods, preempts=False))
    starts = {record.workload.name: record.started_seconds for record in outcome.records}
    assert starts == {"low": 0, "high": 100, "next-low": 110}


def test_cpu_alone_can_be_freed_by_preemption():
    pods = [pod("low", lasts=100, gpus=0, cpu_milli=60_000), pod("high", at=5, lasts=10, priority=1, cpu_milli=30_000)]
    outcome = simulate("frag", Setting([node()], pods))
    assert [(record.preempted, record.wait_seconds) for record in outcome.records] == [(1, 0), (0, 0)]


def test_victims_of_cpu_that_gpus_make_needless_stay():
    whole = [pod(f"whole-{number}", lasts=100, cpu_milli=30_000) for number in range(2)]
    outcome = simulate("frag", Setting([node(gpus=2, cpu=64_000)], [*whole, pod("high", at=1, priority=1, cpu_milli=10_000)]))
    assert outcome.preemptions == 1


@pytest.mark.parametrize("layout", [("on-demand",), ("3g.40gb", "3g.40gb")])
def test_mig_instances_are_given_once_each(layout):
    pods = [pod(f"p{number}", gpus=0, mig="3g.40gb") for number in range(3)]
    outcome = simulate("frag", Setting([node(gpus=1, mig=layout), node("plain", gpus=1)], pods), watch=Watcher())
    assert sorted(record.wait_seconds for record in outcome.records) == [0, 0, 10]
    assert {found.size for found in outcome.waits()} == {"MIG 3g.40gb"}


def test_pod_that_no_empty_node_could_take_is_refused():
    outcome = simulate("frag", Setting([node(gpus=2)], [pod("large", gpus=3), pod("host", cpu_milli=65_000), pod("fits", gpus=2)]))
    assert [record.end for record in sorted(outcome.records, key=lambda record: record.workload.name)] == [
        End.ENDED,
        End.REFUSED,
        End.REFUSED,
    ]
    assert [found.size for found in outcome.waits()] == ["2 GPUs"]


def test_queue_borrows_up_to_its_limit_and_gives_back_when_reclaimed():
    queues = [Queue("lends", 2000, reclaims=True), Queue("borrows", 1000, borrow_milli=1000)]
    pods = [pod(f"b{number}", lasts=50, queue="borrows") for number in range(3)]
    pods += [pod(f"l{number}", at=10, lasts=10, queue="lends") for number in range(2)]
    outcome = simulate("frag", Setting([node(gpus=8)], pods, queues), watch=Watcher())
    starts = {record.workload.name: record for record in outcome.records}
    assert sum(starts[f"b{number}"].started_seconds == 0 for number in range(3)) == 2
    assert [starts[f"l{number}"].wait_seconds for number in range(2)] == [0, 0]
    assert outcome.reclaims == 1
    assert outcome.reasons == {NO_QUOTA: 1}


def test_reclaiming_ends_the_youngest_borrower_of_all_queues():
    queues = [Queue("lends", 2000, reclaims=True), Queue("a", 0), Queue("b", 0)]
    pods = [pod("old", lasts=50, queue="a"), pod("young", at=5, lasts=50, queue="b"), pod("mine", at=10, queue="lends")]
    outcome = simulate("frag", Setting([node(gpus=8)], pods, queues), watch=Watcher())
    assert [record.workload.name for record in outcome.records if record.preempted] == ["young"]


def test_admitted_workload_keeps_quota_while_no_node_has_room():
    queues = [Queue("a", 1000), Queue("b", 1000)]
    pods = [pod("blocker", lasts=30), pod("first", at=1, queue="a"), pod("second", at=2, queue="a")]
    outcome = simulate("frag", Setting([node(gpus=1)], pods, queues), watch=Watcher())
    starts = {record.workload.name: record.started_seconds for record in outcome.records}
    assert starts == {"blocker": 0, "first": 30, "second": 40}


def test_seed_orders_pods_that_arrive_together():
    pods = [pod(f"p{number}", lasts=1) for number in range(8)]
    orders = set()
    for seed in range(3):
        outcome = simulate("frag", Setting([node(gpus=1)], pods, seed=seed))
        orders.add(tuple(record.workload.name for record in sorted(outcome.records, key=lambda record: record.wait_seconds)))
    assert len(orders) == 3
