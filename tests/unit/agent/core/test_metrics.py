from agent.core.inventory import DeviceBoard, DeviceReading, DriverReading
from agent.core.metrics import BusySample, ContainerUsage, Family, Snapshot, families, usage_of, utilization_between
from agent.core.region_layout import MAX_DEVICES, RegionSnapshot, Slot, SlotDevice
from proto.units import MIB
from tests.unit.agent.builders import board, gpu, grant, ids, instance, pod, share

TWO = grant(ids("0:0", "1:0"), share(0, 100, 30), share(1, 200), of=pod("train"))


def scrape(*grants, on=None, usage=None, utilization=None) -> dict[str, Family]:
    snapshot = Snapshot(on or board(gpu(0), gpu(1)), grants, usage or {}, utilization or {}, "0.1.0")
    return {family.name: family for family in families(snapshot)}


def by_device(family: Family) -> dict[str, float]:
    return {labels[family.labels.index("device_uuid")]: value for labels, value in family.samples}


def test_promises_add_up_per_device():
    found = scrape(TWO, grant(ids("0:1"), share(0, 50, 20), of=pod("other")))
    assert by_device(found["aliquot_device_memory_allocated_bytes"]) == {"GPU-0": 150 * MIB, "GPU-1": 200 * MIB}
    assert by_device(found["aliquot_device_cores_allocated_ratio"]) == {"GPU-0": 0.5, "GPU-1": 0.0}


def test_mig_instances_count_for_their_gpu():
    on = board(gpu(0, mig=[instance(0, 0)]))
    found = scrape(grant(frozenset({"MIG-0-0"}), share("MIG-0-0", 100), resource="nvidia.com/mig-1g.10gb"), on=on)
    assert by_device(found["aliquot_device_memory_allocated_bytes"]) == {"GPU-0": 100 * MIB}
    ((labels, _),) = found["aliquot_container_info"].samples
    assert labels[-2:] == ("NVIDIA H200 MIG 1g.10gb", "mig")


def test_of_a_mig_instance_the_driver_tells_the_use_and_nothing_counts_refusals():
    device = gpu(0, mig=[instance(0, 0), instance(0, 1)])
    on = DeviceBoard().after_reading(DriverReading("580", 13000, (DeviceReading(device, 0, None, {"MIG-0-0": 40 * MIB, "MIG-0-1": 7}),)))
    found = scrape(grant(frozenset({"MIG-0-0"}), share("MIG-0-0", 100), resource="nvidia.com/mig-1g.10gb"), on=on)
    assert by_device(found["aliquot_container_memory_used_bytes"]) == {"MIG-0-0": 40 * MIB}
    assert found["aliquot_container_refusals"].samples == ()


def test_a_device_in_trouble_has_health_zero_and_no_utilization():
    found = scrape(on=board(gpu(0), gpu(1)).after_device_trouble("GPU-1", "lost"))
    assert by_device(found["aliquot_device_health"]) == {"GPU-0": 1.0, "GPU-1": 0.0}
    assert by_device(found["aliquot_device_utilization_ratio"]) == {"GPU-0": 0.25}


def test_a_container_has_a_series_per_device_with_its_limit_and_use():
    found = scrape(TWO, usage={TWO.grant_id: ContainerUsage((5, 7), (1, 0), (0, 0))}, utilization={(TWO.grant_id, "GPU-1"): 0.75})
    assert found["aliquot_container_memory_limit_bytes"].samples == (
        (("default", "train", "main", "GPU-0"), 100 * MIB),
        (("default", "train", "main", "GPU-1"), 200 * MIB),
    )
    assert by_device(found["aliquot_container_memory_used_bytes"]) == {"GPU-0": 5, "GPU-1": 7}
    assert by_device(found["aliquot_container_refusals"]) == {"GPU-0": 1, "GPU-1": 0}
    assert by_device(found["aliquot_container_utilization_ratio"]) == {"GPU-1": 0.75}


def test_a_container_without_a_readable_region_has_its_limit_all_the_same():
    found = scrape(TWO)
    assert len(found["aliquot_container_memory_limit_bytes"].samples) == 2
    assert found["aliquot_container_memory_used_bytes"].samples == ()


def slot(index: int, used: int) -> Slot:
    one = SlotDevice(used, 0, 0, 0, 0, 1, 2, 0, 0, 3, 0)
    return Slot(index, 10 + index, 0, 0, (one,) * MAX_DEVICES)


def test_dead_processes_do_not_count():
    snapshot = RegionSnapshot(
        line_used_bytes=(0,) * MAX_DEVICES,
        measured_context_bytes=(0,) * MAX_DEVICES,
        slots=(slot(0, 100), slot(1, 50), slot(2, 25)),
        reaped_slots=0,
        repaired_bytes=0,
    )
    assert usage_of(snapshot, (1,), 2) == ContainerUsage((125, 125), (4, 4), (6, 6))


class TestUtilization:
    def test_it_is_busy_time_over_elapsed_time(self):
        assert utilization_between(BusySample(10.0, (0, 0)), BusySample(12.0, (1_000_000_000, 0))) == (0.5, 0.0)

    def test_it_stays_between_zero_and_one_when_processes_come_and_go(self):
        assert utilization_between(BusySample(0.0, (5, 0)), BusySample(1.0, (0, 3_000_000_000))) == (0.0, 1.0)
