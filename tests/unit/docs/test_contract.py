"""docs/contract.md is what the code says today, and says something of everything."""

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
SPEC = importlib.util.spec_from_file_location("make_contract", DOCS / "make_contract.py")


def generated() -> str:
    assert SPEC is not None
    assert SPEC.loader is not None
    module = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(module)
    return module.page()


def test_the_page_is_current():
    assert (DOCS / "contract.md").read_text() == generated(), "run .venv/bin/python docs/make_contract.py"


def test_every_name_has_a_meaning():
    rows = re.findall(r"^\| `(\S+)` \| (.*?) ?\|", generated(), re.MULTILINE)
    assert len(rows) > 150
    assert [name for name, meaning in rows if not meaning] == ["healthy"]


def test_every_metric_of_ours_that_alerts_and_dashboards_read_is_on_the_page():
    monitoring = DOCS.parent / "deploy/monitoring"
    texts = [path.read_text() for path in (monitoring / "alerts.yaml", *sorted((monitoring / "dashboards").glob("*.json")))]
    read = {re.sub(r"_(total|bucket)$", "", name) for text in texts for name in re.findall(r"\baliquot_[a-z0-9_]+", text)}
    listed = set(re.findall(r"^\| `(aliquot_\w+)` \|", (DOCS / "contract.md").read_text(), re.MULTILINE))
    assert len(read) > 30
    assert read - listed == set()
