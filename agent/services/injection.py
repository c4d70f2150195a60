"""How devices enter containers on this node, and so what Allocate answers."""

import logging
from functools import partial
from pathlib import Path

from agent.core.identity import cdi_name
from agent.core.injection import (
    Answer,
    DeviceInjection,
    NodeVersions,
    injects_by_cdi,
    is_told_by_spec,
    legacy_answer,
    named_answer,
    resolves_no_name,
    tells_version,
)
from agent.errors import StorageError
from agent.ports import CdiFiles, Clock, ContainerFiles, Store
from agent.services.driver_watch import DriverWatch
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from proto import contract

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long the host's CDI spec is taken to be where it was: a node that starts a hundred pods does not ask its disk a hundred times."""
SAVE_AGAIN_SECONDS = 30.0
"""How soon a disk that failed is tried again."""


class Injection:
    """Answers for containers that kubelet admits."""

    def __init__(
        self,
        configured: DeviceInjection,
        *,
        watch: DriverWatch,
        pods: PodCache,
        book: GrantBook,
        files: ContainerFiles,
        cdi: CdiFiles,
        versions: Store[NodeVersions],
        clock: Clock,
    ) -> None:
        self._configured = configured
        self._watch = watch
        self._pods = pods
        self._book = book
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
        """Why nothing certain can be answered yet; empty when it can. A wrong answer is one for as long as its pod lives."""
        known = self._known_versions()
        if self._configured is not DeviceInjection.AUTO or (known.runtime and known.kubelet):
            return ""
        return (
            "the versions of this node's kubelet and container runtime decide how devices enter containers, and this agent has never heard "
            "them: waiting for the Node object to tell. Where it never does, set deviceInjection to cdi or legacy"
        )

    def load(self) -> None:
        """Take over what an earlier agent of this node knew, which holds until the API says something else."""
        try:
            self._saved = self._versions = self._store.load()
        except StorageError as exc:
            logger.warning("the versions of kubelet and container runtime are waited for: %s", exc)

    async def run(self) -> None:
        """Keep for the next agent, for ever, what the Node object says."""
        while True:
            seen, now = self._pods.node_changes.count, self._known_versions()
            if now != self._saved:
                try:
                    await self._book.on_disk(partial(self._store.save, now))
                except StorageError as exc:
                    logger.warning("an agent that starts while the API is down will not know the node: %s", exc)
                else:
                    self._saved = now
            await self._pods.node_changes.after(seen, None if now == self._saved else SAVE_AGAIN_SECONDS)

    async def by_cdi(self) -> bool:
        """Whether the runtime is given a CDI name. While nothing is known of it, the node is taken for one of today."""
        known = self._known_versions()
        runtime, kubelet = known.runtime, known.kubelet
        found = injects_by_cdi(self._configured, runtime, kubelet, host_has_spec=await self._host_has_spec())
        if found != self._last:
            self._last = found
            how = "CDI names" if found else "the answer of Allocate (legacy): a container's GPUs are those that its IDs name"
            logger.info("devices enter containers by %s", how, extra={"runtime": runtime, "kubelet": kubelet})
            if found and self._configured is DeviceInjection.AUTO and is_told_by_spec(runtime):
                logger.warning(
                    "%s is taken to resolve CDI names, because NVIDIA's CDI spec is on this host: where its configuration lacks "
                    "enable_cdi = true, containers start without a GPU. `%s doctor` on the node tells; else set deviceInjection: legacy",
                    runtime,
                    contract.PRODUCT,
                )
        return found

    async def answer(self, resource: str, device_ids: frozenset[str], grant_id: str) -> Answer:
        """Return what Allocate answers; never fails, since an error there would end the pod for good."""
        if await self.by_cdi():
            return named_answer(cdi_name(grant_id))
        minors = {entry.device.uuid: entry.device.minor for entry in self._watch.board.devices}
        limits, _ = self._files.paths(grant_id)
        try:
            present = await self._book.on_disk(self._cdi.present_nodes)
        except StorageError as exc:
            logger.warning("Allocate answers without the driver's control nodes, which the NVIDIA runtime adds: %s", exc)
            present = ()
        return legacy_answer(resource, device_ids, minors, present, str(Path(limits).parent))

    @property
    def resolves_no_name(self) -> bool:
        """Whether a CDI name that was answered earlier certainly leads nowhere by now."""
        known = self._known_versions()
        return resolves_no_name(self._configured, known.runtime, known.kubelet)

    def _known_versions(self) -> NodeVersions:
        node = self._pods.node
        if node is not None and tells_version(node.runtime_version):  # else it is being restarted, and is what it was
            self._versions = NodeVersions(node.runtime_version, node.kubelet_version)
        return self._versions

    async def _host_has_spec(self) -> bool:
        if self._configured is not DeviceInjection.AUTO:
            return False
        if self._clock.monotonic() - self._looked_at < LOOK_SECONDS:
            return self._host_had_spec
        try:
            self._host_had_spec = await self._book.on_disk(self._cdi.has_host_spec)
        except StorageError as exc:
            logger.warning("the host's CDI spec cannot be looked at: %s", exc)
            return False
        self._looked_at = self._clock.monotonic()
        return self._host_had_spec
