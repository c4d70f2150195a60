# SPDX-License-Identifier: Apache-2.0
"""What a binding holds while it has no outcome, and that nothing makes it hold that for ever."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from aliquot.contract import codec
from aliquot.kube.errors import KubeApiError, KubeConflictError
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender import bind as bind_module
from scheduler_plugin.extender.bind import ARRIVAL_SECONDS, Binder
from tests.unit.scheduler_plugin.builders import make_context, make_device, make_node, make_pod


class Scene:
    """One node, one pod, and an API that does what the test sets."""

    def __init__(self, pod: PodFacts, devices: int = 1) -> None:
        self.now = 0.0
        self.state = ClusterState()
        uuids = [f"GPU-1b2c3d4e-0000-4000-8000-00000000000{minor}" for minor in range(devices)]
        self.state.set_gpu_node(make_node("n1", [replace(make_device("n1", minor), uuid=uuid) for minor, uuid in enumerate(uuids)]))
        self.state.set_pod(pod)
        self.pod = pod
        self.context = make_context(self.state, monotonic=lambda: self.now)
        self.leads = True
        self.knows = True
        self.writes: list[BaseException | None] = []
        """What comes of each write; beyond them no answer comes."""
        self.written = 0
        self.annotations: Mapping[str, str] = {}
        """What the latest of them would set."""
        self.binder = Binder(self.context, cast(Any, self), self.may_bind, self.look_who_leads)

    def may_bind(self) -> bool:
        if not self.knows:
            raise ZeroDivisionError
        return self.leads

    async def look_who_leads(self) -> None:
        self.leads = self.leads and self.written < 1

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        self.written += 1
        self.annotations = annotations
        if self.written <= len(self.writes) and (trouble := self.writes[self.written - 1]) is not None:
            raise trouble

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        self.now += ARRIVAL_SECONDS
        return self.pod

    async def bound(self) -> str:
        args = {"PodName": self.pod.name, "PodNamespace": self.pod.namespace, "PodUID": self.pod.uid, "Node": "n1"}
        return json.loads(await self.binder.bind(json.dumps(args).encode()))["Error"]

    async def ended(self) -> None:
        """Wait until no binding is open."""
        async with asyncio.timeout(60):
            await asyncio.gather(*(flight.outcome for flight in self.binder._flights.values()))
        await asyncio.sleep(0)
        assert not self.binder.open_bindings


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(bind_module, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(bind_module, "REPLY_SECONDS", 0.2)


async def test_too_long_assignment_is_refused_and_holds_no_device(monkeypatch):
    monkeypatch.setattr(codec, "MAX_ASSIGNMENT_CHARS", 100)
    scene = Scene(make_pod("many", vgpu="8", vgpu_memory="8000"), devices=8)
    assert "assignment of at most" in await scene.bound()
    assert not scene.state.reservations


async def test_an_error_before_anything_is_sent_gives_back_what_was_held():
    scene = Scene(make_pod("p", vgpu="1"))
    scene.knows = False
    with pytest.raises(ZeroDivisionError):
        await scene.bound()
    assert (scene.written, dict(scene.state.reservations), scene.binder.open_bindings) == (0, {}, 0)


async def test_unexpected_error_leaves_outcome_open_until_lookup():
    scene = Scene(make_pod("p", vgpu="1"))
    scene.writes = [ZeroDivisionError()]
    assert await scene.bound()
    await scene.ended()
    assert not scene.state.reservations


async def test_write_is_not_repeated_after_lost_lead_and_room_stays_reserved():
    scene = Scene(make_pod("p", vgpu="1"))
    scene.writes = [KubeApiError("no answer")]
    held: list[bool] = []
    look = scene.get_pod

    async def get_pod(namespace: str, name: str) -> PodFacts | None:
        held.append("p" in scene.state.reservations)
        return await look(namespace, name)

    scene.get_pod = get_pod
    assert "did not take the binding" in await scene.bound()
    await scene.ended()
    assert (scene.written, held) == (1, [True, True])


@pytest.mark.parametrize("meanwhile", ["nothing", "it ended"])
@pytest.mark.parametrize("bound_to", ["n1", "n2"])
async def test_pod_that_ended_while_bind_was_confirmed_holds_no_device(bound_to, meanwhile):
    scene = Scene(make_pod("p", vgpu="1"))
    scene.writes = [KubeConflictError("an earlier write succeeded")]

    async def get_pod(namespace: str, name: str) -> PodFacts | None:
        assert scene.pod.gpu is not None
        bound = replace(scene.pod, node_name=bound_to, gpu=replace(scene.pod.gpu, node_name=bound_to, annotations=scene.annotations))
        if meanwhile == "it ended":
            scene.state.drop_pod("p")
        return bound

    scene.get_pod = get_pod
    assert (await scene.bound() == "") is (bound_to == "n1")
    is_there = meanwhile == "nothing"
    assert bool(scene.state.footprint_of("p")) is is_there
    assert ("p" in scene.state.pods) is is_there


async def test_bound_pod_with_same_name_is_not_mistaken_for_expected_one():
    scene = Scene(make_pod("p", cpu_milli=1000))
    scene.writes = [KubeConflictError("the UID in the precondition is another pod's")]
    scene.get_pod = lambda namespace, name: asyncio.sleep(0, replace(scene.pod, uid="q", node_name="n1"))
    assert await scene.bound() == "the pod was deleted"
    assert not scene.state.reservations


async def test_binder_stops_though_kube_scheduler_calls_in_that_moment(monkeypatch):
    monkeypatch.setattr(bind_module, "FIRST_RETRY_SECONDS", 600.0)
    scene = Scene(make_pod("p", vgpu="1"))
    scene.writes = [KubeApiError("no answer")]
    first = asyncio.create_task(scene.bound())
    for _ in range(10):
        await asyncio.sleep(0)
    assert scene.written == 1, "it waits for its next try"
    again = asyncio.create_task(scene.bound())
    async with asyncio.timeout(60):
        await asyncio.gather(first, again, scene.binder.stop(), return_exceptions=True)
    assert not scene.binder.open_bindings
