# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from agent.core.holdings import Holdings
from agent.core.inventory import DeviceInventory, DeviceReading, DriverReading
from agent.core.limits import FailPolicy, limits_of
from agent.core.metrics import Family, Snapshot, families
from agent.core.mig import MigRecord
from agent.core.overhead import GpuProcess
from agent.core.sensors import DeviceSensors
from agent.core.tally import Counts
from agent.core.usage import ContainerUsage, DeviceUsage
from aliquot.contract.model import Isolation, Preferences
from aliquot.contract.units import MIB
from tests.unit.agent.builders import BOOT, gpu, grant, ids, instance, inventory, pod, share
from tests.unit.agent.partitions import dynamic_gpu, place

TWO = grant(ids("0:0", "1:0"), share(0, 100, 30), share(1, 200), of=pod("train"))


def scrape(*grants, on=None, **known) -> dict[str, Family]:
    """The families of a node where limits are as granted, unless ``known`` says otherwise."""
    known.setdefault("limits", {one.grant_id: limits_of(one, FailPolicy.CLOSED) for one in grants if one.under_shim})
    snapshot = Snapshot(on or inventory(gpu(0), gpu(1)), grants, node="node-1", version="0.1.0", shares_per_gpu=16, **known)
    return {family.name: family for family in families(snapshot)}


def labelled(family: Family) -> list[dict[str, str]]:
    return [dict(zip(family.labels, labels, strict=True)) for labels, _ in family.samples]


def usage(*used: DeviceUsage, processes: int = 1) -> dict[str, ContainerUsage]:
    return {TWO.grant_id: ContainerUsage(used or (DeviceUsage(), DeviceUsage()), processes)}


def by_device(family: Family) -> dict[str, float]:
    return {labels[family.labels.index("device_uuid")]: value for labels, value in family.samples}


def test_container_at_placement_has_instance_created_for_it():
    one = grant(ids("0:0"), share(place(4).uuid), resource="nvidia.com/mig-1g.10gb")
    made = MigRecord(place(4).uuid, one.grant_id, BOOT, "MIG-made", gpu_instance_id=9, compute_instance_id=0)

    def series(record: MigRecord, family: str = "container_mig_instance_info") -> list[tuple[str, str, str]]:
        found = scrape(one, on=inventory(dynamic_gpu()), mig_records={record.place: record})[f"aliquot_{family}"]
        gpu_label = "gpu_uuid" if family.startswith("container") else "device_uuid"
        return [(labels["mig_uuid"], labels[gpu_label], labels["gpu_instance_id"]) for labels in labelled(found)]

    assert series(made) == series(made, "device_mig_instance_info") == [("MIG-made", "GPU-0", "9")]
    assert series(replace(made, gpu_instance_id=None)) == [("MIG-made", "GPU-0", "")], "an earlier agent did not write it down"
    assert series(replace(made, uuid="")) == series(replace(made, uuid=""), "device_mig_instance_info") == [], "it is being made"
    assert series(replace(made, grant_id="before")) == [], "it is about to be removed"


def test_container_with_existing_instance_names_it_with_gpu():
    on = inventory(gpu(0, mig=[instance(0, 0), instance(0, 1)]))
    found = scrape(TWO, grant(frozenset({"MIG-0-1"}), share("MIG-0-1", 100), resource="nvidia.com/mig-1g.10gb"), on=on)
    (labels,) = labelled(found["aliquot_container_mig_instance_info"])
    assert (labels["mig_uuid"], labels["gpu_uuid"], labels["gpu_instance_id"]) == ("MIG-0-1", "GPU-0", "1")


def test_grants_add_up_per_device():
    found = scrape(TWO, grant(ids("0:1"), share(0, 50, 20), of=pod("other")))
    assert by_device(found["aliquot_device_memory_allocated_bytes"]) == {"GPU-0": 150 * MIB, "GPU-1": 200 * MIB}
    assert by_device(found["aliquot_device_cores_allocated_ratio"]) == {"GPU-0": 0.5, "GPU-1": 0.0}


