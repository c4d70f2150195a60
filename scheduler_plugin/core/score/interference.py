# SPDX-License-Identifier: Apache-2.0
"""How much slower a pod is expected to be beside the pods that use a GPU already: the scalar specification of the columnar form.

Pods on one GPU share its multiprocessors and the bandwidth of its memory. The loss of speed grows with what all of them use of both, in
sum, above a knee. Knees and slopes are a least-squares fit to measured pairs of training jobs; tests/bench/bench_interference.py makes it
again, and rates the choice of partners on models that were left out of the fit.

The loss counts that the other pods cause: that of all pods together less that of the pod alone. So an empty GPU costs nothing, and neither
does one with idle pods. The amounts are whole numbers, so that both forms agree exactly.
"""

from dataclasses import dataclass
from typing import Final

from aliquot.contract.model import IDLE, Policy, Utilization
from aliquot.placement.demand import PPM

SM_KNEE_PERCENT: Final = 35
SM_SLOPE_PPM: Final = 890
"""Loss of speed for each percent of the multiprocessors above the knee."""
DRAM_KNEE_PERCENT: Final = 70
DRAM_SLOPE_PPM: Final = 4300
"""Loss of speed for each percent of the memory's bandwidth above the knee."""

MILLI: Final = 1000
_UNITS: Final = {Policy.FRAG: 16}
"""How much of a device's cost the weight 1 is worth for a full loss of speed: as much as it is worth between nodes. Fragmentation counts
there as a part of 16 GPUs, the free amounts of the other policies as a part of 3."""
_OTHER_UNITS: Final = 3
_MAX_FACTOR: Final = 1_000_000
"""Costs of devices must stay below 2^33: the columnar form packs other numbers beside them."""


def loss_ppm(used: Utilization) -> int:
    """Return the expected loss of speed of pods that use this much of one GPU in sum, in parts per million; not limited to a whole."""
    sm, dram = max(0, used.sm_percent - SM_KNEE_PERCENT), max(0, used.dram_percent - DRAM_KNEE_PERCENT)
    return SM_SLOPE_PPM * sm + DRAM_SLOPE_PPM * dram


@dataclass(frozen=True, slots=True)
class Aversion:
    """How much a pod avoids GPUs that others use."""

    own: Utilization = IDLE
    """What the pod uses of each of its GPUs."""
    factor_milli: int = 0
    """The cost of a full loss of speed, in thousandths of a device."""

    @classmethod
    def of(cls, own: Utilization, weight: float, policy: Policy) -> "Aversion":
        """Return the aversion by the weight of the term ``interference``."""
        factor = round(weight * _UNITS.get(policy, _OTHER_UNITS) * MILLI)
        return cls(own, max(-_MAX_FACTOR, min(_MAX_FACTOR, factor)))

    def slowdown_ppm(self, others: Utilization) -> int:
        """Return the expected loss of speed because of pods that use this much in sum."""
        together = Utilization(self.own.sm_percent + others.sm_percent, self.own.dram_percent + others.dram_percent)
        return min(PPM, loss_ppm(together) - loss_ppm(self.own))

    def cost_ppm(self, slowdown_ppm: int) -> int:
        """Return ``DeviceState.aversion_ppm`` for a loss of speed."""
        return self.factor_milli * slowdown_ppm // MILLI


NO_AVERSION: Final = Aversion()
