# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from aliquot_lab.simulate.trace import (
    MIXES,
    NODE_LIST,
    TraceError,
    arrivals,
    capacity_milli,
    pod_lists,
    read_nodes,
    read_pods,
    with_own_cores,
)

TRACE = Path(__file__).parent / "trace"
HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time\n"


def write(tmp_path, *rows):
    file = tmp_path / "pods.csv"
    file.write_text(HEADER + "\n".join(rows))
    return file


def test_multi_gpu_pods_get_whole_gpus_and_others_their_request(tmp_path):
    pods = read_pods(write(tmp_path, "a,1000,10,0,0,,", "b,1000,10,1,470,,", "c,1000,10,4,1000,T4|P100,"))
    assert [(pod.kind.gpus, pod.kind.milli, pod.kind.demand_milli) for pod in pods] == [(0, 0, 0), (1, 470, 470), (4, 1000, 4000)]
    assert [pod.kind.models for pod in pods] == [frozenset(), frozenset(), frozenset({"T4", "P100"})]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        pytest.param("a,many,10,1,470,,", "cpu_milli: expected a whole number of at least 0, found 'many'", id="a word"),
        pytest.param("a,-1,10,1,470,,", "cpu_milli: expected a whole number of at least 0, found '-1'", id="below 0"),
        pytest.param("a,1,10,1,475,,", "gpu_milli: expected a multiple of 10 up to 1000, found '475'", id="half a percent"),
        pytest.param("a,1,10,1,2000,,", "gpu_milli: expected a multiple of 10 up to 1000, found '2000'", id="more than a GPU"),
        pytest.param("a,1,10,1,470,,soon", "creation_time: expected seconds of at least 0, found 'soon'", id="no time"),
        pytest.param("a,1,10,1,470,,nan", "creation_time: expected seconds of at least 0, found 'nan'", id="not a number"),
    ],
)
def test_invalid_cell_is_refused_by_line_and_column(tmp_path, row, says):
    with pytest.raises(TraceError) as caught:
        read_pods(write(tmp_path, "good,1,10,1,470,,5", row))
    assert str(caught.value) == f"{tmp_path}/pods.csv, line 3, column {says}"


def test_missing_list_or_column_is_refused(tmp_path):
    file = tmp_path / "pods.csv"
    file.write_text("name,cpu\na,1\n")
    with pytest.raises(TraceError, match="cpu_milli"):
        read_pods(file)
    with pytest.raises(TraceError, match="none"):
        read_nodes(tmp_path / "none.csv")


def test_arrivals_are_all_pods_and_then_more_up_to_the_limit():
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    limit = 4 * capacity_milli(nodes)
    order = arrivals(pods, 1, limit)
    asked = sum(pod.kind.demand_milli for pod in order)
    assert limit - 8000 < asked <= limit
    assert {pod.name for pod in pods} <= {pod.name for pod in order}
    assert len({pod.name for pod in order}) == len(order)
    assert order == arrivals(pods, 1, limit) != arrivals(pods, 2, limit)


def test_of_a_trace_beyond_the_limit_pods_are_left_out():
    pods = read_pods(pod_lists(TRACE)["small"])
    order = arrivals(pods, 1, 5000)
    assert sum(pod.kind.demand_milli for pod in order) <= 5000
    assert len(order) < len(pods)


def test_only_pods_with_part_of_gpu_get_separate_compute():
    pods = read_pods(pod_lists(TRACE)["small"])
    changed = with_own_cores(pods, 1)
    for before, after in zip(pods, changed, strict=True):
        if 0 < before.kind.milli < 1000:
            assert 0 < after.kind.cores_milli <= 1000
            assert after.kind.cores_milli % 10 == 0
            assert after.kind.in_one_dimension().milli == max(before.kind.milli, after.kind.cores_milli)
        else:
            assert after == before
    assert {pod.kind.cores_milli for pod in changed} > {None}


@pytest.mark.parametrize("name", MIXES)
def test_mix_changes_only_what_it_names(name):
    nodes, pods = read_nodes(TRACE / NODE_LIST), read_pods(pod_lists(TRACE)["small"])
    changed_nodes, changed = MIXES[name](nodes, pods, 1)
    assert [one.name for one in changed] == [one.name for one in pods]
    assert changed_nodes[: len(nodes)] == nodes
    assert sum(one.gpus for one in changed_nodes) == sum(one.gpus for one in nodes)
    assert (len(changed_nodes) > len(nodes)) == (name == "nodes-without-gpus")
    shared = [(before.kind, after.kind) for before, after in zip(pods, changed, strict=True) if before.kind.size == "share"]
    other = [(before.kind, after.kind) for before, after in zip(pods, changed, strict=True) if before.kind.size != "share"]
    assert any(before != after for before, after in shared) == (name in ("own-compute", "much-memory", "much-cpu"))
    assert any(before != after for before, after in other) == (name == "much-cpu")
    assert all(after.milli == before.milli and after.gpus == before.gpus for before, after in (*shared, *other))
