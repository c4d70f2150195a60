# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from agent.core.compat_metrics import CompatFacts, hami_families
from agent.core.inventory import DeviceInventory, DeviceReading, DriverReading
from agent.core.metrics import Snapshot
from agent.core.mig import MigRecord
from agent.core.sensors import DeviceSensors
from agent.core.usage import ContainerUsage, DeviceUsage
from aliquot.contract.units import MIB
from tests.unit.agent.builders import BOOT, gpu, grant, ids, instance, pod, reading, share
from tests.unit.agent.partitions import dynamic_gpu, place

TRAIN = grant(ids("0:0", "1:0"), share(0, 100, 30), share(1, 200), of=pod("train"))
HARD = grant(frozenset({"MIG-2-0"}), share("MIG-2-0", 50), of=pod("hard"), resource="nvidia.com/mig-1g.10gb")


def node() -> DeviceInventory:
    devices = (gpu(0), gpu(1), gpu(2, mig=[instance(2, 0), instance(2, 1)]))
    sensors = DeviceSensors(memory_utilization_ratio=0.5)
    readings = (DeviceReading(device, 10 * MIB, 0.25, {"MIG-2-0": 7} if device.mig_enabled else {}, sensors=sensors) for device in devices)
    return DeviceInventory().after_reading(DriverReading("580", 13000, tuple(readings)))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[tuple[str, ...], float]]:
    usage = ContainerUsage((DeviceUsage(used_bytes=90, context_bytes=20, module_bytes=30), DeviceUsage()), 1)
    snapshot = Snapshot(node(), (TRAIN, HARD), node="node-1", usage={TRAIN.grant_id: usage}, utilization={(TRAIN.grant_id, "GPU-0"): 0.75})
    facts = CompatFacts({TRAIN.grant_id: 1}, {(TRAIN.grant_id, "GPU-0"): 12.0})
    return {
        family.name: {named(family.labels, labels): value for labels, value in family.samples} for family in hami_families(snapshot, facts)
    }


def named(names: tuple[str, ...], labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}={label}" for name, label in zip(names, labels, strict=True))


def test_utilisation_is_in_percent_as_dashboards_on_these_names_expect(found):
    labels = ("node=node-1", "device_index=0", "device_uuid=GPU-0", "device_type=NVIDIA H200")
    assert found["hami_host_gpu_utilization_ratio"][labels] == 25
    assert found["hami_host_gpu_memory_controller_utilization_ratio"][labels] == 50
    container = ("namespace=default", "pod=train", "container=main", "vdevice_index=0", "device_uuid=GPU-0")
    assert found["hami_container_device_utilization_ratio"] == {container: 75}


def test_a_share_of_memory_is_from_zero_to_one(found):
    labels = ("node=node-1", "device_uuid=GPU-0", "device_index=0", "device_type=NVIDIA H200", "zone=vGPU")
    assert found["hami_node_gpu_memory_allocated_ratio"][labels] == pytest.approx(0.1)
    assert found["hami_gpu_core_allocated_ratio"][labels] == 30
    assert found["hami_gpu_core_limit_ratio"][labels] == 100
    assert found["hami_gpu_shared_count"][labels] == 1


def test_container_is_named_by_known_position_in_pod(found):
    assert found["hami_vgpu_memory_allocated_bytes"] == {
        ("namespace=default", "node=node-1", "pod=train", "container_index=1", "device_uuid=GPU-0", "zone=vGPU"): 100 * MIB,
        ("namespace=default", "node=node-1", "pod=train", "container_index=1", "device_uuid=GPU-1", "zone=vGPU"): 200 * MIB,
    }


def test_the_parts_of_the_memory_in_use_add_up(found):
    container = ("namespace=default", "pod=train", "container=main", "vdevice_index=0", "device_uuid=GPU-0")
    parts = [found[f"hami_vgpu_memory_{part}_bytes"][container] for part in ("context", "module", "buffer")]
    assert parts == [20, 30, 40]
    assert sum(parts) == found["hami_vgpu_memory_used_bytes"][container]


def test_a_mig_instance_is_named_with_its_gpu_and_its_holder(found):
    holder = ("namespace=default", "pod=hard", "container=main", "vdevice_index=0", "device_uuid=GPU-2")
    assert found["hami_vgpu_memory_used_bytes"][holder] == 7
    identity = ("mig_uuid=MIG-2-0", "profile=1g.10gb", "gpu_instance_id=0", "compute_instance_id=0")
    assert found["hami_mig_device_info"] == {(*holder, *identity): 1}
    assert len(found["hami_node_gpu_mig_instance_info"]) == 1


def test_finished_container_has_no_series_and_node_keeps_promised_amount():
    usage = {TRAIN.grant_id: ContainerUsage((DeviceUsage(), DeviceUsage()), 1)}
    snapshot = Snapshot(node(), (TRAIN, HARD), node="node-1", usage=usage, ended={TRAIN.grant_id, HARD.grant_id})
    facts = CompatFacts({TRAIN.grant_id: 0, HARD.grant_id: 0}, {(TRAIN.grant_id, "GPU-0"): 12.0})
    families = list(hami_families(snapshot, facts))
    of_containers = [family for family in families if {"pod", "podname"} & set(family.labels)]
    assert len(of_containers) > 10
    assert [family.name for family in of_containers if family.samples] == []
    values = {family.name: sum(value for _, value in family.samples) for family in families}
    assert (values["hami_gpu_shared_count"], values["hami_node_gpu_mig_instance_info"]) == (3, 1)


