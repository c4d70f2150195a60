# SPDX-License-Identifier: Apache-2.0
"""Explanations from a running scheduler, and the commands that show them, as an operator meets them."""

import asyncio
import json
from functools import partial
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from aliquot import contract
from aliquot.contract.gpunode import encode_gpu_node
from aliquot_cli.__main__ import main
from aliquot_cli.errors import AccessError, NotFoundError
from aliquot_cli.explain import show
from scheduler_plugin.core.backfill.hold import SENTENCE
from scheduler_plugin.core.explain.why import Why
from scheduler_plugin.core.fit.kube_filters import LEFT_OUT, NOT_CHECKED
from scheduler_plugin.services import backfiller, waiting_events
from scheduler_plugin.settings import Settings
from tests.integration.test_extender import Running, running
from tests.unit.scheduler_plugin.api import FakeApi, node_object, pod_object
from tests.unit.scheduler_plugin.builders import make_node

NODES = ("n1", "n2")


@pytest.fixture
async def api():
    async with FakeApi() as served:
        for name in NODES:
            await served.put("nodes", node_object(name))
            await served.put("gpunodes", json.loads(encode_gpu_node(make_node(name, 2))))
        yield served


async def create(api: FakeApi, extender: Running, name: str, *nodes: str, **fields: Any) -> dict:
    """Create a pod and have it scheduled; without nodes it stays waiting."""
    pod = await api.put("pods", pod_object(name, **fields))
    await extender.until(lambda: pod["metadata"]["uid"] in extender.state.pods)
    if nodes:
        await extender.schedule(pod, *nodes)
    else:
        await extender.filter(pod, *NODES)
    return pod


def runs_on(extender: Running, node: str) -> bool:
    """Whether the pod that keeps a node busy is known to run there."""
    return extender.state.pods[f"uid-busy-{node}"].node_name == node


async def aliquot(extender: Running, *arguments: str) -> Result:
    """Run the command against the scheduler's own address."""
    url = f"http://{extender.scheduler.addresses['status']}"
    command = [*arguments[:1], *(["--url", url] if arguments[0] != "replay" else []), *arguments[1:]]
    return await asyncio.to_thread(CliRunner().invoke, main, command)


async def full(api: FakeApi, extender: Running) -> dict:
    """Fill the cluster, and add a pod that waits."""
    for number in range(4):
        await create(api, extender, f"busy-{number}", *NODES, vgpu="1", vgpu_memory=str(600 + number))
    return await create(api, extender, "late", vgpu="1", vgpu_memory="500")


async def test_why_names_reasons_and_the_least_that_would_help(api):
    async with running(api) as extender:
        await full(api, extender)
        result = await aliquot(extender, "why", "team/late")
    assert result.exit_code == 4
    lines = result.output.splitlines()
    assert lines[0] == "team/late: 0 of 2 nodes fit"
    assert lines[1].split("  ", 3)[-1].strip().startswith("2  not enough free memory on one GPU")
    assert "  - ask for at most 400 MiB of memory per vGPU instead of 500 MiB: it would fit on node" in result.output
    assert "  - free 100 MiB on GPU-" in result.output
    assert "  - end team/busy-" in result.output


async def test_why_of_a_bound_pod_says_where_it_is(api):
    async with running(api) as extender:
        await create(api, extender, "busy", "n2", vgpu="1", vgpu_memory="600")
        await extender.until(lambda: extender.state.pods["uid-busy"].node_name == "n2")
        result = await aliquot(extender, "why", "busy", "-n", "team", "-o", "json")
    assert result.exit_code == 0
    assert json.loads(result.output)["node"] == "n2"
    assert json.loads(result.output)["devices"][0].startswith("GPU-n2-")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("why", "team/nobody"), 3, "pod team/nobody is unknown here"),
        (("what-if", "--drain", "n9"), 3, "no node n9 with GPUs"),
        (("what-if", "--cordon", "GPU-x"), 3, "no GPU GPU-x"),
    ],
)
async def test_missing_pod_is_reported(api, arguments, status, says):
    async with running(api) as extender:
        result = await aliquot(extender, *arguments)
    assert (result.exit_code, says in result.output) == (status, True), result.output


