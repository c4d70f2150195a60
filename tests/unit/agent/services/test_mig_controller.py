# SPDX-License-Identifier: Apache-2.0
import asyncio
import itertools
from dataclasses import replace

import pytest

from agent.core.health import HealthState
from agent.core.inventory import DeviceEvent
from agent.core.mig import MigRecord
from agent.errors import DriverError, DriverLeftError, DriverTimeoutError, PartitionError, PartitionInUseError, StorageError
from agent.services.driver_watch import DriverWatch
from agent.services.mig_controller import MigAwareDriver
from aliquot.contract.codec import MigPlace, decode_place
from aliquot.placement import mig
from tests.unit.agent.builders import BOOT, gpu, grant, ids, instance, pod, reading, share
from tests.unit.agent.fakes import Disk, FakeDriver, until
from tests.unit.agent.partitions import FakePartitions, FakeRecords, make_controller, place, places

ONE_G = mig.resource_of_profile("1g.10gb")
PLACE = MigPlace("GPU-0", "1g.10gb", 4)


def promise(start: int = 4, name: str = "train", profile: str = "1g.10gb"):
    return grant(ids(f"0:{start}"), share(place(start, profile).uuid, 9728), of=pod(name), resource=ONE_G)


class Harness:
    """A controller over partitions and records that outlive it."""

    def __init__(self, base) -> None:
        self.manager = Disk(base).manager()
        self.partitions = FakePartitions()
        self.records = FakeRecords()
        self.labels: dict[str, str] = {}
        self.controller = self.restarted()

    def restarted(self, **options):
        self.controller = make_controller(self.manager, self.partitions, self.records, labels=self.labels, **options)
        self.controller.load()
        return self.controller

    def promise(self, *grants) -> None:
        self.manager.ledger = self.manager.ledger.adopting(grants)

    def release(self, *grants) -> None:
        self.manager.ledger = self.manager.ledger.releasing([one.grant_id for one in grants])


@pytest.fixture
async def node(tmp_path):
    return Harness(tmp_path)


