# SPDX-License-Identifier: Apache-2.0
"""Measures how readable the tree is: language, layers, complexity, width. The page measurements.md keeps the figures.

python docs/development/measurements.py                # print them; --list: each function above complexity 10 as well
python docs/development/measurements.py --write        # and put them into the column "now" of the page
python docs/development/measurements.py --root OTHER   # another checkout, such as a `git worktree` of an older commit

The C figures need a built tree (`make native`), because they are read from object files.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_suffix(".md")
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from docs.development import plain_english  # noqa: E402  the root is on the path only from here
from tests.unit.cuda_shim import test_layers  # noqa: E402

NOT_PRODUCT = frozenset({"tests", "docs", "deploy", "build"})
GENERATED = ("_pb2.py", "_pb2_grpc.py")
TEXTS = {plain_english.TESTS: "docstrings of tests"}
"""Groups of plain_english.py that the page names differently."""
LARGEST_CIRCLE = 20
"""A circle of more rooms would take too long: the search doubles with each room."""

Arrows = Mapping[str, set[str]]
"""For each room, the rooms that it uses."""


def packages(root: Path) -> list[Path]:
    """Return the folders at the top that hold Python of the product."""
    folders = (path for path in sorted(root.iterdir()) if path.is_dir() and path.name not in NOT_PRODUCT and path.name[0] != ".")
    return [folder for folder in folders if any(python_files(folder))]


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder, without tests and generated files."""
    yield from (path for path in sorted(folder.rglob("*.py")) if "tests" not in path.parts and not path.name.endswith(GENERATED))


def python_arrows(root: Path, package: str = "") -> Arrows:
    """Return who imports whom: the packages at the top, or the modules and packages directly below ``package``."""
    modules: dict[str, Path] = {}
    for folder in packages(root):
        for path in python_files(folder):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    prefix = f"{package}." if package else ""

    def room(module: str) -> str | None:
        below = module.removeprefix(prefix)
        return below.partition(".")[0] if module.startswith(prefix) else None

    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in modules.items():
        here = room(module)
        if here is not None:
            there = {room(target) for target in imported(ast.parse(path.read_text()), module, path.stem == "__init__", modules)}
            arrows[here] |= {name for name in there if name is not None and name != here}
    return arrows


