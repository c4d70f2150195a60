# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from aliquot import contract
from aliquot.contract.model import ContainerRequest, Isolation, NumaMode, PodRequest, Policy, Preferences, Priority
from aliquot.contract.units import GIB, MIB
from aliquot.placement.request import RequestError, container_request, pod_preferences, pod_request, request_of_container
from tests.unit.aliquot.placement.builders import make_pod, make_spec

MIG_LIMIT: dict[str, Any] = {"mig-1g.10gb": "1"}


def annotated(**values: str) -> dict[str, str]:
    return {contract.ANNOTATION_PREFIX + name.replace("_", "-"): value for name, value in values.items()}


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        pytest.param({"vgpu": "1"}, ContainerRequest("main", 1), id="a whole GPU's memory"),
        pytest.param({"vgpu": "2", "vgpu_memory": "8Gi", "vgpu_cores": "100"}, ContainerRequest("main", 2, 8 * GIB, 100), id="all three"),
        pytest.param({"vgpu_memory": "4096"}, ContainerRequest("main", 1, 4 * GIB), id="memory alone asks for one vGPU"),
        pytest.param({"vgpu_cores": "30"}, ContainerRequest("main", 1, None, 30), id="cores alone ask for one vGPU"),
        pytest.param({"vgpu": "16", "vgpu_memory": "16"}, ContainerRequest("main", 16, 16 * MIB), id="as many as a container takes"),
        pytest.param({"mig-1g.10gb": "2"}, ContainerRequest("main", mig=(("1g.10gb", 2),)), id="MIG"),
        pytest.param(
            {"mig-1g.10gb.me": "1", "mig-2g.20gb": "1"},
            ContainerRequest("main", mig=(("1g.10gb+me", 1), ("2g.20gb", 1))),
            id="two profiles",
        ),
    ],
)
def test_limits_become_a_request_in_bytes_and_percent(limits, want):
    assert container_request(make_spec(**limits)) == want


def test_a_container_without_gpu_limits_asks_for_nothing():
    spec = make_spec()
    assert container_request(spec) is None


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        pytest.param({"vgpu": "1", "vgpu_cores": "250"}, "at most 100, or ask for more vGPUs", id="more cores than one vGPU has"),
        pytest.param({"vgpu": "2", "vgpu_cores": "201"}, "at most 200", id="more cores than two vGPUs have"),
        pytest.param({"vgpu": "3", "vgpu_memory": "1000"}, "set nvidia.com/vgpu-memory to 999 or 1002", id="memory does not divide"),
        pytest.param({"vgpu": "3", "vgpu_memory": "2"}, "at least 1 MiB each", id="memory for fewer vGPUs than asked"),
        pytest.param({"vgpu": "3", "vgpu_cores": "50"}, "set nvidia.com/vgpu-cores to 48 or 51", id="cores do not divide"),
        pytest.param({"vgpu": "3", "vgpu_cores": "2"}, "set nvidia.com/vgpu-cores to 3", id="less than one percent each"),
        pytest.param({"vgpu_memory_percent": "101"}, "101 percent of device memory on 1 vGPU, which have 100 in all", id="over 100 %"),
        pytest.param({"vgpu": "2", "vgpu_memory_percent": "51"}, "vgpu-memory-percent to 50 or 52", id="percentage does not divide"),
        pytest.param({"vgpu_memory_percent": "0"}, "vgpu-memory-percent: ", id="zero percent"),
        pytest.param({"vgpu_memory": "9", "vgpu_memory_percent": "9"}, "sets both", id="MiB and percent"),
        pytest.param(
            {"vgpu": "0"}, "nvidia.com/vgpu: expected a whole number of at least 1, found '0', or remove the resource", id="zero vGPUs"
        ),
        pytest.param({"vgpu": "-1"}, "found '-1'", id="negative vGPUs"),
        pytest.param({"vgpu": "1.5"}, "found '1.5'", id="one and a half vGPUs"),
        pytest.param({"vgpu": "all"}, "not a Kubernetes quantity", id="not a number"),
        pytest.param({"vgpu": "17"}, "at most 16; split the work", id="too many vGPUs"),
        pytest.param({"vgpu": "1", "vgpu_memory": "0"}, "write 4096 or 4Gi", id="zero memory"),
        pytest.param({"vgpu": "1", "vgpu_memory": "16G"}, "write 16384 or 16Gi", id="decimal gigabytes"),
        pytest.param({"vgpu": "1", "vgpu_cores": "0"}, "write 50 for half", id="zero cores"),
        pytest.param({"vgpu": "1", "mig-1g.10gb": "1"}, "keep one kind", id="vGPU and MIG"),
        pytest.param({"vgpu_memory": "10", "mig-1g.10gb": "1"}, "keep one kind", id="vGPU memory and MIG"),
        pytest.param({"mig-small": "1"}, "such as 1g.10gb", id="no such profile"),
        pytest.param({"mig-1g.10gb": "0"}, "found '0'", id="zero instances"),
        pytest.param(
            {"mig-1g.10gb": "9", "mig-2g.20gb": "8"}, "17 MIG instances: one container can use at most 16", id="too many instances"
        ),
    ],
)
def test_limits_beyond_any_gpu_are_refused_with_alternative(limits, says):
    with pytest.raises(RequestError) as refused:
        container_request(make_spec(**limits))
    assert says in str(refused.value)
    assert str(refused.value).startswith("container main")


