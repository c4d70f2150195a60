# SPDX-License-Identifier: Apache-2.0
"""Who may write the annotation that takes a held seat, for each kind with pod templates: Kueue, and controllers that pass it on.

The kinds of other projects have no schema here, because the API server's policy reads only their templates.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from aliquot import contract
from scheduler_plugin.webhook.templates import EACH, KINDS, TemplateKind
from tests.e2e.conftest import Target
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.rendering import DEPLOY

POLICY = DEPLOY / "daemonset/components/kueue/policy.yaml"
GROUPS = sorted({kind.group for kind in KINDS})
PLURALS = sorted({kind.plural for kind in KINDS})
HELD = {contract.ANNOTATION_HOLD: "workload/main"}
TENANT, KUEUE, OPERATOR = "hold-tenant", "hold-kueue", "hold-operator"
RIGHTS: dict[str, list[Object]] = {
    TENANT: [],
    KUEUE: [{"apiGroups": ["kueue.x-k8s.io"], "resources": ["workloads/status"], "verbs": ["update"]}],
    OPERATOR: [{"apiGroups": GROUPS, "resources": [f"{plural}/status" for plural in PLURALS], "verbs": ["update"]}],
}
SERVED = {"batch": "v1", "apps": "v1"}
SCHEMA = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
FURTHER: dict[str, Object] = {
    "CronJob": {"schedule": "@daily"},
    "Deployment": {"selector": {"matchLabels": {"app": "a"}}},
    "ReplicaSet": {"selector": {"matchLabels": {"app": "a"}}},
    "StatefulSet": {"selector": {"matchLabels": {"app": "a"}}, "serviceName": "a"},
}


def everything(kubectl: Kubectl, verb: str, objects: Iterable[Object], *arguments: str) -> str:
    """Run a command on objects; return what it says of those that are refused."""
    try:
        kubectl.run(verb, *arguments, "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": [*objects]}))
    except KubectlError as refusals:
        return str(refusals)
    return ""


@pytest.fixture(scope="module")
def policy(target: Target) -> Iterator[None]:
    """The policy, the kinds that it reads and three users; gone afterwards."""
    kinds = [definition(kind) for kind in KINDS if kind.group not in SERVED]
    served = {one["metadata"]["name"] for one in target.kubectl.all("customresourcedefinitions")}
    added = [one for one in kinds if one["metadata"]["name"] not in served]
    roles = [role for name, rules in RIGHTS.items() for role in rights(name, rules)]
    try:
        everything(target.kubectl, "create", [*added, *roles])
        target.kubectl.run("apply", f"--filename={POLICY}")
        target.kubectl.wait_until_served(*(one["metadata"]["name"] for one in added))
        probe = holding(KINDS[0], KINDS[0].paths[0], HELD)
        eventually(lambda: "is reserved" in created(target.kubectl, TENANT, [probe]), "the policy to be heeded")
        yield
    finally:
        target.kubectl.run("delete", "--ignore-not-found", f"--filename={POLICY}")
        everything(target.kubectl, "delete", [*added, *roles], "--ignore-not-found")


@pytest.fixture
def judged(policy: None, kubectl: Kubectl) -> Kubectl:
    """A namespace under the policy."""
    del policy
    return kubectl


def definition(kind: TemplateKind) -> Object:
    """The definition of a kind that takes any content."""
    names = {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower(), "listKind": f"{kind.kind}List"}
    version = {"name": "v1", "served": True, "storage": True, "schema": SCHEMA}
    scope = "Cluster" if is_of_cluster(kind) else "Namespaced"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}", "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
        "spec": {"group": kind.group, "scope": scope, "names": names, "versions": [version]},
    }


def is_of_cluster(kind: TemplateKind) -> bool:
    return kind.kind.startswith("Cluster")


def rights(user: str, rules: list[Object]) -> Iterator[Object]:
    """A role with these rights and those on objects with templates, and its binding."""
    all_rules = [*rules, {"apiGroups": ["", *GROUPS], "resources": ["pods", *PLURALS], "verbs": ["*"]}]
    group = "rbac.authorization.k8s.io"
    yield {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": {"name": user}, "rules": all_rules}
    yield {
        "apiVersion": f"{group}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": user},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }  # fmt: skip


def created(kubectl: Kubectl, user: str, objects: Iterable[Object]) -> str:
    """Try to create objects; return the refusals."""
    return everything(kubectl, "create", objects, f"--as={user}", "--dry-run=server", "--validate=ignore")


def holding(kind: TemplateKind, path: str, annotations: dict[str, str]) -> Object:
    """An object with a pod template at a path."""
    spec = {"containers": [{"name": "main", "image": "a"}], "restartPolicy": "Always" if kind.group == "apps" else "Never"}
    value: Any = {"metadata": {"labels": {"app": "a"}, "annotations": annotations}, "spec": spec}
    for step in reversed(path.split("/")):
        value = {step: value} if step != EACH else {"Worker": value} if "ReplicaSpecs" in path else [value]
    value["spec"] |= FURTHER.get(kind.kind, {})
    return {"apiVersion": f"{kind.group}/v1", "kind": kind.kind, "metadata": {"name": "a"}, **value}


def pod(annotations: dict[str, str], group: str = "", kind: str = "") -> Object:
    """A pod, by default without a controller."""
    reference = {"apiVersion": f"{group}/v1", "kind": kind, "name": "a", "uid": "a", "controller": True}
    metadata = {"name": "a", "annotations": annotations, "ownerReferences": [reference] if kind else []}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [{"name": "main", "image": "a"}]}}


def test_user_cannot_write_hold_into_templates_of_any_kind_and_kueue_can(judged: Kubectl) -> None:
    places = [(kind, path) for kind in KINDS for path in kind.paths]
    held = [holding(kind, path, HELD) for kind, path in places]
    assert created(judged, TENANT, held).count("is reserved") == len(places)
    assert created(judged, KUEUE, held) == ""
    assert created(judged, TENANT, [holding(kind, path, {}) for kind, path in places]) == ""


def test_only_controller_with_checked_templates_creates_pods_with_hold(judged: Kubectl) -> None:
    own = [(kind.group, kind.kind) for kind in KINDS if not is_of_cluster(kind)]
    held = [pod(HELD, *kind) for kind in own]
    assert created(judged, TENANT, held).count("is reserved") == len(own)
    assert created(judged, OPERATOR, held) == ""
    others = [pod(HELD), pod(HELD, "apps", "DaemonSet"), pod(HELD, "argoproj.io", "Workflow")]
    assert created(judged, OPERATOR, others).count("is reserved") == len(others)
    assert created(judged, TENANT, [pod({})]) == ""
    assert created(judged, "system:serviceaccount:kube-system:job-controller", [pod(HELD, "batch", "Job")]) == ""


def test_user_cannot_change_hold_and_may_change_other_fields(judged: Kubectl) -> None:
    judged.apply(pod({}))
    hold = f"{contract.ANNOTATION_HOLD}=workload/main"
    with pytest.raises(KubectlError, match="is reserved"):
        judged.run("annotate", "pod", "a", hold, f"--as={TENANT}")
    judged.run("annotate", "pod", "a", hold, f"--as={KUEUE}")
    judged.run("label", "pod", "a", "team=a", f"--as={TENANT}")
    with pytest.raises(KubectlError, match="is reserved"):
        judged.run("annotate", "pod", "a", f"{contract.ANNOTATION_HOLD}=other/main", "--overwrite", f"--as={TENANT}")
    judged.run("annotate", "pod", "a", f"{contract.ANNOTATION_HOLD}-", f"--as={TENANT}")