def test_finished_container_has_no_series_and_counts_for_its_device():
    other = grant(ids("0:1"), share(0, 50, 20), of=pod("other"))
    found = scrape(TWO, other, ended={other.grant_id}, usage=usage() | {other.grant_id: ContainerUsage((DeviceUsage(),), 1)})
    assert by_device(found["aliquot_device_memory_allocated_bytes"])["GPU-0"] == 150 * MIB
    of_containers = [family for family in found.values() if family.name.startswith("aliquot_container_")]
    assert {one["pod"] for family in of_containers for one in labelled(family)} == {"train"}


def test_gpu_in_mig_mode_has_as_many_shares_as_others():
    found = scrape(grant(ids("0:0"), share(0, 50)), on=inventory(gpu(0, mig=[instance(0, 0)])))
    assert by_device(found["aliquot_device_shares"]) == {"GPU-0": 16}
    assert by_device(found["aliquot_device_shares_allocated"]) == {"GPU-0": 1}


def test_mig_instances_count_for_their_gpu():
    on = inventory(gpu(0, mig=[instance(0, 0), instance(0, 1)]))
    found = scrape(grant(frozenset({"MIG-0-0"}), share("MIG-0-0", 100), resource="nvidia.com/mig-1g.10gb"), on=on)
    assert by_device(found["aliquot_device_memory_allocated_bytes"]) == {"GPU-0": 100 * MIB}
    assert by_device(found["aliquot_device_shares"]) == {"GPU-0": 2}
    assert by_device(found["aliquot_device_shares_allocated"]) == {"GPU-0": 1}
    (info,) = labelled(found["aliquot_container_info"])
    assert (info["model"], info["backend"]) == ("NVIDIA H200 MIG 1g.10gb", "mig")
    assert [one["mig_uuid"] for one in labelled(found["aliquot_device_mig_instance_info"])] == ["MIG-0-0", "MIG-0-1"]


def test_mig_instance_has_usage_from_driver_and_no_refusal_count():
    device = gpu(0, mig=[instance(0, 0), instance(0, 1)])
    on = DeviceInventory().after_reading(
        DriverReading("580", 13000, (DeviceReading(device, 0, None, {"MIG-0-0": 40 * MIB, "MIG-0-1": 7}),))
    )
    found = scrape(grant(frozenset({"MIG-0-0"}), share("MIG-0-0", 100), resource="nvidia.com/mig-1g.10gb"), on=on)
    assert by_device(found["aliquot_container_memory_used_bytes"]) == {"MIG-0-0": 40 * MIB}
    assert by_device(found["aliquot_container_memory_driver_bytes"]) == {"MIG-0-0": 40 * MIB}
    assert found["aliquot_container_refusals"].samples == ()


def test_mig_utilization_is_shown_for_instance_and_container_when_known():
    device = gpu(0, mig=[instance(0, 0), instance(0, 1)])
    read = DeviceReading(device, instances_utilization={"MIG-0-0": 0.75})
    on = DeviceInventory().after_reading(DriverReading("580", 13000, (read,)))
    mig = [
        grant(frozenset({uuid}), share(uuid, 100), of=pod(uuid.lower()), resource="nvidia.com/mig-1g.10gb")
        for uuid in ("MIG-0-0", "MIG-0-1")
    ]
    found = scrape(*mig, on=on)
    assert by_device(found["aliquot_container_utilization_ratio"]) == {"MIG-0-0": 0.75}
    busy = found["aliquot_device_mig_instance_utilization_ratio"]
    assert [(one["mig_uuid"], value) for one, (_, value) in zip(labelled(busy), busy.samples, strict=True)] == [("MIG-0-0", 0.75)]
    silent = scrape(*mig, on=on.after_device_trouble("GPU-0", "it does not answer"))
    assert silent["aliquot_device_mig_instance_utilization_ratio"].samples == silent["aliquot_container_utilization_ratio"].samples == ()


