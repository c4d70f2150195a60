# SPDX-License-Identifier: Apache-2.0
"""The product's service accounts may do what their programs do, and no more."""

import json
from typing import Any

import pytest

from tests.e2e.kubectl import Kubectl, KubectlError
from tests.e2e.product import AGENT_NAMESPACE, agent_pod
from tests.e2e.test_cluster import busybox_pod

INVENTORY = "gpunodes.aliquot.dev"
ALLOWED = {
    ("list", "pods"),
    ("watch", "pods"),
    ("list", "nodes"),
    ("watch", "nodes"),
    ("patch", "nodes/status"),
    ("create", "events"),
    ("create", INVENTORY),
    ("patch", f"{INVENTORY}/status"),
}
DENIED = (
    ("get", "secrets"),
    ("create", "pods"),
    ("patch", "pods"),
    ("delete", "pods"),
    ("patch", "nodes"),
    ("update", "nodes/status"),
    ("create", "pods/exec"),
    ("update", INVENTORY),
    ("delete", INVENTORY),
)
SCHEDULER_ALLOWED = {
    ("create", "pods/binding"),
    ("patch", "pods"),
    ("list", INVENTORY),
    ("watch", INVENTORY),
    ("watch", "nodes"),
    ("create", "events"),
}
SCHEDULER_DENIED = (
    ("get", "secrets"),
    ("patch", "mutatingwebhookconfigurations"),
    ("create", "pods"),
    ("create", "pods/exec"),
    ("patch", "nodes"),
    ("patch", "nodes/status"),
    ("patch", f"{INVENTORY}/status"),
    ("update", "leases.coordination.k8s.io"),
)
AGENT = f"system:serviceaccount:{AGENT_NAMESPACE}:aliquot-agent"
SCHEDULER = f"system:serviceaccount:{AGENT_NAMESPACE}:aliquot-scheduler"


@pytest.mark.parametrize(("verb", "resource"), sorted(ALLOWED))
def test_the_agent_may(product: Kubectl, verb: str, resource: str) -> None:
    assert _may(product, AGENT, verb, resource) == "yes"


@pytest.mark.parametrize(("verb", "resource"), DENIED)
def test_the_agent_may_not(product: Kubectl, verb: str, resource: str) -> None:
    assert _may(product, AGENT, verb, resource) == "no"


@pytest.mark.parametrize(("verb", "resource"), sorted(SCHEDULER_ALLOWED))
def test_the_scheduler_may(product: Kubectl, verb: str, resource: str) -> None:
    assert _may(product, SCHEDULER, verb, resource) == "yes"


@pytest.mark.parametrize(("verb", "resource"), SCHEDULER_DENIED)
def test_the_scheduler_may_not(product: Kubectl, verb: str, resource: str) -> None:
    assert _may(product, SCHEDULER, verb, resource) == "no"


def test_an_agent_cannot_report_for_a_node_it_does_not_run_on(product: Kubectl, node_name: str) -> None:
    taint = {"key": "aliquot.test/empty", "effect": "NoSchedule"}
    product.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "not-its-own"}, "spec": {"taints": [taint]}})
    product.run("patch", "node", "not-its-own", "--subresource=status", '--patch={"status": {"capacity": {"cpu": "1"}}}')
    try:
        assert "an agent reports its own node only" in _patch_as_the_agent(product, node_name, "not-its-own", "nvidia.com/vgpu-memory")
    finally:
        product.delete("node", "not-its-own")


def test_an_agent_reports_only_its_two_resources(product: Kubectl, node_name: str) -> None:
    assert "an agent changes only" in _patch_as_the_agent(product, node_name, node_name, "cpu")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        pytest.param("/metadata/labels/node-restriction.kubernetes.io~1pool", "gold", "does not change its node's metadata", id="label"),
        pytest.param("/metadata/annotations/aliquot.test~1note", "x", "does not change its node's metadata", id="annotation"),
        pytest.param("/metadata/finalizers", ["aliquot.test/kept"], "does not change its node's metadata", id="finalizer"),
        pytest.param("/status/allocatable/nvidia.com~1vgpu-memory", "1", "changes only capacity and conditions", id="allocatable"),
        pytest.param("/status/daemonEndpoints/kubeletEndpoint/Port", 1, "changes only capacity and conditions", id="the kubelet's port"),
    ],
)
def test_an_agent_changes_nothing_else_of_its_node_through_its_status(
    product: Kubectl, node_name: str, path: str, value: Any, said: str
) -> None:
    before = product.get("node", node_name)["metadata"].get("annotations")
    assert before, "the controllers' annotations: a patch adds to what is there"
    assert said in ask_as_the_agent(product, node_name, "PATCH", f"/api/v1/nodes/{node_name}/status", [_added(path, value)])


