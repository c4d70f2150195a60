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


class TestCeilings:
    def test_alone_it_may_use_the_whole_device(self):
        assert ceilings({"a": greedy(30)}) == {"a": MOST_PERCENT}

    def test_an_idle_tenant_lends_and_keeps_its_entitlement(self):
        assert ceilings({"a": greedy(30), "b": weight(70)}) == {"a": MOST_PERCENT, "b": 70}

    def test_contended_the_device_goes_by_weight(self):
        assert ceilings({"a": greedy(30), "b": greedy(70)}) == {"a": 30, "b": 70}
        assert ceilings({"a": greedy(20), "b": greedy(60)}) == {"a": 25, "b": 75}

    def test_what_a_satisfied_tenant_leaves_goes_to_the_thirsty(self):
        assert ceilings({"a": greedy(20), "b": greedy(20), "c": weight(60, 15.0)}) == {"a": 40, "b": 40, "c": 60}

    def test_what_a_ceiling_holds_back_is_lent_only_while_it_is_not_used(self):
        assert ceilings({"a": greedy(30), "c": hard(50)})["a"] == MOST_PERCENT
        assert ceilings({"a": greedy(30), "c": hard(50, 20.0)})["a"] == 75
        assert ceilings({"a": greedy(30), "c": hard(50, 50.0, throttled=True)})["a"] == 50

    def test_ceilings_that_were_asked_for_are_not_touched(self):
        assert "c" not in ceilings({"a": greedy(30), "c": hard(50)})

    def test_a_tenant_that_wakes_is_back_at_its_entitlement_after_one_look(self):
        woken = observed(weight(70), ComputeCounters(0, 0), ComputeCounters(PERIOD_NS // 2, 5), PERIOD_NS)
        assert ceilings({"a": greedy(30), "b": woken}) == {"a": 30, "b": 70}

    @given(
        st.dictionaries(
            st.text(min_size=1, max_size=3),
            st.builds(Tenant, st.integers(1, 100), st.booleans(), st.floats(0, 100), st.booleans()),
            max_size=6,
        )
    )
    def test_nobody_falls_below_its_entitlement_and_the_thirsty_never_get_more_than_there_is(self, tenants):
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
    def test_nonsense_in_the_region_stays_within_bounds(self, paid):
        found = observed(weight(50), ComputeCounters(0, 0), ComputeCounters(paid, 0), PERIOD_NS)
        assert 0 <= found.used_percent <= 100

    def test_a_tenant_that_stops_is_idle_after_a_while(self):
        tenant = weight(50, 100.0)
        for _ in range(10):
            tenant = observed(tenant, ComputeCounters(7, 7), ComputeCounters(7, 7), PERIOD_NS)
        assert not tenant.active
