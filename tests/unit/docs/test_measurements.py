# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/development/measurements.md: arrows, complexity and widths on small trees."""

import ast
import subprocess
import textwrap
from pathlib import Path

import pytest

from docs.development import measurements


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py").replace("_c", ".c").replace("_md", ".md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.mark.parametrize(
    ("arrows", "fewest"),
    [
        pytest.param({"a": {"b"}, "b": {"c"}}, 0, id="one direction"),
        pytest.param({"a": {"b"}, "b": {"a"}}, 1, id="two rooms"),
        pytest.param({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, 1, id="circle of three"),
        pytest.param({"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}}, 3, id="each with each"),
        pytest.param({"hub": {"a", "b", "c"}, "a": {"hub"}, "b": {"hub"}, "c": {"hub"}}, 3, id="hub"),
        pytest.param({"a": {"b"}, "b": {"a"}, "c": {"d", "a"}, "d": {"c"}}, 2, id="two circles"),
    ],
)
def test_back_up_is_the_fewest_arrows_to_cut(arrows, fewest):
    assert measurements.back_up(arrows) == fewest


def test_circle_too_large_to_measure_is_an_error():
    rooms = [f"room{number}" for number in range(21)]
    with pytest.raises(ValueError, match="a circle of 21 rooms"):
        measurements.back_up({room: {*rooms} - {room} for room in rooms})


def test_imports_are_found_between_and_inside_packages(tmp_path):
    write(
        tmp_path,
        low__names_py="import os",
        high____init___py="",
        high__main_py="from low import names\nfrom high.core import plan\nimport low.names",
        high__core__plan_py="def late():\n    from ..main import run",
        tests__test_it_py="import high.main",
    )
    (tmp_path / "high/__init__.py").write_text("")
    assert measurements.python_arrows(tmp_path)["high"] == {"low"}
    assert measurements.back_up(measurements.python_arrows(tmp_path)) == 0
    assert measurements.back_up(measurements.python_arrows(tmp_path, "high")) == 1


def test_c_file_uses_what_it_includes_and_what_its_object_needs(tmp_path):
    shim, objects = tmp_path / "cuda_shim", tmp_path / "build/obj"
    (shim / "interpose").mkdir(parents=True)
    (shim / "interpose/limit.h").write_text("extern int aq_limit;\n")
    (shim / "interpose/memory.c").write_text('#include "interpose/limit.h"\nint aq_charge(int bytes) { return bytes; /* aq_log */ }\n')
    (shim / "interpose/limit.c").write_text("int aq_log(void);\nint aq_limit;\nint aq_set(void) { return aq_log(); }\n")
    (shim / "interpose/log.c").write_text("int aq_charge(int);\nint aq_log(void) { return aq_charge(1); }\n")
    with pytest.raises(FileNotFoundError, match="make native"):
        measurements.c_arrows(tmp_path)
    (objects / "interpose").mkdir(parents=True)
    for source in (shim / "interpose").glob("*.c"):
        subprocess.run(["cc", f"-I{shim}", "-c", "-o", objects / f"interpose/{source.stem}.o", source], check=True)
    assert measurements.c_arrows(tmp_path) == {"memory": {"limit"}, "limit": {"log"}, "log": {"memory"}}
    assert measurements.circles(measurements.c_arrows(tmp_path)) == [["limit", "log", "memory"]]
    assert measurements.c_arrows(tmp_path, by_folder=True) == {}


@pytest.mark.parametrize(
    ("body", "complexity"),
    [
        pytest.param("return x", 1, id="straight"),
        pytest.param("return 1 if x and y or z else 2", 4, id="conditions"),
        pytest.param("for a in x:\n    pass\nelse:\n    pass", 3, id="loop with else"),
        pytest.param("try:\n    x()\nexcept OSError:\n    pass\nexcept KeyError:\n    pass", 3, id="handlers"),
        pytest.param("return [a for a in x if a if b]", 4, id="comprehension"),
        pytest.param("match x:\n    case 1:\n        pass\n    case _:\n        pass", 2, id="cases"),
        pytest.param("def inner():\n    if x:\n        pass\nreturn inner", 1, id="inner function apart"),
    ],
)
def test_complexity_counts_branches_as_radon_does(body, complexity):
    module = ast.parse("def function():\n" + textwrap.indent(body, "    "))
    assert next(measurements.complexities(module)) == ("function", complexity)


def test_widest_constructor_counts_keyword_parameters(tmp_path):
    write(tmp_path, agent__a_py="class Narrow:\n    def __init__(self, a): ...\nclass Wide:\n    def __init__(self, a, *, b, c=1): ...")
    assert measurements.widest_constructor(tmp_path) == (4, "Wide in agent/a.py")


def test_page_gets_the_figures_in_its_last_column():
    page = "| measure | goal | before | now |\n|---|---|---|---|\n| names | 3 | 5 | |\n| other | | 1 | 2 |\n"
    assert measurements.filled(page, {"names": "4"}) == page.replace("5 | |", "5 | 4 |")


def test_page_has_a_row_for_each_measure(tmp_path):
    """On a small tree: the names of the measures do not depend on its size, and the whole tree takes half a minute."""
    write(
        tmp_path,
        docs__page_md="A page.",
        docs__reference__contract_md="| a | b |",
        agent____init___py="",
        agent__part_py='"""A part."""\nclass Part:\n    """A part."""\n    def __init__(self, one): raise ValueError("no such part")',
        tests__test_part_py='"""Tests."""\ndef test_part(): ...',
        cuda_shim__interpose__part_c="/* A part. */ int aq_part;",
    )
    objects = tmp_path / "build/obj/interpose"
    objects.mkdir(parents=True)
    subprocess.run(["cc", "-c", "-o", objects / "part.o", tmp_path / "cuda_shim/interpose/part.c"], check=True)
    rows = {line.split("|")[1].strip() for line in measurements.PAGE.read_text().splitlines() if line.startswith("| ")}
    figures = set(measurements.measure(tmp_path))
    assert figures <= rows
    assert {name for name in rows if name.startswith("archaic turns")} <= figures
