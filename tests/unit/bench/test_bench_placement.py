# SPDX-License-Identifier: Apache-2.0
"""The placement benchmark says what it checked."""

import json

import pytest

from aliquot_lab.simulate import topology
from tests.bench import bench_placement
from tests.unit.aliquot_lab.simulate.test_trace import TRACE


@pytest.fixture(autouse=True)
def links(monkeypatch):
    """Links need half a minute, and are not the matter here."""
    found = [topology.LinkQuality("machine", chooser, 1.0, 1.0, 1.0) for chooser in ("ours", "first-fit")]
    monkeypatch.setattr(topology, "compare", lambda: found)
    monkeypatch.delenv(bench_placement.ENVIRONMENT, raising=False)


def test_without_trace_last_line_says_that_goal_was_not_checked(capsys):
    assert bench_placement.main([]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("THE AIM OF ALLOCATION WAS NOT CHECKED")
    assert bench_placement.ENVIRONMENT in last


def test_all_six_others_are_replayed_and_held_against_what_was_published(capsys, monkeypatch):
    asked = []

    def replayed(options):
        asked.append(options.policies)
        means = {policy: [90.0, 91.0] for policy in options.policies}
        published = {policy: [89.0, 90.5] for policy in bench_placement.PEERS}
        return json.dumps({"means": {"list": means}, "published": {"list": published}, "notedPercent": [100, 130]})

    monkeypatch.setattr(bench_placement, "run", replayed)
    assert bench_placement.main(["--trace", str(TRACE)]) == 0
    assert asked == [("frag", "random", "dotprod", "gpuclustering", "gpupacking", "bestfit", "fgd")]
    out = capsys.readouterr().out
    assert "1.00/0.50" in out
    assert "NOT CHECKED" not in out
