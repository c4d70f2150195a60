# SPDX-License-Identifier: Apache-2.0
import io

from rich.console import Console

from aliquot.contract.units import GIB
from aliquot_lab.demo.checks import Check
from aliquot_lab.demo.evidence import PodState
from aliquot_lab.demo.scenario import Row
from aliquot_lab.demo.screen import LiveScreen, PlainScreen

REFUSAL = "device plugin PreStartContainer rpc failed with err: rpc error: code = FailedPrecondition desc = 10 GiB are free"
ROWS = [
    Row("train", "GPU 0", 20 * GIB, 10 * GIB, 0, PodState("Running", "", "", started=True, restarts=0)),
    Row("mig", "GPU 7 1g.10gb", 9 * GIB, None, None, PodState("Running", "", "", started=True, restarts=0)),
    Row("too-big", "", 40 * GIB, None, None, PodState("Pending", "CreateContainerConfigError", REFUSAL, started=False, restarts=0)),
]
CHECKS = [Check("kept", "1", "1", passed=True), Check("broken", "1", "2", passed=False)]


def test_plain_lines_have_every_column_and_repeat_only_what_changed(capsys):
    screen = PlainScreen()
    screen.show(ROWS)
    first = capsys.readouterr().out
    screen.show(ROWS)
    assert capsys.readouterr().out == ""
    assert "train" in first
    assert "10 GiB of 20 GiB" in first
    assert "CreateContainerConfigError: 10 GiB are free" in first


def test_plain_result_marks_failed_checks(capsys):
    PlainScreen().result(CHECKS, ["no MIG here"])
    out = capsys.readouterr().out
    assert "FAIL  broken: expected 1; found 2" in out
    assert "Note: no MIG here" in out
    assert "1 of 2 checks passed" in out


def test_the_live_table_shows_pod_device_limit_used_refused_state_and_reason():
    output = io.StringIO()
    with LiveScreen("node", Console(file=output, width=160, force_terminal=True)) as screen:
        screen.show(ROWS)
        screen.quote("listing", "+---+")
        screen.result(CHECKS, [])
    text = output.getvalue()
    for word in (
        "pod",
        "device",
        "limit",
        "used",
        "refused",
        "state",
        "reason",
        "GPU 7 1g.10gb",
        "20 GiB",
        "10 GiB are free",
        "1 of 2 checks passed",
    ):
        assert word in text
    assert "rpc error" not in text
