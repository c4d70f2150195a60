# SPDX-License-Identifier: Apache-2.0
"""Which pods get ResourceClaims, where nodes give out their GPUs by different interfaces."""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from aliquot import contract
from aliquot.contract.model import Allocation
from aliquot.kube.errors import KubeApiError
from aliquot.placement.request import RequestError
from scheduler_plugin.core.claims.templates import ClaimTemplate
from scheduler_plugin.webhook.allocation import KEPT_SECONDS, AllocationRule
from scheduler_plugin.webhook.review import Reviews
from tests.unit.scheduler_plugin.webhook.test_claims import RULES
from tests.unit.scheduler_plugin.webhook.test_normalise import make_pod

PLUGIN, DRA, BOTH = Allocation.PLUGIN, Allocation.DRA, Allocation.BOTH
LABEL = contract.LABEL_ALLOCATION


class Namespaces:
    """Implements ``ports.ObjectApi``."""

    def __init__(self, label: str | None = None) -> None:
        self.label = label
        self.reads: list[str] = []
        self.fails = False

    async def get_object(self, path: str) -> Mapping[str, Any] | None:
        self.reads.append(path)
        if self.fails:
            raise KubeApiError("no reply")
        return {"metadata": {"labels": {} if self.label is None else {LABEL: self.label}}}


class Maker:
    """Implements ``webhook.review.ClaimTemplateMaker``."""

    async def ensure(self, namespace: str, templates: Sequence[ClaimTemplate]) -> str:
        del namespace, templates
        return ""


def labelled(label: str | None) -> dict[str, Any]:
    pod = make_pod({"nvidia.com/vgpu": "1", "nvidia.com/vgpu-memory": "1000"})
    pod["metadata"]["labels"] = {} if label is None else {LABEL: label}
    return pod


def rule(nodes: tuple[Allocation, ...], namespaces: Namespaces, now: list[float] | None = None) -> AllocationRule:
    return AllocationRule(lambda: nodes, namespaces, lambda: (now or [0.0])[0])


WORDS = (None, "dra", "plugin")
NODES = ((), (PLUGIN,), (DRA,), (PLUGIN, DRA))


@pytest.mark.parametrize(("pod", "namespace", "nodes"), list(product(WORDS, WORDS, NODES)))
def test_pod_decides_then_namespace_then_nodes(pod, namespace, nodes):
    found = asyncio.run(rule(nodes, Namespaces(namespace)).of(labelled(pod), "team"))
    assert found == (pod or namespace or ("plugin" if nodes == (PLUGIN,) else "dra"))


@pytest.mark.parametrize(("other", "found"), [(BOTH, PLUGIN), (PLUGIN, PLUGIN), (DRA, DRA), (Allocation.PLANNED, Allocation.PLANNED)])
def test_node_with_both_interfaces_turns_no_vgpus_into_claims(other, found):
    assert asyncio.run(rule((BOTH, other), Namespaces()).of(labelled(None), "team")) is found


@pytest.mark.parametrize("label", [None, "plugin"])
@pytest.mark.parametrize(("nodes", "is_held"), [((BOTH,), True), ((PLUGIN, BOTH), True), ((DRA, PLUGIN), False)])
def test_own_claims_wait_for_our_scheduler_where_a_node_has_both_interfaces(label, nodes, is_held):
    pod = with_claims("ours", labels={} if label is None else {LABEL: label})
    paths = [operation["path"] for operation in held(pod, nodes, Objects(ours=OURS))]
    assert ("/spec/schedulingGates" in paths) is is_held


@pytest.mark.parametrize("place", ["pod", "namespace"])
def test_unknown_word_is_refused_with_place(place):
    words = {"pod": None, "namespace": None} | {place: "both"}
    with pytest.raises(RequestError, match=f"of the {place}.*: expected dra, planned or plugin, found 'both'"):
        asyncio.run(rule((DRA,), Namespaces(words["namespace"])).of(labelled(words["pod"]), "team"))


def test_namespace_is_read_once_for_pods_of_one_moment():
    namespaces, now = Namespaces("plugin"), [0.0]
    one = rule((DRA,), namespaces, now)
    for _ in range(3):
        assert asyncio.run(one.of(labelled(None), "team")) is PLUGIN
    assert namespaces.reads == ["/api/v1/namespaces/team"]
    now[0], namespaces.label = KEPT_SECONDS, "dra"
    assert asyncio.run(one.of(labelled(None), "team")) is DRA


