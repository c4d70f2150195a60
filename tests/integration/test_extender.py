# SPDX-License-Identifier: Apache-2.0
"""The whole scheduler process, except for its signals, against a Kubernetes API over HTTP; the test plays kube-scheduler."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any
from unittest import mock

import aiohttp
import msgspec
import pytest
from aiohttp import web

from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.gpunode import encode_gpu_node
from aliquot.contract.model import ContainerAssignment, DeviceShare, PodAssignment
from aliquot.kube.api_server import ApiServer
from aliquot.kube.errors import KubeApiError
from scheduler_plugin import __main__ as program
from scheduler_plugin.adapters import kube_watch
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.core.fit.shapes import MAX_SCORE
from scheduler_plugin.services import leadership, preemptor, retry, succeeded_members
from scheduler_plugin.services.nominator import FIRST, Nominator
from scheduler_plugin.settings import Answer, Settings
from scheduler_plugin.wiring import leaders, scheduling, verbs
from tests.integration.test_webhook import make_certificate
from tests.unit.scheduler_plugin.api import FakeApi, node_object, pod_object
from tests.unit.scheduler_plugin.builders import PLACES, make_device, make_node, make_place


class Running:
    """A scheduler that serves, and what kube-scheduler would send it."""

    def __init__(self, scheduler: program.Scheduler, session: aiohttp.ClientSession) -> None:
        self.scheduler = scheduler
        self.state = scheduler.cluster.context.state
        self.budgets = scheduler.cluster.context.budgets
        self._session = session

    async def post(self, verb: str, body: Any) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(f"http://{self.scheduler.addresses['extender']}/{verb}", data=data) as response:
            return response.status, await response.read()

    async def call(self, verb: str, body: Any) -> Any:
        status, data = await self.post(verb, body)
        assert status == 200, data
        return json.loads(data)

    async def filter(self, pod: dict, *names: str) -> Any:
        return await self.call("filter", {"Pod": pod, "Nodes": None, "NodeNames": list(names)})

    async def prioritize(self, pod: dict, *names: str) -> dict[str, int]:
        answer = await self.call("prioritize", {"Pod": pod, "Nodes": None, "NodeNames": list(names)})
        return {entry["Host"]: entry["Score"] for entry in answer}

    async def bind(self, pod: dict, node: str) -> str:
        metadata = pod["metadata"]
        args = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"], "Node": node}
        return (await self.call("bind", args))["Error"]

    async def page(self, path: str) -> tuple[int, str]:
        async with self._session.get(f"http://{self.scheduler.addresses['status']}{path}") as response:
            return response.status, await response.text()

    async def schedule(self, pod: dict, *names: str) -> str:
        """Do what kube-scheduler does for one pod; return the node."""
        feasible = (await self.filter(pod, *names))["NodeNames"]
        scores = await self.prioritize(pod, *feasible)
        node = max(feasible, key=scores.__getitem__)
        assert await self.bind(pod, node) == ""
        return node

    async def until(self, condition: Callable[[], bool], seconds: float = 5.0) -> float:
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < seconds, "it did not happen in time"
            await asyncio.sleep(0.01)
        return time.monotonic() - begun


@asynccontextmanager
async def running(api: FakeApi, *, ready: bool = True, **settings: Any) -> AsyncIterator[Running]:
    loopback = {"extender_address": "127.0.0.1:0", "webhook_address": "", "metrics_address": "127.0.0.1:0", "answer": Answer.ALL}
    connection = KubeConnection(ApiServer(api.url, None, None))
    scheduler = program.Scheduler(Settings(**(loopback | settings)), connection)
    stop = asyncio.Event()
    task = asyncio.create_task(scheduler.run(stop))
    try:
        async with aiohttp.ClientSession() as session:
            served = Running(scheduler, session)
            await served.until(lambda: len(scheduler.addresses) == 2 + bool(settings.get("webhook_address")))
            if ready:
                await served.until(lambda: scheduler.ready)
            yield served
    finally:
        stop.set()
        await task
        await connection.close()


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as served:
        for name in ("n1", "n2"):
            await served.put("nodes", node_object(name))
            await served.put("gpunodes", json.loads(encode_gpu_node(make_node(name, 2))))
        yield served


async def create(api: FakeApi, name: str = "p1", **fields: Any) -> dict:
    return await api.put("pods", pod_object(name, **fields))


def assigned(api: FakeApi, name: str) -> list[tuple[str, int]]:
    pod = api.pod(name)
    assignment = codec.decode_assignment(pod["metadata"]["annotations"][contract.ANNOTATION_ASSIGNMENT], pod_uid=pod["metadata"]["uid"])
    return [(share.device_uuid, share.memory_bytes >> 20) for container in assignment.containers for share in container.shares]


# --- the wire -------------------------------------------------------------------------------------------------------


async def test_filter_answers_every_key_as_kube_scheduler_reads_it(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="1", vgpu_memory="400")
        status, data = await extender.post("filter", {"Pod": pod, "Nodes": None, "NodeNames": ["n1", "n9"]})
        assert status == 200
        assert data == (
            b'{"Nodes":null,"NodeNames":["n1"],"FailedNodes":{},'
            b'"FailedAndUnresolvableNodes":{"n9":"no GPU that Aliquot manages"},"Error":""}'
        )


async def test_room_held_by_pods_is_curable_and_missing_room_is_not(api):
    async with running(api) as extender:
        for name in ("a", "b"):
            await extender.schedule(await create(api, name, vgpu="1", vgpu_memory="900"), "n1")
        answer = await extender.filter(await create(api, "c", vgpu="1", vgpu_memory="500"), "n1", "n2")
        assert (answer["NodeNames"], answer["FailedNodes"]) == (["n2"], {"n1": "not enough free memory on one GPU"})
        answer = await extender.filter(await create(api, "d", vgpu="3"), "n1", "n2")
        assert answer["FailedAndUnresolvableNodes"] == dict.fromkeys(["n1", "n2"], "fewer GPUs than the pod asks for")


async def test_keys_of_any_case_and_missing_keys_are_read(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="1")
        for body in ({"pod": pod, "nodenames": ["n1"]}, {"Pod": pod, "nodeNames": ["n1"]}):
            assert (await extender.call("filter", body))["NodeNames"] == ["n1"]
        assert (await extender.call("filter", {"Pod": pod}))["NodeNames"] == []


async def test_prioritize_answers_a_bare_array_of_fine_scores(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="1", vgpu_memory="400")
        answer = await extender.call("prioritize", {"Pod": pod, "Nodes": None, "NodeNames": ["n1", "n2", "n9"]})
        assert [set(entry) for entry in answer] == [{"Host", "Score"}] * 3
        scores = {entry["Host"]: entry["Score"] for entry in answer}
        assert scores["n9"] == 0
        assert abs(scores["n1"] - scores["n2"]) == 1, "equal nodes differ by the tie break alone"
        assert 0 < scores["n1"] <= MAX_SCORE


async def test_a_pod_without_gpus_passes(api):
    async with running(api) as extender:
        pod = await create(api)
        assert (await extender.filter(pod, "n1", "other"))["NodeNames"] == ["n1", "other"]
        assert await extender.prioritize(pod, "other") == {"other": 0}
        assert await extender.bind(pod, "other") == ""
        assert api.bindings[-1]["metadata"]["annotations"] == {}


async def test_a_pod_without_gpus_keeps_off_the_hosts_that_free_gpus_need(api):
    async with running(api) as extender:
        await extender.schedule(await create(api, "full", vgpu="2", vgpu_memory="2000"), "n1")
        pod = await create(api, "cpu")
        scores = await extender.prioritize(pod, "n1", "n2", "other")
        assert 0 < scores["n2"] < scores["n1"] < scores["other"] == MAX_SCORE
        assert pod["metadata"]["uid"] not in extender.state.reservations
        await extender.prioritize(pod, "n1", "n2")
        expected = extender.state.reservations[pod["metadata"]["uid"]]
        assert (expected.node, expected.footprint, expected.demand.cpu_milli) == ("n1", {}, 1000)


async def test_a_request_that_no_gpu_can_satisfy_fails_everywhere_with_its_sentence(api):
    async with running(api) as extender:
        answer = await extender.filter(await create(api, vgpu="2", vgpu_memory="401"), "n1")
        assert "does not split evenly over 2 vGPUs" in answer["FailedAndUnresolvableNodes"]["n1"]


async def test_the_autoscaler_asks_with_full_nodes_and_leaves_no_trace(api):
    template = node_object("template-1")
    template["metadata"]["labels"] = {"nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "1000", "nvidia.com/gpu.product": "NVIDIA-H200"}
    template["spec"] = {"providerID": "kept"}
    async with running(api) as extender:
        pod = await create(api, vgpu="2", vgpu_memory="1600")
        nodes = [api.objects["nodes"]["", "n1"], template, node_object("bare")]
        answer = await extender.call("filter", {"Pod": pod, "Nodes": {"metadata": {}, "items": nodes}, "NodeNames": None})
        assert [node["metadata"]["name"] for node in answer["Nodes"]["items"]] == ["n1", "template-1"]
        assert answer["Nodes"]["items"][1] == template
        assert answer["NodeNames"] is None
        assert answer["FailedAndUnresolvableNodes"] == {"bare": "no GPU that Aliquot manages"}
        assert not extender.state.reservations


def template(name: str, count: int = 2, mib: int = 1000, **allocatable: str) -> dict:
    """Imagine a node as large as n1 and n2 are, or other."""
    node = node_object(name)
    node["metadata"]["labels"] = {"nvidia.com/gpu.count": str(count), "nvidia.com/gpu.memory": str(mib)}
    node["status"]["allocatable"] |= allocatable
    return node


async def test_a_template_that_is_too_small_is_refused_with_its_reason(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="2", vgpu_memory="1600")
        nodes = [template("large"), template("thin", mib=700), template("few", count=1), template("odd", cpu="many")]
        answer = await extender.call("filter", {"Pod": pod, "Nodes": {"items": nodes}, "NodeNames": None})
    assert [node["metadata"]["name"] for node in answer["Nodes"]["items"]] == ["large", "odd"]
    assert answer["FailedNodes"] == {}
    assert answer["FailedAndUnresolvableNodes"] == {
        "thin": "not enough free memory on one GPU",
        "few": "fewer GPUs than the pod asks for",
    }


async def test_full_nodes_are_rated_as_filter_judges_them_and_nothing_is_reserved(api):
    """Of two nodes that are alike but that one exists, that one comes first; a node that cannot take the pod gets nothing."""
    async with running(api) as extender:
        await extender.schedule(await create(api, "full", vgpu="2", vgpu_memory="2000"), "n2")
        await extender.until(lambda: not extender.state.reservations)
        pod = await create(api, vgpu="1", vgpu_memory="700")
        nodes = [api.objects["nodes"]["", name] for name in ("n1", "n2")]
        nodes += [template("alike"), template("snug", count=1, mib=700), template("thin", mib=500), node_object("bare")]
        asked = {"Pod": pod, "Nodes": {"items": nodes}, "NodeNames": None}
        scores = {entry["Host"]: entry["Score"] for entry in await extender.call("prioritize", asked)}
        equal = {entry["Host"]: entry["Score"] for entry in await extender.call("prioritize", asked | {"Nodes": {"items": nodes[2::-2]}})}
        assert not extender.state.reservations
        by_name = await extender.prioritize(pod, "n1", "n2")
    assert list(scores) == ["n1", "n2", "alike", "snug", "thin", "bare"]
    assert (scores["n2"], scores["thin"], scores["bare"]) == (0, 0, 0)
    assert 0 < scores["alike"] == by_name["n1"] - 1 == scores["n1"]
    assert equal == {"alike": scores["n1"], "n1": scores["n1"] + 1}
    assert scores["snug"] > scores["n1"], "what it takes whole cannot be broken up"


async def test_a_pod_without_gpus_keeps_off_imagined_gpus_too(api):
    async with running(api) as extender:
        asked = {"Pod": await create(api, "cpu"), "Nodes": {"items": [template("gpus"), node_object("bare")]}, "NodeNames": None}
        scores = {entry["Host"]: entry["Score"] for entry in await extender.call("prioritize", asked)}
    assert 0 < scores["gpus"] < scores["bare"] == MAX_SCORE


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("filter", b""),
        ("filter", b"[]"),
        ("filter", b'{"Pod":{},"NodeNames":["n1"]}'),
        ("filter", b'{"Pod":{"metadata":{"uid":"u"}},"NodeNames":[1]}'),
        ("filter", b'{"Pod":{"metadata":{"uid":"u"}},"Nodes":{"items":[{}]}}'),
        ("filter", b"[" * 100_000),
        ("prioritize", b'{"Pod":7}'),
        ("preempt", b'{"Pod":{"metadata":{"uid":"u"}},"NodeNameToMetaVictims":{"n1":[]}}'),
        ("bind", b'{"PodName":"p"}'),
        ("bind", b"\xff\xfe"),
    ],
)
async def test_a_broken_body_gets_a_400_and_changes_nothing(api, verb, body):
    async with running(api) as extender:
        before = extender.state.columns.change_count
        status, text = await extender.post(verb, body)
        assert status == 400
        assert b"expected" in text
        assert (extender.state.columns.change_count, api.bindings) == (before, [])


async def test_a_body_that_is_too_large_is_refused(api):
    async with running(api, max_body_mib=1) as extender:
        assert (await extender.post("filter", b" " * (2 << 20)))[0] == 413


async def test_silent_client_delays_no_other(api):
    async with running(api) as extender:
        host, port = extender.scheduler.addresses["extender"].split(":")
        _, slow = await asyncio.open_connection(host, int(port))
        slow.write(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await slow.drain()
        assert (await extender.filter(await create(api, vgpu="1"), "n1"))["NodeNames"] == ["n1"]
        slow.close()


# --- filter and prioritize are pure --------------------------------------------------------------------------------


async def test_asking_again_answers_the_same_and_never_counts_the_pod_against_itself(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="2", vgpu_memory="2000")
        answers = [await extender.filter(pod, "n1") for _ in range(3)]
        assert answers[0]["NodeNames"] == ["n1"]
        assert answers == answers[:1] * 3
        scores = [await extender.prioritize(pod, "n1", "n2") for _ in range(3)]
        assert scores == scores[:1] * 3
        assert len(extender.state.reservations) == 1


async def test_next_pod_does_not_count_on_room_expected_for_first(api):
    async with running(api) as extender:
        first, second = await create(api, "a", vgpu="2"), await create(api, "b", vgpu="2")
        await extender.filter(first, "n1")
        assert (await extender.filter(second, "n1"))["NodeNames"] == []


def for_us(name: str) -> dict:
    pod = pod_object(name, vgpu="1", vgpu_memory="100")
    return pod | {"spec": pod["spec"] | {"schedulerName": contract.SCHEDULER_NAME}}


def is_nominated(api: FakeApi, name: str) -> bool:
    return "nominatedNodeName" in api.pod(name)["status"]


async def test_burst_is_nominated_behind_its_first_pods(api, monkeypatch):
    monkeypatch.setattr(scheduling, "Nominator", partial(Nominator, min_nodes=2))
    async with running(api, answer=Answer.ONE) as extender:
        pods = [await api.put("pods", for_us(f"p{number}")) for number in range(FIRST + 2)]
        for pod in pods[FIRST:]:
            name = pod["metadata"]["name"]
            await extender.until(partial(is_nominated, api, name))
            node = api.pod(name)["status"]["nominatedNodeName"]
            assert (await extender.filter(pod, node))["NodeNames"] == [node]
            assert await extender.bind(pod, node) == ""
        assert not any(is_nominated(api, pod["metadata"]["name"]) for pod in pods[:FIRST])


@pytest.mark.parametrize("answer", [Answer.ALL, Answer.ONE])
async def test_without_burst_or_with_all_answers_nothing_is_nominated(api, monkeypatch, answer):
    monkeypatch.setattr(scheduling, "Nominator", partial(Nominator, min_nodes=2))
    async with running(api, answer=answer) as extender:
        count = FIRST if answer is Answer.ONE else 2 * FIRST
        pods = [await api.put("pods", for_us(f"p{number}")) for number in range(count)]
        for pod in pods:
            assert await extender.schedule(pod, "n1", "n2") in {"n1", "n2"}
    assert not [request for request in api.requests if request.endswith("/status")]


async def test_reservation_without_bind_expires(api):
    async with running(api, soft_seconds=0.2) as extender:
        await extender.filter(await create(api, "a", vgpu="2"), "n1")
        other = await create(api, "b", vgpu="2")
        assert (await extender.filter(other, "n1"))["NodeNames"] == []
        await extender.until(lambda: not extender.state.reservations)
        assert (await extender.filter(other, "n1"))["NodeNames"] == ["n1"]


# --- bind -----------------------------------------------------------------------------------------------------------


async def test_a_binding_carries_uid_node_and_devices_in_one_write(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="2", vgpu_memory="600")
        assert await extender.bind(pod, "n2") == ""
        (binding,) = api.bindings
        assert (binding["metadata"]["uid"], binding["target"]["name"]) == ("uid-p1", "n2")
        assert assigned(api, "p1") == [("GPU-n2-0", 300), ("GPU-n2-1", 300)]
        await extender.until(lambda: not extender.state.reservations)
        assert extender.state.footprint_of("uid-p1").keys() == {"GPU-n2-0", "GPU-n2-1"}


async def test_bind_decides_again_on_given_node(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="2")
        await extender.filter(pod, "n1")
        assert extender.state.reservations["uid-p1"].node == "n1"
        assert await extender.bind(pod, "n2") == ""
        assert (await extender.filter(await create(api, "b", vgpu="2"), "n1"))["NodeNames"] == ["n1"]


async def test_binding_twice_binds_once(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="1")
        assert await asyncio.gather(*(extender.bind(pod, "n1") for _ in range(5))) == [""] * 5
        assert await extender.bind(pod, "n1") == ""
        assert "already bound to node n1" in await extender.bind(pod, "n2")
        assert len(api.bindings) == 1


async def test_two_pods_that_want_the_last_devices_do_not_both_get_them(api):
    async with running(api) as extender:
        pods = [await create(api, name, vgpu="2") for name in "abc"]
        errors = await asyncio.gather(*(extender.bind(pod, "n1") for pod in pods))
        assert sum(error == "" for error in errors) == 1
        assert len(api.bindings) == 1


async def test_a_refused_binding_gives_the_devices_back(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="2")
        pod["metadata"]["uid"] = "another"
        assert "no pod team/p1 with UID another" in await extender.bind(pod, "n1")
        await extender.until(lambda: "uid-p1" in extender.state.pods)
        api.objects["pods"].pop(("team", "p1"))
        pod["metadata"]["uid"] = "uid-p1"
        assert "refused" in await extender.bind(pod, "n1")
        assert not extender.state.reservations
        assert (await extender.filter(await create(api, "b", vgpu="2"), "n1"))["NodeNames"] == ["n1"]


async def test_binding_with_lost_reply_is_found_to_have_succeeded(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="2")
        api.lose_binding_answers = 1
        assert await extender.bind(pod, "n1") == ""
        assert len(api.bindings) == 1
        assert not [r for r in extender.state.reservations.values() if r.stage is Stage.BINDING]


async def test_during_outage_binding_keeps_devices_and_is_settled_afterwards(api, monkeypatch):
    monkeypatch.setattr("scheduler_plugin.extender.bind.REPLY_SECONDS", 0.3)
    async with running(api) as extender:
        pod = await create(api, vgpu="2")
        await extender.until(lambda: "uid-p1" in extender.state.pods)
        api.silent = True
        assert "has not answered within" in await extender.bind(pod, "n1")
        assert "has no outcome yet" in await extender.bind(pod, "n2")
        assert (await extender.filter(await create(api, "b", vgpu="2"), "n1"))["NodeNames"] == []
        api.silent = False
        await asyncio.sleep(1.0)
        assert not api.bindings, "kube-scheduler does not ask for it any more: another may lead"
        assert (await extender.filter(pod, "n1", "n2"))["NodeNames"] == ["n1"]
        assert await extender.bind(pod, "n1") == ""
        await extender.until(lambda: extender.state.pods["uid-p1"].node_name == "n1")
        assert not extender.state.reservations


async def test_abandoned_binding_is_never_written_so_next_leader_may_reuse_devices(api, monkeypatch):
    monkeypatch.setattr("scheduler_plugin.extender.bind.REPLY_SECONDS", 0.3)
    monkeypatch.setattr("scheduler_plugin.extender.bind.LAST_RETRY_SECONDS", 0.2)
    async with running(api) as former, running(api) as leader:
        first, second = await create(api, "a", vgpu="2"), await create(api, "b", vgpu="2")

        def knows_both(state: ClusterState) -> bool:
            return len(state.pods) == 2

        for extender in (former, leader):
            await extender.until(partial(knows_both, extender.state))
        pods, cut = former.scheduler.scheduling.binder._api, True
        bind = pods.bind

        async def bind_unless_cut_off(*args: Any) -> None:
            if cut:
                raise KubeApiError("no route to host")
            await bind(*args)

        monkeypatch.setattr(pods, "bind", bind_unless_cut_off)
        assert "has not answered within" in await former.bind(first, "n1")
        assert await leader.schedule(second, "n1") == "n1"
        cut = False
        await asyncio.sleep(1.0)
        assert [binding["metadata"]["name"] for binding in api.bindings] == ["b"]
        monkeypatch.setattr("scheduler_plugin.extender.bind.ARRIVAL_SECONDS", 0.0)
        await former.until(lambda: "uid-a" not in former.state.reservations)


async def test_a_pod_bursts_only_on_nodes_that_allow_as_much(api):
    await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n2", 2, memory_oversubscription=1.5))))
    async with running(api) as extender:
        pod = await create(api, vgpu="1", vgpu_memory="400", annotations={contract.ANNOTATION_MEMORY_BURST: "1.5"})
        answer = await extender.filter(pod, "n1", "n2")
        assert answer["NodeNames"] == ["n2"]
        assert answer["FailedAndUnresolvableNodes"] == {"n1": NodeReason.ISOLATION.sentence}
        assert "does not offer the memory burst of 1.5 (at most 1)" in await extender.bind(pod, "n1")
        assert await extender.bind(pod, "n2") == ""


# --- MIG instances made on demand -----------------------------------------------------------------------------------


async def offer_places(api: FakeApi) -> None:
    """Let n1 have one GPU on which its agent makes instances."""
    device = make_device("n1", 0, instances=1)
    places = tuple(make_place(device.uuid, *at) for at in PLACES)
    await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", [replace(device, mig_instances=places)]))))


async def test_filter_rejects_pod_when_bind_has_no_room_for_its_instance(api):
    await offer_places(api)
    async with running(api) as extender:
        for name in ("a", "b"):
            await extender.schedule(await create(api, name, **{"mig-3g.40gb": "1"}), "n1")
        assert {assigned(api, name)[0][0] for name in ("a", "b")} == {"GPU-n1-0/3g.40gb@0", "GPU-n1-0/3g.40gb@4"}
        small = await create(api, "c", **{"mig-1g.10gb": "1"})
        assert (await extender.filter(small, "n1"))["FailedNodes"] == {"n1": NodeReason.MIG_PROFILE.sentence}
        assert "asks for 1 x MIG 1g.10gb" in await extender.bind(small, "n1")
        await api.delete("pods", "a", "team")
        await extender.until(lambda: "uid-a" not in extender.state.pods)
        assert await extender.schedule(small, "n1") == "n1"


async def test_two_profiles_that_fit_one_by_one_but_not_together_fail(api):
    await offer_places(api)
    async with running(api) as extender:
        both = await create(api, "a", **{"mig-1g.10gb": "1", "mig-7g.80gb": "1"})
        assert (await extender.filter(both, "n1"))["NodeNames"] == []
        beside = await create(api, "b", **{"mig-1g.10gb": "3", "mig-3g.40gb": "1"})
        assert await extender.schedule(beside, "n1") == "n1"


async def test_preempt_ends_all_pods_that_instance_would_overlap(api):
    await offer_places(api)
    async with running(api) as extender:
        for name in ("a", "b"):
            await extender.schedule(await create(api, name, **{"mig-1g.10gb": "1"}), "n1")
        await extender.until(lambda: all(extender.state.pods[f"uid-{name}"].node_name for name in ("a", "b")))
        important = await create(api, "c", **{"mig-7g.80gb": "1"})
        important["spec"]["priority"] = 100
        assert "n1" in (await extender.filter(important, "n1"))["FailedNodes"]
        args = {"Pod": important, "NodeNameToVictims": None, "NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}
        (victims,) = (await extender.call("preempt", args))["NodeNameToMetaVictims"].values()
        assert {victim["UID"] for victim in victims["Pods"]} == {"uid-a", "uid-b"}


# --- preempt --------------------------------------------------------------------------------------------------------


async def test_preempt_adds_the_pod_that_is_on_the_right_gpu(api):
    async with running(api) as extender:
        for name in ("a", "b"):
            await extender.schedule(await create(api, name, vgpu="1", vgpu_memory="600"), "n1")
        await extender.until(lambda: all(extender.state.pods[f"uid-{name}"].node_name for name in ("a", "b")))
        important = await create(api, "c", vgpu="1", vgpu_memory="800")
        important["spec"]["priority"] = 100
        nodes = {"n1": {"Pods": [], "NumPDBViolations": 0}, "n9": {"Pods": [{"UID": "x"}], "NumPDBViolations": 0}}
        answer = await extender.call("preempt", {"Pod": important, "NodeNameToVictims": None, "NodeNameToMetaVictims": nodes})
        (victims,) = answer["NodeNameToMetaVictims"].values()
        assert len(victims["Pods"]) == 1
        assert victims["Pods"][0]["UID"] in ("uid-a", "uid-b")
        assert victims["NumPDBViolations"] == 0


async def test_preempt_keeps_given_victims_and_adds_none_when_they_suffice(api):
    async with running(api) as extender:
        await extender.schedule(await create(api, "a", vgpu="2"), "n1")
        victim = api.pod("a")
        important = await create(api, "c", vgpu="2")
        important["spec"]["priority"] = 100
        args = {"Pod": important, "NodeNameToVictims": {"n1": {"Pods": [victim], "NumPDBViolations": 1}}, "NodeNameToMetaVictims": None}
        answer = await extender.call("preempt", args)
        assert answer == {"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "uid-a"}], "NumPDBViolations": 1}}}


async def test_preempt_ends_the_pod_that_its_budget_allows_to_end(api):
    """Whichever of two equal pods is protected, the other ends; when both are, the number of violations shows it."""
    for name in ("a", "b"):
        budget = {"metadata": {"namespace": "team", "name": name}, "spec": {"selector": {"matchLabels": {"app": name}}}}
        await api.put("poddisruptionbudgets", budget | {"status": {"disruptionsAllowed": 1}})
    async with running(api) as extender:
        for name in ("a", "b"):
            pod = await create(api, name, vgpu="1", vgpu_memory="600")
            pod["metadata"]["labels"] = {"app": name}
            await api.put("pods", pod)
            await extender.schedule(pod, "n1")
        await extender.until(lambda: all(extender.state.pods[f"uid-{name}"].node_name for name in ("a", "b")))
        important = await create(api, "c", vgpu="1", vgpu_memory="800")
        important["spec"]["priority"] = 100
        args = {"Pod": important, "NodeNameToVictims": None, "NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}

        async def ended(**allowed: int) -> tuple[str, int]:
            for name, count in allowed.items():
                budget = api.objects["poddisruptionbudgets"]["team", name]
                await api.put("poddisruptionbudgets", budget | {"status": {"disruptionsAllowed": count}})
            reported = {("team", name): count for name, count in allowed.items()}
            await extender.until(lambda: extender.budgets.allowed_after([], reported) == reported)
            (victims,) = (await extender.call("preempt", args))["NodeNameToMetaVictims"].values()
            return victims["Pods"][0]["UID"], victims["NumPDBViolations"]

        assert await ended(a=0, b=1) == ("uid-b", 0)
        assert await ended(a=1, b=0) == ("uid-a", 0)
        assert (await ended(a=0, b=0))[1] == 1


async def test_preempt_never_ends_pods_of_equal_priority(api):
    async with running(api) as extender:
        await extender.schedule(await create(api, "a", vgpu="2"), "n1")
        args = {"Pod": await create(api, "c", vgpu="2"), "NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}
        assert await extender.call("preempt", args) == {"NodeNameToMetaVictims": {}}


# --- preemption that kube-scheduler does not see -----------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch):
    """A preemptor that does not wait for kube-scheduler."""
    monkeypatch.setattr(preemptor, "PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(preemptor, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(preemptor, "FIRST_PAUSE_SECONDS", 0.2)


async def fill(api: FakeApi, extender: Running, memory: str = "600") -> None:
    """Have one pod on each GPU of n1, that of GPU 1 of more importance."""
    for number, name in enumerate(("a", "b")):
        pod = pod_object(name, vgpu="1", vgpu_memory=memory)
        pod["spec"]["priority"] = number
        await extender.schedule(await api.put("pods", pod), "n1")
    await extender.until(lambda: all(extender.state.pods[f"uid-{name}"].node_name for name in ("a", "b")))


async def ask_for_more(api: FakeApi, extender: Running, **spec: Any) -> dict:
    """Have a pod of priority 100 refused that needs more than is free on any single GPU, and less than is free of both."""
    important = pod_object("important", vgpu="1", vgpu_memory="700")
    important["spec"].update({"priority": 100} | spec)
    await api.put("pods", important)
    assert (await extender.filter(important, "n1"))["NodeNames"] == []
    return important


async def test_the_least_important_pod_ends_where_only_the_right_gpu_is_lacking(api, at_once):
    async with running(api) as extender:
        await fill(api, extender)
        important = await ask_for_more(api, extender)
        await extender.until(lambda: "deletionTimestamp" in api.pod("a")["metadata"])
        assert "deletionTimestamp" not in api.pod("b")["metadata"]
        await extender.until(lambda: any(event["reason"] == contract.EVENT_REASON_PREEMPTED for event in api.events))

        # what becomes free is kept for whom it was made free
        [(freed, _)] = assigned(api, "a")
        await api.delete("pods", "a", "team")
        await extender.until(lambda: contract.ANNOTATION_RETRY in api.pod("important")["metadata"]["annotations"])
        other = await create(api, "c", vgpu="1", vgpu_memory="700")
        assert (await extender.filter(other, "n1"))["NodeNames"] == []
        assert await extender.schedule(important, "n1") == "n1"
        assert assigned(api, "important") == [(freed, 700)]


async def test_the_place_is_kept_as_long_as_the_others_take_to_end(api, at_once, monkeypatch):
    monkeypatch.setattr(preemptor, "HOLD_SECONDS", 0.3)
    async with running(api) as extender:
        await fill(api, extender)
        await ask_for_more(api, extender)
        await extender.until(lambda: "deletionTimestamp" in api.pod("a")["metadata"])
        await asyncio.sleep(1.0)
        assert "uid-important" in extender.state.reservations
        await api.delete("pods", "important", "team")
        await extender.until(lambda: "uid-important" not in extender.state.reservations)
        assert "deletionTimestamp" not in api.pod("b")["metadata"]


@pytest.mark.parametrize("spec", [{"preemptionPolicy": "Never"}, {"priority": 0}], ids=["never preempts", "no more important"])
async def test_no_pod_ends_for_pod_that_may_not_preempt(api, at_once, spec):
    async with running(api) as extender:
        await fill(api, extender)
        await ask_for_more(api, extender, **spec)
        await asyncio.sleep(0.6)
        assert not [event for event in api.events if event["reason"] == contract.EVENT_REASON_PREEMPTED]
        assert "uid-important" not in extender.state.reservations


async def test_no_pod_ends_while_kube_scheduler_preempts_elsewhere_or_setting_is_off(api, at_once):
    async with running(api) as extender:
        await fill(api, extender)
        nominated = pod_object("important", vgpu="1", vgpu_memory="700") | {"status": {"phase": "Pending", "nominatedNodeName": "n2"}}
        nominated["spec"]["priority"] = 100
        await api.put("pods", nominated)
        assert (await extender.filter(nominated, "n1"))["NodeNames"] == []
        await asyncio.sleep(0.5)
        assert "deletionTimestamp" not in api.pod("a")["metadata"]
    async with running(api, gpu_preemption=False) as extender:
        await ask_for_more(api, extender)
        await asyncio.sleep(0.5)
        assert "deletionTimestamp" not in api.pod("a")["metadata"]


async def test_budget_known_better_by_api_server_spares_pod_and_other_ends(api, at_once):
    """The first eviction is refused; the budget arrives; then the pod that may end does."""
    api.protected.add(("team", "a"))
    async with running(api) as extender:
        await fill(api, extender)
        labelled = api.pod("a")
        labelled["metadata"]["labels"] = {"app": "a"}
        await api.put("pods", labelled)
        await ask_for_more(api, extender)
        await extender.until(lambda: any("/a/eviction" in request for request in api.requests))
        assert "deletionTimestamp" not in api.pod("a")["metadata"]
        budget = {"metadata": {"namespace": "team", "name": "b"}, "spec": {"selector": {"matchLabels": {"app": "a"}}}}
        await api.put("poddisruptionbudgets", budget)
        await extender.until(lambda: "deletionTimestamp" in api.pod("b")["metadata"])
        assert "deletionTimestamp" not in api.pod("a")["metadata"]


async def test_no_pod_ends_when_budget_keeps_one_required_victim(api, at_once):
    api.protected.add(("team", "b"))
    async with running(api) as extender:
        await fill(api, extender)
        await ask_for_more(api, extender, **pod_object(vgpu="2", vgpu_memory="1400")["spec"])
        await extender.until(lambda: any("/b/eviction" in request for request in api.requests))
        await asyncio.sleep(0.2)
        assert not any("deletionTimestamp" in api.pod(name)["metadata"] for name in ("a", "b"))


# --- state ----------------------------------------------------------------------------------------------------------


async def test_not_ready_before_everything_is_known_and_verbs_are_refused_until_then(api):
    api.silent = True
    async with running(api, ready=False) as extender:
        assert (await extender.page("/readyz"))[0] == 503
        assert "decides nothing now: " in (await extender.filter(pod_object(vgpu="1"), "n1"))["Error"]
        assert (await extender.page("/healthz"))[0] == 200
        api.silent = False
        await extender.until(lambda: extender.scheduler.ready)
        assert await extender.page("/readyz") == (200, "ready\n")


@pytest.mark.parametrize("late", ["localqueues", "clusterqueues", "resourceflavors"])
async def test_webhook_is_not_ready_before_queues_of_kueue_are_known(api, late, tmp_path):
    certificate, key = map(str, make_certificate(tmp_path, "webhook"))
    webhook: dict[str, Any] = {"webhook_address": "127.0.0.1:0", "tls_cert_file": certificate, "tls_key_file": key}
    api.held_back.add(late)
    async with running(api, feature_gates="AdmissionCheck=true", **webhook) as extender:
        assert await extender.page("/readyz") == (503, "the queues of Kueue are being listed\n")
        api.held_back.clear()
        async with asyncio.timeout(60):
            while await extender.page("/readyz") != (200, "ready\n"):  # noqa: ASYNC110 - asks a server
                await asyncio.sleep(0.01)


async def test_webhook_is_ready_where_there_is_no_kueue(tmp_path, api):
    certificate, key = map(str, make_certificate(tmp_path, "webhook"))
    webhook: dict[str, Any] = {"webhook_address": "127.0.0.1:0", "tls_cert_file": certificate, "tls_key_file": key}
    api.missing.update({"localqueues", "clusterqueues", "resourceflavors", "workloads", "admissionchecks"})
    async with running(api, feature_gates="AdmissionCheck=true", **webhook) as extender, asyncio.timeout(60):
        while await extender.page("/readyz") != (200, "ready\n"):  # noqa: ASYNC110 - asks a server
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("late", ["gpunodes", "nodes", "poddisruptionbudgets", "pods"])
async def test_not_ready_while_a_single_collection_is_not_listed(api, late):
    api.held_back.add(late)
    async with running(api, ready=False) as extender:
        await extender.until(lambda: sum(map(isfinite, extender.scheduler.cluster.watch.lag_seconds().values())) == 3)
        status, text = await extender.page("/readyz")
        assert (status, f"not listed yet: {late}" in text) == (503, True), text
        assert f"not listed yet: {late}" in (await extender.filter(pod_object(vgpu="1"), "n1"))["Error"]
        api.held_back.clear()
        await extender.until(lambda: extender.scheduler.ready)
        assert (await extender.filter(pod_object(vgpu="1"), "n1"))["NodeNames"] == ["n1"]


async def test_a_restart_knows_what_is_bound(api):
    async with running(api) as extender:
        await extender.schedule(await create(api, "a", vgpu="2"), "n1")
    async with running(api) as extender:
        assert (await extender.filter(await create(api, "b", vgpu="1"), "n1", "n2"))["NodeNames"] == ["n2"]


async def test_long_lists_are_read_in_pages(api, monkeypatch):
    monkeypatch.setattr(kube_watch, "RULES", msgspec.structs.replace(kube_watch.RULES, page_size=3))
    for number in range(8):
        await create(api, f"p{number}", node="n1", uid=f"u{number}")
    async with running(api) as extender:
        assert len(extender.state.pods) == 8
        assert sum("/pods?" in request and "limit=3" in request for request in api.requests) == 3


async def test_forgotten_history_broken_watches_and_outages_lose_nothing(api):
    async with running(api) as extender:
        await extender.schedule(await create(api, "a", vgpu="2"), "n1")
        await api.forget()
        await api.delete("pods", "a", "team")
        await extender.until(lambda: "uid-a" not in extender.state.pods)
        assert "pods" in api.refused_watches
        await api.break_watches()
        await create(api, "b", vgpu="2", node="n2")
        await extender.until(lambda: "uid-b" in extender.state.pods)
        api.silent = True
        await api.break_watches()
        await extender.until(lambda: "pods" in extender.scheduler.cluster.watch.trouble, seconds=15)
        assert (await extender.filter(await create(api, "c", vgpu="2"), "n1"))["NodeNames"] == ["n1"], "what is known stays known"
        await api.delete("pods", "b", "team")
        api.silent = False
        await extender.until(lambda: "uid-b" not in extender.state.pods)
        await extender.until(lambda: extender.scheduler.cluster.watch.trouble == "")


async def test_unreadable_inventory_is_skipped_and_others_count(api):
    broken = json.loads(encode_gpu_node(make_node("n3", 1)))
    broken["status"]["devices"][0]["uuid"] = "../../etc"
    await api.put("gpunodes", broken)
    async with running(api) as extender:
        assert (await extender.filter(await create(api, vgpu="1"), "n1", "n3"))["NodeNames"] == ["n1"]


async def test_inventory_deleted_in_unreadable_form_is_forgotten(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="1")
        broken = json.loads(encode_gpu_node(make_node("n2", 2)))
        broken["status"]["devices"][0]["uuid"] = "../../etc"
        await api.put("gpunodes", broken)
        await create(api, "later")
        await extender.until(lambda: "uid-later" in extender.state.pods)
        assert (await extender.filter(pod, "n2"))["NodeNames"] == ["n2"], "it counts as it was last read"
        await api.delete("gpunodes", "n2")
        await extender.until(lambda: extender.state.gpu_node("n2") is None)
        assert (await extender.filter(pod, "n1", "n2"))["NodeNames"] == ["n1"]


async def test_a_cordon_takes_effect_and_ends(api):
    async with running(api) as extender:
        pod = await create(api, vgpu="1")
        await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 2, cordoned=True))))
        await extender.until(lambda: extender.state.gpu_node("n1").cordoned)
        answer = await extender.filter(pod, "n1")
        assert answer["FailedAndUnresolvableNodes"] == {"n1": "GPUs cordoned or unhealthy"}
        await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 2))))
        await extender.until(lambda: not extender.state.gpu_node("n1").cordoned)
        assert (await extender.filter(pod, "n1"))["NodeNames"] == ["n1"]


async def test_waiting_pod_is_retried_within_second_of_capacity_and_not_before(api):
    async with running(api) as extender:
        await extender.schedule(await create(api, "a", vgpu="2"), "n1")
        waiting = await create(api, "b", vgpu="2")
        assert (await extender.filter(waiting, "n1"))["NodeNames"] == []
        await api.delete("gpunodes", "n2")
        await asyncio.sleep(0.6)
        assert contract.ANNOTATION_RETRY not in api.pod("b")["metadata"]["annotations"]
        await api.delete("pods", "a", "team")
        took = await extender.until(lambda: contract.ANNOTATION_RETRY in api.pod("b")["metadata"]["annotations"])
        assert took < 1.0


async def test_pod_needing_victim_is_retried_when_suitable_one_is_bound(api):
    await api.delete("gpunodes", "n2")
    async with running(api, gpu_preemption=False) as extender:
        low = await create(api, "low", vgpu="2")
        assert (await extender.filter(low, "n1"))["NodeNames"] == ["n1"]
        important = pod_object("important", vgpu="1")
        important["spec"]["priority"] = 100
        await api.put("pods", important)
        answer = await extender.call("preempt", {"Pod": important, "NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}})
        assert answer == {"NodeNameToMetaVictims": {}}, "nobody is there who could end, and the GPUs are promised"
        assert (await extender.filter(important, "n1"))["NodeNames"] == []
        await asyncio.sleep(1.2)
        assert contract.ANNOTATION_RETRY not in api.pod("important")["metadata"]["annotations"]
        assert not (await extender.bind(low, "n1"))
        await extender.until(lambda: contract.ANNOTATION_RETRY in api.pod("important")["metadata"]["annotations"])


async def test_after_restart_previously_refused_pod_gets_its_victims(api, at_once, monkeypatch):
    monkeypatch.setattr(retry, "QUIET_SECONDS", 0.3)
    async with running(api) as extender:
        await fill(api, extender)
        important = await ask_for_more(api, extender, preemptionPolicy="Never", schedulerName=contract.SCHEDULER_NAME)
    important["spec"].pop("preemptionPolicy")
    await api.put("pods", important)
    async with running(api) as extender:
        await extender.until(lambda: contract.ANNOTATION_RETRY in api.pod("important")["metadata"]["annotations"])
        assert "deletionTimestamp" not in api.pod("a")["metadata"], "its nodes are not known before kube-scheduler asks"
        assert (await extender.filter(api.pod("important"), "n1"))["NodeNames"] == []
        await extender.until(lambda: "deletionTimestamp" in api.pod("a")["metadata"])


@pytest.mark.parametrize("phase_of_third", ["Running", "Succeeded"])
async def test_replacement_of_failed_member_is_retried_though_another_has_succeeded(api, monkeypatch, phase_of_third):
    monkeypatch.setattr(succeeded_members, "PERIOD_SECONDS", 0.05)
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "3"}
    async with running(api) as extender:
        members = [await create(api, name, annotations=gang, controller="job", vgpu="1") for name in ("done", "failed", "third")]
        await extender.until(lambda: len(extender.state.pods) == 3)
        await asyncio.gather(*(extender.schedule(pod, "n1", "n2") for pod in members))
        await extender.until(lambda: all(pod.node_name for pod in extender.state.pods.values()))
        for name, phase in (("done", "Succeeded"), ("third", phase_of_third), ("failed", "Failed")):
            await api.put("pods", api.pod(name) | {"status": {"phase": phase}})
        await extender.until(lambda: len(extender.state.pods) == (phase_of_third == "Running"))
        late = await create(api, "late", annotations=gang, controller="job", vgpu="1")
        assert (await extender.filter(late, "n1", "n2"))["NodeNames"] == []
        await extender.until(lambda: contract.ANNOTATION_RETRY in api.pod("late")["metadata"]["annotations"], seconds=30.0)
        assert await extender.schedule(late, "n1", "n2") in ("n1", "n2")


async def test_metrics_report_attempts_reasons_and_state(api):
    async with running(api) as extender:
        await extender.schedule(await create(api, "a", vgpu="2"), "n1")
        await extender.filter(await create(api, "b", vgpu="2"), "n1")
        await extender.filter(await create(api, "c", vgpu="x"), "n1")
        await extender.filter(await create(api, "d", vgpu="1", annotations={contract.ANNOTATION_GANG_MIN: "x"}), "n1")
        _, text = await extender.page("/metrics")
        assert 'aliquot_scheduler_attempts_total{result="fits_nowhere"} 1.0' in text
        assert 'aliquot_scheduler_attempts_total{result="invalid"} 2.0' in text
        assert 'aliquot_scheduler_node_rejections_total{reason="memory"} 1.0' in text
        assert 'aliquot_scheduler_model_gpus{model="nvidia h200"} 4.0' in text
        assert 'aliquot_scheduler_verb_duration_seconds_count{verb="bind"} 1.0' in text


async def test_every_call_is_counted_by_what_became_of_it(api):
    async with running(api) as extender:
        first, second = await create(api, "a", vgpu="2"), await create(api, "b", vgpu="2")
        await extender.schedule(first, "n1")
        assert "asks for" in await extender.bind(second, "n1")
        await extender.post("filter", b"[")
        with mock.patch.object(extender.scheduler.cluster.watch, "_current_at", {}):
            assert (await extender.post("prioritize", b"{}"))[0] == 503
        with mock.patch.object(verbs, "choose_victims", side_effect=RuntimeError("a bug")):
            assert (await extender.post("preempt", b"{}"))[0] == 500
        _, text = await extender.page("/metrics")
    counted = [("bind", "ok"), ("bind", "refused"), ("filter", "ok"), ("filter", "bad_request")]
    for verb, outcome in [*counted, ("prioritize", "not_ready"), ("preempt", "error")]:
        assert f'aliquot_scheduler_verbs_total{{outcome="{outcome}",verb="{verb}"}} 1.0' in text, (verb, outcome)


# --- replicas -------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(leadership, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(leadership, "RENEW_SECONDS", 0.6)
    monkeypatch.setattr(leadership.Leadership.__init__, "__defaults__", (0.05,))


async def test_one_of_two_replicas_leads_and_other_takes_over_bound_pods(api, short_lease):
    async with running(api, ready=False, lease_name="scheduler") as follower:
        await follower.until(lambda: follower.scheduler.ready)
        async with running(api, ready=False, lease_name="scheduler") as second:
            await asyncio.sleep(0.3)
            assert follower.scheduler.ready
            assert not second.scheduler.leaders.leads
            pod = await create(api, "a", vgpu="2")
            assert "another replica leads" in await second.bind(pod, "n1")
            assert await follower.schedule(pod, "n1") == "n1"
            await stop_leading(follower)
            await second.until(lambda: second.scheduler.ready)
            assert not follower.scheduler.leaders.leads
            assert (await second.filter(await create(api, "b", vgpu="1"), "n1", "n2"))["NodeNames"] == ["n2"]


async def stop_leading(extender: Running) -> None:
    """Cut the leader off from its lease, as a partition does."""

    async def unreachable(*_: object) -> None:
        await asyncio.sleep(3600)

    extender.scheduler.leaders.leadership._api.read = unreachable


class DeafApi(FakeApi):
    """Its watches of pods deliver no events, as those of a connection that is dead."""

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        if plural != "pods":
            return await super()._watch(request, plural)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(3600)
        return response


async def hold_lease(api: FakeApi, holder: str, name: str = "aliquot-scheduler") -> None:
    metadata = {"name": name, "namespace": "aliquot-system"}
    await api.put("leases", {"metadata": metadata, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15}})


@pytest.mark.parametrize("patience", [0.0, 3.0])
@pytest.mark.parametrize("lease", ["names us", "is not there"])
async def test_next_to_new_kube_scheduler_no_decision_precedes_pod_listing(lease, patience, monkeypatch):
    monkeypatch.setattr(leaders, "TAKEOVER_SECONDS", patience)
    async with DeafApi() as api:
        await put_one_gpu(api)
        await hold_lease(api, "elsewhere_1")
        async with running(api, scheduler_lease="aliquot-scheduler") as extender:
            ours = await create_after_one_that_is_bound_unheard(api)
            assert "another replica leads" in (await extender.filter(ours, "n1"))["Error"]
            assert not extender.scheduler.leaders.decides
            if lease == "names us":
                await hold_lease(api, f"{socket.gethostname()}_2")
            else:
                del api.objects["leases"]["aliquot-system", "aliquot-scheduler"]
            assert ("without enough free memory" if patience else "decides nothing now: ") in await extender.bind(ours, "n1")
            assert (await extender.page("/readyz"))[0] == 200, "the webhook goes on"
            await extender.until(lambda: extender.scheduler.leaders.decides)
            assert (await extender.filter(ours, "n1"))["NodeNames"] == []
            assert await extender.bind(ours, "n1")


async def test_replica_with_taken_over_lease_decides_only_after_pod_listing(short_lease):
    async with DeafApi() as api:
        await put_one_gpu(api)
        await hold_lease(api, "elsewhere", "scheduler")
        async with running(api, ready=False, lease_name="scheduler") as extender:
            await extender.until(lambda: extender.scheduler.cluster.watch.synced)
            ours = await create_after_one_that_is_bound_unheard(api)
            assert "another replica leads" in (await extender.filter(ours, "n1"))["Error"]
            api.held_back.add("pods")
            await hold_lease(api, "", "scheduler")
            await extender.until(lambda: extender.scheduler.leaders.leads)
            assert (await extender.page("/readyz"))[0] == 503
            for refusal in ((await extender.filter(ours, "n1"))["Error"], await extender.bind(ours, "n1")):
                assert "decides nothing now: " in refusal
            api.held_back.clear()
            await extender.until(lambda: extender.scheduler.ready)
            assert (await extender.filter(ours, "n1"))["NodeNames"] == []
            assert "without enough free memory" in await extender.bind(ours, "n1")


async def put_one_gpu(api: FakeApi) -> None:
    await api.put("nodes", node_object("n1"))
    await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", 1))))


async def create_after_one_that_is_bound_unheard(api: FakeApi) -> dict:
    """Bind a pod to the GPU as another extender would, which no watch tells; return one that waits."""
    theirs = await create(api, "theirs", vgpu="1")
    await api.put("pods", bound_pod(theirs, "n1"))
    return await create(api, "ours", vgpu="1")


def bound_pod(pod: dict, node: str) -> dict:
    """Say of a pod that another extender bound it to the first GPU of a node, all of it."""
    share = DeviceShare(f"GPU-{node}-0", 1000 << 20, None)
    assignment = PodAssignment(pod["metadata"]["uid"], (ContainerAssignment("main", (share,)),))
    return pod | {
        "metadata": pod["metadata"] | {"annotations": {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(assignment)}},
        "spec": pod["spec"] | {"nodeName": node},
    }


async def test_a_leader_that_ends_lets_go_of_the_lease_at_once(api, short_lease, monkeypatch):
    monkeypatch.setattr(leadership, "LEASE_SECONDS", 60.0)
    async with running(api, ready=False, lease_name="scheduler") as first:
        await first.until(lambda: first.scheduler.ready)
    async with running(api, ready=False, lease_name="scheduler") as second:
        assert await second.until(lambda: second.scheduler.ready) < 1.0
