# SPDX-License-Identifier: Apache-2.0
"""The table of the DRA driver's scenarios names tests that exist, and the scenarios' own docstrings are in it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/development/dra-scenarios.md").read_text()
ROWS = dict(re.findall(r"^\| (T\d+) \|.*\| (.*) \|$", PAGE, re.MULTILINE))


def test_every_named_test_exists():
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - defined == set()
    assert all("`test_" in tests for tests in ROWS.values())


def test_scenarios_with_a_number_in_their_docstring_are_in_the_table():
    source = (ROOT / "tests/e2e/test_dra.py").read_text()
    documented = re.findall(r'def (test_\w+)\([^"]*"""([^"]*)"""', source)
    numbered = {(number, name) for name, text in documented for number in re.findall(r"T\d+", text)}
    assert len(numbered) > 15
    assert {(number, name) for number, name in numbered if f"`{name}`" not in ROWS.get(number, "")} == set()
