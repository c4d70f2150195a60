# SPDX-License-Identifier: Apache-2.0
"""Any allocations, by any author, in any order with releases: no device is promised more than it has (I1)."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.core.backends import Abilities
from agent.core.claims import ClaimNode, decode_claim, plan_request
from agent.core.ledger import Ledger
from agent.core.planning import Planned
from aliquot.contract.units import MIB, WHOLE_GPU_PERCENT
from tests.unit.agent.builders import BOOT, SECRET, gpu, inventory
from tests.unit.agent.claim_builders import NODE, body, claim_object, ref, result

GPU_MIB = 100
SHARES = 4
INVENTORY = inventory(gpu(0, mib=GPU_MIB), gpu(1, mib=GPU_MIB))
DEVICES = st.builds(result, st.integers(0, 1), st.none() | st.integers(1, GPU_MIB), st.none() | st.integers(1, WHOLE_GPU_PERCENT))
STEPS = st.tuples(st.integers(0, 5), st.booleans(), st.booleans(), st.lists(DEVICES, min_size=1, max_size=3))


@given(st.lists(STEPS, max_size=20))
def test_no_order_of_prepare_and_unprepare_overcommits_a_device(steps: Sequence):
    ledger = Ledger()
    for number, prepare, cores_stated, devices in steps:
        name = f"claim-{number}"
        if not prepare:
            ledger = ledger.releasing(grant.grant_id for grant in ledger.of_claim(f"uid-{name}"))
            assert not ledger.of_claim(f"uid-{name}")
            continue
        claim = decode_claim(body(claim_object(name, *devices, cores_stated=cores_stated)))
        node = ClaimNode(SECRET, BOOT, NODE, SHARES, INVENTORY, ledger, Abilities(), {})
        planned = plan_request(ref(name), claim, claim.requests[0], node)
        if isinstance(planned, Planned):
            ledger = ledger.granting(planned.grant, INVENTORY, SHARES)
        for state in ledger.states(INVENTORY, SHARES):
            assert state.used_memory_bytes <= GPU_MIB * MIB
            assert state.used_cores_percent + bool(state.unreserved_shares) <= WHOLE_GPU_PERCENT
            assert state.used_shares <= SHARES