def review(path: str, pod: Mapping[str, Any], namespaces: Namespaces, nodes: tuple[Allocation, ...] = (PLUGIN, DRA)) -> dict[str, Any]:
    reviews = Reviews(RULES, lambda _: None, claims=Maker(), allocation=rule(nodes, namespaces))
    request = {"uid": "u", "operation": "CREATE", "namespace": "team", "object": pod}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    answer: dict[str, Any] = json.loads(asyncio.run(reviews.by_path()[path](body)))["response"]
    return answer


@pytest.mark.parametrize(("label", "is_allowed"), [("plugin", True), ("dra", False)])
def test_second_review_lets_amounts_through_only_where_they_stay(label, is_allowed):
    pod = labelled("plugin")
    pod["spec"]["schedulerName"] = contract.SCHEDULER_NAME
    answer = review("/validate", pod | {"metadata": {**pod["metadata"], "labels": {LABEL: label}}}, Namespaces())
    assert answer["allowed"] is is_allowed


@pytest.mark.parametrize(("namespace", "has_claims"), [("plugin", False), (None, True)])
def test_amounts_of_pod_become_claims_unless_its_namespace_keeps_them(namespace, has_claims):
    answer = review("/mutate", labelled(None), Namespaces(namespace))
    assert answer["allowed"]
    assert ("resourceClaims" in base64.b64decode(answer["patch"]).decode()) is has_claims


def test_pod_with_gang_is_refused_only_where_it_would_get_claims():
    pod = labelled(None)
    pod["metadata"]["annotations"] = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    assert review("/mutate", pod, Namespaces("plugin"))["allowed"]
    assert not review("/mutate", pod, Namespaces())["allowed"]


def test_pod_without_gpu_is_not_looked_up():
    namespaces = Namespaces()
    assert review("/mutate", make_pod({}), namespaces)["allowed"]
    assert namespaces.reads == []


def test_unknown_namespace_is_a_refusal():
    namespaces = Namespaces()
    namespaces.fails = True
    answer = review("/mutate", labelled(None), namespaces)
    assert (answer["allowed"], "try again" in answer["status"]["message"]) == (False, True)


# --- who allocates claims ---

OURS = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": contract.DRA_CLASS}}]}
OTHERS = {"requests": [{"name": "nic", "firstAvailable": [{"name": "fast", "deviceClassName": "nic.example.com"}]}]}


class Objects(Namespaces):
    """Namespaces without a label, and templates and claims by name."""

    def __init__(self, **found: Mapping[str, Any]) -> None:
        super().__init__()
        self.found = found

    async def get_object(self, path: str) -> Mapping[str, Any] | None:
        if self.fails or "resource.k8s.io" not in path:
            return await super().get_object(path)
        devices = self.found.get(path.rpartition("/")[2])
        spec = {"devices": devices}
        return None if devices is None else {"spec": {"spec": spec} if "templates/" in path else spec}


def with_claims(*names: str, template: bool = True, **metadata: Any) -> dict[str, Any]:
    field = "resourceClaimTemplateName" if template else "resourceClaimName"
    pod = make_pod({})
    pod["metadata"] |= metadata
    pod["spec"]["resourceClaims"] = [{"name": f"c{number}", field: name} for number, name in enumerate(names)]
    return pod


def answered(pod: Mapping[str, Any], nodes: tuple[Allocation, ...], objects: Objects) -> dict[str, Any]:
    """Return the answer for a pod with claims."""
    allocation = AllocationRule(
        lambda: nodes, objects, lambda: 0.0, lambda name: name == contract.DRA_CLASS, lambda name: name == "example.com/shared"
    )
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u", "namespace": "team", "object": pod}}
    reviews = Reviews(RULES, lambda _: None, claims=Maker(), allocation=allocation)
    reply: dict[str, Any] = json.loads(asyncio.run(reviews.by_path()["/claims"](json.dumps(review).encode())))["response"]
    assert reply["allowed"]
    return reply


