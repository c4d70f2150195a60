# SPDX-License-Identifier: Apache-2.0
"""The admission check against a Kueue that writes step by step: each race of a check by its name, then holds and leaders."""

from collections import Counter
from typing import Any

import pytest

from aliquot import contract
from scheduler_plugin.services.admission_check import HOLD_SECONDS, MESSAGE_SECONDS, WAIT_SECONDS
from tests.fakes.kueue import CHECK, GPU_MIB, World, pod_set


def states(world: World, name: str) -> list[str]:
    """All answers on a workload, in their order."""
    return [answer.state for answer in world.answers if answer.name == name]


def reserve(world: World, name: str, *pod_sets: dict[str, Any], **spec: Any) -> None:
    """Submit a workload, and let Kueue reserve its quota and add the check."""
    world.submit(name, *pod_sets, **spec)
    while world.entry(world.workloads[name]) is None:
        assert world.kueue(name)


async def look(world: World, seconds: float = 1.0) -> None:
    """Let the watch show everything, and the check look once."""
    world.list_workloads()
    world.deliver()
    await world.step(seconds)


async def wait(world: World, seconds: float) -> None:
    for _ in range(int(seconds)):
        await look(world)


def fill(world: World) -> list[str]:
    """Bind a pod to each GPU that leaves 300 MiB; return their UIDs."""
    pods = [world.intrude(700) for _ in range(sum(world.nodes.values()))]
    return [pod.uid for pod in pods]


async def test_ready_holds_a_seat_for_each_pod_and_pods_take_them() -> None:
    world = World()
    reserve(world, "a", pod_set(3, 600))
    await look(world)
    assert world.state_of("a") == "Ready"
    assert world.context.workload_seats.seats == 3
    await world.settle()
    assert not world.stuck()
    assert world.context.workload_seats.seats == 0
    assert not world.state.reservations


async def test_pod_from_outside_gets_no_held_seat() -> None:
    world = World(nodes={"n1": 1})
    reserve(world, "a", pod_set(1, 600))
    await look(world)
    world.intrude(600)
    world.deliver()
    await world.schedule()
    assert not any(pod.node_name for pod in world.pods.values())
    await world.settle()
    assert not world.stuck()


async def test_waiting_workload_has_reason_and_is_ready_soon_after_room() -> None:
    world = World()
    others = fill(world)
    await world.settle()
    reserve(world, "a", pod_set(2, 400))
    await look(world)
    assert world.state_of("a") == "Pending"
    [answer] = world.answers
    assert "0 of 2 pods of pod set main fit now" in answer.message
    assert "What would help" in answer.message
    world.end_pod(others[0])
    await look(world, 0.5)
    await look(world, 0.5)
    assert world.state_of("a") == "Ready", "two shares of 400 MiB fit on one GPU"


async def test_race_1_stuck_for_ever_eviction_gets_no_second_retry() -> None:
    world = World()
    fill(world)
    await world.settle()
    reserve(world, "a", pod_set(1, 400))
    world.evict("a")  # Pending, quota reserved, Evicted
    before = len(world.answers)
    await wait(world, WAIT_SECONDS + 5)
    assert len(world.answers) == before
    await world.settle()
    assert world.state_of("a") == "Pending"


async def test_race_1_stuck_for_ever_retry_without_quota_is_reset() -> None:
    world = World(quota_mib=0)
    item = world.submit("a")
    item["status"]["admissionChecks"] = [{"name": CHECK, "state": "Retry", "message": ""}]
    world._set(item, Evicted="True", QuotaReserved="False")
    await look(world)
    assert world.state_of("a") == "Pending"


async def test_race_2_stale_ready_answer_to_evicted_workload_is_refused() -> None:
    world = World()
    reserve(world, "a")
    world.list_workloads()
    world.evict("a")  # after the check has seen the reservation
    await world.step()
    assert world.answers == []
    assert world.state_of("a") == "Pending"
    await look(world)
    assert world.context.workload_seats.seats == 0


async def test_race_2_stale_ready_believed_is_reset_before_next_reservation() -> None:
    world = World(quota_mib=0)
    item = world.submit("a")
    item["status"]["admissionChecks"] = [{"name": CHECK, "state": "Ready", "message": "Seats are held: main n1/0"}]
    world._touch(item)
    await look(world)
    assert world.state_of("a") == "Pending"
    world.quota_mib = 10_000
    await world.settle()
    assert world.is_admitted("a")
    assert world.ready_without_seats == []


