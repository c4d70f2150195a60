# SPDX-License-Identifier: Apache-2.0
"""What the API server lets through: the webhook for GPU pods, the policies for everybody."""

import json
from functools import partial
from typing import Any

import pytest

from aliquot import contract
from tests.e2e.cluster.paths import ROOT
from tests.e2e.conftest import Target, namespace_object, wait_until_pods_are_accepted
from tests.e2e.kubectl import Kubectl, KubectlError, eventually
from tests.e2e.product import AGENT_NAMESPACE, CLIENT_IMAGE, GPU_MEMORY_MIB, MIB, Client, Slice, slice_pod
from tests.e2e.test_cluster import busybox_pod

pytestmark = pytest.mark.usefixtures("product")

SCHEDULER_ACCOUNT = f"system:serviceaccount:{AGENT_NAMESPACE}:aliquot-scheduler"
ASSIGNMENT = contract.ANNOTATION_ASSIGNMENT


def test_memory_alone_is_completed_to_one_gpu_in_whole_mebibytes(kubectl: Kubectl) -> None:
    pod = slice_pod("memory-only", Slice(1024))
    pod["spec"]["containers"][0]["resources"]["limits"] = {contract.RESOURCE_VGPU_MEMORY: "4Gi"}
    kubectl.apply(pod)
    spec = kubectl.get("pod", "memory-only")["spec"]
    assert spec["schedulerName"] == contract.SCHEDULER_NAME
    for amounts in spec["containers"][0]["resources"].values():
        assert amounts == {contract.RESOURCE_VGPU: "1", contract.RESOURCE_VGPU_MEMORY: "4096"}


def test_a_pod_that_says_mebibytes_is_applied_a_second_time(kubectl: Kubectl) -> None:
    pod = slice_pod("again", Slice(1024))
    pod["spec"]["containers"][0]["resources"]["limits"] = {contract.RESOURCE_VGPU_MEMORY: 4000}
    kubectl.apply(pod)
    kubectl.apply(pod)


def test_mig_instance_replica_and_zero_gpus_are_left_alone(kubectl: Kubectl) -> None:
    for name, limits in (("replica", {"nvidia.com/mig-1g.10gb.shared": "1"}), ("none", {"nvidia.com/gpu": "0", "nvidia.com/gpumem": "0"})):
        pod = slice_pod(name, Slice(1))
        pod["spec"]["containers"][0]["resources"]["limits"] = limits
        kubectl.apply(pod)
        spec = kubectl.get("pod", name)["spec"]
        assert (spec["schedulerName"], spec["containers"][0]["resources"]["limits"]) == ("default-scheduler", limits)


