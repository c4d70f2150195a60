# SPDX-License-Identifier: Apache-2.0
"""The extender's code as an engine, replays, and the command."""

import json
from collections import Counter
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from aliquot.contract.model import Policy
from aliquot_cli.__main__ import main
from aliquot_cli.output import Output
from aliquot_lab.simulate import benchmark
from aliquot_lab.simulate import run as run_module
from aliquot_lab.simulate.departures import denser, replay_departures
from aliquot_lab.simulate.extender import ExtenderEngine
from aliquot_lab.simulate.published import read_published
from aliquot_lab.simulate.run import POLICIES, PolicyError, Task, make_engine, replay, replay_arrivals, weights_of
from aliquot_lab.simulate.starts import replay_starts, with_lifetimes_of_other_classes, with_lifetimes_of_others
from aliquot_lab.simulate.trace import NODE_LIST, PodClass, TraceError, arrivals, capacity_milli, pod_lists, read_nodes, read_pods
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from tests.unit.aliquot_lab.simulate.test_baselines import node, pod
from tests.unit.aliquot_lab.simulate.test_trace import TRACE

PAGE = Path(benchmark.__file__).parents[2] / "docs/measurements/placement.md"


def task(policy="frag", seed=1):
    return Task(TRACE / NODE_LIST, pod_lists(TRACE)["small"], "small", policy, seed)


def first_pods(count, directory):
    """Write a list with the first pods of the trace; return its path."""
    few = directory / "pods.csv"
    with pod_lists(TRACE)["small"].open() as pods:
        few.write_text("".join(islice(pods, count + 1)))
    return few


@pytest.mark.parametrize("policy", [policy.value for policy in Policy])
def test_extender_allocates_once_and_frees_all(policy):
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


def test_pod_fits_extender_exactly_when_trace_states_it():
    engine = ExtenderEngine([node(cpu=2000, ram=2000, gpus=1, model="Alpha")], Policy.FRAG)
    assert not engine.place(pod("cpu", cpu=2001))
    assert not engine.place(pod("ram", ram=2001))
    assert not engine.place(pod("model", models=["Beta"]))
    assert not engine.place(pod("two", gpus=2))
    assert engine.place(pod("most", milli=990, models=["Alpha"]))
    assert not engine.place(pod("more", milli=20))
    assert engine.place(pod("rest", milli=10))


def test_pod_without_gpus_takes_a_node_without_gpus_while_one_has_room():
    engine = ExtenderEngine([node("with", cpu=4000, gpus=2), node("without", cpu=4000, gpus=0)], Policy.FRAG)
    assert all(engine.place(pod(f"p{number}", gpus=0, cpu=2000)) for number in range(3))
    assert engine.room().cpu_milli.tolist() == [2000, 0]


def test_flexible_pod_leaves_gpu_model_that_other_pods_require():
    engine = ExtenderEngine([node("a", gpus=8, cpu=64_000, model="Alpha"), node("b", gpus=8, cpu=64_000, model="Beta")], Policy.FRAG)
    for number in range(40):
        engine.place(pod(f"insists-{number}", cpu=1, ram=1, milli=100, models=["Alpha"]))
    before = engine.room().gpu_milli
    assert engine.place(pod("any", cpu=1, ram=1, milli=1000))
    assert (engine.room().gpu_milli == before).all(axis=1).tolist() == [True, False]


def test_only_extender_separates_memory_and_compute():
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


