# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from aliquot_lab.simulate.timeline.files import NODE_COLUMNS, POD_COLUMNS, QUEUE_COLUMNS, load_nodes, load_pods, load_queues
from aliquot_lab.simulate.timeline.model import PodKind, Queue
from aliquot_lab.simulate.timeline.workloads import check_queues, workloads_of
from aliquot_lab.simulate.trace import NODE_LIST, TraceError
from tests.unit.aliquot_lab.simulate.test_trace import TRACE
from tests.unit.aliquot_lab.simulate.timeline.clusters import node, pod

NODES = "name,cpu,ram_mib,gpus,gpu_memory_mib,mig,count,shares_per_gpu\n"
PODS = "name,gpus,gpu_memory_mib,gpu_share_percent,cores_percent,mig,gang,gang_size,priority,queue,count,arrival_seconds,cpu\n"
A_NODE = "n,8,1000,4,81920,,,\n"


def write(tmp_path, text, name="list.csv"):
    file = tmp_path / name
    file.write_text(text)
    return file


def pod_of(tmp_path, row):
    return load_pods(write(tmp_path, PODS + row + "\n"), [node()])


def test_row_becomes_as_many_nodes_as_count_says(tmp_path):
    nodes = load_nodes(write(tmp_path, NODES + "b,0.5,1000,2,40960,1g.5gb+3g.20gb,2,8\na,1,1000,0,,,,\n"))
    assert [one.name for one in nodes] == ["a", "b-0", "b-1"]
    assert (nodes[1].cpu_milli, nodes[1].mig, nodes[1].shares_per_gpu) == (500, ("1g.5gb", "3g.20gb"), 8)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        pytest.param("p,,,,,,,,,,,,", PodKind(), id="no GPU"),
        pytest.param("p,2,,,,,,,,,,,", PodKind(gpus=2), id="whole GPUs"),
        pytest.param("p,1,8000,,30,,,,,,,,", PodKind(gpus=1, memory_mib=8000, cores_percent=30, shared=True), id="memory and cores"),
        pytest.param("p,1,,25,,,,,,,,,", PodKind(gpus=1, memory_percent=25, shared=True), id="a quarter of the memory"),
        pytest.param("p,1,,100,,,,,,,,,", PodKind(gpus=1), id="all memory"),
        pytest.param("p,,,,,1g.10gb,,,,,,,1.5", PodKind(cpu_milli=1500, mig="1g.10gb"), id="a MIG instance"),
    ],
)
def test_cells_of_a_pod_become_its_request(tmp_path, row, kind):
    (one,) = pod_of(tmp_path, row)
    assert one.kind == kind


