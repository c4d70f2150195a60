# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import kubernetes_validate
import pytest

from agent.core.health import HealthState
from agent.core.inventory import DeviceInventory, DeviceReading, DriverReading
from agent.core.slices import Contents, FoundSlice, Offer, Pool, changes_to, contents_of, find_device, profile_bytes, slice_specs
from aliquot import contract
from tests.unit.agent.builders import gpu, instance, inventory

POOL = Pool("node-1", "uid-node")
OFFER = Offer(16)
NAME = f"node-1-{contract.DRA_DRIVER}-0"


def devices_of(found: DeviceInventory, offer: Offer = OFFER):
    return contents_of(found, offer).devices


def found(generation: int = 1, *, name: str = NAME) -> FoundSlice:
    (spec,) = slice_specs(contents_of(inventory(), OFFER), POOL, generation).values()
    return FoundSlice(name, "7", spec)


def many(count: int) -> DeviceInventory:
    return inventory(*(gpu(minor) for minor in range(count)))


@pytest.mark.parametrize("length", [1, 63, 235, 236, 253])
def test_slice_names_fit_and_differ_for_long_node_names(length):
    pools = [Pool(("n" * length)[:-1] + last, "uid") for last in "ab"]
    names = [name for pool in pools for name in slice_specs(contents_of(many(70), OFFER), pool, 1)]
    assert len(set(names)) == 4
    assert all(len(name) <= 253 and name[0].isalnum() and name[-1].isalnum() for name in names)


def test_shortened_slice_name_has_no_empty_label():
    (name,) = slice_specs(contents_of(inventory(), OFFER), Pool("a." * 126 + "b", "uid"), 1)
    assert len(name) <= 253
    assert all(label and label.strip("-") == label for label in name.split("."))


def test_shared_gpu_has_capacities_with_defaults_for_whole_memory():
    (device,) = devices_of(inventory(gpu(3, mib=1000)))
    assert device["name"] == "gpu-3"
    assert device["allowMultipleAllocations"]
    memory, cores, shares = (device["capacity"][name] for name in ("memory", "cores", "shares"))
    assert memory == {
        "value": "1000Mi",
        "requestPolicy": {"default": "1000Mi", "validRange": {"min": "1Mi", "max": "1000Mi", "step": "1Mi"}},
    }
    assert cores["requestPolicy"] == {"default": "1", "validRange": {"min": "1", "max": "100", "step": "1"}}
    assert (shares["value"], shares["requestPolicy"]) == ("16", {"default": "1", "validValues": ["1"]})


@pytest.mark.parametrize("is_parted", [False, True])
def test_memory_has_nvidias_name_too_and_is_not_consumed_by_it(is_parted: bool):
    entry = gpu(0, mib=1000)
    if is_parted:
        entry = replace(entry, mig_enabled=True, mig_instances=(instance(0, 0),))
    (device,) = devices_of(inventory(entry))
    memory, own = device["capacity"]["gpu.nvidia.com/memory"], device["capacity"]["memory"]
    assert memory["value"] == own["value"]
    assert memory.get("requestPolicy") == (None if is_parted else {"default": "0", "validValues": ["0"]})


def test_attributes_have_nvidias_names_too_and_fit_api_limits():
    read = DeviceReading(gpu(0, model="NVIDIA " + "H" * 100), architecture="Hopper", brand="Nvidia")
    (device,) = devices_of(DeviceInventory().after_reading(DriverReading("580.159.03", 13010, (read,))))
    attributes = device["attributes"]
    assert attributes["architecture"] == attributes["gpu.nvidia.com/architecture"] == {"string": "Hopper"}
    assert attributes["gpu.nvidia.com/brand"] == {"string": "Nvidia"}
    assert attributes["uuid"] == attributes["gpu.nvidia.com/uuid"] == {"string": "GPU-0"}
    assert attributes["gpu.nvidia.com/driverVersion"] == {"version": "580.159.3"}
    assert attributes["gpu.nvidia.com/cudaDriverVersion"] == {"version": "13.1.0"}
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": "0000:01:00.0"}
    assert len(attributes) + len(device["capacity"]) <= 32
    assert all(len(value.get("string", "")) <= 64 for value in attributes.values())