def imported(tree: ast.Module, module: str, is_package: bool, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules of the tree that one module imports, also inside functions."""
    known = set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*here, *([base] if base else [])])
            for alias in node.names:
                target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                if target in known:
                    yield target


def c_arrows(root: Path, *, by_folder: bool = False) -> Arrows:
    """Return who uses whom in cuda_shim/, as test_layers.py finds it: files of interpose/, or folders.

    Raises: FileNotFoundError: the tree is not built.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for room, other in test_layers.arrows(root / "build/obj", root / "cuda_shim", by_folder=by_folder):
        found[room].add(other)
    return found


def back_up(arrows: Arrows) -> int:
    """Return the fewest arrows that have to go before all others lead down; 0 when no circle exists.

    Raises: ValueError: a circle of more rooms than LARGEST_CIRCLE.
    """
    return sum(_fewest_cuts(circle, arrows) for circle in circles(arrows))


def circles(arrows: Arrows) -> list[list[str]]:
    """Return the groups of rooms in which each room reaches each other one."""
    reached: dict[str, set[str]] = {}
    for start in sorted({*arrows, *(room for rooms in arrows.values() for room in rooms)}):
        found, open_rooms = set[str](), [start]
        while open_rooms:
            for room in arrows.get(open_rooms.pop(), ()):
                if room not in found:
                    found.add(room)
                    open_rooms.append(room)
        reached[start] = found
    groups = {tuple(sorted(other for other in rooms if start in reached[other])) for start, rooms in reached.items() if start in rooms}
    return [list(group) for group in sorted(groups)]


def _fewest_cuts(circle: Sequence[str], arrows: Arrows) -> int:
    if len(circle) > LARGEST_CIRCLE:
        raise ValueError(f"a circle of {len(circle)} rooms; at most {LARGEST_CIRCLE} can be measured: {', '.join(circle)}")
    users = [sum(1 << place for place, other in enumerate(circle) if room in arrows.get(other, ())) for room in circle]
    best = bytearray(1 << len(circle))  # by set of rooms on the lower floors; never above 255 arrows in so small a circle
    for below in range(1, len(best)):
        fewest = 255
        for place, mask in enumerate(users):
            rest = below & ~(1 << place)
            if rest != below:
                fewest = min(fewest, best[rest] + (mask & rest).bit_count())
        best[below] = fewest
    return best[-1]


def complexities(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each function with its cyclomatic complexity: 1 and the places where it may branch, functions inside it excepted.

    A condition, a loop and its ``else``, a handler, a case, an assertion, a comprehension and each ``and`` or ``or`` is one branch,
    as radon counts them. Ruff's C901, the limit in ``make lint``, counts neither comprehensions nor ``and`` and ``or``.
    """
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            count, inside = 1, list[ast.AST](function.body)
            while inside:
                node = inside.pop()
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    count += _branches(node)
                    inside += ast.iter_child_nodes(node)
            yield function.name, count


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return len(node.ifs) + 1
    if isinstance(node, ast.Try):
        return len(node.handlers) + bool(node.orelse)
    if isinstance(node, ast.For | ast.While | ast.AsyncFor):
        return 1 + bool(node.orelse)
    if isinstance(node, ast.Match):
        return sum(not (isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None) for case in node.cases)
    return isinstance(node, ast.If | ast.IfExp | ast.Assert)


def complex_functions(root: Path, above: int) -> list[tuple[int, str]]:
    """Return complexity and place of the product's functions more complex than ``above``, the worst first."""
    found = []
    for folder in packages(root):
        for path in python_files(folder):
            functions = complexities(ast.parse(path.read_text()))
            found += [(count, f"{path.relative_to(root)}: {name}") for name, count in functions if count > above]
    return sorted(found, reverse=True)


def complex_by_ruff(root: Path, above: int) -> int:
    """Return how many functions of the product ruff finds more complex than ``above`` (C901)."""
    files = [str(path) for folder in packages(root) for path in python_files(folder)]
    options = ["--isolated", "--no-cache", "--ignore-noqa", "--select", "C901", "--config", f"lint.mccabe.max-complexity={above}"]
    ruff = [sys.executable, "-m", "ruff", "check", *options, "--output-format", "json", "--exit-zero", *files]
    return len(json.loads(subprocess.run(ruff, cwd=root, check=True, capture_output=True, text=True).stdout))


def widest_constructor(root: Path) -> tuple[int, str]:
    """Return the most parameters of an ``__init__`` of the product, ``self`` included, and the class."""
    widths = [(0, "")]
    for folder in packages(root):
        for path in python_files(folder):
            for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
                for method in (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
                    count = len([*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs])
                    widths.append((count, f"{kind.name} in {path.relative_to(root)}"))
    return max(widths)


def surface_names(root: Path) -> int:
    """Return the rows of the contract page: settings, metrics, annotations, events, reasons and so on."""
    pages = (root / "docs/reference/contract.md", root / "docs/contract.md")
    page = next(path for path in pages if path.exists())
    return len(re.findall(r"^\| `", page.read_text(), re.MULTILINE))


def measure(root: Path) -> dict[str, str]:
    """Return all figures by the names in the page's first column."""
    counts = plain_english.count_tree(root)
    figures = {f"archaic turns in {TEXTS.get(group, group)}": f"{count.percent:.1f} %" for group, count in counts.items()}
    names = plain_english.long_names_in(root)
    figures[f"test names above {plain_english.MOST_WORDS_IN_A_TEST_NAME} words"] = f"{len(names)}"
    figures["imports back up between packages"] = f"{back_up(python_arrows(root))}"
    inside = {folder.name: back_up(python_arrows(root, folder.name)) for folder in packages(root)}
    figures["imports back up inside packages"] = _named({name: count for name, count in inside.items() if count})
    figures["uses back up between folders of cuda_shim/"] = f"{back_up(c_arrows(root, by_folder=True))}"
    interpose = c_arrows(root)
    largest = max((len(circle) for circle in circles(interpose)), default=0)
    figures["uses back up inside cuda_shim/interpose/"] = f"{back_up(interpose)}"
    figures["files in the largest circle of cuda_shim/interpose/"] = f"{largest}"
    figures["functions above complexity 10"] = f"{len(complex_functions(root, 10))}"
    figures["functions above complexity 15"] = f"{len(complex_functions(root, 15))}"
    figures["functions above complexity 10 by ruff (C901)"] = f"{complex_by_ruff(root, 10)}"
    width, where = widest_constructor(root)
    figures["parameters of the widest constructor"] = f"{width} ({where.partition(' ')[0]})"
    figures["names of the public surface"] = f"{surface_names(root)}"
    return figures


def _named(counts: Mapping[str, int]) -> str:
    return f"{sum(counts.values())}" + (f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if counts else "")


def filled(page: str, figures: Mapping[str, str]) -> str:
    """Return the page with the figures in the last column of the rows that have their names."""
    lines = []
    for line in page.splitlines():
        cells = line.split("|")
        if len(cells) > 3 and cells[1].strip() in figures:
            cells[-2] = f" {figures[cells[1].strip()]} "
        lines.append("|".join(cells))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Print the figures as a Markdown table; with ``--write``, also fill the page."""
    parser = argparse.ArgumentParser(description="Measures language, layers, complexity and width of the tree.")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of another checkout")
    parser.add_argument("--list", action="store_true", help="also print the functions above complexity 10")
    parser.add_argument("--write", action="store_true", help='fill the column "now" of docs/development/measurements.md')
    options = parser.parse_args(arguments)
    figures = measure(options.root.resolve())
    print("| measure | value |\n|---|---|")
    for name, figure in figures.items():
        print(f"| {name} | {figure} |")
    if options.list:
        print("", *(f"{count} {where}" for count, where in complex_functions(options.root.resolve(), 10)), sep="\n")
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(), figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
