# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.health import HealthRules, HealthTable, Silence
from agent.core.inventory import DeviceInventory, FailedDevice
from agent.core.publishing import (
    LEAST_SECONDS,
    MAX_MESSAGE_CHARS,
    SPREAD_SECONDS,
    STEADY_SECONDS,
    NodeFacts,
    gpu_node,
    gpus_healthy,
    is_urgent,
    status_of,
    status_without_driver,
    write_after,
)
from aliquot.contract import gpunode
from aliquot.contract.errors import ContractError
from aliquot.contract.gpunode import NO_CORDON, Cordon, IdlePod, PodUtilization
from aliquot.contract.model import Isolation, Link, LinkKind, Utilization
from tests.unit.agent.builders import gpu, instance, inventory, reading

FACTS = NodeFacts("node-1", "1.2.3", 16)


def troubled(one: DeviceInventory, *uuids: str, trouble: str = "GPU is lost") -> DeviceInventory:
    silences = dict.fromkeys(uuids, Silence(trouble, lost=True))
    return one.judged(HealthTable().after_probes(silences, 0, HealthRules()), NO_CORDON)


def status(one: DeviceInventory, isolation=(Isolation.SHIM,)):
    return status_of(gpu_node(FACTS, one, isolation))


def test_object_decodes_to_published_inventory():
    one = inventory(gpu(0), gpu(1, mig=[instance(1, 0)])).with_links([Link("GPU-1", "GPU-0", LinkKind.NVLINK, 18)])
    node = gpu_node(FACTS, troubled(one, "GPU-1"), (Isolation.SHIM, Isolation.MIG))
    decoded = gpunode.decode_gpu_node(gpunode.encode_gpu_node(node))
    assert decoded == node
    assert [(entry.healthy, entry.state) for entry in decoded.devices] == [(True, "healthy"), (False, "lost")]
    assert decoded.links == (Link("GPU-0", "GPU-1", LinkKind.NVLINK, 18),)
    assert decoded.isolation == (Isolation.SHIM, Isolation.MIG)


def test_a_trouble_too_long_for_the_object_is_cut():
    assert len(status(troubled(inventory(), "GPU-0", trouble="x" * 999))["devices"][0]["trouble"]) == gpunode.MAX_TEXT_CHARS


def test_link_to_gpu_outside_inventory_is_left_out():
    assert "links" not in status(inventory(gpu(0)).with_links([Link("GPU-0", "GPU-9", LinkKind.SYSTEM)]))


@pytest.mark.parametrize(
    ("after", "urgent"),
    [
        pytest.param(status(inventory()), False, id="the same"),
        pytest.param(status(troubled(inventory(), "GPU-0")), True, id="a lost GPU"),
        pytest.param(status(inventory(gpu(0))), True, id="a GPU fewer"),
        pytest.param(status(inventory(gpu(0), gpu(1, mib=900))), True, id="less memory"),
        pytest.param(status(inventory(gpu(0), gpu(1, mig=[instance(1, 0)]))), True, id="MIG instances"),
        pytest.param(status(inventory(), (Isolation.SHIM, Isolation.MPS)), True, id="another backend"),
        pytest.param({**status(inventory()), "agentVersion": "2"}, False, id="another agent"),
        pytest.param(status(inventory().with_links([Link("GPU-0", "GPU-1", LinkKind.SYSTEM)])), False, id="links"),
    ],
)
def test_changes_relevant_to_scheduling_are_urgent(after, urgent):
    assert is_urgent(status(inventory()), after) is urgent


def test_pod_that_works_again_is_urgent_and_one_that_stopped_is_not():
    first, second = IdlePod("a", 10, 100), IdlePod("b", 20, 100)
    both, one, none = (status_of(gpu_node(FACTS, inventory(), (), (), idle)) for idle in ((first, second), (first,), ()))
    renewed, later = (
        status_of(gpu_node(FACTS, inventory(), (), (), (pod,))) for pod in (replace(first, until=200), replace(first, since=11))
    )
    assert [is_urgent(*pair) for pair in ((none, one), (one, both), (one, renewed))] == [False] * 3
    assert [is_urgent(*pair) for pair in ((both, one), (one, none), (one, later))] == [True] * 3


