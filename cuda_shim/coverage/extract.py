# SPDX-License-Identifier: Apache-2.0
"""Read from NVIDIA's headers which entry points exist, and write the lists below ``names/`` and ``cuda-abi.txt``.

Why: the classes in ``cuda.txt`` and ``nvml.txt`` are only useful if they are complete. NVIDIA's headers define what exists. They are
not kept here; their declarations are kept as lists, one per version. A test compares the newest list with the newest header (from the
development requirements), and every list with the classes.

Invariant: the C preprocessor decides what is declared (remaps, per-thread twins, versions that only old binaries use), never a
guess about macros. The headers' own function types (``PFN_<base>_v<since>[_flavour]``) must match the declared symbols one to
one, so a declaration that this script misses is an error here, not a gap.

Use, for each new CUDA release:

    python -m cuda_shim.coverage.extract installed                         # the packages in this environment
    python -m cuda_shim.coverage.extract headers cuda 13.0.96 INCLUDE_DIR  # or headers unpacked somewhere
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from cuda_shim.coverage.tables import (
    ABI_FILE,
    CLASSES_DIR,
    KINDS,
    LEGACY,
    AbiRow,
    Entry,
    names_file,
    render_abi,
    render_names,
    split_symbol,
)

PACKAGES = {"cuda": "nvidia-cuda-runtime", "nvml": "nvidia-nvml-dev"}
"""The distributions of the development requirements that carry the newest headers."""

CUDA_HEADERS = {
    "cuda.h": "cudaTypedefs.h",
    "cudaGL.h": "cudaGLTypedefs.h",
    "cudaEGL.h": "cudaEGLTypedefs.h",
    "cudaVDPAU.h": "cudaVDPAUTypedefs.h",
    "cudaProfiler.h": "cudaProfilerTypedefs.h",
}
"""Headers of functions that libcuda.so.1 exports, and those of their types. cudaProfiler.h itself is in another package; its names
(which have one version and no twin each) are taken from their types."""

RENAMED_SINCE = {"cuGraphInstantiate": 12000}
"""Base names that the headers gave to a function with another base name, and the first CUDA version of such headers. A program
compiled with them passes this name to cuGetProcAddress for that function. No function type states the version."""

ABSENT_HEADERS = ("GL/gl.h", "EGL/egl.h", "EGL/eglext.h", "vdpau/vdpau.h", "cudaProfiler.h")
"""Included by the headers above but not in their package. Their content is not needed to know which functions are declared, so
empty files replace them where the include directory does not have them."""

ALL_VERSIONS = "__CUDA_API_VERSION_INTERNAL"
"""With this macro the CUDA headers declare every symbol: old versions, legacy and per-thread default stream."""


class ExtractError(Exception):
    """The headers do not have the form this script expects."""


def read_headers(kind: str, include_dir: Path) -> dict[str, dict[str, Entry]]:
    """Return what one library's headers declare: header name to base name to entry."""
    return _cuda_names(include_dir) if kind == "cuda" else _nvml_names(include_dir)


def _cuda_names(include_dir: Path) -> dict[str, dict[str, Entry]]:
    """Return the entries each CUDA header declares, by header name."""
    seen: set[str] = set()
    names = {}
    for header, types in CUDA_HEADERS.items():
        if (include_dir / header).exists():
            symbols = _declared(_preprocess(include_dir, header, ALL_VERSIONS), r"\bCUresult\s+(cu\w+)\s*\(") - seen
        else:
            symbols = {base for base, _, _ in _typed_versions(include_dir, types)} - seen
        seen |= symbols
        names[header] = _entries(symbols, _plain_symbols(include_dir, header, symbols))
    return names


def _nvml_names(include_dir: Path) -> dict[str, dict[str, Entry]]:
    """Return the entries nvml.h declares, under its name."""
    text = _preprocess(include_dir, "nvml.h", "NVML_NO_UNVERSIONED_FUNC_DEFS")
    symbols = _declared(text, r"\b(nvml\w+)\s*\(")
    return {"nvml.h": _entries(symbols, _plain_symbols(include_dir, "nvml.h", symbols))}


def cuda_abi(include_dir: Path) -> list[AbiRow]:
    """Pair every CUDA symbol with the version at which cuGetProcAddress hands it out.

    The headers give the symbols and, apart from them, the versions of each base name and flavour; both are ordered by age, so the
    n-th symbol has the n-th version. A name that became another function's comes after its own symbols.

    Raises:  ExtractError: a base name has more symbols than versions or the other way round, or became another function's and
             has no row in RENAMED_SINCE.
    """
    rows = []
    for header, entries in _cuda_names(include_dir).items():
        versions = defaultdict(list)
        for base, since, flavour in _typed_versions(include_dir, CUDA_HEADERS[header]):
            versions[base, flavour].append(since)
        symbols = _numbered_symbols(entries.values())
        for base, flavour in sorted(versions.keys() | symbols.keys()):
            ordered, since_each = sorted(symbols[base, flavour]), sorted(versions[base, flavour])
            if len(ordered) != len(since_each):
                raise ExtractError(f"{header}: {base} ({flavour}) is declared as {ordered}, but has types for the versions {since_each}")
            rows += [AbiRow(symbol, base, since, flavour) for (_, symbol), since in zip(ordered, since_each, strict=True)]
            if flavour == LEGACY and split_symbol(entries[base].plain)[0] != base:
                rows.append(AbiRow(entries[base].plain, base, _renamed_since(base), LEGACY))
    return rows


