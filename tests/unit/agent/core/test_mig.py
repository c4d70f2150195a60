# SPDX-License-Identifier: Apache-2.0
import hashlib
from dataclasses import replace
from typing import Any

import pytest

from agent.core.backends import MigStrategy
from agent.core.inventory import DeviceInventory
from agent.core.ledger import Ledger
from agent.core.mig import (
    RECORD_ROWS,
    SHARED,
    MigRecord,
    hands_off_reason,
    is_promised,
    is_unclear,
    offered_devices,
    strategy_trouble,
    with_places,
)
from agent.errors import StorageError
from aliquot.contract.model import MediaEngines
from aliquot.placement import mig
from tests.unit.agent.builders import BOOT, VGPU, gpu, grant, ids, instance, inventory, reading, share
from tests.unit.agent.partitions import dynamic_gpu, place, places

ONE_G, TWO_G, THREE_G, SEVEN_G = (mig.resource_of_profile(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"))

MEDIA_G = mig.resource_of_profile("1g.10gb+me")


def real(start: int, uuid: str = "MIG-a", profile: str = "1g.10gb"):
    """An instance that exists, at a place."""
    return replace(place(start, profile), uuid=uuid, most_on_device=0, gpu_instance_id=7 + start)


def record(start: int, uuid: str = "MIG-a", profile: str = "1g.10gb") -> MigRecord:
    return MigRecord(place(start, profile).uuid, "grant-1", BOOT, uuid)


def recorded(start: int, profile: str = "1g.10gb") -> MigRecord:
    """A record that says what its place is like, of an instance that may be gone."""
    there = place(start, profile)
    return replace(
        record(start, "MIG-gone", profile), memory_bytes=there.memory_bytes, size=there.placement_size, most_on_device=there.most_on_device
    )


def on_place(start: int, profile: str = "1g.10gb", resource: str = ONE_G, number: int = 0):
    """A grant of the instance at a place, held by the ID of some number."""
    return grant(ids(f"0:{number}"), share(place(start, profile).uuid, 9728), resource=resource)


def healthy(offered) -> dict[str, int]:
    return {resource: sum(device.healthy for device in devices) for resource, devices in offered.items()}


class TestRecords:
    def test_a_record_comes_back_as_it_was_written(self):
        assert RECORD_ROWS.decode(RECORD_ROWS.encode(record(3))) == record(3)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda row: row[:30],
            lambda row: row.replace(b"MIG-a", b"MIG-b"),
            lambda row: b"\0" * len(row),
            lambda row: row.replace(b"MIG-a", b"MIG-\xff"),
        ],
    )
    def test_a_damaged_record_is_recognised(self, damage):
        with pytest.raises(StorageError):
            RECORD_ROWS.decode(damage(RECORD_ROWS.encode(record(3))))

    def test_record_of_older_agent_lacks_placement_size(self):
        body = b'{"place":"GPU-0/1g.10gb@3","grant_id":"grant-1","boot_id":"boot-1","uuid":"MIG-a"}'
        row = b'{"version":1,"sha256":"%s","record":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
        found = RECORD_ROWS.decode(row)
        assert found == MigRecord("GPU-0/1g.10gb@3", "grant-1", "boot-1", "MIG-a")
        assert found.shown() is None

    def test_instance_made_by_another_owner_is_not_the_recorded_one(self):
        assert record(3, "MIG-a").describes(real(3, "MIG-a"))
        assert not record(3, "MIG-a").describes(real(3, "MIG-b"))
        assert not record(3, "MIG-a").describes(real(4, "MIG-a"))

    def test_instance_at_placement_under_creation_is_recorded_one(self):
        assert record(3, "").describes(real(3, "MIG-b"))


