# SPDX-License-Identifier: Apache-2.0
"""MIG on a simulated A100 node: the instances that exist are offered as they are, others are made for containers and removed after them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from aliquot import contract
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.invariants import PYTHON
from tests.e2e.kubectl import Kubectl, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    MIB,
    Client,
    Slice,
    Variant,
    agent_pod,
    agents_with,
    forget_variant,
    patch,
    roll_out,
    slice_pod,
)
from tests.e2e.test_dra import claim, offered
from tests.e2e.test_dra import pod as dra_pod
from tests.e2e.test_dra import request as dra_request

PROFILE = "a100x8-mig"
"""GPU 6 has seven 1g.10gb; GPU 7 a 2g.20gb, two 1g.10gb and a 3g.40gb. The others are not in MIG mode."""
INSTALLED = {"op": "replace", "path": "/spec/template/spec/initContainers/0/env/0", "value": {"name": "PROFILE", "value": PROFILE}}
PARTITIONED = (patch("DaemonSet", "aliquot-agent", INSTALLED), agents_with(ALIQUOT_MIG_STRATEGY="dynamic"))
VARIANT = Variant(("mig",), PARTITIONED)
"""Other GPUs, with agents that may make instances."""
EMPTY_GPU = 5
MIG_CLASS, SHARED_MIG_CLASS = "mig.aliquot.dev", "shared-mig.aliquot.dev"
MADE = "4g.40gb"
"""There is one place for it."""
MEMORY_MIB = {"1g.10gb": 9728, "2g.20gb": 19968, "3g.40gb": 40192, "4g.40gb": 40192}
SIMULATED_NODE = "/var/lib/aliquot-simulated"

NVML = """\
import ctypes, json, os, pynvml as nv
ctypes.CDLL(os.environ["ALIQUOT_NVML_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
nv.nvmlInit()
gpu = nv.nvmlDeviceGetHandleByIndex({gpu})
"""
INSTANCES = """
found = []
for slot in range(7):
    try:
        found.append(nv.nvmlDeviceGetUUID(nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot)))
    except nv.NVMLError_NotFound:
        pass
print(json.dumps(found))
"""
TURN_MIG_ON = "print(json.dumps(nv.nvmlDeviceSetMigMode(gpu, 1)))"


@pytest.fixture(scope="module")
def other_gpus(installation: Kubectl, node: Cluster) -> Iterator[None]:
    """The node without its driver and the state of its GPUs, for the next agent to install another one; likewise afterwards."""
    remove_gpus(installation, node)
    yield
    remove_gpus(installation, node)


def remove_gpus(installation: Kubectl, node: Cluster) -> None:
    system = installation.within(AGENT_NAMESPACE)
    system.run("delete", "daemonset", "aliquot-agent", "--cascade=foreground", "--wait=true", "--timeout=60s", timeout_seconds=70)
    assert node.in_node("sh", "-c", f"rm -rf {SIMULATED_NODE}/* /run/aliquot/health").returncode == 0
    forget_variant(installation)


@pytest.fixture(autouse=True, scope="module")
def partitioned(other_gpus: None, product: Kubectl) -> None:
    """The agents have the other GPUs."""
    del other_gpus, product


@pytest.fixture(scope="module")
def on_demand(product: Kubectl, node: Cluster, partitioned: None) -> None:
    """One more GPU in MIG mode, without instances, as an administrator would have it with nvidia-smi."""
    del partitioned
    [name] = [item["metadata"]["name"] for item in node.kubectl().all("nodes")]
    ask_nvml(product, name, TURN_MIG_ON)
    wait_for_offer(product, name, "4g.40gb", 1)


def test_instances_that_exist_are_offered_and_no_two_containers_get_the_same(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    wait_for_offer(product, node_name, "2g.20gb", 1)
    wanted = {"small-0": "1g.10gb", "small-1": "1g.10gb", "small-2": "1g.10gb", "middle": "2g.20gb", "large": "3g.40gb"}
    kubectl.apply(*(mig_pod(name, profile) for name, profile in wanted.items()))
    seen = {}
    for name, profile in wanted.items():
        kubectl.wait_for_phase(name, "Running", seconds=60)
        [device] = Client(kubectl, name).devices()
        assert device["total_bytes"] // MIB == MEMORY_MIB[profile]
        assert "MIG" in device["name"]
        seen[name] = device["uuid"]
    assert len(set(seen.values())) == len(wanted), seen
    refused = Client(kubectl, "small-0").fill()
    assert refused["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert refused["held_bytes"] <= MEMORY_MIB["1g.10gb"] * MIB


def test_other_gpus_of_the_node_are_shared_as_ever(kubectl: Kubectl) -> None:
    kubectl.apply(slice_pod("vgpu", Slice(2048)))
    kubectl.wait_for_phase("vgpu", "Running")
    assert [device["total_bytes"] for device in Client(kubectl, "vgpu").devices()] == [2048 * MIB]


@pytest.mark.usefixtures("on_demand")
def test_an_instance_is_made_for_a_container_and_goes_with_its_pod(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    assert instances(product, node_name) == []
    kubectl.apply(mig_pod("made", "4g.40gb"))
    kubectl.wait_for_phase("made", "Running", seconds=60)
    [device] = Client(kubectl, "made").devices()
    assert device["total_bytes"] // MIB == MEMORY_MIB["4g.40gb"]
    assert instances(product, node_name) == [f"MIG-{device['uuid']}"]
    kubectl.delete("pod", "made")
    eventually(lambda: instances(product, node_name) == [], "the instance to be gone with its pod", seconds=60)
    wait_for_offer(product, node_name, "4g.40gb", 1)


@pytest.fixture(scope="module")
def by_claims(product: Kubectl, on_demand: None) -> None:
    """The same node with its GPUs and instances in slices."""
    del on_demand
    roll_out(product, Variant(("mig", "dra"), PARTITIONED))
    eventually(lambda: MADE in profiles(product), "a place for an instance in the slices", otherwise=lambda: str(profiles(product)))


@pytest.mark.usefixtures("by_claims")
def test_claimed_instance_is_made_in_free_place_and_goes_with_pod(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """Two claims want the only place: counters keep the second out until the first ends."""
    kubectl.apply(*by_claim("first", MADE))
    kubectl.wait_for_phase("first", "Running", seconds=60)
    [device] = Client(kubectl, "first").devices()
    assert device["total_bytes"] // MIB == MEMORY_MIB[MADE]
    assert instances(product, node_name) == [f"MIG-{device['uuid']}"]
    kubectl.apply(*by_claim("second", MADE))
    eventually(lambda: "FailedScheduling" in str(kubectl.events("second")), "no place for the second")
    kubectl.delete("pod", "first")
    kubectl.wait_for_phase("second", "Running", seconds=60)
    [device] = Client(kubectl, "second").devices()
    assert instances(product, node_name) == [f"MIG-{device['uuid']}"]
    kubectl.delete("pod", "second")
    eventually(lambda: instances(product, node_name) == [], "the instance to be gone with its pod", seconds=60)


@pytest.mark.usefixtures("by_claims")
def test_gpu_in_mig_mode_has_shares_or_instances_exactly(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T14: shares keep an instance out until the last of them ends, and an instance keeps shares out. The shares have exact limits."""
    for name, memory in (("share-a", "10Gi"), ("share-b", "20Gi")):
        kubectl.apply(*share_of_gpu_in_mig_mode(name, memory))
    for name, mib in (("share-a", 10240), ("share-b", 20480)):
        kubectl.wait_for_phase(name, "Running", seconds=60)
        [device] = Client(kubectl, name).devices()
        assert device["total_bytes"] == mib * MIB
        refused = Client(kubectl, name).fill()
        assert refused["result_name"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert refused["held_bytes"] <= mib * MIB
    assert len(instances(product, node_name)) == 1
    kubectl.apply(*by_claim("instance", MADE))
    eventually(lambda: "FailedScheduling" in str(kubectl.events("instance")), "no place beside the shares")
    kubectl.delete("pod", "share-a")
    assert len(instances(product, node_name)) == 1
    assert kubectl.get("pod", "instance")["status"]["phase"] == "Pending"
    kubectl.delete("pod", "share-b")
    kubectl.wait_for_phase("instance", "Running", seconds=60)
    [device] = Client(kubectl, "instance").devices()
    assert instances(product, node_name) == [f"MIG-{device['uuid']}"]
    kubectl.apply(*share_of_gpu_in_mig_mode("share-c", "30Gi"))
    eventually(lambda: "FailedScheduling" in str(kubectl.events("share-c")), "no share beside the instance")
    kubectl.delete("pod", "instance")
    kubectl.wait_for_phase("share-c", "Running", seconds=60)
    [device] = Client(kubectl, "share-c").devices()
    assert device["total_bytes"] == 30 * 1024 * MIB
    kubectl.delete("pod", "share-c")
    eventually(lambda: instances(product, node_name) == [], "the instance to be gone with its last share", seconds=60)


def share_of_gpu_in_mig_mode(name: str, memory: str) -> tuple[Object, Object]:
    """A claim for a share of the GPU in MIG mode, and its pod."""
    wanted = dra_request(device_class=SHARED_MIG_CLASS, memory=memory)
    return claim(name, wanted), dra_pod(name, {"main": None}, claim=name, schedulerName=contract.SCHEDULER_NAME)


def by_claim(name: str, profile: str) -> tuple[Object, Object]:
    """A claim for a MIG instance and its pod, which Aliquot's scheduler places."""
    wanted = dra_request(device_class=MIG_CLASS)
    selector = f"device.attributes['{contract.DRA_DRIVER}'].profile == '{profile}'"
    wanted["exactly"]["selectors"] = [{"cel": {"expression": selector}}]
    return claim(name, wanted), dra_pod(name, {"main": None}, claim=name, schedulerName=contract.SCHEDULER_NAME)


def profiles(product: Kubectl) -> list[str]:
    """The profiles of the instances in slices, and of the places for them."""
    attributes = [device["attributes"] for device in offered(product)]
    return [one["profile"]["string"] for one in attributes if one["type"]["string"] == "mig"]


def mig_pod(name: str, profile: str) -> Object:
    """A pod with one MIG instance."""
    pod = slice_pod(name, Slice(1))
    pod["metadata"]["labels"] = {**pod["metadata"].get("labels", {}), contract.LABEL_ADOPT: "true"}
    pod["spec"]["containers"][0]["resources"] = {"limits": {contract.RESOURCE_MIG_PREFIX + profile: "1"}}
    return pod


def wait_for_offer(product: Kubectl, node_name: str, profile: str, count: int) -> None:
    """Wait until a node offers so many instances of a profile, or more."""
    resource = contract.RESOURCE_MIG_PREFIX + profile

    def offered() -> int:
        return int(product.get("node", node_name)["status"]["allocatable"].get(resource, "0"))

    eventually(lambda: offered() >= count, f"{count} of {resource} to be offered", seconds=60, otherwise=lambda: f"{offered()} are")


def instances(product: Kubectl, node_name: str) -> list[str]:
    """The instances on the GPU that was empty, by the driver's account."""
    found: list[str] = ask_nvml(product, node_name, INSTANCES)
    return found


def ask_nvml(product: Kubectl, node_name: str, script: str) -> Any:
    """Run a script with NVML on the node, in the agent's container; it prints JSON."""
    agent = agent_pod(product, node_name)["metadata"]["name"]
    return json.loads(product.within(AGENT_NAMESPACE).exec(agent, PYTHON, "-c", NVML.format(gpu=EMPTY_GPU) + script, container="agent"))
