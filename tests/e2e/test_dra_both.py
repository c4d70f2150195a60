# SPDX-License-Identifier: Apache-2.0
"""Pods with vGPUs and pods with ResourceClaims on one GPU, on the real API server, kube-scheduler, controllers and kubelet."""

from typing import Any

import pytest

from aliquot import contract
from aliquot.contract.model import DeviceShare
from aliquot.contract.units import parse_quantity
from tests.e2e.invariants import (
    SETTLE_SECONDS,
    Container,
    ask_the_node,
    gpu_pods,
    leaked,
    misplaced,
    on_gpu,
    over_limit,
    overbooked,
    shares_of,
    tenants_are_confined,
)
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import CLIENT, GPU_MEMORY_MIB, GPUS, MIB, Client, Slice, Variant, metrics, slice_pod
from tests.e2e.test_dra import MANY, claim, offered, pod, request, why, with_setting
from tests.e2e.test_dra_planned import HIGH, LOW, wait_until_tainted

SHARE_MIB = 16 * 1024
HOLD = (CLIENT, "hold", "--mib", "64")


VARIANT = Variant(("dra", "dra-planned", "dra-both"))
"""All GPUs are for vGPUs and for planned claims."""


@pytest.fixture(scope="module", autouse=True)
def both(product: Kubectl) -> None:
    """All GPUs are offered by both interfaces."""
    wait_until_tainted(product)
    eventually(lambda: [one["status"].get("allocation") for one in product.all("gpunodes")] == ["both"], "the setting in the node's object")


@pytest.mark.timeout(480)
def test_pods_by_both_interfaces_fill_one_gpu_exactly(kubectl: Kubectl, product: Kubectl, node_name: str, shared_gpu: str) -> None:
    """T20."""
    fill_exactly(kubectl, product, node_name, shared_gpu, of_each=6, share_mib=SHARE_MIB)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_pods_by_both_interfaces_fill_one_gpu_exactly(kubectl: Kubectl, product: Kubectl, node_name: str, shared_gpu: str) -> None:
    """T20, with kubelet's default for the pods of a node, of each kind."""
    share_mib = GPU_MEMORY_MIB // (2 * MANY - 2)
    with with_setting(product, f"ALIQUOT_SHARES_PER_GPU={2 * MANY}", GPUS):
        fill_exactly(kubectl, product, node_name, shared_gpu, of_each=MANY, share_mib=share_mib)
        kubectl.run("delete", "pods", "--all", "--timeout=600s", timeout_seconds=610)


def fill_exactly(kubectl: Kubectl, product: Kubectl, node_name: str, gpu: str, *, of_each: int, share_mib: int) -> None:
    """Have more pods with equal shares of one GPU than fit, and check all until each has run or has the room to."""
    room = GPU_MEMORY_MIB // share_mib
    names = {kind: [f"{kind}-{number}" for number in range(of_each)] for kind in ("claim", "ids")}
    claims = [with_claim(name, f"{share_mib}Mi", gpu) for name in names["claim"]]
    ids = [slice_pod(name, Slice(share_mib), HOLD, on_gpu(gpu)) for name in names["ids"]]
    kubectl.apply(*(one for pair in zip(claims, ids, strict=True) for one in (*pair[0], pair[1])))
    for _round in range((2 * of_each - room) // 2 + 1):
        seconds = 60 + 10 * of_each
        eventually(lambda: len(running(kubectl)) == room, "all that fit to run", seconds=seconds, otherwise=lambda: str(running(kubectl)))
        started = running(kubectl)
        of_kind = {kind: sorted(started & set(names[kind])) for kind in names}
        assert all(of_kind.values()), "both interfaces get a part of the GPU"
        for name in started:
            assert [device["total_bytes"] for device in Client(kubectl, name).devices()] == [share_mib * MIB]
        invariants_hold(kubectl, product, node_name)
        tenants_are_confined(kubectl, *started)
        for name in {one["metadata"]["name"] for one in kubectl.all("pods")} - started:
            assert why(kubectl, name).waits
        kubectl.delete("pod", *(found[0] for found in of_kind.values()))


@pytest.mark.parametrize("claim_is_important", [True, False])
def test_important_pod_of_either_kind_gets_room_of_the_other(kubectl: Kubectl, shared_gpu: str, claim_is_important: bool) -> None:
    large = f"{GPU_MEMORY_MIB - SHARE_MIB}Mi"
    low, high = (LOW, HIGH) if claim_is_important else (HIGH, LOW)
    ids = slice_pod("ids", Slice(GPU_MEMORY_MIB - SHARE_MIB), HOLD, on_gpu(shared_gpu))
    ids["spec"]["priorityClassName"] = low
    with_ids, with_one = [ids], with_claim("claimed", large, shared_gpu, priorityClassName=high)
    first, second = (with_ids, with_one) if claim_is_important else (with_one, with_ids)
    for wanted in (first, second):
        kubectl.apply(*wanted)
        kubectl.wait_for_phase(wanted[-1]["metadata"]["name"], "Running", seconds=90)
    assert running(kubectl) == {second[-1]["metadata"]["name"]}


def with_claim(name: str, memory: str, gpu: str, **more: Any) -> list[Object]:
    """A claim for a part of one GPU, and its pod."""
    asked = request(memory=memory)
    asked["exactly"]["selectors"] = [{"cel": {"expression": f"device.attributes['{contract.DRA_DRIVER}'].uuid == '{gpu}'"}}]
    return [claim(name, asked), pod(name, {"main": None}, claim=name, command=HOLD, **more)]


def running(kubectl: Kubectl) -> set[str]:
    """The pods that run and do not end."""
    pods = [one for one in kubectl.all("pods") if one["status"].get("phase") == "Running" and "deletionTimestamp" not in one["metadata"]]
    return {one["metadata"]["name"] for one in pods}


def invariants_hold(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """I1 to I4, of pods by both interfaces together."""

    def broken() -> list[str]:
        with_ids, claimed = gpu_pods(product, node_name), claimed_shares(kubectl, product)
        pods = [*with_ids, *(one for one in kubectl.all("pods") if one["metadata"]["name"] in {name for _, name, _ in claimed})]
        shares = shares_of(with_ids) | claimed
        granted = {
            labels["device_uuid"]: int(value)
            for name, labels, value in metrics(product, node_name)
            if name == "aliquot_device_memory_allocated_bytes"
        }
        truth = ask_the_node(product, node_name)
        return [
            *overbooked(shares, product.get("gpunode", node_name)["status"]),
            *misplaced(pods, shares, truth, claimed.keys()),
            *leaked(shares, granted),
            *over_limit(pods, shares, truth),
        ]

    eventually(lambda: not broken(), "the invariants to hold", seconds=SETTLE_SECONDS, otherwise=lambda: "\n".join(broken()))


def claimed_shares(kubectl: Kubectl, product: Kubectl) -> dict[Container, tuple[DeviceShare, ...]]:
    """What each container with a claim was allocated; each pod here has the claim of its name."""
    uuids = {device["name"]: device["attributes"]["uuid"]["string"] for device in offered(product)}
    found = {}
    for one in kubectl.all("resourceclaims"):
        results = (one.get("status", {}).get("allocation") or {}).get("devices", {}).get("results", [])
        shares = tuple(DeviceShare(uuids[each["device"]], int(parse_quantity(each["consumedCapacity"]["memory"]))) for each in results)
        if shares:
            found[one["metadata"]["namespace"], one["metadata"]["name"], "main"] = shares
    return found
