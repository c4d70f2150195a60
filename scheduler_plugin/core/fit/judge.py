# SPDX-License-Identifier: Apache-2.0
"""Applies a verdict to the nodes of one call: why each cannot take the pod, and which is the best. filter, prioritize, replay and what-if
all use it."""

from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler_plugin.core.cluster.columns import Bools, Rows
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import UNKNOWN_ROW
from scheduler_plugin.core.fit.shapes import Shapes, Verdict

Reasons: TypeAlias = npt.NDArray[np.int8]
"""Values of NodeReason."""
REASON_OF: Final = {reason.value: reason for reason in NodeReason}


def reasons_for(verdict: Verdict, rows: Rows, *, all_known: bool = False) -> Reasons:
    """Return a value of NodeReason for each row, including UNKNOWN_ROW. Args: all_known: whether no row is UNKNOWN_ROW."""
    if not len(verdict.reason):
        return np.full(len(rows), NodeReason.NO_GPU.value, dtype=np.int8)
    reasons: Reasons = verdict.reason[rows]
    if not all_known:
        reasons[rows == UNKNOWN_ROW] = NodeReason.NO_GPU.value
    return reasons


def curable(verdict: Verdict, rows: Rows) -> Bools:
    """Return which rows that do not fit would fit without the other pods."""
    if not len(verdict.curable):
        return np.zeros(len(rows), dtype=np.bool_)
    cures: Bools = verdict.curable[rows] & (rows != UNKNOWN_ROW)
    return cures


def counts_of(reasons: Reasons) -> Mapping[NodeReason, int]:
    """Count the rows that do not fit, by reason."""
    return {REASON_OF[value]: count for value, count in Counter(reasons[reasons != NodeReason.FITS.value].tolist()).items()}


def best_row(shapes: Shapes, verdict: Verdict, fitting: Rows, pod_uid: str) -> int:
    """Return the row with the best score; of several, the first by a hash of pod and node."""
    scores = verdict.score[fitting]
    best = fitting[np.flatnonzero(scores == scores.max())]
    return int(best[shapes.tie_break(best, pod_uid)])
