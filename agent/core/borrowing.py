# SPDX-License-Identifier: Apache-2.0
"""Computes how containers share a device: busy tenants in weight mode borrow what idle ones leave, in proportion to their weights, and
containers that requested no cores use what the others do not.

A tenant's weight is the cores it requested, and its SM limit never falls below them. So an idle tenant starts at once with its own cores,
and one period later the borrowers are back at theirs. The limit of a tenant in limit mode never changes, but its unused compute can be
borrowed. A limit stays below the whole device, because the shim counts GPU time only under a limit.

A tenant without requested cores has no limit while no other tenant of the device works. Otherwise it gets an equal part of what those do
not want, at least one percent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agent.core.region_layout import ComputeCounters
from aliquot.contract.units import WHOLE_GPU_PERCENT

MOST_PERCENT = WHOLE_GPU_PERCENT - 1
HEADROOM_PERCENT = 5.0
"""A tenant that is not throttled may want this much more than its recent use."""
GROWTH = 1.25
"""A tenant that shares the device with one without a limit may want so many times its recent use, because that one holds it back."""
NO_LIMIT = 0
"""As an SM limit."""
ACTIVE_PERCENT = 0.5
SMOOTHING = 0.5
"""Weight of the last period in a tenant's use: kernels longer than a period must not look like pauses."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container on one device."""

    entitled_percent: int
    """The cores that it requested; 0 if it requested none."""
    borrows: bool
    """True in weight mode; else ``entitled_percent`` is a fixed limit, or there is none."""
    used_percent: float = 0.0
    throttled: bool = False
    """Whether it waited for compute in the last period."""

    @property
    def active(self) -> bool:
        """Whether it wants the device now."""
        return self.throttled or self.used_percent >= ACTIVE_PERCENT

    @property
    def wanted_percent(self) -> float:
        """An estimate of what it would use alone on the device."""
        most = WHOLE_GPU_PERCENT if self.borrows else self.entitled_percent
        if self.throttled:
            return float(most)
        return min(most, self.used_percent + HEADROOM_PERCENT) if self.active else 0.0

    @property
    def kept_percent(self) -> float:
        """The part of its entitlement that tenants without requested cores must leave to it now."""
        if self.throttled:
            return float(self.entitled_percent)
        return min(float(self.entitled_percent), self.used_percent * GROWTH + HEADROOM_PERCENT) if self.active else 0.0


def observed(tenant: Tenant, earlier: ComputeCounters, later: ComputeCounters, elapsed_ns: int) -> Tenant:
    """Return the tenant after one more period.

    The tenant writes its counters itself, so they are not trusted. They restart from zero with the container.
    """
    paid_percent = WHOLE_GPU_PERCENT * max(0, later.paid_ns - earlier.paid_ns) / elapsed_ns
    used = tenant.used_percent + SMOOTHING * (min(paid_percent, WHOLE_GPU_PERCENT) - tenant.used_percent)
    return replace(tenant, used_percent=used, throttled=later.starved_at_ns != earlier.starved_at_ns)


def ceilings(tenants: Mapping[str, Tenant]) -> Mapping[str, int]:
    """Return the SM limit, in percent, of every tenant on one device that has a moving limit. The caller chooses the names of tenants."""
    with_cores = {name: one for name, one in tenants.items() if one.entitled_percent}
    return {**_of_borrowers(with_cores), **_of_others(tenants)}


def _of_others(tenants: Mapping[str, Tenant]) -> Mapping[str, int]:
    """Return the SM limits of tenants without requested cores."""
    others = [name for name, tenant in tenants.items() if not tenant.entitled_percent]
    kept = sum(tenant.kept_percent for tenant in tenants.values())
    working = max(1, sum(tenants[name].active for name in others))
    left = max(1, int((WHOLE_GPU_PERCENT - kept) / working))
    return {name: min(MOST_PERCENT, left) if kept else NO_LIMIT for name in others}


def _of_borrowers(tenants: Mapping[str, Tenant]) -> Mapping[str, int]:
    free = WHOLE_GPU_PERCENT - sum(tenant.wanted_percent for tenant in tenants.values() if not tenant.borrows)
    borrowers = {name: tenant for name, tenant in tenants.items() if tenant.borrows}
    active = {name: tenant for name, tenant in borrowers.items() if tenant.active}
    shares = _filled(max(0.0, free), active)
    return {name: min(MOST_PERCENT, max(1, tenant.entitled_percent, int(shares.get(name, 0.0)))) for name, tenant in borrowers.items()}


def _filled(free: float, active: Mapping[str, Tenant]) -> Mapping[str, float]:
    """Distribute free compute over the active tenants by weight, each up to what it wants; then add the rest to all of them by weight."""
    shares: dict[str, float] = {}
    unsatisfied = dict(active)
    while unsatisfied:
        per_weight = free / _weight(unsatisfied.values())
        satisfied = {name: tenant for name, tenant in unsatisfied.items() if tenant.wanted_percent <= per_weight * tenant.entitled_percent}
        if not satisfied:
            return shares | {name: per_weight * tenant.entitled_percent for name, tenant in unsatisfied.items()}
        # what satisfied tenants leave raises the part of the others in the next round
        for name, tenant in satisfied.items():
            del unsatisfied[name]
            shares[name] = tenant.wanted_percent
            free -= tenant.wanted_percent
    left_per_weight = free / max(1, _weight(active.values()))
    return {name: share + left_per_weight * active[name].entitled_percent for name, share in shares.items()}


def _weight(tenants: Iterable[Tenant]) -> int:
    return sum(tenant.entitled_percent for tenant in tenants)
