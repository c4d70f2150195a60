# SPDX-License-Identifier: Apache-2.0
"""Kueue's configuration in deploy/kueue counts other systems' resources as the webhook translates them, and the queues there hold together.

tests/e2e/test_queues.py gives both to Kueue itself.
"""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.features import Gate
from scheduler_plugin.adapters.kube_kueue import CLASS_PATHS, WORKLOADS_PATH
from scheduler_plugin.core.admit.kueue import PRIORITY_BOOST
from scheduler_plugin.settings import Settings
from scheduler_plugin.webhook import per_gpu
from scheduler_plugin.webhook.amounts import HAMI, Options, PerGpu
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.templates import EACH, KINDS, TemplateKind
from tests.rendering import DEPLOY

FOLDER = DEPLOY / "kueue"
RESOURCES = yaml.safe_load((FOLDER / "configuration.yaml").read_text())["resources"]
QUEUES = sorted(set(FOLDER.glob("*.yaml")) - {FOLDER / "configuration.yaml"})
VERSIONS = {"kueue.x-k8s.io": "v1beta2", "scheduling.k8s.io": "v1"}
COUNTED = (contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY)
NORMALISER = Normaliser(Options(lambda _: (81920,), adopt_nvidia_gpu=True))


def counted(limits: dict[str, str]) -> dict[str, Fraction]:
    """What Kueue counts for a container: exclusions first, then transformations. Source: Kueue 0.19.2, pkg/workload/workload.go."""
    prefixes, rules = RESOURCES["excludeResourcePrefixes"], {rule["input"]: rule for rule in RESOURCES["transformations"]}
    kept = {name: units.parse_quantity(amount) for name, amount in limits.items() if not name.startswith(tuple(prefixes))}
    result: dict[str, Fraction] = {}
    for name, amount in kept.items():
        rule = rules.get(name)
        if rule is None:
            result[name] = result.get(name, Fraction(0)) + amount
            continue
        assert rule["strategy"] == "Replace"
        for output, factor in rule["outputs"].items():
            total = amount * kept.get(rule.get("multiplyBy", ""), Fraction(1)) * units.parse_quantity(factor)
            result[output] = result.get(output, Fraction(0)) + total
    return result


def translated(limits: dict[str, str]) -> dict[str, Fraction]:
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}
    outcome = NORMALISER.admit(pod)
    assert not outcome.refusal
    [resources] = [operation["value"] for operation in outcome.patch if operation["path"].endswith("/resources")]
    return {name: units.parse_quantity(amount) for name, amount in resources["limits"].items() if name in COUNTED}


@pytest.mark.parametrize("system", [HAMI, per_gpu.VOLCANO, per_gpu.VOLCANO_SHARING, per_gpu.VGPU_MANAGER], ids=lambda system: system.system)
@pytest.mark.parametrize("number", ["1", "3"])
@pytest.mark.parametrize("with_memory", [True, False])
def test_kueue_counts_what_webhook_makes_of_each_system(system: PerGpu, number: str, with_memory: bool) -> None:
    limits = {system.count: number, **({system.memory: "1000"} if with_memory else {}), **({system.cores: "30"} if system.cores else {})}
    assert counted(limits) == translated(limits)


def test_own_resources_are_counted_as_they_are() -> None:
    assert counted({contract.RESOURCE_VGPU: "2", contract.RESOURCE_VGPU_MEMORY: "4000", contract.RESOURCE_VGPU_CORES: "50"}) == {
        contract.RESOURCE_VGPU: 2,
        contract.RESOURCE_VGPU_MEMORY: 4000,
    }


@pytest.mark.parametrize("name", [HAMI.percent, per_gpu.VOLCANO.percent, contract.RESOURCE_VGPU_MEMORY_PERCENT])
def test_percentage_is_left_under_its_name_so_that_workload_waits(name: str) -> None:
    """A ClusterQueue does not have that resource."""
    assert name in counted({name: "50"})


def test_each_resource_has_one_rule() -> None:
    """Kueue does not start with two for the same input."""
    inputs = [rule["input"] for rule in RESOURCES["transformations"]]
    assert len(set(inputs)) == len(inputs)


@pytest.mark.parametrize("path", QUEUES, ids=lambda path: path.stem)
def test_queues_name_flavors_cohorts_and_topologies_of_their_file(path: Path) -> None:
    objects: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text()))
    there = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for item in objects:
        spec = item.get("spec", {})
        flavors = [flavor["name"] for group in spec.get("resourceGroups", ()) for flavor in group["flavors"]]
        named = {("ResourceFlavor", flavor) for flavor in flavors}
        named |= {(kind, spec[field]) for field, kind in (("clusterQueue", "ClusterQueue"), ("topologyName", "Topology")) if field in spec}
        named |= {("Cohort", spec["parentName"])} if "parentName" in spec else set()
        assert named <= there


