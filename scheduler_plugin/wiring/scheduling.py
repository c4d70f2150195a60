# SPDX-License-Identifier: Apache-2.0
"""The loops that act on the cluster, and the parts that the verbs and pages share with them."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from aliquot.contract.features import Gate
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube import KubeEvents, KubePods
from scheduler_plugin.adapters.kube_claims import KubeClaims
from scheduler_plugin.adapters.kube_templates import KubeTemplates
from scheduler_plugin.core.cluster.decisions import Decision
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.extender.bind import Binder
from scheduler_plugin.extender.planned import ClaimPlacer
from scheduler_plugin.extender.planned_why import PlannedWhy, why_without_planner
from scheduler_plugin.services.backfiller import Backfiller
from scheduler_plugin.services.claim_planner import ClaimPlanner, Leads
from scheduler_plugin.services.claim_templates import ClaimTemplates
from scheduler_plugin.services.claim_watch import ClaimRetry
from scheduler_plugin.services.cluster_metrics import ClusterCollector
from scheduler_plugin.services.cluster_watch import Source
from scheduler_plugin.services.consolidator import Consolidator, Scope
from scheduler_plugin.services.evictions import Evictions
from scheduler_plugin.services.explainer import Explainer
from scheduler_plugin.services.gang_restarts import GangRestarts
from scheduler_plugin.services.idle_pods import IdlePods
from scheduler_plugin.services.move_api import MoveApi
from scheduler_plugin.services.new_victims import NewVictims
from scheduler_plugin.services.nominator import Nominator
from scheduler_plugin.services.preemption_times import PreemptionTimes
from scheduler_plugin.services.preemptor import COUNTED_SECONDS, Preemptor
from scheduler_plugin.services.retry import Retry
from scheduler_plugin.services.succeeded_members import SucceededMembers
from scheduler_plugin.services.telemetry import Telemetry
from scheduler_plugin.services.utilization_reader import UtilizationReader
from scheduler_plugin.services.waiting_events import WaitingEvents
from scheduler_plugin.settings import Answer, Consolidation, Settings
from scheduler_plugin.wiring.cluster import Cluster
from scheduler_plugin.wiring.leaders import Leaders


@dataclass(frozen=True, slots=True)
class Scheduling:
    """What schedules pods besides filter and prioritize."""

    telemetry: Telemetry
    binder: Binder
    explainer: Explainer
    retry: Retry
    events: WaitingEvents
    succeeded: SucceededMembers
    restarts: GangRestarts
    times: PreemptionTimes
    new_victims: NewVictims
    idle: IdlePods
    nominator: Nominator
    preemptor: Preemptor | None
    """None if the settings switch it off."""
    consolidator: Consolidator | None
    """None if the settings switch it off."""
    backfiller: Backfiller | None
    """None if its feature gate is closed."""
    templates: ClaimTemplates | None
    """None where vGPUs do not become claims."""
    claims: ClaimRetry | None
    """None where ResourceClaims are not read."""
    planner: ClaimPlanner | None
    """None where ResourceClaims are not read."""
    utilization: UtilizationReader | None
    """None if no policy has a weight for interference."""

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops to run."""
        acting = (self.preemptor, self.consolidator, self.backfiller, self.templates, self.claims, self.planner, self.utilization)
        parts = (self.retry, self.events, self.succeeded, self.restarts, self.times, self.new_victims, self.idle, self.nominator, *acting)
        return [part.run() for part in parts if part is not None]