class TestBoard:
    def test_our_instances_are_shown_as_their_places_and_others_as_they_are(self):
        found = reading(gpu(0, mig=[real(0, "MIG-ours"), real(1, "MIG-theirs")]))
        seen = with_places(found, {"GPU-0": places()}, {place(0).uuid: record(0, "MIG-ours")})
        device = seen.devices[0].device
        assert [one.uuid for one in device.mig_instances if not one.on_demand] == ["MIG-theirs"]
        assert place(0).uuid in {one.uuid for one in device.mig_instances}

    def test_usage_of_own_instance_is_reported_by_placement(self):
        found = reading(gpu(0, mig=[real(0)]))
        reported: dict[str, Any] = {
            "instances_used_bytes": {"MIG-a": 5, "MIG-x": 6},
            "instances_utilization": {"MIG-a": 0.5, "MIG-x": 0.25},
        }
        found = replace(found, devices=(replace(found.devices[0], **reported),))
        seen = with_places(found, {"GPU-0": places()}, {place(0).uuid: record(0)})
        assert seen.devices[0].instances_used_bytes == {place(0).uuid: 5, "MIG-x": 6}
        assert seen.devices[0].instances_utilization == {place(0).uuid: 0.5, "MIG-x": 0.25}

    def test_own_instances_keep_places_when_places_are_unreadable(self):
        found = reading(gpu(0, mig=[real(0, "MIG-ours"), real(1, "MIG-too"), real(2, "MIG-theirs")]))
        records = {place(start).uuid: record(start, uuid) for start, uuid in ((0, "MIG-ours"), (1, "MIG-too"))}
        device = with_places(found, {}, records).devices[0].device
        assert {one.uuid: one.on_demand for one in device.mig_instances} == {
            "MIG-theirs": False,
            place(0).uuid: True,
            place(1).uuid: True,
        }
        (first, second) = (one for one in device.mig_instances if one.on_demand)
        assert (first.memory_bytes, first.placement_size, first.most_on_device) == (place(0).memory_bytes, 1, 2)
        assert (second.placement_start, second.gpu_instance_id) == (1, 0)

    def test_placement_without_instance_is_shown_as_recorded_when_placements_are_unreadable(self):
        found = reading(gpu(0, mig=[real(2, "MIG-theirs")]), gpu(1, mig=[real(5, "MIG-too")]))
        records = {place(start, profile).uuid: recorded(start, profile) for start, profile in ((0, "1g.10gb"), (4, "3g.40gb"))}
        first, second = (entry.device.mig_instances for entry in with_places(found, {}, records).devices)
        assert [one for one in first if one.on_demand] == [place(0), place(4, "3g.40gb")]
        assert not any(one.on_demand for one in second)

    def test_records_with_and_without_sizes_are_shown_together(self):
        found = reading(gpu(0, mig=[real(0, "MIG-old"), real(1, "MIG-new")]))
        records = {place(0).uuid: record(0, "MIG-old"), place(1).uuid: replace(recorded(1), uuid="MIG-new")}
        shown = with_places(found, {}, records).devices[0].device.mig_instances
        assert {one.uuid: one.most_on_device for one in shown} == {place(0).uuid: 2, place(1).uuid: place(1).most_on_device}

    def test_a_gpu_that_is_not_in_mig_mode_stays_as_it_is(self):
        assert with_places(reading(gpu(0)), {"GPU-0": places()}, {}) == reading(gpu(0))


