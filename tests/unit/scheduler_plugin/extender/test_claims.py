# SPDX-License-Identifier: Apache-2.0
"""filter and prioritize for pods with ResourceClaims."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import Policy
from aliquot.placement import mig
from scheduler_plugin.core.claims.first_fit import MOST_STEPS, _Search
from scheduler_plugin.core.cluster.hold_uids import claim_uid
from scheduler_plugin.core.cluster.journal import Rules
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import Use
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.why import Why
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS
from scheduler_plugin.extender.claims import STEPS_PER_NODE, ClaimVerdicts
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.services.explainer import Explainer
from tests.unit.scheduler_plugin.builders import filter_body, make_context, make_device, make_node, make_place
from tests.unit.scheduler_plugin.claim_builders import asking, claim_of, class_of, pod_json, pod_of, result, serve, slice_of

NODES = ["n1", "n2", "n3"]
ATTRIBUTES = "device.attributes['gpu.aliquot.dev']"
FIXED = "device.driver == 'gpu.aliquot.dev' && device.attributes['gpu.aliquot.dev'].type == 'fixed'"


def cluster(*, devices: int = 2, served: Sequence[str] = NODES) -> ExtenderContext:
    state = ClusterState()
    nodes = {name: make_node(name, devices) for name in NODES}
    for node in nodes.values():
        state.set_gpu_node(node)
    context = make_context(state)
    serve(context, *(nodes[name] for name in served))
    return context


@pytest.mark.parametrize(
    ("resource", "is_ours"),
    [
        ("nvidia.com/vgpu-20g", True),
        ("nvidia.com/rdma", False),
        ("nvidia.com/gpu", False),
        ("deviceclass.resource.kubernetes.io/fixed", True),
        ("deviceclass.resource.kubernetes.io/nic", False),
        ("cpu", False),
    ],
)
def test_resource_is_ours_if_class_of_it_selects_our_devices(resource, is_ours):
    context = cluster()
    fixed, nic = class_of("fixed", FIXED), class_of("nic", "device.driver == 'nic.example.com'")
    fixed["spec"]["extendedResourceName"], nic["spec"]["extendedResourceName"] = "nvidia.com/vgpu-20g", "nvidia.com/rdma"
    context.claims.pools.replace_classes([class_of(), fixed, nic])
    assert context.claims.is_our_resource(resource) is is_ours


def body(pod: Any, names: Sequence[str] = NODES) -> bytes:
    return json.dumps({"Pod": pod, "NodeNames": list(names)}).encode()


def filtered(context: ExtenderContext, pod: Any, names: Sequence[str] = NODES) -> tuple[list[str], dict[str, str]]:
    reply = json.loads(filter_body(context, body(pod, names), 0.0))
    assert not reply["Error"]
    return reply["NodeNames"], {**(reply["FailedNodes"] or {}), **(reply["FailedAndUnresolvableNodes"] or {})}


def scores(context: ExtenderContext, pod: Any, names: Sequence[str] = NODES) -> dict[str, int]:
    return {one["Host"]: one["Score"] for one in json.loads(prioritize_nodes(context, body(pod, names)))}


def allocate(context: ExtenderContext, name: str, node: str, minor: int, memory: str, *users: str) -> None:
    """Show a claim that another pod has."""
    context.claims.holds.set_claim(claim_of(name, asking(memory=memory), results=[result(node, minor, memory=memory)], reserved_for=users))


def test_node_without_room_for_claims_is_refused_with_sentence():
    context = cluster()
    for minor in range(2):
        allocate(context, f"full-{minor}", "n1", minor, "900Mi")
    context.claims.holds.set_claim(claim_of("mine", asking(memory="200Mi")))
    fitting, failed = filtered(context, pod_json("p", "mine"))
    assert fitting == ["n2", "n3"]
    assert failed == {"n1": NodeReason.MEMORY.sentence}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        pytest.param(asking(count=3, memory="1Mi"), NodeReason.COUNT, id="too few GPUs"),
        pytest.param(asking(memory="2000Mi"), NodeReason.MEMORY, id="more than a GPU has"),
        pytest.param(asking(memory="1Mi", cores="200"), NodeReason.CORES, id="cores"),
        pytest.param(asking(selector="device.attributes['gpu.aliquot.dev'].productName == 'B200'"), NodeReason.CLAIMS, id="selector"),
    ],
)
def test_claim_that_fits_nowhere_is_refused_on_each_node(request_: Any, reason: NodeReason):
    context = cluster()
    context.claims.holds.set_claim(claim_of("mine", request_))
    assert filtered(context, pod_json("p", "mine")) == ([], dict.fromkeys(NODES, reason.sentence))
    assert list(context.claims.refused) == ["p"]


def offer_half_gpus(context: ExtenderContext, node: str) -> None:
    """Publish a node's GPUs as an agent with ``draProfiles`` does: each whole, or as two fixed halves."""
    plain = slice_of(make_node(node, 2))["spec"]
    whole, half = ({"memory": {"value": f"{mib}Mi"}, "shares": {"value": shares}} for mib, shares in ((1000, "16"), (500, "1")))
    devices, sets = [], []
    for gpu in plain["devices"]:
        sets.append({"name": gpu["name"], "counters": whole})
        devices.append({**gpu, "consumesCounters": [{"counterSet": gpu["name"], "counters": whole}]})
        draws = [{"counterSet": gpu["name"], "counters": half}]
        devices += [
            {
                "name": f"{gpu['name']}-half-{n}",
                "attributes": {"type": {"string": "fixed"}, "parentUUID": gpu["attributes"]["uuid"]},
                "capacity": {"memory": {"value": "500Mi"}},
                "consumesCounters": draws,
            }
            for n in range(2)
        ]
    for number, content in enumerate(({"sharedCounters": sets}, {"devices": devices})):
        pool = {"name": node, "generation": 2, "resourceSliceCount": 2}
        spec = {"driver": plain["driver"], "nodeName": node, "pool": pool, **content}
        context.claims.holds.set_slice({"metadata": {"name": f"{node}-{number}"}, "spec": spec})


