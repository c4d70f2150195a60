# SPDX-License-Identifier: Apache-2.0
"""Counts the sentences that carry an archaic turn, and fails when a group of texts has too many or a test has too long a name.

The groups are pages, docstrings, messages, C comments and the docstrings of tests. Messages in tests are not counted.

The word list is ``plain_english.txt`` in this folder. ``make lint`` runs the program over the whole tree:

    python docs/development/plain_english.py            # the share of each group
    python docs/development/plain_english.py --list     # each sentence, with the plain word; each test name above the limit
    python docs/development/plain_english.py --list docs/use/install.md agent/core
"""

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORD_LIST = Path(__file__).with_name("plain_english.txt")

DOCS, DOCSTRINGS, MESSAGES, C_COMMENTS, TESTS = "docs", "docstrings", "messages", "C comments", "tests"
LIMITS = {DOCS: 3.0, DOCSTRINGS: 3.0, MESSAGES: 3.0, C_COMMENTS: 3.0, TESTS: 3.0}
"""Per group, the percentage of sentences at which the check fails."""

EXEMPT = ("docs/development/glossary.md",)
"""Pages that quote the words which they replace."""
SKIPPED_FOLDERS = frozenset({"build", "node_modules", "kubelet", "kubelet_api"})
"""Built or generated files; hidden folders are skipped as well."""
LEAST_WORDS = 4
"""Shorter pieces, such as table cells with a name, are not sentences."""
ENDINGS = (".md", ".py", ".c", ".h", ".def")
MOST_WORDS_IN_A_TEST_NAME = 12
"""Counted after ``test_``, between underscores."""
_C_TOKEN = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\\n])*\1|/\*.*?\*/|//[^\n]*(?:\n[ \t]*//[^\n]*)*""", re.DOTALL)
"""A string, a character or a comment."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One line of the word list."""

    pattern: re.Pattern[str]
    plain: str


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of running text. ``line`` is the line of its first character, counted from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A sentence with an archaic turn."""

    path: str
    line: int
    sentence: str
    turns: tuple[tuple[str, str], ...]
    """What was found, each with the plain alternative."""


@dataclass(slots=True)
class Count:
    """The result for one group of texts."""

    sentences: int = 0
    hits: list[Hit] = field(default_factory=list)

    @property
    def percent(self) -> float:
        """Return the share of sentences with an archaic turn."""
        return 100 * len(self.hits) / self.sentences if self.sentences else 0.0


def read_word_list(text: str) -> tuple[Turn, ...]:
    """Parse the word list: a regular expression, a tab and the plain alternative on each line; ``#`` opens a comment.

    Raises: ValueError: a line without an alternative, or with an expression that does not compile.
    """
    turns = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        expression, tab, plain = line.partition("\t")
        if not tab or not plain.strip():
            raise ValueError(f"word list, line {number}: want an expression, a tab and the plain alternative; found {line!r}")
        try:
            turns.append(Turn(re.compile(expression, re.IGNORECASE), plain.strip()))
        except re.error as exc:
            raise ValueError(f"word list, line {number}: {exc}: {expression!r}") from exc
    return tuple(turns)


def markdown_blocks(text: str) -> Iterator[Block]:
    """Yield paragraphs, list items, headings and table cells, without code blocks and HTML comments."""
    hidden = re.sub(r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
    fence, start, lines = "", 0, list[str]()
    for number, line in enumerate([*hidden.splitlines(), ""], 1):
        stripped = line.strip()
        marker = re.match(r"(`{3,}|~{3,})", stripped)
        table, heading = stripped.startswith("|"), stripped.startswith("#")
        opens = bool(re.match(r"([-*+]|\d+[.)])\s", stripped))
        if lines and (fence or marker or table or heading or opens or not stripped):
            yield Block(start, "\n".join(lines))
            lines = []
        if marker and not fence:
            fence = marker[1]
        elif marker and stripped.startswith(fence):
            fence = ""
        elif fence or not stripped:
            pass
        elif table:
            yield from (Block(number, cell) for cell in re.split(r"(?<!\\)\|", stripped) if cell.strip())
        elif heading:
            yield Block(number, stripped.lstrip("# "))
        else:
            start = start if lines else number
            lines.append(re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+|^\s*>\s?", "", line))


def docstring_blocks(module: ast.Module) -> Iterator[Block]:
    """Yield the docstrings of modules, classes and functions, and those under attributes."""
    for node in _docstring_nodes(module):
        for paragraph in re.finditer(r".+?(?=\n\s*\n|\Z)", str(node.value), re.DOTALL):
            yield Block(node.lineno + str(node.value)[: paragraph.start()].count("\n"), paragraph[0])


def message_blocks(module: ast.Module) -> Iterator[Block]:
    """Yield all other texts in code: help of settings and metrics, refusals, events, log messages. Values that are filled in read X."""
    skipped = {id(node) for node in _docstring_nodes(module)}
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = [str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield Block(node.lineno, "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield Block(node.lineno, node.value)


def _docstring_nodes(module: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def c_comment_blocks(text: str) -> Iterator[Block]:
    """Yield the comments of a C source. Strings are skipped; ``//`` lines that follow one another are one comment."""
    for found in _C_TOKEN.finditer(text):
        if found[0].startswith("/"):
            line = text.count("\n", 0, found.start()) + 1
            cleaned = re.sub(r"^\s*(?:\*(?!/)|//+)", "", found[0].removeprefix("/*").removesuffix("*/"), flags=re.MULTILINE)
            lines = cleaned.splitlines()
            start = 0
            for end in [*(place for place, content in enumerate(lines) if not content.strip()), len(lines)]:
                yield Block(line + start, "\n".join(lines[start:end]))
                start = end


