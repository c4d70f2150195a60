"""PreStartContainer: finds out whose IDs are about to start, decides what they get, and puts it in place.

The only step of a container's start that may wait or fail: kubelet shows an error of it in the pod's events and tries again.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.core.cdi import HostSpec, HostSpecError, InjectedDevice, Interposition, PriorityPage, ShimFiles, container_spec
from agent.core.identity import Holder, find_holder, grant_id
from agent.core.inventory import DeviceBoard
from agent.core.ledger import Grant
from agent.core.limits import DeviceFacts, FailPolicy, limits_of
from agent.core.planning import Ask, Node, Planned, plan_grant
from agent.core.priority_page import line_of
from agent.core.refusal import Reason, Refusal
from agent.errors import KubeletError, ShimError, StorageError
from agent.ports import CdiFiles, Clock, ContainerFiles, PodEvent, PodResources, ShimInstaller
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from agent.services.telemetry import Telemetry
from proto import contract, units
from proto.model import Pod, Policy, Priority

logger = logging.getLogger(__name__)

HOLDER_WAIT_SECONDS = 2.0
"""How long IDs may stay unclaimed: an init container is recognised by its pod's spec, which the API may tell a moment later."""
HOLDER_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """What is configured, and what identifies the node."""

    secret: bytes
    boot_id: str
    shares_per_gpu: int
    local_policy: Policy | None
    interposition: Interposition
    fail_policy: FailPolicy
    pod_wait_seconds: float
    priority_page: str
    """Path of the node's priority page."""