def test_the_scheduler_labels_no_pod_through_its_status(product: Kubectl, kubectl: Kubectl) -> None:
    pod = busybox_pod("bystander", "true")
    kubectl.apply(pod | {"spec": {**pod["spec"], "schedulerName": "nobody"}})

    def patched(path: str, value: Any) -> str:
        system = product.within(AGENT_NAMESPACE)
        [scheduler, *_] = system.all("pods", "--selector=app.kubernetes.io/name=aliquot-scheduler", "--field-selector=status.phase=Running")
        status = f"/api/v1/namespaces/{kubectl.namespace}/pods/bystander/status"
        return _ask(system, scheduler["metadata"]["name"], "extender", "PATCH", status, [_added(path, value)])

    assert "200 " in patched("/status/nominatedNodeName", "nowhere"), "what kube-scheduler writes there"
    assert "changes only annotation" in patched("/metadata/labels", {"app": "somebody-elses"})
    assert "changes only annotation" in patched("/metadata/finalizers", ["aliquot.test/kept"])


def _patch_as_the_agent(product: Kubectl, node_name: str, target: str, resource: str) -> str:
    """Send a patch of a node's capacity from inside the agent's container, with its own token; return the answer."""
    added = _added(f"/status/capacity/{resource.replace('/', '~1')}", "1")
    return ask_as_the_agent(product, node_name, "PATCH", f"/api/v1/nodes/{target}/status", [added])


def test_an_agent_cannot_write_the_inventory_of_another_node(product: Kubectl, node_name: str) -> None:
    foreign = {"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "not-its-own"}}
    said = ask_as_the_agent(product, node_name, "POST", "/apis/aliquot.dev/v1alpha1/gpunodes", foreign)
    assert "an agent writes the gpunode of its own node only" in said


def _added(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def ask_as_the_agent(product: Kubectl, node_name: str, verb: str, path: str, body: Any) -> str:
    return _ask(product.within(AGENT_NAMESPACE), agent_pod(product, node_name)["metadata"]["name"], "agent", verb, path, body)


def _ask(system: Kubectl, pod: str, container: str, verb: str, path: str, body: Any) -> str:
    """Send a request from inside a container of ours, with its own token; return status and body of the answer."""
    return system.exec(pod, *_CALL, verb, path, json.dumps(body), container=container)


_CALL = ("/opt/aliquot/bin/python", "-c", """\
import os, ssl, sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen
account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
verb, path, body = sys.argv[1:]
request = Request(
    f"https://{os.environ['KUBERNETES_SERVICE_HOST']}{path}",
    method=verb,
    data=body.encode(),
    headers={
        "Authorization": "Bearer " + (account / "token").read_text(),
        "Content-Type": "application/json-patch+json" if verb == "PATCH" else "application/json",
    },
)
try:
    answer = urlopen(request, context=ssl.create_default_context(cafile=str(account / "ca.crt")))
except HTTPError as refused:
    answer = refused
print(answer.status, answer.read().decode())
""")  # fmt: skip
"""A request from inside a container of ours, with its own token: verb, path and body follow."""


def _may(kubectl: Kubectl, account: str, verb: str, resource: str) -> str:
    kind, _, subresource = resource.partition("/")
    try:
        return kubectl.run("auth", "can-i", verb, kind, f"--subresource={subresource}", "--all-namespaces", f"--as={account}").strip()
    except KubectlError as said_no:  # kubectl exits with 1 when the answer is no
        return str(said_no).rpartition(": ")[2].splitlines()[-1]
