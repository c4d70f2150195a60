"""What a verdict means for the nodes of one question: why each cannot take the pod, and which is the best. Filter, prioritize, replay and
what-if all ask here."""

from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler_plugin.core.columns import Bools, Rows
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import Shapes, Verdict
from scheduler_plugin.core.state import UNKNOWN_ROW

Reasons: TypeAlias = npt.NDArray[np.int8]
"""Values of NodeReason."""
REASON_OF: Final = {reason.value: reason for reason in NodeReason}


def reasons_for(verdict: Verdict, rows: Rows, *, all_known: bool = False) -> Reasons:
    """Return a value of NodeReason for each row, also for UNKNOWN_ROW. Args: all_known: whether that is not among the rows."""
    if not len(verdict.reason):
        return np.full(len(rows), NodeReason.NO_GPU.value, dtype=np.int8)
    reasons: Reasons = verdict.reason[rows]
    if not all_known:
        reasons[rows == UNKNOWN_ROW] = NodeReason.NO_GPU.value
    return reasons


def curable(verdict: Verdict, rows: Rows) -> Bools:
    """Say of rows that do not fit whether they would once other pods are gone."""
    if not len(verdict.curable):
        return np.zeros(len(rows), dtype=np.bool_)
    cures: Bools = verdict.curable[rows] & (rows != UNKNOWN_ROW)
    return cures


def counts_of(reasons: Reasons) -> Mapping[NodeReason, int]:
    """Count the rows that do not fit by their reason."""
    return {REASON_OF[value]: count for value, count in Counter(reasons[reasons != NodeReason.FITS.value].tolist()).items()}


def best_row(shapes: Shapes, verdict: Verdict, fitting: Rows, pod_uid: str) -> int:
    """Return the row with the best score; of several, the one that a hash of pod and node puts first."""
    scores = verdict.score[fitting]
    best = fitting[np.flatnonzero(scores == scores.max())]
    return int(best[shapes.tie_break(best, pod_uid)])