@pytest.mark.parametrize("policy", ["frag", "bestfit"])
def test_curve_counts_whole_nodes_and_refused_pods_at_each_tenth(policy):
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    engine = make_engine(policy, nodes, pods, 1)
    noted = replay_arrivals(engine, nodes, pods, 1)
    assert [point.arrived_percent for point in noted.curve] == list(range(10, 140, 10))
    assert [noted.curve[9].allocated_percent, noted.curve[-1].allocated_percent] == list(noted.allocated)
    placed = [point.allocated_percent for point in noted.curve]
    refused = [sum(point.refused.values()) for point in noted.curve]
    assert placed == sorted(placed)
    assert refused == sorted(refused)
    assert 0 < refused[-1] < len(arrivals(pods, 1, 130 * capacity_milli(nodes) // 100))
    room = engine.room()
    assert noted.curve[-1].whole_nodes <= int(((room.gpu_milli == 1000).sum(axis=1) >= 8).sum())


def test_whole_node_counts_while_a_large_pod_fits_on_it():
    nodes = [node(name, cpu=64_000, ram=64_000, gpus=8, model="Alpha") for name in "abc"]
    pods = [pod("small", cpu=1000, milli=1000), *(pod(f"large-{cpu}", cpu=cpu, gpus=8, milli=1000) for cpu in (40_000, 64_000))]
    notes = run_module._Notes(engine := make_engine("bestfit", nodes, pods, 1), nodes, pods)
    for name, cpu, whole in (("a", 1, 2), ("b", 64_000, 1)):
        assert engine.place(pod(name, cpu=cpu, gpus=8 if name == "a" else 0, milli=1000 if name == "a" else 0))
        notes.take(10)
        assert notes._curve[-1].whole_nodes == whole


def test_waits_are_counted_by_the_size_of_pods():
    result = replay_departures(task("bestfit"), 2.0)
    pods = read_pods(pod_lists(TRACE)["small"])
    assert set(result.waits) <= {one.kind.size for one in pods}
    assert all(0 <= waits.waited <= waits.pods and waits.mean_seconds >= 0 for waits in result.waits.values())
    total = sum(waits.pods for waits in result.waits.values())
    mean = sum(waits.pods * waits.mean_seconds for waits in result.waits.values()) / total
    assert mean == pytest.approx(result.wait_mean_seconds)
    assert sum(waits.waited for waits in result.waits.values()) > 0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("bets", "expected a policy of frag"),
        ("fgd:cpu_used=0", "expected a policy of frag"),
        ("frag:cpu=0", "expected terms of policy, host"),
        ("frag:cpu_used", "expected TERM=NUMBER"),
        ("frag:cpu_used=x", "expected TERM=NUMBER"),
    ],
)
def test_wrong_policy_or_weight_is_named(policy, message):
    with pytest.raises(PolicyError, match=message):
        weights_of(policy)


def test_changed_weights_change_only_what_they_name():
    assert weights_of("fgd") is None
    assert weights_of("frag") == (Policy.FRAG, DEFAULT_WEIGHTS[Policy.FRAG])
    changed = replace(DEFAULT_WEIGHTS[Policy.FRAG], cpu_used=0.0, whole_node=0.01)
    assert weights_of("frag:cpu_used=0,whole_node=0.01") == (Policy.FRAG, changed)
    assert replay(task("frag:policy=0,free=-1")).allocated_percent != replay(task("frag")).allocated_percent


def test_memory_and_compute_are_reported_separately_when_requested_separately():
    found = replay(replace(task("bestfit"), mix="own-compute"))
    assert found.memory_percent != found.cores_percent
    assert found.allocated_percent == pytest.approx([fmean(pair) for pair in zip(found.memory_percent, found.cores_percent, strict=True)])


@pytest.mark.parametrize(("rates", "cpu_left"), [(True, [800, 1000]), (False, [900, 900])])
def test_pods_without_gpus_use_busy_gpu_nodes_unless_default_scheduler_places_them(rates, cpu_left):
    nodes = [node(name, cpu=1000, ram=1000, gpus=1, model="Alpha") for name in "ab"]
    engine = ExtenderEngine(nodes, Policy.FRAG, rates_cpu_pods=rates)
    assert engine.place(pod("gpu", cpu=0, ram=0, milli=1000))
    for name in ("first", "second"):
        assert engine.place(pod(name, cpu=100, ram=100, gpus=0, milli=0))
    room = engine.room()
    assert room.cpu_milli[np.argsort(room.gpu_milli[:, 0])].tolist() == cpu_left


@pytest.mark.parametrize("policy", ["frag", "bestfit"])
def test_with_departures_all_pods_are_placed(policy, tmp_path):
    result = replay_departures(replace(task(policy), pods_file=first_pods(20, tmp_path)), 0.5)
    assert result.never_placed == 0
    assert 0 < result.allocated_percent <= 100
    assert result.wait_p95_seconds >= 0


def test_moves_place_a_pod_and_moved_pods_keep_their_amounts():
    engine = ExtenderEngine([node(name, gpus=2) for name in ("a", "b")], Policy.SPREAD)
    assert [engine.place(pod(name, milli=1000)) for name in ("one", "two")] == [True, True]
    engine.now = 1000.0
    assert not engine.place(pod("big", gpus=2))
    plan = engine.move_for(pod("big", gpus=2))
    assert plan is not None
    assert (len(plan.moves), plan.lost_gpu_seconds) == (1, 1000.0)
    assert np.maximum(engine.room().gpu_milli, 0).sum() == 0
    for name in ("one", "two"):
        engine.remove(pod(name, milli=1000))
    assert sorted(np.maximum(engine.room().gpu_milli, 0).sum(axis=1).tolist()) == [0, 2000]


