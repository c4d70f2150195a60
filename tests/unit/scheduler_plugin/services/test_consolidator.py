# SPDX-License-Identifier: Apache-2.0
"""What is done with a plan: reported, carried out, or dropped because the cluster changed. tests/integration has whole runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from aliquot import contract
from aliquot.contract.model import Policy
from aliquot.kube.errors import KubeApiError, KubeRefusedError
from scheduler_plugin.core.cluster.journal import Rules, Snapshot, snapshot_of
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.services.consolidator import SCAN_SECONDS, WAIT_SECONDS, Consolidator, Scope
from scheduler_plugin.services.move_api import MoveApi
from scheduler_plugin.services.telemetry import Telemetry
from tests.unit.scheduler_plugin.builders import make_context, make_node, make_pod, make_share

MOVABLE = {contract.ANNOTATION_MOVABLE: "true", contract.ANNOTATION_MIN_RUNTIME: "0s"}


class Scene:
    """Two nodes with two GPUs and a pod on each, and a pod that waits for two GPUs; it is the API too."""

    def __init__(self, *, acts: bool) -> None:
        self.now = 1000.0
        self.leads = self.answers = True
        self.attempts = 0
        """To write an annotation."""
        self.error = KubeApiError("no answer")
        """If the API does not answer."""
        self.dry_runs: list[str] = []
        self.evicted: list[str] = []
        self.written: list[str] = []
        self.reported: list[str] = []
        self.state = ClusterState()
        for node in ("n1", "n2"):
            self.state.set_gpu_node(make_node(node, 2))
            self.state.set_host(node, 16_000, 64_000)
            shares = {"main": [make_share(node, 0, 1000)]}
            pod = make_pod(f"small-{node}", node=node, annotations=MOVABLE, shares=shares, vgpu="1", vgpu_memory="1000")
            self.state.set_pod(replace(pod, controller_uid="job", controller_kind="Job", started_at=0.0))
        big = make_pod("big", vgpu="2", vgpu_memory="2000")
        assert big.gpu is not None
        self.state.set_pod(replace(big, gpu=replace(big.gpu, scheduler_name="ours")))
        self.changes_during_search: Any = lambda: None
        context = make_context(self.state, monotonic=lambda: self.now, now=lambda: self.now)
        api = MoveApi(cast(Any, self), self)
        self.service = Consolidator(context, api, self.snapshot, self.retry, lambda: self.leads, Telemetry(), Scope(acts, "ours"))

    def snapshot(self) -> Snapshot:
        """Return the state for a search; what changes after this is not in it."""
        taken = snapshot_of(self.state.moment(), Rules(Policy.FRAG, DEFAULT_WEIGHTS), self.now)
        self.changes_during_search()
        return taken

    async def retry(self, uid: str) -> None:
        raise AssertionError(f"no run here comes to its end, but pod {uid} is retried")

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        self.attempts += 1
        if not self.answers:
            raise self.error
        self.written.append(uid)

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        (self.dry_runs if dry_run else self.evicted).append(uid)

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        if not self.answers:
            raise KubeApiError("no answer")
        self.reported.append(message)

    async def search(self) -> None:
        """Notice that the pod waits, and search once it has waited long enough."""
        await self.service.step()
        self.now += WAIT_SECONDS
        await self.service.step()


async def test_without_moves_plan_is_only_reported() -> None:
    scene = Scene(acts=False)
    await scene.search()
    [sentence] = scene.reported
    assert sentence.startswith("1 move, which loses ")
    assert not scene.dry_runs
    assert not scene.state.reservations


async def test_plan_is_written_down_before_first_eviction() -> None:
    scene = Scene(acts=True)
    await scene.search()
    assert (scene.written, scene.evicted) == (["big"], [])
    assert len(scene.dry_runs) == 1
    assert "big" in scene.state.reservations
    await scene.service.step()
    assert scene.evicted == scene.dry_runs[:1]


async def test_api_without_an_answer_leaves_nothing_reserved() -> None:
    scene = Scene(acts=True)
    scene.answers = False
    await scene.search()
    assert not scene.state.reservations
    assert not scene.evicted


@pytest.mark.parametrize(("error", "attempts"), [(KubeApiError("no answer"), 4), (KubeRefusedError("a policy refuses"), 1)])
async def test_annotation_is_cleared_only_if_it_may_be_there(error: KubeApiError, attempts: int) -> None:
    """A refusal changes nothing, and would be repeated for as long as the pod runs."""
    scene = Scene(acts=True)
    scene.answers, scene.error = False, error
    await scene.search()
    _bound(scene)
    for _ in range(3):
        scene.now += SCAN_SECONDS
        await scene.service.step()
    assert scene.attempts == attempts


def _bound(scene: Scene) -> None:
    scene.state.set_pod(replace(scene.state.pods["big"], node_name="n3"))


def _followed(scene: Scene) -> None:
    scene.leads = False


CHANGES = {
    "bound": _bound,
    "gone": lambda scene: scene.state.drop_pod("big"),
    "pods that move are gone": lambda scene: [scene.state.drop_pod(uid) for uid in ("small-n1", "small-n2")],
    "another replica leads": _followed,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_plan_is_dropped_when_cluster_changed_during_search(change: Any) -> None:
    scene = Scene(acts=True)
    scene.changes_during_search = lambda: change(scene)
    await scene.search()
    assert not scene.dry_runs
    assert not scene.written
    assert not scene.state.reservations


async def test_pod_of_another_scheduler_is_not_served() -> None:
    scene = Scene(acts=True)
    big = scene.state.pods["big"]
    assert big.gpu is not None
    scene.state.set_pod(replace(big, gpu=replace(big.gpu, scheduler_name="theirs")))
    await scene.search()
    assert not scene.dry_runs
    assert not scene.reported
