# SPDX-License-Identifier: Apache-2.0
"""The real cluster autoscaler: when it adds a node for GPU pods, when it cannot, and its answer to Kueue before ours.

Not part of ``make e2e``, because the Go module proxy does not serve the autoscaler. Build it yourself: ``go build ./kwok`` in a checkout of
kubernetes-sigs/cluster-autoscaler, with the module ``apis`` replaced by that of a checkout of kubernetes/autoscaler. Its nodes exist in the
API only.

    make peers-autoscaler AUTOSCALER=/src/cluster-autoscaler-kwok
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from aliquot import contract
from tests.e2e.api import Api
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.components import Component
from tests.e2e.cluster.host import module_source
from tests.e2e.controllers import KUEUE_CONTROLLER, installed
from tests.e2e.fleet import HIGH, LOW, Fleet, pod, publish_inventory, running_fleet
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import GPUS, with_components
from tests.e2e.scale import GPU_MEMORY_MIB, GPUS_PER_NODE, node_object
from tests.e2e.test_queue_kinds import AUTOSCALER, REQUESTS, asking_autoscaler, check_states, queue, queues
from tests.e2e.test_queues import START_SECONDS, WHOLE, configure, queued_job, running

PROGRAM = os.environ.get("ALIQUOT_AUTOSCALER", "")
GROUP_LABEL = "e2e.aliquot.dev/group"
GROUP, FIXED = "pool", "fixed-1"
TRAINING = "aliquot-training"
NAMESPACE = "kube-system"
SCAN_SECONDS = 2
QUIET_SECONDS = 10 * SCAN_SECONDS
"""Time for ten looks of the autoscaler, in which it would add a node."""
ANSWER_SECONDS = 60
OURS = {name: amount for name, amount in node_object("any")["status"]["capacity"].items() if name.startswith(contract.RESOURCE_DOMAIN)}
"""The GPU resources of a node with an agent."""
pytestmark = pytest.mark.timeout(600)


@contextmanager
def autoscaler(cluster: Cluster, resources: dict[str, str]) -> Iterator[None]:
    """Have the autoscaler run in the block, with one empty group. Args: resources: what its template says that a new node has."""
    assert Path(PROGRAM).is_file(), f"AUTOSCALER: expected the autoscaler's program, found {PROGRAM!r}"
    settings = {
        "apiVersion": "v1alpha1",
        "readNodesFrom": "configmap",
        "nodegroups": {"fromNodeLabelKey": GROUP_LABEL},
        "nodes": {"skipTaint": True},
        "configmap": {"name": "kwok-provider-templates", "key": "templates"},
    }
    templates = {"apiVersion": "v1", "kind": "List", "items": [node_of_group(resources)]}
    maps: dict[str, dict[str, Object]] = {"kwok-provider-config": {"config": settings}, "kwok-provider-templates": {"templates": templates}}
    kubeconfig = f"{cluster.config}/admin.kubeconfig"
    flags = [
        "--cloud-provider=kwok",
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        f"--scan-interval={SCAN_SECONDS}s",
        "--scale-down-enabled=false",
        "--enable-provisioning-requests",
    ]
    kubectl = cluster.kubectl().within(NAMESPACE)
    kubectl.apply(*(config_map(name, data) for name, data in maps.items()))
    environment = {"POD_NAMESPACE": NAMESPACE, "KWOK_PROVIDER_MODE": "local", "KUBECONFIG": kubeconfig}
    cluster.start("cluster-autoscaler", Component([PROGRAM, *flags], environment))
    try:
        yield
    finally:
        cluster.stop("cluster-autoscaler")
        kubectl.delete("configmaps", *maps)


def node_of_group(resources: dict[str, str]) -> Object:
    """The template of a new node, with these GPU resources."""
    node = node_object(GROUP)
    node["metadata"]["labels"][GROUP_LABEL] = GROUP
    for count, amount in (("min", "0"), ("max", "3"), ("desired", "0")):
        node["metadata"]["annotations"][f"cluster-autoscaler.kwok.nodegroup/{count}-count"] = amount
    others = {name: amount for name, amount in node["status"]["capacity"].items() if name not in OURS}
    node["status"] = {"capacity": others | resources, "allocatable": others | resources}
    return node


def config_map(name: str, data: Mapping[str, Object]) -> Object:
    """A ConfigMap with a YAML document for each key."""
    texts = {key: yaml.safe_dump(document) for key, document in data.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": texts}


# --- nodes for waiting pods ---


@pytest.fixture
def request_kind(node: Cluster) -> Iterator[None]:
    """The kind that Kueue writes and the autoscaler reads."""
    kubectl, file = node.kubectl(), module_source(AUTOSCALER) / "config/crd/autoscaling.x-k8s.io_provisioningrequests.yaml"
    kubectl.run("apply", "--server-side", f"--filename={file}")
    yield
    kubectl.delete("crd", REQUESTS)


@pytest.fixture
def fleet(without_product: None, node: Cluster, kubectl: Kubectl, request_kind: None) -> Iterator[Fleet]:
    """One node outside of the group, with our scheduler."""
    del without_product, request_kind
    with running_fleet(node, {FIXED: ""}) as made:
        made.wait_until_it_answers()
        yield replace(made, kubectl=kubectl)
        kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0")
        for name in added(made):
            made.cluster.kubectl().delete("gpunodes", name)
            made.cluster.kubectl().delete("nodes", name)


def added(fleet: Fleet) -> list[str]:
    """The nodes that the autoscaler added."""
    return [one["metadata"]["name"] for one in fleet.cluster.kubectl().all("nodes", f"--selector={GROUP_LABEL}={GROUP}")]


def said(fleet: Fleet, name: str) -> list[str]:
    """The reasons of the autoscaler's events about a pod."""
    events = fleet.kubectl.all("events")
    return [one["reason"] for one in events if one["involvedObject"]["name"] == name and "ScaleUp" in one["reason"]]


