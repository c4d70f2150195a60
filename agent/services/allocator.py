# SPDX-License-Identifier: Apache-2.0
"""PreStartContainer: finds the container that starts, decides what it gets, and writes its files.

This is the only step of a container's start that may wait or fail: kubelet shows the error in the pod's events and retries.
The pod's request is parsed once, as soon as the container is known; every later step uses the parsed values.
"""

import logging
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

from agent.core.backends import within_burst
from agent.core.cdi import HostSpecError
from agent.core.identity import Holder, cdi_name, device_uuid_of, grant_id
from agent.core.injection import Answer, admission_trouble, legacy_trouble
from agent.core.inventory import DeviceInventory
from agent.core.ledger import Grant
from agent.core.planning import GrantRequest, Node, Planned, is_assigned, plan_grant, read_request
from agent.core.refusal import Reason, Refusal
from agent.errors import DriverError, MpsError, ShimError, StorageError
from agent.ports.kube import PodEvent
from agent.services.backends import Backends, Provision
from agent.services.container_finder import Admission, ContainerFinder, NotFound
from agent.services.grant_contents import GrantContents
from agent.services.liveness import Liveness
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import Pod, Policy, Preferences
from aliquot.placement.request import request_of_container

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """What is configured, and what identifies the node."""

    secret: bytes
    boot_id: str
    shares_per_gpu: int
    local_policy: Policy | None
    """How this agent chooses devices; None where the scheduler assigns them."""


