"""Looks from outside at what containers really use, and does what the policy says about those that take more than they were granted.

A pass follows every census of the processes. Deciding is in ``core.audit``; here /proc and the regions are asked. A finding is told, and
acted on, when two passes in a row have made it: the driver's list and a region are read at different moments. While the API is away the
ledger and the pods that were known say whose a process is. While the driver tells nothing no finding is made, none is acted on, and none
stands for long.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from agent.core.audit import AuditPolicy, AuditView, Finding, FindingKind, audit
from agent.core.cgroups import container_of
from agent.core.ledger import Grant
from agent.core.metrics import Family, family
from agent.core.overhead import HostProcess, host_pids, living
from agent.errors import ProcessError
from agent.ports import Clock, ContainerFiles, NodeEvent, PodEvent, Processes
from agent.services.driver_watch import DriverWatch
from agent.services.events import EventRecorder
from agent.services.evictor import Evictor
from agent.services.grant_book import GrantBook
from agent.services.pod_cache import PodCache
from agent.services.process_census import Census, ProcessCensus
from agent.services.telemetry import Telemetry
from proto import contract

logger = logging.getLogger(__name__)

CONFIRM_PASSES = 2
GIVE_UP_LOOKS = 2
"""So many looks in a row that failed end every finding: whether it still holds nobody knows."""


@dataclass(frozen=True, slots=True)
class AuditorOptions:
    """What is configured."""

    node_name: str
    policy: AuditPolicy
    exempt_namespaces: Set[str]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A finding, since when it is made (monotonic), and in how many passes in a row."""

    finding: Finding
    since: float
    passes: int


@dataclass(frozen=True, slots=True)
class _Sight:
    """Host pids of a container's processes."""

    shimmed: Set[int]
    unseen: Set[int]
    """Without a slot, and what they have mapped may not be looked at."""