def test_agent_without_driver_reports_no_idle_pod():
    published = status_of(gpu_node(FACTS, inventory(), (), (), (IdlePod("a", 10, 100),)))
    assert "idle" not in status_without_driver(published, "the driver hangs")


def test_another_reason_for_the_same_trouble_can_wait():
    assert not is_urgent(status(troubled(inventory(), "GPU-0")), status(troubled(inventory(), "GPU-0", trouble="it hangs")))


def test_memory_burst_limit_is_published_urgently_when_allowed():
    generous = status_of(gpu_node(replace(FACTS, memory_oversubscription=1.5), inventory(), (Isolation.SHIM,)))
    assert "memoryOversubscription" not in status(inventory())
    assert generous["memoryOversubscription"] == 1.5
    assert is_urgent(status(inventory()), generous)


def test_use_of_pods_is_published_and_can_wait():
    used = status_of(gpu_node(FACTS, inventory(), (Isolation.SHIM,), [PodUtilization("u1", Utilization(80, 40))]))
    assert used["utilization"] == [{"podUid": "u1", "smPercent": 80, "dramPercent": 40}]
    assert not is_urgent(status(inventory()), used)


def test_the_first_status_is_urgent():
    assert is_urgent({}, status(inventory()))


def test_urgent_change_waits_only_for_echo_of_previous_write():
    assert write_after(None, 100, urgent=True, chance=1) == 100
    assert write_after(99.9, 100, urgent=True, chance=1) == pytest.approx(99.9 + LEAST_SECONDS)
    assert write_after(50, 100, urgent=True, chance=1) == 100


def test_other_changes_wait_a_minute_and_a_random_delay():
    assert write_after(100, 101, urgent=False, chance=0.5) == 100 + STEADY_SECONDS + SPREAD_SECONDS / 2
    assert write_after(None, 101, urgent=False, chance=0.5) == 101 + SPREAD_SECONDS / 2
    assert write_after(0, 101, urgent=False, chance=0) == 101


def test_without_driver_published_gpus_get_a_fault():
    published = status(inventory())
    silenced = status_without_driver(published, "the NVIDIA kernel module is not loaded")
    assert {device["trouble"] for device in silenced["devices"]} == {"the NVIDIA kernel module is not loaded"}
    assert is_urgent(published, silenced)
    assert status_without_driver({}, "no driver") == {}


class TestCondition:
    def test_it_holds_while_all_gpus_take_work(self):
        assert gpus_healthy(inventory(), "").holds

    def test_it_names_those_that_do_not_and_why(self):
        condition = gpus_healthy(troubled(inventory(), "GPU-1"), "")
        assert (condition.holds, condition.reason) == (False, "GPUsUnhealthy")
        assert condition.message == "1 of 2 GPUs get no new work: GPU-1 is lost: GPU is lost"

    def test_a_gpu_that_never_answered_is_counted_too(self):
        one = DeviceInventory().after_reading(reading(gpu(0), failed=(FailedDevice(1, None, "GPU is lost", lost=True),)))
        condition = gpus_healthy(one, "")
        assert (condition.holds, condition.message) == (False, "1 of 2 GPUs get no new work: GPU with NVML index 1: GPU is lost")
        assert gpus_healthy(one.after_reading(reading(gpu(0), gpu(1))), "").holds

    def test_a_cordon_is_no_trouble(self):
        assert gpus_healthy(inventory().judged(HealthTable(), Cordon(node=True)), "").holds

    def test_without_gpus_it_reports_the_drivers_fault(self):
        condition = gpus_healthy(DeviceInventory(), "no usable NVIDIA driver")
        assert (condition.holds, condition.reason, condition.message) == (False, "NoGPU", "no usable NVIDIA driver")

    def test_its_message_stays_within_what_the_api_takes(self):
        many = inventory(*(gpu(minor) for minor in range(16)))
        message = gpus_healthy(troubled(many, *(f"GPU-{minor}" for minor in range(16)), trouble="x" * 200), "").message
        assert len(message) == MAX_MESSAGE_CHARS


def test_inventory_that_cannot_be_encoded_is_refused():
    odd = inventory(replace(gpu(0), memory_bytes=5))
    with pytest.raises(ContractError):
        status(odd)
