# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from agent.core.backends import Abilities, MigStrategy
from agent.services.driver_watch import DriverWatch
from aliquot.contract.model import Allocation, Isolation
from aliquot.placement import mig
from tests.unit.agent.builders import VGPU, gpu, grant, ids, instance, reading, share
from tests.unit.agent.claim_builders import claim_grant
from tests.unit.agent.fakes import FakeDriver, settle
from tests.unit.agent.partitions import EmptyManager, dynamic_gpu, make_offering, place


@pytest.fixture
async def watch():
    watch = DriverWatch(FakeDriver(reading(gpu(0), dynamic_gpu(1))), 1.0)
    await watch.poll()
    return watch


async def test_what_is_offered_follows_gpus_and_promises(watch):
    manager = EmptyManager()
    offering = make_offering(watch, 2, manager=manager)
    whole = mig.resource_of_profile("7g.80gb")
    assert [device.device_id for device in offering.devices()[VGPU]] == ["GPU-0::0", "GPU-0::1"]
    assert [device.healthy for device in offering.devices()[whole]] == [True]
    manager.ledger = manager.ledger.adopting(
        [grant(ids("1:0"), share(place(6, device=1).uuid, 9728), resource=mig.resource_of_profile("1g.10gb"))]
    )
    assert [device.healthy for device in offering.devices()[whole]] == [False]


async def test_changes_of_gpus_and_of_promises_are_counted(watch):
    manager = EmptyManager()
    offering = make_offering(watch, manager=manager)
    running = asyncio.ensure_future(offering.run())
    await settle()
    for source in (watch.changes, manager.changes):
        seen = offering.changes.count
        source.notify()
        await settle()
        assert offering.changes.count == seen + 1
    running.cancel()


async def test_the_backends_are_those_of_the_gpus_as_they_are(watch):
    assert make_offering(watch).backends().backends == (Isolation.SHIM, Isolation.MIG, Isolation.EXCLUSIVE)


async def test_a_strategy_that_does_not_fit_the_node_is_trouble(watch):
    assert make_offering(watch).trouble == ""
    assert "migStrategy single" in make_offering(watch, abilities=Abilities(mig_strategy=MigStrategy.SINGLE)).trouble


async def test_a_node_without_on_demand_offers_its_instances(watch):
    still = DriverWatch(FakeDriver(reading(gpu(0, mig=[instance(0, 1)]))), 1.0)
    await still.poll()
    offered = make_offering(still).devices()
    assert {resource: [device.device_id for device in devices] for resource, devices in offered.items()} == {
        mig.resource_of_profile("1g.10gb"): ["MIG-0-1"]
    }


async def test_node_for_claims_offers_ids_only_while_containers_have_some(watch):
    manager = EmptyManager()
    offering = make_offering(watch, 2, manager=manager, allocation=Allocation.DRA)
    assert offering.devices() == {}
    manager.ledger = manager.ledger.adopting([claim_grant("train", share(0, 10))])
    assert offering.devices() == {}
    manager.ledger = manager.ledger.adopting([grant(ids("0:0"), share(0, 10))])
    assert [(device.device_id, device.healthy) for device in offering.devices()[VGPU]] == [("GPU-0::0", False), ("GPU-0::1", False)]


@pytest.mark.parametrize(("allocation", "is_healthy"), [(Allocation.BOTH, True), (Allocation.PLUGIN, False)])
async def test_ids_wait_for_claims_only_where_these_are_not_served(watch, allocation, is_healthy):
    manager = EmptyManager()
    offering = make_offering(watch, 1, manager=manager, allocation=allocation)
    manager.ledger = manager.ledger.adopting([claim_grant("train", share(0, 10)), grant(ids("0:0"), share(0, 10))])
    assert [device.healthy for device in offering.devices()[VGPU]] == [is_healthy]
    manager.ledger = manager.ledger.releasing([one.grant_id for one in manager.ledger.with_claims])
    assert [device.healthy for device in offering.devices()[VGPU]] == [True]
