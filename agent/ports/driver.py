# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver: GPUs, their processes and events, and the memory limits of control groups."""

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from agent.core.cgroups import ContainerRef
from agent.core.inventory import DeviceEvent, DriverReading, OverdueCall
from agent.core.overhead import ProcessList
from aliquot.contract.model import Link


class Driver(Protocol):
    """The NVIDIA driver. Every call may raise DriverError, DriverMissingError or DriverTimeoutError. No call blocks the event loop."""

    async def read(self) -> DriverReading:
        """Read the facts and the health of all GPUs. A GPU with a call that has not returned is skipped and counts as silent."""
        ...

    async def events(self) -> Sequence[DeviceEvent]:
        """Return what GPUs reported since the last call. Does not wait, not even for another call that hangs."""
        ...

    async def links(self) -> Sequence[Link]:
        """Read the links between the GPUs that answered the last ``read``.

        Raises DriverError before the first ``read`` and after ``restart``, until the next.
        """
        ...

    async def processes(self) -> ProcessList:
        """List the processes on the GPUs that the last ``read`` found. Processes without a known use are left out.

        Raises DriverError before the first ``read`` and after ``restart``, until the next.
        """
        ...

    async def busy(self, device_uuids: Set[str], lookback_seconds: float) -> Mapping[str, Mapping[int, float]]:
        """Return the fraction of the last seconds in which kernels of each process ran, by device UUID and pid.

        Idle processes are missing, and so are GPUs that do not report this or did not answer. Processes that have just ended may be there.
        Raises DriverError as ``processes``.
        """
        ...

    async def restart(self) -> None:
        """Leave the driver; the next ``read`` enters it again. A GPU that was reset is visible only in a new session."""
        ...

    async def keep_out(self, reason: str) -> None:
        """Leave the driver and stay out until called with an empty reason. Meanwhile every call raises DriverLeftError with the reason.

        A reset of a GPU, and a change of its MIG mode that needs a reset, work only while no process has the GPU open.
        """
        ...

    async def found_in_new_session(self) -> Set[str]:
        """Return the UUIDs of the GPUs that answer in a new session. May take a minute."""
        ...

    def overdue(self) -> Sequence[OverdueCall]:
        """Return the calls that have not returned in time. For any thread; raises no error."""
        ...


class CgroupLimits(Protocol):
    """The driver's own memory limits. Calls raise what ``Driver`` raises."""

    async def limit_bytes(self, device_uuid: str, cgroup: str) -> int | None:
        """Return how much of a GPU's memory the processes of a cgroup may use; None without a limit."""
        ...

    async def set_limit(self, device_uuid: str, cgroup: str, limit_bytes: int) -> None:
        """Set the memory limit of a cgroup's processes."""
        ...


class Cgroups(Protocol):
    """The host's cgroups."""

    def of_container(self, container: ContainerRef) -> str | None:
        """Return the directory of a container's cgroup; None when it does not exist."""
        ...
