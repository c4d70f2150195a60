# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from agent.core.inventory import DeviceInventory, FailedDevice, advertised, node_capacity, promisable_bytes, unnamed_instances
from aliquot import contract
from aliquot.contract.units import MIB
from tests.unit.agent.builders import VGPU, gpu, instance, inventory, reading, share

MEMORY, PERCENT, CORES = contract.RESOURCE_VGPU_MEMORY, contract.RESOURCE_VGPU_MEMORY_PERCENT, contract.RESOURCE_VGPU_CORES


def trouble_of(one: DeviceInventory) -> dict[str, str]:
    return {entry.device.uuid: entry.trouble for entry in one.devices}


class TestInventory:
    def test_devices_are_in_the_order_of_their_minor_numbers(self):
        assert [entry.device.minor for entry in inventory(gpu(2), gpu(0), gpu(1)).devices] == [0, 1, 2]

    def test_a_device_that_fails_stays_with_its_trouble(self):
        after = inventory(gpu(0), gpu(1)).after_reading(reading(gpu(0), failed=(FailedDevice(1, "GPU-1", "GPU is lost"),)))
        assert trouble_of(after) == {"GPU-0": "", "GPU-1": "GPU is lost"}

    def test_a_device_the_driver_no_longer_lists_stays_in_trouble(self):
        assert trouble_of(inventory(gpu(0), gpu(1)).after_reading(reading(gpu(0))))["GPU-1"]

    def test_a_device_that_answers_again_is_healthy(self):
        after = inventory().after_driver_trouble("gone").after_reading(reading(gpu(0), gpu(1)))
        assert trouble_of(after) == {"GPU-0": "", "GPU-1": ""}

    def test_driver_trouble_is_every_devices_trouble(self):
        assert trouble_of(inventory().after_driver_trouble("module unloaded")) == {"GPU-0": "module unloaded", "GPU-1": "module unloaded"}

    def test_a_hung_device_leaves_the_others_as_they_were(self):
        assert trouble_of(inventory().after_device_trouble("GPU-1", "hangs")) == {"GPU-0": "", "GPU-1": "hangs"}

    def test_a_failed_device_never_seen_before_cannot_be_shown(self):
        after = DeviceInventory().after_reading(reading(gpu(0), failed=(FailedDevice(1, None, "GPU is lost"),)))
        assert list(trouble_of(after)) == ["GPU-0"]

    def test_a_mig_instance_is_found_with_its_gpu(self):
        one = inventory(gpu(0), gpu(1, mig=[instance(1, 3)]))
        found = one.mig_instance("MIG-1-3")
        assert found is not None
        assert found[0].device.uuid == "GPU-1"
        assert one.mig_instance("MIG-9-9") is None


class TestAdvertised:
    def test_every_gpu_offers_its_replicas_with_its_numa_node(self):
        offered = advertised(inventory(gpu(0, numa=0), gpu(1, numa=1)), 2)[VGPU]
        assert [(device.device_id, device.numa_node) for device in offered] == [
            ("GPU-0::0", 0),
            ("GPU-0::1", 0),
            ("GPU-1::0", 1),
            ("GPU-1::1", 1),
        ]

    def test_all_replicas_of_an_unhealthy_gpu_are_unhealthy(self):
        offered = advertised(inventory().after_device_trouble("GPU-0", "lost"), 2)[VGPU]
        assert [device.healthy for device in offered] == [False, False, True, True]

    def test_gpu_in_mig_mode_offers_instances_by_profile_and_no_replicas(self):
        partitioned = gpu(0, mig=[instance(0, 0), instance(0, 1, profile="1g.10gb+me"), instance(0, 2)])
        offered = advertised(inventory(partitioned), 16)
        assert {resource: [device.device_id for device in devices] for resource, devices in offered.items()} == {
            "nvidia.com/mig-1g.10gb": ["MIG-0-0", "MIG-0-2"],
            "nvidia.com/mig-1g.10gb.me": ["MIG-0-1"],
        }

    def test_an_instance_of_an_unknown_profile_is_left_out_and_named(self):
        one = inventory(gpu(0, mig=[instance(0, 0, profile="new kind"), instance(0, 1)]))
        assert list(advertised(one, 16)) == ["nvidia.com/mig-1g.10gb"]
        assert [unnamed.uuid for unnamed in unnamed_instances(one)] == ["MIG-0-0"]

    def test_instances_have_the_health_of_their_gpu(self):
        offered = advertised(inventory(gpu(0, mig=[instance(0, 0)])).after_driver_trouble("lost"), 16)
        assert not offered["nvidia.com/mig-1g.10gb"][0].healthy


class TestNodeCapacity:
    def test_healthy_shared_gpus_add_up(self):
        one = inventory(gpu(0, mib=1000), gpu(1, mib=500), gpu(2, mib=200, mig=[instance(2, 0)]))
        assert node_capacity(one, [share(0, 700)]) == {MEMORY: 1500, PERCENT: 200, CORES: 200}

    def test_unhealthy_gpu_offers_only_what_containers_hold(self):
        one = inventory(gpu(0, mib=1000), gpu(1, mib=500)).after_device_trouble("GPU-0", "lost")
        assert node_capacity(one, []) == {MEMORY: 500, PERCENT: 100, CORES: 100}
        assert node_capacity(one, [share(0, 300, cores=40), share(0, 200), share(1, 400, cores=70)]) == {
            MEMORY: 1000,
            PERCENT: 200,
            CORES: 140,
        }

    def test_gpus_that_only_claims_get_count_with_what_containers_hold(self):
        one = inventory(gpu(0, mib=1000), gpu(1, mib=500))
        assert node_capacity(one, [], offered=False) == {MEMORY: 0, PERCENT: 0, CORES: 0}
        assert node_capacity(one, [share(0, 300, cores=40)], offered=False) == {MEMORY: 300, PERCENT: 100, CORES: 40}

    def test_shares_of_gpu_silent_since_start_count_as_held(self):
        assert node_capacity(inventory(gpu(1, mib=500)), [share(0, 300)]) == {MEMORY: 800, PERCENT: 200, CORES: 100}

    def test_instances_and_places_for_one_are_not_counted_in_mebibytes(self):
        one = inventory(gpu(0, mib=1000, mig=[instance(0, 0)]))
        assert node_capacity(one, [share("MIG-0-0", 100), share("GPU-0/1g.10gb@2", 100)]) == {MEMORY: 0, PERCENT: 0, CORES: 0}


def test_drivers_reserve_and_partial_mib_are_never_granted():
    assert promisable_bytes(100 * MIB + 5, 10 * MIB) == 90 * MIB


def test_links_are_kept_over_readings():
    one = replace(inventory(), links=())
    assert one.with_links([]).after_reading(reading(gpu(0))).links == ()