def test_unhealthy_device_has_health_zero_and_no_old_sensor_readings():
    sensors = DeviceSensors(temperature_celsius=40.0, power_watts=300.0, ecc_corrected=3)
    readings = tuple(DeviceReading(gpu(minor), 0, 0.25, sensors=sensors) for minor in (0, 1))
    on = DeviceInventory().after_reading(DriverReading("580", 13000, readings)).after_device_trouble("GPU-1", "lost")
    found = scrape(on=on)
    assert by_device(found["aliquot_device_health"]) == {"GPU-0": 1.0, "GPU-1": 0.0}
    assert by_device(found["aliquot_device_utilization_ratio"]) == {"GPU-0": 0.25}
    assert by_device(found["aliquot_device_temperature_celsius"]) == {"GPU-0": 40.0}
    assert by_device(found["aliquot_device_power_watts"]) == {"GPU-0": 300.0}
    assert found["aliquot_device_ecc_errors"].samples == ((("node-1", "GPU-0", "NVIDIA H200", "corrected"), 3),)
    assert found["aliquot_device_power_limit_watts"].samples == ()


def test_a_container_has_a_series_per_device_with_its_limit_and_use():
    first = DeviceUsage(5, counts=Counts(busy_ns=2_000_000_000, throttled_ns=500_000_000, launches=9, refusals=1), waiting=3)
    found = scrape(TWO, usage=usage(first, DeviceUsage(7)), utilization={(TWO.grant_id, "GPU-1"): 0.75})
    assert found["aliquot_container_memory_limit_bytes"].samples == (
        (("node-1", "default", "train", "main", "GPU-0"), 100 * MIB),
        (("node-1", "default", "train", "main", "GPU-1"), 200 * MIB),
    )
    assert by_device(found["aliquot_container_memory_used_bytes"]) == {"GPU-0": 5, "GPU-1": 7}
    assert by_device(found["aliquot_container_refusals"]) == {"GPU-0": 1, "GPU-1": 0}
    assert by_device(found["aliquot_container_launches"]) == {"GPU-0": 9, "GPU-1": 0}
    assert by_device(found["aliquot_container_busy_seconds"]) == {"GPU-0": 2.0, "GPU-1": 0}
    assert by_device(found["aliquot_container_throttled_seconds"]) == {"GPU-0": 0.5, "GPU-1": 0}
    assert by_device(found["aliquot_container_launches_waiting"]) == {"GPU-0": 3, "GPU-1": 0}
    assert by_device(found["aliquot_container_utilization_ratio"]) == {"GPU-1": 0.75}
    assert by_device(found["aliquot_container_cores_limit_ratio"]) == {"GPU-0": 0.3}
    assert [value for _, value in found["aliquot_container_processes"].samples] == [1]
    assert {(one["uid"], one["backend"]) for one in labelled(found["aliquot_container_info"])} == {("uid-train", "shim")}


def test_driver_figures_of_container_appear_next_to_region_figures():
    held = Holdings({"GPU-0"}, {(TWO.grant_id, "GPU-0"): [GpuProcess("GPU-0", 7, 11)]}, uncounted={TWO.grant_id: 1})
    found = scrape(TWO, usage=usage(processes=0), holdings=held)
    assert by_device(found["aliquot_container_memory_used_bytes"]) == {"GPU-0": 0, "GPU-1": 0}
    assert by_device(found["aliquot_container_memory_driver_bytes"]) == {"GPU-0": 11}
    assert [value for _, value in found["aliquot_container_processes"].samples] == [1]


def test_container_uses_zero_when_driver_listed_no_process_of_it():
    found = scrape(TWO, usage=usage(processes=0), holdings=Holdings({"GPU-1"}))
    assert by_device(found["aliquot_container_memory_driver_bytes"]) == {"GPU-1": 0}


def test_without_shim_container_usage_is_what_driver_lists():
    alone = replace(grant(ids("0:0"), share(0, 100)), isolation=Isolation.EXCLUSIVE)
    listed = [GpuProcess("GPU-0", 7, 11), GpuProcess("GPU-0", 8, 22)]
    held = Holdings({"GPU-0"}, {(alone.grant_id, "GPU-0"): listed}, uncounted={alone.grant_id: 2})
    found = scrape(alone, holdings=held)
    for name in ("memory_used_bytes", "memory_driver_bytes"):
        assert by_device(found[f"aliquot_container_{name}"]) == {"GPU-0": 33}, name
    assert [value for _, value in found["aliquot_container_processes"].samples] == [2]
    silent = scrape(alone)
    for name in ("memory_used_bytes", "memory_driver_bytes", "processes"):
        assert silent[f"aliquot_container_{name}"].samples == (), name