async def test_a_waiting_pod_gets_one_event_that_says_what_would_help(api, monkeypatch):
    monkeypatch.setattr(waiting_events, "PERIOD_SECONDS", 0.02)
    async with running(api) as extender:
        late = await full(api, extender)
        await extender.until(lambda: bool(api.events))
        for _ in range(3):  # kube-scheduler tries again and again
            await extender.filter(late, *NODES)
        await asyncio.sleep(0.2)
    (event,) = api.events
    assert event["involvedObject"] == {"apiVersion": "v1", "kind": "Pod", "namespace": "team", "name": "late", "uid": "uid-late"}
    assert (event["reason"], event["type"]) == ("AliquotNoGpuFits", "Warning")
    assert event["message"].startswith("0 of 2 nodes fit: 2 not enough free memory on one GPU. What would help: ask for at most 400 MiB")


async def test_member_waiting_for_gang_gets_that_explanation(api, monkeypatch):
    monkeypatch.setattr(waiting_events, "PERIOD_SECONDS", 0.02)
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    async with running(api) as extender:
        await create(api, extender, "first", vgpu="1", annotations=gang)
        result = await aliquot(extender, "why", "team/first")
        assert (result.exit_code, result.output) == (
            4,
            "team/first: 2 of 2 nodes fit, but gang: 2 members must start together, and fewer with GPUs exist\n",
        )
        await extender.until(lambda: bool(api.events))
        await create(api, extender, "second", vgpu="1", annotations=gang)
        assert (await aliquot(extender, "why", "team/first")).exit_code == 0, "room is held for both"
    assert "gang: 2 members must start together" in api.events[0]["message"]


async def test_saved_decision_replays_identically_after_all_changes(api, tmp_path):
    saved = tmp_path / "decision.json"
    async with running(api) as extender:
        await full(api, extender)
        assert (await aliquot(extender, "why", "team/busy-0", "--save", str(saved))).exit_code == 0
    result = await asyncio.to_thread(CliRunner().invoke, main, ["replay", str(saved)])
    assert (result.exit_code, "same as recorded" in result.output) == (0, True), result.output
    document = json.loads(saved.read_text())
    document["answer"]["chosen"] = "n9"
    saved.write_text(json.dumps(document))
    result = await asyncio.to_thread(CliRunner().invoke, main, ["replay", str(saved)])
    assert (result.exit_code, "chosen: recorded n9, now n" in result.output) == (4, True), result.output


@pytest.mark.parametrize(
    ("file", "node"),
    [
        pytest.param({}, "n1", id="defaults: the half-used GPU is completed"),
        pytest.param({"policy": "spread"}, "n2", id="another policy"),
        pytest.param({"weights": {"frag": {"policy": -1.0}}}, "n2", id="other weights"),
        pytest.param({"weights": {"spread": {"policy": -1.0}}}, "n1", id="other weights of a policy that is not asked for"),
    ],
)
async def test_policy_and_weights_of_the_settings_decide(api, tmp_path, file, node):
    config, saved = tmp_path / "scheduler.yaml", tmp_path / "decision.json"
    config.write_text(yaml.safe_dump({"webhookAddress": ""} | file))
    settings = Settings.load(["--config", str(config)], {})
    async with running(api, policy=settings.policy, weights=settings.weights) as extender:
        await create(api, extender, "first", "n1", vgpu="1", vgpu_memory="500", vgpu_cores="50")
        second = await api.put("pods", pod_object("second", vgpu="1", vgpu_memory="500", vgpu_cores="50"))
        assert await extender.schedule(second, *NODES) == node
        assert (await aliquot(extender, "why", "team/second", "--save", str(saved))).exit_code == 0
    result = await asyncio.to_thread(CliRunner().invoke, main, ["replay", str(saved)])
    assert (result.exit_code, "same as recorded" in result.output) == (0, True), result.output


async def test_decision_on_gang_member_replays_identically(api, tmp_path):
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    says = {
        "first": "0 of 2 nodes fit, gang: 2 members must start together, and fewer with GPUs exist",
        "second": "1 of 2 nodes fit, node n",
    }
    async with running(api) as extender:
        for name in says:
            await create(api, extender, name, vgpu="1", annotations=gang)
            await aliquot(extender, "why", f"team/{name}", "--save", str(tmp_path / name))
    for name, sentence in says.items():
        result = await asyncio.to_thread(CliRunner().invoke, main, ["replay", str(tmp_path / name)])
        assert (result.exit_code, "same as recorded" in result.output) == (0, True), result.output
        assert result.output.startswith(f"team/{name}: {sentence}")


