# SPDX-License-Identifier: Apache-2.0
"""Finds the container that is about to start. PreStartContainer names device IDs only.

Three steps, and each may wait for a while: kubelet's records name the pod that holds the IDs, the Kubernetes API sends this pod, and the
pod's status tells which of its containers starts.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agent.core.identity import Claim, Holder, RememberedDevices, answer_kept, find_claim, starting_container
from agent.core.injection import Answer
from agent.core.ledger import Grant
from agent.core.refusal import Reason, Refusal
from agent.errors import KubeletBusyError, KubeletError
from agent.ports.clock import Clock
from agent.ports.kubelet import KubeletCheckpoint, PodResources
from agent.services.injection import Injection
from agent.services.state import AgentState
from aliquot import contract
from aliquot.contract.model import Pod

T = TypeVar("T")

HOLDER_WAIT_SECONDS = 2.0
"""Seconds to wait for the holder of the IDs: an init container is recognised by its pod's spec, which may come a moment later."""
HOLDER_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Admission:
    """How kubelet admitted a container, and so how its devices enter it."""

    answer: Answer | None
    """The reply of Allocate, from kubelet's checkpoint; None when the checkpoint does not have it."""
    by_cdi: bool
    """Whether the container gets its devices by CDI name: as Allocate replied, or as it would reply now where that is unknown."""


@dataclass(frozen=True, slots=True)
class StartingContainer:
    """The container that starts, and its pod as known at this moment."""

    holder: Holder
    pod: Pod
    admission: Admission


@dataclass(frozen=True, slots=True)
class NotFound:
    """Why the container was not found, and what was found of it."""

    refusal: Refusal
    holder: Holder | None = None
    pod: Pod | None = None


