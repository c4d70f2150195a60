"""The agents' metrics as values. A scrape of a large cluster has hundreds of thousands of lines: only those that are wanted are read."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proto.contract import METRIC_PREFIX

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\"": '"', r"\\": "\\", r"\n": "\n"}
_ESCAPE = re.compile(r'\\["\\n]')

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line."""

    labels: Labels
    value: float


def read_metrics(text: str, wanted: Iterable[str]) -> Mapping[str, list[Sample]]:
    """Return the samples of the metrics with these names (without our prefix), by name; lines of another form are passed over."""
    found: dict[str, list[Sample]] = {name: [] for name in wanted}
    for line in text.splitlines():
        if not line.startswith(METRIC_PREFIX):
            continue
        end = line.find("{")
        name = line[len(METRIC_PREFIX) : end if end >= 0 else line.find(" ")]
        if name not in found:
            continue
        head, _, rest = line.rpartition("}") if end >= 0 else line.partition(" ")
        try:
            value = float(rest.split()[0] if end >= 0 else line.split()[1])
        except (ValueError, IndexError):
            continue
        found[name].append(Sample({key: _unescaped(text) for key, text in _LABEL.findall(head[end + 1 :])} if end >= 0 else {}, value))
    return found


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPES[match[0]], text) if "\\" in text else text
