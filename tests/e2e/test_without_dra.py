# SPDX-License-Identifier: Apache-2.0
"""A control plane from before dynamic resource allocation: as Kubernetes 1.33 was, the oldest that these programs can act as.

The kubelet cannot act as an older one, and since 1.35 it has dynamic resource allocation always; without the API it has no use for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.e2e.cluster.cluster import Cluster
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import MIB, Client, Slice, Variant, patch, slice_pod
from tests.e2e.test_node_faults import answers

AS_133 = "--emulated-version=1.33"
COMPONENTS = ("kube-apiserver", "kube-controller-manager")


def kube_scheduler_with(*flags: str) -> Object:
    """A patch of the product: its kube-scheduler has further flags."""
    added = ({"op": "add", "path": "/spec/template/spec/containers/0/command/-", "value": flag} for flag in flags)
    return patch("Deployment", "aliquot-scheduler", *added)


VARIANT = Variant(patches=(kube_scheduler_with(AS_133),))


@pytest.fixture(scope="module")
def as_133(installation: Kubectl, node: Cluster) -> Iterator[None]:
    """API server and controllers as of 1.33; as they were afterwards."""
    del installation
    restart(node, (AS_133,))
    yield
    restart(node, ())


@pytest.fixture(autouse=True, scope="module")
def without_dra(as_133: None, product: Kubectl) -> None:
    """The product comes to a control plane of that version."""
    del as_133, product


def restart(node: Cluster, flags: Sequence[str]) -> None:
    """Run the control plane with some more flags."""
    for name in COMPONENTS:
        component = node.component(name)
        node.stop(name)
        node.start(name, replace(component, command=[*component.command, *flags]))
        if name == "kube-apiserver":
            eventually(lambda: answers(node.kubectl()), "the API server to answer", seconds=60)


def test_there_is_no_api_for_resource_claims(product: Kubectl) -> None:
    with pytest.raises(KubectlError, match="NotFound"):
        product.run("get", "--raw=/apis/resource.k8s.io")


def test_pods_get_their_share_and_excessive_requests_are_refused_with_reason(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("share", Slice(3000)), slice_pod("too-large", Slice(10**6)))
    kubectl.wait_for_phase("share", "Running", seconds=60)
    assert [device["total_bytes"] for device in Client(kubectl, "share").devices()] == [3000 * MIB]
    eventually(
        lambda: [event for event in kubectl.events("too-large") if "not enough free memory on one GPU" in event],
        "an event on the pod that requests too much",
        otherwise=lambda: kubectl.explain("too-large"),
    )