def held(pod: Mapping[str, Any], nodes: tuple[Allocation, ...], objects: Objects) -> list[Any]:
    """Return the patch for a pod with claims."""
    reply = answered(pod, nodes, objects)
    return json.loads(base64.b64decode(reply["patch"])) if "patch" in reply else []


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize(
    ("names", "nodes", "is_held"),
    [
        (("ours",), (Allocation.PLANNED, DRA), True),
        (("others", "ours"), (Allocation.PLANNED,), True),
        (("others",), (Allocation.PLANNED,), False),
        (("unknown",), (Allocation.PLANNED,), True),
        ((), (Allocation.PLANNED,), False),
    ],
)
def test_pod_waits_for_our_scheduler_if_that_allocates_its_claims(template, names, nodes, is_held):
    patch = held(with_claims(*names, template=template), nodes, Objects(ours=OURS, others=OTHERS))
    assert {operation["path"]: operation["value"] for operation in patch} == (
        {"/metadata/labels": {LABEL: "planned"}, "/spec/schedulingGates": [{"name": contract.PLANNED}]} if is_held else {}
    )


def test_held_pod_is_not_changed_again_and_keeps_other_gates():
    pod = with_claims("ours", labels={"app": "a"})
    pod["spec"]["schedulingGates"] = [{"name": "example.com/wait"}]
    for operation in held(pod, (Allocation.PLANNED,), Objects(ours=OURS)):
        parent, _, name = operation["path"][1:].partition("/")
        pod[parent][name] = operation["value"]
    assert pod["metadata"]["labels"] == {"app": "a", LABEL: "planned"}
    assert [gate["name"] for gate in pod["spec"]["schedulingGates"]] == ["example.com/wait", contract.PLANNED]
    assert held(pod, (PLUGIN,), Objects(ours=OURS)) == []


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("labels", [{}, {LABEL: "plugin"}])
@pytest.mark.parametrize(
    ("names", "is_sent"), [(("ours",), True), (("others", "ours"), True), (("unknown",), True), (("others",), False), ((), False)]
)
def test_pod_with_own_claims_for_our_gpus_goes_to_our_scheduler(template, labels, names, is_sent):
    pod = with_claims(*names, template=template, labels=labels)
    patch = held(pod, (DRA, PLUGIN), Objects(ours=OURS, others=OTHERS))
    assert patch == ([{"op": "add", "path": "/spec/schedulerName", "value": contract.SCHEDULER_NAME}] if is_sent else [])


@pytest.mark.parametrize("nodes", [(DRA,), (Allocation.PLANNED,)])
@pytest.mark.parametrize("group", ["containers", "initContainers"])
@pytest.mark.parametrize("kind", ["limits", "requests"])
@pytest.mark.parametrize(("resource", "is_sent"), [("example.com/shared", True), ("example.com/nic", False), ("cpu", False)])
def test_pod_with_resource_of_our_class_goes_to_our_scheduler(nodes, group, kind, resource, is_sent):
    pod = make_pod({})
    pod["spec"][group] = [{"name": "main", "resources": {kind: {resource: "1"}}}]
    patch = held(pod, nodes, Objects())
    assert [(one["path"], one["value"]) for one in patch] == [("/spec/schedulerName", contract.SCHEDULER_NAME)] * is_sent


def test_scheduler_of_another_system_is_kept_with_warning():
    pod = with_claims("ours")
    pod["spec"]["schedulerName"] = "own-scheduler"
    reply = answered(pod, (DRA,), Objects(ours=OURS))
    assert "patch" not in reply
    [warning] = reply["warnings"]
    assert "own-scheduler is kept" in warning
    assert "may give one GPU twice" in warning
    pod["spec"]["schedulerName"] = contract.SCHEDULER_NAME
    assert "warnings" not in answered(pod, (DRA,), Objects(ours=OURS))


def test_pod_on_node_of_its_own_choice_is_left_alone():
    pod = with_claims("ours")
    pod["spec"]["nodeName"] = "n1"
    assert held(pod, (DRA,), Objects(ours=OURS)) == []


def test_claims_of_other_drivers_need_no_namespace():
    objects = Objects(others=OTHERS)
    assert held(with_claims("others"), (DRA,), objects) == []
    assert "/api/v1/namespaces/team" not in objects.reads


def test_pod_waits_while_its_claims_cannot_be_read():
    objects = Objects(ours=OURS)
    objects.fails = True
    pod = with_claims("ours", labels={LABEL: "planned"})
    assert held(pod, (PLUGIN,), objects)


def test_pod_of_gang_becomes_claims_where_our_scheduler_allocates_them():
    pod = labelled("planned")
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    pod["metadata"]["annotations"] = gang | {contract.ANNOTATION_PLACEMENT: "spread"}
    planned = replace(RULES, plans_claims=True).admit(pod)
    assert (planned.refusal, planned.warnings, len(planned.templates)) == ("", (), 1)
    assert "gangs are not available" in RULES.admit(pod).refusal
