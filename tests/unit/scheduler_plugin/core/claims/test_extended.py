# SPDX-License-Identifier: Apache-2.0
"""The claim for extended resources; the cases with init containers are those of kube-scheduler's rules."""

from typing import Any

import msgspec
import pytest

from scheduler_plugin.core.claims.extended import classes_by_resource, requests_for
from scheduler_plugin.core.cluster.objects import NodeObject, PodObject, plugin_resources, pod_facts
from tests.unit.scheduler_plugin.claim_builders import class_of, pod_json

A, B = "example.com/a", "example.com/b"
CLASS_OF = {A: "class-a", B: "class-b"}


def container(*, restart: str = "", **counts: int) -> dict[str, Any]:
    requests = {"cpu": "1", **{f"example.com/{name}": str(count) for name, count in counts.items()}}
    return {"resources": {"requests": requests}, **({"restartPolicy": restart} if restart else {})}


def facts(init: list[dict[str, Any]], containers: list[dict[str, Any]], **more: Any) -> Any:
    pod = pod_json("p")
    pod["spec"] |= {"initContainers": init, "containers": containers, **more}
    return pod_facts(msgspec.convert(pod, PodObject))


def requested(init: list[dict[str, Any]], containers: list[dict[str, Any]]) -> dict[str, tuple[str, int]]:
    found = requests_for(facts(init, containers).extended, CLASS_OF)
    return {one["name"]: (one["exactly"]["deviceClassName"], one["exactly"]["count"]) for _, one in found}


def test_each_container_and_resource_has_a_request():
    assert requested([], [container(a=1, b=2), container(), container(b=3)]) == {
        "container-0-request-1": ("class-a", 1),
        "container-0-request-2": ("class-b", 2),
        "container-2-request-1": ("class-b", 3),
    }


@pytest.mark.parametrize(
    ("init", "counts"),
    [
        pytest.param([container(a=2)], [3], id="uses the devices of the container"),
        pytest.param([container(a=5)], [2, 3], id="lacks two"),
        pytest.param([container(a=4), container(a=7), container(a=5)], [4, 3], id="the largest counts"),
        pytest.param([container(a=1, restart="Always")], [1, 3], id="sidecar"),
        pytest.param([container(a=1, restart="Always"), container(a=4)], [1, 1, 3], id="earlier sidecar keeps its own"),
        pytest.param([container(a=4), container(a=1, restart="Always")], [1, 3], id="later sidecar lends its own"),
    ],
)
def test_init_containers_share_devices(init: list[dict[str, Any]], counts: list[int]):
    assert [count for _, count in requested(init, [container(a=3)]).values()] == counts


def test_requests_are_in_order_of_their_names():
    """As texts: the tenth comes before the second."""
    found = list(requested([], [container(a=1) for _ in range(11)]))
    assert found[1:3] == ["container-1-request-1", "container-10-request-1"]


def test_only_pods_without_node_have_extended_resources():
    assert facts([], [container(a=1)]).extended
    assert facts([], [container(a=1)], nodeName="n").extended == ()
    assert facts([], [container()]).extended == ()


def test_newest_class_gives_out_a_resource():
    classes = {}
    for name, created in (("b-old", "2026-01-01T00:00:00Z"), ("d-new", "2026-02-01T00:00:00Z"), ("c-new", "2026-02-01T00:00:00Z")):
        classes[name] = class_of(name)
        classes[name]["spec"]["extendedResourceName"] = A
        classes[name]["metadata"]["creationTimestamp"] = created
    found = classes_by_resource(classes)
    assert found[A] == "c-new"
    assert found["deviceclass.resource.kubernetes.io/b-old"] == "b-old"


def test_plugins_serve_what_is_allocatable():
    allocatable = {"cpu": "8", "hugepages-2Mi": "1Gi", A: "4", B: "0", "nvidia.com/vgpu": 16}
    node = msgspec.convert({"status": {"allocatable": allocatable}}, NodeObject)
    assert plugin_resources(node) == {A, "nvidia.com/vgpu"}


def test_claim_for_extended_resources_is_a_claim_of_the_bound_pod():
    pod = pod_json("p", "own", node="n")
    pod["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "made", "requestMappings": []}
    assert pod_facts(msgspec.convert(pod, PodObject)).claims == ("own", "made")