def test_gpu_fits_where_no_fixed_share_of_it_is_taken():
    context = cluster()
    for node in ("n1", "n2"):
        offer_half_gpus(context, node)
    for minor in range(2):
        half = {"request": "gpu", "driver": "gpu.aliquot.dev", "pool": "n1", "device": f"gpu-{minor}-half-0"}
        context.claims.holds.set_claim(claim_of(f"half-{minor}", asking(), results=[half]))
    context.claims.holds.set_claim(claim_of("mine", asking(memory="100Mi")))
    fitting, failed = filtered(context, pod_json("p", "mine"))
    assert (fitting, list(failed)) == (["n2", "n3"], ["n1"])


def test_fixed_share_fits_until_the_counters_are_used_up():
    context = cluster(served=[])
    offer_half_gpus(context, "n1")
    context.claims.pools.set_class(class_of("half", FIXED))
    allocate(context, "share", "n1", 0, "1Mi")
    for count, fits in ((2, True), (3, False)):
        context.claims.holds.set_claim(claim_of("mine", asking(count=count, device_class="half")))
        assert (filtered(context, pod_json("p", "mine"), ["n1"])[0] == ["n1"]) == fits


def offer_instances(context: ExtenderContext, gpus: GpuNode) -> None:
    """Publish a node's MIG instances, and places for them, as the agent does. No two of a test overlap, so they draw on no counters."""
    devices = [
        {
            "name": f"gpu-{entry.device.minor}-mig-{number}-{one.placement_start}",
            "attributes": {
                "type": {"string": "mig"},
                "parentUUID": {"string": entry.device.uuid},
                "profile": {"string": one.profile},
                **({} if one.on_demand else {"uuid": {"string": one.uuid}}),
            },
            "capacity": {"memory": {"value": f"{one.memory_bytes >> 20}Mi"}},
        }
        for entry in gpus.devices
        for number, one in enumerate(entry.device.mig_instances)
    ]
    pool = {"name": gpus.name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.aliquot.dev", "nodeName": gpus.name, "pool": pool, "devices": devices}
    context.claims.holds.set_slice({"metadata": {"name": f"{gpus.name}-0"}, "spec": spec})


def takes_fixed(context: ExtenderContext, name: str, node: str, device: str) -> None:
    """Show a claim that has a device alone."""
    alone = {"request": "gpu", "driver": "gpu.aliquot.dev", "pool": node, "device": device}
    context.claims.holds.set_claim(claim_of(name, asking(), results=[alone]))


def test_fixed_share_prefers_node_with_begun_gpu():
    context = cluster(served=[])
    for node in NODES:
        offer_half_gpus(context, node)
    context.claims.pools.set_class(class_of("half", FIXED))
    takes_fixed(context, "other", "n2", "gpu-0-half-0")
    assert context.claims._state.device_states("n2")[0].used_memory_bytes == 500 << 20
    for count in (1, 2):
        context.claims.holds.set_claim(claim_of("mine", asking(count=count, device_class="half")))
        rated = scores(context, pod_json("p", "mine"))
        assert all(rated.values())
        assert (max(rated, key=rated.__getitem__) == "n2") is (count == 1), "a whole GPU leaves the most where none is begun"


@pytest.mark.parametrize("on_demand", [False, True])
def test_instance_prefers_node_with_begun_gpu(on_demand: bool):
    context = cluster(served=[])
    for name in NODES:
        device = make_device(name, 0, instances=7)
        if on_demand:
            device = replace(device, mig_instances=tuple(make_place(device.uuid, "1g.10gb", start) for start in range(7)))
        node = make_node(name, [device])
        context.claims._state.set_gpu_node(node)
        offer_instances(context, node)
    context.claims.pools.set_class(class_of("mig", FIXED.replace("fixed", "mig")))
    context.claims.is_current = True
    takes_fixed(context, "other", "n2", "gpu-0-mig-0-0")
    assert len(context.claims._state.device_states("n2")[0].used_instances) == 1
    context.claims.holds.set_claim(claim_of("mine", asking(device_class="mig")))
    rated = scores(context, pod_json("p", "mine"))
    assert max(rated, key=rated.__getitem__) == "n2"
    assert all(rated.values())


def test_share_of_gpu_in_mig_mode_takes_places_and_prefers_begun_gpu():
    context = cluster(served=[])
    context.claims.pools.set_class(class_of(expression=f"{ATTRIBUTES}.type == 'shared-mig'"))
    context.claims.is_current = True
    for name in NODES:
        device = make_device(name, 0, instances=1)
        places = [replace(make_place(device.uuid, "7g.80gb", 0), memory_bytes=1000 << 20), make_place(device.uuid, "1g.10gb", 0)]
        node = make_node(name, [replace(device, mig_instances=tuple(places))])
        context.claims._state.set_gpu_node(node)
        one = slice_of(node)
        one["spec"]["devices"][0]["attributes"]["type"] = {"string": "shared-mig"}
        context.claims.holds.set_slice(one)
    for left in (("a", "b"), ("b",), ()):
        for name in ("a", "b"):
            if name in left:
                allocate(context, name, "n2", 0, "150Mi")
            elif (claim := context.claims.pools.claims.get(("team", name))) is not None:
                context.claims.holds.drop_claim(claim)
        (state,) = context.claims._state.device_states("n2")
        assert (state.used_memory_bytes, mig.room(state, "1g.10gb")) == (150 * len(left) << 20, 0 if left else 1)
    allocate(context, "other", "n2", 0, "300Mi")
    context.claims.holds.set_claim(claim_of("mine", asking(memory="700Mi")))
    rated = scores(context, pod_json("p", "mine"))
    assert all(rated.values())
    assert max(rated, key=rated.__getitem__) == "n2"
    context.claims.holds.set_claim(claim_of("more", asking(memory="701Mi")))
    fitting, failed = filtered(context, pod_json("q", "more"))
    assert (fitting, failed) == (["n1", "n3"], {"n2": NodeReason.CLAIMS.sentence})


def test_node_of_device_plugin_is_refused():
    context = cluster(served=["n2"])
    context.claims.holds.set_claim(claim_of("mine", asking(memory="1Mi")))
    assert filtered(context, pod_json("p", "mine")) == (["n2"], dict.fromkeys(["n1", "n3"], NodeReason.NOT_CLAIMABLE.sentence))


def test_node_without_inventory_is_left_to_kube_scheduler():
    context = cluster()
    context.claims.holds.set_claim(claim_of("mine", asking(memory="1Mi")))
    assert filtered(context, pod_json("p", "mine"), [*NODES, "new"])[0] == [*NODES, "new"]
    assert scores(context, pod_json("p", "mine"), [*NODES, "new"])["new"] == 0


UNKNOWN = {
    "claim does not exist": [],
    "selector": [claim_of("mine", asking(selector="device.attributes['a.b'].c.major() >= 1"))],
    "class": [claim_of("mine", asking(device_class="other"))],
    "mode": [claim_of("mine", {"name": "r", "exactly": {"deviceClassName": "vgpu.aliquot.dev", "allocationMode": "Half"}})],
    "allocated": [claim_of("mine", asking(memory="1Mi"), results=[result("n1", 0, memory="1Mi")])],
    "another driver": [claim_of("mine", asking(device_class="nic"))],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_predicted_is_left_to_kube_scheduler(name: str):
    context = cluster()
    context.claims.pools.set_class(class_of("nic", "device.driver == 'nic'"))
    for claim in UNKNOWN[name]:
        context.claims.holds.set_claim(claim)
    assert filtered(context, pod_json("p", "mine")) == (NODES, {})
    assert isinstance(context.claims.query(pod_of("p", "mine")), str)


def test_claims_are_left_to_kube_scheduler_until_all_are_listed():
    context = cluster()
    context.claims.is_current = False
    context.claims.holds.set_claim(claim_of("mine", asking(memory="5000Mi")))
    assert filtered(context, pod_json("p", "mine")) == (NODES, {})


def test_node_is_rated_by_device_that_kube_scheduler_takes_there():
    """On n1 the first GPU with room is the empty one, on n2 the used one: the best GPU of both nodes would be equally good."""
    context = cluster()
    half: Any = {"memory": "500Mi", "cores": "50"}
    for name, node, minor in (("a", "n1", 1), ("b", "n2", 0)):
        context.claims.holds.set_claim(claim_of(name, asking(**half), results=[result(node, minor, **half)]))
    context.claims.holds.set_claim(claim_of("mine", asking(**half)))
    found = scores(context, pod_json("p", "mine"), ["n1", "n2"])
    assert found["n2"] > found["n1"]
    query = context.claims.query(pod_of("p", "mine"))
    assert not isinstance(query, str)
    assert context.claims.taking(query, context.state.rows_by_name["n1"])[0][0].device[2] == "gpu-0"


def test_two_requests_on_one_gpu_are_both_expected_there():
    context = cluster(devices=1)
    requests = [asking(name, memory=memory, cores="10") for name, memory in (("a", "300Mi"), ("b", "400Mi"))]
    context.claims.holds.set_claim(claim_of("mine", *requests))
    context.state.set_pod(pod_of("p", "mine"))
    filtered(context, pod_json("p", "mine"), ["n1"])
    assert context.state.footprint_of("p") == {"GPU-n1-0": Use(700, 20, 2, 0)}


def test_claim_that_gets_devices_of_another_driver_has_none_of_ours():
    context = cluster()
    allocate(context, "a", "n1", 0, "300Mi")
    other = {**result("n1", 0), "driver": "nic"}
    context.claims.holds.set_claim(claim_of("a", asking(), results=[other]))
    assert context.state.footprint_of(claim_uid("claim-a")) == {}


@pytest.mark.parametrize("served", [NODES, ["n2"]])
def test_device_that_all_nodes_can_use_is_left_to_kube_scheduler(served: Sequence[str]):
    """Its slice has no node, so it is not in the search."""
    context = cluster(served=served)
    pool = {"name": "fabric", "generation": 1, "resourceSliceCount": 1}
    port = {"driver": "nic", "allNodes": True, "pool": pool, "devices": [{"name": "port-0"}]}
    context.claims.holds.set_slice({"metadata": {"name": "port-0"}, "spec": port})
    context.claims.pools.set_class(class_of("nic", "device.driver == 'nic'"))
    context.claims.holds.set_claim(claim_of("mine", asking(memory="1Mi"), asking("port", device_class="nic")))
    assert filtered(context, pod_json("p", "mine")) == (NODES, {})
    context.claims.holds.set_claim(claim_of("ours", asking(memory="2000Mi")))
    assert filtered(context, pod_json("p", "ours"))[0] == []


@pytest.mark.parametrize(
    "selector",
    [
        "device.driver != 'gpu.aliquot.dev'",
        "!(device.driver == 'gpu.aliquot.dev')",
        "device.driver in ['gpu.aliquot.dev', 'nic']",
        "device.driver == 'gpu.aliquot.dev' || device.driver == 'nic'",
    ],
)
def test_request_that_names_our_driver_may_be_for_devices_of_all_nodes(selector: str):
    context = cluster(served=["n2"])
    port = {"driver": "nic", "allNodes": True, "pool": {"name": "fabric", "resourceSliceCount": 1}, "devices": [{"name": "port-0"}]}
    context.claims.holds.set_slice({"metadata": {"name": "port-0"}, "spec": port})
    context.claims.pools.set_class(class_of("any", selector))
    context.claims.holds.set_claim(claim_of("mine", asking(memory="1Mi"), asking("port", device_class="any")))
    assert filtered(context, pod_json("p", "mine")) == (NODES, {}), "kube-scheduler decides"


def all_gpus(**more: Any) -> Any:
    exactly = {"deviceClassName": "vgpu.aliquot.dev", "allocationMode": "All", "capacity": {"requests": {"memory": "500Mi"}}, **more}
    return {"name": "gpus", "exactly": exactly}


def test_claim_for_all_gpus_is_rated_by_all_of_them():
    context = cluster()
    allocate(context, "half", "n1", 1, "500Mi")
    context.claims.holds.set_claim(claim_of("mine", all_gpus()))
    found = scores(context, pod_json("p", "mine"))
    assert all(found.values())
    assert max(found, key=found.__getitem__) == "n1", "a GPU is in use there already"
    assert context.state.footprint_of("p") == dict.fromkeys(["GPU-n1-0", "GPU-n1-1"], Use(500, 0, 1, 1))


def test_claim_for_all_gpus_is_refused_where_one_is_not_open():
    context = cluster()
    for minor in range(2):
        allocate(context, f"full-{minor}", "n2", minor, "900Mi")
    free = make_node("n1", 2)
    cordoned = replace(free, devices=(free.devices[0], replace(free.devices[1], trouble="cordoned")))
    context.state.set_gpu_node(cordoned)
    one = slice_of(cordoned)
    one["spec"]["devices"][1]["taints"] = [{"key": "aliquot.dev/cordoned", "effect": "NoSchedule"}]
    context.claims.holds.set_slice(one)
    context.claims.holds.set_claim(claim_of("mine", all_gpus()))
    fitting, failed = filtered(context, pod_json("p", "mine"))
    assert (fitting, failed) == (["n3"], {"n1": NodeReason.UNAVAILABLE.sentence, "n2": NodeReason.MEMORY.sentence})


def test_claim_with_admin_access_takes_nothing():
    context = cluster()
    allocate(context, "most", "n1", 0, "900Mi")
    for minor in range(2):
        allocate(context, f"full-{minor}", "n2", minor, "1000Mi")
    context.claims.holds.set_claim(claim_of("mine", all_gpus(adminAccess=True, capacity={"requests": {"memory": "1Mi"}})))
    fitting, failed = filtered(context, pod_json("p", "mine"))
    assert (fitting, failed) == (["n1", "n3"], {"n2": NodeReason.MEMORY.sentence})
    assert all(scores(context, pod_json("p", "mine"), fitting).values())
    assert context.state.footprint_of("p") == {}


FIXED_NAME, IMPLICIT = "nvidia.com/vgpu-half", "deviceclass.resource.kubernetes.io/half"


def asking_resource(uid: str, resource: str, count: int = 1) -> Any:
    pod = pod_json(uid)
    pod["spec"]["containers"][0]["resources"]["requests"][resource] = str(count)
    return pod


def offering_halves() -> ExtenderContext:
    """Two nodes with GPUs by halves, which a class gives out as an extended resource; a device plugin gives it out on the third."""
    context = cluster(served=["n1", "n2"])
    for node in ("n1", "n2"):
        offer_half_gpus(context, node)
    half = class_of("half", FIXED)
    half["spec"]["extendedResourceName"] = FIXED_NAME
    context.claims.pools.set_class(half)
    context.state.set_plugin_resources("n3", frozenset([FIXED_NAME, IMPLICIT]))
    return context


@pytest.mark.parametrize("resource", [FIXED_NAME, IMPLICIT])
def test_extended_resource_of_class_is_predicted_as_claim(resource: str):
    context = offering_halves()
    takes_fixed(context, "other", "n2", "gpu-0-half-0")
    pod = asking_resource("p", resource)
    assert filtered(context, pod)[0] == NODES
    found = scores(context, pod)
    assert found["n2"] > found["n1"] > 0, "a GPU of n2 is in use already"
    assert context.state.footprint_of("p") == {"GPU-n2-0": Use(500, 0, 1, 1)}
    assert filtered(context, asking_resource("q", resource, 4)) == (["n1", "n3"], {"n2": NodeReason.CLAIMS.sentence})
    for device in ("gpu-0-half-1", "gpu-1-half-0", "gpu-1-half-1"):
        takes_fixed(context, device, "n2", device)
    assert filtered(context, asking_resource("r", resource)) == (["n1", "n3"], {"n2": NodeReason.MEMORY.sentence})


def test_extended_resource_is_served_by_class_once_plugin_is_gone():
    context = offering_halves()
    pod = asking_resource("p", FIXED_NAME, 5)
    assert filtered(context, pod)[0] == ["n3"], "kube-scheduler compares the amount"
    context.state.set_plugin_resources("n3", frozenset())
    assert filtered(context, pod)[1]["n3"] == NodeReason.NOT_CLAIMABLE.sentence
    assert list(context.claims.refused) == ["p"]


def test_node_is_judged_by_resources_that_its_plugins_do_not_serve():
    """On n3 only the claim of the pod remains."""
    context = offering_halves()
    context.claims.holds.set_slice(slice_of(make_node("n3", 2)))
    context.claims.holds.set_claim(claim_of("mine", asking(memory="100Mi")))
    pod = pod_json("p", "mine")
    pod["spec"]["containers"][0]["resources"]["requests"][FIXED_NAME] = "1"
    assert filtered(context, pod)[0] == NODES
    scores(context, pod, ["n3"])
    assert context.state.footprint_of("p") == {"GPU-n3-0": Use(100, 0, 1, 1)}


def test_extended_resource_without_class_is_left_to_kube_scheduler():
    context = cluster()
    pod = asking_resource("p", "example.com/dongle", 100)
    assert filtered(context, pod) == (NODES, {})
    assert why(context, pod).refusal == "it asks for no GPU of Aliquot, so kube-scheduler alone decides"


def why(context: ExtenderContext, pod: Any) -> Why:
    explainer = Explainer(context, Rules(Policy.FRAG, DEFAULT_WEIGHTS), lambda: 0.0)
    return asyncio.run(explainer.explain(pod_facts(msgspec.convert(pod, PodObject))))


def test_pod_with_extended_resource_of_class_is_explained():
    context = offering_halves()
    context.state.set_plugin_resources("n3", frozenset())
    found = why(context, asking_resource("p", FIXED_NAME, 5))
    reasons = {one.reason: one.nodes for one in found.reasons}
    assert (found.fitting, reasons) == (0, {NodeReason.CLAIMS.sentence: 2, NodeReason.NOT_CLAIMABLE.sentence: 1})
    assert found.by_claims


def test_devices_of_claim_for_extended_resources_are_shown():
    context = offering_halves()
    takes_fixed(context, "made", "n1", "gpu-1-half-0")
    pod = asking_resource("p", FIXED_NAME)
    pod["spec"]["nodeName"], pod["status"]["extendedResourceClaimStatus"] = "n1", {"resourceClaimName": "made"}
    assert why(context, pod).devices == ("GPU-n1-1",)


def test_search_over_all_nodes_is_limited(monkeypatch: pytest.MonkeyPatch):
    """Nine requests that do not fit have nine factorial ways on each node."""
    tried, fitting = [0], _Search._fitting

    def counted(self: _Search, *asked: Any) -> Any:
        tried[0] += 1
        return fitting(self, *asked)

    monkeypatch.setattr(_Search, "_fitting", counted)
    context = cluster(devices=8)
    context.claims.holds.set_claim(claim_of("mine", *(asking(f"r{number}", memory="600Mi") for number in range(9))))
    assert filtered(context, pod_json("p", "mine")) == (NODES, {}), "kube-scheduler decides"
    assert tried[0] <= MOST_STEPS + len(NODES) * STEPS_PER_NODE


def test_claim_for_all_gpus_of_a_node_is_judged_on_many_nodes():
    """One GPU of each node is in use, so no node has eight. A search that tries each set of the others would try 256 on each node."""
    names = [f"m{number}" for number in range(100)]
    context = cluster()
    for name in names:
        node = make_node(name, 8)
        context.state.set_gpu_node(node)
        context.claims.holds.set_slice(slice_of(node))
        allocate(context, f"on-{name}", name, 7, "900Mi")
    context.claims.holds.set_claim(claim_of("mine", asking(count=8, memory="200Mi")))
    assert filtered(context, pod_json("p", "mine"), names)[0] == []


def first_of_two_rated() -> tuple[ExtenderContext, Mapping[str, int]]:
    """Return a cluster of one GPU a node and two claims that do not fit together, with the scores for a pod with the first."""
    context = cluster(devices=1)
    for name in ("one", "two"):
        context.claims.holds.set_claim(claim_of(name, asking(memory="700Mi")))
    return context, scores(context, pod_json("p1", "one"))


def test_next_pod_is_not_rated_by_room_of_earlier_pod():
    context, found = first_of_two_rated()
    first = max(found, key=found.__getitem__)
    second = scores(context, pod_json("p2", "two"))
    assert second[first] == 0
    assert first in filtered(context, pod_json("p2", "two"))[0]
    assert scores(context, pod_json("p1", "one"))[first] == found[first]


def test_devices_of_claim_are_counted_once_from_guess_to_running_pod():
    context = cluster(devices=1)
    state, claims = context.state, context.claims
    claims.holds.set_claim(claim_of("mine", asking(memory="700Mi", cores="30")))
    state.set_pod(pod_of("p", "mine"))
    filtered(context, pod_json("p", "mine"), ["n1"])
    used = {"GPU-n1-0": Use(700, 30, 1, 0)}
    assert state.footprint_of("p") == used
    claims.holds.set_claim(
        claim_of("mine", asking(memory="700Mi", cores="30"), results=[result("n1", 0, memory="700Mi", cores="30")], reserved_for=["p"])
    )
    assert (state.footprint_of("p"), state.footprint_of(claim_uid("claim-mine"))) == ({}, used)
    state.set_pod(pod_of("p", "mine", node="n1"))
    assert int(state.columns.used_mib[state.rows_by_name["n1"], 0]) == 700
    assert claims.devices_of(pod_of("p", "mine", node="n1")) == ("GPU-n1-0",)
    claims.holds.drop_claim(claims.pools.claims["team", "mine"])
    assert int(state.columns.used_mib[state.rows_by_name["n1"], 0]) == 0


def test_claim_of_unknown_slice_is_counted_once_slice_is_there():
    state = ClusterState()
    node = make_node("n1", 1)
    state.set_gpu_node(node)
    context = make_context(state)
    allocate(context, "early", "n1", 0, "300Mi")
    assert int(state.columns.used_mib[0, 0]) == 0
    context.claims.holds.set_slice(slice_of(node))
    assert int(state.columns.used_mib[0, 0]) == 300
    context.claims.holds.replace_slices([])  # kubelet restarted
    assert int(state.columns.used_mib[0, 0]) == 300


def test_expired_guess_counts_no_more():
    context, found = first_of_two_rated()
    taken = max(found, key=found.__getitem__)
    assert context.state.expire(now=11.0, pods_current_at=11.0) == 1
    assert scores(context, pod_json("p2", "two"))[taken] > 0


MEMORY = st.sampled_from(["100Mi", "300Mi", "500Mi", "1000Mi"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 3), st.sampled_from(NODES), st.integers(0, 1), MEMORY),
        st.tuples(st.just("free"), st.integers(0, 3)),
        st.tuples(st.just("rate"), st.integers(4, 6)),
        st.tuples(st.just("slices"), st.sampled_from(NODES), st.booleans()),
    ),
    max_size=12,
)


