# SPDX-License-Identifier: Apache-2.0
"""Of several replicas of the scheduler, ``why`` shows the one that knows most: who leads now, and who led before, is not known to it."""

from itertools import permutations

import msgspec
import pytest
from click.testing import CliRunner

from aliquot_cli.explain.commands import why
from aliquot_cli.explain.scheduler import SchedulerAccess
from scheduler_plugin.core.explain.why import Start, Why

LEADER = Why("team/big", "u1", nodes=1, left_out=0, start=Start(("n1",)))
EARLIER_LEADER = Why("team/big", "u1", nodes=1, left_out=0)
STANDBY = Why("team/big", "u1", nodes=1)
RUNS = Why("team/big", "u1", node="n1")


def shown(answers: tuple[Why | str, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Return what is printed, and how many replicas were called."""
    called: list[Why | str] = []

    def pages(*_: object, **__: str):
        for answer in answers:
            called.append(answer)
            yield answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()

    monkeypatch.setattr(SchedulerAccess, "pages", pages)
    return CliRunner().invoke(why, ["team/big", "--url", "http://scheduler"]).output, len(called)


@pytest.mark.parametrize("answers", list(permutations((LEADER, EARLIER_LEADER, STANDBY))))
def test_start_is_shown_whichever_replica_replies_first(answers, monkeypatch):
    output, called = shown(answers, monkeypatch)
    assert "room is held on node n1" in output
    assert called == answers.index(LEADER) + 1


@pytest.mark.parametrize("answers", list(permutations((EARLIER_LEADER, STANDBY))))
def test_without_held_room_full_reply_is_shown(answers, monkeypatch):
    output, called = shown(answers, monkeypatch)
    assert "not checked" not in output
    assert called == 2


def test_one_replica_is_enough_for_a_pod_that_runs(monkeypatch):
    assert shown((RUNS, STANDBY), monkeypatch)[1] == 1


@pytest.mark.parametrize("answers", list(permutations((EARLIER_LEADER, '{"of": "another version"}'))))
def test_replica_of_another_version_is_passed_over(answers, monkeypatch):
    """As during an update."""
    assert "not checked" not in shown(answers, monkeypatch)[0]
    assert "team/big" in shown(answers, monkeypatch)[0]


def test_only_replies_of_another_version_are_an_error(monkeypatch):
    assert "unknown format" in shown(("{}", "[]"), monkeypatch)[0]
