# SPDX-License-Identifier: Apache-2.0
"""Every entry point of the CUDA driver API and of NVML has a class, and the classes agree with NVIDIA's headers and with hooks.def.

CUDA 13.0: research counted 446 base names in groups of 110 that touch memory, 11 that ask about it, 81 that submit or order work,
41 for identity and 203 that pass. The tables have 447, 118, 11, 81, 33 and 204: one name more, because cuGraphInstantiateWithFlags
is declared only through a remap and a search of the text misses it; and memory counts here whatever moves bytes into or out of
the process, so the calls on memory of others, checkpoints among them, are memory rather than identity.
"""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from cuda_shim.coverage import check, extract, tables
from cuda_shim.coverage.tables import KINDS, ClassRow, Entry, Hook, TableError

EXTRACT = "python -m cuda_shim.coverage.extract installed"


def make_row(base: str, codes: str = "R", hook: str = "hooked") -> ClassRow:
    return ClassRow(base, frozenset(codes), "memory", hook, "because")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- the tables against the headers -----------------------------------------------------------------------------


def test_every_declared_name_is_classified(kind):
    assert check.unclassified(tables.read_classes(kind), tables.read_all_symbols(kind)) == []


def test_every_classified_name_is_declared(kind):
    assert check.undeclared(tables.read_classes(kind), tables.read_all_symbols(kind)) == []


def test_the_newest_header_declares_no_unclassified_name(kind):
    include_dir, version = extract.find_include_dir(extract.PACKAGES[kind], f"{kind}.h")
    declared = {base for entries in extract.read_headers(kind, include_dir).values() for base in entries}
    unclassified = sorted(declared - tables.read_classes(kind).keys())
    assert not unclassified, f"{kind}.h {version} declares {unclassified}: give each a class in {kind}.txt and run `{EXTRACT}`"


def test_the_list_of_the_newest_header_is_what_it_declares(kind):
    include_dir, version = extract.find_include_dir(extract.PACKAGES[kind], f"{kind}.h")
    assert tables.minor_version(version) == tables.listed_versions(kind)[-1], f"no list of {kind} {version}: run `{EXTRACT}`"
    assert tables.read_names(kind, version) == extract.read_headers(kind, include_dir), (
        f"the list of {kind} {version} is stale: run `{EXTRACT}`"
    )


def test_the_versions_a_tenant_may_bring_are_listed(kind):
    assert tables.listed_versions(kind)[:11] == ["12.4", "12.5", "12.6", "12.8", "12.9", "13.0", "13.1", "13.2", "13.3", "13.4", "13.5"]


def test_the_names_of_cuda_13_0_are_those_that_research_counted():
    names = tables.read_names("cuda", "13.0")["cuda.h"]
    assert len(names) == 447
    assert len(names.keys() - {"cuGraphInstantiateWithFlags"}) == 446
    rows = tables.read_classes("cuda")
    # Four of the 204 that touch nothing load memory all the same: what they give out is launched by its handle, or called.
    assert Counter(rows[base].touches for base in names) == {"memory": 118 + 4, "query": 11, "work": 81, "identity": 33, "-": 204 - 4}


def test_nvml_13_5_declares_what_research_counted():
    names = tables.read_names("nvml", "13.5")["nvml.h"]
    assert sum(len(entry.symbols) for entry in names.values()) == 436, "435 that return a code, and nvmlErrorString"


def test_every_test_that_the_table_names_exists():
    """One for each class of memory that comes without a call that allocates."""
    named = re.findall(r"(\w+\.py)::(test_\w+)", (tables.CLASSES_DIR / "cuda.txt").read_text())
    assert len(named) == 8
    integration = tables.CLASSES_DIR.parents[1] / "tests/integration"
    assert [name for file, name in named if f"def {name}(" not in (integration / file).read_text()] == []


# --- which symbol cuGetProcAddress answers ----------------------------------------------------------------------


def test_the_answers_of_cugetprocaddress_are_those_of_the_newest_header():
    include_dir, _ = extract.find_include_dir(extract.PACKAGES["cuda"], "cuda.h")
    assert tables.read_abi() == extract.cuda_abi(include_dir), f"{tables.ABI_FILE.name} is stale: run `{EXTRACT}`"


