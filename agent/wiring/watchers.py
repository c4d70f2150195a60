# SPDX-License-Identifier: Apache-2.0
"""What compares, publishes and reports: reconciler, audit, the node's objects in the API, and the status server."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.adapters.http_server import StatusServer
from agent.core.ledger import Grant
from agent.core.publishing import NodeFacts
from agent.services.audit import Auditor, AuditorOptions, ProcessSources
from agent.services.busy_sampler import BusySampler
from agent.services.drift_page import DriftPage
from agent.services.idle_watch import IdleWatch
from agent.services.monitor import Monitor, MonitorOptions, ReadinessSources, ScrapeSources
from agent.services.publisher import CapacityTarget, ConditionTarget, GpuNodeTarget, NodePublisher, Target
from agent.services.reconciler import Cures, Reconciler, ReconcilerOptions, Witnesses
from agent.services.use_reporter import LOOKS_PER_SAMPLE, UseReporter
from agent.wiring.parts import Parts
from aliquot import contract
from aliquot.contract.features import Gate


@dataclass(frozen=True, slots=True)
class Watchers:
    """The services that look at all others."""

    reconciler: Reconciler
    auditor: Auditor
    sampler: BusySampler
    idle: IdleWatch
    publisher: NodePublisher
    monitor: Monitor
    status: StatusServer
    address_from_node: str
    """Where programs of the node reach the status server, as host:port."""
    uses: UseReporter | None
    """None if its feature gate is closed or the node's object is not published."""


def build_watchers(parts: Parts) -> Watchers:
    """Build the group, and bind the status server's port. Raises SettingsError when it cannot listen there."""
    setup = parts.setup
    sampler = BusySampler(
        setup.settings.reconcile_seconds,
        driver=parts.driver.mig_aware,
        processes=parts.driver.processes,
        manager=parts.storage.manager,
        census=parts.driver.census,
    )
    reconciler, auditor = _reconciler(parts), _auditor(parts, sampler)
    monitor = _monitor(parts, reconciler, auditor)
    pages = {"/metrics": monitor.metrics, "/healthz": monitor.health, "/readyz": monitor.readiness}
    pages["/drift"] = DriftPage(setup.node_name, reconciler, auditor, setup.clock).page
    status = StatusServer(*setup.settings.metrics_host_port, pages)
    address = setup.settings.address_from_node(status.address)
    grants, files = parts.grants, parts.storage.files
    idle = IdleWatch(state=parts.driver.state, files=files, holdings=lambda: grants.overhead.holdings, clock=setup.clock)
    uses = _use_reporter(parts, monitor)
    return Watchers(reconciler, auditor, sampler, idle, _publisher(parts, idle, uses), monitor, status, address, uses)


def _use_reporter(parts: Parts, monitor: Monitor) -> UseReporter | None:
    settings, overhead = parts.setup.settings, parts.grants.overhead
    if Gate.INTERFERENCE not in settings.gates or not settings.publish_gpu_node:
        return None
    period_seconds, holdings = LOOKS_PER_SAMPLE * settings.reconcile_seconds, lambda: overhead.holdings
    return UseReporter(period_seconds, state=parts.driver.state, sm_ratios=monitor.utilization, holdings=holdings)


def _reconciler(parts: Parts) -> Reconciler:
    setup, settings, grants = parts.setup, parts.setup.settings, parts.grants
    return Reconciler(
        ReconcilerOptions(setup.node_name, settings.reconcile_seconds, setup.local_policy is None, settings.drift_policy),
        state=parts.driver.state,
        witnesses=Witnesses(
            parts.kubelet.admissions,
            grants.liveness,
            parts.storage.changes,
            lambda: parts.plugins.offering.devices().keys(),
            grants.allocator.grant_id,
        ),
        cures=Cures(_rewriter(parts), parts.cluster.evictor),
        reporting=parts.driver.reporting,
        clock=setup.clock,
    )


