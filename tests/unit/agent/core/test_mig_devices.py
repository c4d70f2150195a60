# SPDX-License-Identifier: Apache-2.0
"""GPUs in MIG mode in slices: names, counters, and that counters allow exactly what the ledger allows."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from agent.core.inventory import DeviceInventory
from agent.core.mig_devices import counters_of, draws_of, find_instance, mig_name, offered_instances
from agent.core.slices import Offer, contents_of, names_on, slice_specs
from aliquot.contract.codec import MigPlace
from aliquot.contract.model import DeviceShare, MediaEngines, MigInstance
from aliquot.placement import mig
from aliquot.placement.device import DeviceState
from tests.unit.agent.builders import gpu, instance, inventory, share
from tests.unit.agent.core.test_slices import POOL

PLACES = {
    "1g.10gb": ((0, 1, 2, 3, 4, 5, 6), 1, 7, MediaEngines(decoders=1, jpegs=1)),
    "1g.10gb+me": ((0, 1, 2, 3, 4, 5, 6), 1, 1, MediaEngines(decoders=1, jpegs=1, ofas=1)),
    "1g.20gb": ((0, 2, 4, 6), 2, 4, MediaEngines(decoders=1, jpegs=1)),
    "2g.20gb": ((0, 2, 4), 2, 3, MediaEngines(decoders=2, jpegs=2)),
    "3g.40gb": ((0, 4), 4, 2, MediaEngines(decoders=3, jpegs=3)),
    "4g.40gb": ((0,), 4, 1, MediaEngines(decoders=4, jpegs=4)),
    "7g.80gb": ((0,), 8, 1, MediaEngines(decoders=7, jpegs=7, ofas=1)),
}
"""As the driver reports an H100: first slices, size, most on a GPU, media engines."""


def places() -> list[MigInstance]:
    return [
        MigInstance(str(MigPlace("GPU-0", profile, start)), "GPU-0", profile, size << 30, 0, 0, start, size, most, engines)
        for profile, (starts, size, most, engines) in PLACES.items()
        for start in starts
    ]


def node(*existing: MigInstance) -> DeviceInventory:
    return inventory(gpu(0, mib=8192, mig=[*existing, *places()]))


def test_names_are_unique_dns_labels_that_are_found_again():
    one = node(*(replace(instance(0, number, profile="1c.3g.40gb"), gpu_instance_id=1, compute_instance_id=number) for number in range(3)))
    names = [mig_name("gpu-0", found) for found in one.devices[0].device.mig_instances]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalnum() and name == name.lower() and len(name) <= 63 for name in names)
    assert [find_instance(one, name)[1] for name in names] == list(one.devices[0].device.mig_instances)
    assert find_instance(one, "gpu-0-mig-9g99gb-0") is None
    assert mig_name("gpu-0", replace(places()[0], profile="1g.10gb-me")) == "gpu-0-mig-1g10gb-no-me-0"


def test_place_that_an_instance_of_the_administrator_overlaps_is_not_offered():
    entry = node(instance(0, 0, profile="3g.40gb")).devices[0]
    offered = offered_instances(entry)
    assert [one.uuid for one in offered if not one.on_demand] == ["MIG-0-0"]
    assert all(one.placement_start > 0 for one in offered if one.on_demand)
    assert counters_of(entry)["compute-slices"] == 4


def test_instances_without_places_need_no_counters():
    contents = contents_of(inventory(gpu(0, mig=[instance(0, 0), instance(0, 1)])), Offer(16))
    assert contents.counters == []
    assert [device["name"] for device in contents.devices] == ["gpu-0-mig-1g10gb-0-0-0", "gpu-0-mig-1g10gb-1-1-0"]
    attributes = contents.devices[0]["attributes"]
    assert attributes["type"] == attributes["gpu.nvidia.com/type"] == {"string": "mig"}
    assert attributes["gpu.nvidia.com/profile"] == {"string": "1g.10gb"}
    assert attributes["gpu.nvidia.com/parentUUID"] == {"string": "GPU-0"}


def test_slices_keep_to_limits_of_api():
    specs = slice_specs(contents_of(node(), Offer(16)), POOL, 1).values()
    counters = [one for spec in specs for one in spec.get("sharedCounters", ())]
    assert len(counters) == 1
    assert len(counters[0]["counters"]) <= 32
    for device in (one for spec in specs for one in spec.get("devices", ())):
        assert device["consumesCounters"][0]["counters"].keys() <= counters[0]["counters"].keys()
        assert len(device["attributes"]) + len(device["capacity"]) <= 32


class TestSharesOfGpu:
    """A GPU in MIG mode as a device that claims share."""

    def of(self, found: DeviceInventory):
        return [device for device in contents_of(found, Offer(16)).devices if device["name"] == "gpu-0"]

    def test_device_has_memory_of_instance_and_takes_all_counters(self):
        (device,) = self.of(node())
        assert device["allowMultipleAllocations"]
        assert device["capacity"]["memory"]["value"] == f"{8 << 10}Mi"
        assert device["consumesCounters"][0]["counters"] == contents_of(node(), Offer(16)).counters[0]["counters"]
        assert device["attributes"]["type"] == device["attributes"]["gpu.nvidia.com/type"] == {"string": "shared-mig"}
        assert names_on(node().devices[0], Offer(16))[0] == "gpu-0"

    def test_instance_of_administrator_leaves_none(self):
        assert self.of(node(instance(0, 0, profile="3g.40gb"))) == []

    def test_place_for_part_of_gpu_is_not_taken_for_all_of_it(self):
        some = inventory(gpu(0, mib=8192, mig=[place for place in places() if place.profile != "7g.80gb"]))
        assert self.of(some) == []


def test_nothing_is_offered_where_strategy_is_none():
    assert contents_of(node(), Offer(16, mig=False)).devices == []
    assert names_on(node().devices[0], Offer(16, mig=False)) == []


@pytest.mark.parametrize("seed", range(40))
def test_what_counters_allow_the_ledger_allows(seed):
    """In any order of requests and ends, kube-scheduler's sums and the ledger agree on every place, and on shares of the GPU."""
    chance, entry = random.Random(seed), node().devices[0]
    total, held, kinds = counters_of(entry), list[DeviceShare](), Counter[bool]()
    by_name = {one.uuid: one for one in places()}
    for _ in range(120):
        if held and chance.random() < 0.45:
            held.remove(chance.choice(held))
            continue
        wanted = share(0, chance.randint(1, 2000)) if chance.random() < 0.3 else share(chance.choice(places()).uuid, 1)
        is_share, sums = wanted.device_uuid == "GPU-0", Counter[str]()
        for name in {one.device_uuid for one in [*held, wanted]}:  # shares draw once, however many there are
            sums.update(draws_of(by_name[name], total) if name in by_name else total)
        named_twice = not is_share and wanted.device_uuid in {one.device_uuid for one in held}
        allowed = not named_twice and all(sums[name] <= total[name] for name in sums)
        state = DeviceState.of(entry.device, held)
        if is_share:
            allowed &= sum(one.memory_bytes for one in [*held, wanted] if one.device_uuid == "GPU-0") <= 8 << 30
            fits = state.has_room_for(wanted)
        else:
            fits = by_name[wanted.device_uuid] in mig.free_instances(state, by_name[wanted.device_uuid].profile)
        assert allowed == fits, (wanted, held)
        if fits:
            kinds[is_share] += 1
            state = state.with_share(wanted)
            assert state.without_share(wanted) == DeviceState.of(entry.device, held)
            held.append(wanted)
            assert state == DeviceState.of(entry.device, held)
    assert min(kinds[False], kinds[True]) > 0
