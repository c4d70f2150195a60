# SPDX-License-Identifier: Apache-2.0
"""The files that a container shares with the agent: ``<runtimeDir>/containers/<grant id>/`` with ``limits``, ``region``, a copy of the
grant and, where the shim is preloaded, ``ld.so.preload``. The loader opens that one for every program, so each container has its own.

The container writes ``region``, so it is untrusted. The agent reads it with pread and never maps it, because a tenant may truncate it.
``core.region_layout`` checks its content, and ``core.slow_regions`` bounds the cost of its locks. A starting container gets new files,
unless a process of its pod still holds a slot; then the mapped files stay and the limits change in place. The copy of the grant identifies
the owner of the files. It is written after them, and also restores a ledger row that was lost on disk.

Each container has its own copy of the shim's libraries too, so that a lease of its root on them delays no other container. The copies are
below ``stateDir``, because /run is often mounted ``noexec``: ``<grant id>.<library>``, all in one directory. A directory for each container
would make copies slower: ext4 puts each new directory into another group of blocks.
"""

import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

from agent.adapters.durable import list_directory, make_directory, names_in, remove_anything, remove_temporaries, write_over
from agent.adapters.regular_files import FLAGS, LIBRARY_BYTES_MAX, read_regular
from agent.adapters.spare_copies import COPY_MODE, SpareCopies
from agent.core import region_layout
from agent.core.cdi import PRELOAD_ARTEFACT, PRELOAD_LIST, PRELOAD_LIST_ARTEFACT, SHIM_LIBRARIES
from agent.core.ledger import GRANT_ROWS, Grant
from agent.core.region_layout import ComputeCounters, Geometry, Limits, RegionError
from agent.core.slow_regions import LOCK_BUDGET_SECONDS, Rest, rest_after
from agent.errors import StorageError
from agent.ports.grants import RegionView
from aliquot.file_cache import FileCache

