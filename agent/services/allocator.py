"""PreStartContainer: finds out whose IDs are about to start, decides what they get, and puts it in place.

The only step of a container's start that may wait or fail: kubelet shows an error of it in the pod's events and tries again.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agent.core.backends import within_burst
from agent.core.cdi import HostSpec, HostSpecError, InjectedDevice, Interposition, PriorityPage, ShimFiles, container_spec
from agent.core.identity import (
    Claim,
    Holder,
    RememberedDevices,
    answer_kept,
    cdi_name,
    device_uuid_of,
    find_claim,
    grant_id,
    starting_container,
)
from agent.core.injection import Answer, admission_trouble, legacy_trouble
from agent.core.inventory import DeviceBoard
from agent.core.ledger import Grant
from agent.core.limits import DeviceFacts, FailPolicy, limits_of, may_burst
from agent.core.node_pages import line_of
from agent.core.planning import Ask, Node, Planned, is_assigned, plan_grant
from agent.core.refusal import Reason, Refusal
from agent.core.region_layout import Limits
from agent.errors import DriverError, KubeletBusyError, KubeletError, MpsError, ShimError, StorageError
from agent.ports import CdiFiles, Clock, ContainerFiles, KubeletMemory, PodEvent, PodResources, ShimInstaller
from agent.services.backends import Backends, Provision
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.grant_book import GrantBook
from agent.services.injection import Injection
from agent.services.liveness import Liveness
from agent.services.pod_cache import PodCache
from agent.services.telemetry import Telemetry
from placement.request import request_of_container
from proto import contract, units
from proto.model import Pod, Policy, Preferences, Priority

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
    turns_page: str | None = None
    """Path of the node's page of turns; None where no container may hold more memory than it is guaranteed."""


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
        kubelet_memory: KubeletMemory,
        files: ContainerFiles,
        cdi: CdiFiles,
        shim: ShimInstaller,
        injection: Injection,
        backends: Backends,
        liveness: Liveness,
        events: EventRecorder,
        telemetry: Telemetry,
        clock: Clock,
        context_bytes: Callable[[str], int],
        cordon_is_told: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make the allocator.

        Args:
            context_bytes: what a context costs on the device of this UUID; 0 while it is not known.
            cordon_is_told: whether new containers may be judged by the cordon on the board.
        """
        self._options = options
        self._watch = watch
        self._pods = pods
        self._book = book
        self._pod_resources = pod_resources
        self._kubelet_memory = kubelet_memory
        self._files = files
        self._cdi = cdi
        self._shim = shim
        self._injection = injection
        self._backends = backends
        self._liveness = liveness
        self._events = events
        self._telemetry = telemetry
        self._clock = clock
        self._context_bytes = context_bytes
        self._cordon_is_told = cordon_is_told

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
            found = await self._find_claim(resource, device_ids)
        except KubeletError as exc:
            return self._refuse(None, None, _asked_again(exc))
        if isinstance(found, Refusal):
            return self._refuse(None, None, found)
        claim, remembered = found
        pod = await self._find_pod(claim, self.grant_id(resource, device_ids))
        if isinstance(pod, Refusal):
            return self._refuse(Holder(claim.namespace, claim.pod, claim.listed or ""), None, pod)
        settled = await self._settle(claim, pod, resource, device_ids)
        if isinstance(settled, Refusal):
            return self._refuse(Holder(claim.namespace, claim.pod, claim.listed or ""), pod, settled)
        holder, pod = settled
        kept = answer_kept(remembered, resource, device_ids, pod.uid, holder.container)
        outcome = await self._grant(Ask(self.grant_id(resource, device_ids), resource, device_ids, holder, pod), kept)
        if isinstance(outcome, Refusal):
            return self._refuse(holder, pod, outcome)
        return None

    async def _find_claim(self, resource: str, device_ids: frozenset[str]) -> tuple[Claim, Sequence[RememberedDevices]] | Refusal:
        """Find out whose the IDs are; return it with what kubelet's checkpoint had then."""

        async def look(last_look: bool) -> tuple[Claim, Sequence[RememberedDevices]] | Refusal:
            try:
                listing = await self._pod_resources.held()
            except KubeletBusyError as exc:
                return _asked_again(exc)
            remembered = await self._book.on_disk(self._kubelet_memory.remembered)
            claim = find_claim(listing, remembered, resource, device_ids, self._pods, last_look=last_look and self._pods.fresh)
            return claim if isinstance(claim, Refusal) else (claim, remembered)

        return await self._patiently(look)

    async def _patiently(self, look: Callable[[bool], Awaitable[T | Refusal]]) -> T | Refusal:
        """Look until there is something else than a refusal, for a while; the last time says so."""
        deadline = self._clock.monotonic() + HOLDER_WAIT_SECONDS
        while True:
            last_look = self._clock.monotonic() >= deadline
            found = await look(last_look)
            if not isinstance(found, Refusal) or last_look:
                return found
            await self._pods.pod_changes.after(self._pods.pod_changes.count, HOLDER_POLL_SECONDS)

    async def _find_pod(self, claim: Claim, identifier: str) -> Pod | Refusal:
        """Wait for the pod to be known. What is known during an API outage serves a container that restarts, not one that is new."""

        def wanted() -> Pod | None:
            pod = self._pods.startable(claim.namespace, claim.pod)
            return pod if pod is not None and (not claim.uids or pod.uid in claim.uids) else None

        def known() -> bool:
            pod = wanted()
            granted = self._book.ledger.grants.get(identifier)
            restarting = granted is not None and pod is not None and (granted.pod_uid, granted.container) == (pod.uid, claim.listed)
            return pod is not None and (restarting or (self._pods.fresh and self._cordon_is_told()))

        found = await self._pods.wait_until(known, self._options.pod_wait_seconds)
        pod = wanted()
        if found and pod is not None:
            return pod
        if pod is not None and self._pods.fresh:
            return Refusal(
                Reason.NOT_READY,
                f"which GPUs are cordoned is not known: the Kubernetes API has not told of {contract.GPU_NODE_PLURAL} within "
                f"{self._options.pod_wait_seconds:g} s. It is asked again at the next retry",
            )
        why = self._pods.trouble or "it may be being deleted, or its namesake has not gone yet"
        return Refusal(
            Reason.POD_MISSING,
            f"pod {claim.namespace}/{claim.pod} did not appear in the Kubernetes API within {self._options.pod_wait_seconds:g} s: {why}. "
            "It is asked again at the next retry",
        )

    async def _settle(self, claim: Claim, pod: Pod, resource: str, device_ids: frozenset[str]) -> tuple[Holder, Pod] | Refusal:
        """Find out which of the pod's containers starts; return it with the pod as it was known then."""

        async def look(last_look: bool) -> tuple[Holder, Pod] | Refusal:
            now = self._pods.by_uid.get(pod.uid, pod)
            granted = {
                grant.container
                for grant in self._book.ledger.holding_any(resource, device_ids)
                if grant.pod_uid == pod.uid and frozenset(grant.device_ids) == device_ids
            }
            name = starting_container(now, claim.listed, resource, len(device_ids), granted, last_look=last_look)
            return name if isinstance(name, Refusal) else (Holder(claim.namespace, claim.pod, name), now)

        return await self._patiently(look)

    async def _grant(self, ask: Ask, kept: bytes) -> Grant | Refusal:
        """Args: kept: what Allocate answered for the container, as kubelet's checkpoint has it; empty when it does not."""
        try:
            shim_directory = await self._book.on_disk(self._shim.installed)
            host = await self._book.on_disk(self._cdi.host_spec)
        except (ShimError, StorageError) as exc:
            return Refusal(Reason.NODE_FAILURE, f"{exc}. It is tried again at the next retry")
        answer = self._kubelet_memory.answer(kept)
        if answer is not None and (trouble := self._admission_trouble(answer, ask)) is not None:
            return trouble
        by_cdi = await self._enters_by_cdi(answer)
        before_it = [grant for grant in self._book.ledger.holding_any(ask.resource, ask.device_ids) if grant.pod_uid != ask.pod.uid]
        live = await self._liveness.live(before_it)
        # from here to the commit nothing is awaited: the ledger that is looked at is the one that is changed
        board, before = self._watch.board, self._book.ledger.grants.get(ask.grant_id)
        planned = plan_grant(ask, self._node(board if by_cdi else self._reachable(board, ask), live))
        if isinstance(planned, Refusal):
            return planned
        if not by_cdi and (trouble := legacy_trouble(planned.grant, planned.preferences)) is not None:
            return trouble
        _tell_of_less_burst(planned.grant, request_of_container(ask.pod, ask.holder.container)[1], planned.preferences)
        provided: list[Provision] = []

        async def provide() -> None:
            provided.append(await self._backends.provide(planned.grant))

        try:
            contents = self._contents(planned, board, shim_directory, provided)
            await self._book.commit(planned, *contents, board, self._options.shares_per_gpu, provide)
            if not by_cdi or answer is None:  # of one that was admitted by CDI nothing is taken from there
                await self._book.on_disk(partial(self._files.link_shim, planned.grant.grant_id, shim_directory))
        except (StorageError, HostSpecError) as exc:
            return Refusal(Reason.NODE_FAILURE, f"{exc}. It is tried again at the next retry")
        except (DriverError, MpsError) as exc:
            return await self._withdraw(planned.grant, exc)
        if before is None or before.shares != planned.grant.shares or before.pod_uid != planned.grant.pod_uid:
            self._announce(planned, left_to_runtime=by_cdi and host is None)
        return planned.grant

    def _admission_trouble(self, answer: Answer, ask: Ask) -> Refusal | None:
        trouble = admission_trouble(
            answer,
            ask.holder.container,
            ask.resource,
            cdi_name(ask.grant_id),
            str(Path(self._files.paths(ask.grant_id)[0]).parent),
            name_leads_nowhere=self._injection.resolves_no_name,
        )
        return Refusal(Reason.ADMISSION_STALE, trouble) if trouble else None

    async def _enters_by_cdi(self, answer: Answer | None) -> bool:
        """Whether a container gets its devices by CDI name: as it was answered, or as it would be today where that is not known."""
        return bool(answer.cdi_name) if answer is not None else await self._injection.by_cdi()

    async def _withdraw(self, grant: Grant, trouble: DriverError | MpsError) -> Refusal:
        """Take back a promise that nothing could be made ready for: the next try may choose another device."""
        try:
            await self._book.release((grant,))
        except StorageError as exc:
            return Refusal(Reason.NODE_FAILURE, f"{trouble}; and {exc}. It is tried again at the next retry")
        return Refusal(Reason.NODE_FAILURE, f"{trouble}. It is tried again at the next retry")

    async def rewrite(self, grant: Grant) -> None:
        """Write the files of a grant again, for the same devices and amounts, whatever the pod's assignment says by now.

        Raises: ShimError, StorageError, HostSpecError, RequestError, DriverError, MpsError.
        """
        shim_directory = await self._book.on_disk(self._shim.installed)
        pod = self._pods.by_uid.get(grant.pod_uid)
        if pod is not None:  # without its pod a grant ends, and nothing starts from its files
            _, asked = request_of_container(pod, grant.container)
            remembered = await self._book.on_disk(self._kubelet_memory.remembered)
            kept = answer_kept(remembered, grant.resource, frozenset(grant.device_ids), grant.pod_uid, grant.container)
            by_cdi = await self._enters_by_cdi(self._kubelet_memory.answer(kept))
            allowed = self._backends.abilities.most_memory_burst if by_cdi else 1.0
            preferences = within_burst(asked, allowed)
            _tell_of_less_burst(grant, asked, preferences)
            provided = [await self._backends.provide(grant)]
            limits, spec = self._contents(Planned(grant, (), preferences), self._watch.board, shim_directory, provided)
            await self._book.rewrite(grant, limits, spec)

    def _contents(
        self, planned: Planned, board: DeviceBoard, shim_directory: Path, provided: Sequence[Provision]
    ) -> tuple[Limits, Callable[[], Mapping[str, Any]]]:
        """Return what a grant's files say; the CDI spec is made later, when ``provided`` has the grant's provision."""
        grant = planned.grant

        def spec() -> Mapping[str, Any]:
            (provision,) = provided
            uuids = [provision.instances[name].uuid if name in provision.instances else name for name in grant.device_names]
            host = self._cdi.host_spec(uuids)
            devices = [self._injected(name, provision, board, host) for name in grant.device_names]
            shim = self._shim_files(planned, shim_directory, front_possible=host is not None and host.has_driver)
            nodes = () if host is not None else self._cdi.present_nodes()
            return container_spec(grant.grant_id, devices, host, shim, nodes, added=provision.edits)

        return limits_of(grant, self._options.fail_policy, planned.preferences, self._facts(grant, board)), spec

    def _reachable(self, board: DeviceBoard, ask: Ask) -> DeviceBoard:
        """Return the GPUs that local placement may choose from where kubelet's IDs have decided already."""
        if self._options.local_policy is None or is_assigned(ask.pod, ask.holder.container):
            return board
        named = {device_uuid_of(device_id) for device_id in ask.device_ids}
        return replace(board, devices=tuple(entry for entry in board.devices if not named.isdisjoint(entry.grantable_uuids)))

    def _node(self, board: DeviceBoard, live: Set[str]) -> Node:
        options = self._options
        known = (board, self._book.ledger, options.shares_per_gpu, options.boot_id, options.local_policy, self._pods.is_active)
        return Node(*known, self._backends.abilities, live)

    def _facts(self, grant: Grant, board: DeviceBoard) -> DeviceFacts:
        granted = [entry.device for entry in board.devices if any(share.device_uuid == entry.device.uuid for share in grant.shares)]
        return DeviceFacts(
            context_bytes={device.uuid: self._context_bytes(device.uuid) for device in granted},
            priority_lines={device.uuid: line_of(device.minor) for device in granted},
        )

    def _injected(self, name: str, provision: Provision, board: DeviceBoard, host: HostSpec | None) -> InjectedDevice:
        found = board.mig_instance(name)
        if found is None:
            minors = [entry.device.minor for entry in board.devices if entry.device.uuid == name]
            if not minors:
                raise StorageError(f"no CDI spec can be written for {name}: the driver has not listed it since this agent started")
            return InjectedDevice(name, minors[0])
        entry, listed = found
        instance, minor = provision.instances.get(name, listed), entry.device.minor
        if host is not None and instance.uuid in host.devices and not host.lacks_capabilities(instance.uuid):
            return InjectedDevice(instance.uuid, minor)
        nodes = self._cdi.capability_nodes(minor, instance.gpu_instance_id, instance.compute_instance_id)
        return InjectedDevice(instance.uuid, minor, nodes)

    def _shim_files(self, planned: Planned, directory: Path, *, front_possible: bool) -> ShimFiles | None:
        if not planned.grant.under_shim:
            return None  # another backend enforces it
        limits, region = self._files.paths(planned.grant.grant_id)
        # without a spec of the host the NVIDIA runtime mounts the driver after us, where no front can stand
        interposition = self._options.interposition if front_possible else Interposition.PRELOAD
        priority = planned.preferences.priority
        page = PriorityPage(self._options.priority_page, writable=priority is Priority.HIGH) if priority is not None else None
        turns = self._options.turns_page if may_burst(planned.preferences) else None
        return ShimFiles(str(directory), limits, region, interposition, page, turns)

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

    def _announce(self, planned: Planned, *, left_to_runtime: bool) -> None:
        """Args: left_to_runtime: whether nothing here names the driver's files, so that NVIDIA's runtime has to bring them."""
        grant = planned.grant
        shares = "; ".join(
            f"{share.device_uuid}: {units.format_memory(share.memory_bytes)}"
            + (f", {share.cores_percent} percent of cores" if share.cores_percent else "")
            for share in grant.shares
        )
        message = f"container {grant.container} was granted {shares}"
        if planned.preferences.paused:
            message += f", and starts paused (annotation {contract.ANNOTATION_PAUSED})"
        if left_to_runtime:
            self._telemetry.grants_without_host_spec.inc()
            message += (
                ". This node has no CDI spec of NVIDIA's, so the driver's files are left to NVIDIA's container runtime: "
                "where that is neither the node's default nor the pod's RuntimeClass, the container has no driver (aliquot doctor tells)"
            )
        logger.info(message, extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id})
        self._events.record(
            PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, contract.EVENT_REASON_GRANTED, message, warning=False)
        )


def _tell_of_less_burst(grant: Grant, asked: Preferences, given: Preferences) -> None:
    if given != asked:
        logger.warning(
            "annotation %s: %g of container %s is more than this node allows by now: its files say %g",
            contract.ANNOTATION_MEMORY_BURST,
            asked.memory_burst,
            grant.container,
            given.memory_burst,
            extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id},
        )


def _asked_again(exc: KubeletError) -> Refusal:
    return Refusal(Reason.NODE_FAILURE, f"{exc}. It is asked again at the next retry")
