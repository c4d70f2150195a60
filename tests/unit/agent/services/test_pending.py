import asyncio

import pytest

from agent.core.identity import RememberedDevices
from agent.core.injection import DeviceInjection
from agent.services import pending as module
from agent.services.driver_watch import DriverWatch
from agent.services.pending import PendingPods
from agent.services.pod_cache import PodCache
from proto.model import Policy
from tests.unit.agent.builders import VGPU, assigned, gpu, ids, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeDriver, FakeKubeletMemory, make_injection, settle

PLACED = pod("a", annotations=assigned("uid-a", main=[share(1)]))
OTHER = pod("b", annotations=assigned("uid-b", main=[share(0)]))


@pytest.fixture
async def pods() -> PodCache:
    return PodCache()


@pytest.fixture
async def pending(pods, tmp_path):
    watch = DriverWatch(FakeDriver(reading(gpu(0), gpu(1))), 1.0)
    await watch.poll()
    disk, memory = Disk(tmp_path), FakeKubeletMemory()

    def make(policy=None, mode=DeviceInjection.CDI, remembered=()) -> PendingPods:
        book = disk.book()
        memory.entries = list(remembered)
        injection = make_injection(book, disk, pods, watch, mode)
        return PendingPods(16, policy, watch=watch, pods=pods, book=book, kubelet_memory=memory, injection=injection)

    return make


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
async def test_the_wait_is_short_and_none_at_all_during_an_outage(pods, pending, outage, monkeypatch):
    if outage:
        monkeypatch.setattr(module, "POD_WAIT_SECONDS", 60.0)
    pods.pods_listed([])
    pods.api_trouble("pods", "down" if outage else "")
    await settle()
    assert await asyncio.wait_for(pending(Policy.FRAG).wanted_devices(VGPU, 1), 30) == ()


async def test_a_container_that_kubelet_gave_ids_already_waits_for_none(pods, pending):
    pods.pods_listed([PLACED, OTHER])
    await settle()
    assert await pending().wanted_devices(VGPU, 1) == ()
    remembered = [RememberedDevices("uid-a", "main", VGPU, ids("1:0"))]
    assert await pending(remembered=remembered).wanted_devices(VGPU, 1) == ("GPU-0",)


async def test_where_the_ids_decide_the_first_that_came_is_taken_for_the_next(pods, pending):
    pods.pods_listed([PLACED, OTHER])
    await settle()
    assert await pending(mode=DeviceInjection.LEGACY).wanted_devices(VGPU, 1) == ("GPU-1",)