@pytest.mark.adopted
def test_hami_gpu_without_memory_amount_gets_all_memory(kubectl: Kubectl) -> None:
    pod = slice_pod("whole", Slice(1))
    pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "0"}
    kubectl.apply(pod)
    spec = kubectl.get("pod", "whole")["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {contract.RESOURCE_VGPU: "1"}


@pytest.mark.adopted
def test_limit_range_adding_nvidia_gpus_to_our_pod_is_named_in_refusal(kubectl: Kubectl) -> None:
    hami = slice_pod("hami", Slice(1))
    hami["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
    assert not outcome_of(kubectl, hami)
    kubectl.apply(limit_range("gpus", [{"type": "Container", "max": {"nvidia.com/gpu": "1"}}]))
    wanted = "comes from a LimitRange of its namespace"

    def is_refused(pod: dict[str, Any]) -> bool:
        return wanted in outcome_of(kubectl, pod)

    for pod in (hami, slice_pod("ours", Slice(1024))):
        eventually(partial(is_refused, pod), "the LimitRange to be heeded")


def test_what_makes_no_sense_is_refused_with_what_to_write_instead(kubectl: Kubectl) -> None:
    refusal = refused(kubectl, slice_pod("nonsense", Slice(1024, cores=250)))
    assert contract.RESOURCE_VGPU_CORES in refusal
    assert "250" in refusal


def test_a_user_cannot_create_a_pod_with_an_assignment(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("forger", Slice(1024), annotations={ASSIGNMENT: "{}"}))
    forger = kubectl.wait_for_phase("forger", "Running")
    assert json.loads(forger["metadata"]["annotations"][ASSIGNMENT])["uid"] == forger["metadata"]["uid"]
    past_the_webhook = busybox_pod("past-the-webhook", "true")
    past_the_webhook["metadata"]["annotations"] = {ASSIGNMENT: "{}"}
    assert "is reserved" in refused(kubectl, past_the_webhook)


def test_copy_of_running_pod_with_its_annotations_gets_own_gpu(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("original", Slice(1024), annotations={contract.ANNOTATION_PLACEMENT: "spread"}))
    original = kubectl.wait_for_phase("original", "Running")
    kubectl.run("debug", "original", "--copy-to=copy", f"--set-image=main={CLIENT_IMAGE}")  # takes the annotations along
    copy = kubectl.wait_for_phase("copy", "Running")
    assert copy["metadata"]["annotations"][contract.ANNOTATION_PLACEMENT] == "spread"
    assert json.loads(copy["metadata"]["annotations"][ASSIGNMENT])["uid"] == copy["metadata"]["uid"] != original["metadata"]["uid"]
    assert [device["total_bytes"] for device in Client(kubectl, "copy").devices()] == [1024 * MIB]


def test_assignment_cannot_be_changed_through_any_api_path(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("honest", Slice(1024)))
    kubectl.wait_for_phase("honest", "Running")
    patch = json.dumps({"metadata": {"annotations": {ASSIGNMENT: "{}"}}})
    for door in ((), ("--subresource=status",)):
        with pytest.raises(KubectlError, match="is reserved"):
            kubectl.run("patch", "pod", "honest", "--type=merge", f"--patch={patch}", *door)


def test_a_pod_that_waits_cannot_be_made_exclusive_by_any_door(kubectl: Kubectl, node_name: str) -> None:
    """Quotas have counted it by then, and the webhook does not see it again."""
    one_mib = slice_pod("modest", Slice(1))
    one_mib["spec"]["schedulingGates"] = [{"name": "aliquot.test/held-back"}]
    kubectl.apply(one_mib)
    exclusive = {"annotations": {contract.ANNOTATION_ISOLATION: "exclusive"}}
    for door in ((), ("--subresource=status",)):
        with pytest.raises(KubectlError, match="cannot change after the pod was created"):
            kubectl.run("patch", "pod", "modest", "--type=merge", f"--patch={json.dumps({'metadata': exclusive})}", *door)
    target = {"apiVersion": "v1", "kind": "Node", "name": node_name}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "modest", **exclusive}, "target": target}
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/modest/binding"
    with pytest.raises(KubectlError, match="cannot change after the pod was created"):
        kubectl.run("create", f"--raw={path}", "--filename=-", stdin=json.dumps(binding))
    kubectl.run("annotate", "pod", "modest", f"{contract.ANNOTATION_PLACEMENT}=spread")


def test_only_the_scheduler_binds_with_an_assignment(kubectl: Kubectl, node_name: str) -> None:
    kubectl.apply(busybox_pod("loose", "true") | {"spec": {**busybox_pod("loose", "true")["spec"], "schedulerName": "nobody"}})
    binding: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "loose", "annotations": {ASSIGNMENT: "{}"}},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node_name},
    }
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/loose/binding"
    with pytest.raises(KubectlError, match="is reserved"):
        kubectl.run("create", f"--raw={path}", "--filename=-", stdin=json.dumps(binding))


def test_the_scheduler_changes_nothing_of_a_pod_but_its_retry_annotation(kubectl: Kubectl) -> None:
    kubectl.apply(busybox_pod("bystander", "sleep 600"))
    as_scheduler = ("patch", "pod", "bystander", "--type=merge", f"--as={SCHEDULER_ACCOUNT}")
    kubectl.run(*as_scheduler, f'--patch={{"metadata": {{"annotations": {{"{contract.ANNOTATION_RETRY}": "1"}}}}}}')
    with pytest.raises(KubectlError, match="changes only annotation"):
        kubectl.run(*as_scheduler, '--patch={"metadata": {"labels": {"app": "other"}}}')


