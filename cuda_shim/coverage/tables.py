# SPDX-License-Identifier: Apache-2.0
"""Read and write the text files of this directory, and read the hook tables: the one place that knows their form.

``cuda.txt`` and ``nvml.txt`` say what the shim does about every entry point; people write them. ``names/`` and ``cuda-abi.txt`` say
which entry points exist; extract.py writes them from NVIDIA's headers. The shim is compiled from ``hooks.def`` and ``nvml_hooks.def`` in
``interpose/``. check.py says where the three disagree.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CLASSES_DIR = Path(__file__).resolve().parent
NAMES_DIR = CLASSES_DIR / "names"
ABI_FILE = CLASSES_DIR / "cuda-abi.txt"
INTERPOSE_DIR = CLASSES_DIR.parent / "interpose"
HOOKS_FILE = INTERPOSE_DIR / "hooks.def"
NVML_HOOKS_FILE = INTERPOSE_DIR / "nvml_hooks.def"

KINDS = ("cuda", "nvml")

CODES = "ERFMQLBHPD"
ACTING_CODES = frozenset("ERFQLHD")
"""Codes that need a wrapper of that very call. M is settled at other calls, B is an option that is off."""
TOUCHES = ("memory", "query", "work", "identity", "control", "-")
LEGACY = "legacy"


INLINE_SYMBOLS = frozenset({"cuGetProcAddress_v2_ptsz"})
"""Functions that the headers define in addition to those they declare, and that a driver may also export."""

UNDECLARED_SYMBOLS = {"cuda": frozenset[str](), "nvml": frozenset({"nvmlInternalGetExportTable"})}
"""Functions that a library exports, that programs of others use, and that no header declares."""


class TableError(Exception):
    """A file of this directory is not in the form its header describes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One base name as a header declares it."""

    base: str
    plain: str
    """The symbol that a program gets which calls the base name as it stands, without a per-thread default stream."""
    symbols: tuple[str, ...]
    """Every symbol of this base name: all versions, then the per-thread twins."""


class AbiRow(NamedTuple):
    """What ``cuGetProcAddress(base, since…, flavour)`` returns."""

    symbol: str
    base: str
    since: int
    """The first CUDA version, as cuGetProcAddress takes it (12030 = 12.3), from which this symbol is returned."""
    flavour: str
    """``legacy``, or ``ptds``/``ptsz``: the twin for a per-thread default stream."""

    @property
    def is_renamed(self) -> bool:
        """Whether the headers gave the base name to this function, which has a base name of its own."""
        return split_symbol(self.symbol)[0] != self.base


@dataclass(frozen=True, slots=True)
class ClassRow:
    """What the shim does about one base name."""

    base: str
    codes: frozenset[str]
    touches: str
    hook: str
    """``hooked``: every symbol is in the hook table; ``passes``: no symbol has to be; ``gap``: every symbol has to be, and is not yet."""
    reason: str

    @property
    def must_act(self) -> bool:
        """Whether the class needs a wrapper of this call."""
        return bool(self.codes & ACTING_CODES)


class Hook(NamedTuple):
    """One row of hooks.def: a wrapped symbol, and a lookup for which cuGetProcAddress returns it."""

    symbol: str
    base: str
    since: int
    per_thread: bool
    """Whether it is the twin for a per-thread default stream."""


def split_symbol(symbol: str) -> tuple[str, int, str]:
    """Split ``cuMemcpyHtoD_v2_ptds`` into base name, version (1 when unmarked) and flavour."""
    match = re.fullmatch(r"(\w+?)(?:_v(\d+))?(?:_(ptds|ptsz))?", symbol)
    if match is None:
        raise TableError(f"{symbol!r} is not the name of an entry point")
    return match[1], int(match[2] or 1), match[3] or LEGACY


# --- classes ----------------------------------------------------------------------------------------------------


def read_classes(kind: str) -> dict[str, ClassRow]:
    """Return the classes of one library by base name."""
    path = CLASSES_DIR / f"{kind}.txt"
    rows: dict[str, ClassRow] = {}
    for number, line in _content(path):
        row = _parse_class(line, f"{path.name}:{number}")
        if row.base in rows:
            raise TableError(f"{path.name}:{number}: {row.base} is classified a second time")
        rows[row.base] = row
    return rows


def _parse_class(line: str, where: str) -> ClassRow:
    fields = line.split(maxsplit=4)
    if len(fields) < 4:
        raise TableError(f"{where}: expected 'name codes touches hook [reason]', found {line!r}")
    base, codes, touches, hook = fields[:4]
    row = ClassRow(base, frozenset(codes), touches, hook, fields[4] if len(fields) == 5 else "")
    for problem in _class_problems(row, codes):
        raise TableError(f"{where}: {base}: {problem}")
    return row


def _class_problems(row: ClassRow, codes: str) -> Iterator[str]:
    are_letters = row.codes <= set(CODES) and len(row.codes) == len(codes)
    rules = (
        (are_letters, f"codes are letters of {CODES}, each once; found {codes!r}"),
        ("P" not in row.codes or row.codes == {"P"}, f"P means that nothing is done, so it stands alone; found {codes!r}"),
        (row.touches in TOUCHES, f"the third field is one of {', '.join(TOUCHES)}; found {row.touches!r}"),
        (row.hook in ("hooked", "passes", "gap"), f"the fourth field is hooked, passes or gap; found {row.hook!r}"),
        (row.hook != "passes" or not row.must_act, f"class {codes} needs a wrapper: write 'hooked', or 'gap' and the reason"),
        (row.hook == "passes" or row.codes != {"P"}, f"class P needs no wrapper, but the row says {row.hook!r}"),
        (row.hook != "gap" or bool(row.reason), "a gap states its reason"),
    )
    yield from (problem for holds, problem in rules if not holds)


# --- names ------------------------------------------------------------------------------------------------------


def minor_version(version: str) -> str:
    """Return ``13.0`` of ``13.0.96``: names appear with minor versions, so lists are kept per minor version."""
    return ".".join(version.split(".")[:2])


def names_file(kind: str, version: str) -> Path:
    """Return where the list of one version is kept."""
    return NAMES_DIR / f"{kind}-{minor_version(version)}.txt"


def listed_versions(kind: str) -> list[str]:
    """Return the minor versions there are lists of, oldest first."""
    return sorted((path.stem.removeprefix(f"{kind}-") for path in NAMES_DIR.glob(f"{kind}-*.txt")), key=_version_key)


def read_names(kind: str, version: str) -> dict[str, dict[str, Entry]]:
    """Return what the headers of one version declare: header name to base name to entry."""
    names: dict[str, dict[str, Entry]] = {}
    for each in listed_versions(kind):
        if _version_key(each) <= _version_key(minor_version(version)):
            _apply_list(names, names_file(kind, each))
    return names


def read_all_symbols(kind: str) -> dict[str, set[str]]:
    """Return every symbol that any listed version declares, or that programs use without a declaration, by base name."""
    symbols: dict[str, set[str]] = {name: {name} for name in UNDECLARED_SYMBOLS[kind]}
    for version in listed_versions(kind):
        for entry in (entry for entries in read_names(kind, version).values() for entry in entries.values()):
            symbols.setdefault(entry.base, set()).update(entry.symbols)
    return symbols


def render_names(kind: str, version: str, names: dict[str, dict[str, Entry]]) -> str:
    """Write what a version's headers declare, as the difference from the version listed before it."""
    older = [each for each in listed_versions(kind) if _version_key(each) < _version_key(minor_version(version))]
    before = read_names(kind, older[-1]) if older else {}
    title = f"What the headers of {kind.upper()} {minor_version(version)} declare"
    lines = [
        f"# {title} that {older[-1]}'s did not, or otherwise ({version})." if older else f"# {title} ({version}).",
        "# Written by extract.py; do not edit. base [= what the plain name compiles to] [: its symbols, unless it is its only one]",
        "# A line replaces the one of an older list; -base: declared no more.",
    ]
    for header, entries in names.items():
        was = before.get(header, {})
        changes = [f"-{base}" for base in was if base not in entries]
        changes += [_render_entry(entry) for base, entry in entries.items() if was.get(base) != entry]
        if changes:
            lines += ["", f"[{header}]", *changes]
    return "\n".join(lines) + "\n"


