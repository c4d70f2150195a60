# SPDX-License-Identifier: Apache-2.0
"""Kueue's objects as the check reads them."""

import json
from typing import Any

import msgspec
import pytest

from scheduler_plugin.core.admit.kueue import (
    Domain,
    PriorityClass,
    State,
    decode_check,
    decode_flavor,
    decode_priority_class,
    decode_workload,
)
from scheduler_plugin.core.cluster.nodes import Toleration


def workload(*conditions: tuple[str, str], spec: dict[str, Any] | None = None, **status: Any) -> bytes:
    listed = [{"type": name, "status": value, "lastTransitionTime": "2026-01-01T00:00:05Z"} for name, value in conditions]
    metadata = {"name": "w", "namespace": "team", "uid": "u", "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z"}
    item = {"metadata": metadata, "spec": spec or {"podSets": [{"name": "main", "count": 4, "template": {"spec": {}}}]}}
    return json.dumps(item | {"status": {"conditions": listed, **status}}).encode()


def assignment(**fields: Any) -> dict[str, Any]:
    return {"podSetAssignments": [{"name": "main", **fields}]}


def test_reservation_needs_condition_and_admission() -> None:
    assert not decode_workload(workload(("QuotaReserved", "True"))).is_reserved
    assert not decode_workload(workload(("QuotaReserved", "False"), admission=assignment())).is_reserved
    read = decode_workload(workload(("QuotaReserved", "True"), ("Evicted", "False"), admission=assignment()))
    assert (read.is_reserved, read.is_evicted, read.is_admitted, read.is_active) == (True, False, False, True)
    assert read.reserved_at == read.created_at + 5


def test_inactive_or_deleted_workload_is_not_active() -> None:
    assert not decode_workload(workload(spec={"active": False})).is_active
    item = json.loads(workload())
    item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not decode_workload(json.dumps(item).encode()).is_active


@pytest.mark.parametrize(("fields", "reclaimed", "count"), [({}, 0, 4), ({"count": 3}, 0, 3), ({"count": 3}, 1, 2), ({"count": 3}, 9, 0)])
def test_count_is_the_assigned_one_less_pods_that_ended(fields: dict[str, Any], reclaimed: int, count: int) -> None:
    reclaimable = [{"name": "main", "count": reclaimed}]
    [read] = decode_workload(workload(admission=assignment(**fields), reclaimablePods=reclaimable)).pod_sets
    assert read.count == count


def test_class_and_longest_wait_are_read() -> None:
    stated = {"priorityClassRef": {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "low"}}
    assert decode_workload(workload(spec=stated)).priority_class == ("PriorityClass", "low")
    metadata = {"name": "low", "annotations": {"aliquot.dev/max-wait": "30m"}}
    assert decode_priority_class(json.dumps({"metadata": metadata, "value": 5}).encode()) == PriorityClass("low", "30m")


def test_flavors_and_checks_are_read() -> None:
    checks = [{"name": "fits", "state": "Retry", "message": "no", "requeueAfterSeconds": 5, "retryCount": 3}]
    read = decode_workload(workload(admission=assignment(flavors={"a": "gold", "b": "gold"}), admissionChecks=checks))
    assert read.pod_sets[0].flavors == {"gold"}
    assert (read.checks["fits"].state, read.checks["fits"].message) == (State.RETRY, "no")


HOST = "kubernetes.io/hostname"


@pytest.mark.parametrize(
    ("parts", "domains"),
    [
        (
            [{"domainCount": 1, "podCounts": {"universal": 2}, "valuesPerLevel": [{"universal": "n1"}]}],
            [("n1", 2)],
        ),
        (
            [{"domainCount": 2, "podCounts": {"individual": [1, 3]}, "valuesPerLevel": [{"individual": {"roots": ["n1", "n2"]}}]}],
            [("n1", 1), ("n2", 3)],
        ),
        (
            [
                {
                    "domainCount": 2,
                    "podCounts": {"universal": 1},
                    "valuesPerLevel": [{"individual": {"prefix": "n", "suffix": "-x", "roots": ["1", "2"]}}],
                },
                {"domainCount": 1, "podCounts": {"universal": 4}, "valuesPerLevel": [{"universal": "m"}]},
            ],
            [("n1-x", 1), ("n2-x", 1), ("m", 4)],
        ),
    ],
    ids=["one", "individual", "prefix"],
)
def test_topology_assignment_is_unpacked(parts: list[dict[str, Any]], domains: list[tuple[str, int]]) -> None:
    topology = {"levels": [HOST], "slices": parts}
    [read] = decode_workload(workload(admission=assignment(topologyAssignment=topology))).pod_sets
    assert read.domains == tuple(Domain({HOST: name}, count) for name, count in domains)


def test_topology_of_several_levels_names_all_labels() -> None:
    values = [{"universal": "b1"}, {"individual": {"roots": ["r1", "r2"]}}]
    topology = {"levels": ["block", "rack"], "slices": [{"domainCount": 2, "podCounts": {"universal": 1}, "valuesPerLevel": values}]}
    [read] = decode_workload(workload(admission=assignment(topologyAssignment=topology))).pod_sets
    assert [domain.labels for domain in read.domains or ()] == [{"block": "b1", "rack": "r1"}, {"block": "b1", "rack": "r2"}]


def test_topology_with_lists_that_disagree_is_refused() -> None:
    topology = {"levels": [HOST], "slices": [{"domainCount": 2, "valuesPerLevel": [{"individual": {"roots": ["n1"]}}]}]}
    with pytest.raises(msgspec.ValidationError, match="lists of different lengths"):
        decode_workload(workload(admission=assignment(topologyAssignment=topology)))


def test_check_is_active_for_the_generation_that_was_seen() -> None:
    item: dict[str, Any] = {"metadata": {"name": "c", "generation": 2}, "spec": {"controllerName": "aliquot.dev/fits"}}
    assert decode_check(json.dumps(item).encode()).active_generation == -1
    item["status"] = {"conditions": [{"type": "Active", "status": "True", "observedGeneration": 1}]}
    read = decode_check(json.dumps(item).encode())
    assert (read.generation, read.active_generation) == (2, 1)


def test_flavor_has_labels_and_tolerations() -> None:
    spec = {"nodeLabels": {"pool": "gold"}, "tolerations": [{"key": "gold", "operator": "Exists"}]}
    read = decode_flavor(json.dumps({"metadata": {"name": "f"}, "spec": spec}).encode())
    assert (read.labels, read.tolerations) == ({"pool": "gold"}, (Toleration("gold", "Exists"),))
