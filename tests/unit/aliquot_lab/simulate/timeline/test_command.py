# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from aliquot_cli.__main__ import main
from aliquot_lab.simulate.run import PolicyError
from aliquot_lab.simulate.timeline.command import POLICIES, check_policy

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[5]
LISTS = ("--nodes", str(GOLDEN / "nodes.csv"), "--pods", str(GOLDEN / "pods.csv"), "--queues", str(GOLDEN / "queues.csv"))


def call(*arguments):
    return CliRunner().invoke(main, ["simulate", *arguments])


def golden(name, found):
    """Compare with a golden file. Remove the file and run the test twice to write it again."""
    file = GOLDEN / name
    if not file.exists():
        file.write_text(found)
        pytest.fail(f"{file} did not exist and was written")
    assert found == file.read_text()


def test_tables_are_the_golden_ones():
    shown = call(*LISTS, "--policy", "kube-least-allocated", "--baseline", "hami-binpack,kai-binpack", "--seed", "7")
    assert shown.exit_code == 0, shown.output
    golden("tables.md", shown.output)


def test_json_has_the_same_figures_in_one_or_two_processes():
    first, again = (call(*LISTS, "--baseline", "hami-default", "--jobs", jobs, "-o", "json") for jobs in ("1", "2"))
    assert first.output == again.output
    document = json.loads(first.output)
    assert [one["policy"] for one in document["policies"]] == ["frag", "hami-default"]
    for one in document["policies"]:
        assert sum(one["ends"].values()) == 47
        assert one["ends"]["refused"] == 1
        assert 0 < one["allocatedPercent"] < 100
        assert len(one["curve"]) == 240


def test_report_does_not_depend_on_hashes_of_the_process(tmp_path):
    for number in "12":
        environment = {**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "aliquot_cli", "simulate", *LISTS, "--baseline", "kai-binpack", "--report", tmp_path / number]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param((), "expected --nodes and one --pods", id="nothing"),
        pytest.param(LISTS[:2], "expected --nodes and one --pods", id="no pods"),
        pytest.param((*LISTS, "--departures", "0.9"), "--departures cannot be used with --nodes", id="option of traces"),
        pytest.param(("--trace", str(GOLDEN), "--no-preemption"), "--no-preemption cannot be used with --trace", id="option of lists"),
        pytest.param((*LISTS, "--policy", "best"), "expected a policy of frag", id="unknown policy"),
        pytest.param((*LISTS, "--baseline", "kai"), "kai-binpack", id="unknown baseline"),
        pytest.param((*LISTS, "--policy", "frag:cpu=0"), "expected terms of", id="unknown weight"),
        pytest.param((*LISTS, "--baseline", "fgd"), "expected GPUs of one memory size", id="policy for one size"),
        pytest.param(LISTS[:4], "use --queues", id="queue without list"),
        pytest.param((*LISTS[:2], "--pods", "none.csv"), "none.csv: expected a CSV file: No such file", id="no such file"),
    ],
)
def test_wrong_call_says_what_was_expected(arguments, says):
    shown = call(*arguments)
    assert shown.exit_code != 0
    assert says in " ".join(shown.output.split())


@pytest.mark.parametrize("policy", [*POLICIES, "frag:cpu_used=0,whole_node=0.01"])
def test_every_policy_has_a_name(policy):
    check_policy(policy)


def test_weights_belong_to_own_policies_only():
    with pytest.raises(PolicyError, match="found 'hami-binpack:cpu_used=0'"):
        check_policy("hami-binpack:cpu_used=0")