logger = logging.getLogger(__name__)

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of 64-bit Linux, with its trailing padding."""
_GRANT_COPY = "grant.json"


class GrantFiles:
    """Implements ``ports.ContainerFiles``."""

    def __init__(self, directory: Path, monotonic: Callable[[], float] = time.monotonic, *, libraries: Path | None = None) -> None:
        """Args: libraries: the directory of the copies, where programs may be executed from; by default next to ``directory``."""
        self._directory = make_directory(directory, 0o700)
        self._libraries = libraries or directory.with_name(f"{directory.name}-libraries")
        remove_temporaries(self._libraries)
        self._spares = SpareCopies(self._libraries)
        self._monotonic = monotonic
        self._rests: dict[str, tuple[int, Rest]] = {}
        """By grant id: regions with a slow last reading, with their inodes. A later container has a region with another inode."""
        self._installed = FileCache(lambda path: read_regular(path, LIBRARY_BYTES_MAX))
        self._limits = FileCache(lambda path: region_layout.decode_limits(_read_limits(path), interrupted_too=True))

    def prepare(self, grant: Grant, limits: Limits, *, mounted: bool = False) -> None:
        """See ``ports.ContainerFiles``."""
        directory = self._directory / grant.grant_id
        is_new = not directory.exists()
        make_directory(directory, 0o700)
        before = _copy_in(directory)
        own = before is not None and before.owner_uid == grant.owner_uid
        if not own and not is_new:
            self._remove_shim(grant.grant_id)  # a process of that container may still hold them open, and take a lease later
        if own and self._may_be_mapped(grant.grant_id):
            _update_mapped_limits(directory / "limits", limits, grant)
        else:
            self._write_unmapped(grant.grant_id, limits, kept=own and mounted)
        write_over(f"{directory}/{_GRANT_COPY}", GRANT_ROWS.encode(grant), mode=0o600)

    def _write_unmapped(self, grant_id: str, limits: Limits, *, kept: bool) -> None:
        """Write limits and region of a container without processes, as new inodes: a process of another pod keeps what it has mapped.

        Args: kept: keep the files that are there and intact, and change the limits in place.
        """
        limits_path, region_path = self.paths(grant_id)
        if not (kept and _limits_updated(Path(limits_path), limits)):
            write_over(limits_path, region_layout.encode_limits(limits), mode=0o444)
        if not (kept and self.has_region(grant_id)):
            header = region_layout.fresh_region_header()  # the rest is a hole: it uses memory only after a process attaches
            write_over(region_path, header, mode=0o666, size=region_layout.REGION_BYTES)
            self._rests.pop(grant_id, None)

    def copy_shim(self, grant_id: str, version: Path, names: Iterable[str]) -> Mapping[str, str]:
        """See ``ports.ContainerFiles``."""
        copies = {name: f"{self._libraries}/{grant_id}.{name}" for name in names}
        for name, copy in copies.items():
            try:
                content = self._installed.read(f"{version}/{name}")
            except FileNotFoundError:
                raise StorageError(f"copying {version}/{name}: it is not there") from None
            if not _is_copy(copy, content) and not self._spares.take(name, content, copy):
                self._write_copy(copy, content)
        if PRELOAD_ARTEFACT in copies:
            self._write_preload_list(grant_id)
        return copies

    def add_spare(self) -> bool:
        """See ``ports.ContainerFiles``."""
        return self._spares.add()

    def _write_copy(self, copy: str, content: bytes) -> None:
        try:
            write_over(copy, content, mode=COPY_MODE)
        except StorageError as exc:
            if not isinstance(exc.__cause__, FileNotFoundError):
                raise
            make_directory(self._libraries, 0o755)
            write_over(copy, content, mode=COPY_MODE)

    def _write_preload_list(self, grant_id: str) -> None:
        path = f"{make_directory(self._directory / grant_id, 0o700)}/{PRELOAD_LIST_ARTEFACT}"
        if not _is_copy(path, PRELOAD_LIST):
            write_over(path, PRELOAD_LIST, mode=0o444)

    def link_shim(self, grant_id: str, copy: str) -> None:
        """See ``ports.ContainerFiles``."""
        link, target = self._directory / grant_id / PRELOAD_ARTEFACT, Path(copy)
        try:
            if link.is_symlink() and link.readlink() == target:
                return
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        except OSError as exc:
            raise StorageError(f"linking {link}: {exc.strerror}") from exc

    def linked(self, paths: Iterable[str]) -> Set[str]:
        """See ``ports.ContainerFiles``."""
        wanted, found = set(paths), set[str]()
        for directory in list_directory(self._directory):
            for name in (PRELOAD_ARTEFACT, PRELOAD_LIST_ARTEFACT):
                try:
                    found.add(str((directory / name).readlink().parent))
                except OSError as exc:
                    # ENOENT: a container with CDI, or removed meanwhile; EINVAL: no link, because a runtime creates missing mount sources
                    if exc.errno in (errno.ENOENT, errno.EINVAL):
                        continue
                    raise StorageError(f"reading {directory / name}: {exc.strerror}") from exc
        return wanted & found

    def paths(self, grant_id: str) -> tuple[str, str]:
        """See ``ports.ContainerFiles``."""
        directory = f"{self._directory}/{grant_id}"
        return f"{directory}/limits", f"{directory}/region"

    def copies(self) -> Sequence[Grant]:
        """See ``ports.ContainerFiles``."""
        grants = []
        for directory in list_directory(self._directory):
            grant = _copy_in(directory)
            if grant is not None and grant.grant_id == directory.name:
                grants.append(grant)
        return grants

    def damaged_copies(self) -> Set[str]:
        """See ``ports.ContainerFiles``."""
        return {directory.name for directory in list_directory(self._directory) if _has_damaged_copy(directory)}

    def region(self, grant_id: str) -> RegionView | None:
        """See ``ports.ContainerFiles``."""
        try:
            with self._opened(grant_id, os.O_RDONLY) as region:
                return region.view()
        except (OSError, RegionError):
            return None

    def has_region(self, grant_id: str) -> bool:
        """See ``ports.ContainerFiles``."""
        return _is_file(f"{self._directory}/{grant_id}/region")

    def cut_region(self, grant_id: str) -> int:
        """See ``ports.ContainerFiles``."""
        path = f"{self._directory}/{grant_id}/region"
        try:
            grown_bytes = os.lstat(path).st_size - region_layout.REGION_BYTES_KEPT
            if grown_bytes <= 0:
                return 0
            descriptor = _open(Path(path), os.O_WRONLY)
            try:
                os.ftruncate(descriptor, region_layout.REGION_BYTES_KEPT)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return 0
        except OSError as exc:
            raise StorageError(f"cutting {path}: {exc.strerror}") from exc
        return grown_bytes

    def limits(self, grant_id: str) -> Limits | None:
        """See ``ports.ContainerFiles``."""
        try:
            return self._limits.read(f"{self._directory}/{grant_id}/limits")
        except (OSError, RegionError):
            return None

    def amend_limits(self, grant_id: str, change: Callable[[Limits], Limits]) -> Limits:
        """See ``ports.ContainerFiles``."""
        path = self._directory / grant_id / "limits"
        try:
            content = _read_limits(path)
            current = region_layout.decode_limits(content, interrupted_too=True)
            wanted = change(current)
            if wanted != current or region_layout.is_interrupted(content):
                _update_limits(path, wanted)
        except (OSError, RegionError) as exc:
            raise StorageError(f"updating {path}: {exc}") from exc
        return wanted

    def compute(self, grant_id: str) -> Sequence[ComputeCounters] | None:
        """See ``ports.ContainerFiles``."""
        try:
            with self._opened(grant_id, os.O_RDONLY) as region:
                return region_layout.decode_compute(region.read(0, region_layout.REGION_HEAD_BYTES))
        except (OSError, RegionError):
            return None

    def store_host_pids(self, grant_id: str, pids: Mapping[int, int]) -> None:
        """See ``ports.ContainerFiles``."""
        if not pids:
            return
        try:
            with self._opened(grant_id, os.O_RDWR) as region:
                geometry = region.geometry()
                for index, host_pid in pids.items():
                    region.write(region_layout.host_pid_write(geometry, index, host_pid))
        except (OSError, RegionError) as exc:
            raise StorageError(f"writing {self._directory / grant_id / 'region'}: {exc}") from exc

    def ids(self) -> Sequence[str]:
        """See ``ports.ContainerFiles``."""
        copies = (name.partition(".") for name in names_in(self._libraries))
        return sorted({*names_in(self._directory), *(identifier for identifier, _, library in copies if library in SHIM_LIBRARIES)})

    def remove(self, grant_id: str) -> None:
        """See ``ports.ContainerFiles``."""
        self._remove_shim(grant_id)
        directory = self._directory / grant_id
        self._limits.forget(str(directory / "limits"))
        self._rests.pop(grant_id, None)
        try:
            if stat.S_ISDIR(directory.lstat().st_mode):
                shutil.rmtree(directory)
            else:
                directory.unlink()
        except FileNotFoundError:
            return
        except OSError as exc:
            raise StorageError(f"removing {directory}: {exc.strerror}") from exc

    def _remove_shim(self, grant_id: str) -> None:
        """Remove what the loader opens in a container."""
        remove_anything(f"{self._directory}/{grant_id}/{PRELOAD_LIST_ARTEFACT}")
        for name in SHIM_LIBRARIES:
            remove_anything(f"{self._libraries}/{grant_id}.{name}")

    def _may_be_mapped(self, grant_id: str) -> bool:
        """Whether a process may have a container's files mapped: one holds a slot, or the region must not be read now."""
        view = self.region(grant_id)
        if view is not None:
            return view.live
        rest = self._rest_of(grant_id)
        return rest is not None and self._monotonic() < rest.until

    def _rest_of(self, grant_id: str) -> Rest | None:
        """Return how long the current region must not be read; None if its last reading was not slow."""
        inode, rest = self._rests.get(grant_id, (0, None))
        return rest if rest is not None and inode == self._inode(grant_id) else None

    def _inode(self, grant_id: str) -> int | None:
        """Return a region's inode without opening it; None if it does not exist."""
        try:
            return (self._directory / grant_id / "region").lstat().st_ino
        except OSError:
            return None

    @contextmanager
    def _opened(self, grant_id: str, access: int) -> Iterator["_Region"]:
        """Open a region, unless it must not be read now. Raises OSError or RegionError."""
        before = self._rest_of(grant_id)
        if before is not None and self._monotonic() < before.until:
            raise RegionError(f"region: not read for {before.seconds:.0f} s, because its locks made a reading slow")
        region = _Region(self._directory / grant_id / "region", access)
        try:
            yield region
        finally:
            region.close()
            self._note_cost(grant_id, region, before)

    def _note_cost(self, grant_id: str, region: "_Region", before: Rest | None) -> None:
        """Suspend the reading of a region after a slow reading, if the file is still the same."""
        rest = rest_after(region.lock_seconds, before, self._monotonic())
        if rest is None:
            if before is not None:
                self._rests.pop(grant_id, None)
            return
        # read the copy before the inode: the next container gets its region first and its copy after it
        grant = _copy_in(self._directory / grant_id)
        if region.inode == self._inode(grant_id):
            self._rests[grant_id] = region.inode, rest
            self._warn_slow_region(grant_id, grant, region.lock_seconds, rest)

    def _warn_slow_region(self, grant_id: str, grant: Grant | None, lock_seconds: float, rest: Rest) -> None:
        about = {"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid} if grant is not None else {}
        logger.warning(
            "processes of container %s hold so many locks on its usage region that one reading took %.3f s of CPU time: the agent does "
            "not read it for %.0f s, and its figures are missing meanwhile",
            grant.container if grant is not None else "?", lock_seconds, rest.seconds, extra={"grant": grant_id, **about},
        )  # fmt: skip


def _copy_in(directory: Path) -> Grant | None:
    """Return the grant recorded in this directory; None after a crash before the record was written or during a removal."""
    try:
        return GRANT_ROWS.decode(read_regular(f"{directory}/{_GRANT_COPY}"))
    except (OSError, StorageError):
        return None


def _is_copy(path: str, content: bytes) -> bool:
    """Whether a file has this content. One that the container holds a lease on counts as damaged: a new one takes its place."""
    try:
        return read_regular(path, LIBRARY_BYTES_MAX) == content
    except (FileNotFoundError, StorageError):
        return False


def _is_file(path: str | Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _has_damaged_copy(directory: Path) -> bool:
    """Whether the record exists and does not say which grant the directory belongs to."""
    try:
        return GRANT_ROWS.decode(read_regular(directory / _GRANT_COPY)).grant_id != directory.name
    except FileNotFoundError:
        return False
    except StorageError:
        return True


class _Region:
    """An open usage region, with the CPU time that its locks have cost this thread so far."""

    def __init__(self, path: Path, access: int) -> None:
        """Raises OSError."""
        self._descriptor = _open(path, access)
        self.inode = os.fstat(self._descriptor).st_ino
        self.lock_seconds = 0.0
        """CPU time."""

    def close(self) -> None:
        """Close the file. The kernel walks through its locks again."""
        with self._metered():
            os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        """Read a part; less at the end of the file."""
        return os.pread(self._descriptor, length, offset)

    def write(self, write: region_layout.Write) -> None:
        """Write a part in place."""
        os.pwrite(self._descriptor, write.data, write.offset)

    def geometry(self) -> Geometry:
        """Return the positions of the region's tables, within the size that the agent reads. Raises OSError or RegionError."""
        geometry = region_layout.decode_geometry(self.read(0, region_layout.REGION_HEADER.size), self._size())
        if geometry.slot_count > region_layout.SLOT_COUNT_KEPT:
            raise RegionError(f"region: {geometry.slot_count} slots, want at most {region_layout.SLOT_COUNT_KEPT}")
        return geometry

    def view(self) -> RegionView:
        """Read the region and probe which of its processes live. Raises OSError or RegionError."""
        self.geometry()
        snapshot = region_layout.decode_region(self.read, self._size())
        locked = {slot.index for slot in snapshot.slots if self._is_locked(snapshot.geometry.slot(slot.index))}
        return RegionView(snapshot, region_layout.dead_slots(snapshot, locked))

    def _size(self) -> int:
        return min(os.fstat(self._descriptor).st_size, region_layout.REGION_BYTES_KEPT)

    def _is_locked(self, offset: int) -> bool:
        """Whether an open file description holds a lock on this byte. F_OFD_GETLK takes no lock itself. Raises OSError or RegionError."""
        if self.lock_seconds > LOCK_BUDGET_SECONDS:
            raise RegionError(f"region: its locks cost {self.lock_seconds:.3f} s of CPU time, want at most {LOCK_BUDGET_SECONDS:g} s")
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        with self._metered():
            answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, question)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    @contextmanager
    def _metered(self) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self.lock_seconds += time.thread_time() - begun


def read_region(path: Path) -> RegionView:
    """Read a usage region and probe which of its processes live. Raises OSError or RegionError."""
    region = _Region(path, os.O_RDONLY)
    try:
        return region.view()
    finally:
        region.close()


def _open(path: Path | str, access: int) -> int:
    """Open a file that a container can also open, without waiting if the container holds a lease on it."""
    return os.open(path, access | FLAGS | os.O_NOFOLLOW)


def _read_limits(path: Path | str) -> bytes:
    descriptor = _open(path, os.O_RDONLY)
    try:
        return os.pread(descriptor, min(os.fstat(descriptor).st_size, region_layout.LIMITS_BYTES_MAX + 1), 0)
    finally:
        os.close(descriptor)


def _update_mapped_limits(path: Path, limits: Limits, grant: Grant) -> None:
    """Change limits in place; raise StorageError if that fails, because running processes would not see a new file."""
    try:
        _update_limits(path, limits)
    except (OSError, RegionError) as exc:
        raise StorageError(f"updating {path}, which processes of {grant.holder} have mapped: {exc}") from exc


def _limits_updated(path: Path, limits: Limits) -> bool:
    """Change limits in place; return False if the file is missing or damaged."""
    try:
        _update_limits(path, limits)
    except (OSError, RegionError) as exc:
        logger.warning("limits cannot be updated in place and are written as a new file: %s: %s", path, exc)
        return False
    return True


def _update_limits(path: Path, limits: Limits) -> None:
    """Change limits in the file that running processes have mapped, in the order the ABI prescribes."""
    path.chmod(0o644)
    descriptor = _open(path, os.O_RDWR)
    try:
        os.fchmod(descriptor, 0o444)
        current = os.pread(descriptor, region_layout.LIMITS_BYTES, 0)
        for write in region_layout.limits_update(limits, current=current):
            os.pwrite(descriptor, write.data, write.offset)
    finally:
        os.close(descriptor)
