# SPDX-License-Identifier: Apache-2.0
"""The files of grants, and the manager that keeps them equal to the ledger."""

from dataclasses import dataclass
from pathlib import Path

from agent.adapters.cdi_files import CdiDirectory
from agent.adapters.container_files import GrantFiles
from agent.adapters.directory_watch import DirectoryWatch
from agent.adapters.held_files import HeldFiles
from agent.adapters.host_directories import HostDirectories
from agent.adapters.ledger_files import LedgerFiles
from agent.adapters.node_files import PageFile
from agent.adapters.nvidia_ctk import NvidiaCtk
from agent.adapters.shim_store import CONTAINERS, ShimStore
from agent.core.node_pages import PRIORITY, TURNS
from agent.services.directory_watchdog import DirectoryWatchdog
from agent.services.file_holder import FileHolder
from agent.services.grant_manager import GrantManager
from agent.services.page_reconciler import PageReconciler
from agent.services.region_reconciler import RegionReconciler
from agent.services.shim_controller import ShimController
from agent.services.spare_copies import SpareMaker
from agent.wiring.setup import Setup


@dataclass(frozen=True, slots=True)
class Storage:
    """The agent's files on this node."""

    files: GrantFiles
    cdi: CdiDirectory
    shim: ShimStore
    manager: GrantManager
    priority_page: str
    """Path of the page that priorities are written to."""
    turns_page: str | None
    """Path of the page of time slots; None where no container may hold more memory than it is guaranteed."""
    changes: DirectoryWatch
    """Reports changes of the files that the reconciler compares."""
    shims: ShimController
    spares: SpareMaker
    pages: PageReconciler
    regions: RegionReconciler
    holder: FileHolder
    """Keeps the files open that containers share."""
    watchdog: DirectoryWatchdog


def build_storage(setup: Setup) -> Storage:
    """Build the group, and create the node's pages. Raises StorageError."""
    settings, state, runtime, clock = setup.settings, setup.state, setup.runtime, setup.clock
    ctk = NvidiaCtk(settings.nvidia_ctk, settings.nvidia_ctk_timeout_seconds)
    files = GrantFiles(runtime / "containers", clock.monotonic, libraries=state / "shim" / CONTAINERS)
    cdi = CdiDirectory(Path(settings.cdi_dir), Path(settings.cdi_static_dir), generate=ctk.host_spec)
    shim = ShimStore(setup.shim_source, state / "shim")
    manager = GrantManager(LedgerFiles(state / "ledger"), files, cdi, clock)
    priority_page, turns_page = PageFile(runtime / "priority", PRIORITY), PageFile(runtime / "turns", TURNS)
    priority_path = priority_page.make()
    turns_path = turns_page.make() if settings.memory_oversubscription > 1 else None
    held = HeldFiles()
    present = [page for page in (priority_page, turns_page) if page.path.exists()]  # an earlier configuration may have left a turns page
    return Storage(
        files,
        cdi,
        shim,
        manager,
        priority_page=str(priority_path),
        turns_page=str(turns_path) if turns_path is not None else None,
        changes=DirectoryWatch([Path(settings.cdi_dir), state / "ledger"], nested=runtime / "containers"),
        shims=ShimController(shim, cdi, files),
        spares=SpareMaker(manager, files),
        pages=PageReconciler(present, settings.reconcile_seconds),
        regions=RegionReconciler(settings.reconcile_seconds, manager=manager, files=files),
        holder=FileHolder(held, lambda: dict.fromkeys((page.path for page in present), True), settings.reconcile_seconds),
        watchdog=DirectoryWatchdog(HostDirectories(setup.host_directories)),
    )
