"""The product's service accounts may do what their programs do, and nothing beside it."""

import json

import pytest

from tests.e2e.kubectl import Kubectl, KubectlError
from tests.e2e.product import AGENT_NAMESPACE, agent_pod

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
    assert "leaves the others as they are" in _patch_as_the_agent(product, node_name, node_name, "cpu")


def _patch_as_the_agent(product: Kubectl, node_name: str, target: str, resource: str) -> str:
    """Send a patch of a node's capacity from inside the agent's container, with its own token; return the answer."""
    agents = product.within(AGENT_NAMESPACE)
    pod = agent_pod(product, node_name)["metadata"]["name"]
    added = {"op": "add", "path": f"/status/capacity/{resource.replace('/', '~1')}", "value": "1"}
    return agents.exec(pod, *_CALL, "PATCH", f"/api/v1/nodes/{target}/status", json.dumps([added]), container="agent")


def test_an_agent_cannot_write_the_inventory_of_another_node(product: Kubectl, node_name: str) -> None:
    agents, pod = product.within(AGENT_NAMESPACE), agent_pod(product, node_name)["metadata"]["name"]
    foreign = {"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": "not-its-own"}}
    said = agents.exec(pod, *_CALL, "POST", "/apis/aliquot.dev/v1alpha1/gpunodes", json.dumps(foreign), container="agent")
    assert "an agent writes the gpunode of its own node only" in said


_CALL = ("/opt/aliquot/bin/python", "-c", """\
import os, sys, urllib3
from pathlib import Path
account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
verb, path, body = sys.argv[1:]
api = urllib3.PoolManager(ca_certs=str(account / "ca.crt"))
answer = api.request(
    verb,
    f"https://{os.environ['KUBERNETES_SERVICE_HOST']}{path}",
    body=body,
    headers={
        "Authorization": "Bearer " + (account / "token").read_text(),
        "Content-Type": "application/json-patch+json" if verb == "PATCH" else "application/json",
    },
)
print(answer.status, answer.data.decode())
""")  # fmt: skip
"""A request from inside the agent's container, with its own token: verb, path and body follow."""


def _may(kubectl: Kubectl, account: str, verb: str, resource: str) -> str:
    kind, _, subresource = resource.partition("/")
    try:
        return kubectl.run("auth", "can-i", verb, kind, f"--subresource={subresource}", "--all-namespaces", f"--as={account}").strip()
    except KubectlError as said_no:  # kubectl exits with 1 when the answer is no
        return str(said_no).rpartition(": ")[2].splitlines()[-1]
