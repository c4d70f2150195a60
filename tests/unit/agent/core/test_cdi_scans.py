# SPDX-License-Identifier: Apache-2.0
import pytest

from agent.core.cdi_scans import ScanBacklog, ScanPace

PACE = ScanPace(seconds_per_byte=1e-6, least_forgetting_seconds=0.1, most_forgetting_seconds=5.0)


@pytest.mark.parametrize(
    ("spec_bytes", "seconds"),
    [
        pytest.param(0, 0.1, id="at least"),
        pytest.param(1_000_000, 2.0, id="two scans"),
        pytest.param(100_000_000, 5.0, id="at most"),
    ],
)
def test_removed_spec_is_forgotten_after_current_and_next_scan(spec_bytes, seconds):
    assert PACE.forgetting_seconds(spec_bytes) == pytest.approx(seconds)


def test_a_change_that_comes_alone_is_seen_at_once():
    assert ScanBacklog().seen_from(100.0, 0.2) == 100.0
    assert ScanBacklog().changed(100.0, 0.2).seen_from(100.3, 0.2) == 100.3


def test_a_change_during_a_scan_is_seen_by_the_next_one():
    assert ScanBacklog().changed(100.0, 0.2).seen_from(100.05, 0.2) == pytest.approx(100.2)


def test_any_number_of_changes_waits_only_for_running_scan():
    backlog = ScanBacklog()
    for _ in range(40):
        backlog = backlog.changed(100.0, 0.2)
    assert backlog.seen_from(100.05, 0.2) == pytest.approx(100.25)
    assert backlog.seen_from(107.9, 0.2) == pytest.approx(108.0)
    assert backlog.seen_from(108.1, 0.2) == 108.1
