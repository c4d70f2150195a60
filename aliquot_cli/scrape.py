# SPDX-License-Identifier: Apache-2.0
"""Parses the agents' metrics. Pages of a large cluster have hundreds of thousands of lines, so only the wanted metrics are parsed."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from aliquot.contract import METRIC_PREFIX

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\"": '"', r"\\": "\\", r"\n": "\n"}
_ESCAPE = re.compile(r'\\["\\n]')

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a metrics page."""

    labels: Labels
    value: float


Samples = Mapping[str, list[Sample]]
"""Samples by the metric's name without our prefix."""


def read_metrics(text: str, wanted: Iterable[str]) -> Samples:
    """Return the samples of these metrics, named without our prefix. Lines of another format are skipped."""
    found: dict[str, list[Sample]] = {name: [] for name in wanted}
    for line in text.splitlines():
        if not line.startswith(METRIC_PREFIX):
            continue
        labels_at = line.find("{")
        name = line[len(METRIC_PREFIX) : labels_at if labels_at >= 0 else line.find(" ")]
        if name in found and (sample := _sample(line, labels_at)) is not None:
            found[name].append(sample)
    return found


def _sample(line: str, labels_at: int) -> Sample | None:
    """Parse one line; None where it has no value. Args: labels_at: where its labels begin, below zero without labels."""
    head, _, rest = line.rpartition("}") if labels_at >= 0 else line.partition(" ")
    try:
        value = float(rest.split()[0])
    except (ValueError, IndexError):
        return None
    return Sample({key: _unescaped(text) for key, text in _LABEL.findall(head[labels_at + 1 :])} if labels_at >= 0 else {}, value)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPES[match[0]], text) if "\\" in text else text