def instances_at_places(*records: MigRecord) -> dict[str, list[dict[str, str]]]:
    """The labels of what is said of MIG instances, with a container at each of two places of one GPU."""
    grants = [
        grant(ids(f"0:{start}"), share(place(start).uuid), of=pod(f"at-{start}"), resource="nvidia.com/mig-1g.10gb") for start in (3, 4)
    ]
    on = DeviceInventory().after_reading(reading(dynamic_gpu()))
    known = {record.place: replace(record, grant_id=of.grant_id) for record, of in zip(records, grants, strict=True)}
    found = hami_families(Snapshot(on, grants, node="node-1", mig_records=known))
    return {family.name: [dict(zip(family.labels, labels, strict=True)) for labels, _ in family.samples] for family in found}


def test_instance_created_on_demand_has_name_from_driver():
    found = instances_at_places(*(MigRecord(place(start).uuid, "", BOOT, f"MIG-{start}", 0, 1, 7, 7 + start, 0) for start in (3, 4)))
    for name in ("hami_mig_device_info", "hami_node_gpu_mig_instance_info"):
        said = [(one["mig_uuid"], one["profile"], one["gpu_instance_id"], one["compute_instance_id"]) for one in found[name]]
        assert said == [("MIG-3", "1g.10gb", "10", "0"), ("MIG-4", "1g.10gb", "11", "0")]
    assert [one["placement_start"] for one in found["hami_node_gpu_mig_instance_info"]] == ["3", "4"]
    assert [one["instanceid"] for one in found["MigInfo"]] == ["10", "11"]
    assert [one["migname"] for one in found["nodeGPUMigInstance"]] == ["1g.10gb-10", "1g.10gb-11"]


def test_placement_with_unknown_instance_has_no_series():
    being_made, of_an_earlier_agent = MigRecord(place(3).uuid, "", BOOT), MigRecord(place(4).uuid, "", BOOT, "MIG-4")
    found = instances_at_places(being_made, of_an_earlier_agent)
    assert [found[name] for name in ("hami_mig_device_info", "MigInfo", "hami_node_gpu_mig_instance_info", "nodeGPUMigInstance")] == [
        []
    ] * 4


def test_the_build_has_the_labels_of_hamis_and_our_version():
    (build,) = (one for one in hami_families(Snapshot(node(), version="1.2.3")) if one.name == "hami_build_info")
    assert build.labels == ("version", "revision", "build_date", "go_version", "compiler", "platform")
    assert build.samples == ((("aliquot-1.2.3", "", "", "", "", ""), 1.0),)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("hami_host_gpu_memory_used_bytes", "HostGPUMemoryUsage"),
        ("hami_host_gpu_utilization_ratio", "HostCoreUtilization"),
        ("hami_gpu_memory_limit_bytes", "GPUDeviceMemoryLimit"),
        ("hami_gpu_core_limit_ratio", "GPUDeviceCoreLimit"),
        ("hami_gpu_memory_allocated_bytes", "GPUDeviceMemoryAllocated"),
        ("hami_gpu_shared_count", "GPUDeviceSharedNum"),
        ("hami_gpu_core_allocated_ratio", "GPUDeviceCoreAllocated"),
        ("hami_node_gpu_overview", "nodeGPUOverview"),
        ("hami_node_gpu_memory_allocated_ratio", "nodeGPUMemoryPercentage"),
        ("hami_vgpu_memory_allocated_bytes", "vGPUMemoryAllocated"),
        ("hami_vgpu_core_allocated_ratio", "vGPUCoreAllocated"),
        ("hami_vgpu_memory_used_bytes", "vGPU_device_memory_usage_in_bytes"),
        ("hami_vgpu_memory_limit_bytes", "vGPU_device_memory_limit_in_bytes"),
        ("hami_container_device_memory_bytes", "Device_memory_desc_of_container"),
        ("hami_container_device_utilization_ratio", "Device_utilization_desc_of_container"),
        ("hami_container_last_kernel_elapsed_seconds", "Device_last_kernel_of_container"),
        ("hami_mig_device_info", "MigInfo"),
        ("hami_node_gpu_mig_instance_info", "nodeGPUMigInstance"),
    ],
)
def test_old_name_has_the_same_values(found, new, old):
    assert found[new]
    assert sorted(found[old].values()) == sorted(found[new].values())


def test_families_and_label_sets_are_unique():
    families = list(hami_families(Snapshot(node(), (TRAIN, HARD), node="node-1")))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert len({labels for labels, _ in family.samples}) == len(family.samples), family.name


@pytest.mark.parametrize(
    ("name", "label"),
    [
        *(
            (f"hami_gpu_{what}", "node")
            for what in ("memory_limit_bytes", "memory_allocated_bytes", "shared_count", "core_allocated_ratio")
        ),
        ("hami_node_gpu_memory_allocated_ratio", "node"),
        ("hami_host_gpu_memory_used_bytes", "device_uuid"),
        ("hami_host_gpu_utilization_ratio", "device_uuid"),
        ("hami_vgpu_memory_used_bytes", "namespace"),
        ("hami_vgpu_memory_limit_bytes", "namespace"),
        ("hami_container_device_utilization_ratio", "namespace"),
    ],
)
def test_metrics_of_hami_dashboard_exist_with_its_selector_label(found, name, label):
    assert found[name]
    assert all(any(one.startswith(f"{label}=") for one in labels) for labels in found[name])
