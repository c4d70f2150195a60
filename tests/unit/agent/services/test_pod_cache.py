# SPDX-License-Identifier: Apache-2.0
import asyncio

from agent.ports.kube import NodeState
from agent.services.pod_cache import PodCache
from tests.unit.agent.builders import pod
from tests.unit.agent.fakes import settle


async def cache_with(*pods) -> PodCache:
    cache = PodCache()
    cache.pods_listed(pods)
    await settle()
    return cache


async def test_nothing_is_fresh_before_the_first_list():
    cache = PodCache()
    assert not cache.fresh
    assert "not been listed" in cache.trouble


async def test_a_list_replaces_everything():
    cache = await cache_with(pod("a"), pod("b"))
    cache.pods_listed([pod("b")])
    await settle()
    assert set(cache.by_uid) == {"uid-b"}
    assert cache.startable("default", "a") is None


async def test_a_pod_that_ended_or_is_being_deleted_is_not_started():
    cache = await cache_with(pod("done", phase="Failed"), pod("going", deleting=True, phase="Running"))
    assert cache.startable("default", "done") is None
    assert cache.startable("default", "going") is None
    assert not cache.is_active("uid-done")
    assert cache.is_active("uid-going")


async def test_a_pod_recreated_under_its_name_replaces_the_old_one():
    cache = await cache_with(pod("a"))
    cache.pod_changed(pod("a", uid="uid-new"))
    await settle()
    assert set(cache.by_uid) == {"uid-new"}
    cache.pod_deleted(pod("a"))  # the old one's deletion comes late
    await settle()
    assert cache.startable("default", "a") is not None


async def test_waiting_ends_as_soon_as_the_pod_is_known():
    cache = PodCache()
    waiting = asyncio.ensure_future(cache.wait_until(lambda: cache.startable("default", "a") is not None, 5))
    await settle()
    await asyncio.to_thread(cache.pod_changed, pod("a"))
    assert await asyncio.wait_for(waiting, 1)


async def test_waiting_ends_without_the_pod_when_the_time_is_up():
    assert not await PodCache().wait_until(lambda: False, 0.02)


async def test_an_outage_keeps_what_is_known_and_says_that_it_is_old():
    cache = await cache_with(pod("a"))
    cache.api_trouble("pods", "connection refused")
    await settle()
    assert not cache.fresh
    assert cache.trouble == "connection refused"
    assert cache.startable("default", "a") is not None
    cache.api_trouble("pods", "")
    await settle()
    assert cache.fresh


async def test_only_a_changed_node_is_a_change():
    cache = PodCache()
    for _ in range(2):
        cache.node_changed(NodeState("uid", {"a": "1"}, {}))
    await settle()
    assert cache.node_changes.count == 1
