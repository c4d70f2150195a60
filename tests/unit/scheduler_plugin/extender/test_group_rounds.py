# SPDX-License-Identifier: Apache-2.0
"""A group of Kubernetes that kube-scheduler takes apart keeps no room, and one that it binds keeps its own."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import plan_ahead
from scheduler_plugin.extender.group_rounds import BINDING_SECONDS
from scheduler_plugin.extender.wire import decode_args
from scheduler_plugin.settings import Answer
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_node

GPUS = 8


def whole(name: str, group: str = "", **fields: Any) -> dict[str, Any]:
    """A pod that asks for a whole GPU, in a group or not."""
    pod = pod_object(name, vgpu="1", vgpu_memory="1000", **fields)
    if group:
        pod["spec"]["schedulingGroup"] = {"podGroupName": group}
    return pod


class Call:
    """kube-scheduler's calls, on one node with eight GPUs."""

    def __init__(self) -> None:
        self.now = 0.0
        state = ClusterState()
        state.set_gpu_node(make_node("n1", GPUS))
        self.context: ExtenderContext = make_context(state, monotonic=lambda: self.now)

    def filter(self, pod: dict[str, Any]) -> bool:
        """Show a pod to the scheduler and filter it; return whether a node fits."""
        self.context.state.set_pod(decode_pod(msgspec.Raw(json.dumps(pod).encode())))
        self.context.state.expire(self.now, self.now)
        body = json.dumps({"Pod": pod, "NodeNames": ["n1"]}).encode()
        return bool(json.loads(filter_body(self.context, body, 0.0, Answer.ONE))["NodeNames"])

    def round(self, count: int, group: str = "g") -> list[bool]:
        """Filter the members of a group in turn."""
        return [self.filter(whole(f"{group}-{number}", group)) for number in range(count)]

    def bind(self, pod: dict[str, Any]) -> None:
        """Begin a binding that the API has not answered."""

        class Silent:
            def __init__(self) -> None:
                self.called = asyncio.Event()

            async def bind(self, *_: Any) -> None:
                self.called.set()
                await asyncio.Event().wait()

        async def begin() -> None:
            api = Silent()
            binder = Binder(self.context, api, lambda: True)  # type: ignore[arg-type]  # only bind is called
            args = {"PodName": pod["metadata"]["name"], "PodNamespace": "team", "PodUID": pod["metadata"]["uid"], "Node": "n1"}
            call = asyncio.create_task(binder.bind(json.dumps(args).encode()))
            await api.called.wait()
            call.cancel()
            await binder.stop()

        asyncio.run(begin())


def test_members_of_one_round_see_each_others_room():
    assert Call().round(GPUS + 1) == [True] * GPUS + [False]


def test_pod_that_fits_beside_failed_group_is_not_refused():
    call = Call()
    for _ in range(3):
        assert not all(call.round(GPUS + 1))
        assert call.filter(whole("single"))
        call.context.state.drop_pod("uid-single")


def test_fitting_group_after_failed_one_gets_all_nodes():
    call = Call()
    assert not all(call.round(GPUS + 1, "large"))
    assert all(call.round(GPUS, "fitting"))


def test_failed_group_fits_when_it_is_filtered_again_with_one_member_less():
    call = Call()
    assert not all(call.round(GPUS + 1))
    assert call.round(GPUS) == [True] * GPUS


def test_gang_of_ours_is_planned_into_room_of_failed_group():
    call = Call()
    call.round(GPUS + 1)
    gang = {"aliquot.dev/gang": "ours", "aliquot.dev/gang-min": str(GPUS)}
    members = [whole(f"ours-{number}", annotations=gang) for number in range(GPUS)]
    for member in members:
        call.context.state.set_pod(decode_pod(msgspec.Raw(json.dumps(member).encode())))
    asyncio.run(plan_ahead(call.context, decode_args(json.dumps({"Pod": members[0], "NodeNames": ["n1"]}).encode())))
    assert all(member["metadata"]["uid"] in call.context.state.reservations for member in members)


def test_room_of_whole_group_is_kept_until_its_bindings_come():
    call = Call()
    assert all(call.round(GPUS))
    assert not call.filter(whole("single"))
    call.now += BINDING_SECONDS
    assert call.filter(whole("single"))


def test_group_that_another_filter_refuses_keeps_room_once_only():
    """CPU is missing for the last member: kube-scheduler does not call filter for it."""
    call = Call()
    assert all(call.round(GPUS))
    assert not call.filter(whole("single"))
    assert all(call.round(GPUS))
    assert call.filter(whole("single"))


def test_binding_of_one_member_keeps_room_of_all():
    call = Call()
    assert call.round(GPUS + 1)[-1] is False, "kube-scheduler starts the group with the others if its minimum allows that"
    call.bind(whole("g-0", "g"))
    assert not call.filter(whole("single"))


def test_group_with_volumes_keeps_its_room_while_they_are_created():
    call, volumes = Call(), [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    for number in range(GPUS):
        pod = whole(f"g-{number}", "g")
        pod["spec"]["volumes"] = volumes
        assert call.filter(pod)
    assert not call.filter(whole("single"))
    call.now += BINDING_SECONDS
    assert not call.filter(whole("single"))


@pytest.mark.parametrize("group", [None, {}, {"podGroupName": None}, {"podGroupName": ""}])
def test_group_without_name_is_no_group(group):
    pod = pod_object("p", vgpu="1")
    pod["spec"]["schedulingGroup"] = group
    assert decode_pod(msgspec.Raw(json.dumps(pod).encode())).scheduling_group == ""


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, GPUS + 2)), min_size=1, max_size=8))
def test_failed_groups_never_hold_room_after_another_call(calls):
    """Whatever came before: once every group failed, a pod alone sees all GPUs but those of single pods that fit."""
    call, placed = Call(), 0
    for number, (group, count) in enumerate(calls):
        if group:
            call.round(GPUS + 1 + count, group)  # never fits
        elif call.filter(whole(f"single-{number}")):
            placed += 1
    call.filter(whole("last"))
    held = {uid for uid in call.context.state.reservations if uid.startswith(("uid-a", "uid-b"))}
    assert held == set()
    assert ("uid-last" in call.context.state.reservations) == (placed < GPUS)
