# SPDX-License-Identifier: Apache-2.0
"""Compares ledger, files, pods and kubelet. Releases grants that have ended, and cures or reports every other drift.

A pass runs every period, and soon after a grant, a pod, a GPU or a file changed, so that a dead pod's share is free within a period (I3).
``core.reconciliation`` decides which grants have ended, ``core.drift`` what else differs. This module reads, acts, and keeps since when a
drift exists.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.cdi import HostSpecError
from agent.core.drift import Cure, Drift, DriftKind, DriftPolicy, Snapshot, find_drifts, ungranted_containers
from agent.core.identity import HeldDevices, Holder
from agent.core.ledger import Grant
from agent.core.metrics import Family, family
from agent.core.owners import uses_unknown_claim
from agent.core.reconciliation import NodeView, plan_releases
from agent.errors import AgentError, KubeletError, StorageError
from agent.ports.clock import Clock
from agent.ports.kube import NodeEvent, PodEvent
from agent.ports.kubelet import PodResources
from agent.ports.node_files import FileChanges
from agent.services.changes import Changes
from agent.services.evictor import Evictor
from agent.services.grant_manager import Survey
from agent.services.liveness import Liveness
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from aliquot import contract
from aliquot.contract.errors import AliquotError
from aliquot.contract.model import Pod

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""Pods end in bursts; one pass serves the burst."""
CALM_SECONDS = 1.0
"""Seconds between passes that a change starts, other than the end of a pod."""
LEAST_CALM = 0.1
"""Least part of a period between two passes, even if passes are slow."""
CONFIRM_PERIODS = 3
"""Periods that a drift must last before it is reported and acted on, if only a new pod cures it. The sources see one change at different
moments, and a kubelet that has just restarted lists its pods one by one."""


@dataclass(frozen=True, slots=True)
class ReconcilerOptions:
    """What is configured."""

    node_name: str
    period_seconds: float
    assigned: bool
    """Whether the scheduler's assignments decide the devices."""
    policy: DriftPolicy


@dataclass(frozen=True, slots=True)
class OpenDrift:
    """A drift that exists, since when (monotonic), and whether it has lasted long enough to count."""

    drift: Drift
    since: float
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Witnesses:
    """What the ledger is compared with, in addition to the agent's own state."""

    pod_resources: PodResources
    liveness: Liveness
    file_changes: FileChanges
    resources: Callable[[], Set[str]]
    """Returns the names of the resources that kubelet is offered."""
    grant_id: Callable[[str, frozenset[str]], str]
    """Returns the grant id of device IDs of a resource."""


@dataclass(frozen=True, slots=True)
class Cures:
    """What the reconciler can do about a drift."""

    rewrite: Callable[[Grant], Awaitable[None]]
    """Writes the files of a grant as they should be; may raise AgentError, AliquotError or HostSpecError."""
    evictor: Evictor


class Reconciler:
    """One pass, and the loop of passes."""

    def __init__(
        self,
        options: ReconcilerOptions,
        *,
        state: AgentState,
        witnesses: Witnesses,
        cures: Cures,
        reporting: Reporting,
        clock: Clock,
    ) -> None:
        self._options = options
        self._watch = state.watch
        self._pods = state.pods
        self._manager = state.manager
        self._pod_resources = witnesses.pod_resources
        self._liveness = witnesses.liveness
        self._file_changes = witnesses.file_changes
        self._resources = witnesses.resources
        self._grant_id = witnesses.grant_id
        self._rewrite = cures.rewrite
        self._evictor = cures.evictor
        self._events = reporting.events
        self._telemetry = reporting.telemetry
        self._clock = clock
        self._files_changed = False
        self._absent_since: dict[str, float] = {}
        self._wake = Changes()
        self.open_drifts: tuple[OpenDrift, ...] = ()
        """The drifts of the last pass; replaced as a whole, so any thread may read it."""
        self.passed_at: float | None = None
        """When the last pass ended (monotonic)."""

    async def run(self) -> None:
        """Reconcile every period, and after each relevant change, until cancelled."""
        self._file_changes.start(self._take_file_change)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wake.follow(self._pods.pod_changes))
            group.create_task(self._wake.follow(self._manager.changes))
            group.create_task(self._wake.follow(self._watch.changes))
            group.create_task(self._pass_for_ever())

    def families(self) -> Iterable[Family]:
        """Return the drifts of each container, as of the last pass; for any thread. Stray files belong to no container."""
        found = [(one.drift.holder, str(one.drift.kind)) for one in self.open_drifts if one.drift.holder is not None]
        counts = Counter((self._options.node_name, of.namespace, of.pod, of.container, kind) for of, kind in found)
        labels = ("node", "namespace", "pod", "container", "kind")
        text = "Differences between ledger, files, pods and kubelet that concern the container now, by kind."
        yield family("container_drift", text, labels, sorted(counts.items()))

    async def reconcile(self) -> None:
        """Do one pass. Raises StorageError."""
        with self._telemetry.reconcile_seconds.time():
            held = await self._held()
            waiting, stuck = await self._release_ended(held) if self._pods.synced else ((), frozenset())
            unclear_holders = self._holders_of_unclear(held or ())
            if held is not None and self._pods.synced and self._manager.ledger.unclear:
                await self._settle_unclear(unclear_holders)
            survey = await self._manager.survey(leaving_out=stuck)
            self._remember(find_drifts(self._snapshot(survey, held, waiting, unclear_holders)))
            await self._cure(survey)
        self.passed_at = self._clock.monotonic()

    async def _held(self) -> Sequence[HeldDevices] | None:
        try:
            return await self._pod_resources.held()
        except KubeletError as exc:
            logger.warning("reconciling without PodResources: %s", exc)
            return None

    # --- grants that have ended ---

    async def _release_ended(self, held: Sequence[HeldDevices] | None) -> tuple[tuple[Grant, ...], Set[str]]:
        """Release grants that have ended.

        Returns: grants without a pod that another source keeps alive, and the ids of grants that could not be released. The files that
            those have left are no drift and are not rewritten: the next pass retries the release.
        """
        suspects = self._suspects()
        if not suspects:
            self._absent_since.clear()
            return (), frozenset()
        signs = await self._liveness.signs(suspects)
        now = self._clock.monotonic()
        self._absent_since = {grant.grant_id: self._absent_since.get(grant.grant_id, now) for grant in suspects}
        absent_seconds = {identifier: now - since for identifier, since in self._absent_since.items()}
        view = NodeView(self._pods.by_uid, held, signs.live, signs.claimed)
        plan = plan_releases(self._manager.ledger.with_ids, view, absent_seconds)
        try:
            await self._manager.release(plan.release)
        except StorageError as exc:
            logger.error("reconciling: %s", exc)  # noqa: TRY400 - the sentence says it all
        stuck = frozenset(grant.grant_id for grant in plan.release if self._manager.ledger.grants.get(grant.grant_id) is grant)
        for grant in plan.release:
            if grant.grant_id not in stuck:
                logger.info(
                    "grant released: its pod has gone",
                    extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id},
                )
        return plan.waiting, stuck

    def _suspects(self) -> list[Grant]:
        """Return the grants without a running pod in the API. Grants of claims end otherwise (``services.claims``)."""
        return [grant for grant in self._manager.ledger.with_ids if not self._pods.is_active(grant.pod_uid)]

    # --- grants with a damaged row and a damaged copy ---

    def _holders_of_unclear(self, held: Iterable[HeldDevices]) -> Mapping[str, tuple[Holder, str]]:
        """Return the container and pod UID of each unclear grant that kubelet lists, by grant id, unless its pod has ended."""
        unclear = self._manager.ledger.unclear
        active = {(pod.namespace, pod.name): pod for pod in self._pods.by_uid.values() if pod.active}
        found = {}
        for one in held if unclear else ():
            identifier = self._grant_id(one.resource, frozenset(one.device_ids))
            pod = active.get((one.namespace, one.pod))
            if identifier in unclear and (pod is not None or not self._pods.fresh):
                found[identifier] = Holder(one.namespace, one.pod, one.container), pod.uid if pod is not None else ""
        return found

    async def _settle_unclear(self, holders: Mapping[str, object]) -> None:
        """Forget an unclear grant when its container has ended.

        Kubelet does not list such a container, no process locks its usage region, and no container runs without a known grant. Kubelet
        lists no containers with claims: while a pod uses a claim without a known grant, an unclear grant may be that claim's.
        """
        ledger, pods = self._manager.ledger, self._pods.by_uid.values()
        suspects = [identifier for identifier in ledger.unclear if identifier not in holders]
        if not suspects or ungranted_containers(ledger.grants.values(), pods, self._resources()):
            return
        if uses_unknown_claim(pods, ledger.grants.values()):
            return
        live = await self._manager.on_regions(lambda: self._liveness.locked(suspects))
        if ended := [identifier for identifier in suspects if identifier not in live]:
            self._manager.settle_unclear(ended)
            logger.info("grants with a damaged ledger row have ended: their GPUs take new containers again", extra={"grants": ended})

    # --- drift ---

    def _snapshot(
        self,
        survey: Survey,
        held: Sequence[HeldDevices] | None,
        waiting: Sequence[Grant],
        unclear_holders: Mapping[str, tuple[Holder, str]],
    ) -> Snapshot:
        instances = [instance for entry in self._watch.inventory.devices for instance in entry.device.mig_instances]
        return Snapshot(
            survey.grants,
            survey.files,
            pods_by_uid=self._pods.by_uid if self._pods.fresh else None,
            held=held,
            device_uuids=self._grantable_uuids(),
            waiting=waiting,
            resources=self._resources(),
            assigned=self._options.assigned,
            profiles={instance.uuid: instance.profile for instance in instances},
            unclear=self._manager.ledger.unclear,
            unclear_holders=unclear_holders,
        )

    def _grantable_uuids(self) -> Set[str] | None:
        """Return the names that shares may have; None while a GPU may exist that has no known UUID, so no name is certainly wrong."""
        inventory = self._watch.inventory
        if not inventory.devices or inventory.unidentified or self._watch.trouble:
            return None
        return frozenset(uuid for entry in inventory.devices for uuid in entry.grantable_uuids)

    def _remember(self, drifts: Iterable[Drift]) -> None:
        now = self._clock.monotonic()
        known = {(one.drift.kind, one.drift.subject): one for one in self.open_drifts}
        open_drifts = []
        for drift in drifts:
            before = known.get((drift.kind, drift.subject))
            since = before.since if before is not None else now
            confirmed = drift.cure is not Cure.EVICT or now - since >= CONFIRM_PERIODS * self._options.period_seconds
            open_drifts.append(OpenDrift(drift, since, confirmed))
            if confirmed and (before is None or not before.confirmed):
                self._report(drift)
        self.open_drifts = tuple(open_drifts)
        counts = Counter(one.drift.kind for one in open_drifts)
        for kind in DriftKind:
            self._telemetry.drift(kind, counts[kind])

    def _report(self, drift: Drift) -> None:
        holder = drift.holder
        about = {"kind": str(drift.kind), "pod": f"{holder.namespace}/{holder.pod}" if holder else None, "pod_uid": drift.pod_uid or None}
        logger.warning("drift: %s", drift.sentence, extra=about)
        reason, node = contract.EVENT_REASON_DRIFT, self._pods.node
        if holder is not None and self._pods.is_active(drift.pod_uid):
            event = PodEvent(holder.namespace, holder.pod, drift.pod_uid, holder.container, reason, drift.sentence, warning=True)
            self._events.record(event)
        elif node is not None:
            self._events.record(NodeEvent(self._options.node_name, node.uid, reason, drift.sentence, warning=True))

    async def _cure(self, survey: Survey) -> None:
        if any(one.drift.cure is Cure.REMOVE for one in self.open_drifts):
            swept = await self._manager.sweep()
            self._telemetry.drift_cures.labels(DriftKind.STRAY_FILES, Cure.REMOVE).inc(len(swept))
        for one in self.open_drifts:
            if one.drift.cure is Cure.EVICT and one.confirmed:
                await self._cure_pod(one.drift)
        for identifier, kinds in self._damaged_files().items():
            await self._cure_files(survey.grants[identifier], kinds)

    def _damaged_files(self) -> Mapping[str, Sequence[DriftKind]]:
        """Return the drifts that rewriting files cures, by grant id; not for grants of a missing device, which have no right files."""
        without_device = {one.drift.subject for one in self.open_drifts if one.drift.kind is DriftKind.UNKNOWN_DEVICE}
        damaged: dict[str, list[DriftKind]] = defaultdict(list)
        for one in self.open_drifts:
            if one.drift.cure is Cure.REWRITE and one.drift.subject not in without_device:
                damaged[one.drift.subject].append(one.drift.kind)
        return damaged

    async def _cure_files(self, grant: Grant, kinds: Iterable[DriftKind]) -> None:
        try:
            await self._rewrite(grant)
        except (AgentError, AliquotError, HostSpecError) as exc:
            logger.warning("drift not cured: %s", exc, extra={"grant": grant.grant_id})
            return
        for kind in kinds:
            self._telemetry.drift_cures.labels(kind, Cure.REWRITE).inc()

    async def _cure_pod(self, drift: Drift) -> None:
        if self._options.policy is not DriftPolicy.EVICT or drift.holder is None:
            return
        if await self._evictor.evict(drift.holder, drift.pod_uid, drift.sentence):
            self._telemetry.drift_cures.labels(drift.kind, drift.cure).inc()

    # --- when the next pass runs ---

    async def _pass_for_ever(self) -> None:
        # at the start, registration comes first, and drift cannot be judged before the pods are known
        await self._pods.wait_until(lambda: self._pods.synced, self._options.period_seconds)
        while True:
            begun, seen, written = self._clock.monotonic(), self._relevant(), self._manager.changes.count
            self._files_changed = False
            try:
                await self.reconcile()
            except StorageError as exc:
                logger.error("reconciling: %s", exc)  # noqa: TRY400 - the sentence says it all
            if self._manager.changes.count != written:  # else every cure would start another pass
                self._file_changes.forget()
                self._files_changed = False
            await self._until_due(begun, seen)

    def _take_file_change(self) -> None:
        self._files_changed = True
        self._wake.notify()

    async def _until_due(self, begun: float, seen: object) -> None:
        """Wait until the next pass is due: one period after the beginning of the last, even if it was slow."""
        period_seconds = self._options.period_seconds
        known = {grant.grant_id for grant in self._suspects()}
        ended = self._clock.monotonic()
        due, due_soon = max(begun + period_seconds, ended + LEAST_CALM * period_seconds), ended + min(CALM_SECONDS, period_seconds)
        while True:
            soon = self._files_changed or self._relevant() != seen
            left = (min(due, due_soon) if soon else due) - self._clock.monotonic()
            if left <= 0:
                return
            await self._wake.after(self._wake.count, left)
            if self._pods.synced and any(grant.grant_id not in known for grant in self._suspects()):
                await asyncio.sleep(min(SETTLE_SECONDS, period_seconds))
                return

    def _relevant(self) -> object:
        """Return what starts another pass when it changes: grants, pods with GPU requests, and the grantable devices."""
        pods = {uid: _relevant_of(pod) for uid, pod in self._pods.by_uid.items() if _asks_for_gpus(pod)}
        return self._manager.ledger, pods, self._grantable_uuids()


def _asks_for_gpus(pod: Pod) -> bool:
    return any(name.startswith(contract.RESOURCE_DOMAIN) for spec in pod.containers for name in spec.limits)


def _relevant_of(pod: Pod) -> tuple[object, ...]:
    return pod.phase, pod.deletion_requested, pod.statuses, pod.annotations.get(contract.ANNOTATION_ASSIGNMENT)