async def test_what_if_moves_drained_pods_and_places_new_ones(api, tmp_path):
    manifest = tmp_path / "new.yaml"
    manifest.write_text(yaml.safe_dump(deployment(replicas=3, limits={"nvidia.com/vgpu-memory": "4Gi"})))
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(deployment(replicas=2, limits={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 300})))
    async with running(api) as extender:
        await create(api, extender, "busy", "n1", vgpu="1", vgpu_memory="600")
        await extender.until(lambda: extender.state.pods["uid-busy"].node_name == "n1")
        before = extender.state.columns.change_count
        drained = await aliquot(extender, "what-if", "--drain", "n1", "--add", str(small), "-o", "json")
        refused = await aliquot(extender, "what-if", "--add", str(manifest))
        refused_wide = await aliquot(extender, "what-if", "--add", str(manifest), "-o", "wide")
        assert extender.state.columns.change_count == before, "a trial changes nothing"
    placements = json.loads(drained.output)["placements"]
    assert drained.exit_code == 0
    assert [(one["pod"], one["node"]) for one in placements] == [("team/busy", "n2"), ("default/web-0", "n2"), ("default/web-1", "n2")]
    assert refused.exit_code == 4
    assert "default/web-0: fits nowhere: 2 not enough free memory on one GPU" in refused.output
    assert "default/web-0: fits nowhere: 2 not enough free memory on one GPU (n1, n2)" in refused_wide.output


async def test_what_if_says_what_it_did_not_check(api, tmp_path):
    async with running(api) as extender:
        for form in ("table", "json"):
            result = await aliquot(extender, "what-if", "-o", form)
            assert (result.exit_code, NOT_CHECKED in result.output) == (0, True)
            assert "not checked" in result.output.splitlines()[-1] or "not_checked" in json.loads(result.output)


async def test_pod_queried_for_fewer_nodes_gets_explanation_for_those(api, monkeypatch):
    monkeypatch.setattr(waiting_events, "PERIOD_SECONDS", 0.02)
    async with running(api) as extender:
        for number in range(2):
            await create(api, extender, f"busy-{number}", "n1", vgpu="1", vgpu_memory=str(600 + number))
        late = await api.put("pods", pod_object("late", vgpu="1", vgpu_memory="500"))
        await extender.until(lambda: "uid-late" in extender.state.pods)
        unasked = await aliquot(extender, "why", "team/late")
        await extender.filter(late, "n1")
        asked = await aliquot(extender, "why", "team/late")
        as_json = json.loads((await aliquot(extender, "why", "team/late", "-o", "json")).output)
        await extender.until(lambda: bool(api.events))
    assert (unasked.exit_code, f"1 of 2 nodes fit (not checked: {NOT_CHECKED})" in unasked.output) == (0, True)
    assert (asked.exit_code, f"1  {LEFT_OUT}  (n2)" in asked.output, "not checked" in asked.output) == (4, True, False)
    assert "node n2" not in asked.output
    assert (as_json["left_out"], as_json["fitting"]) == (1, 0)
    assert LEFT_OUT in api.events[0]["message"]


async def test_explanation_from_disconnected_cluster_states_its_age(api, monkeypatch):
    monkeypatch.setattr(show, "STALE_SECONDS", 0.3)
    async with running(api) as extender:
        await full(api, extender)
        await extender.until(lambda: all(pod.node_name for pod in extender.state.pods.values() if pod.name != "late"))
        known = extender.state.columns.change_count
        api.silent = True
        await api.break_watches()
        await asyncio.sleep(0.4)
        for page in ("/explain/why?namespace=team&pod=late", "/explain/snapshot"):
            document = json.loads((await extender.page(page))[1])
            assert document["generation"] == extender.state.columns.change_count
            assert 0.4 <= document["age_seconds"] <= extender.scheduler.cluster.watch.age_seconds()
        for command, line in ((("why", "team/late"), -1), (("what-if",), -2)):
            assert "this is the cluster's state " in (await aliquot(extender, *command)).output.splitlines()[line]
        api.silent = False
        await api.delete("pods", "busy-0", "team")
        await extender.until(lambda: "uid-busy-0" not in extender.state.pods)
        assert json.loads((await extender.page("/explain/snapshot"))[1])["generation"] > known


async def test_explanation_before_full_sync_states_that(api):
    api.held_back.add("poddisruptionbudgets")
    await api.put("pods", pod_object("early", vgpu="1"))
    async with running(api, ready=False) as extender:
        await extender.until(lambda: "uid-early" in extender.state.pods)
        result = await aliquot(extender, "why", "team/early")
        assert json.loads((await extender.page("/explain/why?namespace=team&pod=early"))[1])["age_seconds"] is None
    assert result.output.splitlines()[-1] == "the scheduler has not listed the whole cluster yet: this result can be incomplete"