def _rewriter(parts: Parts) -> Callable[[Grant], Awaitable[None]]:
    """Return what writes the files of a grant again."""
    allocator, claims = parts.grants.allocator, parts.claims

    async def rewrite(grant: Grant) -> None:
        if grant.claim is None:
            await allocator.rewrite(grant)
        elif claims is not None:
            await claims.manager.rewrite(grant)

    return rewrite


def _auditor(parts: Parts, sampler: BusySampler) -> Auditor:
    setup, settings, driver, mps = parts.setup, parts.setup.settings, parts.driver, parts.grants.mps
    return Auditor(
        AuditorOptions(setup.node_name, settings.audit_policy, settings.exempt_namespaces),
        state=driver.state,
        sources=ProcessSources(driver.census, driver.processes, lambda: sampler.history.busy(), lambda: mps.supervisor_pid),
        files=parts.storage.files,
        evictor=parts.cluster.evictor,
        reporting=driver.reporting,
        clock=setup.clock,
    )


def _monitor(parts: Parts, reconciler: Reconciler, auditor: Auditor) -> Monitor:
    setup, settings, driver, grants = parts.setup, parts.setup.settings, parts.driver, parts.grants
    families = (driver.watch, auditor, reconciler, grants.limits, grants.mps, parts.cluster.events)
    sources = ScrapeSources(
        overhead_bytes=grants.overhead.fresh_overhead_bytes,
        holdings=lambda: grants.overhead.holdings,
        bypassed=lambda: auditor.bypassed | grants.limits.unlimited | grants.mps.unserved,
        mig_records=lambda: driver.mig.records,
        further=[service.families for service in families],
    )
    return Monitor(
        MonitorOptions(setup.version, setup.node_name, settings.shares_per_gpu, settings.compat_metrics),
        state=driver.state,
        files=parts.storage.files,
        sources=sources,
        readiness=ReadinessSources(_registrations(parts), _troubles(parts)),
        telemetry=setup.telemetry,
        clock=setup.clock,
    )


def _registrations(parts: Parts) -> Callable[[], Mapping[str, str]]:
    """Return what lists why each resource, and the driver, is not registered; an empty text for a registered one."""
    registrar, claims = parts.plugins.registrar, parts.claims
    return lambda: {**registrar.troubles, **({contract.DRA_DRIVER: claims.front.registrar.trouble} if claims is not None else {})}


def _troubles(parts: Parts) -> Callable[[], Sequence[str]]:
    """Return what lists the reasons why this node is not ready."""
    pods, shims, offering = parts.cluster.pods, parts.storage.shims, parts.plugins.offering

    def troubles() -> Sequence[str]:
        never_synced = [] if pods.synced else [pods.trouble]
        return [trouble for trouble in (shims.trouble, offering.trouble, *never_synced) if trouble]

    return troubles


def _publisher(parts: Parts, idle: IdleWatch, uses: UseReporter | None) -> NodePublisher:
    setup, settings, api, state = parts.setup, parts.setup.settings, parts.cluster.api, parts.driver.state
    targets: list[Target] = []
    if settings.publish_node_capacity:
        targets.append(CapacityTarget(setup.node_name, api=api, state=state, offered=settings.allocation.by_ids))
    if settings.publish_node_condition:
        targets.append(ConditionTarget(setup.node_name, api=api, state=state))
    if settings.publish_gpu_node:
        facts = NodeFacts(setup.node_name, setup.version, settings.shares_per_gpu, settings.memory_oversubscription, settings.allocation)
        offered = parts.plugins.offering.backends
        reports = tuple if uses is None else lambda: uses.reports
        targets.append(GpuNodeTarget(facts, lambda: offered().backends, api=api, state=state, utilization=reports, idle=lambda: idle.pods))
    further = [parts.grants.mps.changes, idle.changes, *([] if uses is None else [uses.changes])]
    return NodePublisher(setup.node_name, targets, state=state, clock=setup.clock, further=further)