async def test_race_3_quota_held_while_waiting_goes_to_next_workload() -> None:
    world = World(quota_mib=1000)
    fill(world)
    await world.settle()
    reserve(world, "large", pod_set(1, 900))
    await wait(world, WAIT_SECONDS + 5)
    assert "Retry" not in states(world, "large"), "no other workload wants the quota"
    world.submit("small", pod_set(1, 200))
    await look(world)
    assert states(world, "large")[-1] == "Retry"
    world.kueue("large")
    world.kueue("large")
    while world.kueue("small"):
        pass
    await world.settle()
    assert world.is_admitted("small")
    assert not world.stuck()


async def test_race_4_admitted_workload_never_gets_retry_when_room_is_lost() -> None:
    world = World(nodes={"n1": 1})
    reserve(world, "a", pod_set(2, 400))
    await look(world)
    world.kueue("a")
    assert world.is_admitted("a")
    world.deliver()
    await world.attempt(next(iter(world.pods.values())))  # one of two runs
    world.state.drop_gpu_node("n1")
    await wait(world, 2 * HOLD_SECONDS)
    assert states(world, "a") == ["Ready"]


async def test_race_5_message_left_after_reset_is_no_answer() -> None:
    world = World()
    reserve(world, "a")
    entry = world.entry(world.workloads["a"])
    assert entry is not None
    entry.update(message="Reset to Pending after eviction. Previously: Retry", requeueAfterSeconds=5, retryCount=7)
    world._touch(world.workloads["a"])
    await look(world)
    assert world.state_of("a") == "Ready"


async def test_race_6_rejected_only_for_pods_that_no_room_helps() -> None:
    world = World()
    reserve(world, "never", pod_set(1, 1001, vgpus=2))
    reserve(world, "large", pod_set(9, GPU_MIB))
    await wait(world, 3 * WAIT_SECONDS)
    assert states(world, "never") == ["Rejected"]
    assert set(states(world, "large")) == {"Pending"}


@pytest.mark.parametrize("conflicts", [1, 5])
async def test_race_7_conflicts_are_answered_again_with_the_same_seats(conflicts: int) -> None:
    world = World()
    reserve(world, "a", pod_set(2, 400))
    world.refuses = conflicts
    for _ in range(conflicts + 1):
        await look(world)
        assert world.context.workload_seats.seats == 2
    assert states(world, "a") == ["Ready"]


@pytest.mark.parametrize("trouble", ["one conflict", "five conflicts", "no reply", "lost reply", "refusal", "another writer"])
async def test_race_7_reason_is_shown_after_any_trouble_with_its_write(trouble: str) -> None:
    world = World()
    fill(world)
    await world.settle()
    reserve(world, "a", pod_set(1, 400))
    world.refuses = {"one conflict": 1, "five conflicts": 5}.get(trouble, 0)
    world.broken, world.loses_replies, world.forbids = trouble == "no reply", trouble == "lost reply", trouble == "refusal"
    await wait(world, 6)
    world.broken = world.forbids = False
    if trouble == "another writer":
        entry = world.entry(world.workloads["a"])
        assert entry is not None
        entry.update(message="")
        world._touch(world.workloads["a"])
    await wait(world, MESSAGE_SECONDS)
    entry = world.entry(world.workloads["a"])
    assert entry is not None
    assert entry["message"].startswith("0 of 1 pods of pod set main fit now")
    assert len(world.answers) == (2 if trouble == "another writer" else 1), "the reason is written once"


async def test_race_7_lost_reply_is_no_second_answer() -> None:
    world = World()
    reserve(world, "a", pod_set(2, 400))
    world.loses_replies = True
    await look(world)
    await world.settle()
    assert states(world, "a") == ["Ready"]
    assert not world.stuck()


@pytest.mark.parametrize("end", ["evict", "delete", "finish", "deactivate"])
async def test_race_8_hold_ends_with_reservation_between_ready_and_admitted(end: str) -> None:
    world = World()
    reserve(world, "a", pod_set(2, 400))
    await look(world)
    assert world.context.workload_seats.seats == 2
    if end == "deactivate":
        world.workloads["a"]["spec"]["active"] = False
        world._touch(world.workloads["a"])
    else:
        getattr(world, end)("a")
    await look(world)
    assert world.context.workload_seats.seats == 0
    assert not world.state.reservations


async def test_race_9_partly_admitted_workload_gets_seats_for_assigned_pods_only() -> None:
    world = World()
    reserve(world, "a", pod_set(4, 900))
    item = world.workloads["a"]
    item["status"]["admission"]["podSetAssignments"][0]["count"] = 3
    item["status"]["reclaimablePods"] = [{"name": "main", "count": 1}]
    world._touch(item)
    await look(world)
    assert world.context.workload_seats.seats == 2


async def test_race_10_waiting_for_an_hour_writes_few_answers() -> None:
    world = World(quota_mib=1000)
    fill(world)
    await world.settle()
    reserve(world, "large", pod_set(1, 900))
    world.submit("larger", pod_set(1, 1000))
    for _ in range(600):
        for name in world.workloads:
            world.kueue(name)
        await look(world, 6.0)
    counted = Counter(answer.state for answer in world.answers)
    assert counted["Retry"] <= 3600 / WAIT_SECONDS
    assert counted["Pending"] <= 2 * 3600 / MESSAGE_SECONDS
    assert counted["Ready"] == 0