def test_annotations_become_preferences():
    found = pod_preferences(
        annotated(
            gpu_type="H100, A100",
            gpu_type_not="PCIe",
            gpu_uuid="GPU-a",
            gpu_uuid_not="GPU-b,GPU-c",
            placement="topology",
            numa="strict",
            isolation="mps",
            priority="high",
            memory_burst="1.5",
        )
    )
    assert found == Preferences(
        ("H100", "A100"), ("PCIe",), ("GPU-a",), ("GPU-b", "GPU-c"), Policy.TOPOLOGY, NumaMode.STRICT, Isolation.MPS, Priority.HIGH, 1.5
    )


def test_no_annotations_are_no_preferences():
    assert pod_preferences({"example.com/other": "x"}) == Preferences()


@pytest.mark.parametrize(
    ("annotation", "value", "says"),
    [
        ("placement", "pack", "expected one of frag, binpack, spread, topology, found 'pack'"),
        ("placement", "Binpack", "found 'Binpack'"),
        ("numa", "yes", "expected one of strict, prefer, found 'yes'"),
        ("isolation", "", "one of shim, mps, mig, driver, exclusive"),
        ("priority", "5", "one of high, low"),
        ("cores-mode", "soft", "one of ceiling, weight"),
        ("gpu-type", "", "expected names separated by single commas"),
        ("gpu-type-not", "A100,", "expected names separated by single commas"),
        ("gpu-uuid", ",", "expected names separated by single commas"),
        ("gpu-uuid-not", " ", "expected names separated by single commas"),
        ("memory-burst", "0.9", "from 1 to 10, found '0.9'"),
        ("memory-burst", "11", "from 1 to 10"),
        ("memory-burst", "-2", "from 1 to 10"),
        ("memory-burst", "nan", "from 1 to 10"),
        ("memory-burst", "1e0", "from 1 to 10"),
        ("memory-burst", "150%", "from 1 to 10"),
        ("paused", "yes", "expected true or false, found 'yes': correct it, or remove it"),
        ("paused", "True", "expected true or false"),
        ("paused", "", "expected true or false"),
    ],
)
def test_annotation_outside_allowed_values_is_refused(annotation, value, says):
    with pytest.raises(RequestError) as refused:
        pod_preferences({contract.ANNOTATION_PREFIX + annotation: value})
    assert says in str(refused.value)
    assert f"annotation {contract.ANNOTATION_PREFIX}{annotation}" in str(refused.value)


@pytest.mark.parametrize(
    ("limits", "annotations", "says"),
    [
        ({"vgpu": "1"}, {"isolation": "mig"}, "nvidia.com/mig-1g.10gb: 1"),
        ({"vgpu": "1", "vgpu_cores": "10"}, {"isolation": "exclusive"}, "gives whole GPUs"),
        ({"vgpu": "1", "vgpu_memory": "10"}, {"isolation": "exclusive", "memory_burst": "2"}, "has no memory to burst into"),
        ({"vgpu": "1"}, {"memory_burst": "2"}, "has no memory to burst into"),
        ({"vgpu": "1", "vgpu_memory": "100"}, {"cores_mode": "weight"}, "which is its weight"),
        ({"vgpu": "1"}, {"isolation": "mps", "paused": "true"}, "aliquot.dev/isolation: mps with .* only the shim can pause"),
        ({"vgpu": "1"}, {"isolation": "exclusive", "paused": "true"}, "only the shim can pause: remove one of the two"),
        ({"mig-1g.10gb": "1"}, {"paused": "true"}, "asks for MIG instances with .* only the shim can pause"),
    ],
)
def test_annotations_that_contradict_the_amounts_are_refused(limits, annotations, says):
    pod = make_pod(make_spec(**limits), annotations=annotated(**annotations))
    with pytest.raises(RequestError, match=says):
        pod_request(pod)
    with pytest.raises(RequestError, match=says):
        request_of_container(pod, "main")


