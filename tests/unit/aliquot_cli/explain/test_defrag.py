# SPDX-License-Identifier: Apache-2.0
"""``aliquot defrag`` on saved snapshots."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from aliquot_cli import exit_codes
from aliquot_cli.__main__ import main
from aliquot_cli.errors import AccessError
from aliquot_cli.explain import defrag
from aliquot_cli.explain.scheduler import SchedulerAccess
from tests.fakes.node_rules import with_rules
from tests.unit.scheduler_plugin.builders import make_pod
from tests.unit.scheduler_plugin.core.consolidate.test_plan import Scene


@pytest.fixture
def scene() -> Scene:
    """Two nodes of two GPUs with one pod each, and a pod that waits for two GPUs."""
    scene = Scene(2)
    scene.run("n1", 0, hours=3)
    scene.run("n2", 0, hours=7)
    scene.state.set_pod(make_pod("big", vgpu="2", vgpu_memory="2000"))
    return scene


def run(scene: Scene, folder: Path, *arguments: str) -> Result:
    snapshot = folder / "snapshot.json"
    snapshot.write_bytes(msgspec.json.encode(scene.snapshot()))
    return CliRunner().invoke(main, ["defrag", "plan", "--snapshot", str(snapshot), *arguments])


@pytest.mark.parametrize("arguments", [(), ("team/pod-big",), ("pod-big", "-n", "team")])
def test_plan_shows_moves_seats_and_cost(scene: Scene, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run(scene, tmp_path, *arguments)
    assert result.exit_code == exit_codes.OK, result.output
    lines = result.output.splitlines()
    assert lines[0] == "team/pod-big: 1 move frees 2 GPUs on node n1"
    assert lines[1] == "  1. team/pod-n1-0-0: node n1 -> n2, 1 GPUs, loses 3.0 GPU-hours"
    assert lines[2].startswith("lost in all: 3.0 GPU-hours")


class Evictions:
    """An API server that gets evictions. ``refuses`` are the names of pods with an exhausted budget."""

    def __init__(self, refuses: tuple[str, ...] = ()) -> None:
        self.refuses = refuses
        self.status, self.why = 429, "the budget allows no disruption"
        self.received: list[tuple[str, Mapping[str, Any]]] = []

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        self.received.append((path, body))
        if body["metadata"]["name"] in self.refuses:
            raise AccessError(f"{path.partition('?')[0]}: {self.status} {self.why}", self.status)
        return {}


@pytest.fixture
def live(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Evictions:
    """A live cluster in the state of the scene."""
    cluster = Evictions()
    monkeypatch.setattr(SchedulerAccess, "page", lambda *_: msgspec.json.encode(scene.snapshot()).decode())
    monkeypatch.setattr(defrag, "connect", lambda _: cluster)
    return cluster


def test_each_eviction_is_tried_on_live_cluster_by_dry_run(live: Evictions) -> None:
    result = CliRunner().invoke(main, ["defrag", "plan", "team/pod-big"])
    assert result.exit_code == exit_codes.OK, result.output
    assert result.output.splitlines()[-1] == "dry runs of the Eviction API: each eviction is allowed now"
    [(path, body)] = live.received
    assert path == "/api/v1/namespaces/team/pods/pod-n1-0-0/eviction?dryRun=All"
    assert body["deleteOptions"] == {"preconditions": {"uid": "n1-0-0"}, "dryRun": ["All"]}


def test_plan_with_refused_eviction_names_pod_and_answer(live: Evictions) -> None:
    live.refuses = ("pod-n1-0-0",)
    result = CliRunner().invoke(main, ["defrag", "plan", "team/pod-big"])
    assert result.exit_code == exit_codes.FINDINGS, result.output
    why = "/api/v1/namespaces/team/pods/pod-n1-0-0/eviction: 429 the budget allows no disruption"
    assert result.output.splitlines()[-1] == f"  team/pod-n1-0-0: {why}"
    found = CliRunner().invoke(main, ["defrag", "plan", "team/pod-big", "-o", "json"])
    assert (found.exit_code, json.loads(found.output)["refused_evictions"]) == (exit_codes.FINDINGS, {"team/pod-n1-0-0": why})


@pytest.mark.parametrize(
    ("status", "why", "asked"),
    [
        (403, 'pods "pod-n1-0-0" is forbidden: User "u" cannot create resource "pods/eviction"', False),
        (403, "admission webhook denied the request", True),
        (401, "Unauthorized", False),
        (0, "the cluster cannot be reached", False),
        (409, "the UID is another", True),
    ],
)
def test_user_who_may_not_ask_sees_plan_without_dry_runs(live: Evictions, status: int, why: str, asked: bool) -> None:
    live.refuses, live.status, live.why = ("pod-n1-0-0",), status, why
    result = CliRunner().invoke(main, ["defrag", "plan", "team/pod-big"])
    assert result.exit_code == (exit_codes.FINDINGS if asked else exit_codes.OK), result.output
    assert ("no dry runs of the Eviction API: " in result.stderr) is not asked


@pytest.mark.parametrize("elsewhere", ["--snapshot", "--url"])
def test_no_api_server_is_asked_about_plan_from_elsewhere(scene: Scene, live: Evictions, tmp_path: Path, elsewhere: str) -> None:
    taken = tmp_path / "taken.json"
    taken.write_bytes(msgspec.json.encode(scene.snapshot()))
    source = str(taken) if elsewhere == "--snapshot" else "http://scheduler.test"
    result = CliRunner().invoke(main, ["defrag", "plan", "team/pod-big", elsewhere, source, "-o", "json"])
    assert (result.exit_code, live.received) == (exit_codes.OK, []), result.output
    assert "refused_evictions" not in json.loads(result.output)


def test_plan_for_whole_nodes_names_them(scene: Scene, tmp_path: Path) -> None:
    result = run(scene, tmp_path, "--whole-nodes", "1", "-o", "wide")
    assert result.exit_code == exit_codes.OK, result.output
    assert result.output.startswith("1 whole nodes: 1 move frees these nodes: n1\n  1. team/pod-n1-0-0: node n1 -> n2 (GPU-n2-1)")


def test_without_plan_says_why_for_each_node(scene: Scene, tmp_path: Path) -> None:
    scene.run("n1", 1, movable=False)
    scene.run("n2", 1, movable=False)
    result = run(scene, tmp_path)
    assert result.exit_code == exit_codes.FINDINGS
    assert result.output.splitlines() == [
        "team/pod-big: no plan: no node can be freed by moves",
        "       2  not marked aliquot.dev/movable: true",
    ]


@pytest.mark.parametrize("reads", [True, False])
def test_pod_with_node_selector_gets_plan_or_the_missing_gate(scene: Scene, tmp_path: Path, reads: bool) -> None:
    scene.state.set_pod(with_rules(scene.state.pods["big"], {"nodeSelector": {"pool": "b"}}))
    if reads:
        scene.label("a", "b")
    saved = tmp_path / "plan.json"
    result = run(scene, tmp_path, "--save", str(saved))
    says = "1 move frees 2 GPUs on node n2" if reads else "no plan: it requires labels of its node, which the scheduler has not read"
    assert result.output.splitlines()[0].startswith(f"team/pod-big: {says}")
    assert not reads or CliRunner().invoke(main, ["defrag", "check", str(saved)]).exit_code == exit_codes.OK


def test_saved_plan_replays_and_changed_one_does_not(scene: Scene, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    assert run(scene, tmp_path, "--save", str(saved), "-o", "json").exit_code == exit_codes.OK
    good = CliRunner().invoke(main, ["defrag", "check", str(saved)])
    assert (good.exit_code, "1 moves replay to the same end" in good.output) == (exit_codes.OK, True)
    document = json.loads(saved.read_text())
    document["plan"]["moves"][0]["to_node"] = "n1"
    saved.write_text(json.dumps(document))
    changed = CliRunner().invoke(main, ["defrag", "check", str(saved)])
    assert (changed.exit_code, "does not replay: the document was changed" in changed.output) == (exit_codes.FINDINGS, True)
    saved.write_text("{}")
    assert CliRunner().invoke(main, ["defrag", "check", str(saved)]).exit_code == exit_codes.FAILED


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("team/other",), exit_codes.NOT_FOUND, "no pod team/other with a GPU request waits"),
        (("team/pod-big", "--whole-nodes", "1"), exit_codes.USAGE, "not both"),
    ],
)
def test_wrong_arguments_are_refused(scene: Scene, tmp_path: Path, arguments: tuple[str, ...], status: int, says: str) -> None:
    result = run(scene, tmp_path, *arguments)
    assert (result.exit_code, says in result.output) == (status, True), result.output
