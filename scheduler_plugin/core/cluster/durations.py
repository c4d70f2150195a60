# SPDX-License-Identifier: Apache-2.0
"""From when on a pod may be ended for others, and from when on others may end for it.

Times are in seconds since 1970. The webhook refuses durations that cannot be read; here such a pod counts as one without the annotation.
"""

import re
from collections.abc import Mapping
from math import inf
from typing import Final

from aliquot import contract
from aliquot.contract.errors import quote
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.pods import PodFacts

_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,7})([smhd])", re.ASCII)


def parse_duration(text: str) -> float | None:
    """Read a duration such as ``90s``, ``30m``, ``12h`` or ``2d``, in seconds; None for another text."""
    found = _DURATION.fullmatch(text)
    return None if found is None else float(int(found[1]) * _UNIT_SECONDS[found[2]])


def check_durations(annotations: Mapping[str, str]) -> None:
    """Check the annotations of a pod. Raises RequestError."""
    for name in (contract.ANNOTATION_MIN_RUNTIME, contract.ANNOTATION_PREEMPTION_DELAY, contract.ANNOTATION_EXPECTED_RUNTIME):
        text = annotations.get(name)
        if text is not None and parse_duration(text) is None:
            raise RequestError(f"{name}: expected a duration such as 90s, 30m, 12h or 2d, found {quote(text)}: correct it, or remove it")
    if parse_duration(annotations.get(contract.ANNOTATION_EXPECTED_RUNTIME, "1s")) == 0:
        raise RequestError(f"{contract.ANNOTATION_EXPECTED_RUNTIME}: expected more than 0 seconds: correct it, or remove it")


def may_end_from(pod: PodFacts) -> float:
    """Return from when on a bound pod may be ended for more important pods; infinite before it started."""
    least = _seconds(pod, contract.ANNOTATION_MIN_RUNTIME)
    if not least:
        return -inf
    return inf if pod.started_at is None else pod.started_at + least


def may_preempt_from(pod: PodFacts) -> float:
    """Return from when on other pods may be ended for a waiting pod."""
    delay = _seconds(pod, contract.ANNOTATION_PREEMPTION_DELAY)
    return -inf if not delay or pod.created_at is None else pod.created_at + delay


def expected_runtime(pod: PodFacts) -> float | None:
    """Return how long the owner of a pod expects it to run, in seconds; None if the pod does not say."""
    return _seconds(pod, contract.ANNOTATION_EXPECTED_RUNTIME) or None


def _seconds(pod: PodFacts, annotation: str) -> float:
    text = pod.gpu.annotations.get(annotation) if pod.gpu is not None else None
    return 0.0 if text is None else parse_duration(text) or 0.0
