"""The agent's service account may do what the agent does, and nothing beside it."""

import pytest

from tests.e2e.kubectl import Kubectl, KubectlError
from tests.e2e.product import AGENT_NAMESPACE, agent_pod

ALLOWED = {("list", "pods"), ("watch", "pods"), ("list", "nodes"), ("watch", "nodes"), ("patch", "nodes/status"), ("create", "events")}
DENIED = (
    ("get", "secrets"),
    ("create", "pods"),
    ("patch", "pods"),
    ("delete", "pods"),
    ("patch", "nodes"),
    ("update", "nodes/status"),
    ("create", "pods/exec"),
)
ACCOUNT = f"system:serviceaccount:{AGENT_NAMESPACE}:aliquot-agent"


@pytest.mark.parametrize(("verb", "resource"), sorted(ALLOWED))
def test_the_agent_may(product: Kubectl, verb: str, resource: str) -> None:
    assert _may(product, verb, resource) == "yes"


@pytest.mark.parametrize(("verb", "resource"), DENIED)
def test_the_agent_may_not(product: Kubectl, verb: str, resource: str) -> None:
    assert _may(product, verb, resource) == "no"


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
    return agents.exec(pod, "/opt/aliquot/bin/python", "-c", _PATCH, target, resource, container="agent")


_PATCH = """\
import json, os, sys, urllib3
from pathlib import Path
account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
target, resource = sys.argv[1:]
added = {"op": "add", "path": "/status/capacity/" + resource.replace("/", "~1"), "value": "1"}
api = urllib3.PoolManager(ca_certs=str(account / "ca.crt"))
answer = api.request(
    "PATCH",
    f"https://{os.environ['KUBERNETES_SERVICE_HOST']}/api/v1/nodes/{target}/status",
    body=json.dumps([added]),
    headers={"Authorization": "Bearer " + (account / "token").read_text(), "Content-Type": "application/json-patch+json"},
)
print(answer.status, answer.data.decode())
"""


def _may(kubectl: Kubectl, verb: str, resource: str) -> str:
    kind, _, subresource = resource.partition("/")
    try:
        return kubectl.run("auth", "can-i", verb, kind, f"--subresource={subresource}", "--all-namespaces", f"--as={ACCOUNT}").strip()
    except KubectlError as said_no:  # kubectl exits with 1 when the answer is no
        return str(said_no).rpartition(": ")[2].splitlines()[-1]
