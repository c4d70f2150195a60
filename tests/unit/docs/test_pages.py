# SPDX-License-Identifier: Apache-2.0
"""The pages hang together: the index has them all, every link leads somewhere, and every figure is what its script draws."""

import importlib.util
import re
from pathlib import Path

import pytest

from agent.settings import Settings
from aliquot import contract

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
_OUTSIDE_DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "CHANGELOG/CHANGELOG-0.1.md",
    "deploy/monitoring/README.md",
    "deploy/helm/README.md",
)
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in _OUTSIDE_DOCS)])
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_index_has_every_page():
    linked = set(_LINK.findall((DOCS / "README.md").read_text()))
    records = {str(page.relative_to(DOCS)) for page in (DOCS / "decisions").glob("0*.md")}  # test_front_door.py: their own index has them
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"} - records <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    broken = []
    for link in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_and_benchmarks_that_a_page_names_exist(page):
    text = page.read_text()
    files = set(re.findall(r"\b((?:tests|deploy|docs)/[\w./-]+\.\w+)", text))
    files |= {name.replace(".", "/") + ".py" for name in re.findall(r"-m (tests\.bench\.\w+)", text)}
    assert {name for name in files if not (ROOT / name).exists()} == set()
    scenarios = " ".join(f"{path.stem} {path.read_text()}" for path in (ROOT / "tests/e2e").glob("test_*.py"))
    assert {word for word in re.findall(r'ARGS="-k (\w+)"', text) if not re.search(rf"test_\w*{word}", scenarios)} == set()


@pytest.mark.parametrize("name", ["architecture", "shares"])
def test_a_figure_is_what_its_script_draws(name):
    specification = importlib.util.spec_from_file_location(f"make_{name}", DOCS / f"figures/make_{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    import sys

    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    assert (DOCS / f"figures/{name}.svg").read_text() == module.drawing(), f"run docs/figures/make_{name}.py"


def test_every_row_of_the_comparison_says_what_shows_it():
    rows = [line.strip("|").split("|") for line in (DOCS / "measurements/comparison.md").read_text().splitlines() if line.startswith("| ")]
    header, *body = rows
    assert header[-1].strip() == "shown by"
    assert len(body) > 20
    assert [row[0].strip() for row in body if len(row) != len(header) or not row[-1].strip()] == []


def test_uninstalling_names_all_that_an_agent_leaves_behind():
    section = (DOCS / "use/operations.md").read_text().partition("## Uninstall")[2].partition("\n## ")[0]
    settings = Settings(node_name="node")
    published = {contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES, contract.NODE_CONDITION_GPUS_HEALTHY}
    files = {str(settings.state_dir), str(settings.runtime_dir), f"{settings.cdi_dir}/{contract.CDI_FILE_PREFIX}"}
    labels = {"nvidia.com/gpu.deploy.device-plugin-", "aliquot.dev/agent", contract.LABEL_WEBHOOK, contract.LABEL_VGPU_MEMORY}
    assert {name for name in published | files | labels if name not in section} == set()


def test_uninstalling_says_first_which_pods_cannot_outlive_the_agent():
    before = (DOCS / "use/operations.md").read_text().partition("## Uninstall")[2].partition("\n2. ")[0]
    settings = Settings(node_name="node")
    assert {name for name in ("isolation: mps", "migStrategy: dynamic", f"{settings.state_dir}/mig") if name not in before} == set()


@pytest.mark.parametrize(
    ("page", "given_over_by"),
    [
        ("docs/use/install.md", "kubectl label node NODE nvidia.com/gpu.deploy.device-plugin=false"),
        ("docs/use/migration.md", "kubectl label node NODE gpu- aliquot.dev/agent=true"),
        ("deploy/helm/aliquot/templates/NOTES.txt", "kubectl label node NODE nvidia.com/gpu.deploy.device-plugin=false"),
    ],
)
def test_node_of_other_device_plugin_is_drained_before_handover(page, given_over_by):
    drained, _, given = (ROOT / page).read_text().partition(given_over_by)
    assert "kubectl drain NODE" in drained[-400:]
    assert "kubectl uncordon NODE" in given[:200]
