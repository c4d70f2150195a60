# SPDX-License-Identifier: Apache-2.0
"""Compares what containers really use with their grants, and acts on excess use as the policy says.

A pass follows every census of the processes. ``core.audit`` decides; this module reads /proc and the usage regions. A finding is reported
and acted on when two passes in a row make it, since the driver's list and a region are read at different moments. While the API is down,
the ledger and the cached pods tell which container owns a process. While the driver does not answer, no finding is made or acted on, and
earlier ones expire soon.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from agent.core.audit import AuditPolicy, AuditView, Finding, FindingKind, audit
from agent.core.cgroups import container_of
from agent.core.ledger import Grant
from agent.core.metrics import Family, family
from agent.core.over_cores import Busy, Key
from agent.core.overhead import HostProcess, host_pids, living
from agent.core.owners import pod_uids_of
from agent.core.region_layout import Limits
from agent.errors import ProcessError
from agent.ports.clock import Clock
from agent.ports.grants import ContainerFiles
from agent.ports.kube import NodeEvent, PodEvent
from agent.ports.processes import Processes
from agent.services.evictor import Evictor
from agent.services.process_census import Census, ProcessCensus
from agent.services.reporting import Reporting
from agent.services.state import AgentState
from agent.services.throttle import Throttler
from aliquot import contract
from aliquot.contract.model import Pod

logger = logging.getLogger(__name__)

CONFIRM_PASSES = 2
UNENFORCED = frozenset((FindingKind.SHIM_MISSING, FindingKind.OVER_LIMIT, FindingKind.OVER_CORES))
"""Findings that prove that a limit is not enforced."""
GIVE_UP_LOOKS = 2
"""Failed looks in a row that end every finding, because it is unknown whether it still holds."""


@dataclass(frozen=True, slots=True)
class AuditorOptions:
    """What is configured."""

    node_name: str
    policy: AuditPolicy
    exempt_namespaces: Set[str]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A finding, since when it exists (monotonic), and in how many passes in a row."""

    finding: Finding
    since: float
    passes: int


@dataclass(frozen=True, slots=True)
class _Sight:
    """Host pids of a container's processes."""

    shimmed: Set[int]
    unseen: Set[int]
    """Without a slot, and without the right to read what they have mapped."""


@dataclass(frozen=True, slots=True)
class ProcessSources:
    """Where the auditor reads which processes use the GPUs."""

    census: ProcessCensus
    processes: Processes
    busy: Callable[[], Mapping[Key, Busy]] = dict
    """Returns how busy containers were lately."""
    supervisor_pid: Callable[[], int | None] = lambda: None
    """Returns the host's process id of aliquot-mps; None while it does not run."""