class Allocator:
    """Grants devices to containers that start."""

    def __init__(
        self,
        options: AllocatorOptions,
        *,
        state: AgentState,
        finder: ContainerFinder,
        contents: GrantContents,
        backends: Backends,
        liveness: Liveness,
        reporting: Reporting,
    ) -> None:
        self._options = options
        self._watch = state.watch
        self._pods = state.pods
        self._manager = state.manager
        self._finder = finder
        self._contents = contents
        self._backends = backends
        self._liveness = liveness
        self._events = reporting.events
        self._telemetry = reporting.telemetry

    def grant_id(self, resource: str, device_ids: frozenset[str]) -> str:
        """Return the id of the grant for a container with these device IDs."""
        return grant_id(self._options.secret, resource, device_ids)

    async def prestart(self, resource: str, device_ids: frozenset[str]) -> Refusal | None:
        """Grant devices to the container with these IDs and write its files; None when that succeeded."""
        with self._telemetry.prestart_seconds.time():
            refusal = await self._prestart(resource, device_ids)
        if refusal is not None:
            self._telemetry.refusal(refusal.reason)
        return refusal

    async def _prestart(self, resource: str, device_ids: frozenset[str]) -> Refusal | None:
        if not self._watch.inventory.devices:
            trouble = self._watch.trouble or "the driver lists no GPU"
            return self._refuse(None, None, Refusal(Reason.NOT_READY, f"no GPU is known on this node yet: {trouble}"))
        identifier = self.grant_id(resource, device_ids)
        found = await self._finder.find(identifier, resource, device_ids)
        if isinstance(found, NotFound):
            return self._refuse(found.holder, found.pod, found.refusal)
        parsed = read_request(found.pod, found.holder.container)
        if isinstance(parsed, Refusal):
            return self._refuse(found.holder, found.pod, parsed)
        outcome = await self._grant(GrantRequest(identifier, resource, device_ids, found.holder, found.pod, *parsed), found.admission)
        return self._refuse(found.holder, found.pod, outcome) if outcome is not None else None

    async def _grant(self, ask: GrantRequest, admission: Admission) -> Refusal | None:
        """Plan the grant, commit it and write its files; None when that succeeded."""
        try:
            shim_directory = await self._contents.shim_directory()
            host = await self._contents.host_spec()
        except (ShimError, StorageError) as exc:
            return _failure(exc)
        if (stale := self._admission_trouble(ask, admission.answer)) is not None:
            return stale
        if (outlived := await self._outlived_unclear(ask)) is not None:
            return outlived
        live = await self._live_before(ask)
        # No await from here to the commit: the ledger that the plan is made from is the one that changes.
        inventory, before = self._watch.inventory, self._manager.ledger.grants.get(ask.grant_id)
        planned = self._plan(ask, inventory, live, by_cdi=admission.by_cdi)
        if isinstance(planned, Refusal):
            return planned
        if (failed := await self._commit(planned, inventory, shim_directory, admission)) is not None:
            return failed
        if _is_new(planned.grant, before):
            self._announce(planned, left_to_runtime=admission.by_cdi and host is None)
        return None

    def _plan(self, ask: GrantRequest, inventory: DeviceInventory, live: Set[str], *, by_cdi: bool) -> Planned | Refusal:
        """Decide what the container gets. Without CDI, only devices that kubelet's IDs name are possible."""
        planned = plan_grant(ask, self._node(inventory if by_cdi else self._reachable(inventory, ask), live))
        if isinstance(planned, Refusal):
            return planned
        if not by_cdi and (trouble := legacy_trouble(planned.grant, planned.preferences)) is not None:
            return trouble
        _warn_burst_capped(planned.grant, ask.preferences, planned.preferences)
        return planned

    async def _commit(self, planned: Planned, inventory: DeviceInventory, shim_directory: Path, admission: Admission) -> Refusal | None:
        """Put the grant into the ledger, prepare its backend and write its files; None when that succeeded."""
        provided: list[Provision] = []

        async def provide() -> None:
            provided.append(await self._backends.provide(planned.grant))

        try:
            contents = self._contents.compose(planned, inventory, shim_directory, provided)
            await self._manager.commit(planned, *contents, inventory, self._options.shares_per_gpu, provide)
            # a container with a CDI name gets the shim from its CDI spec, not from this directory
            if not admission.by_cdi or admission.answer is None:
                await self._contents.link_shim(planned.grant.grant_id, shim_directory)
        except (StorageError, HostSpecError) as exc:
            return _failure(exc)
        except (DriverError, MpsError) as exc:
            return await self._withdraw(planned.grant, exc)
        return None

    async def _live_before(self, ask: GrantRequest) -> Set[str]:
        """Return the ids of other pods' grants with these IDs that still have a process."""
        earlier = [grant for grant in self._manager.ledger.holding_any(ask.resource, ask.device_ids) if grant.pod_uid != ask.pod.uid]
        return await self._liveness.live(earlier)

    async def _outlived_unclear(self, ask: GrantRequest) -> Refusal | None:
        """Return a refusal if a process of a container with these IDs and a damaged ledger row still runs; None otherwise."""
        if ask.grant_id not in self._manager.ledger.unclear:
            return None
        if not await self._manager.on_regions(lambda: self._liveness.locked((ask.grant_id,))):
            return None
        return Refusal(
            Reason.IDS_HELD,
            f"kubelet gave {ask.holder} IDs of a container with a damaged ledger row, and a process of that container still runs. "
            "The agent checks again when kubelet retries",
        )

    def _admission_trouble(self, ask: GrantRequest, answer: Answer | None) -> Refusal | None:
        """Return why the reply of Allocate is useless on this node by now; None when it is right or unknown."""
        if answer is None:
            return None
        trouble = admission_trouble(
            answer,
            ask.holder.container,
            ask.resource,
            cdi_name(ask.grant_id),
            str(self._contents.directory(ask.grant_id)),
            name_leads_nowhere=self._finder.resolves_no_name,
        )
        return Refusal(Reason.ADMISSION_STALE, trouble) if trouble else None

    async def _withdraw(self, grant: Grant, trouble: DriverError | MpsError) -> Refusal:
        """Release a grant after its backend failed, so that the next attempt may choose another device."""
        try:
            await self._manager.release((grant,))
        except StorageError as exc:
            return Refusal(Reason.NODE_FAILURE, f"{trouble}; and {exc}. The agent tries again when kubelet retries")
        return _failure(trouble)

    async def rewrite(self, grant: Grant) -> None:
        """Write the files of a grant again, for the same devices and amounts, even if the pod's assignment has changed.

        Raises: ShimError, StorageError, HostSpecError, RequestError, DriverError, MpsError.
        """
        shim_directory = await self._contents.shim_directory()
        pod = self._pods.by_uid.get(grant.pod_uid)
        if pod is None:  # the grant ends without its pod, and no container starts from its files
            return
        _, asked = request_of_container(pod, grant.container)
        admission = await self._finder.admission_of(grant)
        preferences = within_burst(asked, self._backends.abilities.most_memory_burst if admission.by_cdi else 1.0)
        _warn_burst_capped(grant, asked, preferences)
        provided = [await self._backends.provide(grant)]
        limits, spec = self._contents.compose(Planned(grant, (), preferences), self._watch.inventory, shim_directory, provided)
        await self._manager.rewrite(grant, limits, spec)

    def _reachable(self, inventory: DeviceInventory, ask: GrantRequest) -> DeviceInventory:
        """Return the GPUs that local placement may choose from where kubelet's IDs have already decided."""
        if self._options.local_policy is None or is_assigned(ask.pod, ask.holder.container):
            return inventory
        named = {device_uuid_of(device_id) for device_id in ask.device_ids}
        return replace(inventory, devices=tuple(entry for entry in inventory.devices if not named.isdisjoint(entry.grantable_uuids)))

    def _node(self, inventory: DeviceInventory, live: Set[str]) -> Node:
        options = self._options
        known = (inventory, self._manager.ledger, options.shares_per_gpu, options.boot_id, options.local_policy, self._pods.is_active)
        return Node(*known, self._backends.abilities, live)

    def _refuse(self, holder: Holder | None, pod: Pod | None, refusal: Refusal) -> Refusal:
        """Log a refusal, and record it as an event where the pod is known."""
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
        """Log a grant and record it as an event.

        Args: left_to_runtime: whether the CDI spec names no driver files, so that NVIDIA's runtime has to mount them.
        """
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
                "where that is neither the node's default nor the pod's RuntimeClass, the container has no driver (run aliquot doctor)"
            )
        logger.info(message, extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id})
        self._events.record(
            PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, contract.EVENT_REASON_GRANTED, message, warning=False)
        )


def _is_new(grant: Grant, before: Grant | None) -> bool:
    """Whether the container gets something else than before, so that the pod's owner should know."""
    return before is None or before.shares != grant.shares or before.pod_uid != grant.pod_uid


def _failure(exc: Exception) -> Refusal:
    return Refusal(Reason.NODE_FAILURE, f"{exc}. The agent tries again when kubelet retries")


def _warn_burst_capped(grant: Grant, asked: Preferences, given: Preferences) -> None:
    if given != asked:
        logger.warning(
            "annotation %s: %g of container %s exceeds what this node allows; its limits file says %g",
            contract.ANNOTATION_MEMORY_BURST,
            asked.memory_burst,
            grant.container,
            given.memory_burst,
            extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id},
        )