@given(STEPS)
def test_kept_verdicts_equal_new_ones_after_any_history(steps: list[tuple[Any, ...]]):
    context = cluster()
    claims, state = context.claims, context.state
    for number, memory in ((4, "300Mi"), (5, "500Mi"), (6, "1000Mi")):
        claims.holds.set_claim(claim_of(str(number), asking(memory=memory, cores="10")))
    for step in steps:
        match step:
            case ("allocate", number, node, minor, memory):
                allocate(context, str(number), node, minor, memory)
            case ("free", number):
                claims.holds.set_claim(claim_of(str(number), asking()))
            case ("rate", number):
                scores(context, pod_json(f"p{number}", str(number)))
            case ("slices", node, there):
                one = slice_of(make_node(node, 2))
                (claims.holds.set_slice if there else claims.holds.drop_slice)(one)
    fresh = ClaimVerdicts(state, context.verdicts.shapes, Policy.FRAG, context.clock, 10.0)
    fresh.pools, fresh.is_current = claims.pools, True
    for number in (4, 5, 6):
        pod = pod_of(f"p{number}", str(number))
        query = claims.query(pod)
        assert not isinstance(query, str)
        kept, new = claims.judge(pod, query), fresh.judge(pod, query)
        np.testing.assert_array_equal(kept.reason, new.reason)
        np.testing.assert_array_equal(kept.score, new.score)