class Auditor:
    """One pass, and the loop of passes."""

    def __init__(
        self,
        options: AuditorOptions,
        *,
        state: AgentState,
        sources: ProcessSources,
        files: ContainerFiles,
        evictor: Evictor,
        reporting: Reporting,
        clock: Clock,
    ) -> None:
        self._options = options
        self._watch = state.watch
        self._pods = state.pods
        self._manager = state.manager
        self._census = sources.census
        self._processes = sources.processes
        self._supervisor_pid = sources.supervisor_pid
        self._busy = sources.busy
        self._files = files
        self._evictor = evictor
        self._events = reporting.events
        self._telemetry = reporting.telemetry
        self._clock = clock
        self._throttler = Throttler(state.manager, files, clock)
        self._seen: dict[tuple[str, str, str], Confirmed] = {}
        self.confirmed: tuple[Confirmed, ...] = ()
        """The confirmed findings of the last pass; replaced as a whole, so any thread may read it."""

    @property
    def bypassed(self) -> Set[str]:
        """Ids of the grants that the shim does not enforce: a process runs without it, or uses more than it allows."""
        return {one.finding.grant_id for one in self.confirmed if one.finding.kind in UNENFORCED}

    async def run(self) -> None:
        """Audit after each census, until cancelled."""
        seen = self._census.attempts.count
        while True:
            seen = await self._census.attempts.after(seen)
            if self._census.failed_in_a_row:
                await self.doubt(self._census.failed_in_a_row)
            else:
                await self.audit(self._census.latest)

    async def audit(self, census: Census) -> None:
        """Do one pass."""
        if not self._pods.synced:  # only the API tells which container owns a process
            return
        grants = tuple(self._manager.ledger.grants.values())
        findings = audit(await asyncio.to_thread(self._look, census, grants)) if census.processes else ()
        self._remember(findings)
        await self._act()

    async def doubt(self, failed_in_a_row: int) -> None:
        """Drop findings that failed looks cannot confirm: at once when their processes have ended, else soon."""
        if failed_in_a_row >= GIVE_UP_LOOKS:
            self._stand({})
            return
        pids = {process.pid for one in self._seen.values() for process in one.finding.processes}
        there = set(map(_identity, await asyncio.to_thread(self._processes.read, pids))) if pids else set()
        self._stand({key: one for key, one in self._seen.items() if not there.isdisjoint(map(_identity, one.finding.processes))})

    def families(self) -> Iterable[Family]:
        """Return the findings as metrics; for any thread."""
        labels = ("node", "kind", "namespace", "pod", "container", "device_uuid")
        counts: dict[tuple[str, ...], int] = {}
        for one in self.confirmed:
            finding, holder = one.finding, one.finding.holder
            named = (holder.namespace, holder.pod, holder.container) if holder is not None else ("", "", "")
            key = (self._options.node_name, str(finding.kind), *named, finding.device_uuid)
            counts[key] = counts.get(key, 0) + 1
        text = "Processes and containers that use more than their grant, by kind of finding."
        yield family("audit_findings", text, labels, sorted(counts.items()))

    # --- reading: not in the thread for files, since reading what a process has mapped may wait as long as that process hangs ---

    def _look(self, census: Census, grants: Sequence[Grant]) -> AuditView:
        """Read the limits and regions of the containers that use a GPU."""
        concerned = _grants_with_processes(grants, census, tuple(self._pods.by_uid.values()))
        limits = {grant.grant_id: held for grant in concerned if (held := self._files.limits(grant.grant_id)) is not None}
        sights = {grant.grant_id: self._sight(grant, census.processes) for grant in concerned if grant.under_shim}
        return AuditView(
            listed=census.listed,
            processes={process.pid: process for process in census.processes},
            pods_by_uid=self._pods.by_uid,
            pods_current=self._pods.fresh,
            grants=grants,
            shimmed_pids={identifier: sight.shimmed for identifier, sight in sights.items()},
            unseen_pids={identifier: sight.unseen for identifier, sight in sights.items()},
            burst_bytes=_burst_bytes(limits),
            busy=self._busy(),
            cores_percent=_cores_percent(concerned, limits),
            parents=self._watch.inventory.parents,
            own_cgroups=self._own_cgroups(),
            closed_uuids=self._closed_uuids(),
            exempt_namespaces=self._options.exempt_namespaces,
        )

    def _closed_uuids(self) -> Set[str]:
        ledger = self._manager.ledger
        if not ledger.unclear:
            return frozenset()
        return {entry.device.uuid for entry in self._watch.inventory.devices if ledger.unclear_on(entry.grantable_uuids)}

    def _own_cgroups(self) -> Set[str]:
        supervisor = self._supervisor_pid()
        others = self._processes.read([supervisor]) if supervisor is not None else ()
        return {cgroup for cgroup in (self._processes.own_cgroup(), *(process.cgroup for process in others)) if cgroup}

    def _sight(self, grant: Grant, processes: Sequence[HostProcess]) -> _Sight:
        """Find the processes of a container that the shim counts: those with a slot, or at least with the region mapped."""
        view = self._files.region(grant.grant_id)
        slots = living(view.snapshot, view.dead) if view is not None else ()
        pod_uids = pod_uids_of(grant, tuple(self._pods.by_uid.values()))
        shimmed, unseen = set(host_pids(slots, processes, pod_uids).values()), set()
        _, region = self._files.paths(grant.grant_id)
        for process in processes:
            container = container_of(process.cgroup)
            if container is None or container.pod_uid not in pod_uids or process.pid in shimmed:
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
                self._report(finding)
        self._stand(seen)

    def _stand(self, seen: dict[tuple[str, str, str], Confirmed]) -> None:
        self._seen = seen
        self.confirmed = tuple(one for one in seen.values() if one.passes >= CONFIRM_PASSES)

    def _report(self, finding: Finding) -> None:
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
        await self._throttler.settle()
        for one in self.confirmed:
            if not one.finding.of_container:
                continue
            if self._options.policy is AuditPolicy.KILL:
                await asyncio.to_thread(self._kill, one.finding)
            elif self._options.policy is AuditPolicy.THROTTLE and one.finding.kind is FindingKind.OVER_CORES:
                if await self._throttler.throttle(one.finding):
                    self._telemetry.audit_actions.labels(one.finding.kind, AuditPolicy.THROTTLE).inc()
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


def _grants_with_processes(grants: Iterable[Grant], census: Census, pods: Collection[Pod]) -> Sequence[Grant]:
    """Return the grants of pods that have a process in the census."""
    containers = (container_of(process.cgroup) for process in census.processes)
    pod_uids = {container.pod_uid for container in containers if container is not None}
    return [grant for grant in grants if not pod_uids.isdisjoint(pod_uids_of(grant, pods))]


def _burst_bytes(limits: Mapping[str, Limits]) -> Mapping[tuple[str, str], int]:
    """Return what containers may use beyond their memory, by grant id and device UUID."""
    return {(identifier, device.uuid): device.burst_bytes for identifier, held in limits.items() for device in held.devices}


def _cores_percent(grants: Iterable[Grant], limits: Mapping[str, Limits]) -> Mapping[tuple[str, str], int]:
    """Return the fixed SM limits, by grant id and device UUID. In weight mode a container may use what others leave idle."""
    borrowing = {(identifier, device.uuid) for identifier, held in limits.items() for device in held.devices if device.sm_weight}
    return {
        (grant.grant_id, share.device_uuid): share.cores_percent
        for grant in grants
        for share in grant.shares
        if grant.under_shim and share.cores_percent and (grant.grant_id, share.device_uuid) not in borrowing
    }


def _identity(process: HostProcess) -> tuple[int, int]:
    return process.pid, process.start_ticks