def test_consolidation_shortens_waits_of_large_pods(tmp_path):
    few = first_pods(20, tmp_path)  # each pod that does not fit costs a search
    plain, moved = (replay_departures(replace(task("spread"), pods_file=few), 1.0, consolidates) for consolidates in (False, True))
    assert plain.moves == 0
    assert moved.moves >= moved.served_by_moves > 0
    assert moved.lost_gpu_hours > 0
    large = [sum(waits.pods * waits.mean_seconds for size, waits in run.waits.items() if size in "248") for run in (plain, moved)]
    assert large[1] < large[0]


def test_a_list_without_times_has_no_departures(tmp_path):
    file = tmp_path / "pods.csv"
    file.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,1000\n")
    with pytest.raises(TraceError, match="deletion_time"):
        replay_departures(Task(TRACE / NODE_LIST, file, "x", "bestfit", 1), 0.9)


def test_published_results_are_averaged_over_seeds(tmp_path):
    file = tmp_path / "allo.csv"
    file.write_text("workload,sc_policy,seed,100,130\nopenb_pod_list_x,06-FGD,1,90,92\nopenb_pod_list_x,06-FGD,2,92,94\n")
    assert read_published(file) == {("x", "fgd"): (91.0, 93.0)}


def test_command_prints_tables_or_json_and_names_errors():
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
    ended: list[Any] = []
    parts: list[Any] = []
    alone, together = (run_module.run_all(replay, tasks, jobs, ended.append, lambda *reported: parts.append(reported)) for jobs in (1, 2))
    assert sorted(one.seed for one in ended) == [1, 1, 2, 2]
    assert {one.seed for one, _ in parts} == {1, 2}
    assert all(0 <= part < 1 for _, part in parts)
    assert [result.allocated_percent for result in alone] == [result.allocated_percent for result in together]


def test_every_policy_has_an_engine():
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    assert all(make_engine(policy, nodes, pods, 1).place(pods[0]) for policy in POLICIES)


@pytest.fixture
def replayed(monkeypatch):
    """Let the benchmark run nothing; return the options that it would have run."""
    found: list[Any] = []

    def fake(options):
        found.append(options)
        return json.dumps({"seeds": list(options.seeds)})

    monkeypatch.setattr(benchmark, "run", fake)
    monkeypatch.setattr(benchmark, "compare_links", lambda _output: "{}")
    return found


def test_benchmark_prints_every_section_of_the_page(replayed):
    shown = CliRunner().invoke(main, ["simulate", "--trace", str(TRACE), "--benchmark", "quick"])
    assert shown.exit_code == 0, shown.output
    titles = [line.removeprefix("## ") for line in shown.output.splitlines() if line.startswith("## ")]
    assert titles == [*(section.title for section in benchmark.SECTIONS), benchmark.LINKS]
    assert [options.load for options in replayed] == [section.load for section in benchmark.SECTIONS]
    assert {options.most_pods for options in replayed if options.load} == {benchmark.QUICK_PODS}
    document = json.loads(CliRunner().invoke(main, ["simulate", "--trace", str(TRACE), "--benchmark", "quick", "-o", "json"]).output)
    assert list(document) == titles
    assert document[titles[0]] == {"seeds": [1000]}


def test_benchmark_takes_no_other_choice(replayed):
    shown = CliRunner().invoke(main, ["simulate", "--trace", str(TRACE), "--benchmark", "quick", "--policy", "frag", "--seeds", "2"])
    assert shown.exit_code == 2
    assert "--seeds, --policy cannot be used with --benchmark" in shown.output
    assert not replayed


