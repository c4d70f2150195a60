# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.borrowing import MOST_PERCENT, Tenant, ceilings, observed
from agent.core.region_layout import ComputeCounters

PERIOD_NS = 100_000_000


def weight(entitled: int, used: float = 0.0, *, throttled: bool = False) -> Tenant:
    return Tenant(entitled, True, used, throttled)


def hard(entitled: int, used: float = 0.0, *, throttled: bool = False) -> Tenant:
    return Tenant(entitled, False, used, throttled)


def greedy(entitled: int) -> Tenant:
    return weight(entitled, entitled, throttled=True)


def other(used: float = 0.0, *, throttled: bool = False) -> Tenant:
    """A tenant without requested cores."""
    return Tenant(0, False, used, throttled)


class TestCeilingsWithoutRequestedCores:
    def test_no_limit_while_nothing_else_works(self):
        assert ceilings({"a": other(), "b": hard(90)}) == {"a": 0}
        assert ceilings({"a": other(), "b": other()}) == {"a": 0, "b": 0}

    def test_throttled_neighbour_leaves_what_it_did_not_reserve(self):
        assert ceilings({"a": other(), "b": hard(90, 50.0, throttled=True)}) == {"a": 10}
        assert ceilings({"a": other(), "b": hard(60, 60.0, throttled=True), "c": weight(30, 30.0)}) == {"a": 10, "c": 40}

    def test_neighbour_held_back_grows_to_its_reservation_in_few_periods(self):
        used, periods = 50.0, 0
        while used < 89:
            used, periods = 100 - ceilings({"a": other(), "b": hard(90, used)})["a"], periods + 1
        assert periods <= 3

    def test_what_a_working_neighbour_does_not_want_is_free(self):
        assert ceilings({"a": other(), "b": hard(90, 20.0)}) == {"a": 70}

    def test_several_share_what_is_left_equally(self):
        busy = hard(80, 80.0, throttled=True)
        assert ceilings({"a": other(10.0), "b": other(10.0), "c": busy}) == {"a": 10, "b": 10}
        assert ceilings({"a": other(10.0), "b": other(), "c": busy}) == {"a": 20, "b": 20}

    def test_nothing_left_is_one_percent(self):
        assert ceilings({"a": other(), "b": hard(100, 99.0, throttled=True)}) == {"a": 1}


class TestCeilings:
    def test_alone_it_may_use_the_whole_device(self):
        assert ceilings({"a": greedy(30)}) == {"a": MOST_PERCENT}

    def test_an_idle_tenant_lends_and_keeps_its_entitlement(self):
        assert ceilings({"a": greedy(30), "b": weight(70)}) == {"a": MOST_PERCENT, "b": 70}

    def test_busy_device_is_divided_by_weight(self):
        assert ceilings({"a": greedy(30), "b": greedy(70)}) == {"a": 30, "b": 70}
        assert ceilings({"a": greedy(20), "b": greedy(60)}) == {"a": 25, "b": 75}

    def test_compute_left_by_satisfied_tenant_goes_to_others(self):
        assert ceilings({"a": greedy(20), "b": greedy(20), "c": weight(60, 15.0)}) == {"a": 40, "b": 40, "c": 60}

    def test_memory_held_back_by_ceiling_is_lent_only_while_unused(self):
        assert ceilings({"a": greedy(30), "c": hard(50)})["a"] == MOST_PERCENT
        assert ceilings({"a": greedy(30), "c": hard(50, 20.0)})["a"] == 75
        assert ceilings({"a": greedy(30), "c": hard(50, 50.0, throttled=True)})["a"] == 50

    def test_requested_ceilings_are_not_changed(self):
        assert "c" not in ceilings({"a": greedy(30), "c": hard(50)})

    def test_woken_tenant_has_its_entitlement_after_one_period(self):
        woken = observed(weight(70), ComputeCounters(0, 0), ComputeCounters(PERIOD_NS // 2, 5), PERIOD_NS)
        assert ceilings({"a": greedy(30), "b": woken}) == {"a": 30, "b": 70}

    @given(
        st.dictionaries(
            st.text(min_size=1, max_size=3),
            st.builds(Tenant, st.integers(1, 100), st.booleans(), st.floats(0, 100), st.booleans()),
            max_size=6,
        )
    )
    def test_entitlement_is_kept_and_loans_never_exceed_total(self, tenants):
        if sum(tenant.entitled_percent for tenant in tenants.values()) > 100:  # the ledger admits no such device
            return
        found = ceilings(tenants)
        assert found.keys() == {name for name, tenant in tenants.items() if tenant.borrows}
        assert all(min(tenants[name].entitled_percent, MOST_PERCENT) <= percent <= MOST_PERCENT for name, percent in found.items())
        thirsty = [name for name in found if tenants[name].throttled]
        held = sum(tenant.wanted_percent for tenant in tenants.values() if not tenant.borrows)
        assert sum(found[name] for name in thirsty) <= 100 - held + 1e-6


class TestObserved:
    def test_use_is_paid_time_smoothed_over_periods(self):
        once = observed(weight(50), ComputeCounters(0, 0), ComputeCounters(PERIOD_NS // 2, 0), PERIOD_NS)
        assert (once.used_percent, once.throttled) == (25.0, False)
        assert observed(once, ComputeCounters(0, 0), ComputeCounters(PERIOD_NS // 2, 0), PERIOD_NS).used_percent == 37.5

    def test_it_is_throttled_when_it_starved_since(self):
        assert observed(weight(50), ComputeCounters(0, 3), ComputeCounters(0, 9), PERIOD_NS).throttled
        assert not observed(weight(50), ComputeCounters(0, 9), ComputeCounters(0, 9), PERIOD_NS).throttled

    def test_a_restarted_container_counts_from_nothing(self):
        assert observed(weight(50), ComputeCounters(10**12, 0), ComputeCounters(0, 0), PERIOD_NS).used_percent == 0.0

    @pytest.mark.parametrize("paid", [-(2**63), 2**64 - 1])
    def test_invalid_counters_in_region_stay_within_bounds(self, paid):
        found = observed(weight(50), ComputeCounters(0, 0), ComputeCounters(paid, 0), PERIOD_NS)
        assert 0 <= found.used_percent <= 100

    def test_a_tenant_that_stops_is_idle_after_a_while(self):
        tenant = weight(50, 100.0)
        for _ in range(10):
            tenant = observed(tenant, ComputeCounters(7, 7), ComputeCounters(7, 7), PERIOD_NS)
        assert not tenant.active
