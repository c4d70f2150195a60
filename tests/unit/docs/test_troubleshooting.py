# SPDX-License-Identifier: Apache-2.0
"""docs/use/troubleshooting.md has every event, every reason and every kind that a metric's label can have, and names what exists."""

import html
import re
from pathlib import Path

import pytest

from agent.core.audit import FindingKind
from agent.core.drift import DriftKind
from agent.core.health import HealthState
from agent.core.refusal import Reason
from aliquot import contract
from aliquot.placement.fit import Reject
from aliquot_cli import exit_codes
from aliquot_cli.__main__ import main
from scheduler_plugin.core.cluster.reasons import NodeReason

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "use/troubleshooting.md").read_text()
CONTRACT = (DOCS / "reference/contract.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("A pod waits (Pending)", [reason.label for reason in NodeReason if reason is not NodeReason.FITS]),
        ("A pod was placed and does not start", [*Reason, *Reject]),
        ("Something uses what it was not granted", list(FindingKind)),
        ("Records differ (drift)", list(DriftKind)),
        ("A GPU is out of service", list(HealthState)),
    ],
)
def test_every_reason_and_kind_has_its_row(where, names):
    rows = [line for line in section(where).splitlines() if line.startswith("|")]
    first_cells = " ".join(row.split("|")[1] for row in rows)
    assert [str(name) for name in names if f"`{name}`" not in first_cells] == []


def test_sentences_in_events_are_quoted_as_they_are():
    rows = html.unescape(section("A pod waits (Pending)"))
    assert [reason.label for reason in NodeReason if f"| `{reason.label}` | {reason.sentence} |" not in rows] == ["fits"]


def test_every_event_and_condition_is_on_the_page():
    names = [value for name, value in vars(contract).items() if name.startswith(("EVENT_REASON_", "NODE_CONDITION_"))]
    assert len(names) > 8
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_every_exit_code_of_a_failure_has_its_row():
    rows = section("A command fails")
    assert [code for code in exit_codes.TABLE if f"| {code} |" not in rows] == [exit_codes.OK]


def test_metrics_settings_annotations_and_commands_that_the_page_names_exist():
    metrics = set(re.findall(r"`(aliquot_\w+)`", PAGE))
    assert {name for name in metrics if f"`{name.removesuffix('_total')}`" not in CONTRACT} == set()
    settings = set(re.findall(r"`([a-z]+[A-Z]\w+)(?::[^`]*)?`", PAGE)) - {"nodeName", "schedulerName"}
    assert {name for name in settings if f"| `{name}` |" not in CONTRACT} == set()
    annotations = set(re.findall(r"aliquot\.dev/[\w-]+", PAGE))
    assert {name for name in annotations if f"`{name}`" not in CONTRACT} == set()
    commands = set(re.findall(r"^aliquot ([\w-]+)|`aliquot ([\w-]+)", PAGE, re.MULTILINE))
    assert {one or other for one, other in commands} <= set(main.list_commands(None))
    assert len(metrics) > 5
    assert len(settings) > 5


def test_alerts_that_the_page_names_exist():
    alerts = (DOCS.parent / "deploy/monitoring/alerts.yaml").read_text()
    named = set(re.findall(r"alert\s+`(Aliquot\w+)`", PAGE))
    assert named
    assert {name for name in named if f"alert: {name}\n" not in alerts} == set()
