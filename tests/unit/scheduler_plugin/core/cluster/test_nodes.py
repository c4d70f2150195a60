# SPDX-License-Identifier: Apache-2.0
"""Which nodes a pod may use by its selector, required affinity and tolerations."""

from typing import Any

import msgspec
import pytest

from scheduler_plugin.core.cluster.nodes import CORDONED, NodeDirectory, NodeFacts, Taint, Toleration, rules_of
from scheduler_plugin.core.cluster.objects import NodeObject, is_closed, node_facts

PLAIN = NodeFacts("plain")
GOLD = NodeFacts("gold", {"pool": "gold", "size": "8"})
GPU = NodeFacts("gpu", {}, (Taint("nvidia.com/gpu", "present", "NoSchedule"),))
SOFT = NodeFacts("soft", {}, (Taint("slow", "", "PreferNoSchedule"),))
GONE = NodeFacts("gone", {}, (Taint("node.kubernetes.io/unreachable", "", "NoExecute"),))
ALL = (PLAIN, GOLD, GPU, SOFT, GONE)


def affinity(*expressions: dict[str, Any], fields: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    term = {"matchExpressions": list(expressions), "matchFields": list(fields)}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}}


def requirement(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


def allowed(spec: dict[str, Any]) -> set[str]:
    directory = NodeDirectory()
    for node in ALL:
        directory.put(node)
    return set(directory.allowed(rules_of(spec)))


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({}, {"plain", "gold", "soft"}),
        ({"nodeSelector": {"pool": "gold"}}, {"gold"}),
        ({"nodeSelector": {"pool": "gold", "size": "9"}}, set()),
        (affinity(requirement("pool", "In", "gold", "silver")), {"gold"}),
        (affinity(requirement("pool", "NotIn", "gold")), {"plain", "soft"}),
        (affinity(requirement("pool", "Exists")), {"gold"}),
        (affinity(requirement("pool", "DoesNotExist")), {"plain", "soft"}),
        (affinity(requirement("size", "Gt", "7")), {"gold"}),
        (affinity(requirement("size", "Lt", "8")), set()),
        (affinity(requirement("pool", "Gt", "7")), set()),
        (affinity(requirement("pool", "Unknown")), set()),
        (affinity(fields=(requirement("metadata.name", "In", "soft"),)), {"soft"}),
        (affinity(), set()),
        ({"tolerations": [{"operator": "Exists"}]}, {"plain", "gold", "gpu", "soft", "gone"}),
        ({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}, {"plain", "gold", "soft", "gpu"}),
        ({"tolerations": [{"key": "nvidia.com/gpu", "value": "present"}]}, {"plain", "gold", "soft", "gpu"}),
        ({"tolerations": [{"key": "nvidia.com/gpu", "value": "other"}]}, {"plain", "gold", "soft"}),
        ({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}]}, {"plain", "gold", "soft"}),
        ({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Lt", "value": "present"}]}, {"plain", "gold", "soft"}),
    ],
)
def test_pod_may_use_nodes(spec: dict[str, Any], names: set[str]) -> None:
    assert allowed(spec) == names


def test_flavor_narrows_labels_and_adds_tolerations() -> None:
    rules = rules_of({"nodeSelector": {"size": "8"}}).narrowed({"pool": "gold"}, (Toleration("nvidia.com/gpu", "Exists"),))
    assert rules.allow(GOLD)
    assert not rules.allow(GPU)
    assert rules_of({}).narrowed({}, (Toleration("nvidia.com/gpu", "Exists"),)).allow(GPU)


@pytest.mark.parametrize("spec", [{"unschedulable": True}, {"unschedulable": True, "taints": [msgspec.to_builtins(CORDONED)]}])
def test_cordoned_node_is_closed_also_before_its_taint_comes(spec: dict[str, Any]) -> None:
    item = msgspec.convert({"metadata": {"name": "n"}, "spec": spec}, NodeObject)
    assert is_closed(item)
    assert node_facts(item) == NodeFacts("n", {}, (CORDONED,))


def test_nodes_that_kubernetes_closes_are_not_ready() -> None:
    directory = NodeDirectory()
    for node in (*ALL, NodeFacts("full", {}, (Taint("node.kubernetes.io/disk-pressure", "", "NoSchedule"),))):
        directory.put(node)
    assert directory.are_ready(["plain", "gpu", "soft", "gone", "full", "unknown"]) == {"plain", "gpu", "soft"}


def test_directory_counts_changes_only() -> None:
    directory = NodeDirectory()
    directory.put(PLAIN)
    version = directory.version
    directory.put(NodeFacts("plain"))
    assert directory.version == version
    directory.put(NodeFacts("plain", {"pool": "gold"}))
    assert directory.version > version
    directory.keep({"other"})
    assert directory.allowed(rules_of({})) == frozenset()
