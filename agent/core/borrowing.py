"""How containers in weight mode share a device: who wants more takes what others leave idle, in proportion to the weights.

A tenant's weight is the cores it asked for, and its ceiling never falls below them: an idle tenant starts at once with what it is
entitled to, and those who borrowed meanwhile are back at their part one period later. A ceiling that was asked for as a ceiling is
nobody's to change; what such a tenant does not use can be borrowed all the same. A ceiling stays below the whole device, because
the shim counts GPU time only where there is one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agent.core.region_layout import ComputeCounters
from proto.units import WHOLE_GPU_PERCENT

MOST_PERCENT = WHOLE_GPU_PERCENT - 1
HEADROOM_PERCENT = 5.0
"""What a tenant that is not held back may want more than it used lately."""
ACTIVE_PERCENT = 0.5
SMOOTHING = 0.5
"""Weight of the last period in a tenant's use: kernels longer than a period must not look like pauses."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One container on one device."""

    entitled_percent: int
    borrows: bool
    """Weight mode; else ``entitled_percent`` is a ceiling."""
    used_percent: float = 0.0
    throttled: bool = False
    """It had to wait for its share in the last period."""

    @property
    def active(self) -> bool:
        """Whether it wants the device now."""
        return self.throttled or self.used_percent >= ACTIVE_PERCENT

    @property
    def wanted_percent(self) -> float:
        """What it would use if it were alone, as far as can be told."""
        most = WHOLE_GPU_PERCENT if self.borrows else self.entitled_percent
        if self.throttled:
            return float(most)
        return min(most, self.used_percent + HEADROOM_PERCENT) if self.active else 0.0


def observed(tenant: Tenant, earlier: ComputeCounters, later: ComputeCounters, elapsed_ns: int) -> Tenant:
    """Return the tenant after one more period. The counters are its own word; those of a container that restarted begin anew."""
    paid_percent = WHOLE_GPU_PERCENT * max(0, later.paid_ns - earlier.paid_ns) / elapsed_ns
    used = tenant.used_percent + SMOOTHING * (min(paid_percent, WHOLE_GPU_PERCENT) - tenant.used_percent)
    return replace(tenant, used_percent=used, throttled=later.starved_at_ns != earlier.starved_at_ns)


def ceilings(tenants: Mapping[str, Tenant]) -> Mapping[str, int]:
    """Return the ceiling, in percent, of every tenant in weight mode on one device; tenants are named as the caller likes."""
    free = WHOLE_GPU_PERCENT - sum(tenant.wanted_percent for tenant in tenants.values() if not tenant.borrows)
    borrowers = {name: tenant for name, tenant in tenants.items() if tenant.borrows}
    active = {name: tenant for name, tenant in borrowers.items() if tenant.active}
    shares = _filled(max(0.0, free), active)
    return {name: min(MOST_PERCENT, max(1, tenant.entitled_percent, int(shares.get(name, 0.0)))) for name, tenant in borrowers.items()}


def _filled(free: float, active: Mapping[str, Tenant]) -> Mapping[str, float]:
    """Pour what is free into the active tenants by weight, each up to what it wants; spread what nobody wants by weight on top."""
    shares: dict[str, float] = {}
    thirsty = dict(active)
    while thirsty:
        per_weight = free / _weight(thirsty.values())
        content = {name: tenant for name, tenant in thirsty.items() if tenant.wanted_percent <= per_weight * tenant.entitled_percent}
        if not content:
            return shares | {name: per_weight * tenant.entitled_percent for name, tenant in thirsty.items()}
        for name, tenant in content.items():
            del thirsty[name]
            shares[name] = tenant.wanted_percent
            free -= tenant.wanted_percent
    left_per_weight = free / max(1, _weight(active.values()))
    return {name: share + left_per_weight * active[name].entitled_percent for name, share in shares.items()}


def _weight(tenants: Iterable[Tenant]) -> int:
    return sum(tenant.entitled_percent for tenant in tenants)
