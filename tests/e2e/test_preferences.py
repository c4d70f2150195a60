# SPDX-License-Identifier: Apache-2.0
"""What a pod itself prefers counts in addition to our rating, through the kube-scheduler as it is configured in deploy/.

The nodes exist in the API only: the tests check only where a pod is bound.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from aliquot.contract.gpunode import API_VERSION
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import Slice, slice_pod
from tests.e2e.scale import inventory, node_object

pytestmark = pytest.mark.usefixtures("product")

NAMES = ["preferred-0", "preferred-1"]
HOSTNAME = "kubernetes.io/hostname"
NOT_FOR_OTHERS = {"key": "example.com/for-a-test", "effect": "NoSchedule"}


@pytest.fixture
def nodes(kubectl: Kubectl) -> Iterator[list[str]]:
    """Two empty nodes that only these pods may use."""
    try:
        for name in NAMES:
            published = {"apiVersion": API_VERSION, "kind": "GpuNode", "metadata": {"name": name}}
            kubectl.apply(node_object(name) | {"spec": {"taints": [NOT_FOR_OTHERS]}}, published)
            status = json.dumps({"status": inventory(name)})
            kubectl.run("patch", "gpunode", name, "--subresource=status", "--type=merge", f"--patch={status}")
        yield NAMES
    finally:
        kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0")  # no kubelet is there to end them
        kubectl.run("delete", "node", *NAMES, "--ignore-not-found")
        kubectl.run("delete", "gpunode", *NAMES, "--ignore-not-found")


def test_a_preferred_affinity_and_a_spread_count_against_packing(kubectl: Kubectl, nodes: list[str]) -> None:
    used = placed(kubectl, pod("first", nodes))
    (free,) = set(nodes) - {used}
    assert placed(kubectl, pod("packed", nodes)) == used, "without a preference it goes where a GPU is in use"
    assert placed(kubectl, pod("prefers", nodes, affinity=preferring(free))) == free
    spread = {
        "maxSkew": 1,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app": "spread"}},
    }
    found = {placed(kubectl, pod(f"spread-{number}", nodes, topologySpreadConstraints=[spread])) for number in range(2)}
    assert found == set(nodes)


def pod(name: str, nodes: list[str], **spec: Any) -> Object:
    """A pod with a share of a GPU for one of these nodes, even if the node controller taints them."""
    made = slice_pod(name, Slice(1024))
    made["metadata"]["labels"] = {"app": name.partition("-")[0]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": nodes}]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required, **spec.pop("affinity", {})}}
    made["spec"] |= {"tolerations": [{"operator": "Exists"}], "affinity": affinity, **spec}
    return made


def preferring(node: str) -> Object:
    """A node affinity that would rather have this node."""
    term = {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": [node]}]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term}]}


def placed(kubectl: Kubectl, pod: Object) -> str:
    """Create a pod and return the node that it is bound to."""
    kubectl.apply(pod)
    name = pod["metadata"]["name"]
    eventually(lambda: kubectl.get("pod", name)["spec"].get("nodeName"), f"{name} to be bound")
    return str(kubectl.get("pod", name)["spec"]["nodeName"])