def sentences(block: Block) -> Iterator[Block]:
    """Split a block at full stops, after taking out code, addresses and markup. Line numbers stay right."""
    text = re.sub(r"(`+)(.+?)\1", lambda code: "CODE" + "\n" * code[0].count("\n"), block.text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "URL", text)
    text = re.sub(r"[*_]{1,2}(?=\w)|(?<=[\w.,])[*_]{1,2}(?!\w)", "", text)
    for sentence in re.finditer(r"\S.*?(?:[.!?][\"')]*(?=\s+[A-Z\"'(\[])|\Z)", text, re.DOTALL):
        if len(re.findall(r"[A-Za-z']{2,}|\ba\b", sentence[0])) >= LEAST_WORDS:
            yield Block(block.line + text.count("\n", 0, sentence.start()), " ".join(sentence[0].split()))


def count_blocks(path: str, blocks: Iterable[Block], turns: Sequence[Turn], into: Count) -> None:
    """Add the sentences of ``blocks``, and those with an archaic turn, to ``into``."""
    for block in blocks:
        for sentence in sentences(block):
            into.sentences += 1
            found = tuple((match[0], turn.plain) for turn in turns if (match := turn.pattern.search(sentence.text)))
            if found:
                into.hits.append(Hit(path, sentence.line, sentence.text, found))


def count_text(path: str, text: str, turns: Sequence[Turn], counts: dict[str, Count]) -> None:
    """Add what one file holds to the groups it belongs to, by the ending of its name and, for Python, whether it is below tests/."""
    if path.endswith(".md"):
        count_blocks(path, markdown_blocks(text), turns, counts[DOCS])
    elif path.endswith(".py"):
        module = ast.parse(text)
        in_tests = "tests" in Path(path).parts
        count_blocks(path, docstring_blocks(module), turns, counts[TESTS if in_tests else DOCSTRINGS])
        if not in_tests:
            count_blocks(path, message_blocks(module), turns, counts[MESSAGES])
    else:
        count_blocks(path, c_comment_blocks(text), turns, counts[C_COMMENTS])


def files(root: Path) -> Iterator[Path]:
    """Yield the texts of the tree: pages, Python and C. Built, generated and exempt files are left out."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith(".") and name not in SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(ENDINGS)):
            inside = path.relative_to(root)
            if inside.as_posix() not in EXEMPT:
                yield path


def count_tree(root: Path = ROOT, only: Sequence[str] = (), word_list: Path = WORD_LIST) -> dict[str, Count]:
    """Count the whole tree, or the files below the paths in ``only``, which are relative to ``root``."""
    turns = read_word_list(word_list.read_text(encoding="utf-8"))
    counts = {group: Count() for group in LIMITS}
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if not only or any(name == part or name.startswith(part.rstrip("/") + "/") for part in only):
            count_text(name, path.read_text(encoding="utf-8"), turns, counts)
    return counts


def long_test_names(module: ast.Module) -> Iterator[tuple[int, str, int]]:
    """Yield line, name and number of words of each test function with too long a name."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            words = len([word for word in node.name.removeprefix("test_").split("_") if word])
            if words > MOST_WORDS_IN_A_TEST_NAME:
                yield node.lineno, node.name, words


def long_names_in(root: Path = ROOT) -> list[tuple[str, int, str, int]]:
    """Return file, line, name and number of words of each such test of the tree, the longest first."""
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        found += [(path.relative_to(root).as_posix(), *name) for name in long_test_names(module)]
    return sorted(found, key=lambda name: -name[3])


def over_the_limit(counts: dict[str, Count]) -> list[str]:
    """Return the groups that have reached their limit."""
    return [group for group, count in counts.items() if count.percent >= LIMITS[group]]


def main(arguments: Sequence[str]) -> int:
    """Print the shares and, with ``--list``, the sentences and names. Return 1 when a limit is reached."""
    parser = argparse.ArgumentParser(description="Counts sentences with archaic turns, and test names that are too long.")
    parser.add_argument("paths", nargs="*", help="files or folders, relative to the root (default: the whole tree)")
    parser.add_argument("--list", action="store_true", help="print each sentence with file, line and the plain word")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of another checkout")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    counts, names = count_tree(root, options.paths), long_names_in(root)
    if not any(count.sentences for count in counts.values()):
        where = ", ".join(options.paths) or "any page or source"
        parser.error(f"no sentence found in {where} below {root}: check the paths and --root")
    if options.list:
        for hit in (hit for count in counts.values() for hit in count.hits):
            print(f"{hit.path}:{hit.line}: {hit.sentence}")
            print("".join(f"    {found!r}: {plain}\n" for found, plain in hit.turns), end="")
        for path, line, name, words in names:
            print(f"{path}:{line}: {name} ({words} words)")
    for group, count in counts.items():
        print(f"{group:<11}{len(count.hits):>6} of {count.sentences:>6} sentences {count.percent:>5.1f} %  (limit {LIMITS[group]:g} %)")
    print(f"test names {len(names):>6} above {MOST_WORDS_IN_A_TEST_NAME} words  (limit 0)")
    failed = over_the_limit(counts)
    if failed:
        print(f"Too many archaic turns in {', '.join(failed)}. The words and their alternatives: docs/development/plain_english.txt")
    if failed or names:
        print("docs/development/plain_english.py --list shows where.")
    return 1 if failed or names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