def make_scheduling(settings: Settings, connection: KubeConnection, cluster: Cluster, leaders: Leaders) -> Scheduling:
    """Construct the loops, and connect their counters."""
    context, watch, telemetry = cluster.context, cluster.watch, Telemetry()
    pods, events_api = KubePods(connection), KubeEvents(connection, cluster.clock)
    planner, why_planned = make_planner(settings, connection, cluster, leaders, telemetry)
    explainer = Explainer(context, cluster.rules, watch.age_seconds, why_planned)
    events = WaitingEvents(explainer, events_api, context.decisions.by_uid, cluster.clock.monotonic)
    binder = Binder(context, pods, lambda: leaders.decides, leaders.look_up)
    retry = Retry(context, pods, lambda: leaders.decides, lambda: watch.caught_up_at(Source.PODS), telemetry, settings.scheduler_name)
    preemptor = Preemptor(context, pods, events_api, retry.retry_pod, lambda: leaders.decides, telemetry)
    new_victims = NewVictims(context, retry.retry_pod, lambda: retry.undecided, preemptor.look_again, lambda: leaders.decides)
    nominator = Nominator(
        context, pods, lambda: leaders.decides and settings.answer is Answer.ONE, watch.directory, settings.scheduler_name
    )
    succeeded = SucceededMembers(context, pods, lambda: leaders.decides)
    restarts = GangRestarts(context, pods, events_api, lambda: leaders.decides)
    times = PreemptionTimes(context, retry.retry_pod, lambda: leaders.decides)

    def note_decision(decision: Decision) -> None:
        telemetry.count_decision(decision)
        events.note(decision)
        nominator.note(decision)

    context.log.on_decision = note_decision
    context.log.on_invalid = telemetry.count_invalid
    context.gangs.attempts.on_attempt = telemetry.count_gang
    queues = {
        "open_bindings": lambda: binder.open_bindings,
        "waiting_gangs": lambda: context.gangs.waiting,
        "held_seats": lambda: context.workload_seats.seats,
    }
    telemetry.registry.register(ClusterCollector(context.state, context.decisions, queues, watch.lag_seconds))
    telemetry.watch_state(context.state, lambda: leaders.leads_beside_leader)
    preempting = preemptor if settings.gpu_preemption else None
    make_room = preempting.make_room_of_idle if preempting is not None else None
    idle = IdlePods(context, settings.classes, pods, events_api, make_room, lambda: leaders.decides, settings.scheduler_name)
    moving: Consolidator | None = None
    if settings.consolidation is not Consolidation.OFF:
        api, scope = MoveApi(pods, events_api), Scope(settings.consolidation is Consolidation.ON, settings.scheduler_name)
        moving = Consolidator(context, api, explainer.full_snapshot, retry.retry_pod, lambda: leaders.decides, telemetry, scope)
    holding: Backfiller | None = None
    if Gate.BACKFILL in settings.gates:
        leads, name, directory = lambda: leaders.decides, settings.scheduler_name, watch.directory
        holding = Backfiller(context, explainer.full_snapshot, retry.retry_pod, leads, name, pods, directory)
        watch.on_ended = holding.learn
    templates = ClaimTemplates(KubeTemplates(connection), cluster.clock, lambda: leaders.decides) if settings.translate_to_claims else None
    claims = ClaimRetry(context, pods, lambda: leaders.decides) if cluster.claims is not None else None
    reader = UtilizationReader(context.state) if context.state.utilizations.matter else None
    loops = (retry, events, succeeded, restarts, times, new_victims, idle, nominator)
    acting = (preempting, moving, holding, templates, claims, planner)
    return Scheduling(telemetry, binder, explainer, *loops, *acting, reader)


def make_planner(
    settings: Settings, connection: KubeConnection, cluster: Cluster, leaders: Leaders, telemetry: Telemetry
) -> tuple[ClaimPlanner | None, Callable[[PodFacts], str]]:
    """Construct what allocates claims, None where they are not read, and what explains the pods that wait for it."""
    context, claims = cluster.context, cluster.claims
    if claims is None:
        return None, why_without_planner
    pods, events = KubePods(connection), KubeEvents(connection, cluster.clock)

    def count(victim: PodFacts) -> None:
        context.budgets.count_eviction(victim, cluster.clock.monotonic() + COUNTED_SECONDS)

    evictions = Evictions(pods, events, context, telemetry, count) if settings.gpu_preemption else None

    def knows_all() -> bool:
        since = leaders.term
        return since is not None and context.claims.is_current and claims.listed_since(since)

    placer = ClaimPlacer(context, cluster.watch.directory)
    leads = Leads(lambda: leaders.leads_beside_leader, knows_all)
    planner = ClaimPlanner(context, placer, claims.planned, KubeClaims(connection), events, leads, evictions)
    return planner, PlannedWhy(context, placer, claims.planned.by_uid, planner).sentence