def rows_of_page(section: str) -> list[list[str]]:
    """Return the cells of the first table in a section of the page that has the figures."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = text[text.index("\n|---") :].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(lambda line: line.startswith("|"), lines)]


def sections_of(title: str) -> list[Any]:
    return [
        section.options(TRACE, benchmark.Extent.FULL, 1, Output.TABLE) for section in benchmark.SECTIONS if section.title.startswith(title)
    ]


@pytest.mark.parametrize("section", ["Result at full load", "Whole nodes and refused pods"])
def test_full_benchmark_has_lists_and_seeds_of_the_page(section):
    seed_of = {name: seed for found in sections_of("Result at full load") for name in found.lists for seed in found.seeds}
    lists = [row[0] for row in rows_of_page(section) if "**" not in row[0] and " lists" not in row[0]]
    assert {name.removesuffix(" *"): 42 if name.endswith("*") else 1000 for name in lists}.items() <= seed_of.items()
    assert len(lists) in {17, len(seed_of)}


def test_full_benchmark_has_departures_and_policies_of_the_page():
    replays = {(name, found.load, seed) for found in sections_of("With departures") for name in found.lists for seed in found.seeds}
    rows = [row[0].replace(" *", "").split(", ") for row in rows_of_page("With departures")]
    assert replays == {(name, float(load), int(seed)) for name, load, seed in rows}
    assert [(found.policies, found.load, found.consolidates, found.most_pods) for found in sections_of("Moves")] == [
        (("frag",), 1.0, False, 6000),
        (("frag",), 1.0, True, 6000),
        (("spread",), 0.9, False, 6000),
        (("spread",), 0.9, True, 6000),
    ]
    (others,) = sections_of("The other policies")
    assert set(others.policies) == {row[0] for row in rows_of_page("The other policies")}
    rated, defaults = sections_of("Pods without GPUs")
    assert (rated.rates_cpu_pods, defaults.rates_cpu_pods, rated.lists) == (True, False, defaults.lists)
    assert [found.own_cores for found in sections_of("Compute and memory apart")] == [True]


def test_quick_benchmark_replays_few_lists_of_each_section():
    quick = [section.options(TRACE, benchmark.Extent.QUICK, 1, Output.TABLE) for section in benchmark.SECTIONS]
    assert all(1 <= len(options.lists) <= 2 and len(options.seeds) == 1 for options in quick)


@pytest.fixture
def crowded(tmp_path):
    """A trace with more pods of one and of four GPUs than its nodes take at once."""
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{number},64000,262144,4,A\n" for number in range(4)))
    head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    rows = [
        f"p{number},1000,1024,{4 if number % 5 == 4 else 1},1000,,LS,Running,{60 * number},{60 * number + 1800 + 700 * (number % 4)},0\n"
        for number in range(24)
    ]
    pods.write_text(head + "".join(rows))
    return Task(nodes, pods, "crowded", "frag", 1)


def test_stated_start_times_are_rated(crowded):
    result = replay_starts(crowded, 1.5)
    assert 0 < result.owners <= result.stated
    assert 0 <= result.hit_percent <= 100
    assert result == replay_starts(crowded, 1.5)


def test_without_held_room_no_time_is_stated(crowded):
    assert replay_starts(crowded, 1.5, holds=False).stated == 0


def test_start_times_of_too_few_arrivals_are_refused(crowded):
    with pytest.raises(TraceError, match="expected arrivals at several times"):
        replay_starts(crowded, 1.5, 1)


def test_lifetimes_stay_in_their_class():
    pods = denser(read_pods(pod_lists(TRACE)["small"]), 1)
    exchanged = with_lifetimes_of_others(pods, 1)
    assert lifetimes_by_kind(pods) == lifetimes_by_kind(exchanged)


def test_classes_exchange_their_lifetimes_half_way():
    pods = denser(read_pods(pod_lists(TRACE)["small"]), 1)
    changed, half = with_lifetimes_of_other_classes(pods, 1), len(pods) // 2
    first, second = (kind for kind, _ in Counter(pod.kind for pod in pods).most_common(2))
    assert changed[:half] == pods[:half]
    assert [(pod.name, pod.created_seconds) for pod in changed] == [(pod.name, pod.created_seconds) for pod in pods]
    for kind, other in ((first, second), (second, first)):
        later = {lifetime(pod) for pod in changed[half:] if pod.kind == kind}
        assert later
        assert later <= {lifetime(pod) for pod in pods if pod.kind == other}


def lifetime(pod):
    return round(pod.deleted_seconds - pod.created_seconds)


def lifetimes_by_kind(pods):
    return sorted((str(one.kind), round(one.deleted_seconds - one.created_seconds)) for one in pods)


def test_start_times_need_a_policy_of_the_extender():
    with pytest.raises(PolicyError, match="one of the extender's policies"):
        replay_starts(task("bestfit"), 2.0)
