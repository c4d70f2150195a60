"""The extender's code as an engine, replays, and the command."""

import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from aliquot.__main__ import main
from aliquot.simulate import run as run_module
from aliquot.simulate.departures import replay_departures
from aliquot.simulate.extender import ExtenderEngine
from aliquot.simulate.published import read_published
from aliquot.simulate.run import POLICIES, Task, make_engine, replay, replay_arrivals
from aliquot.simulate.trace import NODE_LIST, PodClass, TraceError, capacity_milli, pod_lists, read_nodes, read_pods
from proto.model import Policy
from tests.unit.aliquot.simulate.test_baselines import node, pod
from tests.unit.aliquot.simulate.test_trace import TRACE


def task(policy="frag", seed=1):
    return Task(TRACE / NODE_LIST, pod_lists(TRACE)["small"], "small", policy, seed)


@pytest.mark.parametrize("policy", [policy.value for policy in Policy])
def test_the_extender_gives_nothing_twice_and_all_comes_back(policy):
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    engine = ExtenderEngine(nodes, Policy(policy))
    empty = engine.room()
    held = [one for one in pods if engine.place(one)]
    room = engine.room()
    assert 0 < len(held) < len(pods)
    assert (room.cpu_milli >= 0).all()
    assert np.maximum(room.gpu_milli, 0).sum() == capacity_milli(nodes) - sum(one.kind.demand_milli for one in held)
    for one in held:
        engine.remove(one)
    assert (engine.room().gpu_milli == empty.gpu_milli).all()


def test_a_pod_fits_the_extender_exactly_when_the_trace_says_so():
    engine = ExtenderEngine([node(cpu=2000, ram=2000, gpus=1, model="Alpha")], Policy.FRAG)
    assert not engine.place(pod("cpu", cpu=2001))
    assert not engine.place(pod("ram", ram=2001))
    assert not engine.place(pod("model", models=["Beta"]))
    assert not engine.place(pod("two", gpus=2))
    assert engine.place(pod("most", milli=990, models=["Alpha"]))
    assert not engine.place(pod("more", milli=20))
    assert engine.place(pod("rest", milli=10))


def test_a_pod_that_can_go_anywhere_leaves_the_model_that_others_insist_on():
    engine = ExtenderEngine([node("a", gpus=8, cpu=64_000, model="Alpha"), node("b", gpus=8, cpu=64_000, model="Beta")], Policy.FRAG)
    for number in range(40):
        engine.place(pod(f"insists-{number}", cpu=1, ram=1, milli=100, models=["Alpha"]))
    before = engine.room().gpu_milli
    assert engine.place(pod("any", cpu=1, ram=1, milli=1000))
    assert (engine.room().gpu_milli == before).all(axis=1).tolist() == [True, False]


def test_memory_and_compute_are_dimensions_of_their_own_to_the_extender_alone():
    nodes = [node(gpus=1, model="Alpha")]
    wants = [replace(pod(f"p{cores}", cpu=1, ram=1), kind=PodClass(1, 1, 1, 500, frozenset(), cores)) for cores in (800, 200)]
    extender, flat = ExtenderEngine(nodes, Policy.FRAG), make_engine("bestfit", nodes, wants, 1)
    assert [extender.place(one) for one in wants] == [True, True]
    assert [flat.place(one) for one in wants] == [True, False]
    flat.remove(wants[0])
    assert flat.place(wants[1])


def test_the_same_seed_gives_the_same_replay():
    first, again, other = replay(task()), replay(task()), replay(task(seed=2))
    assert first.allocated_percent == again.allocated_percent != other.allocated_percent
    assert 50 < first.allocated_percent[0] <= first.allocated_percent[1] <= 100
    assert first.decision_p50_ms is not None


def test_what_is_allocated_is_what_is_not_free():
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    engine = make_engine("bestfit", nodes, pods, 1)
    noted = replay_arrivals(engine, nodes, pods, 1)
    free = np.maximum(engine.room().gpu_milli, 0).sum()
    assert noted.memory == noted.cores == noted.allocated
    assert noted.allocated[-1] == pytest.approx(100 * (1 - free / capacity_milli(nodes)))
    assert 0 <= noted.fragmented[-1] <= 100 - noted.allocated[-1] + 1e-9


