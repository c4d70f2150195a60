# SPDX-License-Identifier: Apache-2.0
"""Pods with claims and pods with vGPUs on the same GPUs: neither gets what the other has, and the more important one gets room."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any
from unittest import mock

import pytest

from aliquot import contract
from scheduler_plugin.core.cluster.hold_uids import claim_uid
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.cluster.state import Reservation
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.services import claim_planner
from scheduler_plugin.services.claim_planner import EXPECTED_SECONDS
from tests.integration.claim_world import ClaimWorld
from tests.unit.scheduler_plugin.claim_builders import asking, claim_of, pod_of, result
from tests.unit.scheduler_plugin.services.test_claim_planner import plan


@pytest.fixture(autouse=True)
def no_pauses() -> Iterator[None]:
    with mock.patch.object(claim_planner, "FIRST_PAUSE_SECONDS", 0.0):
        yield


def bind(world: ClaimWorld, name: str) -> bool:
    """Have kube-scheduler and the extender bind a pod; return whether it has a node."""
    world.tell()
    world.kube_scheduler(name)
    world.tell()
    world.check()
    return bool(world.pods[name]["spec"].get("nodeName"))


CASES = [
    pytest.param((600, None), {"memory": "400Mi"}, True, id="exactly all memory"),
    pytest.param((600, None), {"memory": "401Mi"}, False, id="one MiB too much"),
    pytest.param((600, None), {}, False, id="whole GPU beside a share"),
    pytest.param((100, 70), {"memory": "100Mi", "cores": "30"}, True, id="exactly all cores"),
    pytest.param((100, 70), {"memory": "100Mi", "cores": "31"}, False, id="one percent too much"),
    pytest.param((100, None), {"memory": "100Mi", "cores": "100"}, False, id="no cores left for the other"),
    pytest.param((100, 100), {"memory": "100Mi"}, False, id="no cores left for the claim"),
]


@pytest.mark.parametrize(("ids", "amounts", "fits"), CASES)
@pytest.mark.parametrize("claims_first", [True, False])
def test_claim_and_vgpu_share_gpu_only_within_what_it_has(
    ids: tuple[int, int | None], amounts: Mapping[str, Any], fits: bool, claims_first: bool
) -> None:
    world = ClaimWorld(["n1"], devices=1)

    def with_claim() -> bool:
        world.create_pod("claimed", asking(**amounts))
        plan(world)
        return bool(world.results("claimed"))

    def with_ids() -> bool:
        world.create_with_ids("ids", *ids)
        return bind(world, "ids")

    first, second = (with_claim, with_ids) if claims_first else (with_ids, with_claim)
    assert first()
    assert second() is fits


@pytest.mark.parametrize("claims_first", [True, False])
def test_exclusive_vgpu_shares_gpu_with_no_claim(claims_first: bool) -> None:
    world = ClaimWorld(["n1"], devices=1)
    world.create_pod("claimed", asking(memory="1Mi"))
    world.create_with_ids("ids", 1000, isolation="exclusive")
    if claims_first:
        plan(world)
    assert bind(world, "ids") is not claims_first
    plan(world)
    assert bool(world.results("claimed")) is claims_first


def test_claim_gets_memory_of_ended_vgpu_pod_and_says_what_it_lacks() -> None:
    world = ClaimWorld(["n1"], devices=1)
    world.create_with_ids("ids", 700)
    assert bind(world, "ids")
    world.create_pod("claimed", asking(memory="400Mi"))
    plan(world)
    assert "not enough free memory" in world.events["claimed"]
    assert "not enough free memory" in world.why.sentence(world.planned.by_uid[world.pods["claimed"]["metadata"]["uid"]].facts)
    world.delete_pod("ids")
    plan(world)
    assert world.node_of("claimed") == "n1"


def test_each_request_of_claim_finds_room_beside_vgpus() -> None:
    """The search takes devices in one order for all requests. Without the vGPUs it would find room for both on the first."""
    world = ClaimWorld(["n1"])
    for name in ("one", "two"):
        world.create_with_ids(name, 300, placement="spread")
        assert bind(world, name)
    world.create_pod("claimed", asking("a", memory="300Mi"), asking("b", memory="500Mi"))
    plan(world)
    assert len({one["device"] for one in world.results("claimed")}) == 2


def claim_without_answer(dropped: int) -> ClaimWorld:
    """A pod with a claim and one with vGPUs; only one of them fits. Args: dropped: how many writes of the claim are lost."""
    world = ClaimWorld(["n1"], devices=1)
    world.create_pod("claimed", asking(memory="700Mi"))
    world.create_with_ids("ids", 400)
    world.tell()
    world.drop_requests = dropped
    return world


def test_room_of_claim_is_kept_while_its_write_has_no_answer() -> None:
    world = claim_without_answer(dropped=1_000_000)

    async def history() -> None:
        round_ = asyncio.create_task(world.planner.step())
        for _period in range(6):
            for _turn in range(20):
                await asyncio.sleep(0)
            world.now += EXPECTED_SECONDS / 2
            world.state.expire(world.now, -inf)
        assert not bind(world, "ids")
        world.drop_requests = 0
        await round_

    asyncio.run(history())
    world.check()
    assert world.results("claimed")


def test_claim_is_not_written_after_its_room_expired() -> None:
    world = claim_without_answer(dropped=1)

    async def history() -> None:
        round_ = asyncio.create_task(world.planner.step())
        for _turn in range(4):
            await asyncio.sleep(0)
        assert not world.drop_requests
        world.state.release(world.pods["claimed"]["metadata"]["uid"])
        assert bind(world, "ids")
        await round_

    asyncio.run(history())
    world.check()
    assert not world.results("claimed")


def test_second_claim_of_pod_keeps_its_room_until_it_is_allocated() -> None:
    world = ClaimWorld(["n1"], devices=1)
    claims = world.context.claims
    world.state.set_pod(pod_of("p", "one", "two"))
    waiting = [claim_of(name, asking(memory="400Mi")) for name in ("one", "two")]
    for claim in waiting:
        claims.holds.set_claim(claim)
    world.create_with_ids("ids", 300)
    world.tell()
    world.state.reserve(Reservation("p", "n1", {"GPU-n1-0": Use(800, 0, 2, 2)}, HostDemand()))
    for name in ("one", "two"):
        assert not bind(world, "ids")
        claims.holds.set_claim(claim_of(name, asking(memory="400Mi"), results=[result("n1", 0, memory="400Mi")], reserved_for=["p"]))
    assert world.state.reservations["p"].footprint == {}
    assert world.state.footprint_of(claim_uid("claim-two"))


# --- preemption ---


def test_important_claim_evicts_pod_with_vgpu_after_its_min_runtime() -> None:
    world = ClaimWorld(["n1"], devices=1)
    world.create_with_ids("ids", 900, min_runtime="60s")
    assert bind(world, "ids")
    world.create_pod("equal", asking(memory="600Mi"))
    world.create_pod("urgent", asking(memory="500Mi"), priority=9)
    plan(world)
    assert not world.evicted
    world.now = 61.0
    plan(world)
    assert world.evicted == ["ids"]
    world.create_with_ids("late", 400)
    assert not bind(world, "late"), "the room is kept"
    plan(world)
    assert world.evicted == ["ids"]
    world.delete_pod("ids")
    plan(world)
    assert world.results("urgent")
    assert not world.results("equal")


def test_gang_with_vgpus_ends_whole_for_claim() -> None:
    world = ClaimWorld(["n1", "n2"], devices=1)
    for name in ("a", "b"):
        world.create_with_ids(name, 900, gang="g", gang_min="2")
        assert bind(world, name)
    world.create_pod("urgent", asking(memory="900Mi"), priority=9)
    plan(world)
    assert sorted(world.evicted) == ["a", "b"]


def victims(world: ClaimWorld, name: str) -> Mapping[str, Any]:
    """Ask which pods end for a pod with vGPUs, where kube-scheduler itself needs none to end."""
    proposed = {node: {"Pods": [], "NumPDBViolations": 0} for node in world.nodes}
    body = json.dumps({"Pod": world.pods[name], "NodeNameToMetaVictims": proposed}).encode()
    reply = json.loads(asyncio.run(choose_victims(world.context, body)))
    names = {pod["metadata"]["uid"]: name for name, pod in world.pods.items()}
    return {node: sorted(names[one["UID"]] for one in found["Pods"]) for node, found in reply["NodeNameToMetaVictims"].items()}


def claimed_and_important(**options: Any) -> ClaimWorld:
    """A running pod with a claim, and a more important one with vGPUs that lacks its memory."""
    world = ClaimWorld(["n1"], devices=1)
    world.create_pod("claimed", asking(memory="700Mi"), **options)
    plan(world)
    world.kube_scheduler("claimed")
    world.create_with_ids("urgent", 600, priority=9)
    assert not bind(world, "urgent")
    return world


def test_pod_with_claim_ends_for_more_important_pod_with_vgpu() -> None:
    world = claimed_and_important()
    assert victims(world, "urgent") == {"n1": ["claimed"]}
    world.pods["urgent"]["spec"]["priority"] = 0
    assert victims(world, "urgent") == {}


def test_pod_with_claim_runs_for_its_minimum() -> None:
    world = claimed_and_important(min_runtime="60s")
    assert victims(world, "urgent") == {}
    world.now = 61.0
    assert victims(world, "urgent") == {"n1": ["claimed"]}


def test_member_of_gang_with_claims_does_not_end_for_vgpu() -> None:
    world = claimed_and_important(gang=1)
    assert victims(world, "urgent") == {}


def test_shared_claim_is_free_only_when_both_users_end() -> None:
    world = claimed_and_important()
    claim = world.claims[world.claim_name(world.pods["claimed"])]
    claim["status"]["reservedFor"].append({"resource": "pods", "name": "other", "uid": world.pods["urgent"]["metadata"]["uid"]})
    world.relist()
    assert victims(world, "urgent") == {}


def test_claim_that_controller_has_not_freed_yet_costs_no_second_pod() -> None:
    world = claimed_and_important()
    world.create_pod("second", asking(memory="200Mi"))
    plan(world)
    world.kube_scheduler("second")
    world.tell()
    uid = world.pods.pop("claimed")["metadata"]["uid"]
    world.state.drop_pod(uid)
    assert victims(world, "urgent") == {"n1": []}
    assert contract.LABEL_ALLOCATION in world.pods["second"]["metadata"]["labels"]
