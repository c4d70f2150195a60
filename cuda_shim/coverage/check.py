# SPDX-License-Identifier: Apache-2.0
"""Report where the classes, the headers' names and the hook table disagree.

``python -m cuda_shim.coverage.check`` prints every disagreement, then the gaps that the classes state.
tests/unit/cuda_shim/test_coverage.py fails on any disagreement, so classes, code and headers cannot drift apart.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from cuda_shim.coverage.tables import (
    INLINE_SYMBOLS,
    KINDS,
    LEGACY,
    AbiRow,
    ClassRow,
    Hook,
    read_abi,
    read_all_symbols,
    read_answers,
    read_classes,
    read_hooks,
    read_nvml_hooks,
)


def unclassified(rows: Mapping[str, ClassRow], symbols: Mapping[str, Collection[str]]) -> list[str]:
    """Return the declared base names that have no class."""
    return sorted(symbols.keys() - rows.keys())


def undeclared(rows: Mapping[str, ClassRow], symbols: Mapping[str, Collection[str]]) -> list[str]:
    """Return the classified base names that no header declares."""
    return sorted(rows.keys() - symbols.keys())


def hooked_symbols(kind: str) -> set[str]:
    """Return the symbols of one library that the shim wraps."""
    return {hook.symbol for hook in read_hooks()} if kind == "cuda" else read_nvml_hooks()


def hook_disagreements(rows: Mapping[str, ClassRow], symbols: Mapping[str, Collection[str]], hooked: Collection[str]) -> Iterator[str]:
    """Yield a sentence for every class row that the hooked symbols contradict."""
    for base, row in rows.items():
        declared = set(symbols.get(base, ()))
        present, missing = sorted(declared & set(hooked)), sorted(declared - set(hooked))
        if row.hook == "hooked" and missing:
            yield f"{base} is classified as hooked, but the hook table lacks {', '.join(missing)}"
        elif row.hook == "gap" and present:
            yield f"{base} is classified as a gap, but the hook table has {', '.join(present)}: write 'hooked' when all of it is there"
        elif row.hook == "passes" and present:
            yield f"{base} is classified as passing, but the hook table has {', '.join(present)}: give it the wrapper's class"


def unknown_hooks(symbols: Mapping[str, Collection[str]], hooked: Collection[str]) -> list[str]:
    """Return the hooked symbols that no header declares or defines."""
    return sorted(set(hooked) - INLINE_SYMBOLS - {symbol for each in symbols.values() for symbol in each})


def abi_disagreements(answers: Collection[Hook], abi: Collection[AbiRow]) -> Iterator[str]:
    """Yield a sentence for every wrapped CUDA symbol if its base names, versions or flavours differ from the headers."""
    expected, found = defaultdict(set), defaultdict(set)
    for row in abi:
        expected[row.symbol].add((row.base, row.since, row.flavour != LEGACY))
    for answer in answers:
        found[answer.symbol].add((answer.base, answer.since, answer.per_thread))
    for symbol in found:
        if symbol in expected and expected[symbol] != found[symbol]:
            yield f"{symbol}: hooks.def says (base, since, per thread) = {sorted(found[symbol])}, the headers {sorted(expected[symbol])}"


def problems_of(kind: str) -> list[str]:
    """Return every disagreement about one library, as sentences."""
    rows, symbols, hooked = read_classes(kind), read_all_symbols(kind), hooked_symbols(kind)
    problems = [f"{base} has no class in {kind}.txt" for base in unclassified(rows, symbols)]
    problems += [f"{base} is in {kind}.txt, but no header declares it" for base in undeclared(rows, symbols)]
    problems += hook_disagreements(rows, symbols, hooked)
    problems += [f"the hook table has {symbol}, which no header declares" for symbol in unknown_hooks(symbols, hooked)]
    return problems


def main() -> int:
    """Print the disagreements and the admitted gaps; 1 when there is a disagreement."""
    problems = [problem for kind in KINDS for problem in problems_of(kind)] + list(abi_disagreements(read_answers(), read_abi()))
    gaps = [row for kind in KINDS for row in read_classes(kind).values() if row.hook == "gap"]
    for problem in problems:
        print(problem)
    for row in gaps:
        print(f"gap: {row.base} ({''.join(sorted(row.codes))}): {row.reason}")
    print(f"{len(problems)} disagreements, {len(gaps)} admitted gaps")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
