# SPDX-License-Identifier: Apache-2.0
"""Scheduler and extender end in the middle of their work; what they began is finished exactly once."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.components import Component
from tests.e2e.cluster.namespaces import NODE_ADDRESS
from tests.e2e.conftest import Target
from tests.e2e.invariants import Invariants
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import AGENT_NAMESPACE, RESERVATIONS, Slice, scheduler_metric, slice_pod, wait_until_rolled_out
from tests.e2e.test_cluster import busybox_pod

SELECTOR = "--selector=app.kubernetes.io/name=aliquot-scheduler"
BURST = 10
SLICE_MIB = 20000
BOUND_FIRST = "member-0"
GANG = (BOUND_FIRST, *(f"member-{number}" for number in range(1, 4)))
LEASE_SECONDS = 15
DEAF_PORT = 9997
SCHEDULER_ACCOUNT = f"system:serviceaccount:{AGENT_NAMESPACE}:aliquot-scheduler"


@pytest.fixture
def system(product: Kubectl) -> Kubectl:
    """kubectl in the product's namespace, with both replicas up before and after."""
    system = product.within(AGENT_NAMESPACE)
    wait_until_rolled_out(system)
    return system


@pytest.mark.timeout(BURST * 60 + 300)
def test_an_extender_killed_between_filter_and_bind_promises_nothing_twice(
    invariants: Invariants, kubectl: Kubectl, system: Kubectl, node: Cluster, bindings_hang: Callable[[], None]
) -> None:
    names = [f"pod-{number}" for number in range(BURST)]
    kubectl.apply(*(slice_pod(name, Slice(SLICE_MIB)) for name in names))
    eventually(lambda: open_bindings(system) > 0, "the extender to have asked for a binding that has no outcome")
    for pod in system.all("pods", SELECTOR):
        node.kill_container(container_id(pod, "extender"))
    assert not set(names) & set(bound(kubectl))
    bindings_hang()
    eventually(lambda: set(names) <= set(bound(kubectl)), f"all {BURST} pods to be bound", seconds=90, otherwise=lambda: waiting(kubectl))
    for name in names:
        kubectl.wait_for_phase(name, "Running", seconds=60)
    invariants.hold()


@pytest.mark.soak
@pytest.mark.timeout(len(GANG) * 60 + 300)
def test_a_gang_cut_off_between_its_bindings_starts_whole(
    invariants: Invariants, kubectl: Kubectl, system: Kubectl, node: Cluster, bindings_hang: Callable[[], None]
) -> None:
    annotations = {contract.ANNOTATION_GANG: "team", contract.ANNOTATION_GANG_MIN: str(len(GANG))}
    kubectl.apply(*(slice_pod(name, Slice(SLICE_MIB), annotations=annotations) for name in GANG))
    eventually(
        lambda: BOUND_FIRST in bound(kubectl) and open_bindings(system) == len(GANG) - 1,
        "one member to be bound and the others' bindings to have no outcome",
        otherwise=lambda: f"{bound(kubectl)} are bound, {open_bindings(system):.0f} bindings are open",
    )
    for pod in system.all("pods", SELECTOR):
        node.kill_container(container_id(pod, "extender"))
    assert set(GANG) & set(bound(kubectl)) == {BOUND_FIRST}
    bindings_hang()
    eventually(lambda: set(GANG) <= set(bound(kubectl)), "the whole gang to be bound", seconds=90, otherwise=lambda: waiting(kubectl))
    for name in GANG:
        kubectl.wait_for_phase(name, "Running", seconds=60)
    invariants.hold()


@pytest.fixture
def bindings_hang(target: Target, node: Cluster) -> Iterator[Callable[[], None]]:
    """Bindings hang, except that of the pod BOUND_FIRST; call it to end that."""
    with ExitStack() as hanging:
        hanging.enter_context(calls_hang(target.kubectl, node, "CREATE", "pods/binding", f"request.name != '{BOUND_FIRST}'"))
        yield hanging.close