@pytest.mark.parametrize("checks_first", [False, True])
async def test_reservation_and_check_are_answered_in_either_order(checks_first: bool) -> None:
    world = World()
    world.submit("a")
    for _ in range(2):
        assert world.kueue("a", adds_checks_first=checks_first)
        await look(world)
    await world.settle()
    assert world.is_admitted("a")
    assert world.ready_without_seats == []


async def test_other_checks_come_first_and_no_seat_is_held_for_them() -> None:
    world = World()
    reserve(world, "a")
    item = world.workloads["a"]
    item["status"]["admissionChecks"].append({"name": "other", "state": "Pending", "message": ""})
    world._touch(item)
    await wait(world, 5)
    assert states(world, "a") == ["Pending"]
    assert world.context.workload_seats.seats == 0
    item["status"]["admissionChecks"][-1]["state"] = "Ready"
    world._touch(item)
    await look(world)
    assert world.state_of("a") == "Ready"


async def test_ready_that_is_not_admitted_ends_with_its_seats() -> None:
    world = World()
    reserve(world, "a")
    await wait(world, HOLD_SECONDS + 5)
    assert states(world, "a") == ["Ready", "Pending"]
    assert world.context.workload_seats.seats == 0


async def test_workload_whose_pods_never_come_gives_quota_back() -> None:
    world = World()
    reserve(world, "a")
    await look(world)
    world.kueue("a")
    world.pods.clear()
    world.unseen.clear()
    await wait(world, HOLD_SECONDS + 5)
    assert states(world, "a") == ["Ready", "Retry"]
    assert world.context.workload_seats.seats == 0


async def test_seat_of_pod_that_is_deleted_waits_for_its_replacement() -> None:
    world = World(nodes={"n1": 1})
    reserve(world, "a", pod_set(1, 600))
    await look(world)
    world.kueue("a")
    world.deliver()
    [first] = world.pods
    assert world.context.workload_seats.has_seat(first)
    world.end_pod(first)
    world.deliver()
    world.intrude(600)
    world.run("a")
    await world.settle()
    assert not world.stuck()


@pytest.mark.parametrize("at", ["ready", "admitted", "one pod runs"])
async def test_new_leader_holds_the_same_seats(at: str) -> None:
    world = World(nodes={"n1": 2})
    reserve(world, "a", pod_set(2, 600))
    await look(world)
    held = sorted(_places(world))
    if at != "ready":
        world.kueue("a")
    if at == "one pod runs":
        world.deliver()
        await world.attempt(next(iter(world.pods.values())))
    world.start()
    await world.step()
    assert world.controller.is_prepared
    running = sum(bool(pod.node_name) for pod in world.pods.values())
    assert world.context.workload_seats.seats == 2 - running
    assert set(_places(world)) <= set(held)
    world.intrude(600)
    await world.settle()
    assert not world.stuck()
    assert states(world, "a") == ["Ready"]


def _places(world: World) -> list[tuple[str, str]]:
    """Node and GPU of each seat."""
    seats = [seat for _, hold in world.context.workload_seats.all() for seat in hold.seats]
    return [(seat.node, uuid) for seat in seats for uuid in world.state.footprint_of(seat.holder)]


async def test_replica_that_does_not_lead_holds_and_answers_nothing() -> None:
    world = World()
    reserve(world, "a")
    await look(world)
    world.leads = False
    reserve(world, "b")
    await look(world)
    assert world.context.workload_seats.seats == 0
    assert not world.state.reservations
    assert states(world, "b") == []


async def test_gang_of_a_workload_starts_on_its_seats_in_a_full_cluster() -> None:
    world = World(nodes={"n1": 2, "n2": 1})
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "3"}
    one = pod_set(3, 900)
    one["template"]["metadata"] = {"annotations": gang}
    reserve(world, "a", one)
    await look(world)
    assert world.context.workload_seats.seats == 3
    world.kueue("a")
    world.intrude(900)
    await world.settle()
    assert not world.stuck()


async def test_flavor_of_missing_label_names_the_cause() -> None:
    world = World()
    reserve(world, "a", pod_set(1, 400, nodeSelector={"pool": "gold"}))
    await look(world)
    assert "none of the 2 nodes with GPUs has the labels" in world.answers[-1].message
    world.labels["n2"] = {"pool": "gold"}
    world.list_nodes()
    await look(world)
    assert world.state_of("a") == "Ready"
    assert {node for node, _ in _places(world)} == {"n2"}