@pytest.mark.parametrize(("text", "paused"), [("true", True), ("false", False)])
def test_a_pod_is_paused_or_not(text, paused):
    assert pod_preferences(annotated(paused=text)).paused is paused


def test_what_nothing_can_pause_may_say_that_it_is_not_paused():
    pod = make_pod(make_spec(vgpu="1"), annotations=annotated(isolation="mps", paused="false"))
    assert not pod_request(pod).preferences.paused


def test_isolation_mig_suits_a_container_that_asks_for_instances():
    pod = make_pod(make_spec("main", **MIG_LIMIT), annotations=annotated(isolation="mig"))
    assert pod_request(pod).preferences.isolation is Isolation.MIG


def test_a_pod_is_its_requesting_containers_in_spec_order():
    pod = make_pod(
        make_spec("prepare", init=True, vgpu="1"), make_spec("proxy"), make_spec("train", vgpu="2"), annotations=annotated(priority="low")
    )
    assert pod_request(pod) == PodRequest(
        (ContainerRequest("prepare", 1, init=True), ContainerRequest("train", 2)), Preferences(priority=Priority.LOW)
    )


def test_a_pod_with_more_gpu_containers_than_make_sense_is_refused():
    specs = [make_spec(f"c{number}", vgpu="1") for number in range(33)]
    assert len(pod_request(make_pod(*specs[:32])).containers) == 32
    with pytest.raises(RequestError, match="expected at most 32 containers that ask for GPUs, found 33"):
        pod_request(make_pod(*specs))


def test_a_pod_without_gpus_has_an_empty_request():
    assert pod_request(make_pod(make_spec())) == PodRequest(())


def test_a_gpu_in_an_init_container_only_is_a_request():
    (request,) = pod_request(make_pod(make_spec("prepare", init=True, vgpu="1"), make_spec("app"))).containers
    assert (request.container, request.init) == ("prepare", True)


def test_a_sidecar_is_no_init_container():
    (request,) = pod_request(make_pod(make_spec("cache", sidecar=True, vgpu="1"), make_spec("app"))).containers
    assert not request.init


def test_one_container_can_be_read_without_the_others():
    pod = make_pod(make_spec("broken", vgpu="0"), make_spec("train", vgpu="1"), annotations=annotated(numa="prefer"))
    assert request_of_container(pod, "train") == (ContainerRequest("train", 1), Preferences(numa=NumaMode.PREFER))


@pytest.mark.parametrize(("container", "says"), [("missing", "found train, proxy"), ("proxy", "asks for no GPU")])
def test_a_container_that_cannot_be_read_is_refused(container, says):
    with pytest.raises(RequestError, match=says):
        request_of_container(make_pod(make_spec("train", vgpu="1"), make_spec("proxy")), container)


def test_all_percent_is_whole_memory_and_less_is_no_exclusive_gpu():
    assert container_request(make_spec(vgpu="2", vgpu_memory_percent="200")) == ContainerRequest("main", 2)
    part = make_pod(make_spec(vgpu_memory_percent="50"), annotations=annotated(isolation="exclusive"))
    with pytest.raises(RequestError, match="vgpu-memory-percent, or the annotation"):
        pod_request(part)


@pytest.mark.parametrize(("capacity_mib", "percent", "mib"), [(1001, 50, 500), (1001, 1, 10), (99, 1, 1), (10, 1, 1), (0, 50, 0)])
def test_percentage_is_rounded_down_to_one_mebibyte_at_least(capacity_mib, percent, mib):
    assert ContainerRequest("main", 1, memory_percent=percent).memory_mib_on(capacity_mib) == mib