class TestMaking:
    async def test_an_instance_is_made_where_the_grant_says_and_recorded(self, node):
        node.promise(promise())
        made = await node.controller.ensure(promise())
        assert made == {str(PLACE): node.partitions.instances[str(PLACE)]}
        (there,) = (one for one in places() if one.uuid == str(PLACE))
        geometry = (there.memory_bytes, there.placement_size, there.most_on_device)
        uuid, numbers = made[str(PLACE)].uuid, (7 + PLACE.start, 0)
        assert node.records.records[str(PLACE)] == MigRecord(str(PLACE), promise().grant_id, BOOT, uuid, *geometry, *numbers)

    async def test_the_record_is_written_before_the_instance_is_made(self, node):
        node.promise(promise())
        node.partitions.failure = PartitionError("no room")
        with pytest.raises(PartitionError):
            await node.controller.ensure(promise())
        assert node.records.records[str(PLACE)].uuid == ""

    async def test_a_container_that_restarts_keeps_its_instance(self, node):
        node.promise(promise())
        first = await node.controller.ensure(promise())
        assert await node.controller.ensure(promise()) == first
        assert await node.restarted().ensure(promise()) == first
        assert node.partitions.made == 1

    async def test_instance_lost_in_reset_is_recreated_with_new_uuid(self, node):
        node.promise(promise())
        first = await node.controller.ensure(promise())
        node.partitions.instances.clear()
        second = await node.controller.ensure(promise())
        assert second[str(PLACE)].uuid != first[str(PLACE)].uuid
        assert node.records.records[str(PLACE)].uuid == second[str(PLACE)].uuid

    async def test_another_container_gets_a_fresh_instance_at_the_place(self, node):
        node.promise(promise())
        first = await node.controller.ensure(promise())
        node.release(promise())
        node.promise(promise(name="next"))
        second = await node.controller.ensure(replace(promise(name="next"), grant_id="another"))
        assert second[str(PLACE)].uuid != first[str(PLACE)].uuid

    async def test_released_instances_in_the_way_go_first(self, node):
        node.promise(promise(4), promise(5))
        for start in (4, 5):
            await node.controller.ensure(promise(start))
        node.release(promise(4), promise(5))
        node.promise(promise(4, "big", "3g.40gb"))
        await node.controller.ensure(promise(4, "big", "3g.40gb"))
        assert list(node.partitions.instances) == [place(4, "3g.40gb").uuid]

    async def test_one_that_is_still_used_is_a_reason_to_try_later(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.partitions.busy.add(str(PLACE))
        with pytest.raises(PartitionInUseError):
            await node.controller.ensure(replace(promise(), grant_id="another"))

    async def test_instance_used_elsewhere_on_gpu_does_not_block_creation(self, node):
        node.promise(promise(0))
        await node.controller.ensure(promise(0))
        node.release(promise(0))
        node.partitions.busy.add(place(0).uuid)
        node.promise(promise(4))
        assert str(PLACE) in await node.controller.ensure(promise(4))

    async def test_foreign_instance_is_not_touched(self, node):
        theirs = node.partitions.put(PLACE)
        node.promise(promise())
        with pytest.raises(PartitionError, match=f"{theirs.uuid} is there, and this agent did not create it"):
            await node.controller.ensure(promise())
        assert node.partitions.calls == []

    async def test_nothing_is_made_while_mig_manager_is_at_work(self, node):
        node.labels["nvidia.com/mig.config.state"] = "pending"
        node.promise(promise())
        with pytest.raises(PartitionError, match="'pending'"):
            await node.controller.ensure(promise())
        assert not node.records.records

    async def test_container_restarts_on_its_instance_during_any_mig_manager_action(self, node):
        node.promise(promise())
        first = await node.controller.ensure(promise())
        node.labels["nvidia.com/mig.config.state"] = "rebooting"
        assert await node.controller.ensure(promise()) == first

    async def test_node_offering_no_instance_creates_none(self, node):
        node.restarted(offering=False)
        with pytest.raises(PartitionError, match="is not at migStrategy: dynamic"):
            await node.controller.ensure(promise())

    async def test_grants_of_other_devices_need_nothing(self, node):
        assert await node.controller.ensure(grant(ids("0:0"), share(0))) == {}


class TestShares:
    """Shares of a GPU in MIG mode, which use one instance together."""

    WHOLE = place(0, "7g.80gb").uuid

    @pytest.fixture
    async def node(self, node):
        await MigAwareDriver(FakeDriver(reading(gpu(0, mib=81_920, mig=[]), gpu(1))), node.controller).read()
        return node

    def of(self, name: str):
        return replace(grant(ids("0:0"), share(0, 100), of=pod(name)), grant_id=name)

    async def granted(self, node, name: str):
        node.promise(self.of(name))
        return (await node.controller.ensure(self.of(name)))["GPU-0"]

    async def test_first_share_has_instance_made_and_others_join(self, node):
        first = await self.granted(node, "a")
        assert await self.granted(node, "b") == first
        assert node.partitions.calls == [f"create {self.WHOLE}"]

    async def test_instance_goes_with_last_share(self, node):
        for name in "ab":
            await self.granted(node, name)
        node.release(self.of("a"))
        assert await node.controller.clean() is False
        assert await self.granted(node, "c") == node.partitions.instances[self.WHOLE]
        node.release(self.of("b"), self.of("c"))
        await node.controller.clean()
        assert (node.partitions.instances, node.records.records) == ({}, {})
        assert node.partitions.calls == [f"create {self.WHOLE}", f"destroy {self.WHOLE}"]

    async def test_restarted_agent_keeps_instance_before_it_reads_gpus(self, node):
        first = await self.granted(node, "a")
        await node.restarted().clean()
        await MigAwareDriver(FakeDriver(node.partitions.reading()), node.controller).read()
        assert await self.granted(node, "b") == first

    async def test_instance_with_damaged_row_stays(self, node):
        await self.granted(node, "a")
        node.release(self.of("a"))
        node.manager.ledger = node.manager.ledger.with_unclear({"lost": {"GPU-0"}})
        assert await node.controller.clean() is True
        assert self.WHOLE in node.partitions.instances

    async def test_unused_instances_go_for_shares_and_for_others(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        await self.granted(node, "a")
        assert list(node.partitions.instances) == [self.WHOLE]
        node.release(self.of("a"))
        node.promise(promise())
        await node.controller.ensure(promise())
        assert list(node.partitions.instances) == [str(PLACE)]

    async def test_claim_for_whole_instance_gets_fresh_one(self, node):
        shared = await self.granted(node, "a")
        node.release(self.of("a"))
        alone = promise(0, "alone", "7g.80gb")
        node.promise(alone)
        assert (await node.controller.ensure(alone))[self.WHOLE].uuid != shared.uuid

    async def test_gpu_that_does_not_answer_keeps_its_instance(self, node):
        first = await self.granted(node, "a")
        await MigAwareDriver(FakeDriver(reading(gpu(1))), node.controller).read()
        assert (await node.controller.ensure(self.of("a")))["GPU-0"] == first

    async def test_gpu_that_left_mig_mode_needs_none(self, node):
        await MigAwareDriver(FakeDriver(reading(gpu(0), gpu(1))), node.controller).read()
        assert await node.controller.ensure(self.of("a")) == {}

    async def test_gpu_outside_mig_mode_needs_none(self, node):
        assert await node.controller.ensure(grant(ids("1:0"), share(1))) == {}


class TestRemoving:
    async def test_the_instance_of_a_released_grant_is_removed_with_its_record(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        assert await node.controller.clean() is False
        assert (node.partitions.instances, node.records.records) == ({}, {})

    async def test_instances_may_go_for_another_one_while_they_are_removed(self, node):
        released = [promise(start) for start in (3, 4, 5, 6)]
        node.promise(*released)
        for one in released:
            await node.controller.ensure(one)
        node.release(*released)
        big = promise(4, "big", "3g.40gb")
        node.promise(big)
        await asyncio.gather(node.controller.clean(), node.controller.ensure(big))
        assert list(node.partitions.instances) == [place(4, "3g.40gb").uuid]

    async def test_an_instance_of_a_grant_stays(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        await node.controller.clean()
        assert str(PLACE) in node.partitions.instances

    async def test_one_that_is_still_used_is_tried_again(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        node.partitions.busy.add(str(PLACE))
        assert await node.controller.clean() is True
        node.partitions.busy.clear()
        assert await node.controller.clean() is False
        assert node.partitions.instances == {}

    @pytest.mark.parametrize("restart", [False, True], ids=["same agent", "agent killed in between"])
    async def test_a_removal_that_came_half_way_is_finished(self, node, restart):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        node.partitions.stuck.add(str(PLACE))
        assert await node.controller.clean() is True
        assert node.partitions.instances[str(PLACE)].uuid == ""
        if restart:
            node.restarted()
        assert await node.controller.clean() is True
        assert str(PLACE) in node.records.records
        node.partitions.stuck.clear()
        assert await node.controller.clean() is False
        assert (node.partitions.instances, node.records.records) == ({}, {})

    async def test_placement_of_interrupted_removal_goes_to_next_container(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        node.partitions.stuck.add(str(PLACE))
        await node.controller.clean()
        node.partitions.stuck.clear()
        node.promise(promise(name="next"))
        made = await node.controller.ensure(replace(promise(name="next"), grant_id="another"))
        assert made[str(PLACE)].uuid.startswith("MIG-made-")
        assert node.records.records[str(PLACE)].grant_id == "another"

    async def test_nothing_is_removed_while_mig_manager_is_at_work(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        node.labels["nvidia.com/mig.config.state"] = "pending"
        assert await node.controller.clean() is True
        assert str(PLACE) in node.partitions.instances

    async def test_the_loop_removes_at_the_start_and_after_each_release(self, node):
        node.promise(promise(4))
        await node.controller.ensure(promise(4))
        running = asyncio.ensure_future(node.controller.run())
        node.release(promise(4))
        node.manager.changes.notify()
        await until(lambda: not node.partitions.instances)
        running.cancel()

    async def test_unremovable_instance_is_logged_once(self, node, caplog):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        node.partitions.busy.add(str(PLACE))
        for _ in range(3):
            await node.controller.clean()
        assert [record.message for record in caplog.records if "not removed yet" in record.message] == [
            f"MIG instance not removed yet: removing the MIG instance at {PLACE}: processes still use it"
        ]

    async def test_failing_driver_is_retried(self, node, monkeypatch):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())

        async def failing(place):
            raise DriverError("the driver is away")

        with monkeypatch.context() as patch:
            patch.setattr(node.partitions, "instance_at", failing)
            assert await node.controller.clean() is True
        assert await node.controller.clean() is False


class TestCrashes:
    @pytest.mark.parametrize("made", [True, False], ids=["made", "not made"])
    async def test_an_agent_killed_while_making_an_instance_leaves_nothing_behind(self, node, made):
        node.records.write(MigRecord(str(PLACE), "grant-x", BOOT))
        if made:
            node.partitions.put(PLACE)
        await node.restarted().clean()
        assert (node.partitions.instances, node.records.records) == ({}, {})

    async def test_a_gpu_instance_without_compute_instance_is_removed_too(self, node):
        node.records.write(MigRecord(str(PLACE), "grant-x", BOOT))
        node.partitions.put(PLACE, uuid="")
        await node.restarted().clean()
        assert node.partitions.instances == {}

    async def test_a_grant_that_survived_the_crash_gets_a_fresh_instance(self, node):
        node.promise(promise())
        node.records.write(MigRecord(str(PLACE), promise().grant_id, BOOT))
        half_made = node.partitions.put(PLACE)
        made = await node.restarted().ensure(promise())
        assert made[str(PLACE)].uuid != half_made.uuid
        assert node.records.records[str(PLACE)].uuid == made[str(PLACE)].uuid

    async def test_records_of_earlier_boot_are_dropped_and_current_instances_stay(self, node):
        node.records.write(MigRecord(str(PLACE), "grant-x", "boot-before", "MIG-made-1"))
        node.partitions.put(PLACE)
        controller = node.restarted()
        await controller.clean()
        assert node.records.records == {}
        assert str(PLACE) in node.partitions.instances

    async def test_undroppable_record_of_earlier_boot_is_ignored_and_stops_no_start(self, node, monkeypatch):
        def read_only(place):
            raise StorageError(f"removing {place}: Read-only file system")

        node.records.write(MigRecord(str(PLACE), "grant-x", "boot-before", "MIG-made-1"))
        node.partitions.put(PLACE)
        monkeypatch.setattr(node.records, "remove", read_only)
        controller = node.restarted()
        await controller.clean()
        assert controller.records == {}
        assert str(PLACE) in node.partitions.instances

    async def test_foreign_instance_at_recorded_place_is_not_removed(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        node.release(promise())
        node.partitions.put(PLACE)  # destroyed and made again by an administrator
        await node.restarted().clean()
        assert str(PLACE) in node.partitions.instances
        assert node.records.records == {}


class TestBoard:
    async def test_the_driver_shows_places_on_gpus_in_mig_mode(self, node):
        driver = MigAwareDriver(FakeDriver(reading(gpu(0, mig=[]), gpu(1))), node.controller)
        first, second = (entry.device for entry in (await driver.read()).devices)
        assert [one.uuid for one in first.mig_instances] == [one.uuid for one in places()]
        assert second.mig_instances == ()

    async def test_without_offer_only_used_placements_are_shown(self, node):
        node.promise(promise())
        await node.controller.ensure(promise())
        controller = node.restarted(offering=False)
        driver = MigAwareDriver(FakeDriver(node.partitions.reading()), controller)
        (entry,) = (await driver.read()).devices
        assert [one.uuid for one in entry.device.mig_instances] == [str(PLACE)]

    async def test_gpu_with_unreadable_profiles_offers_existing_instances(self, node, monkeypatch):
        async def failing(device_uuid):
            raise DriverError("no profiles")

        monkeypatch.setattr(node.partitions, "places", failing)
        (entry,) = (await MigAwareDriver(FakeDriver(reading(gpu(0, mig=[instance(0, 1)]))), node.controller).read()).devices
        assert [one.uuid for one in entry.device.mig_instances] == ["MIG-0-1"]

    async def test_what_was_made_there_before_keeps_its_place(self, node, monkeypatch):
        async def failing(device_uuid):
            raise DriverError("no profiles")

        node.promise(promise())
        await node.controller.ensure(promise())
        monkeypatch.setattr(node.partitions, "places", failing)
        driver = MigAwareDriver(FakeDriver(node.partitions.reading()), node.restarted())
        (entry,) = (await driver.read()).devices
        assert [(one.uuid, one.on_demand) for one in entry.device.mig_instances] == [(str(PLACE), True)]

    async def test_hanging_driver_is_not_mistaken_for_gpu_without_profiles(self, node, monkeypatch):
        async def hanging(device_uuid):
            raise DriverTimeoutError("hangs")

        monkeypatch.setattr(node.partitions, "places", hanging)
        with pytest.raises(DriverTimeoutError):
            await MigAwareDriver(FakeDriver(reading(gpu(0, mig=[]))), node.controller).read()


class TestMakingWay:
    """mig-manager resets GPUs only while no process has them open."""

    STATE = "nvidia.com/mig.config.state"

    async def test_driver_is_closed_during_mig_manager_reset_and_gpus_keep_state(self, node):
        beneath = FakeDriver(reading(gpu(0), gpu(1)))
        driver = MigAwareDriver(beneath, node.controller)
        watch = DriverWatch(driver, 1.0)
        await watch.poll()
        before = watch.inventory
        for state in ("pending", "rebooting"):
            node.labels[self.STATE] = state
            for _ in range(3):
                await watch.poll()
            assert watch.inventory == before
            assert not watch.trouble
            assert state in beneath.kept_out

    async def test_failed_gpu_does_not_recover_without_checks(self, node):
        clock = itertools.count(step=60)
        driver = MigAwareDriver(FakeDriver(reading(gpu(0))), node.controller)
        watch = DriverWatch(driver, 1.0, monotonic=lambda: float(next(clock)))
        await watch.poll()
        watch.take_events([DeviceEvent("GPU-0", 95)])
        node.labels[self.STATE] = "pending"
        for _ in range(100):
            await watch.poll()
        assert [entry.state for entry in watch.inventory.devices] == [HealthState.QUARANTINED]

    async def test_closing_may_fail_and_opening_may_be_slow_without_gpu_report(self, node):
        clock, beneath = itertools.count(step=5), FakeDriver(reading(gpu(0)))
        watch = DriverWatch(MigAwareDriver(beneath, node.controller), 1.0, monotonic=lambda: float(next(clock)))
        await watch.poll()
        node.labels[self.STATE], beneath.stays = "pending", True
        await watch.poll()
        node.labels[self.STATE], beneath.answer = "success", DriverTimeoutError("nvmlInit has not returned for 5.0 s")
        for _ in range(3):
            await watch.poll()
        assert beneath.kept_out == ""
        beneath.answer = reading(gpu(0))
        await watch.poll()
        assert [entry.state for entry in watch.inventory.devices] == [HealthState.HEALTHY]
        assert not watch.trouble

    @pytest.mark.parametrize("state", ["success", "failed"])
    async def test_it_is_entered_again_when_mig_manager_is_done(self, node, state):
        beneath = FakeDriver(reading(gpu(0)))
        driver = MigAwareDriver(beneath, node.controller)
        await driver.read()
        node.labels[self.STATE] = "pending"
        with pytest.raises(DriverLeftError):
            await driver.read()
        node.labels[self.STATE] = state
        beneath.answer = reading(gpu(0), gpu(1))
        assert len((await driver.read()).devices) == 2
        assert beneath.kept_out == ""

    async def test_driver_is_closed_at_next_event_check_not_after_whole_period(self, node):
        beneath = FakeDriver(reading(gpu(0)))
        driver = MigAwareDriver(beneath, node.controller)
        await driver.read()
        node.labels[self.STATE] = "pending"
        event = DeviceEvent("GPU-0", 79)
        beneath.reported = [event]
        assert await driver.events() == [event]
        assert beneath.kept_out

    async def test_agent_starting_during_reset_states_why_no_gpu_is_known(self, node):
        node.labels[self.STATE] = "rebooting"
        with pytest.raises(DriverError, match="'rebooting': mig-manager may reset"):
            await MigAwareDriver(FakeDriver(reading(gpu(0))), node.controller).read()


def test_the_name_of_a_place_is_read_back():
    assert decode_place(str(PLACE)) == PLACE
    assert decode_place("GPU-0") is None