@pytest.mark.parametrize(("mib", "cpu", "takes"), [(600, "2", True), (500, "1", True), (900, "1", False)])
async def test_pod_that_a_webhook_changed_takes_a_seat_with_room_for_it(mib: int, cpu: str, takes: bool) -> None:
    world = World(nodes={"n1": 1})
    reserve(world, "a", pod_set(1, 600))
    reserve(world, "b", pod_set(1, 300))
    await look(world)
    assert world.context.workload_seats.seats == 2
    changed = pod_set(1, mib)
    changed["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu
    world.workloads["a"]["spec"]["podSets"] = [changed]
    world.kueue("a")
    world.deliver()
    [pod] = world.pods
    assert world.context.workload_seats.has_seat(pod) is takes
    assert world.context.workload_seats.seats == 2


async def grown(world: World, *sizes: int) -> list[str]:
    """Run an elastic job of two whole GPUs, and let it grow to each size; the last one is not admitted yet. Return the workloads' names."""
    reserve(world, "w0", pod_set(2, GPU_MIB))
    await look(world)
    await world.settle()
    names = ["w0"]
    for size in sizes:
        await world.settle()
        names.append(f"w{len(names)}")
        world.grow(names[-2], names[-1], size)
        while world.entry(world.workloads[names[-1]]) is None:
            assert world.kueue(names[-1])
        await look(world)
        await look(world)
    return names


@pytest.mark.parametrize("sizes", [(4,), (3, 4)])
@pytest.mark.parametrize("leaders", [1, 2])
async def test_elastic_job_grows_onto_seats_for_its_new_pods_only(sizes: tuple[int, ...], leaders: int) -> None:
    world = World(nodes={"n1": 4})
    *_, last = await grown(world, *sizes)
    assert world.state_of(last) == "Ready"
    new = sizes[-1] - (2, *sizes)[-2]
    assert world.context.workload_seats.seats == new, "there is no room for all pods once more"
    if leaders > 1:
        world.start()
    world.intrude(GPU_MIB)
    await world.settle()
    assert not world.stuck()
    assert sum(bool(pod.node_name) for pod in world.pods.values() if pod.uid in world.pod_sets_of) == sizes[-1]
    assert world.context.workload_seats.seats == 0


@pytest.mark.parametrize("leaders", [1, 2])
async def test_larger_size_that_waits_for_quota_takes_no_seats(leaders: int) -> None:
    world = World(nodes={"n1": 4}, quota_mib=2 * GPU_MIB)
    reserve(world, "w0", pod_set(2, GPU_MIB))
    await look(world)
    assert world.kueue("w0")
    world.grow("w0", "w1", 3)
    if leaders > 1:
        world.start()
    await look(world)
    await look(world)
    assert not world.kueue("w1"), "it has no quota"
    assert (world.is_admitted("w0"), world.context.workload_seats.seats) == (True, 2)


async def test_elastic_job_without_room_to_grow_waits_and_keeps_its_pods() -> None:
    world = World(nodes={"n1": 4})
    _, larger = await grown(world, 5)
    assert world.state_of(larger) == "Pending"
    assert "2 of 3 pods" in world.answers[-1].message
    assert sum(bool(pod.node_name) for pod in world.pods.values()) == 2


async def test_evicted_elastic_job_counts_no_pod_of_its_earlier_reservation() -> None:
    world = World(nodes={"n1": 4})
    _, larger = await grown(world, 4)
    await world.settle()
    world.evict(larger)
    while world.is_true(world.workloads[larger], "QuotaReserved"):
        assert world.kueue(larger)
    while world.is_true(world.workloads[larger], "Evicted"):
        assert world.kueue(larger)
    world.list_workloads()  # the watch of pods is late: it shows four that have ended
    await world.step()
    assert world.state_of(larger) == "Pending"
    await look(world)
    await look(world)
    assert (world.state_of(larger), world.context.workload_seats.seats) == ("Ready", 4)


@pytest.mark.parametrize("leaders", [1, 2])
async def test_pods_of_old_size_keep_their_seats_while_job_grows(leaders: int) -> None:
    world = World(nodes={"n1": 4})
    reserve(world, "w0", pod_set(2, GPU_MIB))
    await look(world)
    assert world.kueue("w0")
    world.grow("w0", "w1", 3)
    while world.entry(world.workloads["w1"]) is None:
        assert world.kueue("w1")
    assert world.is_true(world.workloads["w0"], "Finished")
    if leaders > 1:
        world.start()
    await look(world)
    assert (world.state_of("w1"), world.context.workload_seats.seats) == ("Pending", 2)
    for _ in range(4):
        world.intrude(GPU_MIB)
    world.deliver()
    await world.schedule()
    assert not world.stuck()
    assert sum(bool(pod.node_name) for pod in world.pods.values()) == 4
