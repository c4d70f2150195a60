# SPDX-License-Identifier: Apache-2.0
"""Any allocations, by any author, in any order with releases: no device is promised more than it has (I1).

The requests of a claim are used together or separately, by any containers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from agent.core.backends import Abilities
from agent.core.claim_groups import groups_of
from agent.core.claims import ClaimNode, decode_claim, plan_group
from agent.core.ledger import Grant, Ledger
from agent.core.owners import users_in
from agent.core.planning import Planned
from agent.core.refusal import Refusal
from aliquot.contract.units import MIB, WHOLE_GPU_PERCENT
from tests.unit.agent.builders import BOOT, SECRET, gpu, inventory
from tests.unit.agent.claim_builders import NODE, body, claim_object, ref, result, using

GPU_MIB = 100
SHARES = 4
INVENTORY = inventory(gpu(0, mib=GPU_MIB), gpu(1, mib=GPU_MIB))
NAMES = st.sampled_from("abcd")
DEVICES = st.builds(result, st.integers(0, 1), st.none() | st.integers(1, GPU_MIB), st.none() | st.integers(1, WHOLE_GPU_PERCENT), NAMES)
USES = st.dictionaries(st.sampled_from(("one", "two", "three")), st.sets(NAMES | st.just("")), max_size=3)
STEPS = st.tuples(st.integers(0, 5), st.booleans(), st.booleans(), st.lists(DEVICES, min_size=1, max_size=4), USES)


def wanted_by(uses: Mapping[str, Set[str]], requests: Set[str]) -> list[frozenset[str]]:
    """The requests of a claim that each container uses."""
    return [frozenset(requests if "" in named else requests & named) for named in uses.values()]


def check_device_sums(ledger: Ledger) -> None:
    for state in ledger.states(INVENTORY, SHARES):
        assert state.used_memory_bytes <= GPU_MIB * MIB
        assert state.used_cores_percent + bool(state.unreserved_shares) <= WHOLE_GPU_PERCENT
        assert state.used_shares <= SHARES


def check_parts(grants: Sequence[Grant], devices: Sequence[Mapping[str, object]]) -> None:
    """A program sees each device once, with the sum of its memory; the ledger has each allocation."""
    assert Counter(one.request or grant.claim.request for grant in grants for one in grant.claim.devices) == Counter(
        str(one["request"]) for one in devices
    )
    for grant in grants:
        assert len(set(grant.device_names)) == len(grant.shares)
        assert len(grant.promised) == len(grant.claim.devices)
        for share in grant.shares:
            parts = [part for part in grant.promised if part.device_uuid == share.device_uuid]
            assert share.memory_bytes == sum(part.memory_bytes for part in parts)


@given(st.lists(STEPS, max_size=20))
def test_no_order_of_prepare_and_unprepare_overcommits_a_device(steps: Sequence):
    ledger = Ledger()
    for number, prepare, cores_stated, devices, uses in steps:
        name = f"claim-{number}"
        ledger = ledger.releasing(grant.grant_id for grant in ledger.of_claim(f"uid-{name}"))
        assert not ledger.of_claim(f"uid-{name}")
        if not prepare:
            continue
        pod = using("user", name, **{container: sorted(named) for container, named in uses.items()})
        claim = decode_claim(body(claim_object(name, *devices, cores_stated=cores_stated, pods=[pod])))
        groups = groups_of(ref(name), claim, {pod.uid: pod}, ())
        wanted = wanted_by(uses, {request.name for request in claim.requests})
        mixed = any(one & other and one != other for one, other in combinations(wanted, 2))
        assert isinstance(groups, Refusal) is mixed
        if isinstance(groups, Refusal):
            continue
        granted, planned = ledger, None
        for group in groups:
            planned = plan_group(ref(name), claim, group, ClaimNode(SECRET, BOOT, NODE, SHARES, INVENTORY, granted, Abilities(), {}))
            if not isinstance(planned, Planned):
                break
            granted = granted.granting(planned.grant, INVENTORY, SHARES)
            check_device_sums(granted)
        if isinstance(planned, Planned):
            ledger = granted
            grants = ledger.of_claim(f"uid-{name}")
            check_parts(grants, devices)
            for container, used in zip(uses, wanted, strict=True):
                assert sum(container in users_in(grant, pod) for grant in grants) == bool(used)
