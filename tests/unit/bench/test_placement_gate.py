# SPDX-License-Identifier: Apache-2.0
"""The gate of placement notices what it is there for."""

from dataclasses import replace

import pytest

from aliquot_lab.simulate.departures import DepartureResult, Waits
from aliquot_lab.simulate.run import Point, Result
from aliquot_lab.simulate.trace import NODE_LIST, pod_lists, read_nodes, read_pods
from tests.bench import placement_gate
from tests.bench.placement_gate import GENERATED, OTHERS, OURS, PEERS, curve_checks, generate, show, wait_checks

POINT = Point(50, 50.0, 10, {"8": 2, "1": 5})


def results(ours: Point) -> list[Result]:
    return [Result("list", policy, 1, (), (), 0.0, (ours if policy == OURS else POINT,)) for policy in (OURS, *PEERS, *OTHERS)]


def missed(checks) -> list[str]:
    return [kind for kind, found in checks.items() if any(check.margin < 0 for check in found)]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, []),
        ({"allocated_percent": 49.8}, []),
        ({"allocated_percent": 49.6}, ["allocated"]),
        ({"refused": {"2": 1, "4": 2}}, ["refused"]),
        ({"refused": {"1": 9, "share": 9}}, []),
        ({"whole_nodes": 9}, ["whole nodes"]),
    ],
)
def test_each_figure_below_the_others_is_missed(change, kinds):
    assert missed(curve_checks(results(replace(POINT, **change)))) == kinds


@pytest.mark.parametrize("best", [*PEERS, *OTHERS])
@pytest.mark.parametrize(("seconds", "kept"), [(0, True), (110, True), (111, False)])
def test_wait_is_missed_above_the_best_other_plus_tenth(seconds, kept, best, capsys):
    waits = {OURS: seconds, **dict.fromkeys((*PEERS, *OTHERS), 200), best: 100}
    found = [
        DepartureResult("list", policy, 1, 1, 8, 70.0, 0.0, 0.0, 0, None, {"8": Waits(1, 1, wait, wait)}) for policy, wait in waits.items()
    ]
    assert show({"waits": wait_checks(found, 0.7)}) is kept
    assert ("NO" in capsys.readouterr().out) is not kept


def test_generated_list_is_read_as_trace_and_depends_on_seed(tmp_path):
    lists = []
    for seed in (1, 1, 2):
        generate(tmp_path, seed)
        lists.append((read_nodes(tmp_path / NODE_LIST), read_pods(pod_lists(tmp_path)[GENERATED])))
    assert lists[0] == lists[1] != lists[2]
    nodes, pods = lists[0]
    assert sum(node.gpus == 8 for node in nodes) > len(nodes) // 2
    assert {pod.kind.size for pod in pods} >= {"0", "1", "8", "share"}
    assert all(pod.deleted_seconds > pod.created_seconds for pod in pods)


def test_without_trace_the_gate_says_that_the_list_is_generated(capsys, monkeypatch):
    monkeypatch.setattr(placement_gate, "judge", lambda *_: {"allocated": [placement_gate.Check("here", 1.0, 2.0, upper=False)]})
    assert placement_gate.main([]) == 1
    assert "nodes and pods are generated" in capsys.readouterr().out
