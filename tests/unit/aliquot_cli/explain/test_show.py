# SPDX-License-Identifier: Apache-2.0
"""What ``why`` prints of a waiting pod's start."""

from datetime import UTC, datetime

import pytest

from aliquot_cli.explain import show
from aliquot_cli.explain.show import why_lines
from scheduler_plugin.core.explain.one import ReasonCount
from scheduler_plugin.core.explain.why import Start, Why

AT = datetime(2026, 3, 2, 14, 20, tzinfo=UTC).timestamp()
FULL = (ReasonCount("GPUs already in use", 1, ("n1",)),)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "local_zone", lambda: UTC)


def lines(**fields: object) -> list[str]:
    return list(why_lines(Why("team/big", "u1", nodes=1, reasons=FULL, **fields)))  # type: ignore[arg-type]


def test_expected_start_follows_reasons() -> None:
    shown = lines(start=Start(("n1",), AT, AT - 480, AT + 1260))
    assert shown[2] == (
        "expected to start 2026-03-02 14:20 UTC (80 %: 2026-03-02 14:12 UTC to 2026-03-02 14:41 UTC); room is held on node n1"
    )


def test_overdue_pods_are_counted() -> None:
    assert lines(start=Start(("n1", "n2"), AT, AT, AT, overdue=2))[2].endswith(
        "room is held on nodes n1, n2; running there for longer than expected: 2"
    )


def test_unknown_time_names_the_annotation() -> None:
    found = lines(start=Start(("n1",), unknown=3))[2]
    assert found.startswith("room is held on node n1, and it is unknown when it is free: 3 pods there have no expected end")
    assert "aliquot.dev/expected-runtime" in found


def test_pod_that_is_kept_off_sees_for_which_pod() -> None:
    assert "room on node n1 is held for team/other" in lines(held="room on node n1 is held for team/other")


def test_gang_with_held_room_that_fits_in_part_shows_start() -> None:
    shown = lines(fitting=1, gang="gang: no room for enough members at once", start=Start(("n1",), AT, AT, AT))
    assert any(line.startswith("expected to start") for line in shown)