@pytest.mark.parametrize(
    ("changed", "taints"),
    [
        pytest.param({}, [], id="healthy"),
        pytest.param(
            {"trouble": "XID 79", "state": HealthState.LOST},
            [{"key": "aliquot.dev/unhealthy", "value": "lost", "effect": "NoSchedule"}],
            id="lost",
        ),
        pytest.param({"cordoned": True}, [{"key": "aliquot.dev/cordoned", "effect": "NoSchedule"}], id="cordoned"),
    ],
)
def test_trouble_and_cordon_are_taints(changed, taints):
    one = inventory(gpu(0))
    (device,) = devices_of(replace(one, devices=(replace(one.devices[0], **changed),)))
    assert list(device.get("taints", [])) == taints


def test_planned_devices_have_taint_beside_others():
    offer = Offer(16, profiles_gib=(20,), planned=True)
    one = inventory(gpu(0, mib=81920))
    cordoned = replace(one, devices=(replace(one.devices[0], cordoned=True),))
    assert {str(device["taints"]) for device in devices_of(one, offer)} == {str([{"key": contract.PLANNED, "effect": "NoSchedule"}])}
    keys = {tuple(taint["key"] for taint in device["taints"]) for device in devices_of(cordoned, offer)}
    assert keys == {(contract.PLANNED, "aliquot.dev/cordoned")}


@pytest.mark.parametrize(("state", "effect"), [(HealthState.LOST, "NoExecute"), (HealthState.QUARANTINED, "NoSchedule")])
def test_only_lost_gpu_evicts_pods_and_only_by_policy(state, effect):
    one = inventory(gpu(0))
    broken = replace(one, devices=(replace(one.devices[0], trouble="XID 79", state=state),))
    for offer, wanted in ((replace(OFFER, evicts_from_lost=True), effect), (OFFER, "NoSchedule")):
        [(taint,)] = [device["taints"] for device in devices_of(broken, offer)]
        assert (taint["key"], taint["effect"]) == ("aliquot.dev/unhealthy", wanted)


class TestFixedShares:
    OFFER = Offer(16, profiles_gib=(20, 40))

    def test_each_size_fits_as_often_as_gpu_has_memory(self):
        devices = devices_of(inventory(gpu(0, mib=81920)), self.OFFER)
        assert [device["name"] for device in devices] == ["gpu-0", *(f"gpu-0-20g-{n}" for n in range(4)), "gpu-0-40g-0", "gpu-0-40g-1"]

    def test_no_gpu_has_more_of_them_than_shares(self):
        devices = devices_of(inventory(gpu(0, mib=81920)), Offer(3, profiles_gib=(1,)))
        assert len(devices) == 1 + 3

    def test_share_of_gpu_takes_all_counters_and_fixed_share_its_part(self):
        contents = contents_of(inventory(gpu(0, mib=81920)), self.OFFER)
        (counters,) = contents.counters
        assert counters == {"name": "gpu-0", "counters": {"memory": {"value": "81920Mi"}, "shares": {"value": "16"}}}
        uses = {device["name"]: device["consumesCounters"][0] for device in contents.devices}
        assert uses["gpu-0"] == {"counterSet": "gpu-0", "counters": counters["counters"]}
        assert uses["gpu-0-40g-1"] == {"counterSet": "gpu-0", "counters": {"memory": {"value": "40960Mi"}, "shares": {"value": "1"}}}

    def test_counters_have_slices_of_their_own_within_limits_of_api(self):
        specs = list(slice_specs(contents_of(many(12), Offer(16, profiles_gib=(1,))), POOL, 3).values())
        assert [len(spec.get("sharedCounters", ())) for spec in specs[:3]] == [8, 4, 0]
        assert all(("devices" in spec) != ("sharedCounters" in spec) for spec in specs)
        assert {spec["pool"]["resourceSliceCount"] for spec in specs} == {len(specs)}
        for body in changes_to(contents_of(many(2), self.OFFER), POOL, [], {}).create:
            kubernetes_validate.validate(body, "1.36", strict=True)

    def test_its_name_says_gpu_and_memory(self):
        one = inventory(gpu(0), gpu(10))
        assert find_device(one, "gpu-10-20g-3") is one.devices[1]
        assert profile_bytes("gpu-10-20g-3") == 20 << 30
        assert profile_bytes("gpu-10") is None
        assert find_device(one, "gpu-10-20g") is None

    def test_without_sizes_no_device_draws_on_counters(self):
        contents = contents_of(inventory(gpu(0)), OFFER)
        assert not contents.counters
        assert "consumesCounters" not in contents.devices[0]


