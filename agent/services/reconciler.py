"""Compares ledger, files, pods and kubelet, and heals what differs: releases grants that are over, and cures every other drift.

A pass runs every period, and soon after a grant, a pod, a GPU or a file changed, so that a dead pod's share is free within a period (I3).
Deciding is in ``core.reconciliation`` (which grants are over) and ``core.drift`` (what else differs); this looks, acts and remembers
since when.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from agent.core.cdi import HostSpecError
from agent.core.drift import Cure, Drift, DriftKind, DriftPolicy, Snapshot, find_drifts
from agent.core.identity import HeldDevices
from agent.core.ledger import Grant
from agent.core.metrics import Family, family
from agent.core.reconciliation import NodeView, plan_releases
from agent.errors import AgentError, KubeletError, StorageError
from agent.ports import Clock, FileChanges, NodeEvent, PodEvent, PodResources
from agent.services.changes import Changes
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.evictor import Evictor
from agent.services.grant_book import GrantBook, Survey
from agent.services.liveness import Liveness
from agent.services.pod_cache import PodCache
from agent.services.telemetry import Telemetry
from proto import contract
from proto.errors import AliquotError
from proto.model import Pod

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""Pods go in bursts; one pass serves the burst."""
CALM_SECONDS = 1.0
"""Between passes that changes bring about, other than the end of a pod."""
LEAST_CALM = 0.1
"""So much of a period at least is between passes, however long they take."""
CONFIRM_PERIODS = 3
"""A drift that only a new pod cures must last so long before it is told and acted on: the witnesses hear of one change at different
moments, and a kubelet that has just been restarted lists its pods one by one."""


@dataclass(frozen=True, slots=True)
class ReconcilerOptions:
    """What is configured."""

    node_name: str
    period_seconds: float
    assigned: bool
    """Whether the scheduler's assignments bind."""
    policy: DriftPolicy


@dataclass(frozen=True, slots=True)
class Standing:
    """A drift that is there, since when (monotonic), and whether it counts by now."""

    drift: Drift
    since: float
    confirmed: bool