def _apply_list(names: dict[str, dict[str, Entry]], path: Path) -> None:
    header: dict[str, Entry] | None = None
    for number, line in _content(path):
        if line.startswith("["):
            header = names.setdefault(line.strip("[]"), {})
        elif header is None:
            raise TableError(f"{path.name}:{number}: expected a [header] line before the first name, found {line!r}")
        elif line.startswith("-"):
            del header[line.removeprefix("-")]
        else:
            entry = _parse_entry(line, f"{path.name}:{number}")
            header[entry.base] = entry


def _parse_entry(line: str, where: str) -> Entry:
    match = re.fullmatch(r"(\w+)(?: = (\w+))?(?: : (\w+(?: \w+)*))?", line)
    if match is None:
        raise TableError(f"{where}: expected 'base [= plain] [: symbols]', found {line!r}")
    base, plain, symbols = match.groups()
    return Entry(base, plain or base, tuple(symbols.split()) if symbols else (base,))


def _render_entry(entry: Entry) -> str:
    plain = f" = {entry.plain}" if entry.plain != entry.base else ""
    symbols = f" : {' '.join(entry.symbols)}" if entry.symbols != (entry.base,) else ""
    return f"{entry.base}{plain}{symbols}"


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# --- the ABI of cuGetProcAddress --------------------------------------------------------------------------------