class Allocator:
    """Grants devices to containers that start."""

    def __init__(
        self,
        options: AllocatorOptions,
        *,
        watch: DriverWatch,
        pods: PodCache,
        book: GrantBook,
        pod_resources: PodResources,
        files: ContainerFiles,
        cdi: CdiFiles,
        shim: ShimInstaller,
        events: EventRecorder,
        telemetry: Telemetry,
        clock: Clock,
        context_bytes: Callable[[str], int],
    ) -> None:
        """Args: context_bytes: what a context costs on the device of this UUID; 0 while it is not known."""
        self._options = options
        self._watch = watch
        self._pods = pods
        self._book = book
        self._pod_resources = pod_resources
        self._files = files
        self._cdi = cdi
        self._shim = shim
        self._events = events
        self._telemetry = telemetry
        self._clock = clock
        self._context_bytes = context_bytes

    def grant_id(self, resource: str, device_ids: frozenset[str]) -> str:
        """Name the grant of a container with these IDs."""
        return grant_id(self._options.secret, resource, device_ids)

    async def prestart(self, resource: str, device_ids: frozenset[str]) -> Refusal | None:
        """Put in place what the container with these IDs was granted; None when it is."""
        begun = self._clock.monotonic()
        refusal = await self._prestart(resource, device_ids)
        self._telemetry.prestart_seconds.observe(self._clock.monotonic() - begun)
        if refusal is not None:
            self._telemetry.refusal(refusal.reason)
        return refusal

    async def _prestart(self, resource: str, device_ids: frozenset[str]) -> Refusal | None:
        if not self._watch.board.devices:
            trouble = self._watch.trouble or "the driver lists none"
            return self._refuse(None, None, Refusal(Reason.NOT_READY, f"no GPU is known on this node yet: {trouble}"))
        try:
            holder = await self._find_holder(resource, device_ids)
        except KubeletError as exc:
            return self._refuse(None, None, Refusal(Reason.NODE_FAILURE, f"{exc}. It is asked again at the next retry"))
        if isinstance(holder, Refusal):
            return self._refuse(None, None, holder)
        pod = await self._find_pod(holder, self.grant_id(resource, device_ids))
        if isinstance(pod, Refusal):
            return self._refuse(holder, None, pod)
        outcome = await self._grant(Ask(self.grant_id(resource, device_ids), resource, device_ids, holder, pod))
        if isinstance(outcome, Refusal):
            return self._refuse(holder, pod, outcome)
        return None

    async def _find_holder(self, resource: str, device_ids: frozenset[str]) -> Holder | Refusal:
        deadline = self._clock.monotonic() + HOLDER_WAIT_SECONDS
        while True:
            holder = find_holder(await self._pod_resources.held(), resource, device_ids, self._pods.startable)
            if isinstance(holder, Holder) or self._clock.monotonic() >= deadline:
                return holder
            await self._pods.pod_changes.after(self._pods.pod_changes.count, HOLDER_POLL_SECONDS)

    async def _find_pod(self, holder: Holder, identifier: str) -> Pod | Refusal:
        """Wait for the pod to be known. What is known during an API outage serves a container that restarts, not one that is new."""

        def known() -> bool:
            pod = self._pods.startable(holder.namespace, holder.pod)
            granted = self._book.ledger.grants.get(identifier)
            restarting = granted is not None and pod is not None and (granted.pod_uid, granted.container) == (pod.uid, holder.container)
            return pod is not None and (self._pods.fresh or restarting)

        found = await self._pods.wait_until(known, self._options.pod_wait_seconds)
        pod = self._pods.startable(holder.namespace, holder.pod)
        if found and pod is not None:
            return pod
        why = self._pods.trouble or "it may be being deleted, or its namesake has not gone yet"
        return Refusal(
            Reason.POD_MISSING,
            f"pod {holder.namespace}/{holder.pod} did not appear in the Kubernetes API within {self._options.pod_wait_seconds:g} s: {why}. "
            "It is asked again at the next retry",
        )

    async def _grant(self, ask: Ask) -> Grant | Refusal:
        try:
            shim_directory = await self._book.on_disk(self._shim.installed)
            host = await self._book.on_disk(self._cdi.host_spec)
        except (ShimError, StorageError) as exc:
            return Refusal(Reason.NODE_FAILURE, f"{exc}")
        # from here to the commit nothing is awaited: the ledger that is looked at is the one that is changed
        board, before = self._watch.board, self._book.ledger.grants.get(ask.grant_id)
        planned = plan_grant(ask, self._node(board))
        if isinstance(planned, Refusal):
            return planned
        limits = limits_of(planned.grant, self._options.fail_policy, planned.preferences, self._facts(planned.grant, board))

        def spec() -> Mapping[str, Any]:
            devices = [self._injected(share.device_uuid, board, host) for share in planned.grant.shares]
            shim = self._shim_files(planned, shim_directory, front_possible=host is not None and host.has_driver)
            return container_spec(ask.grant_id, devices, host, shim, () if host is not None else self._cdi.present_nodes())

        try:
            await self._book.commit(planned, limits, spec, board, self._options.shares_per_gpu)
        except (StorageError, HostSpecError) as exc:
            return Refusal(Reason.NODE_FAILURE, f"{exc}. It is tried again at the next retry")
        if before is None or before.shares != planned.grant.shares or before.pod_uid != planned.grant.pod_uid:
            self._announce(planned.grant)
        return planned.grant

    def _node(self, board: DeviceBoard) -> Node:
        options = self._options
        return Node(board, self._book.ledger, options.shares_per_gpu, options.boot_id, options.local_policy, self._pods.is_active)

    def _facts(self, grant: Grant, board: DeviceBoard) -> DeviceFacts:
        granted = [entry.device for entry in board.devices if any(share.device_uuid == entry.device.uuid for share in grant.shares)]
        return DeviceFacts(
            context_bytes={device.uuid: self._context_bytes(device.uuid) for device in granted},
            priority_lines={device.uuid: line_of(device.minor) for device in granted},
        )

    def _injected(self, uuid: str, board: DeviceBoard, host: HostSpec | None) -> InjectedDevice:
        found = board.mig_instance(uuid)
        if found is None:
            return InjectedDevice(uuid, next(entry.device.minor for entry in board.devices if entry.device.uuid == uuid))
        entry, instance = found
        minor = entry.device.minor
        if host is not None:
            return InjectedDevice(uuid, minor)
        return InjectedDevice(uuid, minor, self._cdi.capability_nodes(minor, instance.gpu_instance_id, instance.compute_instance_id))

    def _shim_files(self, planned: Planned, directory: Path, *, front_possible: bool) -> ShimFiles | None:
        if not planned.grant.under_shim:
            return None  # the hardware keeps MIG instances apart
        limits, region = self._files.paths(planned.grant.grant_id)
        # without a spec of the host the NVIDIA runtime mounts the driver after us, where no front can stand
        interposition = self._options.interposition if front_possible else Interposition.PRELOAD
        priority = planned.preferences.priority
        page = PriorityPage(self._options.priority_page, writable=priority is Priority.HIGH) if priority is not None else None
        return ShimFiles(str(directory), limits, region, interposition, page)

    def _refuse(self, holder: Holder | None, pod: Pod | None, refusal: Refusal) -> Refusal:
        logger.warning(
            "container refused: %s",
            refusal.message,
            extra={
                "reason": str(refusal.reason),
                "pod": f"{holder.namespace}/{holder.pod}" if holder else None,
                "pod_uid": pod.uid if pod else None,
            },
        )
        if holder is not None and pod is not None:
            self._events.record(
                PodEvent(
                    holder.namespace, holder.pod, pod.uid, holder.container, contract.EVENT_REASON_REFUSED, refusal.message, warning=True
                )
            )
        return refusal

    def _announce(self, grant: Grant) -> None:
        shares = "; ".join(
            f"{share.device_uuid}: {units.format_memory(share.memory_bytes)}"
            + (f", {share.cores_percent} percent of cores" if share.cores_percent else "")
            for share in grant.shares
        )
        message = f"container {grant.container} was granted {shares}"
        logger.info(message, extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id})
        self._events.record(
            PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, contract.EVENT_REASON_GRANTED, message, warning=False)
        )