@pytest.mark.parametrize(
    ("row", "column", "expected", "found"),
    [
        pytest.param("P,1,,,,,,,,,,,", "name", "lower-case", "'P'", id="upper case"),
        pytest.param(",1,,,,,,,,,,,", "name", "a name", "''", id="no name"),
        pytest.param("p,one,,,,,,,,,,,", "gpus", "a whole number from 0 to 64", "'one'", id="a word"),
        pytest.param("p,65,,,,,,,,,,,", "gpus", "a whole number from 0 to 64", "'65'", id="too many"),
        pytest.param("p,1,0,,,,,,,,,,", "gpu_memory_mib", "at least 1", "'0'", id="no memory"),
        pytest.param("p,1,1,50,,,,,,,,,", "gpu_share_percent", "an empty cell", "'50'", id="memory and share"),
        pytest.param("p,1,,101,,,,,,,,,", "gpu_share_percent", "from 1 to 100", "'101'", id="more than a GPU"),
        pytest.param("p,0,,,50,,,,,,,,", "cores_percent", "an empty cell", "'50'", id="cores without GPU"),
        pytest.param("p,1,,,,1g.10gb,,,,,,,", "gpus", "an empty cell", "'1'", id="GPU and MIG"),
        pytest.param("p,,,,,big,,,,,,,", "mig", "a MIG profile", "'big'", id="no profile"),
        pytest.param("p,,,,,,g,,,,,,", "gang", "request a GPU", "'g'", id="gang without GPU"),
        pytest.param("p,1,,,,,,2,,,,,", "gang", "the name of the gang", "''", id="size without gang"),
        pytest.param("p,1,,,,,g,3,,,2,,", "gang_size", "which is 2", "'3'", id="wrong size"),
        pytest.param("p,1,,,,,,,high,,,,", "priority", "a whole number", "'high'", id="priority class"),
        pytest.param("p,1,,,,,,,,,0,,", "count", "from 1", "'0'", id="no pod"),
        pytest.param("p,1,,,,,,,,,,-1,", "arrival_seconds", "at least 0", "'-1'", id="before the beginning"),
        pytest.param("p,1,,,,,,,,,,nan,", "arrival_seconds", "at least 0", "'nan'", id="not a number"),
    ],
)
def test_invalid_cell_is_named_by_file_line_and_column(tmp_path, row, column, expected, found):
    with pytest.raises(TraceError) as caught:
        pod_of(tmp_path, f"good,1,,,,,,,,,,,\n{row}")
    assert str(caught.value).startswith(f"{tmp_path}/list.csv, line 3, column {column}: expected ")
    assert expected in str(caught.value)
    assert str(caught.value).endswith(f", found {found}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "line 1: expected the names of the columns, found an empty file", id="empty"),
        pytest.param("cpu,ram_mib,gpus\n", "expected the columns name, cpu, ram_mib, gpus, found no name", id="missing"),
        pytest.param("name,cpu,ram_mib,gpus,vram\n", "found 'vram'", id="unknown"),
        pytest.param("name,name,cpu,ram_mib,gpus\n", "expected each column once", id="twice"),
        pytest.param(NODES + "n,8,1000,4\n", "line 2: expected 8 cells as in the header, found 4", id="too few cells"),
        pytest.param(NODES + "n,8,1000,0,,,,\n", "expected a node with GPUs", id="no GPU"),
        pytest.param(NODES + A_NODE + A_NODE, "expected each name once", id="name twice"),
        pytest.param(NODES + "n,8,1000,1,,,,\n", "column gpu_memory_mib: expected a whole number of at least 1, found ''", id="no memory"),
        pytest.param(NODES + "n,8,1000,1,81920,4g.40gb+4g.40gb,,\n", "column mig: expected instances that fit", id="too many slices"),
        pytest.param(NODES + "n,8,1000,1,81920,1g.5gb,,\n", "found 1g.5gb", id="profile of another GPU"),
        pytest.param(NODES + "n,8,1000,1,900000,on-demand,,\n", "a GPU of at most", id="no GPU with MIG"),
    ],
)
def test_invalid_list_of_nodes_is_refused(tmp_path, text, message):
    with pytest.raises(TraceError) as caught:
        load_nodes(write(tmp_path, text))
    assert message in str(caught.value)
    assert str(tmp_path / "list.csv") in str(caught.value)


def test_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "list.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        load_nodes(tmp_path / "list.csv")
    with pytest.raises(TraceError, match="No such file"):
        load_nodes(tmp_path / "none.csv")


def test_members_of_a_gang_share_priority_and_queue(tmp_path):
    with pytest.raises(TraceError, match=r"line 3, column priority: expected 1 as for a of the same gang, found '2'"):
        pod_of(tmp_path, "a,1,,,,,g,,1,,,,\nb,1,,,,,g,,2,,,,")


def test_queues_are_read_and_unknown_ones_refused(tmp_path):
    queues = load_queues(write(tmp_path, "name,gpus,borrow_gpus,reclaim\na,1.5,,\nb,2,1,yes\n"))
    assert queues == [Queue("a", 1500), Queue("b", 2000, 1000, reclaims=True)]
    check_queues([pod("p", queue="a")], queues)
    with pytest.raises(TraceError, match=r"pod p, column queue: expected a name of the list of queues \(a, b\), found 'c'"):
        check_queues([pod("p", queue="c")], queues)


def test_lists_of_openb_are_understood():
    nodes = load_nodes(TRACE / NODE_LIST)
    pods = load_pods(TRACE / "openb_pod_list_small.csv", nodes)
    assert {one.gpu_memory_mib for one in nodes} == {1000}
    shares = [one.kind for one in pods if one.kind.shared]
    assert shares
    assert all(kind.memory_mib == kind.cores_percent * 10 for kind in shares)
    assert any(one.duration_seconds for one in pods)


def test_workloads_are_gangs_and_pods_in_order_of_arrival():
    pods = [pod("late", at=9), pod("m0", at=1, gang="late"), pod("m1", at=5, gang="late", lasts=30.0), pod("first", at=0)]
    found = workloads_of(pods, 1)
    assert [(one.name, len(one.pods), one.arrival_seconds, one.number) for one in found] == [
        ("first", 1, 0, 0),
        ("late", 2, 5, 1),
        ("late", 1, 9, 2),
    ]
    assert found[1].duration_seconds == 30
    assert {one.name for one in found if one.is_gang} == {"late"}


def test_every_column_is_documented():
    page = (Path(__file__).parents[5] / "docs/use/simulate.md").read_text()
    for column in (*NODE_COLUMNS, *POD_COLUMNS, *QUEUE_COLUMNS):
        assert f"`{column}`" in page