def test_memory_and_compute_are_noted_apart_where_pods_ask_for_them_apart():
    found = replay(replace(task("bestfit"), own_cores=True))
    assert found.memory_percent != found.cores_percent
    assert found.allocated_percent == pytest.approx([fmean(pair) for pair in zip(found.memory_percent, found.cores_percent, strict=True)])


@pytest.mark.parametrize(("rates", "cpu_left"), [(True, [800, 1000]), (False, [900, 900])])
def test_pods_without_gpus_go_where_gpus_are_in_use_unless_they_are_left_to_the_default_scheduler(rates, cpu_left):
    nodes = [node(name, cpu=1000, ram=1000, gpus=1, model="Alpha") for name in "ab"]
    engine = ExtenderEngine(nodes, Policy.FRAG, rates_cpu_pods=rates)
    assert engine.place(pod("gpu", cpu=0, ram=0, milli=1000))
    for name in ("first", "second"):
        assert engine.place(pod(name, cpu=100, ram=100, gpus=0, milli=0))
    room = engine.room()
    assert room.cpu_milli[np.argsort(room.gpu_milli[:, 0])].tolist() == cpu_left


@pytest.mark.parametrize("policy", ["frag", "bestfit"])
def test_with_departures_all_pods_get_their_turn(policy):
    result = replay_departures(task(policy), 0.5)
    assert result.never_placed == 0
    assert 0 < result.allocated_percent <= 100
    assert result.wait_p95_seconds >= 0


def test_a_list_without_times_has_no_departures(tmp_path):
    file = tmp_path / "pods.csv"
    file.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,1000\n")
    with pytest.raises(TraceError, match="deletion_time"):
        replay_departures(Task(TRACE / NODE_LIST, file, "x", "bestfit", 1), 0.9)


def test_published_results_are_averaged_over_seeds(tmp_path):
    file = tmp_path / "allo.csv"
    file.write_text("workload,sc_policy,seed,100,130\nopenb_pod_list_x,06-FGD,1,90,92\nopenb_pod_list_x,06-FGD,2,92,94\n")
    assert read_published(file) == {("x", "fgd"): (91.0, 93.0)}


def test_the_command_prints_tables_or_json_and_names_what_is_wrong():
    def call(*arguments):
        return CliRunner().invoke(main, ["simulate", *arguments])

    shown = call("--trace", str(TRACE), "--policy", "bestfit", "--policy", "frag", "--seeds", "2")
    assert shown.exit_code == 0, shown.output
    assert "| small" in shown.output
    document = json.loads(call("--trace", str(TRACE), "--policy", "bestfit", "--seeds", "2", "-o", "json").output)
    assert len(document["runs"]) == 2
    assert set(document["means"]["small"]) == set(document["fragmented"]["small"]) == {"bestfit"}
    assert yaml.safe_load(call("--trace", str(TRACE), "--policy", "bestfit", "-o", "yaml").output)["means"]["small"]["bestfit"]
    assert "bestfit" in call("--trace", str(TRACE), "--policy", "bets").output
    assert "small" in call("--trace", str(TRACE), "--pods", "smal").output
    assert call().exit_code == 2


def test_processes_do_not_change_the_result():
    tasks = [task("bestfit", seed) for seed in (1, 2)]
    ended, parts = [], []
    alone, together = (run_module.run_all(replay, tasks, jobs, ended.append, lambda *told: parts.append(told)) for jobs in (1, 2))
    assert sorted(one.seed for one in ended) == [1, 1, 2, 2]
    assert {one.seed for one, _ in parts} == {1, 2}
    assert all(0 <= part < 1 for _, part in parts)
    assert [result.allocated_percent for result in alone] == [result.allocated_percent for result in together]


def test_every_policy_has_an_engine():
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    assert all(make_engine(policy, nodes, pods, 1).place(pods[0]) for policy in POLICIES)
