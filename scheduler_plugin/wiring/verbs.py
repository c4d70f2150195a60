# SPDX-License-Identifier: Apache-2.0
"""The verbs as kube-scheduler and the API server call them: each is timed, and those of the extender reply only while this replica decides.

kube-scheduler puts an error in the reply into the pod's events; from an HTTP 503 it shows only the number. So filter and bind report in
their replies that this replica does not decide now.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from aliquot import contract
from aliquot.contract.errors import AliquotError
from aliquot.contract.features import Gate
from aliquot.contract.model import Allocation, Device
from aliquot.placement import mig
from scheduler_plugin.adapters.http import Verb
from scheduler_plugin.core.admit.queues import GpuSizes
from scheduler_plugin.core.cluster.nodes import NodeDirectory
from scheduler_plugin.core.cluster.objects import PodObject, pod_facts
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import device_sizes
from scheduler_plugin.errors import NotReadyError
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.bind import BOUND, Binder
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.cooperative import IdleWorker, plan_ahead
from scheduler_plugin.extender.filter import filter_nodes
from scheduler_plugin.extender.preempt import choose_victims
from scheduler_plugin.extender.prioritize import prioritize_nodes
from scheduler_plugin.ports import ObjectApi
from scheduler_plugin.services.claim_templates import ClaimTemplates
from scheduler_plugin.services.nominator import Nominator
from scheduler_plugin.services.telemetry import Call, Telemetry
from scheduler_plugin.settings import Answer, GangsFromOwners, Settings
from scheduler_plugin.webhook.allocation import AllocationRule
from scheduler_plugin.webhook.amounts import HAMI, FindQueue, Options
from scheduler_plugin.webhook.grouper import Grouper
from scheduler_plugin.webhook.normalise import Normaliser
from scheduler_plugin.webhook.review import Reviews
from scheduler_plugin.wiring.leaders import Leaders


class ExtenderVerbs:
    """filter, prioritize, preempt and bind."""

    def __init__(
        self, context: ExtenderContext, binder: Binder, leaders: Leaders, telemetry: Telemetry, nominator: Nominator, answer: Answer
    ) -> None:
        self._context = context
        self._answer = answer
        self._binder = binder
        self._leaders = leaders
        self._telemetry = telemetry
        self._nominator = nominator
        self._idle = IdleWorker(context.prepare)

    def expect(self, pod: PodFacts) -> None:
        """Prepare for the calls for a new pod. kube-scheduler often has other pods to place first."""
        self._context.workload_seats.take(pod)
        self._context.verdicts.expect(pod)
        self._nominator.expect(pod)
        self._idle.wake()

    def foretell(self, pod: Mapping[str, Any]) -> None:
        """Prepare for a pod that the API server is about to store: the watch reports it some milliseconds later."""
        try:
            facts = pod_facts(msgspec.convert(pod, PodObject))
        except (AliquotError, msgspec.ValidationError):
            return  # filter says what is wrong
        self._context.verdicts.foretell(facts)
        self._idle.wake()

    def by_path(self) -> Mapping[str, Verb]:
        """Return the verbs by path."""
        return {
            "/filter": _report_not_ready(self._timed("filter", self._filter), wire.filter_failure),
            "/prioritize": self._timed("prioritize", self._prioritize),
            "/preempt": self._timed("preempt", self._preempt),
            "/bind": _report_not_ready(self._timed("bind", self._bind), wire.bind_result),
        }

    def _timed(self, name: str, verb: Callable[[bytes, Call], Awaitable[bytes]]) -> Verb:
        async def handle(body: bytes) -> bytes:
            with self._telemetry.timing(name) as call:
                await self._leaders.wait_until_deciding()
                return await verb(body, call)

        return handle

    async def _filter(self, body: bytes, _: Call) -> bytes:
        args = wire.decode_args(body)
        await plan_ahead(self._context, args)
        reply = filter_nodes(self._context, args, self._context.clock.now(), self._answer)
        self._nominator.wake()  # the queue is shorter by one
        self._idle.wake()  # kube-scheduler calls bind next if one node fits
        return reply

    async def _prioritize(self, body: bytes, _: Call) -> bytes:
        reply = prioritize_nodes(self._context, body)
        self._idle.wake()
        return reply

    async def _preempt(self, body: bytes, _: Call) -> bytes:
        return await choose_victims(self._context, body)

    async def _bind(self, body: bytes, call: Call) -> bytes:
        self._idle.wake()  # other calls come while the API takes the binding
        reply = await self._binder.bind(body)
        call.refused = reply != BOUND
        return reply


@dataclass(frozen=True, slots=True)
class Nodes:
    """What is known of the nodes that a pod can use."""

    directory: NodeDirectory
    find_queue: FindQueue


def webhook_verbs(
    settings: Settings,
    context: ExtenderContext,
    telemetry: Telemetry,
    objects: ObjectApi,
    templates: ClaimTemplates | None,
    on_valid: Callable[[Mapping[str, Any]], None],
    nodes: Nodes,
) -> Mapping[str, Verb]:
    """Return the webhook's verbs by path. Args: on_valid: as for ``Reviews``."""
    normaliser = replace(make_normaliser(settings, context.state, nodes), as_claims=templates is not None)

    def grouper(rules: Normaliser) -> Grouper:
        return Grouper(rules, objects, context.clock.monotonic, for_all=settings.gangs_from_owners is GangsFromOwners.ALL)

    found_in_owners = grouper if normaliser.options.gangs_from_owners else None

    def allocations() -> Iterator[Allocation]:
        return (node.allocation for node in context.state.gpu_nodes())

    claims = context.claims
    rule = AllocationRule(allocations, objects, context.clock.monotonic, claims.is_our_class, claims.is_our_resource)
    return Reviews(normaliser, telemetry.count_admission, telemetry.count_adoption, found_in_owners, templates, rule, on_valid).by_path()


def make_normaliser(settings: Settings, state: ClusterState, nodes: Nodes | None = None) -> Normaliser:
    """Construct the webhook's rules. Args: nodes: None if a share counts for all nodes alike."""
    expected_profiles = settings.expected_profiles()
    options = Options(
        lambda preferences: device_sizes(state.columns, preferences),
        settings.adopt_nvidia_gpu,
        settings.count_whole_gpus,
        mig_profiles=lambda preferences: mig.profile_sizes(_devices(state), preferences) or expected_profiles,
        hami=HAMI.named(settings.hami_names()),
        classes=settings.classes,
        scheduling_groups=settings.scheduling_groups,
        gangs_from_owners=Gate.GANGS_FROM_OWNERS in settings.gates,
    )
    if nodes is not None:
        options = replace(options, sizes_behind=GpuSizes(state, nodes.directory), find_queue=nodes.find_queue)
    return Normaliser(
        options,
        settings.scheduler_name,
        replaced_schedulers=settings.taken_schedulers(),
        tolerate_gpu_taint=settings.tolerate_gpu_taint,
    )


def _devices(state: ClusterState) -> Iterator[Device]:
    return (entry.device for node in state.gpu_nodes() for entry in node.devices)


def _report_not_ready(verb: Verb, reply: Callable[[str], bytes]) -> Verb:
    """Turn NotReadyError into a reply with an error."""

    async def handle(body: bytes) -> bytes:
        try:
            return await verb(body)
        except NotReadyError as exc:
            return reply(f"the extender of {contract.PRODUCT}-scheduler decides nothing now: {exc}")

    return handle
