# SPDX-License-Identifier: Apache-2.0
"""Dynamic resource allocation on the real kubelet: what a claim was allocated is a limit in its containers.

The numbers T1, T2, ... are those of the plan of scenarios for this driver.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from aliquot import contract
from aliquot_cli.__main__ import main
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.explain.why import Why
from tests.e2e.cluster.cluster import Cluster
from tests.e2e.cluster.paths import ROOT
from tests.e2e.kubectl import Kubectl, KubectlError, Object, eventually
from tests.e2e.product import (
    AGENT_NAMESPACE,
    CLIENT,
    CLIENT_IMAGE,
    GPU_MEMORY_MIB,
    GPUS,
    HOLD_OPEN,
    MIB,
    SHARES_PER_GPU,
    Client,
    Slice,
    Variant,
    agent_pod,
    agents_with,
    metrics,
    parse_events,
    slice_pod,
    wait_until_agents_rolled_out,
)
from tests.e2e.test_gpu_faults import Inject, inject
from tests.e2e.test_restarts import another_agent_is_ready
from tests.e2e.test_rights import ask_as_the_agent

GIB = 1024
GUIDE = ROOT / "docs/use/dra.md"
__all__ = ["inject"]  # a fixture


VARIANT = Variant(("dra", "dra-translate"), (agents_with(ALIQUOT_HEALTH_RECOVERY_SECONDS="5"),))
"""All GPUs are in slices, and requests for vGPUs become claims.

A GPU that a test broke is healthy again after few seconds; test_gpu_faults.py has the default.
"""


@pytest.fixture(scope="module", autouse=True)
def dra(product: Kubectl) -> None:
    """All GPUs are offered."""
    wait_until_offered(product)


def test_claimed_memory_and_cores_are_limits_in_container(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T1."""
    kubectl.apply(claim("share", request(memory="20Gi", cores="30")), pod("user", {"main": None}, claim="share"))
    kubectl.wait_for_phase("user", "Running", seconds=60)
    client = Client(kubectl, "user")
    [device] = client.devices()
    assert device["total_bytes"] == 20 * GIB * MIB
    filled, refused = [event for event in client.converse(f"alloc alloc {device['free_bytes']}", "alloc alloc 1") if "result_name" in event]
    assert (filled["result_name"], refused["result_name"]) == ("CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY")
    # The first is what was granted, the second what is in the limits file of the container.
    for name in ("aliquot_container_cores_limit_ratio", "aliquot_container_cores_ceiling_ratio"):
        assert measured(product, node_name, name, namespace=kubectl.namespace, pod="user") == [0.3], name


def test_examples_of_guide_run(kubectl: Kubectl, product: Kubectl) -> None:
    """docs/use/dra.md unchanged, except for the image and the program."""
    blocks = [list(yaml.safe_load_all(text)) for text in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)]
    objects = {one["kind"]: one for block in blocks for one in block if "apiVersion" in one and "metadata" in one}
    train = objects["Pod"]
    train["spec"]["containers"][0] |= {"image": CLIENT_IMAGE, "imagePullPolicy": "IfNotPresent", "command": list(HOLD_OPEN)}
    train["spec"]["terminationGracePeriodSeconds"] = 1
    kubectl.apply(objects["ResourceClaimTemplate"], train)
    kubectl.wait_for_phase("train", "Running", seconds=60)
    assert memory_in(kubectl, "train", "main") == [20 * GIB * MIB]
    classes = [one for block in blocks for one in block if one.get("kind") == "DeviceClass"]
    product.run("apply", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump_all(classes))
    assert {one["metadata"]["name"] for one in classes} == {"vgpu-20g", "gpu.nvidia.com"}


def test_two_containers_of_two_requests_have_two_limits(kubectl: Kubectl) -> None:
    """T4."""
    kubectl.apply(
        claim("both", request("small", memory="1Gi"), request("large", memory="3Gi")),
        pod("user", {"one": "small", "two": "large"}, claim="both"),
    )
    kubectl.wait_for_phase("user", "Running", seconds=60)
    for container, gib in (("one", 1), ("two", 3)):
        assert memory_in(kubectl, "user", container) == [gib * GIB * MIB]


@pytest.mark.parametrize("named", [["small", "large"], [None]], ids=["by name", "unnamed"])
def test_container_of_two_requests_has_two_gpus_with_two_limits(kubectl: Kubectl, named: Sequence[str | None]) -> None:
    """T25. Each request leaves no room for the other on its GPU, so these are two GPUs."""
    user = pod("user", {"main": None}, claim="both")
    (main,) = user["spec"]["containers"]
    (use,) = main["resources"]["claims"]
    main["resources"]["claims"] = [{**use, **({"request": name} if name else {})} for name in named]
    most = GPU_MEMORY_MIB // GIB - 1
    kubectl.apply(claim("both", request("small", memory=f"{most - 1}Gi"), request("large", memory=f"{most}Gi")), user)
    kubectl.wait_for_phase("user", "Running", seconds=60)
    devices = Client(kubectl, "user").devices()
    assert len({device["uuid"] for device in devices}) == 2
    assert sorted(device["total_bytes"] for device in devices) == [(most - 1) * GIB * MIB, most * GIB * MIB]


