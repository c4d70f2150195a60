# SPDX-License-Identifier: Apache-2.0
"""Random nodes and random rules of pods about nodes, as JSON, and an oracle that says which pod may run on which node.

The oracle follows the text of the Kubernetes documentation and shares no code with the scheduler.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from aliquot import contract
from scheduler_plugin.core.cluster.objects import NodeObject, PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts

Object = Mapping[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PICKY: Sequence[Object] = (
    {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]},
    {"affinity": {"podAntiAffinity": {REQUIRED: [{"topologyKey": "kubernetes.io/hostname"}]}}},
    {"affinity": {"podAffinity": {REQUIRED: [{"topologyKey": "zone"}]}}},
)
"""Specs for which the place of other pods decides: kube-scheduler alone knows where they can run."""
_OWN_TAINTS = ("dedicated", "nvidia.com/gpu")
_HARD = ("NoSchedule", "NoExecute")


def random_node(choices: random.Random, name: str, tainted: float) -> Object:
    """Return a node of the API with few labels and taints. Args: tainted: how often it has each taint."""
    labels = {"pool": choices.choice("ab"), "size": choices.choice(["4", "8", "x"])}
    if choices.random() < 0.3:
        del labels[choices.choice(sorted(labels))]
    taints = [
        {"key": key, "value": choices.choice("aab"), "effect": choices.choice([*_HARD, "PreferNoSchedule"])}
        for key in _OWN_TAINTS
        if choices.random() < tainted
    ]
    return {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints, "unschedulable": choices.random() < tainted / 4}}


def random_rules(choices: random.Random, picky: float = 0.0) -> Object:
    """Return the part of a pod's spec about nodes. Args: picky: how often it also has a rule about other pods."""
    spec: dict[str, Any] = {"tolerations": [_toleration(choices) for _ in range(choices.choice([0, 1, 2]))]}
    if choices.random() < 0.4:
        spec["nodeSelector"] = {"pool": choices.choice("ab")}
    if choices.random() < 0.4:
        spec["affinity"] = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [_term(choices) for _ in range(choices.randint(1, 2))]}}}
    return {**spec, **choices.choice(PICKY)} if choices.random() < picky else spec


def _toleration(choices: random.Random) -> Object:
    key, effect = choices.choice(["", "", *_OWN_TAINTS]), choices.choice(["", "", "NoSchedule", "NoExecute"])
    if not key or choices.random() < 0.5:
        return {"key": key, "operator": "Exists", "effect": effect}
    return {"key": key, "value": choices.choice("aab"), "effect": effect}


def _term(choices: random.Random) -> Object:
    key, names = choices.choice(["pool", "size"]), [f"n{number}" for number in range(1, 4)]
    values = {"In": ["a", "8"], "NotIn": ["b", "4"], "Gt": ["4"], "Lt": ["8"]}
    operator = choices.choice([*values, "Exists", "DoesNotExist"])
    term: dict[str, Any] = {"matchExpressions": [{"key": key, "operator": operator, "values": values.get(operator, [])}]}
    if choices.random() < 0.2:
        term["matchFields"] = [{"key": "metadata.name", "operator": choices.choice(["In", "NotIn"]), "values": names}]
    return term


def requires_labels(spec: Object) -> bool:
    """Whether a pod may run only on nodes with some labels or names."""
    return bool(spec.get("nodeSelector")) or "nodeAffinity" in spec.get("affinity", {})


def depends_on_pods(spec: Object) -> bool:
    """Whether a spec is one of ``PICKY``."""
    return any(spec.get(key) == value for one in PICKY for key, value in one.items())


def may_run(spec: Object, node: Object) -> bool:
    """Whether kube-scheduler may put a pod with these rules on a node, and the node is not cordoned."""
    name, labels = node["metadata"]["name"], node["metadata"]["labels"]
    selected = all(labels.get(key) == value for key, value in spec.get("nodeSelector", {}).items())
    terms = spec.get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms")
    near = terms is None or any(
        all(_meets(one, labels) for one in term.get("matchExpressions", ()))
        and all(_meets(one, {"metadata.name": name}) for one in term.get("matchFields", ()))
        for term in terms
    )
    taints = [taint for taint in node["spec"]["taints"] if taint["effect"] in _HARD]
    tolerated = all(any(_covers(one, taint) for one in spec.get("tolerations", ())) for taint in taints)
    return selected and near and tolerated and not node["spec"]["unschedulable"]


def _meets(one: Object, labels: Mapping[str, str]) -> bool:
    found, values = labels.get(one["key"]), one["values"]
    match one["operator"]:
        case "In":
            return found is not None and found in values
        case "NotIn":
            return found is None or found not in values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case operator:
            number = int(found) if found is not None and found.isdecimal() else None
            return number is not None and (number > int(values[0]) if operator == "Gt" else number < int(values[0]))


def _covers(toleration: Object, taint: Object) -> bool:
    if toleration["effect"] and toleration["effect"] != taint["effect"]:
        return False
    if not toleration["key"]:
        return True  # only with the operator Exists
    return toleration["key"] == taint["key"] and ("operator" in toleration or toleration["value"] == taint["value"])


def node_object(node: Object) -> NodeObject:
    """Read a node as the watch does."""
    return msgspec.convert(node, NodeObject)


def with_rules(pod: PodFacts, spec: Object) -> PodFacts:
    """Return a pod as the watch reads it if its spec has these rules."""
    container = {"name": "main", "resources": {"limits": {contract.RESOURCE_VGPU: "1"}}}
    item = msgspec.convert({"metadata": {}, "spec": {**spec, "nodeName": pod.node_name, "containers": [container]}}, PodObject)
    read = pod_facts(item)
    return replace(pod, nodes=read.nodes, is_confined=read.is_confined, is_picky=read.is_picky, tolerates=read.tolerates)