def test_a_pod_that_names_its_node_itself_is_refused(kubectl: Kubectl, node_name: str) -> None:
    pod = slice_pod("impatient", Slice(1024))
    pod["spec"]["nodeName"] = node_name
    assert "bypasses the scheduler" in refused(kubectl, pod)


HAMI = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
MANAGER = {"nvidia.com/vgpu-number": "1", "nvidia.com/vgpu-memory": "1024"}


def test_only_adopted_namespaces_serve_other_systems_words(kubectl: Kubectl, target: Target) -> None:
    for name, limits in (("hami", HAMI), ("manager", MANAGER), ("mig", {"nvidia.com/mig-1g.10gb": "1"})):
        pod = slice_pod(name, Slice(1))
        pod["spec"]["containers"][0]["resources"]["limits"] = limits
        kubectl.apply(pod)
        spec = kubectl.get("pod", name)["spec"]
        assert (spec["schedulerName"], set(spec["containers"][0]["resources"]["limits"])) == ("default-scheduler", set(limits))
    labelled = slice_pod("labelled", Slice(1))
    labelled["metadata"]["labels"] = {contract.LABEL_ADOPT: "true"}
    labelled["spec"]["containers"][0]["resources"]["limits"] = HAMI
    kubectl.apply(labelled)
    assert kubectl.get("pod", "labelled")["spec"]["schedulerName"] == contract.SCHEDULER_NAME
    dry = namespace_object(f"{kubectl.namespace}-dry", {contract.LABEL_ADOPT: "dry-run"})
    target.kubectl.apply(dry)
    try:
        own = target.kubectl.within(dry["metadata"]["name"])
        wait_until_pods_are_accepted(own)
        labelled["metadata"]["labels"] = {}
        with pytest.raises(KubectlError, match=r"would adopt this pod of HAMi as main: nvidia\.com/vgpu: 1, nvidia\.com/vgpu-memory: 3000"):
            own.run("apply", "--dry-run=server", "--warnings-as-errors", "--filename=-", stdin=json.dumps(labelled))
    finally:
        target.kubectl.delete("namespace", dry["metadata"]["name"], wait=False)


def test_pods_of_ignored_namespace_are_left_alone_and_get_no_gpu(kubectl: Kubectl) -> None:
    kubectl.run("label", "namespace", kubectl.namespace, f"{contract.LABEL_WEBHOOK}=ignore")
    pod = slice_pod("elsewhere", Slice(1))
    pod["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
    nonsense = slice_pod("nonsense", Slice(1024, cores=250))
    eventually(lambda: not outcome_of(kubectl, nonsense), "the webhook not to be asked any more")
    kubectl.apply(pod)
    spec = kubectl.get("pod", "elsewhere")["spec"]
    assert spec["schedulerName"] == "default-scheduler"
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3k"}
    kubectl.apply(slice_pod("stray", Slice(1024)))

    def refusal() -> bool:
        return any("AliquotRefused" in event for event in kubectl.events("stray"))

    eventually(refusal, "the agent to refuse a pod without an assignment", otherwise=lambda: kubectl.explain("stray"))
    memory_alone = slice_pod("memory-alone", Slice(1))
    memory_alone["spec"]["containers"][0]["resources"]["limits"] = {contract.RESOURCE_VGPU_MEMORY: "4096"}
    assert "would start without a GPU" in refused(kubectl, memory_alone)


MEMORY_QUOTA = f"requests.{contract.RESOURCE_VGPU_MEMORY}"


@pytest.mark.parametrize(
    ("amount", "mistaken"),
    [("64Gi", True), ("65536Mi", True), ("1Ki", True), ("68719476736", True), ("65536", False), ("20000000", False), ("0", False)],
)
def test_a_quota_says_how_many_mebibytes_without_a_unit(kubectl: Kubectl, amount: str, mistaken: bool) -> None:
    assert ("such as 65536 for 64Gi" in outcome_of(kubectl, quota("gpus", {MEMORY_QUOTA: amount}))) == mistaken


@pytest.mark.parametrize("field", ["max", "min", "default"])
@pytest.mark.parametrize(("amount", "mistaken"), [("64Gi", True), ("64M", True), ("65536", False)])
def test_a_limit_range_does_too(kubectl: Kubectl, field: str, amount: str, mistaken: bool) -> None:
    limits = limit_range("gpus", [{"type": "Container", field: {contract.RESOURCE_VGPU_MEMORY: amount}}])
    assert ("such as 65536 for 64Gi" in outcome_of(kubectl, limits)) == mistaken


def test_quotas_and_limit_ranges_without_amounts_of_memory_are_nobodys_business(kubectl: Kubectl) -> None:
    other = quota("other", {"requests.memory": "64Gi", f"requests.{contract.RESOURCE_VGPU}": "8"})
    bare = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "bare"}}
    assert [outcome_of(kubectl, made) for made in (other, quota("empty", {}), limit_range("empty", []), bare)] == [""] * 4