def test_container_of_two_requests_on_one_gpu_sees_it_once(kubectl: Kubectl) -> None:
    """T25. kube-scheduler takes the first GPU that fits, for both."""
    parts = claim("both", request("small", memory="1Gi"), request("large", memory="3Gi"))
    parts["spec"]["devices"]["constraints"] = [{"matchAttribute": f"{contract.DRA_DRIVER}/uuid"}]
    kubectl.apply(parts, pod("user", {"main": None}, claim="both"))
    kubectl.wait_for_phase("user", "Running", seconds=60)
    assert memory_in(kubectl, "user", "main") == [4 * GIB * MIB]


def test_request_with_count_two_is_two_gpus(kubectl: Kubectl) -> None:
    """T5."""
    kubectl.apply(claim("pair", request(count=2, memory="2Gi", cores="30")), pod("user", {"main": None}, claim="pair"))
    kubectl.wait_for_phase("user", "Running", seconds=60)
    devices = Client(kubectl, "user").devices()
    assert len({device["uuid"] for device in devices}) == 2
    assert [device["total_bytes"] for device in devices] == [2 * GIB * MIB] * 2


def test_pods_of_one_claim_share_its_memory_and_survive_each_other(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T6 and T7: each pod's program is process 1 of its own PID namespace."""

    def preparations() -> list[float]:
        return measured(product, node_name, "aliquot_operation_duration_seconds_count", operation="prepare-claim")

    hold = [CLIENT, "hold", "--mib", str(2 * GIB)]
    kubectl.apply(claim("shared", request(memory="8Gi")), pod("first", {"main": None}, claim="shared", command=hold))
    kubectl.wait_for_phase("first", "Running", seconds=60)
    with_first = preparations()
    assert with_first > [0]
    kubectl.apply(pod("second", {"main": None}, claim="shared", command=hold))
    kubectl.wait_for_phase("second", "Running", seconds=60)
    assert preparations() == with_first
    client = Client(kubectl, "second")

    def free_mib() -> int:
        return int(client.devices()[0]["free_bytes"]) // MIB

    eventually(lambda: free_mib() < 4 * GIB, "both pods' memory to count against the claim", otherwise=lambda: f"{free_mib()} MiB free")
    with_both = free_mib()
    assert client.fill()["held_bytes"] <= with_both * MIB
    kubectl.delete("pod", "first")
    eventually(
        lambda: free_mib() >= with_both + 2 * GIB, "the first pod's memory", otherwise=lambda: f"{free_mib()}, not {with_both} MiB free"
    )
    assert client.devices()[0]["total_bytes"] == 8 * GIB * MIB


def test_claim_that_fits_no_gpu_waits_with_sentence_and_small_one_runs(kubectl: Kubectl) -> None:
    """kube-scheduler only says that it cannot allocate all claims."""
    kubectl.apply(claim("vast", request(memory="200Gi")), pod("waiting", {"main": None}, claim="vast"))
    eventually(lambda: "FailedScheduling" in str(kubectl.events("waiting")), "the scheduler to find no GPU")
    assert f"1 {NodeReason.MEMORY.sentence}" in why(kubectl, "waiting").sentence
    kubectl.apply(claim("small", request(memory="1Gi")), pod("runs", {"main": None}, claim="small"))
    running = kubectl.wait_for_phase("runs", "Running", seconds=60)
    assert running["spec"]["schedulerName"] == contract.SCHEDULER_NAME
    [device] = Client(kubectl, "runs").devices()
    assert why(kubectl, "runs").devices == (f"GPU-{device['uuid']}",)


def test_claim_waits_while_its_gpu_does_not_answer(kubectl: Kubectl, product: Kubectl, node_name: str, inject: Inject) -> None:
    """T12. kube-scheduler allocates no GPU that is known to hang, so this allocation is another writer's."""
    kubectl.apply(claim("before", request(memory="1Gi")), pod("before", {"main": None}, claim="before"))
    kubectl.wait_for_phase("before", "Running", seconds=60)
    taken = kubectl.get("resourceclaim", "before")["status"]["allocation"]["devices"]["results"][0]
    [device] = [one for one in offered(product) if one["name"] == taken["device"]]
    uuid = device["attributes"]["uuid"]["string"]
    inject("hang", uuid, "600000")
    eventually(lambda: taints(product, taken["device"]), "the silent GPU to have a taint", seconds=60)
    kubectl.apply(claim("after", request(memory="1Gi")))
    allocate(kubectl, "after", {**taken, "shareID": "22222222-2222-4222-8222-222222222222"}, node_name)
    kubectl.apply(pod("after", {"main": None}, claim="after"))
    eventually(lambda: kubectl.get("pod", "after")["spec"].get("nodeName"), "the pod to be bound")
    time.sleep(5)
    assert kubectl.get("pod", "after")["status"]["phase"] == "Pending"
    inject("hang", uuid, "0")
    kubectl.wait_for_phase("after", "Running")
    assert not [event for event in kubectl.events("after") if "FailedPrepareDynamicResources" in event]
    assert memory_in(kubectl, "after", "main") == [GIB * MIB]


def test_allocation_of_another_writer_that_does_not_fit_is_refused(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T13: the API server checks no sums; the ledger does."""
    kubectl.apply(claim("honest", request(memory="100Gi")), pod("first", {"main": None}, claim="honest"))
    kubectl.wait_for_phase("first", "Running", seconds=60)
    taken = kubectl.get("resourceclaim", "honest")["status"]["allocation"]["devices"]["results"][0]
    kubectl.apply(claim("foreign", request(memory="100Gi")))
    allocate(kubectl, "foreign", {**taken, "shareID": "11111111-1111-4111-8111-111111111111"}, node_name)
    kubectl.apply(pod("refused", {"main": None}, claim="foreign"))
    refused, holds = f"claim {kubectl.namespace}/foreign was allocated", f"Already granted there: claim {kubectl.namespace}/honest 100 GiB"
    eventually(
        lambda: [event for event in kubectl.events("refused") if refused in event and holds in event],
        "the pod to name both claims",
        seconds=90,
        otherwise=lambda: kubectl.explain("refused"),
    )


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        pytest.param({"isolatoin": "shim"}, "VgpuParameters has no field isolatoin", id="field"),
        pytest.param({"apiVersion": "aliquot.dev/v9"}, "write this apiVersion and kind", id="version"),
        pytest.param({"isolation": "mps"}, "isolation of a claim is shim or exclusive", id="isolation"),
    ],
)
def test_unknown_parameters_are_refused_when_claim_is_written(kubectl: Kubectl, parameters: Mapping[str, str], sentence: str) -> None:
    odd = claim("odd", request(memory="1Gi"), parameters=parameters)
    for one in (odd, {**odd, "kind": "ResourceClaimTemplate", "spec": {"spec": odd["spec"]}}):
        with pytest.raises(KubectlError, match=sentence):
            kubectl.apply(one)
    kubectl.apply(claim("right", request(memory="1Gi"), parameters={"priority": "high", "memoryBurst": "1.0"}))


def test_claim_written_for_nvidias_driver_runs_under_alias_class(kubectl: Kubectl, product: Kubectl) -> None:
    selector = {"cel": {"expression": f"device.driver == '{contract.DRA_DRIVER}'"}}
    product.apply({**claim("gpu.nvidia.com"), "kind": "DeviceClass", "spec": {"selectors": [selector]}})
    wanted = request(device_class="gpu.nvidia.com", memory="2Gi")
    expression = "device.attributes['gpu.nvidia.com'].cudaComputeCapability.isGreaterThan(semver('8.0.0'))"
    wanted["exactly"]["selectors"] = [{"cel": {"expression": expression}}]
    kubectl.apply(claim("theirs", wanted), pod("user", {"main": None}, claim="theirs"))
    try:
        kubectl.wait_for_phase("user", "Running", seconds=60)
        assert memory_in(kubectl, "user", "main") == [2 * GIB * MIB]
    finally:
        product.delete("deviceclass", "gpu.nvidia.com")


def test_class_of_whole_gpus_gives_whole_gpu(kubectl: Kubectl) -> None:
    kubectl.apply(claim("whole", request(device_class="gpu.aliquot.dev")), pod("user", {"main": None}, claim="whole"))
    kubectl.wait_for_phase("user", "Running", seconds=60)
    assert memory_in(kubectl, "user", "main")[0] > 139 * GIB * MIB


def test_restarted_kubelet_keeps_containers_and_gets_slices_again(kubectl: Kubectl, product: Kubectl, node: Cluster) -> None:
    """T9: kubelet deletes the slices of its node when it starts."""
    kubectl.apply(claim("kept", request(memory="4Gi")), pod("kept", {"main": None}, claim="kept"))
    before = kubectl.wait_for_phase("kept", "Running", seconds=60)
    node.restart("kubelet")
    wait_until_offered(product)
    kubectl.apply(claim("later", request(memory="1Gi")), pod("later", {"main": None}, claim="later"))
    kubectl.wait_for_phase("later", "Running", seconds=90)
    assert container_of(kubectl.get("pod", "kept")) == container_of(before)
    assert memory_in(kubectl, "kept", "main") == [4 * GIB * MIB]


def test_next_agent_keeps_claims_and_releases_what_the_last_prepared(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T8, with an agent that is replaced."""
    kubectl.apply(claim("kept", request(memory="4Gi")), pod("kept", {"main": None}, claim="kept"))
    before = kubectl.wait_for_phase("kept", "Running", seconds=60)
    old = agent_pod(product, node_name)["metadata"]
    product.within(AGENT_NAMESPACE).delete("pod", old["name"])
    eventually(lambda: another_agent_is_ready(product, node_name, old["uid"]), "the next agent to be ready", seconds=60)
    assert container_of(kubectl.get("pod", "kept")) == container_of(before)
    kubectl.delete("pod", "kept")
    eventually(lambda: not kubectl.get("resourceclaim", "kept")["status"].get("reservedFor"), "the claim to be free", seconds=60)
    wait_until_offered(product)
    kubectl.apply(pod("again", {"main": None}, claim="kept"))
    kubectl.wait_for_phase("again", "Running", seconds=90)


def test_update_of_agent_leaves_no_moment_without_driver(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T11: the next agent also releases what the last one prepared."""
    kubectl.apply(claim("kept", request(memory="4Gi")), pod("kept", {"main": None}, claim="kept"))
    kubectl.wait_for_phase("kept", "Running", seconds=60)
    old = agent_pod(product, node_name)["metadata"]["uid"]
    product.within(AGENT_NAMESPACE).run("rollout", "restart", "daemonset/aliquot-agent")
    started: list[str] = []
    while not another_agent_is_ready(product, node_name, old):
        started.append(f"during-{len(started)}")
        kubectl.apply(claim(started[-1], request(memory="1Gi")), pod(started[-1], {"main": None}, claim=started[-1]))
        kubectl.wait_for_phase(started[-1], "Running", seconds=60)
        assert len(offered(product)) == GPUS
    assert [event for name in started for event in kubectl.events(name) if "FailedPrepare" in event] == []
    kubectl.delete("pod", "kept")
    eventually(lambda: not kubectl.get("resourceclaim", "kept")["status"].get("reservedFor"), "the claim to be free", seconds=60)
    kubectl.apply(pod("again", {"main": None}, claim="kept"))
    kubectl.wait_for_phase("again", "Running", seconds=60)


def test_template_makes_claims_and_status_reports_their_devices(kubectl: Kubectl) -> None:
    user = pod("user", {"main": None}, claim="shape")
    user["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "shape"}]
    kubectl.apply(template("shape", request(memory="2Gi")), user)
    kubectl.wait_for_phase("user", "Running", seconds=60)
    assert memory_in(kubectl, "user", "main") == [2 * GIB * MIB]

    def reported() -> Any:
        (made,) = kubectl.all("resourceclaims")
        return [one["data"]["memoryBytes"] for one in made["status"].get("devices", [])]

    eventually(lambda: reported() == [2 * GIB * MIB], "the claim's status to report the device")


def test_deployment_of_vgpus_becomes_claims_of_one_template(kubectl: Kubectl) -> None:
    """T3: the manifest is that of a node with the device plugin."""
    kubectl.apply(deployment("fleet", 20, {contract.RESOURCE_VGPU_MEMORY: "2Gi", contract.RESOURCE_VGPU_CORES: "20"}))

    def running() -> list[str]:
        return [one["metadata"]["name"] for one in kubectl.all("pods") if one["status"]["phase"] == "Running"]

    eventually(lambda: len(running()) == 20, "the pods", seconds=120, otherwise=lambda: str(kubectl.all("resourceclaims")))
    for name in running()[:2]:
        assert memory_in(kubectl, name, "main") == [2 * GIB * MIB]
    [template] = kubectl.all("resourceclaimtemplates")
    assert len(kubectl.all("resourceclaims")) == 20
    assert template["metadata"]["labels"] == {contract.LABEL_TRANSLATED: "true"}
    kubectl.delete("deployment", "fleet")  # else it makes each pod again that the namespace's end deletes


def test_unchanged_pod_with_one_vgpu_gets_whole_gpu_by_claim(kubectl: Kubectl) -> None:
    """T2."""
    kubectl.apply(pod("unchanged", {"main": None}, claim="", limits={contract.RESOURCE_VGPU: "1"}))
    running = kubectl.wait_for_phase("unchanged", "Running", seconds=60)
    assert contract.RESOURCE_VGPU not in json.dumps(running["spec"]["containers"])
    assert memory_in(kubectl, "unchanged", "main") == [GPU_MEMORY_MIB * MIB]
    [made] = kubectl.all("resourceclaims")
    assert [user["name"] for user in made["status"]["reservedFor"]] == ["unchanged"]


def test_pod_in_words_of_hami_gets_its_memory_by_claim(kubectl: Kubectl) -> None:
    theirs = pod("theirs", {"main": None}, claim="", limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
    theirs["spec"]["schedulerName"] = contract.SCHEDULER_NAME  # the namespace is not adopted
    kubectl.apply(theirs)
    kubectl.wait_for_phase("theirs", "Running", seconds=60)
    assert memory_in(kubectl, "theirs", "main") == [3000 * MIB]


def test_dry_run_of_vgpu_pod_makes_no_template(kubectl: Kubectl) -> None:
    one = pod("dry", {"main": None}, claim="", limits={contract.RESOURCE_VGPU_MEMORY: "5Gi"})
    kubectl.run("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(one))
    assert kubectl.all("resourceclaimtemplates") == []


def test_node_in_this_mode_offers_nothing_by_device_plugin(product: Kubectl, node_name: str) -> None:
    """T18: kubelet would admit a pod by capacity alone, and it would run without a GPU."""
    allocatable = product.get("node", node_name)["status"]["allocatable"]
    names = (contract.RESOURCE_VGPU, contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_CORES)
    assert [allocatable.get(name, "0") for name in names] == ["0", "0", "0"]


def test_cordoned_gpu_has_taint(product: Kubectl, node_name: str) -> None:
    """T15, for a cordon."""

    def tainted() -> int:
        return sum(taint["key"] == "aliquot.dev/cordoned" for device in offered(product) for taint in device.get("taints", []))

    product.run("patch", "gpunode", node_name, "--type=merge", '--patch={"spec": {"cordoned": true}}')
    try:
        eventually(lambda: tainted() == GPUS, "taints on all GPUs")
    finally:
        product.run("patch", "gpunode", node_name, "--type=merge", '--patch={"spec": {"cordoned": false}}')
    eventually(lambda: tainted() == 0, "no taint without a cordon")


def test_lost_gpu_is_unhealthy_for_its_pod_which_ends_by_policy_only(
    kubectl: Kubectl, product: Kubectl, node_name: str, inject: Inject
) -> None:
    """T15."""

    def lose_gpu_of(name: str) -> Mapping[str, Any]:
        kubectl.apply(claim(name, request(memory="1Gi")), pod(name, {"main": None}, claim=name))
        kubectl.wait_for_phase(name, "Running", seconds=60)
        device = kubectl.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"][0]["device"]
        [lost] = [one for one in offered(product) if one["name"] == device]
        inject("lost", lost["attributes"]["uuid"]["string"])
        return lost

    with with_setting(product, "ALIQUOT_LOST_GPU_POLICY=evict", GPUS):
        lost = lose_gpu_of("ends")
        eventually(lambda: kubectl.find("pod", "ends") is None, "Kubernetes to delete the pod", otherwise=lambda: str(offered(product)))
        assert "DeviceTaintManagerEviction" in str(kubectl.events("ends"))
        inject("recover", lost["attributes"]["uuid"]["string"])
    lost = lose_gpu_of("user")

    def health() -> str:
        return json.dumps(kubectl.get("pod", "user")["status"]["containerStatuses"][0].get("allocatedResourcesStatus"))

    eventually(lambda: taints(product, lost["name"]) == ["aliquot.dev/unhealthy"], "the taint", otherwise=lambda: str(offered(product)))
    eventually(lambda: "Unhealthy" in health(), "the pod's status to say so", otherwise=health)
    assert kubectl.get("pod", "user")["status"]["phase"] == "Running"


def test_node_changes_interface_when_last_pod_of_the_other_ended(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T17, to the device plugin and back."""
    system, holder = product.within(AGENT_NAMESPACE), pod("holder", {"main": None}, claim="held")

    def vgpus() -> str:
        return product.get("node", node_name)["status"]["allocatable"].get(contract.RESOURCE_VGPU, "0")

    kubectl.apply(claim("held", request(memory="1Gi")), holder)
    kubectl.wait_for_phase("holder", "Running", seconds=60)
    system.run("set", "env", "daemonset/aliquot-agent", "ALIQUOT_ALLOCATION=plugin")
    try:
        eventually(lambda: not offered(product), "the slices to go")
        assert vgpus() == "0"
        assert memory_in(kubectl, "holder", "main") == [GIB * MIB]
        kubectl.delete("pod", "holder")
        eventually(lambda: vgpus() == str(GPUS * SHARES_PER_GPU), "the vGPUs", otherwise=vgpus)
        wait_until_agents_rolled_out(system)
        last = slice_pod("last", Slice(GIB))
        last["metadata"]["labels"] = {contract.LABEL_ALLOCATION: "plugin"}
        kubectl.apply(last)
        kubectl.wait_for_phase("last", "Running", seconds=60)
    finally:
        system.run("set", "env", "daemonset/aliquot-agent", "ALIQUOT_ALLOCATION=dra")
        wait_until_agents_rolled_out(system)
    eventually(lambda: vgpus() == "0", "no vGPU for new pods", otherwise=vgpus)
    kubectl.apply(holder)
    eventually(lambda: "FailedScheduling" in str(kubectl.events("holder")), "no GPU for claims")
    says = "allocation: dra waits until the last of 1 containers with device IDs has ended"
    assert says in system.run("logs", agent_pod(product, node_name)["metadata"]["name"], "--container=agent")
    assert (Client(kubectl, "last").devices()[0]["total_bytes"], offered(product)) == (GIB * MIB, [])
    kubectl.delete("pod", "last")
    kubectl.wait_for_phase("holder", "Running", seconds=60)
    assert len(offered(product)) == GPUS


FIXED = f"{contract.RESOURCE_VGPU}-100g"


@contextmanager
def with_setting(product: Kubectl, setting: str, devices: int) -> Iterator[None]:
    """The agent with one more setting, as a variable. Args: devices: how many its slices have then."""
    system = product.within(AGENT_NAMESPACE)
    system.run("set", "env", "daemonset/aliquot-agent", setting)
    try:
        wait_until_agents_rolled_out(system)
        wait_until_offered(product, devices)
        yield
    finally:
        system.run("set", "env", "daemonset/aliquot-agent", f"{setting.partition('=')[0]}-")
        wait_until_agents_rolled_out(system)
        wait_until_offered(product)


def test_fixed_shares_are_exact_beside_other_shares(kubectl: Kubectl, product: Kubectl) -> None:
    """T14, with fixed shares in the place of MIG instances. The manifest states a resource only, without a webhook's help."""
    expression = f"device.driver == '{contract.DRA_DRIVER}' && device.attributes['{contract.DRA_DRIVER}'].type == 'fixed'"
    selector = {"cel": {"expression": expression}}
    spec = {"selectors": [selector], "extendedResourceName": FIXED}
    product.apply({**claim("vgpu-100g"), "kind": "DeviceClass", "spec": spec})
    try:
        with with_setting(product, "ALIQUOT_DRA_PROFILES=100g", 2 * GPUS):
            kubectl.apply(claim("share", request(memory="1Gi")), pod("share", {"main": None}, claim="share"))
            kubectl.wait_for_phase("share", "Running", seconds=60)
            names = [f"fixed-{number}" for number in range(GPUS)]
            kubectl.apply(*(pod(name, {"main": None}, claim="", limits={FIXED: "1"}) for name in names))
            eventually(lambda: len(running(kubectl, names)) == GPUS - 1, "one on each GPU without shares", seconds=90)
            first, *_ = running(kubectl, names)
            [waiting] = set(names) - set(running(kubectl, names))
            assert memory_in(kubectl, first, "main") == [100 * GIB * MIB]
            assert kubectl.get("pod", first)["spec"]["schedulerName"] == contract.SCHEDULER_NAME
            kubectl.delete("pod", "share")
            kubectl.wait_for_phase(waiting, "Running", seconds=90)
            kubectl.apply(pod("share-again", {"main": None}, claim="share"))
            eventually(lambda: "FailedScheduling" in str(kubectl.events("share-again")), "no GPU without a fixed share")
            kubectl.delete("pod", first)
            kubectl.wait_for_phase("share-again", "Running", seconds=90)
    finally:
        product.delete("deviceclass", "vgpu-100g")


def test_admin_access_sees_whole_gpus_in_use(kubectl: Kubectl, product: Kubectl) -> None:
    """T16."""
    product.run("label", "namespace", kubectl.namespace, "resource.kubernetes.io/admin-access=true")
    kubectl.apply(claim("share", request(memory="100Gi")), pod("share", {"main": None}, claim="share"))
    kubectl.wait_for_phase("share", "Running", seconds=60)
    watch = request(memory="1Mi")  # kube-scheduler leaves out GPUs that have less free
    watch["exactly"] = {**watch["exactly"], "allocationMode": "All", "adminAccess": True}
    del watch["exactly"]["count"]
    with with_setting(product, "ALIQUOT_DRA_ADMIN_ACCESS=true", GPUS):
        kubectl.apply(claim("watch", watch), pod("watch", {"main": None}, claim="watch"))
        kubectl.wait_for_phase("watch", "Running", seconds=60)
        seen = memory_in(kubectl, "watch", "main")
    assert len(seen) == GPUS
    assert min(seen) > 139 * GIB * MIB
    assert memory_in(kubectl, "share", "main") == [100 * GIB * MIB]


def running(kubectl: Kubectl, names: Sequence[str]) -> list[str]:
    """Those of the pods that run."""
    phases = {one["metadata"]["name"]: one["status"]["phase"] for one in kubectl.all("pods")}
    return [name for name in names if phases.get(name) == "Running"]


def test_pod_after_forced_deletion_prepares_claim_of_same_name_again(kubectl: Kubectl) -> None:
    """T23: the claim has the old name and a new UID."""
    for number in range(2):
        kubectl.apply(claim("mine", request(memory=f"{number + 1}Gi")), pod("user", {"main": None}, claim="mine"))
        kubectl.wait_for_phase("user", "Running", seconds=90)
        assert memory_in(kubectl, "user", "main") == [(number + 1) * GIB * MIB]
        kubectl.run("delete", "pod", "user", "--force", "--grace-period=0")
        kubectl.run("patch", "resourceclaim", "mine", "--type=merge", '--patch={"metadata": {"finalizers": null}}')
        kubectl.delete("resourceclaim", "mine")


def test_gated_pod_gets_its_device_after_the_gate_and_job_frees_it(kubectl: Kubectl) -> None:
    """T24, with a Job, a CronJob and a StatefulSet."""
    gated = pod("gated", {"main": None}, claim="late")
    gated["spec"]["schedulingGates"] = [{"name": "example.com/wait"}]
    kubectl.apply(claim("late", request(memory="1Gi")), gated)
    assert "allocation" not in kubectl.get("resourceclaim", "late").get("status", {})
    kubectl.run("patch", "pod", "gated", "--type=json", '--patch=[{"op": "remove", "path": "/spec/schedulingGates"}]')
    kubectl.wait_for_phase("gated", "Running", seconds=60)
    template = pod("", {"main": None}, claim="", limits={contract.RESOURCE_VGPU_MEMORY: "1Gi"}, command=[CLIENT, "info"])
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": {"template": {"spec": template["spec"]}}}
    yearly = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": job["spec"]}}
    kubectl.apply(job, {**job, "kind": "CronJob", "metadata": {"name": "yearly"}, "spec": yearly})
    kubectl.run("create", "job", "from-yearly", "--from=cronjob/yearly")
    for name in ("job", "from-yearly"):
        eventually(lambda name=name: kubectl.get("job", name)["status"].get("succeeded") == 1, f"{name} to end", seconds=60)  # type: ignore[misc]
    eventually(lambda: [one["metadata"]["name"] for one in kubectl.all("resourceclaims")] == ["late"], "their claims to go", seconds=60)
    replicas = deployment("set", 2, {contract.RESOURCE_VGPU_MEMORY: "1Gi"})
    kubectl.apply({**replicas, "kind": "StatefulSet", "spec": {**replicas["spec"], "serviceName": "set"}})
    for name in ("set-0", "set-1"):
        kubectl.wait_for_phase(name, "Running")
        assert memory_in(kubectl, name, "main") == [GIB * MIB]
    kubectl.delete("statefulset", "set")  # else it makes each pod again that the namespace's end deletes


@pytest.mark.parametrize("spec", [{"nodeName": "not-its-own"}, {"allNodes": True}])
def test_agent_cannot_write_slices_for_other_nodes(product: Kubectl, node_name: str, spec: Mapping[str, Any]) -> None:
    """T21."""
    pool = {"name": "x", "generation": 1, "resourceSliceCount": 1}
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "foreign"},
        "spec": {"driver": contract.DRA_DRIVER, "pool": pool, "devices": [], **spec},
    }
    answer = ask_as_the_agent(product, node_name, "POST", "/apis/resource.k8s.io/v1/resourceslices", body)
    assert "an agent writes the ResourceSlices of its own node only" in answer


def test_agent_cannot_write_reservation_of_claim(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T21: of a claim's status an agent writes the devices only."""
    kubectl.apply(claim("held", request(memory="1Gi")), pod("user", {"main": None}, claim="held"))
    kubectl.wait_for_phase("user", "Running", seconds=60)
    path = f"/apis/resource.k8s.io/v1/namespaces/{kubectl.namespace}/resourceclaims/held/status"
    answer = ask_as_the_agent(product, node_name, "PATCH", path, [{"op": "remove", "path": "/status/reservedFor"}])
    # Since 1.36 Kubernetes wants a right of its own for it, and says so first.
    assert "an agent changes only the devices" in answer or "resourceclaims/binding" in answer
    assert kubectl.get("resourceclaim", "held")["status"]["reservedFor"]


def test_agent_writes_devices_of_claims_on_its_own_node_only(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T21: since 1.36 Kubernetes wants a right of its own for it."""
    check_device_reports(kubectl, product, node_name, "arbitrary-node:patch")


def test_running_pods_and_claims_outlive_absence_of_agent(kubectl: Kubectl, product: Kubectl, node_name: str) -> None:
    """T10: kubelet deletes the slices 30 s after the driver left."""
    kubectl.apply(claim("kept", request(memory="4Gi")), pod("kept", {"main": None}, claim="kept"))
    before = kubectl.wait_for_phase("kept", "Running", seconds=60)
    system = product.within(AGENT_NAMESPACE)
    nowhere = json.dumps({"spec": {"template": {"spec": {"nodeSelector": {"example.com/nowhere": "true"}}}}})
    system.run("patch", "daemonset", "aliquot-agent", "--type=merge", f"--patch={nowhere}")
    try:
        eventually(lambda: not offered(product), "kubelet to delete the slices", seconds=90)
        assert container_of(kubectl.get("pod", "kept")) == container_of(before)
    finally:
        anywhere = '[{"op": "remove", "path": "/spec/template/spec/nodeSelector"}]'
        system.run("patch", "daemonset", "aliquot-agent", "--type=json", f"--patch={anywhere}")
        wait_until_agents_rolled_out(system)
    wait_until_offered(product)
    assert memory_in(kubectl, "kept", "main") == [4 * GIB * MIB]
    kubectl.apply(pod("joins", {"main": None}, claim="kept"))
    kubectl.wait_for_phase("joins", "Running", seconds=60)


MANY = 110
"""Kubelet's default for the pods of a node."""
MOST_TIMES = 1.15
"""How much longer pods with claims may take than the same pods without GPUs, in one run on one machine."""


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_claim_pods_run_nearly_as_soon_as_pods_without_gpus(kubectl: Kubectl) -> None:
    """The second of three rounds has claims, so that a machine that gets slower or faster meanwhile counts half."""
    kubectl.apply(template("shape", request(memory="1Gi")))
    before, with_claims, after = (seconds_to_running(kubectl, claims=claims) for claims in (False, True, False))
    times = 2 * with_claims / (before + after)
    print(f"{MANY} pods to Running: {with_claims:.1f} s with claims, {before:.1f} and {after:.1f} s without GPUs: {times:.2f} times")
    assert times <= MOST_TIMES


def seconds_to_running(kubectl: Kubectl, *, claims: bool) -> float:
    """How long it takes to create many pods at once until all run; then they are deleted."""
    many = []
    for number in range(MANY):
        one = pod(f"many-{number}", {"main": None}, claim="")
        one["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]} if claims else {}
        one["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "shape"}] if claims else []
        many.append(one)
    begun = time.monotonic()
    kubectl.run("create", "--filename=-", stdin=yaml.safe_dump_all(many))
    kubectl.run("wait", "pods", "--all", "--for=jsonpath={.status.phase}=Running", "--timeout=300s", timeout_seconds=310)
    took = time.monotonic() - begun
    kubectl.delete("pods", "--all")
    eventually(lambda: not kubectl.all("resourceclaims"), "the claims to be gone", seconds=120)
    return took


def check_device_reports(kubectl: Kubectl, product: Kubectl, node_name: str, refusal: str) -> None:
    """Check that the agent of a node can report devices of claims that are allocated there, and not of others."""
    answers = {}
    for node in (node_name, "not-its-own"):
        device = {"driver": contract.DRA_DRIVER, "pool": node, "device": "gpu-0"}
        kubectl.apply(claim(node, request(memory="1Gi")))
        allocate(kubectl, node, {"request": "gpu", **device}, node)
        path = f"/apis/resource.k8s.io/v1/namespaces/{kubectl.namespace}/resourceclaims/{node}/status"
        report = [{"op": "add", "path": "/status/devices", "value": [device]}]
        answers[node] = ask_as_the_agent(product, node_name, "PATCH", path, report)
    assert answers[node_name].startswith("200 ")
    assert refusal in answers["not-its-own"]
    assert "devices" not in kubectl.get("resourceclaim", "not-its-own")["status"]


def allocate(kubectl: Kubectl, claim: str, result: Object, node: str) -> None:
    """Allocate a device of a node to a claim, as a scheduler does, but without a check of what fits."""
    kept = {"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}}  # so that a claim in use is not deleted
    selector = {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}]}
    allocation = {"devices": {"results": [result]}, "nodeSelector": selector, "allocationTimestamp": "2026-01-01T00:00:00Z"}
    kubectl.run("patch", "resourceclaim", claim, "--type=merge", f"--patch={json.dumps(kept)}")
    status = json.dumps({"status": {"allocation": allocation}})
    kubectl.run("patch", "resourceclaim", claim, "--subresource=status", "--type=merge", f"--patch={status}")


def measured(product: Kubectl, node: str, name: str, **labels: str) -> list[float]:
    """The values of a metric of a node's agent, of the samples with these labels."""
    return [value for sample, its, value in metrics(product, node) if sample == name and labels.items() <= its.items()]


def memory_in(kubectl: Kubectl, name: str, container: str) -> list[int]:
    """The memory of each GPU that a program in a container sees, in bytes."""
    events = parse_events(kubectl.exec(name, CLIENT, "info", container=container))
    return [event["total_bytes"] for event in events if event["event"] == "device"]


def container_of(one: Object) -> tuple[str, int]:
    """Which container a pod of one has, and how often it was started again."""
    [status] = one["status"]["containerStatuses"]
    return status["containerID"], status["restartCount"]


def offered(product: Kubectl) -> list[Mapping[str, Any]]:
    """The devices in the slices of the driver."""
    slices = product.all("resourceslices", f"--field-selector=spec.driver={contract.DRA_DRIVER}")
    return [device for one in slices for device in one["spec"].get("devices", [])]


def wait_until_offered(product: Kubectl, devices: int = GPUS) -> None:
    """Wait until the slices have this many devices."""
    what = f"{devices} devices in ResourceSlices"
    eventually(lambda: len(offered(product)) == devices, what, seconds=90, otherwise=lambda: str(offered(product)))


def taints(product: Kubectl, device: str) -> list[str]:
    """The keys of a device's taints in the slices."""
    return [taint["key"] for one in offered(product) if one["name"] == device for taint in one.get("taints", [])]


def request(name: str = "gpu", *, device_class: str = contract.DRA_CLASS, count: int = 1, **amounts: str) -> Object:
    """One request of a claim."""
    exactly: dict[str, Any] = {"deviceClassName": device_class, "count": count}
    return {"name": name, "exactly": {**exactly, **({"capacity": {"requests": amounts}} if amounts else {})}}


def claim(name: str, *requests: Object, parameters: Mapping[str, str] | None = None) -> Object:
    """A ResourceClaim."""
    devices: dict[str, Any] = {"requests": list(requests)}
    if parameters is not None:
        stated = {"apiVersion": contract.PARAMETERS_API_VERSION, "kind": contract.PARAMETERS_KIND, **parameters}
        devices["config"] = [{"opaque": {"driver": contract.DRA_DRIVER, "parameters": stated}}]
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name}, "spec": {"devices": devices}}


def template(name: str, *requests: Object) -> Object:
    """A ResourceClaimTemplate."""
    one = claim(name, *requests)
    return {**one, "kind": "ResourceClaimTemplate", "spec": {"spec": one["spec"]}}


def why(kubectl: Kubectl, pod: str) -> Why:
    """What the scheduler says of a pod."""
    found = CliRunner().invoke(main, ["why", f"{kubectl.namespace}/{pod}", "--kubeconfig", str(kubectl.kubeconfig), "-o", "json"])
    explained: Why = msgspec.json.decode(found.output, type=Why)
    assert found.exit_code == (4 if explained.waits else 0), found.output
    return explained


def deployment(name: str, replicas: int, limits: Mapping[str, str]) -> Object:
    """A Deployment of pods that request vGPUs."""
    template = pod("", {"main": None}, claim="", limits=limits)
    labels = {"app": name}
    spec = {**template["spec"], "restartPolicy": "Always"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def pod(
    name: str,
    containers: Mapping[str, str | None],
    *,
    claim: str,
    command: Sequence[str] = HOLD_OPEN,
    limits: Mapping[str, str] | None = None,
    **more: Any,
) -> Object:
    """A pod with one claim.

    Args: containers: by name, the request that each container uses; None for the claim as a whole.
          limits: of each container; then the pod names no claim.
          more: fields of the spec.
    """
    specs = [
        {
            "name": container,
            "image": CLIENT_IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": list(command),
            "resources": {"limits": dict(limits)}
            if limits
            else {"claims": [{"name": "gpu", **({"request": of} if of is not None else {})}]},
        }
        for container, of in containers.items()
    ]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": specs,
        **({} if limits else {"resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]}),
        **more,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