def _numbered_symbols(entries: Iterable[Entry]) -> Mapping[tuple[str, str], list[tuple[int, str]]]:
    """Return the symbols by base name and flavour, each with its number; an empty list for any other name."""
    found = defaultdict(list)
    for symbol in (symbol for entry in entries for symbol in entry.symbols):
        base, number, flavour = split_symbol(symbol)
        found[base, flavour].append((number, symbol))
    return found


def _renamed_since(base: str) -> int:
    if base not in RENAMED_SINCE:
        raise ExtractError(f"{base} is a name of another function now; say in RENAMED_SINCE since which CUDA version")
    return RENAMED_SINCE[base]


def find_include_dir(distribution: str, header: str) -> tuple[Path, str]:
    """Return the directory of an installed distribution that holds a header, and the distribution's version.

    Raises:  ExtractError: it is not installed, or has no such header.
    """
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError as exc:
        raise ExtractError(f"{distribution} is not installed; it carries {header}. Install the development requirements") from exc
    for file in found.files or ():
        if file.name == header:
            return Path(str(found.locate_file(file))).parent, found.version
    raise ExtractError(f"{distribution} {found.version} has no {header}")


def write_lists(kind: str, version: str, include_dir: Path) -> list[Path]:
    """Write the files that one version's headers determine; return them. The ABI table is that of the version written last."""
    texts = {names_file(kind, version): render_names(kind, version, read_headers(kind, include_dir))}
    if kind == "cuda":
        texts[ABI_FILE] = render_abi(version, cuda_abi(include_dir))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _preprocess(include_dir: Path, header: str, *macros: str, probe: str = "") -> str:
    """Run the C preprocessor over a header, followed by ``probe``. Some CUDA headers need cuda.h first and do not include it."""
    headers = ["cuda.h", header] if header.startswith("cuda") else [header]
    source = "".join(f"#include <{each}>\n" for each in headers) + probe
    with tempfile.TemporaryDirectory() as directory:
        stubs = Path(directory)
        for absent in ABSENT_HEADERS:
            (stubs / absent).parent.mkdir(exist_ok=True)
            (stubs / absent).touch()
        command = [
            os.environ.get("CC", "cc"),
            "-E",
            "-P",
            f"-I{include_dir}",
            f"-I{stubs}",
            *(f"-D{macro}" for macro in macros),
            "-xc",
            "-",
        ]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ExtractError(f"{' '.join(command)} failed on {header}:\n{done.stderr}")
    return done.stdout


def _declared(text: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, text))


def _plain_symbols(include_dir: Path, header: str, symbols: Iterable[str]) -> dict[str, str]:
    """Return what each base name expands to in a program that defines no macro of the header's."""
    bases = sorted({split_symbol(symbol)[0] for symbol in symbols})
    if not (include_dir / header).exists():
        return {base: base for base in bases}
    probe = "".join(f'aliquot_probe "{base}" {base}\n' for base in bases)
    return dict(re.findall(r'aliquot_probe "(\w+)" (\w+)', _preprocess(include_dir, header, probe=probe)))


def _entries(symbols: Iterable[str], plain: dict[str, str]) -> dict[str, Entry]:
    by_base = defaultdict(list)
    for symbol in symbols:
        base, number, flavour = split_symbol(symbol)
        by_base[base].append((flavour != LEGACY, flavour, number, symbol))
    return {base: Entry(base, plain[base], tuple(found[-1] for found in sorted(by_base[base]))) for base in sorted(by_base)}


def _typed_versions(include_dir: Path, types_header: str) -> set[tuple[str, int, str]]:
    """Return (base name, first version, flavour) of every function type the header itself defines."""
    own = set(re.findall(r"\bPFN_\w+", (include_dir / types_header).read_text(encoding="utf-8", errors="replace")))
    found = set()
    for name in _declared(_preprocess(include_dir, types_header, ALL_VERSIONS), r"\*\s*(PFN_cu\w+)\s*\)") & own:
        base, since, flavour = split_symbol(name.removeprefix("PFN_"))
        found.add((base, since, flavour))
    return found


def main(arguments: Sequence[str]) -> int:
    """Write the lists and print their names."""
    parser = argparse.ArgumentParser(description="Write the lists of entry points that NVIDIA's headers declare.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("installed", help="from the packages installed in this environment")
    headers = commands.add_parser("headers", help="from a directory of headers")
    headers.add_argument("kind", choices=KINDS)
    headers.add_argument("version", help="of the package they came in, such as 13.0.96")
    headers.add_argument("include_dir", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "headers":
            written = write_lists(chosen.kind, chosen.version, chosen.include_dir)
        else:
            written = []
            for kind, distribution in PACKAGES.items():
                include_dir, version = find_include_dir(distribution, f"{kind}.h")
                written += write_lists(kind, version, include_dir)
    except ExtractError as exc:
        print(f"extract.py: {exc}", file=sys.stderr)
        return 1
    for path in written:
        print(path.relative_to(CLASSES_DIR))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
