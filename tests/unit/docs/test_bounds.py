# SPDX-License-Identifier: Apache-2.0
"""Bounds that operators read are those of the code."""

from pathlib import Path

from scheduler_plugin.core.cluster.decisions import MAX_KEPT, MAX_RECORDED
from scheduler_plugin.services.explainer import ALLOWED_AT_ONCE, ALLOWED_PER_SECOND
from scheduler_plugin.services.retry import MAX_AT_ONCE, PERIOD_SECONDS
from scheduler_plugin.services.waiting_events import PER_SECOND, REPEAT_SECONDS

TROUBLESHOOTING = Path(__file__).parents[3] / "docs" / "use" / "troubleshooting.md"


def test_documented_bounds_of_decisions_match_code():
    text = " ".join(TROUBLESHOOTING.read_text().split())
    assert f"each of {MAX_KEPT:,} pods that are not bound" in text
    assert f"the latest decisions on {MAX_RECORDED} pods" in text
    assert (PER_SECOND, REPEAT_SECONDS) == (1, 600)
    assert "One event `AliquotNoGpuFits` a second for the whole cluster, and for a pod one in ten minutes" in text
    assert (ALLOWED_AT_ONCE, ALLOWED_PER_SECOND) == (8, 2)
    assert "eight questions at once and two a second after that" in text
    assert 900 < MAX_AT_ONCE / PERIOD_SECONDS < 1100
    assert "the rest at about 1,000 a second" in text
