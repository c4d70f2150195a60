# SPDX-License-Identifier: Apache-2.0
"""The features with their maturity, and the feature gates that alpha features are behind.

The setting ``featureGates`` of the agent opens gates: ``MpsIsolation=true,Pausing=true``, or ``AllAlpha=true`` for all. The scheduler has
the same setting, for the gates ``Consolidation``, ``Backfill``, ``GangsFromOwners``, ``AdmissionCheck``, ``MaxWait``, ``Interference`` and
``DynamicResourceAllocation``. A gate is closed by default. A beta or stable feature has no gate. Each component of the manifests that
installs an alpha feature opens its gate by an environment variable of its own, ``ALIQUOT_FEATURE_GATES_<COMPONENT>``. The setting comes
after these, so it can close a gate again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Maturity(StrEnum):
    """How far a feature can be relied on."""

    STABLE = "stable"
    """Its names and its behaviour change only with a new major version."""
    BETA = "beta"
    """Complete and on by default. A name may change in a minor version; the changelog says how to move."""
    ALPHA = "alpha"
    """Off by default, behind a feature gate. It may change or go in any version."""


class Gate(StrEnum):
    """Feature gates, one for each alpha feature."""

    DRIVER_ISOLATION = "DriverIsolation"
    MPS_ISOLATION = "MpsIsolation"
    MEMORY_BURST = "MemoryBurst"
    PAUSING = "Pausing"
    DYNAMIC_MIG = "DynamicMig"
    CONSOLIDATION = "Consolidation"
    ADMISSION_CHECK = "AdmissionCheck"
    MAX_WAIT = "MaxWait"
    BACKFILL = "Backfill"
    GANGS_FROM_OWNERS = "GangsFromOwners"
    INTERFERENCE = "Interference"
    DYNAMIC_RESOURCE_ALLOCATION = "DynamicResourceAllocation"


ALL_ALPHA: Final = "AllAlpha"
"""In the setting: all gates that it does not name."""
SETTING: Final = "featureGates"
COMPONENT_ENV_PREFIX: Final = "ALIQUOT_FEATURE_GATES_"
"""Environment variables with more gates, in the setting's form: those that components of the manifests open."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A row of the table."""

    name: str
    maturity: Maturity
    since: str
    """The first version that has the feature with this maturity."""
    gate: Gate | None = None


FEATURES: Final = (
    Feature("memory limit by the shim", Maturity.STABLE, "0.1"),
    Feature("resources `nvidia.com/vgpu` and `nvidia.com/vgpu-memory`, in MiB", Maturity.STABLE, "0.1"),
    Feature("agent: device plugin, ledger, metrics", Maturity.STABLE, "0.1"),
    Feature("scheduler extender", Maturity.STABLE, "0.1"),
    Feature("admission webhook", Maturity.STABLE, "0.1"),
    Feature("compute limit, `nvidia.com/vgpu-cores`", Maturity.BETA, "0.1"),
    Feature("MIG instances that exist", Maturity.BETA, "0.1"),
    Feature("words of HAMi, KAI, Run:ai, Volcano, vgpu-manager and NVIDIA, for migration", Maturity.BETA, "0.1"),
    Feature("memory as a percentage of the chosen GPU", Maturity.BETA, "0.1"),
    Feature("classes of work", Maturity.BETA, "0.1"),
    Feature("gangs", Maturity.BETA, "0.1"),
    Feature("preemption by GPU", Maturity.BETA, "0.1"),
    Feature("GPU health", Maturity.BETA, "0.1"),
    Feature("placement by topology and NUMA node", Maturity.BETA, "0.1"),
    Feature("isolation `driver`", Maturity.ALPHA, "0.1", Gate.DRIVER_ISOLATION),
    Feature("isolation `mps`", Maturity.ALPHA, "0.1", Gate.MPS_ISOLATION),
    Feature("memory burst, with time slots", Maturity.ALPHA, "0.1", Gate.MEMORY_BURST),
    Feature("pausing a container", Maturity.ALPHA, "0.1", Gate.PAUSING),
    Feature("MIG instances made on demand", Maturity.ALPHA, "0.1", Gate.DYNAMIC_MIG),
    Feature("consolidation", Maturity.ALPHA, "0.1", Gate.CONSOLIDATION),
    Feature("admission check for Kueue that holds GPUs", Maturity.ALPHA, "0.1", Gate.ADMISSION_CHECK),
    Feature("longest wait in Kueue by priority class", Maturity.ALPHA, "0.1", Gate.MAX_WAIT),
    Feature("room held for the pod that waits longest, and backfill", Maturity.ALPHA, "0.1", Gate.BACKFILL),
    Feature("gangs from owners and PodGroups", Maturity.ALPHA, "0.1", Gate.GANGS_FROM_OWNERS),
    Feature("partners on a GPU by measured use", Maturity.ALPHA, "0.1", Gate.INTERFERENCE),
    Feature("shares by ResourceClaims (DRA)", Maturity.ALPHA, "0.1", Gate.DYNAMIC_RESOURCE_ALLOCATION),
)


@dataclass(frozen=True, slots=True)
class FeatureGates:
    """Which gates are open."""

    opened: frozenset[Gate] = frozenset()

    def __contains__(self, gate: Gate) -> bool:
        return gate in self.opened

    def closed(self, gate: Gate, program: str = "agent") -> str:
        """Say why the feature behind a gate is not available, and what opens the gate; empty while it is open."""
        return "" if gate in self.opened else f"the alpha feature {gate} is off: set {SETTING}: {gate}=true for the {program} to use it"


ALL_OPEN: Final = FeatureGates(frozenset(Gate))


def with_components(setting: str, environ: Mapping[str, str]) -> str:
    """Return the setting with the gates that components open; those of the setting itself come last, so they count."""
    of_components = [environ[name] for name in sorted(environ) if name.startswith(COMPONENT_ENV_PREFIX)]
    return ",".join([*of_components, setting]).strip(",")


def parse_gates(text: str) -> FeatureGates:
    """Read a comma list of ``Gate=true`` and ``Gate=false``. A gate by its name beats ``AllAlpha``; of one name the last counts.

    Raises: ValueError with a sentence that names the known gates.
    """
    stated: dict[str, bool] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in (*Gate, ALL_ALPHA):
            raise ValueError(f"{name!r} is not a feature gate; known gates: {', '.join((*Gate, ALL_ALPHA))}")
        if value not in ("true", "false"):
            raise ValueError(f"{part!r} does not say whether the gate is open; write {name}=true or {name}=false")
        stated[name] = value == "true"
    every = stated.get(ALL_ALPHA, False)
    return FeatureGates(frozenset(gate for gate in Gate if stated.get(gate, every)))
