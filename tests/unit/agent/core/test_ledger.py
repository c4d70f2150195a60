# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from agent.core.ledger import GRANT_ROWS, Ledger, claims_trouble, ids_trouble
from agent.errors import StorageError
from aliquot.contract.model import Allocation
from aliquot.placement.device import AccountingError
from tests.unit.agent.builders import VGPU, gpu, grant, ids, instance, inventory, pod, share
from tests.unit.agent.claim_builders import claim_grant

INVENTORY = inventory(gpu(0, mib=1000), gpu(1, mib=1000), gpu(2, mig=[instance(2, 0)]))


def ledger(*grants) -> Ledger:
    return Ledger().adopting(grants)


class TestGranting:
    def test_a_grant_that_fits_is_entered(self):
        one = grant(ids("0:0"), share(0, 600))
        assert ledger(grant(ids("0:1"), share(0, 400))).granting(one, INVENTORY, 16).grants[one.grant_id] == one

    @pytest.mark.parametrize(
        ("shares_per_gpu", "given"),
        [
            pytest.param(16, share(0, 401), id="memory"),
            pytest.param(16, share(0, 100, cores=51), id="cores"),
            pytest.param(1, share(0, 100), id="shares"),
            pytest.param(16, share(7, 100), id="a device that is not there"),
        ],
    )
    def test_grant_above_device_capacity_is_planner_bug(self, shares_per_gpu, given):
        before = ledger(grant(ids("0:0"), share(0, 600, cores=50)))
        with pytest.raises(AccountingError):
            before.granting(grant(ids("0:1"), given), INVENTORY, shares_per_gpu)

    def test_a_mig_instance_is_granted_once(self):
        before = ledger(grant(frozenset({"MIG-2-0"}), share("MIG-2-0", 100), resource="nvidia.com/mig-1g.10gb"))
        with pytest.raises(AccountingError):
            before.granting(grant(frozenset({"MIG-x"}), share("MIG-2-0", 100)), INVENTORY, 16)

    def test_a_grant_replaces_the_one_of_the_same_id(self):
        before = ledger(grant(ids("0:0"), share(0, 900)))
        after = before.granting(grant(ids("0:0"), share(0, 1000)), INVENTORY, 16)
        assert [one.shares for one in after.grants.values()] == [(share(0, 1000),)]

    def test_existing_promise_is_renewed_when_fewer_shares_are_allowed(self):
        one, other = grant(ids("0:0"), share(0, 600)), grant(ids("0:1"), share(0, 400))
        assert ledger(one, other).granting(one, INVENTORY, 1).grants == {one.grant_id: one, other.grant_id: other}
        with pytest.raises(AccountingError):
            ledger(one, other).granting(grant(ids("0:0"), share(0, 500)), INVENTORY, 1)

    def test_the_ledger_before_is_unchanged(self):
        before = ledger()
        before.granting(grant(ids("0:0")), INVENTORY, 16)
        assert not before.grants


def test_released_grants_are_removed():
    one, other = grant(ids("0:0")), grant(ids("0:1"))
    assert list(ledger(one, other).releasing([one.grant_id]).grants) == [other.grant_id]


def test_grants_that_share_an_id_are_found():
    one, other = grant(ids("0:0", "1:0")), grant(ids("0:1"))
    assert ledger(one, other).holding_any(VGPU, ids("1:0", "1:5")) == (one,)
    assert ledger(one, other).held_ids(VGPU) == ids("0:0", "1:0", "0:1")


def test_holders_are_named_with_what_they_hold():
    held = ledger(grant(ids("0:0"), share(0, 2048), of=pod("train")), claim_grant("shared", share(0, 1024), of=pod("first")))
    assert held.holders_on("GPU-0") == ("default/train/main 2 GiB", "claim default/shared 1 GiB")


class TestRows:
    ROW = GRANT_ROWS.encode(grant(ids("0:0", "1:0"), share(0, 100, 50), share(1, 100)))

    def test_a_row_comes_back_as_it_was(self):
        assert GRANT_ROWS.decode(self.ROW) == grant(ids("0:0", "1:0"), share(0, 100, 50), share(1, 100))

    @pytest.mark.parametrize("length", [0, 1, len(ROW) // 2, len(ROW) - 3])
    def test_incomplete_row_is_detected(self, length):
        with pytest.raises(StorageError):
            GRANT_ROWS.decode(self.ROW[:length])

    def test_a_changed_amount_is_recognised(self):
        with pytest.raises(StorageError, match="digest"):
            GRANT_ROWS.decode(self.ROW.replace(b'"memory_bytes":104857600', b'"memory_bytes":104857601'))

    def test_bytes_that_are_no_text_are_recognised(self):
        with pytest.raises(StorageError, match="not a ledger row"):
            GRANT_ROWS.decode(self.ROW.replace(b'"sha256":"', b'"sha256":"\xff'))

    def test_a_newer_version_is_named(self):
        row = msgspec.json.decode(self.ROW)
        with pytest.raises(StorageError, match="version 1, found version 2"):
            GRANT_ROWS.decode(msgspec.json.encode({**row, "version": 2}))


def test_each_interface_waits_for_grants_of_the_other():
    of_claim, with_ids = claim_grant("train", share(0)), grant(ids("0:0"))
    plugin, planned = Allocation.PLUGIN, Allocation.PLANNED
    assert (
        claims_trouble(Ledger({with_ids.grant_id: with_ids}), plugin) == ids_trouble(Ledger({of_claim.grant_id: of_claim}), planned) == ""
    )
    both = Ledger({one.grant_id: one for one in (of_claim, with_ids)})
    assert "allocation: plugin waits until the last of 1 prepared ResourceClaims" in claims_trouble(both, plugin)
    assert "allocation: planned waits until the last of 1 containers with device IDs" in ids_trouble(both, planned)


def test_node_with_both_interfaces_waits_for_neither():
    ledger = Ledger({one.grant_id: one for one in (claim_grant("train", share(0)), grant(ids("0:0")))})
    assert claims_trouble(ledger, Allocation.BOTH) == ids_trouble(ledger, Allocation.BOTH) == ""


def test_row_of_claim_survives_encoding_and_rows_without_claim_are_read():
    for one in (claim_grant("train", share(0)), grant(ids("0:0"))):
        assert GRANT_ROWS.decode(GRANT_ROWS.encode(one)) == one


@pytest.mark.parametrize(
    ("named", "found"),
    [
        pytest.param({"GPU-1"}, ["GPU-1"], id="one GPU"),
        pytest.param(set(), [], id="none"),
        pytest.param({"GPU-1", "MIG-2-0"}, ["GPU-0", "GPU-1", "GPU-2"], id="an instance may be on any GPU"),
        pytest.param({"GPU-7"}, ["GPU-0", "GPU-1", "GPU-2"], id="unknown GPU"),
    ],
)
def test_states_of_named_gpus_equal_those_of_all(named, found):
    some = ledger(grant(ids("0:0"), share(0, 600, cores=50)), grant(ids("0:1"), share(1, 100)))
    states = some.states(INVENTORY, 16, named)
    assert [state.device.uuid for state in states] == found
    assert set(states) <= set(some.states(INVENTORY, 16))
