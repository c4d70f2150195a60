from pathlib import Path

import pytest

from aliquot.simulate.trace import NODE_LIST, TraceError, arrivals, capacity_milli, pod_lists, read_nodes, read_pods, with_own_cores

TRACE = Path(__file__).parent / "trace"
HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"


def write(tmp_path, *rows):
    file = tmp_path / "pods.csv"
    file.write_text(HEADER + "\n".join(rows))
    return file


def test_pods_of_several_gpus_have_all_of_each_and_others_what_they_ask(tmp_path):
    pods = read_pods(write(tmp_path, "a,1000,10,0,0,", "b,1000,10,1,470,", "c,1000,10,4,1000,T4|P100"))
    assert [(pod.kind.gpus, pod.kind.milli, pod.kind.demand_milli) for pod in pods] == [(0, 0, 0), (1, 470, 470), (4, 1000, 4000)]
    assert [pod.kind.models for pod in pods] == [frozenset(), frozenset(), frozenset({"T4", "P100"})]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        pytest.param("a,many,10,1,470,", "cpu_milli", id="a word"),
        pytest.param("a,-1,10,1,470,", "cpu_milli", id="below 0"),
        pytest.param("a,1,10,1,475,", "multiple of 10", id="half a percent"),
        pytest.param("a,1,10,1,2000,", "up to 1000", id="more than a GPU"),
    ],
)
def test_a_row_that_means_nothing_is_refused_by_name(tmp_path, row, says):
    with pytest.raises(TraceError, match=says):
        read_pods(write(tmp_path, row))


def test_a_list_without_its_columns_or_that_is_not_there_is_refused(tmp_path):
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


def test_parts_of_gpus_get_compute_of_their_own_and_others_stay():
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