def test_queues_of_manager_name_checks_and_workers_of_their_file() -> None:
    listed = list(yaml.safe_load_all((FOLDER / "multikueue.yaml").read_text()))
    objects = {(item["kind"], item["metadata"]["name"]): item.get("spec", {}) for item in listed}
    checks = [one["name"] for one in objects["ClusterQueue", "all-workers"]["admissionChecksStrategy"]["admissionChecks"]]
    configs = [objects["AdmissionCheck", check]["parameters"]["name"] for check in checks]
    workers = [worker for config in configs for worker in objects["MultiKueueConfig", config]["clusters"]]
    assert {("MultiKueueCluster", worker) for worker in workers} <= objects.keys()
    teams = {item["metadata"]["name"] for item in yaml.safe_load_all((FOLDER / "cohort.yaml").read_text()) if item["kind"] == "LocalQueue"}
    assert {name for kind, name in objects if kind == "LocalQueue"} <= teams, "the workers have a LocalQueue of the same name"


# --- the longest wait ---------------------------------------------------------------------------------------------------------

MAX_WAIT = DEPLOY / "daemonset/components/kueue-max-wait"


def test_component_for_longest_waits_opens_its_gate_and_reads_what_it_watches() -> None:
    [patch] = yaml.safe_load((MAX_WAIT / "kustomization.yaml").read_text())["patches"]
    [step] = yaml.safe_load(patch["patch"])
    environ = {step["value"]["name"]: step["value"]["value"]}
    assert Settings.load(["--webhook-address="], environ).gates.opened == {Gate.MAX_WAIT}
    role = next(yaml.safe_load_all((MAX_WAIT / "rbac.yaml").read_text()))
    watched = {
        f"/{path}" for rule in role["rules"] if {"list", "watch"} <= set(rule["verbs"])
        for group in rule["apiGroups"] for path in (f"apis/{group}/{VERSIONS[group]}/{plural}" for plural in rule["resources"])
    }  # fmt: skip
    assert watched == {WORKLOADS_PATH, *CLASS_PATHS.values()}
    assert [rule["resources"] for rule in role["rules"] if "patch" in rule["verbs"]] == [["workloads"]]


def test_policy_leaves_scheduler_the_boost_of_a_workload() -> None:
    policy, binding = yaml.safe_load_all((MAX_WAIT / "policy.yaml").read_text())
    [rule] = policy["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["apiGroups"], rule["operations"], rule["resources"]) == (["kueue.x-k8s.io"], ["UPDATE"], ["workloads"])
    [validation] = policy["spec"]["validations"]
    assert f"name == '{PRIORITY_BOOST}'" in validation["expression"]
    assert "object.spec == oldObject.spec" in validation["expression"]
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}


# --- who may write the hold annotation --------------------------------------------------------------------------------------

POLICY, BINDING = yaml.safe_load_all((DEPLOY / "daemonset/components/kueue/policy.yaml").read_text())
VARIABLES = {one["name"]: " ".join(one["expression"].split()) for one in POLICY["spec"]["variables"]}


def in_cel(path: str) -> str:
    """The expression that reads the templates at a path of ``TemplateKind``."""
    fields, _, rest = path.partition(f"/{EACH}/")
    root = "one" + "".join(f".?{field}" for field in fields.split("/"))
    inner = "".join(f".?{field}" for field in rest.split("/"))
    if not rest:
        return root
    if fields.endswith("ReplicaSpecs"):
        return f"{root}.orValue({{}}).map(name, {root.replace('?', '')}[name]{inner})"
    return f"{root}.orValue([]).map(each, each{inner})"


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind in KINDS for path in kind.paths], ids=lambda one: str(getattr(one, "kind", one))
)
def test_policy_reads_hold_in_templates_of_each_kind(kind: TemplateKind, path: str) -> None:
    assert re.search(rf"[ \[]{re.escape(in_cel(path))}(,|\]| \+|\)$)", VARIABLES["templates"])
    rules = POLICY["spec"]["matchConstraints"]["resourceRules"]
    [rule] = [rule for rule in rules if rule["apiGroups"] == [kind.group] and kind.plural in rule["resources"]]
    assert set(rule["operations"]) == {"CREATE", "UPDATE"}
    assert f"'{kind.group}/{kind.kind}'" in VARIABLES["isOfController"]


def test_policy_reads_hold_at_every_way_to_annotations_of_pods() -> None:
    assigned = next(yaml.safe_load_all((DEPLOY / "daemonset/scheduler/policy.yaml").read_text()))["spec"]["matchConstraints"]
    rules = POLICY["spec"]["matchConstraints"]["resourceRules"]
    assert rules[: len(assigned["resourceRules"])] == assigned["resourceRules"]
    assert f"annotations[?'{contract.ANNOTATION_HOLD}']" in VARIABLES["holds"]
    assert BINDING["spec"] == {"policyName": POLICY["metadata"]["name"], "validationActions": ["Deny"]}
    assert POLICY["spec"]["failurePolicy"] == "Fail"
    assert VARIABLES["ownNamespace"] == "request.?namespace.orValue('')", "an object of the whole cluster has none"


def test_policy_allows_exactly_kinds_with_known_templates() -> None:
    named = set(re.findall(r"'([a-z.0-9-]+/[A-Z]\w+)'", VARIABLES["isOfController"]))
    assert named == {f"{kind.group}/{kind.kind}" for kind in KINDS}
    assert all(f"{kind.kind.lower()}s" == kind.plural for kind in KINDS), "the policy makes the resource's name of the kind"
