# SPDX-License-Identifier: Apache-2.0
"""The curve of the extender's benchmark compares what can be compared."""

import sys

from tests.bench import bench_extender


def test_the_points_of_the_curve_differ_in_the_number_of_nodes_alone(monkeypatch, capsys):
    asked = []

    def measured(nodes, pods, decisions, pause_seconds):
        asked.append((nodes, pods))
        assert pause_seconds == bench_extender.PAUSE_SECONDS
        cost = {"cpu_p50_ms": nodes / 1000, "cpu_p99_ms": 2.0}
        return {"nodes": nodes, "pods": pods, "verbs": {"filter + prioritize": cost}}

    monkeypatch.setattr(bench_extender, "measure", measured)
    monkeypatch.setattr(bench_extender, "show", lambda result: True)
    monkeypatch.setattr(sys, "argv", ["bench_extender"])
    assert bench_extender.main() == 0
    (main, *curve) = asked
    assert main == (5000, 50_000)
    assert [nodes for nodes, _ in curve] == [1000, 2000, 5000, 15_000]
    assert {pods / nodes for nodes, pods in curve} == {2.0}
    assert [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if "#" in line and line.startswith("|")] == [
        "1000",
        "2000",
        "5000",
        "15000",
    ]