def test_every_symbol_of_every_version_has_one_answer():
    declared = {symbol for symbols in tables.read_all_symbols("cuda").values() for symbol in symbols}
    assert Counter(row.symbol for row in tables.read_abi() if not row.is_renamed) == Counter(declared)


def test_a_name_that_became_another_functions_is_answered_with_that_function():
    assert [row for row in tables.read_abi() if row.is_renamed] == [
        ("cuGraphInstantiateWithFlags", "cuGraphInstantiate", 12000, tables.LEGACY)
    ]


def test_name_moved_to_other_function_without_entry_is_error(monkeypatch):
    monkeypatch.setattr(extract, "RENAMED_SINCE", {})
    include_dir, _ = extract.find_include_dir(extract.PACKAGES["cuda"], "cuda.h")
    with pytest.raises(extract.ExtractError, match="cuGraphInstantiate is a name of another function"):
        extract.cuda_abi(include_dir)


def test_each_answer_has_the_type_the_headers_give_it():
    """Symbols and versions are paired by age; a wrong pair of different types does not compile."""
    include_dir, version = extract.find_include_dir(extract.PACKAGES["cuda"], "cuda.h")
    in_cuda_h = tables.read_names("cuda", version)["cuda.h"]
    lines = [f"#define {extract.ALL_VERSIONS}", "#include <cuda.h>", "#include <cudaTypedefs.h>"]
    for row in tables.read_abi():
        if row.base in in_cuda_h and not row.is_renamed:
            type_name = f"PFN_{row.base}_v{row.since}" + ("" if row.flavour == tables.LEGACY else f"_{row.flavour}")
            lines.append(
                f'_Static_assert(__builtin_types_compatible_p(__typeof__(&{row.symbol}), {type_name}), "{row.symbol} is no {type_name}");'
            )
    command = [os.environ.get("CC", "cc"), "-fsyntax-only", "-w", f"-I{include_dir}", "-xc", "-"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- the tables against hooks.def -------------------------------------------------------------------------------


def test_the_hook_table_does_what_the_classes_say(kind):
    problems = list(check.hook_disagreements(tables.read_classes(kind), tables.read_all_symbols(kind), check.hooked_symbols(kind)))
    assert not problems, "\n".join(problems)


def test_every_hook_is_of_a_declared_symbol(kind):
    assert check.unknown_hooks(tables.read_all_symbols(kind), check.hooked_symbols(kind)) == []


def test_every_hook_has_the_base_name_version_and_flavour_of_the_headers():
    problems = list(check.abi_disagreements(tables.read_answers(), tables.read_abi()))
    assert not problems, "\n".join(problems)


def test_no_cuda_symbol_is_hooked_twice():
    assert [symbol for symbol, count in Counter(hook.symbol for hook in tables.read_hooks()).items() if count > 1] == []


@pytest.mark.parametrize(
    ("row", "hooked", "says"),
    [
        pytest.param(make_row("cuX"), ["cuX"], "lacks cuX_v2", id="a version is not hooked"),
        pytest.param(make_row("cuX", hook="gap"), ["cuX"], "as a gap", id="a gap is hooked"),
        pytest.param(make_row("cuX", "P", "passes"), ["cuX_v2"], "as passing", id="a passing name is hooked"),
    ],
)
def test_a_disagreement_is_told_with_the_symbol(row, hooked, says):
    (problem,) = check.hook_disagreements({"cuX": row}, {"cuX": ["cuX", "cuX_v2"]}, hooked)
    assert problem.startswith("cuX is classified")
    assert says in problem


@pytest.mark.parametrize(
    ("row", "hooked"),
    [
        pytest.param(make_row("cuX"), ["cuX", "cuX_v2"], id="all hooked"),
        pytest.param(make_row("cuX", hook="gap"), [], id="admitted gap"),
        pytest.param(make_row("cuX", "P", "passes"), [], id="passes"),
    ],
)
def test_agreement_is_silent(row, hooked):
    assert list(check.hook_disagreements({"cuX": row}, {"cuX": ["cuX", "cuX_v2"]}, hooked)) == []


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(Hook("cuMemAlloc_v2", "cuMemAlloc", 2000, False), id="version"),
        pytest.param(Hook("cuMemAlloc_v2", "cuMemAlloc_v2", 3020, False), id="base name"),
        pytest.param(Hook("cuMemAlloc_v2", "cuMemAlloc", 3020, True), id="flavour"),
    ],
)
def test_a_hook_that_asks_for_another_symbol_is_told(hook):
    (problem,) = check.abi_disagreements([hook], tables.read_abi())
    assert problem.startswith("cuMemAlloc_v2: hooks.def says")
    assert problem.endswith("the headers [('cuMemAlloc', 3020, False)]")


