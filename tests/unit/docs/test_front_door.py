# SPDX-License-Identifier: Apache-2.0
"""What a new maintainer meets first keeps its form: invariants by number, decision records, issue forms."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DECISIONS = ROOT / "docs/decisions"
RECORDS = sorted(DECISIONS.glob("[0-9]*.md"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
MOST_LINES = 40
INPUTS = {"textarea", "input", "dropdown", "checkboxes"}


def test_architecture_states_invariants_one_to_seven_with_their_tests() -> None:
    text = (ROOT / "docs/development/architecture.md").read_text()
    sections = re.findall(r"^### (I\d): .*\n((?:(?!^#).*\n?)*)", text, re.MULTILINE)
    assert [name for name, _ in sections] == [f"I{number}" for number in range(1, 8)]
    assert [name for name, body in sections if "`tests/" not in body] == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_decision_record_is_short_and_complete(record: Path) -> None:
    text = record.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert re.match(rf"# {record.name[:4]}: .+\n\nStatus: (proposed|accepted|replaced by \[.+\]\(.+\))\. Date: \d{{4}}-\d\d-\d\d\.\n", text)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]


def test_index_of_decisions_has_every_record_in_order() -> None:
    assert re.findall(r"^\| \[\d{4}\]\((.+?)\)", (DECISIONS / "README.md").read_text(), re.MULTILINE) == [path.name for path in RECORDS]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_form_is_one_that_the_code_host_accepts(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= content.keys()
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= INPUTS
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