def test_gpu_in_mig_mode_is_not_offered_but_found():
    one = inventory(gpu(0, mig=[instance(0, 0)]), gpu(1))
    assert [device["name"] for device in devices_of(one, replace(OFFER, mig=False))] == ["gpu-1"]
    assert find_device(one, "gpu-0") is one.devices[0]
    assert find_device(one, "gpu-9") is None


def test_slice_follows_schema_of_api():
    one = inventory(gpu(0))
    entries = (replace(one.devices[0], cordoned=True, pcie_root="pci0000:00", fabric_clique="0-1"),)
    (body,) = changes_to(contents_of(replace(one, devices=entries), OFFER), POOL, [], {}).create
    kubernetes_validate.validate(body, "1.36", strict=True)


class TestChanges:
    def test_nothing_is_written_when_api_has_the_slices(self):
        assert not changes_to(contents_of(inventory(), OFFER), POOL, [found()], {})

    def test_missing_slice_is_created_for_the_node(self):
        changes = changes_to(contents_of(inventory(), OFFER), POOL, [], {})
        (created,) = changes.create
        assert created["metadata"]["name"] == NAME
        assert created["metadata"]["ownerReferences"][0]["uid"] == "uid-node"
        assert created["spec"]["pool"] == {"name": "node-1", "generation": 1, "resourceSliceCount": 1}

    def test_change_of_only_slice_keeps_generation(self):
        changes = changes_to(contents_of(many(3), OFFER), POOL, [found(4)], {})
        ((name, version, body),) = changes.replace
        assert (name, version, body["spec"]["pool"]["generation"]) == (NAME, "7", 4)

    def test_change_of_several_slices_raises_generation_in_all(self):
        changes = changes_to(contents_of(many(70), OFFER), POOL, [found(4)], {})
        bodies = [*changes.create, *(body for _, _, body in changes.replace)]
        assert {body["spec"]["pool"]["generation"] for body in bodies} == {5}
        assert {body["spec"]["pool"]["resourceSliceCount"] for body in bodies} == {2}
        assert sum(len(body["spec"]["devices"]) for body in bodies) == 70

    def test_slices_are_deleted_when_no_device_is_offered(self):
        assert changes_to(Contents(), POOL, [found()], {}).delete == [NAME]

    def test_fields_that_api_server_drops_cause_no_second_write(self):
        wanted = slice_specs(contents_of(inventory(), OFFER), POOL, 1)[NAME]
        stored = {**wanted, "devices": [{"name": device["name"]} for device in wanted["devices"]]}
        assert not changes_to(contents_of(inventory(), OFFER), POOL, [FoundSlice(NAME, "7", stored)], {NAME: (wanted, stored)})
        assert changes_to(contents_of(many(1), OFFER), POOL, [FoundSlice(NAME, "7", stored)], {NAME: (wanted, stored)}).replace