def test_empty_group_gets_as_many_nodes_as_pods_need(fleet: Fleet) -> None:
    """The agent of a new node comes later than the node: the autoscaler must not add another one meanwhile."""
    fleet.fill({FIXED: 0})
    with autoscaler(fleet.cluster, OURS):
        fleet.create(*(pod(f"share-{number}", mib=GPU_MEMORY_MIB // 2, cores=50, priority=HIGH) for number in range(GPUS_PER_NODE)))
        [name] = eventually(lambda: added(fleet), "a node", seconds=ANSWER_SECONDS, otherwise=lambda: str(said(fleet, "share-0")))
        time.sleep(QUIET_SECONDS)
        assert added(fleet) == [name]
        publish_inventory(Api(fleet.cluster.kubeconfig), name)
        for number in range(GPUS_PER_NODE):
            fleet.wait_until_bound(f"share-{number}")
        assert set(fleet.nodes_of(prefix="share").values()) == {name}
        fleet.create(*(pod(f"whole-{number}", gpus=GPUS_PER_NODE, priority=HIGH) for number in range(2)))
        eventually(lambda: len(added(fleet)) == 3, "two more nodes", seconds=ANSWER_SECONDS, otherwise=lambda: str(said(fleet, "whole-0")))


def test_template_without_our_resources_adds_no_node(fleet: Fleet) -> None:
    fleet.fill({FIXED: 0})
    with autoscaler(fleet.cluster, {}):
        fleet.create(pod("share", mib=GPU_MEMORY_MIB // 2, priority=HIGH))
        eventually(
            lambda: "NotTriggerScaleUp" in said(fleet, "share"),
            "the autoscaler to say that a node would not help",
            seconds=ANSWER_SECONDS,
            otherwise=lambda: fleet.kubectl.explain("share"),
        )
        assert not added(fleet)


def test_pod_of_lowest_class_adds_no_node(fleet: Fleet) -> None:
    """The autoscaler adds none for a priority below -10, its setting expendable-pods-priority-cutoff."""
    fleet.fill({FIXED: 0})
    with autoscaler(fleet.cluster, OURS):
        fleet.create(pod("share", mib=GPU_MEMORY_MIB // 2, priority=LOW))
        time.sleep(QUIET_SECONDS)
        assert not added(fleet)
        fleet.create(pod("training", mib=GPU_MEMORY_MIB // 2, priority=TRAINING))
        eventually(lambda: added(fleet), "a node for the other", seconds=ANSWER_SECONDS, otherwise=lambda: str(said(fleet, "training")))


def test_pod_that_only_single_gpus_do_not_fit_adds_no_node_and_why_names_cause(fleet: Fleet) -> None:
    """An autoscaler counts sums over nodes."""
    fleet.create(*(pod(f"part-{number}", mib=GPU_MEMORY_MIB * 6 // 10, priority=HIGH) for number in range(GPUS_PER_NODE)))
    for number in range(GPUS_PER_NODE):
        fleet.wait_until_bound(f"part-{number}")
    with autoscaler(fleet.cluster, OURS):
        fleet.create(pod("whole", priority=HIGH))
        time.sleep(QUIET_SECONDS)
        assert not added(fleet)
        assert [one["reason"] for one in fleet.why("whole")["reasons"]] == ["not enough free memory on one GPU"]


# --- Kueue's question to the autoscaler ---


@pytest.fixture
def queued(product: Kubectl, node: Cluster, request_kind: None) -> Iterator[Kubectl]:
    """The product with its check, and Kueue."""
    del request_kind
    with with_components(product, ["kueue"]), installed(product, node, replace(KUEUE_CONTROLLER, configure=configure)):
        yield product


def test_job_runs_on_held_gpus_after_autoscaler_found_capacity(queued: Kubectl, kubectl: Kubectl, node: Cluster) -> None:
    del queued
    made, checks = asking_autoscaler()
    with autoscaler(node, OURS), queues(kubectl, *made, *queue("scaled", GPUS, admissionChecksStrategy=checks)):
        try:
            kubectl.apply(queued_job("scaled", WHOLE.limits, "scaled", pods=2))
            pods = [kubectl.get("pod", name) for name in running(kubectl, "scaled", 2)]
            assert check_states(kubectl, "scaled") == {"more-nodes": "Ready", "fits": "Ready"}
            assert all(contract.ANNOTATION_HOLD in one["metadata"]["annotations"] for one in pods)
            [request] = kubectl.all(REQUESTS)
            assert {one["type"]: one["status"] for one in request["status"]["conditions"]}["Provisioned"] == "True"
        finally:
            kubectl.run("delete", "jobs", "--all", "--now", "--cascade=foreground", timeout_seconds=START_SECONDS)
