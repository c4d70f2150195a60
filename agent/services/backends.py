"""Makes ready what enforces a grant, where that is not the shim: MIG instances, MPS daemons, the driver's own limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent.core.backends import Abilities
from agent.core.cdi import NO_EDITS, Edits, merge_edits
from agent.core.driver_limits import limit_edits
from agent.core.ledger import Grant
from agent.services.mig_keeper import MigKeeper
from agent.services.mps_keeper import MpsKeeper
from proto.model import Isolation, MigInstance


@dataclass(frozen=True, slots=True)
class Provision:
    """What a container is given beside the devices of its shares."""

    instances: Mapping[str, MigInstance] = field(default_factory=dict)
    """The instances at the places that its shares name."""
    edits: Edits = field(default_factory=lambda: NO_EDITS)


class Backends:
    """All backends of this node."""

    def __init__(self, abilities: Abilities, mig: MigKeeper, mps: MpsKeeper, limits_hook: str) -> None:
        """Args: abilities: but for MPS. limits_hook: NVIDIA's hook that applies the driver's memory limits."""
        self._abilities = abilities
        self._mig = mig
        self._mps = mps
        self._limits_hook = limits_hook

    @property
    def abilities(self) -> Abilities:
        """What this node can enforce now: aliquot-mps may come and go."""
        return replace(self._abilities, without_mps=self._mps.trouble)

    async def provide(self, grant: Grant) -> Provision:
        """Make ready what the grant needs; does nothing twice. Raises DriverError, MpsError, StorageError."""
        match grant.backend:
            case Isolation.MIG:
                return Provision(await self._mig.ensure(grant))
            case Isolation.MPS:
                return Provision(edits=merge_edits([await self._mps.ensure(grant)]))
            case Isolation.DRIVER:
                return Provision(edits=limit_edits(grant.shares, self._limits_hook))
            case Isolation.SHIM | Isolation.EXCLUSIVE:
                return Provision()
