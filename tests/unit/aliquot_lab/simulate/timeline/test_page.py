# SPDX-License-Identifier: Apache-2.0
"""The report loads nothing, is complete, and is the same bytes for the same result."""

import re
from html.parser import HTMLParser

import pytest

from aliquot_lab.simulate.timeline.chart import COLOURS, Bar, Line, bar_chart, legend, line_chart
from aliquot_lab.simulate.timeline.page import page
from aliquot_lab.simulate.timeline.run import Setting, simulate
from aliquot_lab.simulate.timeline.text import duration
from tests.unit.aliquot_lab.simulate.timeline.clusters import node, pod, share
from tests.unit.aliquot_lab.simulate.timeline.test_command import LISTS, call

POLICIES = ("frag", "hami-binpack")
_VOID = {"meta"}


class Balance(HTMLParser):
    """Fails at a tag that closes another one than the last that was opened."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(text):
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    return parser.counts


def report(pods, seed=1):
    return page([simulate(policy, Setting([node(gpus=2)], pods, seed=seed)) for policy in POLICIES], "aliquot simulate <&>")


def busy():
    return [pod(f"p{number}", at=number, lasts=20.0, **share()) for number in range(12)]


def test_page_is_complete_and_loads_nothing():
    text = report(busy())
    counts = tags(text)
    assert "script" not in counts
    assert not re.search(r"(src|href)=|url\(|@import|https?:", text)
    assert counts["polyline"] == 3 * len(POLICIES)
    assert counts["rect"] == len(POLICIES)  # one class waits
    assert "aliquot simulate &lt;&amp;&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert all(text.count(policy) > 8 for policy in POLICIES)
    assert len(re.findall("--c[0-9]+: #", text)) == 2 * COLOURS


def test_same_result_is_the_same_bytes_and_another_seed_is_not():
    assert report(busy()) == report(busy())
    assert report(busy()) != report(busy(), seed=2)


@pytest.mark.parametrize(
    "trivial",
    [
        pytest.param(pod("p", lasts=None), id="never ends"),
        pytest.param(pod("p", lasts=0.0), id="takes no time"),
        pytest.param(pod("p", gpus=3), id="refused"),
    ],
)
def test_page_of_a_trivial_list_is_whole(trivial):
    assert tags(report([trivial]))["table"] >= 1


def test_command_writes_the_report_or_says_why_not(tmp_path):
    first, again = tmp_path / "a.html", tmp_path / "b.html"
    for file in (first, again):
        assert call(*LISTS, "--report", str(file)).exit_code == 0
    assert first.read_bytes() == again.read_bytes()
    assert tags(first.read_text())["svg"] > 4
    assert "--nodes nodes.csv --pods pods.csv --queues queues.csv --policy frag --seed 42" in first.read_text()
    shown = call(*LISTS, "--report", str(tmp_path / "none" / "a.html"))
    assert shown.exit_code == 1
    assert "expected to write the report there: No such file" in shown.output


def test_lines_beyond_the_colours_are_dashed():
    names = [f"policy-{number}" for number in range(COLOURS + 1)]
    drawn = line_chart("many", [Line(name, [(0.0, 1.0), (1.0, 2.0)]) for name in names])
    assert drawn.count("class='c0'") == drawn.count("class='c0 again'") == 1
    assert legend(names).count("again") == 1


def test_values_stay_inside_the_drawing():
    drawn = line_chart("one", [Line("a", [(0.0, 0.0), (50.0, 99.0), (100.0, 3.0)])])
    (points,) = re.findall("points='([^']*)'", drawn)
    assert all(0 <= float(x) <= 860 and 0 <= float(y) <= 240 for x, y in (point.split(",") for point in points.split()))
    widths = [
        float(width) for width in re.findall("width='([0-9.]+)'", bar_chart("bars", [("g", [Bar("a", 10.0, "x"), Bar("b", 5.0, "y")])]))
    ]
    assert widths[0] == pytest.approx(2 * widths[1])


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 s"), (59.4, "59 s"), (90, "1.5 min"), (5400, "1.5 h"), (95_040, "26.4 h"), (345_600, "4.0 d")]
)
def test_duration_has_one_unit(seconds, shown):
    assert duration(seconds) == shown