class TestOffered:
    def test_an_empty_gpu_offers_of_each_profile_as_many_as_fit(self):
        offered = offered_devices(inventory(dynamic_gpu()), Ledger(), 16, MigStrategy.MIXED)
        assert healthy(offered) == {ONE_G: 7, MEDIA_G: 1, TWO_G: 3, THREE_G: 2, SEVEN_G: 1}
        assert [device.device_id for device in offered[THREE_G]] == ["GPU-0::0", "GPU-0::1"]

    def test_grants_take_room_from_other_profiles(self):
        offered = offered_devices(inventory(dynamic_gpu()), Ledger().adopting([on_place(4)]), 16, MigStrategy.MIXED)
        assert healthy(offered) == {ONE_G: 7, MEDIA_G: 1, TWO_G: 2, THREE_G: 1, SEVEN_G: 0}
        assert len(offered[SEVEN_G]) == 1

    def test_held_id_stays_healthy_when_no_more_fit(self):
        whole = on_place(0, "7g.80gb", SEVEN_G)
        offered = offered_devices(inventory(dynamic_gpu()), Ledger().adopting([whole]), 16, MigStrategy.MIXED)
        assert healthy(offered) == {ONE_G: 0, MEDIA_G: 0, TWO_G: 0, THREE_G: 0, SEVEN_G: 1}

    def test_instance_without_free_media_engine_is_not_offered(self):
        few = MediaEngines(1, 0, 1, 1)
        of_profile = {"1g.10gb+me": few, "2g.20gb": few, "7g.80gb": few}
        there = tuple(replace(one, engines=of_profile.get(one.profile, MediaEngines())) for one in places())
        ledger = Ledger().adopting([on_place(0, "1g.10gb+me", MEDIA_G)])
        offered = offered_devices(inventory(gpu(0, mig=there)), ledger, 16, MigStrategy.MIXED)
        assert healthy(offered) == {ONE_G: 6, MEDIA_G: 1, TWO_G: 0, THREE_G: 1, SEVEN_G: 0}

    def test_id_of_one_gpu_may_hold_an_instance_on_another(self):
        elsewhere = grant(ids("1:0"), share(place(0, "7g.80gb").uuid, 9728), resource=SEVEN_G)
        offered = offered_devices(inventory(dynamic_gpu(0), dynamic_gpu(1)), Ledger().adopting([elsewhere]), 16, MigStrategy.MIXED)
        assert healthy(offered)[SEVEN_G] == 2

    def test_all_ids_of_an_unhealthy_gpu_are_unhealthy(self):
        sick = inventory(dynamic_gpu()).after_driver_trouble("gone")
        assert set(healthy(offered_devices(sick, Ledger().adopting([on_place(4)]), 16, MigStrategy.MIXED)).values()) == {0}

    def test_existing_instances_are_offered_with_creatable_ones(self):
        offered = offered_devices(inventory(dynamic_gpu(0, real(0))), Ledger(), 16, MigStrategy.MIXED)
        assert [device.device_id for device in offered[ONE_G] if device.healthy] == ["MIG-a", *(f"GPU-0::{number}" for number in range(6))]

    def test_strategy_none_offers_no_gpu_in_mig_mode(self):
        offered = offered_devices(inventory(gpu(0), gpu(1, mig=[instance(1, 0)])), Ledger(), 2, MigStrategy.NONE)
        assert [device.device_id for device in offered[VGPU]] == ["GPU-0::0", "GPU-0::1"]
        assert list(offered) == [VGPU]

    def test_strategy_single_offers_each_instance_as_a_vgpu(self):
        alike = inventory(gpu(0, mig=[instance(0, 0)]), gpu(1, mig=[instance(1, 0), instance(1, 1)]))
        offered = offered_devices(alike, Ledger(), 16, MigStrategy.SINGLE)
        assert {resource: [device.device_id for device in devices] for resource, devices in offered.items()} == {
            VGPU: ["MIG-0-0", "MIG-1-0", "MIG-1-1"]
        }
        assert strategy_trouble(alike, MigStrategy.SINGLE) == ""

    @pytest.mark.parametrize(
        "unlike",
        [
            inventory(gpu(0), gpu(1, mig=[instance(1, 0)])),
            inventory(gpu(0, mig=[instance(0, 0), instance(0, 2, profile="2g.20gb")])),
            inventory(gpu(0, mig=[]), gpu(1, mig=[instance(1, 0)])),
        ],
    )
    def test_strategy_single_offers_no_instance_on_mixed_partitions_with_reason(self, unlike: DeviceInventory):
        offered = offered_devices(unlike, Ledger(), 1, MigStrategy.SINGLE)
        assert not any(device.device_id.startswith("MIG") for devices in offered.values() for device in devices)
        assert "single needs every GPU in MIG mode" in strategy_trouble(unlike, MigStrategy.SINGLE)


class TestInstances:
    WHOLE = MigRecord(place(0, "7g.80gb").uuid, SHARED, BOOT, "MIG-a")

    def test_place_in_grant_is_promised(self):
        ledger = Ledger().adopting([on_place(4), grant(ids("1:1"), share(0))])
        assert [is_promised(record(start), ledger) for start in (4, 5)] == [True, False]

    def test_instance_of_shares_is_promised_while_any_share_is_left(self):
        of_gpu, elsewhere = grant(ids("0:1"), share(0)), grant(ids("1:1"), share(1))
        assert is_promised(self.WHOLE, Ledger().adopting([of_gpu, elsewhere]))
        assert not is_promised(self.WHOLE, Ledger().adopting([elsewhere]))
        assert not is_promised(replace(self.WHOLE, grant_id="grant-1"), Ledger().adopting([of_gpu]))

    @pytest.mark.parametrize(("devices", "unclear"), [({"GPU-0"}, True), (set(), True), ({"GPU-1"}, False)])
    def test_instance_of_shares_is_unclear_with_damaged_row_of_its_gpu(self, devices, unclear):
        assert is_unclear(self.WHOLE, Ledger().with_unclear({"lost": devices})) is unclear

    def test_instance_of_damaged_row_is_unclear(self):
        assert is_unclear(record(4), Ledger().with_unclear({"grant-1": set()}))


@pytest.mark.parametrize(("state", "free"), [(None, True), ("success", True), ("pending", False), ("rebooting", False), ("failed", False)])
def test_no_changes_while_mig_manager_works_or_has_failed(state, free):
    labels = {"nvidia.com/mig.config.state": state} if state else {"nvidia.com/mig.config": "all-1g.10gb"}
    assert (hands_off_reason(labels) == "") is free


def test_no_changes_while_node_labels_are_unknown():
    assert "not known yet" in hands_off_reason(None)
