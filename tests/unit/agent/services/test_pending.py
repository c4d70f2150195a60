# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from agent.core.identity import RememberedDevices
from agent.core.injection import DeviceInjection
from agent.services import pending as module
from agent.services.driver_watch import DriverWatch
from agent.services.pending import PendingPods
from agent.services.pod_cache import PodCache
from agent.services.state import AgentState
from aliquot.contract.model import Policy
from aliquot.placement import request
from tests.unit.agent.builders import VGPU, assigned, gpu, ids, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeDriver, FakeKubeletCheckpoint, make_injection, settle

PLACED = pod("a", annotations=assigned("uid-a", main=[share(1)]))
OTHER = pod("b", annotations=assigned("uid-b", main=[share(0)]))


@pytest.fixture
async def pods() -> PodCache:
    return PodCache()


@pytest.fixture
async def pending(pods, tmp_path):
    watch = DriverWatch(FakeDriver(reading(gpu(0), gpu(1))), 1.0)
    await watch.poll()
    disk, memory = Disk(tmp_path), FakeKubeletCheckpoint()

    def make(policy=None, mode=DeviceInjection.CDI, remembered=()) -> PendingPods:
        manager = disk.manager()
        memory.entries = list(remembered)
        injection = make_injection(manager, disk, pods, watch, mode)
        return PendingPods(16, policy, state=AgentState(watch, pods, manager), checkpoint=memory, injection=injection)

    return make


async def test_request_of_known_pod_is_parsed_once(pods, pending, monkeypatch):
    counted, parse = [], request.pod_preferences

    def noted_pod_preferences(annotations):
        counted.append(annotations)
        return parse(annotations)

    monkeypatch.setattr(request, "pod_preferences", noted_pod_preferences)
    pods.pods_listed([PLACED])
    await settle()
    await pending().wanted_devices(VGPU, 1)
    assert len(counted) == 1


async def test_a_known_pod_is_answered_for_at_once(pods, pending):
    pods.pods_listed([PLACED])
    await settle()
    assert await pending().wanted_devices(VGPU, 1) == ("GPU-1",)


async def test_a_pod_that_kubelet_heard_of_first_is_waited_for(pods, pending, monkeypatch):
    monkeypatch.setattr(module, "POD_WAIT_SECONDS", 60.0)
    pods.pods_listed([])
    await settle()
    asking = asyncio.ensure_future(pending().wanted_devices(VGPU, 1))
    await asyncio.sleep(0.02)
    pods.pod_changed(PLACED)
    assert await asking == ("GPU-1",)


@pytest.mark.parametrize("outage", [True, False])
async def test_wait_is_short_and_skipped_during_outage(pods, pending, outage, monkeypatch):
    if outage:
        monkeypatch.setattr(module, "POD_WAIT_SECONDS", 60.0)
    pods.pods_listed([])
    pods.api_trouble("pods", "down" if outage else "")
    await settle()
    assert await asyncio.wait_for(pending(Policy.FRAG).wanted_devices(VGPU, 1), 30) == ()


async def test_container_with_kubelet_ids_does_not_wait(pods, pending):
    pods.pods_listed([PLACED, OTHER])
    await settle()
    assert await pending().wanted_devices(VGPU, 1) == ()
    remembered = [RememberedDevices("uid-a", "main", VGPU, ids("1:0"))]
    assert await pending(remembered=remembered).wanted_devices(VGPU, 1) == ("GPU-0",)


async def test_first_pending_claim_is_next_when_ids_decide(pods, pending):
    pods.pods_listed([PLACED, OTHER])
    await settle()
    assert await pending(mode=DeviceInjection.LEGACY).wanted_devices(VGPU, 1) == ("GPU-1",)
