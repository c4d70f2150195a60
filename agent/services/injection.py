# SPDX-License-Identifier: Apache-2.0
"""How devices enter containers on this node, and so what Allocate replies."""

import logging
from functools import partial
from pathlib import Path

from agent.core.identity import cdi_name
from agent.core.injection import (
    Answer,
    DeviceInjection,
    NodeVersions,
    decided_by_host_spec,
    has_version,
    injects_by_cdi,
    legacy_answer,
    named_answer,
    resolves_no_name,
)
from agent.errors import StorageError
from agent.ports.clock import Clock
from agent.ports.grants import CdiFiles, ContainerFiles
from agent.ports.node_files import Store
from agent.services.state import AgentState
from aliquot import contract

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long the last check for the host's CDI spec is valid, so that a hundred starting pods do not cause a hundred disk reads."""
SAVE_AGAIN_SECONDS = 30.0
"""Seconds until a failed write is retried."""


class Injection:
    """Decides how devices enter containers, and makes the reply of Allocate."""

    def __init__(
        self,
        configured: DeviceInjection,
        *,
        state: AgentState,
        files: ContainerFiles,
        cdi: CdiFiles,
        versions: Store[NodeVersions],
        clock: Clock,
    ) -> None:
        self._configured = configured
        self._watch = state.watch
        self._pods = state.pods
        self._manager = state.manager
        self._files = files
        self._cdi = cdi
        self._clock = clock
        self._store = versions
        self._versions = NodeVersions()
        self._saved = NodeVersions()
        self._last: bool | None = None
        self._host_had_spec = False
        self._looked_at = -LOOK_SECONDS

    @property
    def trouble(self) -> str:
        """Why the right reply is unknown; empty when it is known. A wrong reply stays wrong for the life of its pod."""
        known = self._known_versions()
        if self._configured is not DeviceInjection.AUTO or (known.runtime and known.kubelet):
            return ""
        return (
            "waiting for the Node object: its versions of kubelet and container runtime decide how devices enter containers, and they "
            "are unknown. If the Node object never has them, set deviceInjection to cdi or legacy"
        )

    def load(self) -> None:
        """Load the versions that an earlier agent of this node saved; they hold until the API sends others."""
        try:
            self._saved = self._versions = self._store.load()
        except StorageError as exc:
            logger.warning("waiting for the versions of kubelet and container runtime: %s", exc)

    async def run(self) -> None:
        """Save the versions of the Node object for the next agent, until cancelled."""
        while True:
            seen, now = self._pods.node_changes.count, self._known_versions()
            if now != self._saved:
                try:
                    await self._manager.on_disk(partial(self._store.save, now))
                except StorageError as exc:
                    logger.warning("versions of kubelet and runtime not saved, a restart during an API outage would not know them: %s", exc)
                else:
                    self._saved = now
            await self._pods.node_changes.after(seen, None if now == self._saved else SAVE_AGAIN_SECONDS)

    async def by_cdi(self) -> bool:
        """Whether the runtime gets a CDI name. Unknown versions count as current ones."""
        known = self._known_versions()
        runtime, kubelet = known.runtime, known.kubelet
        found = injects_by_cdi(self._configured, runtime, kubelet, host_has_spec=await self._host_has_spec())
        if found != self._last:
            self._last = found
            how = "CDI names" if found else "the reply of Allocate (legacy): a container gets the GPUs that its IDs name"
            logger.info("devices enter containers by %s", how, extra={"runtime": runtime, "kubelet": kubelet})
            if found and self._configured is DeviceInjection.AUTO and decided_by_host_spec(runtime):
                logger.warning(
                    "%s is assumed to resolve CDI names, because NVIDIA's CDI spec is on this host. If its configuration lacks "
                    "enable_cdi = true, containers start without a GPU: check with `%s doctor` on the node, or set deviceInjection: legacy",
                    runtime,
                    contract.PRODUCT,
                )
        return found

    async def answer(self, resource: str, device_ids: frozenset[str], grant_id: str) -> Answer:
        """Return the reply of Allocate. Raises no error: kubelet would fail the pod permanently."""
        if await self.by_cdi():
            return named_answer(cdi_name(grant_id))
        minors = {entry.device.uuid: entry.device.minor for entry in self._watch.inventory.devices}
        limits, _ = self._files.paths(grant_id)
        try:
            present = await self._manager.on_disk(self._cdi.present_nodes)
        except StorageError as exc:
            logger.warning("Allocate replies without the driver's control nodes, which the NVIDIA runtime adds: %s", exc)
            present = ()
        return legacy_answer(resource, device_ids, minors, present, str(Path(limits).parent))

    @property
    def resolves_no_name(self) -> bool:
        """Whether a CDI name from an earlier reply certainly resolves to no device now."""
        known = self._known_versions()
        return resolves_no_name(self._configured, known.runtime, known.kubelet)

    def _known_versions(self) -> NodeVersions:
        node = self._pods.node
        if node is not None and has_version(node.runtime_version):  # empty while kubelet restarts: the versions are unchanged
            self._versions = NodeVersions(node.runtime_version, node.kubelet_version)
        return self._versions

    async def _host_has_spec(self) -> bool:
        if self._configured is not DeviceInjection.AUTO:
            return False
        if self._clock.monotonic() - self._looked_at < LOOK_SECONDS:
            return self._host_had_spec
        try:
            self._host_had_spec = await self._manager.on_disk(self._cdi.has_host_spec)
        except StorageError as exc:
            logger.warning("the host's CDI spec cannot be read: %s", exc)
            return False
        self._looked_at = self._clock.monotonic()
        return self._host_had_spec