class Auditor:
    """One pass, and the loop of passes."""

    def __init__(
        self,
        options: AuditorOptions,
        *,
        census: ProcessCensus,
        processes: Processes,
        watch: DriverWatch,
        book: GrantBook,
        pods: PodCache,
        files: ContainerFiles,
        evictor: Evictor,
        events: EventRecorder,
        telemetry: Telemetry,
        clock: Clock,
        supervisor_pid: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Args: supervisor_pid: the host's process id of aliquot-mps; None while it does not run."""
        self._options = options
        self._supervisor_pid = supervisor_pid
        self._census = census
        self._processes = processes
        self._watch = watch
        self._book = book
        self._pods = pods
        self._files = files
        self._evictor = evictor
        self._events = events
        self._telemetry = telemetry
        self._clock = clock
        self._seen: dict[tuple[str, str, str], Confirmed] = {}
        self.confirmed: tuple[Confirmed, ...] = ()
        """What is wrong, as of the last pass; replaced as a whole, so that any thread may read it."""

    @property
    def bypassed(self) -> Set[str]:
        """Ids of the grants of which a process runs without the shim."""
        return {one.finding.grant_id for one in self.confirmed if one.finding.kind is FindingKind.SHIM_MISSING}

    async def run(self) -> None:
        """Audit for ever."""
        seen = self._census.attempts.count
        while True:
            seen = await self._census.attempts.after(seen)
            if self._census.failed_in_a_row:
                await self.doubt(self._census.failed_in_a_row)
            else:
                await self.audit(self._census.latest)

    async def audit(self, census: Census) -> None:
        """Do one pass."""
        if not self._pods.synced:  # whose container a process is, the API tells
            return
        grants = tuple(self._book.ledger.grants.values())
        findings = audit(await asyncio.to_thread(self._look, census, grants)) if census.processes else ()
        self._remember(findings)
        await self._act()

    async def doubt(self, failed_in_a_row: int) -> None:
        """Let findings go that failed looks have left without their witness: at once where their processes are gone, else soon."""
        if failed_in_a_row >= GIVE_UP_LOOKS:
            self._stand({})
            return
        pids = {process.pid for one in self._seen.values() for process in one.finding.processes}
        there = set(map(_identity, await asyncio.to_thread(self._processes.read, pids))) if pids else set()
        self._stand({key: one for key, one in self._seen.items() if not there.isdisjoint(map(_identity, one.finding.processes))})

    def families(self) -> Iterable[Family]:
        """Return what is wrong as metrics; for any thread."""
        labels = ("node", "kind", "namespace", "pod", "container", "device_uuid")
        counts: dict[tuple[str, ...], int] = {}
        for one in self.confirmed:
            finding, holder = one.finding, one.finding.holder
            named = (holder.namespace, holder.pod, holder.container) if holder is not None else ("", "", "")
            key = (self._options.node_name, str(finding.kind), *named, finding.device_uuid)
            counts[key] = counts.get(key, 0) + 1
        text = "Processes and containers that use what they were not granted, by what is wrong."
        yield family("audit_findings", text, labels, sorted(counts.items()))

    # --- looking: not in the thread for files, as whoever asks what a process has mapped may wait as long as that process hangs ---

    def _look(self, census: Census, grants: Sequence[Grant]) -> AuditView:
        containers = [container for process in census.processes if (container := container_of(process.cgroup)) is not None]
        pod_uids = {container.pod_uid for container in containers}
        concerned = [grant for grant in grants if grant.pod_uid in pod_uids]
        limits = {grant.grant_id: self._files.limits(grant.grant_id) for grant in concerned}
        sights = {grant.grant_id: self._sight(grant, census.processes) for grant in concerned if grant.under_shim}
        return AuditView(
            listed=census.listed,
            processes={process.pid: process for process in census.processes},
            pods_by_uid=self._pods.by_uid,
            pods_current=self._pods.fresh,
            grants=grants,
            shimmed_pids={identifier: sight.shimmed for identifier, sight in sights.items()},
            unseen_pids={identifier: sight.unseen for identifier, sight in sights.items()},
            burst_bytes={
                (identifier, device.uuid): device.burst_bytes
                for identifier, held in limits.items()
                if held is not None
                for device in held.devices
            },
            parents=self._watch.board.parents,
            own_cgroups=self._own_cgroups(),
            exempt_namespaces=self._options.exempt_namespaces,
        )

    def _own_cgroups(self) -> Set[str]:
        supervisor = self._supervisor_pid()
        others = self._processes.read([supervisor]) if supervisor is not None else ()
        return {cgroup for cgroup in (self._processes.own_cgroup(), *(process.cgroup for process in others)) if cgroup}

    def _sight(self, grant: Grant, processes: Sequence[HostProcess]) -> _Sight:
        """Look which processes of a container the shim counts: those with a slot, or at least with the region mapped."""
        view = self._files.region(grant.grant_id)
        slots = living(view.snapshot, view.dead) if view is not None else ()
        shimmed, unseen = set(host_pids(slots, processes, grant.pod_uid).values()), set()
        _, region = self._files.paths(grant.grant_id)
        for process in processes:
            container = container_of(process.cgroup)
            if container is None or container.pod_uid != grant.pod_uid or process.pid in shimmed:
                continue
            match self._processes.maps(process.pid, region):
                case True:
                    shimmed.add(process.pid)
                case None:
                    unseen.add(process.pid)
        return _Sight(shimmed, unseen)

    # --- acting ---

    def _remember(self, findings: Iterable[Finding]) -> None:
        now = self._clock.monotonic()
        seen = {}
        for finding in findings:
            key = (str(finding.kind), finding.subject, finding.device_uuid)
            before = self._seen.get(key)
            seen[key] = Confirmed(finding, before.since, before.passes + 1) if before is not None else Confirmed(finding, now, 1)
            if seen[key].passes == CONFIRM_PASSES:
                self._tell(finding)
        self._stand(seen)

    def _stand(self, seen: dict[tuple[str, str, str], Confirmed]) -> None:
        self._seen = seen
        self.confirmed = tuple(one for one in seen.values() if one.passes >= CONFIRM_PASSES)

    def _tell(self, finding: Finding) -> None:
        holder = finding.holder
        about = {
            "kind": str(finding.kind),
            "device_uuid": finding.device_uuid,
            "pod": f"{holder.namespace}/{holder.pod}" if holder else None,
            "pod_uid": finding.pod_uid or None,
        }
        logger.warning("audit: %s", finding.sentence, extra=about)
        reason, node = contract.EVENT_REASON_AUDIT, self._pods.node
        if holder is not None and finding.pod_uid in self._pods.by_uid:
            event = PodEvent(holder.namespace, holder.pod, finding.pod_uid, holder.container, reason, finding.sentence, warning=True)
            self._events.record(event)
        elif node is not None:
            self._events.record(NodeEvent(self._options.node_name, node.uid, reason, finding.sentence, warning=True))

    async def _act(self) -> None:
        for one in self.confirmed:
            if not one.finding.of_container:
                continue
            if self._options.policy is AuditPolicy.KILL:
                await asyncio.to_thread(self._kill, one.finding)
            elif self._options.policy is AuditPolicy.EVICT:
                await self._evict(one.finding)

    async def _evict(self, finding: Finding) -> None:
        if finding.holder is not None and await self._evictor.evict(finding.holder, finding.pod_uid, finding.sentence):
            self._telemetry.audit_actions.labels(finding.kind, AuditPolicy.EVICT).inc()

    def _kill(self, finding: Finding) -> None:
        for process in finding.processes:
            try:
                ended = self._processes.kill(process)
            except ProcessError as exc:
                logger.warning("audit: %s", exc)
                continue
            if ended:
                logger.warning("audit: process %d ended: %s", process.pid, finding.sentence, extra={"pod_uid": finding.pod_uid})
                self._telemetry.audit_actions.labels(finding.kind, AuditPolicy.KILL).inc()


def _identity(process: HostProcess) -> tuple[int, int]:
    return process.pid, process.start_ticks