async def test_unsavable_decision_is_reported(api):
    async with running(api) as extender:
        await create(api, extender, "busy", "n2", vgpu="1", vgpu_memory="600")
        for command in (("what-if",), ("why", "team/busy")):
            result = await aliquot(extender, *command, "--save", "/nonexistent/x.json")
            assert isinstance(result.exception, SystemExit)
            assert (result.exit_code, "/nonexistent/x.json cannot be written: No such file" in result.output) == (2, True), result.output


async def test_what_if_places_a_gang_whole_or_not_at_all(api, tmp_path):
    files = []
    for name, replicas in (("small", 2), ("large", 3)):
        document = deployment(replicas=replicas, limits={"nvidia.com/vgpu": 1})
        document["metadata"]["name"] = name
        gang = {contract.ANNOTATION_GANG: name, contract.ANNOTATION_GANG_MIN: str(replicas)}
        document["spec"]["template"].setdefault("metadata", {})["annotations"] = gang
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(document))
    async with running(api) as extender:
        result = await aliquot(extender, "what-if", "--add", str(files[0]), "--add", str(files[1]))
    assert result.exit_code == 4
    lines = result.output.splitlines()
    assert all(f"default/small-{number}: node n" in lines[number] for number in range(2))
    sentence = "gang large: 3 members must start together, and there is no room for enough members at once"
    assert lines[2:5] == [f"default/large-{number}: {sentence}" for number in range(3)]


async def test_what_if_tries_a_cordon_and_another_policy_on_a_saved_snapshot(api, tmp_path):
    manifest, saved = tmp_path / "new.yaml", tmp_path / "snapshot.json"
    manifest.write_text(yaml.safe_dump(deployment(replicas=4, limits={"nvidia.com/vgpu-memory": "100Mi"})))
    async with running(api) as extender:
        packed = await aliquot(extender, "what-if", "--add", str(manifest), "--policy", "binpack", "--save", str(saved), "-o", "json")
    spread = await asyncio.to_thread(
        CliRunner().invoke, main, ["what-if", "--snapshot", str(saved), "--add", str(manifest), "--policy", "spread", "-o", "json"]
    )
    cordons = [f"--cordon=GPU-{gpu}" for gpu in ("n1-0", "n1-1", "n2-0")]
    cordoned = await asyncio.to_thread(
        CliRunner().invoke, main, ["what-if", "--snapshot", str(saved), "--add", str(manifest), *cordons, "-o", "json"]
    )
    assert len(devices(packed)) == 1
    assert len(devices(spread)) == 4
    assert devices(cordoned) == {"GPU-n2-1"}


def devices(result: Result) -> set[str]:
    assert result.exit_code == 0, result.output
    return {uuid for placement in json.loads(result.output)["placements"] for uuid in placement["devices"]}


def deployment(replicas: int, limits: dict[str, Any]) -> dict[str, Any]:
    container = {"name": "main", "image": "x", "resources": {"limits": limits}}
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [container]}}
    spec = {"replicas": replicas, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}


ODD_POD = "kind: Pod\nspec: {containers: [{name: m, resources: {limits: 7}}]}"


@pytest.mark.parametrize("text", ["kind: Service", "a: [", "kind: Deployment", ODD_POD])
async def test_invalid_manifest_is_refused_with_reason(api, tmp_path, text):
    manifest = tmp_path / "odd.yaml"
    manifest.write_text(text)
    async with running(api) as extender:
        result = await aliquot(extender, "what-if", "--add", str(manifest))
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert result.exception is None or isinstance(result.exception, SystemExit)


async def test_decisions_are_listed_and_too_many_questions_are_refused(api):
    async with running(api) as extender:
        await full(api, extender)
        status, text = await extender.page("/decisions")
        assert status == 200
        lines = json.loads(text)
        assert [line["pod"] for line in lines] == ["team/late", "team/busy-3", "team/busy-2", "team/busy-1", "team/busy-0"]
        assert lines[0]["failed"] == {"memory": 2}
        assert lines[-1]["chosen"] in NODES
        assert (await extender.page("/explain/why"))[0] == 400
        statuses = [(await extender.page("/decisions"))[0] for _ in range(10)]
        assert 429 in statuses
        assert (await extender.filter(api.pod("late"), *NODES))["NodeNames"] == [], "verbs go on"


async def test_the_pages_can_be_switched_off(api):
    async with running(api, explain_pages=False) as extender:
        assert (await extender.page("/explain/snapshot"))[0] == 404
        assert (await extender.page("/metrics"))[0] == 200


