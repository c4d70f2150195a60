# SPDX-License-Identifier: Apache-2.0
"""What no library can hold, the audit sees from outside: static programs, musl programs with a driver of their own, stolen device files."""

from collections.abc import Iterator
from functools import partial

import pytest

from agent.core.audit import FindingKind
from aliquot import contract
from tests.e2e.conftest import Target, own_namespace
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import CLIENT, CLIENT_IMAGE, FORKED, HOLD_OPEN, MUSL_IMAGE, STATIC_CLIENT, Slice, metrics, slice_pod

pytestmark = pytest.mark.usefixtures("product")

SHARE_MIB = 1024
TAKEN_MIB = 3000
STATIC = {"static-glibc": CLIENT_IMAGE, "static-musl": MUSL_IMAGE}
"""Pods with a program that has the driver linked in, by name, each with its image."""
SEEN_SECONDS = 90
"""A finding is reported when two passes in a row, 10 s apart, have made it."""
SIMULATED_DEVICES = "/var/lib/aliquot-simulated"
"""On a node with the simulated driver, what /dev/nvidia* is on a real one."""


@pytest.fixture(scope="module")
def audited(target: Target, product: Kubectl) -> Iterator[Kubectl]:
    """A namespace with everything that the audit is to find, and a pod where there is nothing to find: it makes its passes once for all."""
    del product
    with own_namespace(target, "e2e-audit") as kubectl:
        honest = slice_pod("honest", Slice(SHARE_MIB), [CLIENT, "hold", "--mib", str(SHARE_MIB // 4)])  # its context takes half
        pods = [*(taker(name, image) for name, image in STATIC.items()), thief(), honest]
        kubectl.apply(*pods)
        for pod in pods:
            kubectl.wait_for_phase(pod["metadata"]["name"], "Running")
        yield kubectl


@pytest.mark.parametrize("pod", STATIC)
def test_a_static_program_that_takes_more_than_its_share_is_reported(audited: Kubectl, product: Kubectl, node_name: str, pod: str) -> None:
    """It gets what it requests, since nothing stands between it and the driver; its pod, the metrics and an alert report this."""
    reported = wait_for_findings(audited, product, node_name, pod, FindingKind.OVER_LIMIT, FindingKind.SHIM_UNKNOWN)
    assert f"its limit is {SHARE_MIB} MiB" in reported or "its limit is 1 GiB" in reported
    assert "and the shim does not count it" in reported, "as shipped the agent may not look into programs, so it is certain of no more"
    assert not findings(product, node_name, audited.namespace, "honest")
    assert audited.get("pod", pod)["status"]["phase"] == "Running", "the policy as shipped is to report"


def test_a_container_that_was_granted_nothing_and_took_the_devices_is_reported(audited: Kubectl, product: Kubectl, node_name: str) -> None:
    reported = wait_for_findings(audited, product, node_name, "thief", FindingKind.NO_GRANT)
    assert "was granted no GPU" in reported


def test_findings_go_with_their_pod(audited: Kubectl, product: Kubectl, node_name: str) -> None:
    found = (*STATIC, "thief")
    for pod in found:
        eventually(partial(findings, product, node_name, audited.namespace, pod), f"findings of {pod}", seconds=SEEN_SECONDS)
    audited.delete("pod", *found)

    def has_no_finding(pod: str) -> bool:
        return not findings(product, node_name, audited.namespace, pod)

    for pod in found:
        eventually(partial(has_no_finding, pod), f"no more findings of {pod}", seconds=SEEN_SECONDS)


def test_musl_program_gets_no_driver_and_loader_error(kubectl: Kubectl) -> None:
    """NVIDIA's driver is made for glibc. What the shim adds is that nothing else in such an image breaks."""
    pod = slice_pod("alpine", Slice(SHARE_MIB), HOLD_OPEN)
    pod["spec"]["containers"][0]["image"] = MUSL_IMAGE
    kubectl.apply(pod)
    kubectl.wait_for_phase("alpine", "Running")
    said = kubectl.exec("alpine", "sh", "-c", f"{FORKED} 16 1 2>&1; echo ended with $?")
    assert "expected to open libcuda.so.1, found:" in said
    assert "ended with 1" in said
    assert kubectl.exec("alpine", "ls", "/run/aliquot").split(), "it has its files all the same"


def taker(name: str, image: str) -> Object:
    """A pod with a share; its static program takes nearly three times as much."""
    pod = slice_pod(name, Slice(SHARE_MIB), [STATIC_CLIENT, "hold", "--mib", str(TAKEN_MIB)])
    pod["spec"]["containers"][0]["image"] = image
    return pod


def thief() -> Object:
    """A pod without a share that takes the devices, as by the host's /dev: the simulated hardware lies in a directory of the node."""
    pod = taker("thief", CLIENT_IMAGE)
    [container] = pod["spec"]["containers"]
    del container["resources"]
    container["env"] = [{"name": contract.ENV_SIM_DIR, "value": f"{SIMULATED_DEVICES}/node"}]
    container["volumeMounts"] = [{"name": "devices", "mountPath": SIMULATED_DEVICES}]
    pod["spec"]["volumes"] = [{"name": "devices", "hostPath": {"path": SIMULATED_DEVICES}}]
    return pod


def findings(product: Kubectl, node_name: str, namespace: str, pod: str) -> set[str]:
    """What the agent's metrics say is wrong with a pod."""
    wanted = {"namespace": namespace, "pod": pod}
    return {
        labels["kind"]
        for name, labels, value in metrics(product, node_name)
        if name == "aliquot_audit_findings" and value > 0 and wanted.items() <= labels.items()
    }


def wait_for_findings(kubectl: Kubectl, product: Kubectl, node_name: str, pod: str, *kinds: FindingKind) -> str:
    """Wait until metrics and the pod's events tell of these and no others; return what the events say."""

    def seen() -> set[str]:
        return findings(product, node_name, kubectl.namespace, pod)

    eventually(
        lambda: seen() == set(map(str, kinds)), f"findings {', '.join(kinds)}", seconds=SEEN_SECONDS, otherwise=lambda: f"seen: {seen()}"
    )
    reported = eventually(
        lambda: [event for event in kubectl.events(pod) if event.startswith(contract.EVENT_REASON_AUDIT)],
        "the pod's events to tell of it",
        otherwise=lambda: kubectl.explain(pod),
    )
    return "\n".join(reported)
