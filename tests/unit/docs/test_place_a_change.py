# SPDX-License-Identifier: Apache-2.0
"""docs/development names files, names in them, and tests; all of them exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEVELOPMENT = ROOT / "docs/development"
PAGE = (DEVELOPMENT / "place-a-change.md").read_text()
RECIPES = ("A setting", "A metric", "A refusal reason", "A CUDA entry point", "A drift kind", "A word of a vocabulary", "A kind of owner")
TOP_LEVEL = tuple(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "build")


def rows(text: str) -> list[tuple[str, list[str]]]:
    """File and names of each row of the recipes' tables."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [(file.strip(" `"), re.findall(r"`([^`]+)`", names)) for file, names, _ in cells]


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


ROWS = rows(PAGE)


def test_page_has_a_recipe_with_a_test_for_each_change() -> None:
    assert tuple(re.findall(r"^## (.*)$", PAGE, re.MULTILINE)) == RECIPES
    assert [title for title in RECIPES if not any(file.startswith("tests/") for file, _ in rows(section(title)))] == []


@pytest.mark.parametrize(("file", "names"), ROWS, ids=[file for file, _ in ROWS])
def test_file_of_a_row_exists_and_has_its_names(file: str, names: list[str]) -> None:
    path = ROOT / file
    assert path.is_file(), f"{file} moved: correct docs/development/place-a-change.md"
    text = path.read_text()
    assert names, f"{file}: the column 'look for' is empty"
    assert [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)] == []


@pytest.mark.parametrize(
    "page", sorted(DEVELOPMENT.glob("*.md")) + sorted((ROOT / "docs/decisions").glob("*.md")), ids=lambda page: page.stem
)
def test_paths_of_the_tree_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{'|'.join(map(re.escape, TOP_LEVEL))})/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []
