# SPDX-License-Identifier: Apache-2.0
"""Prepares ResourceClaims: reads what was allocated, decides, commits the grants, and releases them again.

A grant belongs to one request of a claim, or to several that a container uses together. It never belongs to a pod: kubelet does not call
again for a second pod on a prepared claim. Kubelet retries a failed call only with the pod's next sync, a minute or more later. So a call
waits for what passes by itself, and fails at once for what is wrong. Calls about other claims go on meanwhile.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from agent.core.cdi import HostSpecError
from agent.core.claim_groups import groups_of, of_every_request
from agent.core.claims import AllocatedClaim, ClaimNode, ClaimRef, RequestGroup, device_status, plan_group
from agent.core.ledger import Grant
from agent.core.planning import Planned
from agent.core.refusal import Reason, Refusal
from agent.errors import AgentError, StorageError
from agent.ports.clock import Clock
from agent.ports.kube import PodEvent
from agent.services.backends import Backends, Provision
from agent.services.claim_requests import ClaimRequests
from agent.services.grant_contents import GrantContents
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.errors import ContractError
from aliquot.kube.errors import KubeApiError, KubeNotFoundError

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 40.0
"""How long a call waits for what passes."""
LAST_TRY_SECONDS: Final = 3.0
"""How long the last try of a call that has waited may take."""
ROOM_SECONDS: Final = 10.0
"""How long a call waits for room. The end of a pod may free a claim for the scheduler before kubelet releases it here."""
POD_SECONDS: Final = 5.0
"""How long the pods of a claim may take to appear in the watch."""
LOOK_SECONDS: Final = 0.5
SANDBOX_SECONDS: Final = 0.05
"""Kubelet prepares claims before it makes the sandbox of a pod, and containers after it. A sandbox takes at least this long."""
_PASSING: Final[Mapping[str, float]] = {
    Reason.NOT_READY: WAIT_SECONDS,
    Reason.NODE_FAILURE: WAIT_SECONDS,
    Reason.OVERCOMMITTED: ROOM_SECONDS,
}
"""Refusals that may pass, and how long a call waits for that."""


@dataclass(frozen=True, slots=True)
class ClaimOptions:
    """What is configured, and what identifies the node."""

    secret: bytes
    boot_id: str
    node_name: str
    shares_per_gpu: int
    admin_access: bool = False


class ClaimManager:
    """The claims that are prepared on this node."""

    def __init__(
        self,
        options: ClaimOptions,
        *,
        state: AgentState,
        requests: ClaimRequests,
        contents: GrantContents,
        backends: Backends,
        reporting: Reporting,
        clock: Clock,
    ) -> None:
        self._options = options
        self._watch = state.watch
        self._pods = state.pods
        self._manager = state.manager
        self._requests = requests
        self._contents = contents
        self._backends = backends
        self._events = reporting.events
        self._telemetry = reporting.telemetry
        self._clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reports: set[asyncio.Task[None]] = set()

    async def prepare(self, ref: ClaimRef, wait_seconds: float = WAIT_SECONDS) -> Sequence[Grant] | Refusal:
        """Grant a claim's devices and write the files; return the grants in the order of the claim's requests.

        Args: wait_seconds: how long to wait for what passes. The reply may take ``LAST_TRY_SECONDS`` more.
        """
        with self._telemetry.prepare_seconds.time(), self._requests.first():
            outcome = await self._in_time(ref, wait_seconds)
        if isinstance(outcome, Refusal):
            self._telemetry.refusal(outcome.reason)
            logger.warning("claim refused: %s", outcome.message, extra={"reason": str(outcome.reason), "claim": str(ref)})
        return outcome

    async def unprepare(self, ref: ClaimRef) -> str:
        """Release a claim's grants; return why that failed, or an empty text. A claim that is not prepared is no failure."""
        async with self._lock(ref.uid):
            return await self._release(ref)

    async def rewrite(self, grant: Grant) -> None:
        """Write the files of a claim's grant again. Raises AgentError, HostSpecError."""
        if grant.claim is None:
            return
        shim_directory = await self._contents.shim_directory()
        provided = [await self._backends.provide(grant)]
        planned = Planned(grant, (), grant.claim.preferences)
        await self._manager.rewrite(grant, *self._contents.compose(planned, self._watch.inventory, shim_directory, provided))

    async def release_if(self, uid: str, is_unused: Callable[[Sequence[Grant]], Awaitable[bool]]) -> None:
        """Release a claim without a call of kubelet if its grants are unused, while no call about it goes on."""
        async with self._lock(uid):
            grants = self._manager.ledger.of_claim(uid)
            claim = next((grant.claim for grant in grants), None)
            if claim is not None and await is_unused(grants):
                logger.warning("claim released: it is not in use any more, and kubelet did not call", extra={"claim": claim.name})
                await self._release(ClaimRef(grants[0].namespace, claim.name, uid))

    async def _release(self, ref: ClaimRef) -> str:
        grants = self._manager.ledger.of_claim(ref.uid)
        try:
            await self._manager.release(grants)
        except StorageError as exc:
            logger.warning("claim not released: %s", exc, extra={"claim": str(ref)})
            return str(exc)
        if grants:
            logger.info("claim released", extra={"claim": str(ref)})
        return ""

    # --- one claim ---

    def _lock(self, uid: str) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    async def _in_time(self, ref: ClaimRef, wait_seconds: float) -> Sequence[Grant] | Refusal:
        most_seconds = wait_seconds + LAST_TRY_SECONDS
        try:
            async with asyncio.timeout(most_seconds), self._lock(ref.uid):
                return await self._patiently(ref, wait_seconds)
        except TimeoutError:  # a file change in progress goes on, and the next try finds it
            slow = "the API server, or a disk of the node, is slow"
            message = f"claim {ref} was not prepared in {most_seconds:.0f} s: {slow}. The agent tries again when kubelet retries"
            return Refusal(Reason.NODE_FAILURE, message)

    async def _patiently(self, ref: ClaimRef, wait_seconds: float) -> Sequence[Grant] | Refusal:
        """Try until the claim is prepared, is refused for good, or the time is up."""
        begun = self._clock.monotonic()
        while True:
            seen = self._manager.changes.count
            outcome = await self._try(ref)
            if not isinstance(outcome, Refusal):
                return outcome
            left = begun + min(_PASSING.get(outcome.reason, 0.0), wait_seconds) - self._clock.monotonic()
            if left <= 0:
                return outcome
            await self._manager.changes.paced_after(seen, min(left, LOOK_SECONDS))

    async def _try(self, ref: ClaimRef) -> Sequence[Grant] | Refusal:
        if (known := await self._prepared(ref)) is not None:
            return known
        if not self._watch.inventory.devices:
            return Refusal(Reason.NOT_READY, f"no GPU is known on this node yet: {self._watch.trouble or 'the driver lists no GPU'}")
        try:
            claim = await self._read(ref)
            if isinstance(claim, Refusal):
                return claim
            await self._pods.wait_until(lambda: all(uid in self._pods.by_uid for _, uid in claim.pods), POD_SECONDS)
            return await self._commit(ref, claim)
        except (AgentError, HostSpecError, KubeApiError) as exc:
            return Refusal(Reason.NODE_FAILURE, f"claim {ref}: {exc}. The agent tries again when kubelet retries")
        except ContractError as exc:
            return Refusal(Reason.REQUEST_INVALID, f"claim {ref}: {exc}")

    async def _prepared(self, ref: ClaimRef) -> Sequence[Grant] | None:
        """Return the grants of a claim that is prepared, with all files in place; None if something is missing."""
        grants = of_every_request(self._of_this_boot(ref))
        return grants if grants and await self._manager.are_complete(grants) else None

    async def _read(self, ref: ClaimRef) -> AllocatedClaim | Refusal:
        """Read the claim from the API. Raises KubeApiError, ContractError."""
        try:
            claim = await self._requests.read(ref.namespace, ref.name)
        except KubeNotFoundError:
            return Refusal(Reason.CLAIM_UNALLOCATED, f"claim {ref} does not exist. Delete the pod, or create the claim")
        if claim.uid != ref.uid:
            return Refusal(Reason.CLAIM_UNALLOCATED, f"claim {ref} has UID {claim.uid} now, kubelet prepares {ref.uid}. Delete the pod")
        if not claim.allocated:
            return Refusal(Reason.CLAIM_UNALLOCATED, f"claim {ref} is not allocated. Delete the pod so that it is scheduled again")
        return claim

    async def _commit(self, ref: ClaimRef, claim: AllocatedClaim) -> Sequence[Grant] | Refusal:
        """Grant all requests together; if one is refused, grant nothing new. Raises AgentError, HostSpecError."""
        shim_directory = await self._contents.shim_directory()
        prepared = self._of_this_boot(ref)
        groups = groups_of(ref, claim, self._pods.by_uid, prepared)
        if isinstance(groups, Refusal):
            return groups
        before = {grant.grant_id: grant for grant in prepared}
        made: list[Grant] = []
        for number, group in enumerate(groups):
            # No await from here to the commit: the ledger that the plan is made from is the one that changes.
            planned = plan_group(ref, claim, group, self._node()) if number else self._first_of(ref, claim, groups)
            if isinstance(planned, Refusal):  # containers may use what was granted before; kubelet releases it after they have ended
                await self._manager.release([grant for grant in made if grant.grant_id not in before])
                return planned
            made.append(planned.grant)
            earlier = before.get(planned.grant.grant_id)
            await self._write(planned, shim_directory, mounted=earlier is not None and earlier.device_names == planned.grant.device_names)
        for grant in made:
            self._announce(grant)
        self._report_devices(ref, made)
        return made

    def _of_this_boot(self, ref: ClaimRef) -> Sequence[Grant]:
        return [grant for grant in self._manager.ledger.of_claim(ref.uid) if grant.boot_id == self._options.boot_id]

    def _first_of(self, ref: ClaimRef, claim: AllocatedClaim, groups: Sequence[RequestGroup]) -> Planned | Refusal:
        """Plan the first grant; refuse if another one does not fit beside it now: then no file is written for any of them."""
        node = self._node()
        first = planned = plan_group(ref, claim, groups[0], node)
        for group in groups[1:]:
            if isinstance(planned, Refusal):
                break
            left = node.ledger.releasing(grant.grant_id for grant in planned.superseded)
            node = replace(node, ledger=left.granting(planned.grant, node.inventory, node.shares_per_gpu))
            planned = plan_group(ref, claim, group, node)
        return planned if isinstance(planned, Refusal) else first

    async def _write(self, planned: Planned, shim_directory: Path, *, mounted: bool) -> None:
        inventory = self._watch.inventory
        provided: list[Provision] = []

        async def provide() -> None:
            provided.append(await self._backends.provide(planned.grant))

        contents = self._contents.compose(planned, inventory, shim_directory, provided)
        shares = self._options.shares_per_gpu
        await self._manager.commit(planned, *contents, inventory, shares, provide, mounted=mounted, start_seconds=SANDBOX_SECONDS)

    def _node(self) -> ClaimNode:
        options = self._options
        return ClaimNode(
            options.secret,
            options.boot_id,
            options.node_name,
            options.shares_per_gpu,
            self._watch.inventory,
            self._manager.ledger,
            self._backends.abilities,
            self._pods.by_uid,
            options.admin_access,
        )

    # --- reports ---

    def _announce(self, grant: Grant) -> None:
        shares = (
            "admin access"
            if not grant.takes_part
            else "; ".join(
                f"{share.device_uuid}: {units.format_memory(share.memory_bytes)}"
                + (f", {share.cores_percent} percent of cores" if share.cores_percent else "")
                for share in grant.shares
            )
        )
        message = f"{grant.claim} {'were' if grant.claim is not None and grant.claim.joined else 'was'} granted {shares}"
        logger.info(message, extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id})
        if grant.pod_uid:
            self._events.record(
                PodEvent(grant.namespace, grant.pod, grant.pod_uid, grant.container, contract.EVENT_REASON_GRANTED, message, warning=False)
            )

    def _report_devices(self, ref: ClaimRef, grants: Iterable[Grant]) -> None:
        """Write into the claim's status what was prepared; after the reply, and only as information."""
        task = asyncio.ensure_future(self._write_status(ref, partial(device_status, grants, self._clock.now())))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _write_status(self, ref: ClaimRef, devices: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        try:
            await self._requests.report(ref.namespace, ref.name, ref.uid, devices)
        except KubeApiError as exc:
            logger.warning("status of claim %s not written: %s", ref, exc)