@contextmanager
def calls_hang(kubectl: Kubectl, node: Cluster, operation: str, resource: str, expression: str) -> Iterator[None]:
    """Inside the block the API server waits with our scheduler's calls for a webhook that takes connections and does not reply.

    Args: expression: of the calls that hang, in CEL.
    """
    deaf = f"import socket, time; server = socket.create_server(('', {DEAF_PORT}), backlog=128); time.sleep(3600)"
    node.start("deaf-webhook", Component([sys.executable, "-c", deaf]))
    webhooks = [
        deaf_webhook("calls", operation, resource, expression),
        deaf_webhook("probe", "CREATE", "pods/binding", "request.name == 'none'"),
    ]
    kind = "ValidatingWebhookConfiguration"
    kubectl.apply({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": "deaf"}, "webhooks": webhooks})
    eventually(lambda: is_held(kubectl), "the API server to heed the webhooks")
    try:
        yield
    finally:
        kubectl.delete(kind, "deaf")
        node.stop("deaf-webhook")


def deaf_webhook(name: str, operation: str, resource: str, expression: str) -> Object:
    """A webhook for calls of our scheduler; its server does not reply."""
    return {
        "name": f"{name}.aliquot.test",
        "clientConfig": {"url": f"https://{NODE_ADDRESS}:{DEAF_PORT}/"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": [operation], "resources": [resource]}],
        "matchConditions": [
            {"name": "ours", "expression": f"request.userInfo.username == '{SCHEDULER_ACCOUNT}'"},
            {"name": "chosen", "expression": expression},
        ],
        "failurePolicy": "Ignore",
        "timeoutSeconds": 30,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }


def is_held(kubectl: Kubectl) -> bool:
    """Whether calls of our scheduler wait: the binding of a pod that does not exist is refused at once otherwise."""
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "none"}, "target": {"kind": "Node", "name": "none"}}
    try:
        kubectl.run(
            "create", "--raw=/api/v1/namespaces/default/pods/none/binding", "--filename=-", f"--as={SCHEDULER_ACCOUNT}",
            "--request-timeout=1s", stdin=json.dumps(binding),
        )  # fmt: skip
    except KubectlError as refused:
        return "not found" not in str(refused)
    return False


def open_bindings(system: Kubectl) -> float:
    """How many bind calls the extenders have begun and not answered."""
    return scheduler_metric(system, RESERVATIONS, stage="binding")


def test_another_replica_takes_over_when_the_leaders_node_is_lost(invariants: Invariants, kubectl: Kubectl, system: Kubectl) -> None:
    """The leader gets no chance to say goodbye, as when its node loses power: the lease has to run out first."""
    holder = leader(system)
    system.run("delete", "pod", holder, "--force", "--grace-period=0", "--wait=false")
    kubectl.apply(slice_pod("orphan", Slice(1024)))
    kubectl.wait_for_phase("orphan", "Running", seconds=3 * LEASE_SECONDS)
    assert leader(system) != holder
    invariants.hold()


def test_without_webhook_gpu_pods_are_refused_and_all_others_run(invariants: Invariants, kubectl: Kubectl, system: Kubectl) -> None:
    with scheduler_away(system):
        kubectl.apply(busybox_pod("other", "true"))
        kubectl.wait_for_phase("other", "Succeeded")
        with pytest.raises(KubectlError, match=r"aliquot\.dev"):
            kubectl.apply(slice_pod("gpu", Slice(1024)))
        invariants.untouched()
    invariants.hold()


@contextmanager
def scheduler_away(system: Kubectl) -> Iterator[None]:
    """No replica of the scheduler, so no webhook, for a while."""
    try:
        system.run("scale", "deployment", "aliquot-scheduler", "--replicas=0")
        system.run("wait", "pods", SELECTOR, "--for=delete", "--timeout=60s", timeout_seconds=90)
        yield
    finally:
        system.run("scale", "deployment", "aliquot-scheduler", "--replicas=2")
        wait_until_rolled_out(system)


def leader(system: Kubectl) -> str:
    """The pod with the kube-scheduler that leads, once one that is there does: a lease outlives its holder."""

    def holder() -> str:
        name: str = system.get("lease", contract.SCHEDULER_NAME)["spec"]["holderIdentity"].rpartition("_")[0]
        return name if system.find("pod", name) else ""

    return eventually(holder, "a kube-scheduler to lead")


def container_id(pod: Object, name: str) -> str:
    [status] = [status for status in pod["status"]["containerStatuses"] if status["name"] == name]
    return status["containerID"]


def bound(kubectl: Kubectl) -> list[str]:
    return [pod["metadata"]["name"] for pod in kubectl.all("pods") if pod["spec"].get("nodeName")]


def running(kubectl: Kubectl) -> int:
    return sum(pod["status"].get("phase") == "Running" for pod in kubectl.all("pods"))


def waiting(kubectl: Kubectl) -> str:
    names = [pod["metadata"]["name"] for pod in kubectl.all("pods") if pod["status"].get("phase") != "Running"]
    return f"not running: {', '.join(names)}\n{kubectl.explain(names[0]) if names else ''}"