class Reconciler:
    """One pass, and the loop of passes."""

    def __init__(
        self,
        options: ReconcilerOptions,
        *,
        book: GrantBook,
        pods: PodCache,
        pod_resources: PodResources,
        liveness: Liveness,
        file_changes: FileChanges,
        watch: DriverWatch,
        resources: Callable[[], Set[str]],
        rewrite: Callable[[Grant], Awaitable[None]],
        evictor: Evictor,
        events: EventRecorder,
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        """Make the reconciler.

        Args:
            resources: the names of the resources that kubelet is offered.
            rewrite: makes the files of a grant as they should be; may raise AgentError, AliquotError or HostSpecError.
        """
        self._options = options
        self._book = book
        self._pods = pods
        self._pod_resources = pod_resources
        self._liveness = liveness
        self._file_changes = file_changes
        self._files_changed = False
        self._watch = watch
        self._resources = resources
        self._rewrite = rewrite
        self._evictor = evictor
        self._events = events
        self._telemetry = telemetry
        self._clock = clock
        self._absent_since: dict[str, float] = {}
        self._wake = Changes()
        self.standing: tuple[Standing, ...] = ()
        """The drifts of the last pass; replaced as a whole, so that any thread may read it."""
        self.passed_at: float | None = None
        """When the last pass ended (monotonic)."""

    async def run(self) -> None:
        """Reconcile for ever: every period, and when something relevant changed."""
        self._file_changes.start(self._take_file_change)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._forward(self._pods.pod_changes))
            group.create_task(self._forward(self._book.changes))
            group.create_task(self._forward(self._watch.changes))
            group.create_task(self._pass_for_ever())

    def families(self) -> Iterable[Family]:
        """Return what differs of each container, as of the last pass; for any thread. Stray files are no container's."""
        found = [(one.drift.holder, str(one.drift.kind)) for one in self.standing if one.drift.holder is not None]
        counts = Counter((self._options.node_name, of.namespace, of.pod, of.container, kind) for of, kind in found)
        labels = ("node", "namespace", "pod", "container", "kind")
        text = "Differences between ledger, files, pods and kubelet now that concern the container, by what differs."
        yield family("container_drift", text, labels, sorted(counts.items()))

    async def reconcile(self) -> None:
        """Do one pass. Raises StorageError."""
        with self._telemetry.reconcile_seconds.time():
            held = await self._held()
            waiting, stuck = await self._release_ended(held) if self._pods.synced else ((), frozenset())
            survey = await self._book.survey(leaving_out=stuck)
            self._remember(find_drifts(self._snapshot(survey, held, waiting)))
            await self._cure(survey)
        self.passed_at = self._clock.monotonic()

    async def _held(self) -> Sequence[HeldDevices] | None:
        try:
            return await self._pod_resources.held()
        except KubeletError as exc:
            logger.warning("reconciling without PodResources: %s", exc)
            return None

    # --- grants that are over ---

    async def _release_ended(self, held: Sequence[HeldDevices] | None) -> tuple[tuple[Grant, ...], Set[str]]:
        """Release what is over; return grants whose pod is gone and which another witness keeps, and the ids of those that would not go.

        What is left of the latter is neither drift nor to be written again: the next pass tries once more.
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
        plan = plan_releases(self._book.ledger.grants.values(), view, absent_seconds)
        try:
            await self._book.release(plan.release)
        except StorageError as exc:
            logger.error("reconciling: %s", exc)  # noqa: TRY400 - the sentence says it all
        stuck = frozenset(grant.grant_id for grant in plan.release if self._book.ledger.grants.get(grant.grant_id) is grant)
        for grant in plan.release:
            if grant.grant_id not in stuck:
                logger.info(
                    "grant released: its pod is gone",
                    extra={"pod": f"{grant.namespace}/{grant.pod}", "pod_uid": grant.pod_uid, "grant": grant.grant_id},
                )
        return plan.waiting, stuck

    def _suspects(self) -> list[Grant]:
        """Return grants whose pod the API does not know as running."""
        return [grant for grant in self._book.ledger.grants.values() if not self._pods.is_active(grant.pod_uid)]

    # --- drift ---

    def _snapshot(self, survey: Survey, held: Sequence[HeldDevices] | None, waiting: Sequence[Grant]) -> Snapshot:
        instances = [instance for entry in self._watch.board.devices for instance in entry.device.mig_instances]
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
        )

    def _grantable_uuids(self) -> Set[str] | None:
        """Return what shares may name; None while a GPU may be there that the board cannot name: then none can be said to be gone."""
        board = self._watch.board
        if not board.devices or board.unidentified or self._watch.trouble:
            return None
        return frozenset(uuid for entry in board.devices for uuid in entry.grantable_uuids)

    def _remember(self, drifts: Iterable[Drift]) -> None:
        now = self._clock.monotonic()
        known = {(one.drift.kind, one.drift.subject): one for one in self.standing}
        standing = []
        for drift in drifts:
            before = known.get((drift.kind, drift.subject))
            since = before.since if before is not None else now
            confirmed = drift.cure is not Cure.EVICT or now - since >= CONFIRM_PERIODS * self._options.period_seconds
            standing.append(Standing(drift, since, confirmed))
            if confirmed and (before is None or not before.confirmed):
                self._tell(drift)
        self.standing = tuple(standing)
        counts = {kind: sum(one.drift.kind is kind for one in standing) for kind in DriftKind}
        for kind, count in counts.items():
            self._telemetry.drift(kind, count)

    def _tell(self, drift: Drift) -> None:
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
        if any(one.drift.cure is Cure.REMOVE for one in self.standing):
            swept = await self._book.sweep()
            self._telemetry.drift_cures.labels(DriftKind.STRAY_FILES, Cure.REMOVE).inc(len(swept))
        lost = {one.drift.subject for one in self.standing if one.drift.kind is DriftKind.UNKNOWN_DEVICE}
        torn: dict[str, list[DriftKind]] = defaultdict(list)
        for one in self.standing:
            if one.drift.cure is Cure.REWRITE and one.drift.subject not in lost:
                torn[one.drift.subject].append(one.drift.kind)
            elif one.drift.cure is Cure.EVICT and one.confirmed:
                await self._cure_pod(one.drift)
        for identifier, kinds in torn.items():
            await self._cure_files(survey.grants[identifier], kinds)

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

    # --- when to look again ---

    async def _pass_for_ever(self) -> None:
        # registration comes first at the start, and little can be said before the pods are known
        await self._pods.wait_until(lambda: self._pods.synced, self._options.period_seconds)
        while True:
            begun, seen, written = self._clock.monotonic(), self._relevant(), self._book.changes.count
            self._files_changed = False
            try:
                await self.reconcile()
            except StorageError as exc:
                logger.error("reconciling: %s", exc)  # noqa: TRY400 - the sentence says it all
            if self._book.changes.count != written:  # else every cure would bring about a pass of its own
                self._file_changes.forget()
                self._files_changed = False
            await self._until_due(begun, seen)

    def _take_file_change(self) -> None:
        self._files_changed = True
        self._wake.notify()

    async def _forward(self, changes: Changes) -> None:
        seen = changes.count
        while True:
            seen = await changes.after(seen)
            self._wake.notify()

    async def _until_due(self, begun: float, seen: object) -> None:
        """Wait until a pass that began then is followed by the next: a period from beginning to beginning, however long it took."""
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
        """Return what a change of makes another pass worth its while: grants, the pods that ask for GPUs, and what may be granted."""
        pods = {uid: _relevant_of(pod) for uid, pod in self._pods.by_uid.items() if _asks_for_gpus(pod)}
        return self._book.ledger, pods, self._grantable_uuids()


def _asks_for_gpus(pod: Pod) -> bool:
    return any(name.startswith(contract.RESOURCE_DOMAIN) for spec in pod.containers for name in spec.limits)


def _relevant_of(pod: Pod) -> tuple[object, ...]:
    return pod.phase, pod.deletion_requested, pod.statuses, pod.annotations.get(contract.ANNOTATION_ASSIGNMENT)