def test_quota_older_than_policy_is_labelled_and_corrected_but_not_worsened(product: Kubectl, kubectl: Kubectl) -> None:
    binding = product.get("validatingadmissionpolicybinding", "aliquot-amounts-of-quotas")
    old = quota("old", {MEMORY_QUOTA: "64Gi", "pods": "5"})
    product.run("delete", "validatingadmissionpolicybinding", "aliquot-amounts-of-quotas")
    try:
        eventually(lambda: not outcome_of(kubectl, old), "the policy to be off")
        kubectl.apply(old)
    finally:
        kept = {key: binding["metadata"][key] for key in ("name", "labels") if key in binding["metadata"]}
        product.apply({key: binding[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": kept})
    worse = quota("old", {MEMORY_QUOTA: "65Gi", "pods": "5"})
    eventually(lambda: "so 65Gi is invalid" in outcome_of(kubectl, worse), "the policy to hold again")
    kubectl.run("label", "resourcequota", "old", "team=a")
    kubectl.apply(quota("old", {MEMORY_QUOTA: "64Gi", "pods": "6"}))
    kubectl.apply(quota("old", {MEMORY_QUOTA: "65536", "pods": "6"}))


def quota(name: str, hard: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}


def limit_range(name: str, limits: list[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": name}, "spec": {"limits": limits}}


def test_where_memory_is_required_a_whole_gpu_without_an_amount_is_refused(product: Kubectl, kubectl: Kubectl) -> None:
    kubectl.run("label", "namespace", kubectl.namespace, f"{contract.LABEL_VGPU_MEMORY}=required")
    whole, counted = slice_pod("whole", Slice(1)), slice_pod("counted", Slice(1))
    for pod, limits in ((whole, {}), (counted, {contract.RESOURCE_VGPU_MEMORY: str(GPU_MEMORY_MIB)})):
        pod["spec"]["containers"][0]["resources"]["limits"] = {contract.RESOURCE_VGPU: "1", **limits}
    policy = f"--filename={ROOT / 'deploy/daemonset/components/require-memory/policy.yaml'}"
    product.run("apply", policy)
    try:
        eventually(lambda: "without nvidia.com/vgpu-memory" in outcome_of(kubectl, whole), "the policy to hold")
        kubectl.apply(counted)
    finally:
        product.run("delete", policy)


def outcome_of(kubectl: Kubectl, pod: dict[str, Any]) -> str:
    """Try whether a pod would be created; return the refusal, or nothing."""
    try:
        kubectl.run("apply", "--dry-run=server", "--filename=-", stdin=json.dumps(pod))
    except KubectlError as refusal:
        return str(refusal)
    return ""


def refused(kubectl: Kubectl, pod: dict[str, Any]) -> str:
    """Try to create a pod that must not be; return the refusal."""
    with pytest.raises(KubectlError) as said:
        kubectl.apply(pod)
    return str(said.value)
