# SPDX-License-Identifier: Apache-2.0
"""Claims that the scheduler allocates itself: single pods, gangs, preemption, and what happens when something fails in between."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from aliquot import contract
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import Allocation, Link, LinkKind
from scheduler_plugin.core.claims.stored import StoredClaim
from scheduler_plugin.services import claim_planner
from tests.integration.claim_world import TAINT, ClaimWorld
from tests.unit.scheduler_plugin.builders import make_node, make_place
from tests.unit.scheduler_plugin.claim_builders import asking, class_of, slice_of


@pytest.fixture(autouse=True)
def no_pauses() -> Iterator[None]:
    with mock.patch.object(claim_planner, "FIRST_PAUSE_SECONDS", 0.0):
        yield


def plan(world: ClaimWorld, rounds: int = 1) -> None:
    """Deliver all, and plan. Capacity is never allocated twice."""

    async def steps() -> None:
        for _ in range(rounds):
            world.tell()
            await world.planner.step()
            world.check()

    asyncio.run(steps())


def test_pod_gets_allocation_that_kube_scheduler_can_use() -> None:
    world = ClaimWorld(["n1"])
    world.create_pod("p", asking(memory="400Mi", cores="30"))
    plan(world)
    assert not world.is_gated("p")
    (claim,) = world.claims.values()
    assert claim["metadata"]["finalizers"] == ["resource.kubernetes.io/delete-protection"]
    assert [user["uid"] for user in claim["status"]["reservedFor"]] == [world.pods["p"]["metadata"]["uid"]]
    allocation = claim["status"]["allocation"]
    (result,) = allocation["devices"]["results"]
    assert result["consumedCapacity"] == {"memory": str(400 << 20), "cores": "30", "shares": "1"}
    assert (result["request"], result["driver"], result["pool"]) == ("gpu", contract.DRA_DRIVER, "n1")
    [term] = allocation["nodeSelector"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    assert allocation["allocationTimestamp"]


def test_placement_policy_of_pod_chooses_the_gpu() -> None:
    world = ClaimWorld(["n1"])
    for name in ("one", "two"):
        world.create_pod(name, asking(memory="200Mi"), placement="spread")
        plan(world)
    assert {world.results(name)[0]["device"] for name in ("one", "two")} == {"gpu-0", "gpu-1"}
    packed = ClaimWorld(["n1"])
    for name in ("one", "two"):
        packed.create_pod(name, asking(memory="200Mi"), placement="binpack")
        plan(packed)
    assert len({packed.results(name)[0]["device"] for name in ("one", "two")}) == 1


def test_node_selector_limits_the_nodes() -> None:
    world = ClaimWorld()
    world.create_pod("p", asking(memory="400Mi"))
    world.pods["p"]["spec"]["affinity"] = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]
            }
        }
    }
    world.relist()
    plan(world)
    assert world.node_of("p") == "n2"


def test_what_does_not_fit_waits_with_sentence_until_room_is_free() -> None:
    world = ClaimWorld(["n1"], devices=1)
    world.create_pod("old", asking(memory="700Mi"))
    plan(world)
    world.kube_scheduler("old")
    world.create_pod("new", asking(memory="400Mi"))
    plan(world, 2)
    assert world.is_gated("new")
    assert not world.results("new")
    assert "not enough free memory" in world.events["new"]
    world.delete_pod("old")
    plan(world)
    assert not world.is_gated("new")


def test_shares_in_mig_mode_are_allocated_until_the_instance_is_full() -> None:
    world = ClaimWorld(["n1"], devices=1)
    device = world.nodes["n1"].devices[0].device
    place = replace(make_place(device.uuid, "7g.80gb", 0), memory_bytes=1000 << 20)
    in_mig_mode = replace(device, mig_enabled=True, mig_instances=(place, make_place(device.uuid, "1g.10gb", 0)))
    world.nodes["n1"] = make_node("n1", [in_mig_mode], shares_per_gpu=16, allocation=Allocation.BOTH)
    world.relist()
    shared = slice_of(world.nodes["n1"], taints=[TAINT])
    shared["spec"]["devices"][0]["attributes"]["type"] = {"string": "shared-mig"}
    world.watch.slices.listed([shared])
    world.watch.classes.listed([class_of(expression="device.attributes['gpu.aliquot.dev'].type == 'shared-mig'")])
    for name in ("one", "two", "three"):
        world.create_pod(name, asking(memory="400Mi"))
    plan(world, 2)
    assert sorted(world.is_gated(name) for name in ("one", "two", "three")) == [False, False, True]
    (waiting,) = (name for name in ("one", "two", "three") if world.is_gated(name))
    assert "in MIG mode" not in world.events.get(waiting, "")


def test_pod_with_another_gate_is_left_alone() -> None:
    world = ClaimWorld(["n1"])
    world.create_pod("p", asking(memory="400Mi"))
    world.pods["p"]["spec"]["schedulingGates"].append({"name": "example.com/wait"})
    world.relist()
    plan(world, 2)
    assert not world.results("p")


def test_gate_opens_after_crash_between_allocation_and_opening() -> None:
    world = ClaimWorld(["n1"])
    world.create_pod("p", asking(memory="400Mi"))
    asyncio.run(world.crash_after_first_allocation())
    assert world.is_gated("p")
    before = world.results("p")
    world.start()
    plan(world)
    assert not world.is_gated("p")
    assert world.results("p") == before


def test_claim_that_kube_scheduler_freed_is_allocated_on_another_node() -> None:
    world = ClaimWorld()
    world.create_pod("p", asking(memory="400Mi"))
    plan(world)
    first = world.node_of("p")
    world.kube_scheduler("p", accepts=False)
    assert not world.results("p")
    plan(world)
    assert world.node_of("p") not in ("", first)
    world.kube_scheduler("p", accepts=False)
    plan(world)
    assert not world.results("p")
    world.now += claim_planner.AVOID_SECONDS + 1
    plan(world)
    assert world.results("p")


def test_allocation_on_node_that_is_gone_is_taken_back() -> None:
    world = ClaimWorld()
    world.create_pod("p", asking(memory="400Mi"))
    plan(world)
    first = world.node_of("p")
    world.remove_node(first)
    plan(world, 3)
    assert world.node_of("p") not in ("", first)


@pytest.mark.parametrize("fault", ["drop_requests", "lose_answers", "delay_requests"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_lost_answers_allocate_once(fault: str, count: int) -> None:
    world = ClaimWorld(["n1"], devices=1)
    for name in ("one", "two"):
        world.create_pod(name, asking(memory="600Mi"))
    setattr(world, fault, count)
    plan(world, 2)
    world.land()
    plan(world, 2)
    assert sorted(bool(world.results(name)) for name in ("one", "two")) == [False, True]
    [placed] = [name for name in ("one", "two") if world.results(name)]
    assert not world.is_gated(placed)


def test_two_replicas_allocate_a_claim_once() -> None:
    world = ClaimWorld(["n1"])
    world.create_pod("p", asking(memory="600Mi"))
    world.tell()
    first = world.planner

    async def both() -> None:
        one = asyncio.create_task(first.step())
        await asyncio.sleep(0)
        world.start()
        await asyncio.gather(one, world.planner.step())

    asyncio.run(both())
    plan(world, 2)
    assert len(world.results("p")) == 1
    world.check()


def test_gang_gets_all_or_nothing() -> None:
    world = ClaimWorld(["n1"])
    world.create_pod("old", asking(memory="700Mi"))
    plan(world)
    for name in ("a", "b"):
        world.create_pod(name, asking(memory="900Mi"), gang=2)
    plan(world, 3)
    assert not [*world.results("a"), *world.results("b")]
    world.delete_pod("old")
    plan(world, 2)
    assert [world.is_gated(name) for name in ("a", "b")] == [False, False]


def test_gang_without_enough_members_waits_and_keeps_nothing() -> None:
    world = ClaimWorld(["n1"])
    world.create_pod("a", asking(memory="900Mi"), gang=2)
    plan(world, 2)
    assert not world.results("a")
    assert "gang: 2 members must start together" in world.events["a"]


def create_member(world: ClaimWorld, name: str, role: str = "worker", least: str = "1") -> None:
    world.create_pod(name, asking(memory="900Mi"), gang=2, gang_role=role, gang_role_min=least)


def test_gang_waits_for_its_master_whatever_the_number_of_workers() -> None:
    world = ClaimWorld(["n1"], devices=3)
    for name in ("a", "b"):
        create_member(world, name)
    plan(world, 2)
    assert not world.used()
    assert "gang: 2 members must start together, and no role other than worker (1) has members" in world.events["a"]
    create_member(world, "master", "master")
    plan(world, 2)
    assert [world.is_gated(name) for name in ("a", "b", "master")] == [False, False, False]


def test_gang_with_little_room_starts_with_one_of_each_role() -> None:
    world = ClaimWorld(["n1"], devices=2)
    for name in ("a", "b"):
        create_member(world, name)
    create_member(world, "master", "master")
    plan(world, 3)
    assert [world.is_gated(name) for name in ("a", "b", "master")] == [False, True, False]


def test_roles_that_contradict_each_other_are_reported() -> None:
    world = ClaimWorld(["n1"], devices=2)
    create_member(world, "a")
    create_member(world, "b", least="2")
    plan(world, 2)
    assert not world.used()
    assert "members of role worker state 1 and 2" in world.events["a"]


def test_worker_beyond_the_minimum_is_evicted_and_the_master_stays() -> None:
    world = ClaimWorld(["n1"], devices=3)
    for name in ("a", "b"):
        create_member(world, name)
    create_member(world, "master", "master")
    plan(world, 2)
    for name in ("a", "b", "master"):
        world.kube_scheduler(name)
    world.create_pod("important", asking(memory="900Mi"), priority=9)
    plan(world, 2)
    assert len(world.evicted) == 1
    assert world.evicted[0] in ("a", "b")


def test_half_of_gang_is_taken_back_when_the_rest_is_gone() -> None:
    world = ClaimWorld(["n1"])
    for name in ("a", "b"):
        world.create_pod(name, asking(memory="900Mi"), gang=2)
    asyncio.run(world.crash_after_first_allocation())
    [other] = [name for name in ("a", "b") if not world.results(name)]
    world.delete_pod(other)
    world.start()
    plan(world, 3)
    assert not world.used()


def test_half_of_gang_is_taken_back_when_the_rest_does_not_fit() -> None:
    world = ClaimWorld(["n1"])
    for name in ("a", "b"):
        world.create_pod(name, asking(memory="900Mi"), gang=2)
    asyncio.run(world.crash_after_first_allocation())
    world.create_pod("urgent", asking(memory="900Mi"), priority=9)
    world.start()
    plan(world, 3)
    assert world.results("urgent")
    assert not [*world.results("a"), *world.results("b")]


def test_late_write_takes_no_room_that_was_given_to_another_pod() -> None:
    world = ClaimWorld(["n1"], devices=1)
    world.create_pod("one", asking(memory="600Mi"))
    allocate = world.allocate

    async def slow(*args: Any, **fields: Any) -> StoredClaim:
        world.delay_requests = 0 if world.late else 1
        return await allocate(*args, **fields)

    world.allocate = slow
    plan(world)
    assert world.late
    world.terminate("one")
    world.create_pod("two", asking(memory="600Mi"))
    plan(world, 2)
    world.land()
    world.check()


def test_several_gpus_of_pod_are_linked() -> None:
    world = ClaimWorld(["n1"], devices=4)
    uuids = [f"GPU-n1-{minor}" for minor in range(4)]
    world.nodes["n1"] = linked(world.nodes["n1"], [(uuids[1], uuids[3])])
    world.relist()
    world.create_pod("p", asking(count=2, memory="900Mi"), placement="topology")
    plan(world)
    assert {result["device"] for result in world.results("p")} == {"gpu-1", "gpu-3"}


def test_important_pod_evicts_fewest_and_gets_their_room() -> None:
    world = ClaimWorld(["n1"])
    world.create_pod("large", asking(memory="900Mi"), priority=1)
    world.create_pod("small", asking(memory="600Mi"), priority=1)
    plan(world)
    for name in ("large", "small"):
        world.kube_scheduler(name)
    world.create_pod("urgent", asking(memory="500Mi"), priority=9)
    world.create_pod("patient", asking(memory="600Mi"), priority=1)
    plan(world, 2)
    assert len(world.evicted) == 1
    [victim] = world.evicted
    plan(world, 2)
    assert world.evicted == [victim]
    assert not world.results("patient")
    world.delete_pod(victim)
    plan(world)
    assert world.results("urgent")
    assert not world.is_gated("urgent")


def test_nothing_ends_for_equal_priority_or_before_min_runtime() -> None:
    world = ClaimWorld(["n1"], devices=1)
    world.create_pod("old", asking(memory="900Mi"), min_runtime="60s")
    plan(world)
    world.kube_scheduler("old")
    world.create_pod("equal", asking(memory="900Mi"))
    world.create_pod("urgent", asking(memory="900Mi"), priority=9)
    world.now = 30.0
    plan(world, 2)
    assert not world.evicted
    world.now = 61.0
    plan(world)
    assert world.evicted == ["old"]
    world.delete_pod("old")
    plan(world)
    assert world.results("urgent")
    assert not world.results("equal")


def test_gang_ends_whole_for_more_important_gang() -> None:
    world = ClaimWorld(["n1", "n2"], devices=1)
    for name in ("a", "b"):
        world.create_pod(name, asking(memory="900Mi"), gang=2)
    plan(world)
    for name in ("a", "b"):
        world.kube_scheduler(name)
    world.create_pod("urgent", asking(memory="900Mi"), priority=9)
    plan(world)
    assert sorted(world.evicted) == ["a", "b"]


def linked(node: GpuNode, pairs: Sequence[tuple[str, str]]) -> GpuNode:
    return replace(node, links=tuple(Link(a, b, LinkKind.NVLINK, 18) for a, b in pairs))
