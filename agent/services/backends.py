# SPDX-License-Identifier: Apache-2.0
"""Prepares what enforces a grant without the shim: MIG instances, MPS daemons, the driver's own limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent.core.backends import Abilities
from agent.core.cdi import NO_EDITS, Edits, merge_edits
from agent.core.driver_limits import limit_edits
from agent.core.ledger import Grant
from agent.services.mig_controller import MigController
from agent.services.mps_controller import MpsController
from aliquot.contract.features import Gate
from aliquot.contract.model import Isolation, MigInstance


@dataclass(frozen=True, slots=True)
class Provision:
    """What a container gets in addition to the devices of its shares."""

    instances: Mapping[str, MigInstance] = field(default_factory=dict)
    """The instances at the places that its shares name."""
    edits: Edits = field(default_factory=lambda: NO_EDITS)


class Backends:
    """All backends of this node."""

    def __init__(self, abilities: Abilities, mig: MigController, mps: MpsController, limits_hook: str) -> None:
        """Args: abilities: except MPS. limits_hook: NVIDIA's hook that sets the driver's memory limits."""
        self._abilities = abilities
        self._mig = mig
        self._mps = mps
        self._limits_hook = limits_hook

    @property
    def abilities(self) -> Abilities:
        """What this node can enforce now; aliquot-mps may start and stop at any time."""
        return replace(self._abilities, without_mps=self._abilities.gates.closed(Gate.MPS_ISOLATION) or self._mps.trouble)

    async def provide(self, grant: Grant) -> Provision:
        """Prepare what the grant needs; may be called again. Raises DriverError, MpsError, StorageError."""
        match grant.backend:
            case Isolation.MIG | Isolation.SHIM:  # a share of a GPU in MIG mode lies in an instance too
                return Provision(await self._mig.ensure(grant))
            case Isolation.MPS:
                return Provision(edits=merge_edits([await self._mps.ensure(grant)]))
            case Isolation.DRIVER:
                return Provision(edits=limit_edits(grant.shares, self._limits_hook))
            case Isolation.EXCLUSIVE:
                return Provision()