class ContainerFinder:
    """Finds containers by their device IDs."""

    def __init__(
        self,
        pod_wait_seconds: float,
        *,
        state: AgentState,
        pod_resources: PodResources,
        checkpoint: KubeletCheckpoint,
        injection: Injection,
        clock: Clock,
        cordon_known: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make the finder.

        Args:
            pod_wait_seconds: how long a pod may take to appear in the API.
            cordon_known: whether the API has reported which GPUs are cordoned.
        """
        self._pod_wait_seconds = pod_wait_seconds
        self._pods = state.pods
        self._manager = state.manager
        self._pod_resources = pod_resources
        self._checkpoint = checkpoint
        self._injection = injection
        self._clock = clock
        self._cordon_known = cordon_known

    @property
    def resolves_no_name(self) -> bool:
        """Whether a CDI name from an earlier reply of Allocate certainly resolves to no device now."""
        return self._injection.resolves_no_name

    async def find(self, grant_id: str, resource: str, device_ids: frozenset[str]) -> StartingContainer | NotFound:
        """Find the container that kubelet starts with these IDs. Args: grant_id: of these IDs."""
        try:
            found = await self._find_claim(resource, device_ids)
        except KubeletError as exc:
            return NotFound(_kubelet_failure(exc))
        if isinstance(found, Refusal):
            return NotFound(found)
        claim, remembered = found
        named = Holder(claim.namespace, claim.pod, claim.listed or "")
        pod = await self._find_pod(claim, grant_id)
        if isinstance(pod, Refusal):
            return NotFound(pod, named)
        settled = await self._settle(claim, pod, resource, device_ids)
        if isinstance(settled, Refusal):
            return NotFound(settled, named, pod)
        holder, pod = settled
        kept = answer_kept(remembered, resource, device_ids, pod.uid, holder.container)
        return StartingContainer(holder, pod, await self._admission(kept))

    async def admission_of(self, grant: Grant) -> Admission:
        """Return how kubelet admitted a granted container."""
        remembered = await self._manager.on_disk(self._checkpoint.remembered)
        kept = answer_kept(remembered, grant.resource, frozenset(grant.device_ids), grant.pod_uid, grant.container)
        return await self._admission(kept)

    async def _admission(self, kept: bytes) -> Admission:
        """Args: kept: the reply of Allocate as the checkpoint has it; empty when it does not have it."""
        answer = self._checkpoint.answer(kept)
        return Admission(answer, bool(answer.cdi_name) if answer is not None else await self._injection.by_cdi())

    async def _find_claim(self, resource: str, device_ids: frozenset[str]) -> tuple[Claim, Sequence[RememberedDevices]] | Refusal:
        """Find the pod that holds the IDs; return it with the contents of kubelet's checkpoint at that moment."""

        async def look(last_look: bool) -> tuple[Claim, Sequence[RememberedDevices]] | Refusal:
            try:
                listing = await self._pod_resources.held()
            except KubeletBusyError as exc:
                return _kubelet_failure(exc)
            remembered = await self._manager.on_disk(self._checkpoint.remembered)
            claim = find_claim(listing, remembered, resource, device_ids, self._pods, last_look=last_look and self._pods.fresh)
            return claim if isinstance(claim, Refusal) else (claim, remembered)

        return await self._patiently(look)

    async def _patiently(self, look: Callable[[bool], Awaitable[T | Refusal]]) -> T | Refusal:
        """Look until the result is no refusal, or the time is up. The argument of ``look`` says whether this is the last look."""
        deadline = self._clock.monotonic() + HOLDER_WAIT_SECONDS
        while True:
            last_look = self._clock.monotonic() >= deadline
            found = await look(last_look)
            if not isinstance(found, Refusal) or last_look:
                return found
            await self._pods.pod_changes.after(self._pods.pod_changes.count, HOLDER_POLL_SECONDS)

    async def _find_pod(self, claim: Claim, grant_id: str) -> Pod | Refusal:
        """Wait until the pod is known. During an API outage the cached pod is enough for a restarting container, not for a new one."""

        def wanted() -> Pod | None:
            pod = self._pods.startable(claim.namespace, claim.pod)
            return pod if pod is not None and (not claim.uids or pod.uid in claim.uids) else None

        def known() -> bool:
            pod = wanted()
            granted = self._manager.ledger.grants.get(grant_id)
            restarting = granted is not None and pod is not None and (granted.pod_uid, granted.container) == (pod.uid, claim.listed)
            return pod is not None and (restarting or (self._pods.fresh and self._cordon_known()))

        found = await self._pods.wait_until(known, self._pod_wait_seconds)
        pod = wanted()
        if found and pod is not None:
            return pod
        if pod is not None and self._pods.fresh:
            return Refusal(
                Reason.NOT_READY,
                f"cordons are unknown: the Kubernetes API has not returned {contract.GPU_NODE_PLURAL} within "
                f"{self._pod_wait_seconds:g} s. The agent checks again when kubelet retries",
            )
        why = self._pods.trouble or "it may be being deleted, or an earlier pod of this name has not gone yet"
        return Refusal(
            Reason.POD_MISSING,
            f"pod {claim.namespace}/{claim.pod} did not appear in the Kubernetes API within {self._pod_wait_seconds:g} s: {why}. "
            "The agent checks again when kubelet retries",
        )

    async def _settle(self, claim: Claim, pod: Pod, resource: str, device_ids: frozenset[str]) -> tuple[Holder, Pod] | Refusal:
        """Find out which of the pod's containers starts; return it with the pod as known at that moment."""

        async def look(last_look: bool) -> tuple[Holder, Pod] | Refusal:
            now = self._pods.by_uid.get(pod.uid, pod)
            granted = {
                grant.container
                for grant in self._manager.ledger.holding_any(resource, device_ids)
                if grant.pod_uid == pod.uid and frozenset(grant.device_ids) == device_ids
            }
            name = starting_container(now, claim.listed, resource, len(device_ids), granted, last_look=last_look)
            return name if isinstance(name, Refusal) else (Holder(claim.namespace, claim.pod, name), now)

        return await self._patiently(look)


def _kubelet_failure(exc: KubeletError) -> Refusal:
    return Refusal(Reason.NODE_FAILURE, f"{exc}. The agent checks again when kubelet retries")
