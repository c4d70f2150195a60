# SPDX-License-Identifier: Apache-2.0
"""Up to which moment a stream has reported everything, even if its connection breaks; a promised GPU depends on it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from scheduler_plugin.adapters import kube_watch
from scheduler_plugin.adapters.kube_watch import Stream
from scheduler_plugin.core.cluster.budgets import Budgets
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.cluster.state import ClusterState, Reservation, Stage
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender.bind import CONFIRM_SECONDS
from scheduler_plugin.services.cluster_watch import ClusterWatch, Source
from scheduler_plugin.wiring.cluster import decode_pod
from tests.unit.scheduler_plugin.api import pod_object
from tests.unit.scheduler_plugin.builders import make_node, make_pod

LIST_TAKES = 5.0
CHANGE, BOOKMARK, NOTHING = "MODIFIED", "BOOKMARK", ""


class Scene:
    """The stream of pods with a scripted API server, which moves the clock too; one GPU, and a pod that is bound to it unseen."""

    def __init__(self, *watches: list[tuple[float, str]]) -> None:
        """Args: watches: for each, what comes and how many seconds after what came before."""
        self.now = 0.0
        self.watches = list(watches)
        self.played = asyncio.Event()
        self.reports: list[float] = []
        """After each thing that came."""
        self.expired: list[int] = []
        self.ages: list[float] = []
        self.state = ClusterState()
        self.state.set_gpu_node(make_node("n1", 1))
        self.watch = ClusterWatch(self.state, Budgets(), cast(Any, self))

    def monotonic(self) -> float:
        return self.now

    async def request(self, method: str, path: str, *, seconds: float) -> bytes:
        self.now += LIST_TAKES
        return json.dumps({"metadata": {"resourceVersion": "1"}, "items": []}).encode()

    @asynccontextmanager
    async def stream(self, path: str, silence_seconds: float) -> AsyncIterator[AsyncIterator[bytes]]:
        yield self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        if self.watches:
            for seconds, kind in self.watches.pop(0):
                self._look()
                self.now += seconds
                pod = pod_object("other", uid="other") | {"metadata": {"name": "other", "uid": "other", "resourceVersion": "2"}}
                yield json.dumps({"type": kind, "object": pod}).encode() + b"\n" if kind else b""
            self._look()
            return
        self.played.set()
        await asyncio.Event().wait()

    def _look(self) -> None:
        self.reports.append(self.watch.caught_up_at(Source.PODS))
        self.ages.append(self.watch.lag_seconds()["pods"])
        self.expired.append(self.state.expire(self.now, self.watch.caught_up_at(Source.PODS)))

    async def play(self) -> "Scene":
        task = asyncio.create_task(Stream("pods", "/pods", decode_pod, cast(Any, self), self.watch.pods).run())
        await self.played.wait()
        task.cancel()
        return self

    def bound_at(self, moment: float) -> "Scene":
        self.state.reserve(Reservation("mine", "n1", {"GPU-n1-0": Use(700, 0, 1, 1)}, HostDemand(0, 0), Stage.BINDING))
        self.state.confirm("mine", moment + CONFIRM_SECONDS)
        return self


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(kube_watch, "RULES", msgspec.structs.replace(kube_watch.RULES, first_backoff_seconds=0.0))


async def test_list_shows_state_at_its_start():
    scene = await Scene([]).play()
    assert scene.reports == [0.0]
    assert scene.now == LIST_TAKES


async def test_steady_stream_is_current_up_to_its_last_event():
    scene = await Scene([(1, BOOKMARK), (20, CHANGE), (25, CHANGE)]).play()
    assert scene.reports == [0, 6, 26, 51]


@pytest.mark.parametrize(
    ("backlog", "reports"),
    [
        pytest.param([(1, NOTHING), (1, CHANGE)], [6, 6, 6], id="being read"),
        pytest.param([(1, CHANGE), (1, BOOKMARK), (1, CHANGE)], [6, 6, 98, 99], id="behind a bookmark"),
        pytest.param([(15, CHANGE), (14, CHANGE), (1, CHANGE)], [6, 6, 6, 126], id="long since read"),
        pytest.param([(80, CHANGE), (1, CHANGE)], [6, 6, 6], id="itself held up"),
    ],
)
async def test_a_watch_that_is_opened_again_first_catches_up(backlog, reports):
    scene = await Scene([(1, BOOKMARK), (90, NOTHING)], backlog).play()
    assert scene.reports == [0, 6, 6, *reports]


async def test_gpu_stays_reserved_while_watch_is_down_and_backlog_is_read():
    scene = await Scene([(1, BOOKMARK), (90, NOTHING)], [(1, CHANGE), (1, CHANGE), (1, BOOKMARK)]).bound_at(10).play()
    assert scene.expired == [0, 0, 0, 0, 0, 0, 1]


async def test_stream_age_counts_from_last_reply_even_before_it_catches_up():
    scene = await Scene([(1, BOOKMARK), (90, NOTHING)], [(1, CHANGE)]).play()
    assert scene.ages == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("reports", ["listed", "changed"])
async def test_bound_pod_stops_waiting_however_it_becomes_known(reports):
    watch = ClusterWatch(ClusterState(), Budgets(), cast(Any, Scene()))
    settled: list[str] = []
    watch.on_pod_gone = settled.append
    pods = [make_pod("waits", vgpu="1"), make_pod("bound", node="n1", vgpu="1"), make_pod("over", phase="Failed", vgpu="1")]
    watch.pods.listing()
    if reports == "listed":
        watch.pods.listed(pods)
    else:
        for pod in pods:
            watch.pods.changed(pod)
    assert settled == ["bound", "over"]


ENDS = {
    "succeeded": (False, lambda watch, pod: watch.pods.changed(replace(pod, active=False)), ["p"]),
    "left the watched phases": (False, lambda watch, pod: watch.pods.deleted(replace(pod, active=False)), ["p"]),
    "was deleted": (True, lambda watch, pod: watch.pods.deleted(pod), []),
    "was deleted without grace": (False, lambda watch, pod: watch.pods.deleted(replace(pod, deletion_requested=True)), []),
    "missing in a list": (False, lambda watch, pod: watch.pods.listed([]), []),
}


@pytest.mark.parametrize("name", ENDS)
async def test_only_pods_that_end_by_themselves_are_reported_as_ended(name):
    deletion, end, reported = ENDS[name]
    watch = ClusterWatch(ClusterState(), Budgets(), cast(Any, Scene()))
    ended: list[str] = []
    watch.on_ended = lambda pod: ended.append(pod.uid)
    pod = replace(make_pod("p", node="n1", vgpu="1"), deletion_requested=deletion)
    watch.pods.listing()
    watch.pods.listed([pod])
    end(watch, pod)
    assert ended == reported


async def test_pod_that_never_ran_is_not_reported_as_ended():
    watch = ClusterWatch(ClusterState(), Budgets(), cast(Any, Scene()))
    ended: list[str] = []
    watch.on_ended = lambda pod: ended.append(pod.uid)
    watch.pods.changed(make_pod("p", vgpu="1"))
    watch.pods.changed(make_pod("p", phase="Failed", vgpu="1"))
    assert not ended
