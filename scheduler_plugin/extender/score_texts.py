# SPDX-License-Identifier: Apache-2.0
"""The replies of prioritize, kept by shape: only the scores of nodes that changed are written again."""

from collections import OrderedDict

import numpy as np

from scheduler_plugin.core.cluster.score_text import ScoreText, Skeleton
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.shapes import MAX_KEPT, PodShape, Verdict
from scheduler_plugin.extender.cache import keep


class ScoreTexts:
    """One text for each recent shape. All are dropped when a node comes or goes."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._by_shape: OrderedDict[PodShape, ScoreText] = OrderedDict()
        self._skeleton: Skeleton | None = None
        self._naming = -1
        """The state's naming counter for which the skeleton was made."""

    def of(self, shape: PodShape, verdict: Verdict) -> ScoreText:
        """Return the text for a shape, up to date with its verdict."""
        skeleton = self._current_skeleton()
        kept = self._by_shape.get(shape)
        if kept is None or kept.skeleton is not skeleton:
            kept = ScoreText(skeleton)
        keep(self._by_shape, shape, kept, MAX_KEPT)
        rows = np.flatnonzero((self._state.columns.rated[: len(verdict.score)] > kept.written_at) & skeleton.named)
        kept.write(rows, verdict.score[rows])
        kept.written_at = verdict.computed_at
        return kept

    def _current_skeleton(self) -> Skeleton:
        if self._skeleton is None or self._naming != self._state.naming_count:
            self._naming = self._state.naming_count
            self._skeleton = Skeleton(self._state.names)
        return self._skeleton