def test_ceiling_is_current_limit_and_limit_is_the_grant():
    granted = limits_of(TWO, FailPolicy.CLOSED)
    first, second = granted.devices
    now = replace(granted, devices=(replace(first, sm_percent=45), replace(second, burst_bytes=300 * MIB)))
    found = scrape(TWO, usage=usage(), limits={TWO.grant_id: now})
    assert by_device(found["aliquot_container_cores_limit_ratio"]) == {"GPU-0": 0.3}
    assert by_device(found["aliquot_container_cores_ceiling_ratio"]) == {"GPU-0": 0.45}
    assert by_device(found["aliquot_container_memory_burst_bytes"]) == {"GPU-1": 300 * MIB}


def test_paused_running_and_unpausable_containers_are_distinguished():
    other, mps = grant(ids("0:1"), of=pod("other")), replace(grant(ids("0:2"), of=pod("mps")), isolation=Isolation.MPS)
    limits = {
        TWO.grant_id: limits_of(TWO, FailPolicy.CLOSED, Preferences(paused=True)),
        other.grant_id: limits_of(other, FailPolicy.CLOSED),
    }
    found = scrape(TWO, other, mps, limits=limits)["aliquot_container_paused"]
    assert {(one["pod"], value) for one, (_, value) in zip(labelled(found), found.samples, strict=True)} == {("train", 1), ("other", 0)}


class TestEnforcement:
    def in_force(self, *grants, **known) -> dict[str, float]:
        return by_device(scrape(*grants, **known)["aliquot_container_enforcement_in_force"])

    def test_it_is_in_force_with_the_granted_limit_and_a_region(self):
        assert self.in_force(TWO, usage=usage()) == {"GPU-0": 1, "GPU-1": 1}

    def test_a_region_that_cannot_be_read_ends_it(self):
        assert self.in_force(TWO) == {"GPU-0": 0, "GPU-1": 0}

    def test_another_limit_than_the_granted_one_ends_it_for_that_device(self):
        granted = limits_of(TWO, FailPolicy.CLOSED)
        first, second = granted.devices
        raised = replace(granted, devices=(replace(first, memory_bytes=first.memory_bytes + 1), second))
        assert self.in_force(TWO, usage=usage(), limits={TWO.grant_id: raised}) == {"GPU-0": 0, "GPU-1": 1}

    def test_a_process_outside_ends_it(self):
        assert self.in_force(TWO, usage=usage(), bypassed={TWO.grant_id}) == {"GPU-0": 0, "GPU-1": 0}

    def test_other_backend_is_named_and_limit_holds_while_gpu_exists(self):
        alone = replace(grant(ids("0:0"), share(0, 100)), isolation=Isolation.EXCLUSIVE)
        ((labels, value),) = scrape(alone)["aliquot_container_enforcement_in_force"].samples
        assert (labels[-1], value) == ("exclusive", 1)

    def test_missing_instance_ends_enforcement(self):
        one = grant(frozenset({"MIG-0-0"}), share("MIG-0-0", 100), resource="nvidia.com/mig-1g.10gb")
        assert self.in_force(one, on=inventory(gpu(0, mig=[instance(0, 0)]))) == {"MIG-0-0": 1}
        assert self.in_force(one, on=inventory(gpu(0, mig=[]))) == {"MIG-0-0": 0}


def test_container_without_readable_region_still_has_its_limit():
    found = scrape(TWO)
    assert len(found["aliquot_container_memory_limit_bytes"].samples) == 2
    assert found["aliquot_container_memory_used_bytes"].samples == ()


def test_names_and_labels_are_unique_and_well_formed():
    names = [family.name for family in families(Snapshot(inventory(), (TWO,)))]
    assert len(set(names)) == len(names)
    for family in families(Snapshot(inventory(), (TWO,), usage=usage())):
        assert len({labels for labels, _ in family.samples}) == len(family.samples), family.name
        assert all(len(labels) == len(family.labels) for labels, _ in family.samples), family.name
