# SPDX-License-Identifier: Apache-2.0
"""What /metrics says about the queue, the streams, preemption and each GPU model, read as Prometheus reads it."""

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.gpunode import encode_gpu_node
from tests.integration.test_extender import Running, running
from tests.unit.scheduler_plugin.api import FakeApi, pod_object
from tests.unit.scheduler_plugin.builders import make_device, make_node


@pytest.fixture
async def api():
    async with FakeApi() as served:
        h100 = [make_device("n1", minor, model="NVIDIA H100") for minor in (0, 1)]
        await served.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", h100, shares_per_gpu=1))))
        cordoned = make_node("n2", [make_device("n2", 0, model="NVIDIA A100")], cordoned=True)
        await served.put("gpunodes", json.loads(encode_gpu_node(cordoned)))
        yield served


async def samples(extender: Running) -> dict[tuple[str, ...], float]:
    status, text = await extender.page("/metrics")
    assert status == 200
    families = text_string_to_metric_families(text)
    return {
        (sample.name.removeprefix("aliquot_scheduler_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


async def test_memory_is_reported_by_model_and_unusable_part_as_stranded(api):
    async with running(api) as extender:
        pod = await api.put("pods", pod_object("p", vgpu="1", vgpu_memory="400"))
        await extender.schedule(pod, "n1")
        found = await samples(extender)
    assert found["model_gpus", "nvidia h100"] == 2
    assert found["model_memory_bytes", "nvidia h100"] == 2000 * units.MIB
    assert found["model_memory_allocated_bytes", "nvidia h100"] == 400 * units.MIB
    assert found["model_memory_stranded_bytes", "nvidia h100"] == 600 * units.MIB, "the only share of that GPU is taken"
    assert found["model_memory_stranded_bytes", "nvidia a100"] == 1000 * units.MIB, "the GPU is cordoned"


async def test_mig_instances_count_as_the_memory_slices_that_they_are():
    async with FakeApi() as api:
        await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", [make_device("n1", 0, model="NVIDIA H100", instances=7)]))))
        async with running(api) as extender:
            reported = []
            for name, instances in (("some", "3"), ("rest", "4")):
                limits: dict[str, Any] = {"mig-1g.10gb": instances}
                await extender.schedule(await api.put("pods", pod_object(name, **limits)), "n1")
                reported.append(await samples(extender))
    some, full = reported
    assert some["model_memory_allocated_bytes", "nvidia h100"] == 1000 * 3 // 7 * units.MIB
    assert full["model_memory_allocated_bytes", "nvidia h100"] == 1000 * units.MIB
    assert full["model_memory_stranded_bytes", "nvidia h100"] == 0, "nothing is left that nobody could get"


async def test_gpu_remainder_too_small_for_usual_pods_is_fragmented():
    async with FakeApi() as api:
        gpus = [make_device("n1", minor, model="NVIDIA H100") for minor in range(4)]
        await api.put("gpunodes", json.loads(encode_gpu_node(make_node("n1", gpus))))
        async with running(api) as extender:
            empty = await samples(extender)
            await extender.schedule(await api.put("pods", pod_object("p", vgpu="1", vgpu_memory="950")), "n1")
            found = await samples(extender)
    assert empty["model_fragmented_gpus", "nvidia h100"] == 0
    left = (0.05 + 0.99) / 2  # of memory and of compute, of which a share without a limit counts 1 %
    assert found["model_fragmented_gpus", "nvidia h100"] == pytest.approx(left)


async def test_queue_and_streams_are_reported(api):
    async with running(api) as extender:
        for name, memory in (("fits", "400"), ("waits", "4000")):
            await extender.filter(await api.put("pods", pod_object(name, vgpu="1", vgpu_memory=memory)), "n1")
        found = await samples(extender)
    assert (found[("waiting_pods",)], found["reservations", "soft"], found[("open_bindings",)]) == (1, 1, 0)
    assert found[("waiting_gangs",)] == 0
    assert {key[1] for key in found if key[0] == "watch_lag_seconds"} == {"gpunodes", "nodes", "pods", "poddisruptionbudgets"}
    assert all(0 <= value < 5 for key, value in found.items() if key[0] == "watch_lag_seconds")


async def test_ages_grow_while_the_api_is_silent(api):
    async with running(api) as extender:
        api.silent = True
        await api.break_watches()
        await asyncio.sleep(0.3)
        found = await samples(extender)
    for source in ("gpunodes", "nodes", "pods", "poddisruptionbudgets"):
        assert 0.3 <= found["watch_lag_seconds", source] < 60


async def test_silent_single_stream_ages_alone(api):
    async with running(api) as extender:
        api.held_back.add("nodes")
        await api.break_watches()
        await asyncio.sleep(0.5)
        found = await samples(extender)
    assert found["watch_lag_seconds", "nodes"] >= 0.5
    assert found["watch_lag_seconds", "pods"] < found["watch_lag_seconds", "nodes"]


async def test_a_gang_that_waits_and_a_reservation_that_runs_out_are_counted(api):
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    async with running(api) as extender:
        members = [await api.put("pods", pod_object(name, vgpu="1", annotations=gang)) for name in ("m0", "m1")]
        await extender.until(lambda: len(extender.state.pods) == 2)
        assert len((await extender.filter(members[0], "n1"))["NodeNames"]) == 1
        assert (await samples(extender))[("waiting_gangs",)] == 1
    async with running(api, soft_seconds=1.0) as extender:
        single = await api.put("pods", pod_object("single", vgpu="1"))
        await extender.filter(single, "n1")
        before = await samples(extender)
        await extender.until(lambda: not extender.state.reservations)
        after = await samples(extender)
    assert (before[("reservations_expired_total",)], before["reservations", "soft"]) == (0, 1)
    assert (after[("reservations_expired_total",)], after["reservations", "soft"]) == (1, 0)


NAMED = {
    "verb latency": ("verb_duration_seconds_count", "filter"),
    "verb outcome": ("verbs_total", "ok", "filter"),
    "attempts": ("attempts_total", "fits"),
    "reasons": ("node_rejections_total", "no-gpu"),
    "reservations held": ("reservations", "soft"),
    "reservations expired": ("reservations_expired_total",),
    "decision queue": ("waiting_pods",),
    "fragmentation per model": ("model_fragmented_gpus", "nvidia h100"),
    "stranded memory per model": ("model_memory_stranded_bytes", "nvidia h100"),
    "allocated memory per model": ("model_memory_allocated_bytes", "nvidia h100"),
    "gang attempts": ("gang_attempts_total", "planned"),
    "gangs that wait": ("waiting_gangs",),
    "watch lag": ("watch_lag_seconds", "pods"),
}


async def test_every_metric_for_operators_is_reported(api):
    async with running(api, soft_seconds=0.2, gang_seconds=1) as extender:
        gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "1"}
        await extender.filter(await api.put("pods", pod_object("member", vgpu="1", annotations=gang)), "n1", "stranger")
        single = await api.put("pods", pod_object("single", vgpu="1"))
        assert (await extender.filter(single, "n1", "stranger"))["NodeNames"] == ["n1"]
        args = {"Pod": single, "NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}
        assert (await extender.call("preempt", args))["NodeNameToMetaVictims"].keys() == {"n1"}
        await extender.until(lambda: not extender.state.reservations)
        found = {key for key, _ in (await samples(extender)).items()}
    missing = {what: sample for what, sample in NAMED.items() if not any(key[: len(sample)] == sample for key in found)}
    assert not missing