def test_hook_lacking_other_name_of_its_symbol_is_reported():
    hook = Hook("cuGraphInstantiateWithFlags", "cuGraphInstantiateWithFlags", 11040, False)
    (problem,) = check.abi_disagreements([hook], tables.read_abi())
    assert problem.endswith("[('cuGraphInstantiate', 12000, False), ('cuGraphInstantiateWithFlags', 11040, False)]")


# --- the form of the files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param("cuX RX memory hooked", "letters of", id="unknown code"),
        pytest.param("cuX RP memory hooked", "stands alone", id="P with another code"),
        pytest.param("cuX R money hooked", "third field", id="unknown subject"),
        pytest.param("cuX R memory maybe", "fourth field", id="unknown hook state"),
        pytest.param("cuX R memory passes", "needs a wrapper", id="acting class that passes"),
        pytest.param("cuX P - hooked", "needs no wrapper", id="hooked P"),
        pytest.param("cuX R memory gap", "states its reason", id="gap without reason"),
        pytest.param("cuX R memory", "expected 'name codes", id="missing field"),
        pytest.param("cuX P - passes\ncuX P - passes", "second time", id="twice"),
    ],
)
def test_a_malformed_class_is_refused(monkeypatch, tmp_path: Path, line, says):
    monkeypatch.setattr(tables, "CLASSES_DIR", tmp_path)
    (tmp_path / "cuda.txt").write_text(line)
    with pytest.raises(TableError, match=says):
        tables.read_classes("cuda")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("HOOK(cuInit, cuInit, 2000)", "expected HOOK", id="missing flavour"),
        pytest.param("HOOK(cuInit, cuInit, 2000, LEGACY) stray", "comments only", id="what no row contains"),
    ],
)
def test_a_hook_table_that_cannot_be_read_whole_is_refused(monkeypatch, tmp_path: Path, text, says):
    monkeypatch.setattr(tables, "HOOKS_FILE", tmp_path / "hooks.def")
    (tmp_path / "hooks.def").write_text(f"/* HOOK(cuNot, cuNot, 1, LEGACY) */\n{text}\n")
    with pytest.raises(TableError, match=says):
        tables.read_hooks()


def test_a_list_says_what_changed_and_reads_back(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(tables, "NAMES_DIR", tmp_path)
    old = {"cuda.h": {base: Entry(base, base, (base,)) for base in ("cuGone", "cuGrown", "cuKept")}}
    new = {"cuda.h": {"cuGrown": Entry("cuGrown", "cuGrown_v2", ("cuGrown", "cuGrown_v2")), "cuKept": old["cuda.h"]["cuKept"]}}
    for version, names in (("9.9.1", old), ("10.0.2", new)):
        tables.names_file("cuda", version).write_text(tables.render_names("cuda", version, names))
    changes = [line for line in (tmp_path / "cuda-10.0.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert changes == ["[cuda.h]", "-cuGone", "cuGrown = cuGrown_v2 : cuGrown cuGrown_v2"]
    assert [tables.read_names("cuda", version) for version in ("9.9", "10.0.7")] == [old, new]


def test_a_symbol_splits_into_base_version_and_flavour():
    assert tables.split_symbol("cuMemcpyHtoD_v2_ptds") == ("cuMemcpyHtoD", 2, "ptds")
    assert tables.split_symbol("cuMemsetD2D8") == ("cuMemsetD2D8", 1, "legacy")
