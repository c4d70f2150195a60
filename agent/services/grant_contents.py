# SPDX-License-Identifier: Apache-2.0
"""What the files of a grant say: the limits for the shim, and the CDI spec for the container runtime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.core.cdi import (
    DRIVER_LIBRARIES,
    PRELOAD_ARTEFACT,
    HostSpec,
    InjectedDevice,
    Interposition,
    PriorityPage,
    ShimFiles,
    container_spec,
)
from agent.core.identity import cdi_devices
from agent.core.inventory import DeviceInventory
from agent.core.ledger import Grant
from agent.core.limits import DeviceFacts, FailPolicy, limits_of, may_burst
from agent.core.node_pages import line_of
from agent.core.planning import Planned
from agent.core.region_layout import Limits
from agent.errors import StorageError
from agent.ports.grants import CdiFiles, ContainerFiles
from agent.ports.node_files import ShimInstaller
from agent.services.backends import Provision
from agent.services.grant_manager import GrantManager
from aliquot.contract.model import Priority


@dataclass(frozen=True, slots=True)
class ContentsOptions:
    """What is configured."""

    interposition: Interposition
    fail_policy: FailPolicy
    priority_page: str
    """Path of the node's priority page."""
    turns_page: str | None = None
    """Path of the node's page of time slots; None where no container may hold more memory than it is guaranteed."""


class GrantContents:
    """Composes limits and CDI specs."""

    def __init__(
        self,
        options: ContentsOptions,
        *,
        manager: GrantManager,
        files: ContainerFiles,
        cdi: CdiFiles,
        shim: ShimInstaller,
        context_bytes: Callable[[str], int],
    ) -> None:
        """Args: context_bytes: memory that a CUDA context takes on the device with this UUID; 0 while it is unknown."""
        self._options = options
        self._manager = manager
        self._files = files
        self._cdi = cdi
        self._shim = shim
        self._context_bytes = context_bytes
        self._shim_directory: Path | None = None
        """As installed; it stays the same as long as this process runs."""

    async def shim_directory(self) -> Path:
        """Return the directory of the installed shim. Raises ShimError, StorageError."""
        if self._shim_directory is None:
            self._shim_directory = await self._manager.on_disk(self._shim.installed)
        return self._shim_directory

    async def host_spec(self) -> HostSpec | None:
        """Return NVIDIA's CDI spec of the host; None when the host has no such spec. Raises StorageError."""
        return await self._manager.on_disk(self._cdi.host_spec)

    def directory(self, grant_id: str) -> Path:
        """Return the directory of a grant's files."""
        return Path(self._files.paths(grant_id)[0]).parent

    async def link_shim(self, grant_id: str, directory: Path) -> None:
        """Link the shim next to a grant's files, for a container that is started without CDI. Raises StorageError."""

        def work() -> None:
            self._files.link_shim(grant_id, self._files.copy_shim(grant_id, directory, (PRELOAD_ARTEFACT,))[PRELOAD_ARTEFACT])

        await self._manager.on_disk(work)

    def compose(
        self, planned: Planned, inventory: DeviceInventory, shim_directory: Path, provided: Sequence[Provision]
    ) -> tuple[Limits, Callable[[], Mapping[str, Any]]]:
        """Return the limits, and a function that makes the CDI spec. It is called later, when ``provided`` has the grant's provision.

        The function raises StorageError, HostSpecError.
        """
        grant = planned.grant

        def spec() -> Mapping[str, Any]:
            (provision,) = provided
            uuids = [provision.instances[name].uuid if name in provision.instances else name for name in grant.device_names]
            host = self._cdi.host_spec(uuids)
            devices = [self._injected(name, provision, inventory, host) for name in grant.device_names]
            shim = self._shim_files(planned, shim_directory, front_possible=host is not None and host.has_driver)
            nodes = () if host is not None else self._cdi.present_nodes()
            names = cdi_devices(grant.grant_id, len(grant.claim.names) if grant.claim is not None else 1)
            return container_spec(names, devices, host, shim, nodes, added=provision.edits)

        return limits_of(grant, self._options.fail_policy, planned.preferences, self._facts(grant, inventory)), spec

    def _facts(self, grant: Grant, inventory: DeviceInventory) -> DeviceFacts:
        granted = [entry.device for entry in inventory.devices if any(share.device_uuid == entry.device.uuid for share in grant.shares)]
        return DeviceFacts(
            context_bytes={device.uuid: self._context_bytes(device.uuid) for device in granted},
            priority_lines={device.uuid: line_of(device.minor) for device in granted},
        )

    def _injected(self, name: str, provision: Provision, inventory: DeviceInventory, host: HostSpec | None) -> InjectedDevice:
        """Return how one device enters the container: by the host's spec where that has it, else by its device nodes."""
        entry, listed = inventory.mig_instance(name) or (next((one for one in inventory.devices if one.device.uuid == name), None), None)
        if entry is None:
            raise StorageError(f"no CDI spec can be written for {name}: the driver has not listed it since this agent started")
        instance, minor = provision.instances.get(name, listed), entry.device.minor
        if instance is None:
            return InjectedDevice(name, minor)
        if host is not None and instance.uuid in host.devices and not host.lacks_capabilities(instance.uuid):
            return InjectedDevice(instance.uuid, minor)
        nodes = self._cdi.capability_nodes(minor, instance.gpu_instance_id, instance.compute_instance_id)
        return InjectedDevice(instance.uuid, minor, nodes)

    def _shim_files(self, planned: Planned, directory: Path, *, front_possible: bool) -> ShimFiles | None:
        if not planned.grant.under_shim:
            return None  # another backend enforces it
        limits, region = self._files.paths(planned.grant.grant_id)
        # without a spec of the host, NVIDIA's runtime mounts the driver after us, over a front
        interposition = self._options.interposition if front_possible else Interposition.PRELOAD
        priority = planned.preferences.priority
        page = PriorityPage(self._options.priority_page, writable=priority is Priority.HIGH) if priority is not None else None
        turns = self._options.turns_page if may_burst(planned.preferences) else None
        fronts = tuple(library.front for library in DRIVER_LIBRARIES)
        names = fronts if interposition is Interposition.FRONT else (PRELOAD_ARTEFACT,)
        copies = self._files.copy_shim(planned.grant.grant_id, directory, names)
        return ShimFiles(copies, limits, region, interposition, page, turns)
