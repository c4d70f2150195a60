# SPDX-License-Identifier: Apache-2.0
"""The files of a grant: ledger row, limits, usage region and CDI spec."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agent.core.cdi import CapabilityNode, HostSpec
from agent.core.ledger import Grant
from agent.core.region_layout import ComputeCounters, Limits, RegionSnapshot
from agent.errors import StorageError


@dataclass(frozen=True, slots=True)
class LoadedGrants:
    """The ledger as found on disk, and the unreadable files that were set aside."""

    grants: tuple[Grant, ...]
    quarantined: tuple[str, ...]
    damaged: frozenset[str] = frozenset()
    """The grant ids of those files."""


class GrantStore(Protocol):
    """The ledger on disk, one file per grant. Calls raise StorageError."""

    def load(self) -> LoadedGrants:
        """Read all rows; set unreadable ones aside."""
        ...

    def write(self, grants: Sequence[Grant]) -> Mapping[str, StorageError]:
        """Write rows durably: after a crash each file has either the new row or the previous one.

        Returns: by grant id, why a row cannot be written. The others are on disk.
        """
        ...

    def read(self, grant_id: str) -> Grant | None:
        """Read one row; None when it is missing or damaged."""
        ...

    def ids(self) -> Sequence[str]:
        """Return the grant ids that have a row."""
        ...

    def remove(self, grant_id: str) -> None:
        """Remove a row, if it exists."""
        ...


@dataclass(frozen=True, slots=True)
class RegionView:
    """A usage region, and which of its processes have ended."""

    snapshot: RegionSnapshot
    dead: tuple[int, ...]
    """Indexes of slots that are in use by a process that has ended."""

    @property
    def live(self) -> bool:
        """Whether a process of the container runs."""
        return len(self.dead) < len(self.snapshot.slots)


class ContainerFiles(Protocol):
    """The limits and usage region of each grant. Calls raise StorageError."""

    def prepare(self, grant: Grant, limits: Limits, *, mounted: bool = False) -> None:
        """Write both files for a container that is about to start. A region that a process of its pod still uses is kept.

        Args: mounted: whether the container may run with these files mounted. Then they are changed in place, not replaced.
        """
        ...

    def copy_shim(self, grant_id: str, version: Path, names: Iterable[str]) -> Mapping[str, str]:
        """Copy libraries of a shim's version for one container, unless they are copied; return the paths of the copies, by name.

        With the preload library, also write the list that names it.
        """
        ...

    def add_spare(self) -> bool:
        """Make one copy of a library ahead, for a container that starts later; return False when there are enough."""
        ...

    def link_shim(self, grant_id: str, copy: str) -> None:
        """Link a copy of the preload library next to a grant's files; a reply of Allocate without CDI mounts it from there."""
        ...

    def linked(self, paths: Iterable[str]) -> Set[str]:
        """Return which of these directories are linked next to some grant's files."""
        ...

    def paths(self, grant_id: str) -> tuple[str, str]:
        """Return the paths of limits and region."""
        ...

    def copies(self) -> Sequence[Grant]:
        """Return the copies of ledger rows next to the files; they replace lost rows."""
        ...

    def damaged_copies(self) -> Set[str]:
        """Return the grant ids with a copy of the ledger row that cannot be read or is of another grant."""
        ...

    def region(self, grant_id: str) -> RegionView | None:
        """Read a usage region; None when it is missing, or a tenant has damaged it or made reading it slow."""
        ...

    def has_region(self, grant_id: str) -> bool:
        """Whether a usage region exists, valid or not."""
        ...

    def cut_region(self, grant_id: str) -> int:
        """Cut off what a tenant wrote after its usage region (``region_layout.REGION_BYTES_KEPT``); return how many bytes that was."""
        ...

    def limits(self, grant_id: str) -> Limits | None:
        """Read the current limits; None when the file is missing."""
        ...

    def amend_limits(self, grant_id: str, change: Callable[[Limits], Limits]) -> Limits:
        """Change the limits in place, unless ``change`` returns them unchanged; return the current limits."""
        ...

    def compute(self, grant_id: str) -> Sequence[ComputeCounters] | None:
        """Read the GPU time that was charged to the container, by device; None when ``region`` is None."""
        ...

    def store_host_pids(self, grant_id: str, pids: Mapping[int, int]) -> None:
        """Write the host pids of the container's processes into the region, by slot index."""
        ...

    def ids(self) -> Sequence[str]:
        """Return the grant ids that have files."""
        ...

    def remove(self, grant_id: str) -> None:
        """Remove the files of a grant."""
        ...


class CdiFiles(Protocol):
    """The CDI specs. Calls raise StorageError."""

    def host_spec(self, wanted: Collection[str] = ()) -> HostSpec | None:
        """Return the host's NVIDIA spec, with these devices if possible; None when the host has no such spec."""
        ...

    def one_look(self) -> AbstractContextManager[None]:
        """Look for the host's spec at most once inside, however often it is asked for. One thread asks."""
        ...

    def has_host_spec(self) -> bool:
        """Whether a file on this host has an NVIDIA spec."""
        ...

    def present_nodes(self) -> Sequence[str]:
        """Return the host's /dev/nvidia* nodes."""
        ...

    def capability_nodes(self, minor: int, gpu_instance_id: int, compute_instance_id: int) -> tuple[CapabilityNode, ...]:
        """Return the device nodes that grant access to one MIG instance."""
        ...

    def write(self, grant_id: str, spec: Mapping[str, object]) -> None:
        """Write the spec of a grant atomically: a runtime never reads a part of it."""
        ...

    def mentioned(self, paths: Iterable[str]) -> Set[str]:
        """Return which of these paths are named in the spec of a grant."""
        ...

    def digest(self, grant_id: str) -> str | None:
        """Return a digest of the spec of a grant; None when the file is missing or cannot be read."""
        ...

    def digest_of(self, spec: Mapping[str, object]) -> str:
        """Return the digest that this spec would have on disk."""
        ...

    def total_bytes(self) -> int:
        """Return the size of all specs that a runtime reads, of all programs."""
        ...

    def ids(self) -> Sequence[str]:
        """Return the grant ids that have a spec."""
        ...

    def remove(self, grant_id: str) -> None:
        """Remove the spec of a grant."""
        ...
