# SPDX-License-Identifier: Apache-2.0
"""The longest wait of a priority class: who gets a boost, and when."""

import json
import logging
from typing import Any

import pytest

from aliquot import contract
from aliquot.kube.errors import KubeApiError, KubeConflictError
from scheduler_plugin.core.admit.kueue import PRIORITY_BOOST, decode_priority_class, decode_workload
from scheduler_plugin.services.kueue_objects import KueueObjects
from scheduler_plugin.services.max_waits import BOOST, MaxWaits

CREATED = "2026-01-01T00:00:00Z"
CREATED_AT = 1_767_225_600.0
"""The same, in seconds since 1970."""
RESERVED = {"type": "QuotaReserved", "status": "True", "lastTransitionTime": CREATED}


class Scene:
    """Workloads of two classes; one class states ten minutes. It is the API and the clock too."""

    def __init__(self, max_wait: str = "10m", kind: str = "PriorityClass") -> None:
        self.kind = kind
        self.leads = True
        self.refusal: KubeApiError | None = None
        self.boosted: list[tuple[str, str, int]] = []
        self.waited_seconds = 0.0
        self.objects = KueueObjects(lambda: 0.0)
        self.waits = MaxWaits(self.objects, self, self, lambda: self.leads)
        patient = {"name": "patient", "annotations": {contract.ANNOTATION_MAX_WAIT: max_wait}}
        for metadata in (patient, {"name": "other"}):
            self.objects.classes[kind].changed(decode_priority_class(json.dumps({"metadata": metadata}).encode()))

    def monotonic(self) -> float:
        return self.waited_seconds

    def now(self) -> float:
        return CREATED_AT + self.waited_seconds

    def waits_in_queue(self, name: str, of_class: str = "patient", boost: str = "", **fields: Any) -> None:
        annotations = {PRIORITY_BOOST: boost} if boost else {}
        metadata = {"name": name, "namespace": "team", "uid": name, "resourceVersion": "7", "creationTimestamp": CREATED}
        spec = {"priorityClassRef": {"group": "g", "kind": self.kind, "name": of_class}} if of_class else {}
        item = {"metadata": metadata | {"annotations": annotations}, "spec": spec | fields.pop("spec", {}), "status": fields}
        self.objects.workloads.changed(decode_workload(json.dumps(item).encode()))

    async def boost(self, namespace: str, name: str, version: str, amount: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert (namespace, amount) == ("team", BOOST)
        self.boosted.append((name, version, amount))

    async def after(self, seconds: float) -> list[str]:
        """Return who was boosted so far, after one more look at this time."""
        self.waited_seconds = seconds
        await self.waits.step()
        return [name for name, _, _ in self.boosted]


@pytest.mark.parametrize("kind", ["PriorityClass", "WorkloadPriorityClass"])
async def test_workload_is_boosted_when_it_waited_as_long_as_its_class_states(kind: str) -> None:
    scene = Scene(kind=kind)
    scene.waits_in_queue("w")
    assert await scene.after(599) == []
    assert await scene.after(600) == ["w"]
    assert scene.boosted == [("w", "7", BOOST)]


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param({"of_class": "other"}, id="class without a longest wait"),
        pytest.param({"of_class": "unknown"}, id="unknown class"),
        pytest.param({"of_class": ""}, id="no class"),
        pytest.param({"boost": "0"}, id="boost that somebody set"),
        pytest.param({"conditions": [RESERVED], "admission": {"podSetAssignments": []}}, id="has its quota"),
        pytest.param({"conditions": [RESERVED | {"type": "Finished"}]}, id="finished"),
        pytest.param({"spec": {"active": False}}, id="stopped by its owner"),
    ],
)
async def test_no_boost_for_workload_that_needs_none(workload: dict[str, Any]) -> None:
    scene = Scene()
    scene.waits_in_queue("w", **workload)
    assert await scene.after(10_000) == []


async def test_wait_begins_again_when_an_admitted_workload_is_stopped() -> None:
    scene = Scene()
    stopped = [{"type": name, "status": status, "lastTransitionTime": "2026-01-01T01:00:00Z"}
               for name, status in (("Evicted", "True"), ("Admitted", "False"))]  # fmt: skip
    scene.waits_in_queue("w", conditions=stopped)
    assert await scene.after(3600 + 599) == []
    assert await scene.after(3600 + 600) == ["w"]


async def test_eviction_before_admission_begins_no_new_wait() -> None:
    scene = Scene()
    scene.waits_in_queue("w", conditions=[{"type": "Evicted", "status": "True", "lastTransitionTime": "2026-01-01T01:00:00Z"}])
    assert await scene.after(3600) == ["w"]


async def test_only_the_leader_boosts() -> None:
    scene = Scene()
    scene.waits_in_queue("w")
    scene.leads = False
    assert await scene.after(600) == []


async def test_unreadable_duration_counts_as_none_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene("ten minutes")
    scene.waits_in_queue("w")
    assert await scene.after(10_000) == await scene.after(20_000) == []
    [said] = [record.message for record in caplog.records]
    assert said.startswith("PriorityClass patient: aliquot.dev/max-wait: expected a duration such as 90s")
    assert said.endswith("found 'ten minutes': it counts as none")


@pytest.mark.parametrize(("refusal", "is_accepted"), [(KubeConflictError("changed"), True), (KubeApiError("HTTP 403"), False)])
async def test_refused_boost_is_tried_again(refusal: KubeApiError, is_accepted: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    scene = Scene()
    scene.waits_in_queue("w")
    scene.refusal, scene.waited_seconds = refusal, 600
    assert await scene.waits.step() is is_accepted
    assert len(caplog.records) == (not is_accepted)
    scene.refusal = None
    assert await scene.after(601) == ["w"]