class ProxiedCluster:
    """An API server that proxies two replicas; the first knows no decision, or knows less."""

    def __init__(self, answer: str, first: str | click.ClickException | None = None) -> None:
        self.answer, self.first = answer, first or NotFoundError("no recent decision")
        self.asked: list[str] = []

    def get(self, path: str, query: Any = None) -> Any:
        assert (path, query) == ("/api/v1/namespaces/aliquot-system/pods", {"labelSelector": "app.kubernetes.io/name=aliquot-scheduler"})
        phases = {"s0": "Failed", "s1": "Running", "s2": "Running"}
        return {"items": [{"metadata": {"name": name}, "status": {"phase": phase}} for name, phase in phases.items()]}

    def text(self, path: str) -> str:
        self.asked.append(path)
        if "/s1:" in path:
            if isinstance(self.first, str):
                return self.first
            raise self.first
        return self.answer


def test_replicas_are_queried_through_api_server_until_one_knows_pod(monkeypatch, tmp_path):
    answer = json.dumps({"pod": "team/late", "uid": "u", "node": "n1", "devices": ["GPU-1"]})
    cluster = ProxiedCluster(answer)
    monkeypatch.setattr("aliquot_cli.explain.scheduler.connect", lambda target: cluster)
    saved = tmp_path / "decision.json"
    result = CliRunner().invoke(main, ["why", "team/late", "--save", str(saved)])
    assert (result.exit_code, result.output) == (0, "team/late: bound to node n1 with GPU-1\n")
    proxy = "/api/v1/namespaces/aliquot-system/pods/{}:9412/proxy/explain/why?namespace=team&pod=late"
    assert cluster.asked[:2] == [proxy.format("s1"), proxy.format("s2")]
    assert saved.read_text() == answer


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (Why("team/late", "u", nodes=2, fitting=1), Why("team/late", "u", nodes=2, left_out=1), "0 of 2 nodes fit"),
        (Why("team/late", "u", nodes=2, fitting=1), Why("team/late", "u", nodes=2, fitting=2), "2 of 2 nodes fit (not checked"),
        (AccessError("it ends"), Why("team/late", "u", nodes=2, left_out=1), "0 of 2 nodes fit"),
    ],
    ids=["the second was asked", "nobody was asked", "the first does not answer"],
)
def test_the_replica_that_kube_scheduler_asks_is_believed(monkeypatch, first, second, says):
    encoded = msgspec.json.encode(first).decode() if isinstance(first, Why) else first
    cluster = ProxiedCluster(msgspec.json.encode(second).decode(), encoded)
    monkeypatch.setattr("aliquot_cli.explain.scheduler.connect", lambda target: cluster)
    result = CliRunner().invoke(main, ["why", "team/late"])
    assert result.output.startswith(f"team/late: {says}"), result.output


def test_unreachable_replica_is_not_reported_as_missing_pod(monkeypatch):
    def refuse(path: str) -> str:
        raise AccessError("403") if "/s1:" in path else NotFoundError("no pod")

    cluster = ProxiedCluster("")
    cluster.text = refuse
    monkeypatch.setattr("aliquot_cli.explain.scheduler.connect", lambda target: cluster)
    assert CliRunner().invoke(main, ["why", "team/late"]).exit_code == 1


async def test_why_says_when_a_pod_with_held_room_starts(api, monkeypatch):
    monkeypatch.setattr(backfiller, "PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(backfiller, "SCAN_SECONDS", 0.02)
    stated = {contract.ANNOTATION_EXPECTED_RUNTIME: "1h"}
    async with running(api, feature_gates="Backfill=true") as extender:
        for node in NODES:
            await create(api, extender, f"busy-{node}", node, annotations=stated, vgpu="1", vgpu_memory="1000")
            await extender.until(partial(runs_on, extender, node))
        large = pod_object("large", vgpu="2", vgpu_memory="2000")
        large["spec"]["schedulerName"] = contract.SCHEDULER_NAME
        large["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        await api.put("pods", large)
        room = extender.scheduler.cluster.context.held_room
        await extender.until(lambda: room.held is not None, seconds=60)
        result = await aliquot(extender, "why", "team/large")
        [held] = room.held.nodes
        refused = await extender.filter(pod_object("other", vgpu="1", vgpu_memory="1000"), held)
    assert result.exit_code == 4
    assert f"room is held on node {held}" in result.output
    assert "expected to start" in result.output
    assert refused["FailedAndUnresolvableNodes"] == {held: SENTENCE}


async def test_without_the_gate_no_room_is_held(api):
    async with running(api) as extender:
        assert extender.scheduler.scheduling.backfiller is None
        await create(api, extender, "busy", "n1", vgpu="1", vgpu_memory="1000")
        await create(api, extender, "large", vgpu="2", vgpu_memory="2000")
        assert extender.scheduler.cluster.context.held_room.held is None
