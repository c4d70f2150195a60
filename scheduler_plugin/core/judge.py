"""What a verdict means for the nodes of one question: why each cannot take the pod, and which is the best. Filter, prioritize, replay and
what-if all ask here."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from scheduler_plugin.core.columns import Bools, Ints, Rows
from scheduler_plugin.core.reasons import NodeReason
from scheduler_plugin.core.shapes import Shapes, Verdict
from scheduler_plugin.core.state import UNKNOWN_ROW

REASON_OF: Final = {reason.value: reason for reason in NodeReason}


def reasons_for(verdict: Verdict, rows: Rows, *, all_known: bool = False) -> Ints:
    """Return a value of NodeReason for each row, also for UNKNOWN_ROW. Args: all_known: whether that is not among the rows."""
    if not len(verdict.reason):
        return np.full(len(rows), NodeReason.NO_GPU.value, dtype=np.int64)
    reasons: Ints = verdict.reason[rows]
    return reasons if all_known else np.where(rows == UNKNOWN_ROW, NodeReason.NO_GPU.value, reasons)


def curable(verdict: Verdict, rows: Rows) -> Bools:
    """Say of rows that do not fit whether they would once other pods are gone."""
    if not len(verdict.curable):
        return np.zeros(len(rows), dtype=np.bool_)
    cures: Bools = verdict.curable[rows] & (rows != UNKNOWN_ROW)
    return cures


def counts_of(reasons: Ints) -> Mapping[NodeReason, int]:
    """Count the rows that do not fit by their reason."""
    return {REASON_OF[value]: count for value, count in Counter(reasons[reasons != NodeReason.FITS.value].tolist()).items()}


def best_row(shapes: Shapes, verdict: Verdict, fitting: Rows, pod_uid: str) -> int:
    """Return the row with the best score; of several, the one that a hash of pod and node puts first."""
    scores = verdict.score[fitting]
    best = fitting[np.flatnonzero(scores == scores.max())]
    return int(best[shapes.tie_break(best, pod_uid)])
