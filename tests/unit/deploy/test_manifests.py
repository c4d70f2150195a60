# SPDX-License-Identifier: Apache-2.0
"""The manifests say what the code means: names, ports, settings and rights that both sides must agree on.

That an API server takes them, and that they work, is for tests/e2e to show.
"""

import copy
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.adapters.nvml.limits import LIMIT_RIGHTS
from agent.adapters.nvml.mig_rights import MIG_RIGHTS
from agent.core.audit import MAPS_RIGHTS
from agent.mps.settings import Settings as MpsSettings
from agent.settings import Placement
from agent.settings import Settings as AgentSettings
from aliquot import contract
from aliquot.contract.features import Gate
from aliquot.process.settings import split_address
from scheduler_plugin.settings import Settings as SchedulerSettings
from scheduler_plugin.webhook import per_gpu, vocabularies
from scheduler_plugin.webhook.amounts import HAMI, NATIVE, Options
from scheduler_plugin.webhook.draft import Draft
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.owner_groups import OWNERS
from scheduler_plugin.webhook.pod_groups import POD_GROUPS
from scheduler_plugin.webhook.review import Reviews
from scheduler_plugin.webhook.templates import KINDS
from tests.unit.deploy.templates_condition import templates_condition

ROOT = Path(__file__).parents[3]
DAEMONSET = ROOT / "deploy/daemonset"
MANIFESTS = sorted(path for part in ("base", "scheduler") for path in (DAEMONSET / part).glob("*.yaml"))
CONDITIONS_OF_ALL_GPU_PODS = "components/adopt-nvidia-gpu/kustomization.yaml"


def objects() -> list[dict[str, Any]]:
    """Every Kubernetes object of the default installation."""
    documents = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]
    return [document for document in documents if "metadata" in document]


