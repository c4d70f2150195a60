# SPDX-License-Identifier: Apache-2.0
"""The whole scheduler with what it does for Kueue, against the API over HTTP; the test plays Kueue and kube-scheduler."""

import json
from typing import Any

from aliquot import contract
from aliquot.contract.features import Gate
from scheduler_plugin.core.admit.kueue import PRIORITY_BOOST
from scheduler_plugin.settings import Answer
from tests.integration.test_extender import api, running
from tests.unit.scheduler_plugin.api import FakeApi, pod_object

__all__ = ["api"]  # a fixture

GATE = f"{Gate.ADMISSION_CHECK}=true"
SECONDS = 10.0


def check(name: str = "fits") -> dict[str, Any]:
    return {"metadata": {"name": name, "generation": 3}, "spec": {"controllerName": "aliquot.dev/fits"}}


def workload(name: str, count: int, mib: int, **labels: str) -> dict[str, Any]:
    """A workload with quota, and with a check that waits for its answer."""
    template = {"spec": pod_object(vgpu="1", vgpu_memory=str(mib))["spec"] | {"nodeSelector": labels}}
    conditions = [{"type": "QuotaReserved", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    admission = {"podSetAssignments": [{"name": "main", "count": count, "flavors": {"a": "gpus"}}]}
    checks = [{"name": "fits", "state": "Pending", "message": "", "retryCount": 2}]
    return {
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"},
        "spec": {"podSets": [{"name": "main", "count": count, "template": template}]},
        "status": {"conditions": conditions, "admission": admission, "admissionChecks": checks},
    }


def answer(api: FakeApi, name: str) -> dict[str, Any]:
    [entry] = api.objects["workloads"]["team", name]["status"]["admissionChecks"]
    return entry


async def prepare(api: FakeApi) -> None:
    await api.put("admissionchecks", check())
    await api.put("resourceflavors", {"metadata": {"name": "gpus"}, "spec": {}})


async def pod_of(api: FakeApi, name: str, job: str, mib: int) -> dict[str, Any]:
    """Create a pod as Kueue lets a job create it: with the annotations of the answer."""
    [update] = answer(api, job)["podSetUpdates"]
    return await api.put("pods", pod_object(name, annotations=update["annotations"], vgpu="1", vgpu_memory=str(mib)))


async def test_active_check_gives_seats_that_pods_take(api: FakeApi) -> None:
    await prepare(api)
    await api.put("workloads", workload("a", 2, 1000))
    async with running(api, feature_gates=GATE, answer=Answer.ONE) as extender:
        await extender.until(lambda: answer(api, "a")["state"] == "Ready", SECONDS)
        [active] = api.objects["admissionchecks"]["", "fits"]["status"]["conditions"]
        assert (active["type"], active["status"], active["observedGeneration"]) == ("Active", "True", 3)
        assert answer(api, "a")["retryCount"] == 2, "a field of Kueue"
        held = answer(api, "a")["message"]

        # Other pods get the two GPUs that are left, and no more.
        for number in range(3):
            other = await api.put("pods", pod_object(f"other-{number}", vgpu="1", vgpu_memory="1000"))
            names = (await extender.filter(other, "n1", "n2"))["NodeNames"]
            assert len(names or ()) == (number < 2)
            if names:
                assert await extender.bind(other, names[0]) == ""
        nodes = []
        for number in range(2):
            pod = await pod_of(api, f"a-{number}", "a", 1000)
            [node] = (await extender.filter(pod, "n1", "n2"))["NodeNames"]
            assert await extender.bind(pod, node) == ""
            nodes.append(node)
        assert sorted(place.partition("/")[0] for place in held.split(" ")[4:]) == sorted(nodes)
        await extender.until(lambda: not extender.scheduler.cluster.context.workload_seats.seats)


async def test_workload_waits_with_reason_until_room_comes(api: FakeApi) -> None:
    await prepare(api)
    async with running(api, feature_gates=GATE, answer=Answer.ONE) as extender:
        for number in range(4):
            other = await api.put("pods", pod_object(f"other-{number}", vgpu="1", vgpu_memory="700"))
            [node] = (await extender.filter(other, "n1", "n2"))["NodeNames"]
            assert await extender.bind(other, node) == ""
        await api.put("workloads", workload("a", 1, 400))
        await extender.until(lambda: bool(answer(api, "a")["message"]), SECONDS)
        assert answer(api, "a")["state"] == "Pending"
        assert "2 not enough free memory on one GPU" in answer(api, "a")["message"]
        await api.delete("pods", "other-0", "team")
        await extender.until(lambda: answer(api, "a")["state"] == "Ready", SECONDS)


async def test_labels_of_nodes_reach_the_check(api: FakeApi) -> None:
    await prepare(api)
    await api.put("workloads", workload("a", 1, 400, pool="gold"))
    async with running(api, feature_gates=GATE) as extender:
        await extender.until(lambda: "has the labels and taints" in answer(api, "a")["message"], SECONDS)
        node = json.loads(json.dumps(api.objects["nodes"]["", "n2"]))
        node["metadata"]["labels"] = {"pool": "gold"}
        await api.put("nodes", node)
        await extender.until(lambda: answer(api, "a")["state"] == "Ready", SECONDS)
        assert answer(api, "a")["message"].startswith("Seats are held: main n2/")


async def test_restarted_scheduler_holds_seats_before_it_places_other_pods(api: FakeApi) -> None:
    await prepare(api)
    await api.put("workloads", workload("a", 4, 1000))
    async with running(api, feature_gates=GATE) as extender:
        await extender.until(lambda: answer(api, "a")["state"] == "Ready", SECONDS)
    async with running(api, feature_gates=GATE, answer=Answer.ONE) as extender:
        other = await api.put("pods", pod_object("other", vgpu="1", vgpu_memory="100"))
        reply = await extender.filter(other, "n1", "n2")  # waits until the seats are reserved again
        assert not reply["NodeNames"]
        assert extender.scheduler.cluster.context.workload_seats.seats == 4


async def test_workload_gets_boost_after_longest_wait_of_its_class(api: FakeApi) -> None:
    for name, metadata in (("patient", {"annotations": {contract.ANNOTATION_MAX_WAIT: "1s"}}), ("other", {})):
        await api.put("priorityclasses", {"metadata": {"name": name, **metadata}, "value": 0})
        item = workload(name, 1, 400)
        item["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
        item["spec"]["priorityClassRef"] = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": name}
        await api.put("workloads", {**item, "status": {}})

    def boosts() -> list[str]:
        return [key[1] for key, item in api.objects["workloads"].items() if PRIORITY_BOOST in item["metadata"].get("annotations", {})]

    async with running(api, feature_gates=f"{Gate.MAX_WAIT}=true") as extender:
        await extender.until(lambda: bool(boosts()), SECONDS)
    assert boosts() == ["patient"]


async def test_closed_gate_reads_and_answers_nothing(api: FakeApi) -> None:
    await prepare(api)
    await api.put("workloads", workload("a", 1, 400))
    async with running(api) as extender:
        pod = await api.put("pods", pod_object("p", annotations={contract.ANNOTATION_HOLD: "a/main"}, vgpu="1", vgpu_memory="100"))
        assert (await extender.filter(pod, "n1", "n2"))["NodeNames"]
    assert answer(api, "a")["state"] == "Pending"
    assert not [request for request in api.requests if "kueue" in request]
