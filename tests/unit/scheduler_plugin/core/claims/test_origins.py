# SPDX-License-Identifier: Apache-2.0
"""What the agent publishes of its devices is what the scheduler counts them as."""

import pytest

from agent.core.inventory import DeviceInventory
from agent.core.mig_devices import find_instance
from agent.core.slices import Offer, contents_of, find_device, profile_bytes, slice_specs
from aliquot import contract
from scheduler_plugin.core.claims.pools import Pools
from tests.unit.agent.builders import gpu, instance, inventory
from tests.unit.agent.core.test_mig_devices import node
from tests.unit.agent.core.test_slices import POOL

OFFER = Offer(16, profiles_gib=(20, 40))


@pytest.mark.parametrize(
    "found", [inventory(gpu(0, mib=81920), gpu(1, mib=81920)), node(), inventory(gpu(0, mig=[instance(0, 0), instance(0, 1)]))]
)
def test_each_published_device_is_counted_as_what_the_inventory_has(found: DeviceInventory):
    pools = Pools()
    for name, spec in slice_specs(contents_of(found, OFFER), POOL, 1).items():
        pools.set_slice({"metadata": {"name": name}, "spec": spec})
    published = [device["name"] for device in contents_of(found, OFFER).devices]
    assert {key[2] for key in pools.origins} == set(published)
    for name in published:
        origin, part = pools.origins[contract.DRA_DRIVER, POOL.node_name, name], find_instance(found, name)
        if part is not None:
            assert (origin.gpu, origin.counted_as, origin.profile) == (part[0].device.uuid, part[1].uuid, part[1].profile)
            continue
        fixed_bytes = profile_bytes(name)
        assert origin.counted_as == origin.gpu == find_device(found, name).device.uuid
        assert origin.fixed_mib == (None if fixed_bytes is None else fixed_bytes >> 20)