def the(kind: str, name: str) -> dict[str, Any]:
    [found] = [item for item in objects() if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def pod_specs() -> list[dict[str, Any]]:
    return [item["spec"]["template"]["spec"] for item in objects() if "template" in item.get("spec", {})]


def containers() -> list[dict[str, Any]]:
    return [container for spec in pod_specs() for container in spec["containers"]]


def container(name: str) -> dict[str, Any]:
    [found] = [candidate for candidate in containers() if candidate["name"] == name]
    return found


# --- settings and ports -------------------------------------------------------------------------------------------


def test_agent_settings_files_state_placement() -> None:
    default = AgentSettings.load(["--config", str(DAEMONSET / "base/config.yaml")], {})
    alone = AgentSettings.load(["--config", str(DAEMONSET / "overlays/local-placement/config.yaml")], {})
    assert (default.placement, alone.placement) == (Placement.ASSIGNED, Placement.LOCAL)


def test_scheduler_settings_file_is_read_and_leaves_election_to_kube_scheduler() -> None:
    settings = SchedulerSettings.load(["--config", str(DAEMONSET / "scheduler/config.yaml")], {})
    assert settings.lease_name == ""
    assert settings.scheduler_name == kube_scheduler()["profiles"][0]["schedulerName"]


@pytest.mark.parametrize(("name", "settings"), [("agent", AgentSettings), ("extender", SchedulerSettings)])
def test_every_environment_entry_of_ours_is_a_setting(name: str, settings: Any) -> None:
    known = {f"ALIQUOT_{field.upper()}" for field in settings.__dataclass_fields__} | {"ALIQUOT_CONFIG", "ALIQUOT_SCHEDULER_CONFIG"}
    assert {entry["name"] for entry in container(name)["env"] if entry["name"].startswith("ALIQUOT_")} <= known


def test_agent_knows_its_pod_address() -> None:
    [entry] = [entry for entry in container("agent")["env"] if entry["name"] == "ALIQUOT_POD_IP"]
    assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_ports_are_where_the_programs_listen() -> None:
    ports = {(c["name"], port["name"]): port["containerPort"] for c in containers() for port in c["ports"]}
    scheduler, agent = SchedulerSettings(), AgentSettings()
    assert ports["agent", "metrics"] == split_address("", agent.metrics_address)[1]
    assert ports["extender", "webhook"] == split_address("", scheduler.webhook_address)[1]
    assert ports["extender", "metrics"] == split_address("", scheduler.metrics_address)[1]


def kube_scheduler() -> dict[str, Any]:
    return yaml.safe_load((DAEMONSET / "scheduler/kube-scheduler.yaml").read_text())


def test_kube_scheduler_calls_extender_on_loopback_and_requires_it() -> None:
    [extender] = kube_scheduler()["extenders"]
    assert extender["urlPrefix"] == f"http://{SchedulerSettings().extender_address}"
    assert extender["ignorable"] is False
    assert extender["nodeCacheCapable"] is True
    assert {extender[f"{verb}Verb"] for verb in ("filter", "prioritize", "preempt", "bind")} == {"filter", "prioritize", "preempt", "bind"}


def test_gpu_pods_name_the_scheduler_that_is_rolled_out() -> None:
    assert [profile["schedulerName"] for profile in kube_scheduler()["profiles"]] == [contract.SCHEDULER_NAME]


def test_the_agents_directories_are_the_nodes_own() -> None:
    mounts = {mount["mountPath"] for mount in container("agent")["volumeMounts"]}
    [spec] = [spec for spec in pod_specs() if spec["serviceAccountName"] == "aliquot-agent"]
    on_node = {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    wanted = {
        contract.KUBELET_DEVICE_PLUGIN_DIR,
        contract.CDI_DYNAMIC_DIR,
        contract.CDI_STATIC_DIR,
        contract.STATE_DIR,
        contract.RUNTIME_DIR,
    }
    assert wanted <= mounts
    assert wanted <= on_node


def test_one_lost_node_does_not_delay_agents_of_large_cluster() -> None:
    rolling = the("DaemonSet", "aliquot-agent")["spec"]["updateStrategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": "5%", "maxSurge": 0}


def test_agent_requests_all_gpus_by_variable_and_by_mount() -> None:
    """A toolkit that takes no variable from unprivileged containers takes mounts of /dev/null; `aliquot doctor` advises to set it so."""
    agent = container("agent")
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in agent["env"]
    [mount] = [mount for mount in agent["volumeMounts"] if mount["mountPath"] == f"{contract.NVIDIA_DEVICES_DIR}/all"]
    [spec] = [spec for spec in pod_specs() if spec["serviceAccountName"] == "aliquot-agent"]
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == mount["name"]]
    assert volume["hostPath"] == {"path": contract.NVIDIA_DEVICES_SOURCE, "type": "CharDevice"}


OPERATOR_LABELS = {
    "nvidia.com/gpu.present": "true",
    **dict.fromkeys(
        (f"nvidia.com/gpu.deploy.{part}" for part in ("driver", "container-toolkit", "operator-validator", "gpu-feature-discovery")), "true"
    ),
    "nvidia.com/gpu.deploy.device-plugin": "false",
}
"""Of a node that the GPU Operator serves, after the command that gives it to Aliquot. Source: gpu-operator 25.10, state_manager.go."""


def paused(labels: dict[str, str]) -> dict[str, str]:
    """The labels that k8s-driver-manager writes before it unloads the driver: "true" is paused, but not on the driver's own.

    Source: k8s-driver-manager 0.9 to 0.12, evictAllGPUOperatorComponents and maybeSetPaused.
    """
    kept = {"nvidia.com/gpu.present", "nvidia.com/gpu.deploy.driver"}
    return {key: "paused-for-driver-upgrade" if value == "true" and key not in kept else value for key, value in labels.items()}


def selected(terms: list[dict[str, Any]], labels: dict[str, str]) -> bool:
    """Whether a node's labels meet one of the terms, which use no operators but In and NotIn."""
    expressions = [term["matchExpressions"] for term in terms]
    assert {one["operator"] for term in expressions for one in term} <= {"In", "NotIn"}
    return any(all((labels.get(one["key"]) in one["values"]) == (one["operator"] == "In") for one in term) for term in expressions)


def test_agent_leaves_node_before_gpu_operator_unloads_driver() -> None:
    [patch] = yaml.safe_load((DAEMONSET / "overlays/gpu-operator/kustomization.yaml").read_text())["patches"]
    [operation] = yaml.safe_load(patch["patch"])
    assert selected(operation["value"], OPERATOR_LABELS)
    assert not selected(operation["value"], paused(OPERATOR_LABELS))
    without_toolkit = {key: value for key, value in OPERATOR_LABELS.items() if not key.endswith("container-toolkit")}
    assert selected(operation["value"], without_toolkit), "an administrator installed the toolkit, and keeps the Operator's away"
    assert selected(operation["value"], OPERATOR_LABELS | {"nvidia.com/gpu.deploy.container-toolkit": "false"})
    assert not selected(operation["value"], OPERATOR_LABELS | {"nvidia.com/gpu.deploy.device-plugin": "true"}), "not a node of ours"


# --- admission ----------------------------------------------------------------------------------------------------


def conditions(text: str) -> tuple[set[str], set[str]]:
    """Prefixes and whole names that an expression looks for."""
    prefixes = set(re.findall(r"startsWith\('([^']+)'\)", text))
    lists = re.findall(r"in \[([^\]]+)\]", text)
    return prefixes, {name for names in lists for name in re.findall(r"'([^']+)'", names)}


CEL_TO_PYTHON = {
    "||": "or",
    "&&": "and",
    "!r.": "not r.",
    "!('": "not ('",
    "startsWith": "startswith",
    "endsWith": "endswith",
    "contains": "__contains__",
}


def asked_about(name: str, expression: str, amount: str = "1") -> bool:
    """Whether a webhook's condition holds for a pod that has a resource, in this amount, or an annotation of this name.

    What it requires of one name is Python except for the operators; tests/e2e shows that it is CEL.
    """
    if asked_about_limits({name: amount}, expression):
        return True
    return "exists(a," in expression and eval(body_of(expression, "a"), {"a": name})


def asked_about_limits(limits: dict[str, str], expression: str) -> bool:
    """Whether a webhook's condition holds for a pod with a container that has these limits."""
    body = body_of(expression, "r")
    return any(eval(body, {"r": name, "amounts": limits}) for name in limits)


def body_of(expression: str, variable: str) -> str:
    """The second argument of the exists() over this variable, in Python."""
    text, depth = " ".join(expression.partition(f"exists({variable},")[2].split()), 0
    for end, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            return re.sub("|".join(map(re.escape, CEL_TO_PYTHON)), lambda found: CEL_TO_PYTHON[found[0]], text[:end])
    raise AssertionError(f"no end of exists({variable}, in {text}")


def condition_of(kind: str) -> str:
    """The condition that finds GPU pods; all webhooks for pods have it."""
    [expression] = {one["matchConditions"][0]["expression"] for one in the(kind, "aliquot")["webhooks"] if "templates" not in one["name"]}
    return str(expression)


AMOUNTS = tuple(name for name in contract.RESOURCES_OF_VGPUS if name != contract.RESOURCE_VGPU)
OURS = (*NATIVE, f"{contract.RESOURCE_MIG_PREFIX}1g.10gb")
FOREIGN = (
    *HAMI.amounts,
    HAMI.priority,
    *per_gpu.VOLCANO.names,
    *per_gpu.VOLCANO_SHARING.names,
    per_gpu.VGPU_MANAGER.count,
    vocabularies.KAI_FRACTION,
    vocabularies.KAI_MEMORY,
    vocabularies.KAI_FRACTION_LIMIT,
    vocabularies.KAI_MEMORY_LIMIT,
    "kai.scheduler/container.main.gpu-memory.portion.limit",
    "nvidia.com/container.main.gpu-memory.request",
)


@pytest.mark.parametrize("name", [*OURS, *FOREIGN])
def test_api_server_sends_pods_of_every_translated_vocabulary(name: str) -> None:
    assert asked_about(name, condition_of("MutatingWebhookConfiguration"))


@pytest.mark.parametrize("name", OURS)
def test_translated_requests_are_validated(name: str) -> None:
    assert asked_about(name, condition_of("ValidatingWebhookConfiguration"))


REPLICA_OF_AN_INSTANCE = f"{contract.RESOURCE_MIG_PREFIX}1g.10gb.shared"


@pytest.mark.parametrize("name", [*HAMI.amounts, HAMI.priority, *per_gpu.VOLCANO.names])
def test_pod_with_zero_of_others_resources_does_not_wait_for_webhook(name: str) -> None:
    assert not asked_about(name, condition_of("MutatingWebhookConfiguration"), amount="0")


def test_hami_resources_reach_webhook_next_to_any_others() -> None:
    """Memory or cores missing next to a GPU mean the default: templates write it so."""
    condition, options = condition_of("MutatingWebhookConfiguration"), Options(lambda _: ())
    names, reached = HAMI.names, 0
    for amounts in itertools.product((None, "0", "1"), repeat=len(names)):
        limits = {name: amount for name, amount in zip(names, amounts, strict=True) if amount is not None}
        pod = {"metadata": {}, "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]}}
        asked, foreign = asked_about_limits(limits, condition), vocabularies.is_foreign(Draft(pod), options)
        assert asked or not foreign, limits
        assert not asked or "1" in limits.values(), limits
        reached += foreign
    assert reached


@pytest.mark.parametrize("name", ["cpu", "memory", "amd.com/gpu", "hugepages-2Mi", per_gpu.NVIDIA_GPU, REPLICA_OF_AN_INSTANCE])
def test_other_pods_never_wait_for_the_webhook(name: str) -> None:
    assert not asked_about(name, condition_of("MutatingWebhookConfiguration"))
    assert not asked_about(name, condition_of("ValidatingWebhookConfiguration"))


def test_adopted_plain_gpus_are_sent_to_webhook() -> None:
    adopting = (DAEMONSET / CONDITIONS_OF_ALL_GPU_PODS).read_text()
    assert all(asked_about(name, adopting) for name in (*OURS, *FOREIGN, per_gpu.NVIDIA_GPU, per_gpu.NVIDIA_SHARED))


@pytest.mark.parametrize("name", [*HAMI.names, *per_gpu.VOLCANO.names, per_gpu.NVIDIA_SHARED])
def test_with_adopted_plain_gpus_pod_without_any_skips_webhook(name: str) -> None:
    assert not asked_about(name, (DAEMONSET / CONDITIONS_OF_ALL_GPU_PODS).read_text(), amount="0")


@pytest.mark.parametrize(
    "name",
    [REPLICA_OF_AN_INSTANCE, "nvidia.com/hostdev", "nvidia.com/rdma_shared_device_a", "nvidia.com/cx7_sriov", "nvidia.com/gpu-other"],
)
def test_with_adopted_plain_gpus_other_nvidia_resources_skip_webhook(name: str) -> None:
    assert not asked_about(name, (DAEMONSET / CONDITIONS_OF_ALL_GPU_PODS).read_text())


@pytest.mark.parametrize("kind", ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"])
def test_gpu_pods_fail_closed(kind: str) -> None:
    """A dry run decides nothing."""
    found = {webhook["name"]: webhook["failurePolicy"] for webhook in the(kind, "aliquot")["webhooks"]}
    assert {name for name, policy in found.items() if policy != "Fail"} <= {"dry-run.aliquot.dev"}


@pytest.mark.parametrize("kind", ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"])
def test_all_webhooks_ignore_namespaces_of_others(kind: str) -> None:
    """NotIn also holds for namespaces without the label."""
    for webhook in the(kind, "aliquot")["webhooks"]:
        first = webhook["namespaceSelector"]["matchExpressions"][0]
        assert first == {"key": contract.LABEL_WEBHOOK, "operator": "NotIn", "values": ["ignore"]}


def templates_webhooks() -> list[dict[str, Any]]:
    return [webhook for webhook in the("MutatingWebhookConfiguration", "aliquot")["webhooks"] if "templates" in webhook["name"]]


def test_api_server_sends_every_kind_with_pod_templates() -> None:
    rules = [webhook["rules"] for webhook in templates_webhooks()]
    kinds = {(kind.group, kind.plural) for kind in KINDS}
    sent = [{(rule["apiGroups"][0], name) for rule in some for name in rule["resources"]} for some in rules]
    assert sent == [kinds, kinds - {("trainer.kubeflow.org", "clustertrainingruntimes")}], "the latter are in no adopted namespace"
    assert all((rule["apiVersions"], rule["operations"]) == (["*"], ["CREATE", "UPDATE"]) for some in rules for rule in some)


def test_condition_for_templates_is_that_for_pods() -> None:
    """Made from it and from the table of kinds."""
    [here, adopted] = ([condition["expression"] for condition in webhook["matchConditions"]] for webhook in templates_webhooks())
    controller, changed, asks, for_us = here
    assert adopted == here[:3]
    of_pods = the("MutatingWebhookConfiguration", "aliquot")["webhooks"][0]["matchConditions"]
    made = [templates_condition(condition["expression"]) for condition in of_pods]
    assert [" ".join(text.split()) for text in (asks, for_us)] == made
    assert {f"request.kind.kind == '{kind.kind}'" in controller for kind in KINDS if kind.controlled} == {True}
    assert changed == "request.operation == 'CREATE' || object.?spec != oldObject.?spec"


def test_condition_for_adopted_templates_is_that_for_adopted_pods() -> None:
    patches = yaml.safe_load((DAEMONSET / CONDITIONS_OF_ALL_GPU_PODS).read_text())["patches"]
    [patch] = [patch for patch in patches if patch["target"]["kind"] == "MutatingWebhookConfiguration"]
    pods, *same, templates, of_adopted = (operation["value"] for operation in yaml.safe_load(patch["patch"]))
    assert set(same) == {pods}
    assert of_adopted == templates
    assert " ".join(templates.split()) == templates_condition(pods)


def test_the_reserved_annotation_is_the_one_of_the_contract() -> None:
    variables = the("ValidatingAdmissionPolicy", "aliquot-assignment-reserved")["spec"]["variables"]
    assert sum(contract.ANNOTATION_ASSIGNMENT in variable["expression"] for variable in variables) == 2


def test_isolation_policy_covers_every_write_to_existing_pods() -> None:
    """Every way to an annotation of a pod that is there; what it is created with is its user's to say."""

    def doors(name: str) -> set[tuple[str, str]]:
        rules = the("ValidatingAdmissionPolicy", name)["spec"]["matchConstraints"]["resourceRules"]
        return {(operation, resource) for rule in rules for operation in rule["operations"] for resource in rule["resources"]}

    reserved = doors("aliquot-assignment-reserved")
    existing = {(operation, resource) for operation, resource in reserved if operation == "UPDATE" or "binding" in resource}
    assert doors("aliquot-isolation-kept") == existing
    _, variables, validations = policy("aliquot-isolation-kept")
    assert all(f"annotations['{contract.ANNOTATION_ISOLATION}']" in variables[name] for name in ("found", "before"))
    assert "oldObject.metadata" in variables["before"]
    assert validations == "variables.found == variables.before"


def policy(name: str) -> tuple[set[str], dict[str, str], str]:
    """Return a policy's resources, its variables and its validations as one text."""
    spec = the("ValidatingAdmissionPolicy", name)["spec"]
    resources = {resource for rule in spec["matchConstraints"]["resourceRules"] for resource in rule["resources"]}
    variables = {variable["name"]: variable["expression"] for variable in spec["variables"]}
    return resources, variables, " ".join(validation["expression"] for validation in spec["validations"])


def left_alone(fields: str, before: str, apart: str) -> str:
    """The text by which a policy refuses a change of any field but those ``apart``."""
    now, then = f"variables.{fields}", f"variables.{before}"
    return (
        f"{now}.all(field, field in variables.{apart} || (field in {then} && {now}[field] == {then}[field])) "
        f"&& {then}.all(field, field in variables.{apart} || field in {now})"
    )


def test_the_agent_may_change_capacity_and_conditions_of_its_node_only() -> None:
    resources, variables, validations = policy("aliquot-agent-own-node")
    assert resources == {"nodes/status"}
    assert left_alone("status", "oldStatus", "checkedByName") in validations
    assert variables["checkedByName"] == "['capacity', 'conditions']"
    assert left_alone("metadata", "oldMetadata", "written") in validations
    assert variables["written"] == "['managedFields', 'resourceVersion']"
    assert variables["ours"] == str(list(AMOUNTS))
    assert f"c.type != '{contract.NODE_CONDITION_GPUS_HEALTHY}'" in validations


def test_the_scheduler_may_change_its_own_two_annotations_and_gate_only() -> None:
    resources, variables, validations = policy("aliquot-scheduler-retry-only")
    assert resources == {"pods", "pods/status"}, "who writes the status may write metadata with it"
    assert left_alone("metadata", "oldMetadata", "apart") in validations
    assert variables["apart"] == "['annotations', 'managedFields', 'resourceVersion', 'generation']"
    assert f"name in ['{contract.ANNOTATION_RETRY}', '{contract.ANNOTATION_CONSOLIDATION}']" in validations
    only_gates = left_alone("spec", "oldSpec", "only").replace("field in variables.only", "field == 'schedulingGates'")
    opened = f"variables.oldGates.filter(gate, gate != '{contract.PLANNED}') == variables.gates"
    assert f"object.spec == oldObject.spec || ({opened}" in validations
    assert only_gates in validations


def test_only_the_scheduler_writes_what_it_moves() -> None:
    _, variables, validations = policy("aliquot-assignment-reserved")
    assert f"annotations['{contract.ANNOTATION_CONSOLIDATION}']" in variables["moves"]
    assert "variables.moves == variables.movesBefore || request.userInfo.username == " in validations


def test_amounts_without_kubelet_counted_resource_are_refused_everywhere() -> None:
    resources, variables, validations = policy("aliquot-amounts-of-vgpus")
    assert resources == {"pods"}
    assert "namespaceSelector" not in the("ValidatingAdmissionPolicy", "aliquot-amounts-of-vgpus")["spec"]["matchConstraints"]
    _, asking = conditions(variables["requesting"])
    assert asking == set(AMOUNTS)
    assert "object.spec.containers" in variables["requesting"]
    assert "initContainers" in variables["requesting"]
    assert f"limits[?'{contract.RESOURCE_VGPU}']" in variables["bare"]
    assert f"limits[?'{contract.RESOURCE_VGPU_MEMORY}']" in variables["vast"]
    assert validations == "variables.bare.size() == 0 variables.vast.size() == 0"


def test_amounts_in_quotas_and_limit_ranges_are_checked_everywhere() -> None:
    resources, variables, validations = policy("aliquot-amounts-of-quotas")
    assert resources == {"resourcequotas", "limitranges"}, "not their status, which the controller writes"
    for amounts, limits, spec in (("found", "limits", "spec"), ("before", "oldLimits", "oldSpec")):
        assert f"variables.{spec}.?hard" in variables[amounts]
        assert f"endsWith('{contract.RESOURCE_VGPU_MEMORY}')" in variables[amounts]
        looked_at = re.findall(rf"variables\.{limits}\.map\(l, l\[\?'(\w+)'\]\[\?'{contract.RESOURCE_VGPU_MEMORY}'\]", variables[amounts])
        assert looked_at == ["max", "min", "default", "defaultRequest"]
    assert "!(a in variables.before)" in variables["mistaken"]
    assert validations == "variables.mistaken.size() == 0"


def test_small_installation_has_policies_in_place_of_webhook() -> None:
    kustomization = yaml.safe_load((DAEMONSET / "overlays/local-placement/kustomization.yaml").read_text())
    assert kustomization["resources"] == ["../../base"]
    policies = [item["metadata"]["name"] for item in yaml.safe_load_all((DAEMONSET / "base/policy.yaml").read_text())]
    assert {"aliquot-amounts-of-vgpus", "aliquot-amounts-of-quotas", "aliquot-isolation-kept"} <= set(policies)


def test_policy_of_claims_parameters_judges_only_written_specs() -> None:
    policies = yaml.safe_load_all((DAEMONSET / "components/dra/policy.yaml").read_text())
    (spec,) = [
        item["spec"] for item in policies if item["kind"].endswith("Policy") and item["metadata"]["name"] == "aliquot-claim-parameters"
    ]
    assert spec["matchConstraints"]["resourceRules"][0]["operations"] == ["CREATE", "UPDATE"]
    (condition,) = spec["matchConditions"]
    assert condition["expression"] == "request.operation == 'CREATE' || dyn(object).spec != dyn(oldObject).spec"


def test_every_admission_policy_is_bound_and_denies() -> None:
    policies = {item["metadata"]["name"] for item in objects() if item["kind"] == "ValidatingAdmissionPolicy"}
    bound = {
        item["spec"]["policyName"]: item["spec"]["validationActions"]
        for item in objects()
        if item["kind"] == "ValidatingAdmissionPolicyBinding"
    }
    assert bound == {policy: ["Deny"] for policy in policies}


# --- rights -------------------------------------------------------------------------------------------------------


def rules() -> list[Any]:
    return [
        pytest.param(rule, id=f"{item['metadata']['name']}: {' '.join(rule['resources'])}")
        for item in objects()
        if item["kind"] in ("Role", "ClusterRole")
        for rule in item["rules"]
    ]


@pytest.mark.parametrize("rule", rules())
def test_no_rule_has_wildcard_or_escalates_rights(rule: dict[str, Any]) -> None:
    everything = {*rule["verbs"], *rule["resources"], *rule["apiGroups"]}
    assert not everything & {"*", "escalate", "impersonate", "pods/exec", "nodes/proxy", "serviceaccounts/token"}
    assert "bind" not in rule["verbs"]


def test_secrets_are_read_by_name_only() -> None:
    on_secrets = [param.values[0] for param in rules() if "secrets" in param.values[0]["resources"]]
    assert all(rule.get("resourceNames") or rule["verbs"] == ["create"] for rule in on_secrets)


FOR_PEOPLE = ("aliquot-user", "aliquot-operator")


def test_installation_binds_user_roles_to_no_subject() -> None:
    assert {item["metadata"]["name"] for item in objects() if item["kind"] in ("Role", "ClusterRole")} >= set(FOR_PEOPLE)
    assert not {item["roleRef"]["name"] for item in objects() if "roleRef" in item} & set(FOR_PEOPLE)


def test_pod_proxy_is_allowed_in_our_namespace_only() -> None:
    opening = {
        (item["kind"], item["metadata"]["name"])
        for item in objects()
        for rule in item.get("rules", [])
        if "pods/proxy" in rule["resources"]
    }
    assert opening == {("Role", "aliquot-user")}


def test_users_may_only_patch_gpunodes() -> None:
    of_people = [rule for item in objects() if item["metadata"]["name"] in FOR_PEOPLE for rule in item["rules"]]
    changes = {(verb, resource) for rule in of_people for verb in rule["verbs"] for resource in rule["resources"]}
    assert {change for change in changes if change[0] not in ("get", "list", "watch")} == {("patch", "gpunodes")}


@pytest.mark.parametrize("name", ["agent", "kube-scheduler", "extender"])
def test_containers_are_confined(name: str) -> None:
    context = container(name)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    assert "privileged" not in context


def test_scheduler_and_webhook_are_not_root() -> None:
    [spec] = [spec for spec in pod_specs() if spec["serviceAccountName"] == "aliquot-scheduler"]
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_every_container_has_probes_requests_and_a_pinned_image() -> None:
    for candidate in containers():
        assert {"livenessProbe", "readinessProbe", "resources"} <= candidate.keys(), candidate["name"]
        assert re.fullmatch(r"[^:@]+:v?\d+\.\d+\.\d+", candidate["image"]), candidate["image"]


# --- components ---------------------------------------------------------------------------------------------------


def with_component(name: str, daemonset: dict[str, Any] | None = None) -> dict[str, Any]:
    """The agent's DaemonSet, or another, with the patches of a component, as RFC 6902 has them: what is replaced must be there."""
    agent = copy.deepcopy(daemonset or the("DaemonSet", "aliquot-agent"))
    component = yaml.safe_load((DAEMONSET / f"components/{name}/kustomization.yaml").read_text())
    for patch in component["patches"]:
        assert patch["target"]["name"] in ("aliquot-agent", "aliquot-mps")
        if patch["target"] != {"kind": "DaemonSet", "name": agent["metadata"]["name"]}:
            continue
        for step in yaml.safe_load(patch["patch"]):
            *parents, last = step["path"].strip("/").split("/")
            place: Any = agent
            for word in parents:
                place = place[int(word)] if isinstance(place, list) else place[word]
            if last == "-":
                place.append(step["value"])
            else:
                assert step["op"] == "add" or last in place, step["path"]
                assert step["op"] != "add" or last not in place or daemonset is not None, step["path"]
                if step["op"] == "remove":
                    del place[last]
                else:
                    place[last] = step["value"]
    return agent


def supervisor(of: dict[str, Any] | None = None) -> dict[str, Any]:
    """The DaemonSet that the component mps adds to this one of the agent. That kustomize copies so, test_chart.py shows."""
    [added] = yaml.safe_load_all((DAEMONSET / "components/mps/supervisor/daemonset.yaml").read_text())
    added["spec"]["template"]["spec"] = (of or the("DaemonSet", "aliquot-agent"))["spec"]["template"]["spec"]
    return with_component("mps", added)


CAPABILITIES = {
    "mig": ["SYS_ADMIN"],
    "audit-shim": ["SYS_PTRACE"],
    "audit-kill": ["KILL"],
    "host-cdi": ["SYS_CHROOT"],
}
"""What each component lets the agent do; the others add nothing."""
OF_THE_AGENT = sorted(
    path.parent.name
    for path in DAEMONSET.glob("components/*/kustomization.yaml")
    if re.search(r"DaemonSet, name: aliquot-agent}\n    patch: \|\n(?: {6}.*\n)*? {6}.*capabilities", path.read_text())
)


def test_agent_has_capabilities_only_by_component() -> None:
    assert container("agent")["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": []}
    assert sorted(CAPABILITIES) == OF_THE_AGENT


@pytest.mark.parametrize(("name", "wanted"), CAPABILITIES.items())
def test_a_component_adds_the_capabilities_that_its_comment_explains(name: str, wanted: list[str]) -> None:
    [agent] = with_component(name)["spec"]["template"]["spec"]["containers"]
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": wanted}
    comment = (DAEMONSET / f"components/{name}/kustomization.yaml").read_text().partition("apiVersion:")[0]
    assert all(re.search(rf"\b{capability}\b", comment) for capability in wanted)


def test_cures_that_name_component_name_one_that_provides_it() -> None:
    for cure, capability in ((MIG_RIGHTS, "SYS_ADMIN"), (LIMIT_RIGHTS, "SYS_ADMIN"), (MAPS_RIGHTS, "SYS_PTRACE")):
        assert f"capability {capability}" in cure
        [name] = re.findall(r"deploy/daemonset/components/([a-z-]+)", cure)
        assert CAPABILITIES[name] == [capability]


def test_the_mps_component_only_opens_a_gate_of_the_agent() -> None:
    changed = with_component("mps")
    gate = {"name": "ALIQUOT_FEATURE_GATES_MPS", "value": "MpsIsolation=true"}
    changed["spec"]["template"]["spec"]["containers"][0]["env"].remove(gate)
    assert changed == the("DaemonSet", "aliquot-agent")


@pytest.mark.parametrize(
    ("component", "gates"),
    [
        ("driver-limits", {Gate.DRIVER_ISOLATION}),
        ("mig", {Gate.DYNAMIC_MIG}),
        ("mps", {Gate.MPS_ISOLATION}),
        ("simulated", set(Gate)),
        ("audit-kill", set()),
    ],
)
def test_component_opens_the_gates_of_its_alpha_features(component: str, gates: set[Gate]) -> None:
    [agent] = with_component(component)["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in agent["env"] if entry["name"].startswith("ALIQUOT_FEATURE_GATES")}
    assert AgentSettings.load([], environment).gates.opened == gates


def test_mps_component_brings_daemon_and_shared_memory_for_both_sides() -> None:
    spec = supervisor()["spec"]["template"]["spec"]
    [mps] = spec["containers"]
    assert mps["command"] == ["/opt/aliquot/bin/aliquot-mps"]
    env = {entry["name"]: entry.get("value") for entry in mps["env"]}
    assert env == {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    settings = MpsSettings.load([], env)
    [volume] = [mount["name"] for mount in mps["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    on_node = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"]}
    assert on_node[volume] == f"{settings.runtime_dir}/mps-shm"
    [runtime] = [mount for mount in mps["volumeMounts"] if mount["mountPath"] == settings.runtime_dir]
    assert on_node[runtime["name"]] == settings.runtime_dir
    assert settings.runtime_dir == AgentSettings().runtime_dir
    assert (spec["hostPID"], "hostIPC" in spec) == (True, False)
    assert mps["resources"]["limits"]["memory"] == "4Gi", "eight servers"


def test_aliquot_mps_outlives_agent_and_is_only_ended_by_hand() -> None:
    added = supervisor()
    assert added["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert added["spec"]["selector"]["matchLabels"] == added["spec"]["template"]["metadata"]["labels"]
    assert added["spec"]["selector"] != the("DaemonSet", "aliquot-agent")["spec"]["selector"]
    [mps] = added["spec"]["template"]["spec"]["containers"]
    assert not {name for name in mps if name.endswith("Probe")}


def test_aliquot_mps_has_the_rights_that_its_comment_explains_and_no_more() -> None:
    spec = supervisor(of=with_component("simulated", with_component("mig")))["spec"]["template"]["spec"]
    [mps] = spec["containers"]
    wanted = ["SETUID", "SETGID", "KILL"]
    assert mps["securityContext"] == {**container("agent")["securityContext"], "capabilities": {"drop": ["ALL"], "add": wanted}}
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"], spec["initContainers"]) == ("default", False, [])
    mounted = {mount["name"] for mount in mps["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]} == {"runtime", "mps-shared-memory", "all-gpus"}
    comment = (DAEMONSET / "components/mps/kustomization.yaml").read_text().partition("apiVersion:")[0]
    assert all(re.search(rf"\b{capability}\b", comment) for capability in wanted)


@pytest.mark.parametrize("name", ["nvidia-runtime-class", "selinux"])
@pytest.mark.parametrize("first", [True, False])
def test_aliquot_mps_runs_beside_agent_with_same_driver_access(name: str, first: bool) -> None:
    agent = with_component(name)["spec"]["template"]["spec"]
    found = (supervisor(of=with_component(name)) if first else with_component(name, supervisor()))["spec"]["template"]["spec"]
    for key in ("affinity", "tolerations", "priorityClassName", "runtimeClassName"):
        assert found.get(key) == agent.get(key)
    of_both = [spec["containers"][0] for spec in (found, agent)]
    assert len({one["image"] for one in of_both}) == len({str(one["securityContext"].get("seLinuxOptions")) for one in of_both}) == 1


def test_host_cdi_component_mounts_host_program_where_agent_expects_it() -> None:
    spec = with_component("host-cdi")["spec"]["template"]["spec"]
    [agent] = spec["containers"]
    mounts = {mount["mountPath"]: mount for mount in agent["volumeMounts"]}
    assert mounts[f"/usr/bin/{AgentSettings().nvidia_ctk}"]["subPath"] == "nvidia-ctk"
    script = DAEMONSET / "components/host-cdi/nvidia-ctk"
    [root] = set(re.findall(r"chroot (\S+) ", script.read_text()))
    assert mounts[root]["readOnly"] is True
    [volume] = [one for one in spec["volumes"] if one["name"] == mounts[root]["name"]]
    assert volume["hostPath"]["path"] == "/"


OPERATOR_CTK = "usr/local/nvidia/toolkit/nvidia-ctk"
OPERATOR_FOUND = "IS_HOST_DRIVER=false\nNVIDIA_DRIVER_ROOT=/run/nvidia/driver\nDRIVER_ROOT_CTR_PATH=/driver-root\nNVIDIA_DEV_ROOT=/\n"


@pytest.mark.parametrize(
    ("on_the_node", "wanted"),
    [
        pytest.param({}, "nvidia-ctk cdi generate", id="the node's own toolkit"),
        pytest.param({OPERATOR_CTK: "", "run/nvidia/validations/driver-ready": OPERATOR_FOUND},
                     "/usr/local/nvidia/toolkit/nvidia-ctk cdi generate --driver-root=/run/nvidia/driver --dev-root=/ "
                     "--nvidia-cdi-hook-path=/usr/local/nvidia/toolkit/nvidia-cdi-hook", id="the GPU Operator's"),
        pytest.param({OPERATOR_CTK: ""}, "nvidia-ctk cdi generate", id="the GPU Operator's, whose driver is not ready"),
    ],
)  # fmt: skip
def test_host_cdi_component_uses_program_that_matches_driver(tmp_path: Path, on_the_node: dict[str, str], wanted: str) -> None:
    host, programs = tmp_path / "host", tmp_path / "bin"
    for name, text in {"bin/chroot": '#!/bin/sh\necho "$@"\n', **{f"host/{name}": text for name, text in on_the_node.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    script = tmp_path / "nvidia-ctk"
    script.write_text((DAEMONSET / "components/host-cdi/nvidia-ctk").read_text().replace("/host", str(host)))
    done = subprocess.run(
        ["/bin/sh", script, "cdi", "generate"], capture_output=True, text=True, check=True, env={"PATH": f"{programs}:/usr/bin:/bin"}
    )
    assert done.stdout.split() == [str(host), *wanted.split()]


def test_selinux_component_changes_only_label_of_agent_process() -> None:
    [agent] = with_component("selinux")["spec"]["template"]["spec"]["containers"]
    assert agent["securityContext"] == {**container("agent")["securityContext"], "seLinuxOptions": {"type": "spc_t"}}


def test_driver_limits_component_mounts_host_cgroups_at_configured_path() -> None:
    spec = with_component("driver-limits")["spec"]["template"]["spec"]
    [agent] = spec["containers"]
    [hook] = [entry["value"] for entry in agent["env"] if entry["name"] == "ALIQUOT_DRIVER_LIMITS_HOOK"]
    [host] = [entry["value"] for entry in agent["env"] if entry["name"] == "ALIQUOT_HOST_DIR"]
    settings = AgentSettings(driver_limits_hook=hook, host_dir=host)
    assert settings.driver_limits_hook.endswith("/nvidia-cdi-hook")
    [seen] = [mount for mount in agent["volumeMounts"] if mount["mountPath"].startswith(f"{settings.host_dir}/")]
    [path] = [one["hostPath"]["path"] for one in spec["volumes"] if one["name"] == seen["name"]]
    assert seen == {"name": seen["name"], "mountPath": settings.host_dir + path, "readOnly": True}
    assert settings.driver_limits_hook.startswith(f"{path}/")
    [mount] = [mount for mount in agent["volumeMounts"] if mount["mountPath"] == settings.cgroup_dir]
    [path] = [one["hostPath"]["path"] for one in spec["volumes"] if one["name"] == mount["name"]]
    assert path == settings.cgroup_dir
    assert mount["readOnly"] is True


def test_the_mig_component_gives_the_agent_what_it_says_it_needs() -> None:
    [agent] = with_component("mig")["spec"]["template"]["spec"]["containers"]
    needed = dict(re.findall(r"(NVIDIA_MIG_\w+)=(\w+)", MIG_RIGHTS))
    assert needed == {"NVIDIA_MIG_MONITOR_DEVICES": "all", "NVIDIA_MIG_CONFIG_DEVICES": "all"}
    assert needed.items() <= {entry["name"]: entry.get("value") for entry in agent["env"]}.items()
    assert agent["securityContext"]["allowPrivilegeEscalation"] is True  # to Kubernetes SYS_ADMIN is an escalation


def test_the_memory_component_looks_at_gpu_containers_of_namespaces_with_the_label() -> None:
    policy, binding = yaml.safe_load_all((DAEMONSET / "components/require-memory/policy.yaml").read_text())
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert policy["spec"]["matchConstraints"]["namespaceSelector"] == {"matchLabels": {contract.LABEL_VGPU_MEMORY: "required"}}
    [variable] = policy["spec"]["variables"]
    _, asking = conditions(variable["expression"])
    assert asking == set(contract.RESOURCES_OF_VGPUS) - {contract.RESOURCE_VGPU_MEMORY}
    assert f"!('{contract.RESOURCE_VGPU_MEMORY}' in" in variable["expression"]


# --- priority -----------------------------------------------------------------------------------------------------


def test_quota_names_our_priority_classes_and_has_no_limit() -> None:
    quota = the("ResourceQuota", "aliquot-critical-pods")
    assert quota["metadata"]["namespace"] == the("DaemonSet", "aliquot-agent")["metadata"]["namespace"]
    [scope] = quota["spec"]["scopeSelector"]["matchExpressions"]
    assert (scope["scopeName"], scope["operator"]) == ("PriorityClass", "In")
    assert set(scope["values"]) == {spec["priorityClassName"] for spec in pod_specs()}
    assert quota["spec"]["hard"] == {"pods": "1M"}, "of resources it would want every pod to state them"


# --- gangs from owners ------------------------------------------------------------------------------------------------


def test_component_for_gangs_allows_get_of_both_tables_and_no_more() -> None:
    folder = DAEMONSET / "components/gangs-from-owners"
    role, binding = yaml.safe_load_all((folder / "rbac.yaml").read_text())
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get"}
    assert not any("resourceNames" in rule for rule in role["rules"])
    allowed = {(group, plural) for rule in role["rules"] for group in rule["apiGroups"] for plural in rule["resources"]}
    owners = {(row.group, row.plural) for row in OWNERS if row.is_read}
    pod_groups = {(version.partition("/")[0], "podgroups") for api in POD_GROUPS for version in api.api_versions}
    assert allowed == owners | pod_groups | {("", "namespaces")}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == ["aliquot-scheduler"]


def test_component_for_gangs_opens_its_gate_in_the_extender() -> None:
    [patch] = yaml.safe_load((DAEMONSET / "components/gangs-from-owners/kustomization.yaml").read_text())["patches"]
    [step] = yaml.safe_load(patch["patch"])
    containers = the("Deployment", "aliquot-scheduler")["spec"]["template"]["spec"]["containers"]
    assert step["path"] == f"/spec/template/spec/containers/{containers.index(container('extender'))}/env/-"
    environ = {step["value"]["name"]: step["value"]["value"]}
    assert SchedulerSettings.load(["--webhook-address="], environ).gates.opened == {Gate.GANGS_FROM_OWNERS}


# --- kustomizations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(DAEMONSET.rglob("kustomization.yaml")), ids=lambda path: path.parent.name)
def test_kustomization_names_existing_files(path: Path) -> None:
    kustomization = yaml.safe_load(path.read_text())
    files = [name for generator in kustomization.get("configMapGenerator", []) for name in generator["files"]]
    patches = [patch["path"] for patch in kustomization.get("patches", []) if "path" in patch]
    for name in (*kustomization.get("resources", []), *kustomization.get("components", []), *files, *patches):
        assert (path.parent / name).exists(), name


@pytest.mark.parametrize("part", ["base", "scheduler"])
def test_every_manifest_is_in_a_kustomization(part: str) -> None:
    kustomization = yaml.safe_load((DAEMONSET / part / "kustomization.yaml").read_text())
    named = {*kustomization["resources"], *(name for generator in kustomization["configMapGenerator"] for name in generator["files"])}
    assert {path.name for path in (DAEMONSET / part).glob("*.yaml")} - {"kustomization.yaml"} == named


def test_webhooks_that_make_templates_say_so_with_component_for_claims() -> None:
    """They make ResourceClaimTemplates, so a dry run must be reported to them."""
    component = yaml.safe_load((DAEMONSET / "components/dra-translate/kustomization.yaml").read_text())
    [patch] = [one for one in component["patches"] if one["target"]["kind"] == "MutatingWebhookConfiguration"]
    changed = {operation["path"] for operation in yaml.safe_load(patch["patch"])}
    webhooks = the("MutatingWebhookConfiguration", "aliquot")["webhooks"]
    paths = {place: one["clientConfig"]["service"]["path"] for place, one in enumerate(webhooks)}
    admitting = {place for place, path in paths.items() if path in ("/mutate", "/mutate/adopt")}
    assert changed == {f"/webhooks/{place}/sideEffects" for place in admitting}


def test_pods_with_claims_pass_the_webhook_after_their_amounts_became_claims() -> None:
    """The API server calls the webhooks of one configuration in their order."""
    component = yaml.safe_load((DAEMONSET / "components/dra-planned/kustomization.yaml").read_text())
    [patch] = [one for one in component["patches"] if one["target"]["kind"] == "MutatingWebhookConfiguration"]
    [operation] = yaml.safe_load(patch["patch"])
    assert (operation["op"], operation["path"]) == ("add", "/webhooks/-")
    webhook = operation["value"]
    assert webhook["clientConfig"]["service"]["path"] in Reviews(Normaliser(Options(lambda _: set())), lambda _: None).by_path()
    assert webhook["failurePolicy"] == "Fail"


@pytest.mark.parametrize(
    ("name", "is_reviewed"),
    [("nvidia.com/vgpu-20g", True), ("deviceclass.resource.kubernetes.io/a", True), ("cpu", False), ("hugepages-2Mi", False)],
)
def test_webhook_reviews_pods_that_a_class_of_ours_may_serve(name: str, *, is_reviewed: bool) -> None:
    """No pod waits while it is down: it also sees pods with the devices of others."""
    component = yaml.safe_load((DAEMONSET / "components/dra/kustomization.yaml").read_text())
    [patch] = [one for one in component["patches"] if one["target"]["kind"] == "MutatingWebhookConfiguration"]
    [operation] = yaml.safe_load(patch["patch"])
    webhook = operation["value"]
    assert (operation["op"], operation["path"], webhook["failurePolicy"]) == ("add", "/webhooks/-", "Ignore")
    assert webhook["clientConfig"]["service"]["path"] in Reviews(Normaliser(Options(lambda _: set())), lambda _: None).by_path()
    [condition] = webhook["matchConditions"]
    assert condition["expression"].startswith("object.spec.?resourceClaims.orValue([]).size() > 0 ||")
    assert asked_about(name, condition["expression"]) is is_reviewed