def read_abi() -> list[AbiRow]:
    """Return which symbol the CUDA driver returns for which name, version and flavour."""
    rows = []
    for number, line in _content(ABI_FILE):
        match = re.fullmatch(r"(\w+) (\w+) (\d+) (legacy|ptds|ptsz)", line)
        if match is None:
            raise TableError(f"{ABI_FILE.name}:{number}: expected 'symbol base since flavour', found {line!r}")
        rows.append(AbiRow(match[1], match[2], int(match[3]), match[4]))
    return rows


def render_abi(version: str, rows: Iterable[AbiRow]) -> str:
    """Write that table as text."""
    lines = [
        f"# Which symbol cuGetProcAddress answers, by the function types in the headers of CUDA {version}.",
        "# Written by extract.py; do not edit. symbol, base name asked for, first CUDA version asked for that gets it, flavour",
    ]
    lines += [" ".join(map(str, row)) for row in rows]
    return "\n".join(lines) + "\n"


# --- hooks.def and nvml_hooks.def -------------------------------------------------------------------------------


def read_hooks() -> list[Hook]:
    """Return the CUDA symbols the shim wraps, each with its own base name."""
    return _read_hooks("HOOK")


def read_answers() -> list[Hook]:
    """Return all lookups for which cuGetProcAddress returns a wrapped symbol: the hooks, and the other names of some."""
    return _read_hooks("HOOK", "ALSO_AS")


def _read_hooks(*macros: str) -> list[Hook]:
    hooks = []
    for row in _macro_rows(HOOKS_FILE):
        match = re.fullmatch(r"(HOOK|ALSO_AS)\((\w+),(\w+),(\d+),(LEGACY|PER_THREAD)\)", row)
        if match is None:
            raise TableError(f"{HOOKS_FILE.name}: expected HOOK or ALSO_AS(symbol, base, since, LEGACY or PER_THREAD), found {row}")
        if match[1] in macros:
            hooks.append(Hook(match[2], match[3], int(match[4]), match[5] == "PER_THREAD"))
    return hooks


def read_nvml_hooks() -> set[str]:
    """Return the NVML symbols the shim wraps: the first argument of every row."""
    return {re.split(r"[(,)]", row)[1] for row in _macro_rows(NVML_HOOKS_FILE)}


def _macro_rows(path: Path) -> list[str]:
    """Return the macro calls of a C table, without white space."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*|^#[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    compact = "".join(text.split())
    rows = re.findall(r"[A-Z_]+\((?:[^()]|\([^()]*\))*\)", compact)
    if "".join(rows) != compact:
        raise TableError(f"{path.name}: expected rows of the form MACRO(argument, …) and comments only")
    return rows


def _content(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines with content, with their numbers."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped
