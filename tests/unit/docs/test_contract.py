# SPDX-License-Identifier: Apache-2.0
"""docs/reference/contract.md is what the code says today, and says something of everything."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[3] / "docs"
SPEC = importlib.util.spec_from_file_location("make_contract", DOCS / "reference/make_contract.py")


def generator() -> ModuleType:
    assert SPEC is not None
    assert SPEC.loader is not None
    module = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(module)
    return module


def generated() -> str:
    return generator().page()


def test_the_page_is_current():
    assert (DOCS / "reference/contract.md").read_text() == generated(), "run .venv/bin/python docs/reference/make_contract.py"


def test_table_of_other_systems_words_is_current():
    page = (DOCS / "use/migration.md").read_text()
    assert page == generator().with_words(page), "run .venv/bin/python docs/reference/make_contract.py"
    assert "| HAMi | annotation | `nvidia.com/use-gputype` | translated: " in page


def test_every_name_has_a_meaning():
    rows = re.findall(r"^\| `(\S+)` \| (.*?) ?\|", generated(), re.MULTILINE)
    assert len(rows) > 150
    assert [name for name, meaning in rows if not meaning] == []


def test_every_metric_in_alerts_and_dashboards_is_on_page():
    monitoring = DOCS.parent / "deploy/monitoring"
    texts = [path.read_text() for path in (monitoring / "alerts.yaml", *sorted((monitoring / "dashboards").glob("*.json")))]
    read = {re.sub(r"_(total|bucket)$", "", name) for text in texts for name in re.findall(r"\baliquot_[a-z0-9_]+", text)}
    listed = set(re.findall(r"^\| `(aliquot_\w+)` \|", (DOCS / "reference/contract.md").read_text(), re.MULTILINE))
    assert len(read) > 30
    assert read - listed == set()
