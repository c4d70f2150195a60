# SPDX-License-Identifier: Apache-2.0
"""bind: commits a pod to the node that kube-scheduler chose, and to devices on it, in one write.

The devices are planned now, on that node, against all promises at this moment. Soft reservations of filter and prioritize do not bind. From
the plan until the API replies, the pod holds its devices firmly. A refused write releases them.

Without a reply the outcome is open and the devices stay held:

- While kube-scheduler waits for it, the same write is repeated. It names the pod's UID, so it can succeed only once.
- After that the API is only queried for the pod, because another kube-scheduler may lead now, and its extender does not know these plans.
- kube-scheduler gets an error and retries. It gets the same node from filter, and its call joins the binding under way.
- A pod that is still unbound ARRIVAL_SECONDS after the last write was not bound by it.

An unexpected error is handled in the same way: it releases the devices if the write was not sent; otherwise the pod is queried.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.errors import ContractError
from aliquot.contract.model import PodAssignment
from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeRefusedError
from aliquot.placement.refusal import Refusal
from aliquot.placement.request import RequestError
from scheduler_plugin.core.cluster.plan import not_offered
from scheduler_plugin.core.cluster.pods import PodFacts, footprint
from scheduler_plugin.core.cluster.state import Reservation, Stage
from scheduler_plugin.core.score.cost import HostDemand
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.extender.gang import gang_or_error
from scheduler_plugin.ports import PodApi

logger = logging.getLogger(__name__)

REPLY_SECONDS = 4.0
"""The reply must arrive within kube-scheduler's timeout, 5 s by default."""
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0
BOUND = wire.bind_result()
"""The reply to a binding that succeeded."""
ARRIVAL_SECONDS = 60.0
"""A write without a reply cannot take effect later than this: the API server ends requests after a minute."""
CONFIRM_SECONDS = 30.0
"""How far the pods' stream must have come beyond a binding before a pod that is not in it counts as gone."""


async def _no_look_up() -> None:
    """Look up no leader: this replica always leads."""


@dataclass(slots=True)
class _Flight:
    """A binding under way."""

    node: str
    calls: int = 0
    """How many calls of kube-scheduler wait for the outcome."""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each of these calls."""
    outcome: "asyncio.Future[str]" = field(default_factory=asyncio.Future)
    """The error for kube-scheduler; empty when the pod is bound."""
    is_sent: bool = False
    """Whether a write was sent."""
    written_at: float = 0.0
    """Monotonic time of the latest write; before the first, of the plan."""


class Binder:
    """All bindings under way, by pod UID."""

    def __init__(
        self,
        context: ExtenderContext,
        api: PodApi,
        may_bind: Callable[[], bool],
        look_up_leader: Callable[[], Awaitable[None]] = _no_look_up,
    ) -> None:
        """Args: may_bind: whether this replica leads, called before every write. look_up_leader: called before a write is repeated."""
        self._context = context
        self._api = api
        self._may_bind = may_bind
        self._look_up_leader = look_up_leader
        self._flights: dict[str, _Flight] = {}

    @property
    def open_bindings(self) -> int:
        """How many bindings have no outcome yet."""
        return len(self._flights)

    async def bind(self, body: bytes) -> bytes:
        """Reply to one bind call. Raises WireError."""
        args = wire.decode(body, wire.BindingArgs)
        return wire.bind_result(await self._bound(args))

    async def stop(self) -> None:
        """Give up open outcomes: the process ends."""
        for flight in list(self._flights.values()):
            flight.outcome.cancel()
        await asyncio.gather(*(flight.outcome for flight in self._flights.values()), return_exceptions=True)

    async def _bound(self, args: wire.BindingArgs) -> str:
        """Begin a binding, or join the one under way. Returns: the error for kube-scheduler; empty when the pod is bound."""
        flight = self._flights.get(args.pod_uid)
        if flight is None:
            flight = self._flights[args.pod_uid] = _Flight(args.node)
            flight.outcome = asyncio.create_task(self._run(args, flight), name=f"bind {args.pod_namespace}/{args.pod_name}")
            flight.outcome.add_done_callback(lambda _: self._flights.pop(args.pod_uid, None))
        if flight.node != args.node:
            return f"an earlier binding of this pod to node {flight.node} has no outcome yet"
        flight.calls += 1
        flight.called.set()
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                return await asyncio.shield(flight.outcome)
        except TimeoutError:
            return f"the API server has not answered within {REPLY_SECONDS:.0f} s; Aliquot looks up whether the pod was bound"
        finally:
            flight.calls -= 1

    async def _run(self, args: wire.BindingArgs, flight: _Flight) -> str:
        pod = await self._find(args)
        if isinstance(pod, str):
            return pod
        self._context.groups.note_binding(pod)
        if bound_to := self._bound_to(pod):
            return "" if bound_to == args.node else f"the pod is already bound to node {bound_to}"
        if waits := await self._wait_for_gang(pod, args.node):
            return waits
        plan = self._plan(pod, args.node)
        if isinstance(plan, str):
            return plan
        try:
            annotations = {} if plan is None else {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(plan)}
        except ContractError as exc:
            return f"the assignment cannot be written as an annotation: {exc}"
        self._hold(pod, args.node, plan)
        try:
            return await self._write(pod, annotations, flight)
        except asyncio.CancelledError:
            logger.warning("stopped while a binding had no outcome", extra={"pod": f"{pod.namespace}/{pod.name}", "node": args.node})
            raise

    async def _find(self, args: wire.BindingArgs) -> PodFacts | str:
        """Return the pod of a call, from the API if the watch has not reported it yet; a sentence if it does not exist."""
        try:
            pod = self._context.state.pods.get(args.pod_uid) or await self._api.get_pod(args.pod_namespace, args.pod_name)
        except KubeApiError as exc:
            return f"the pod is not known here yet, and the API server did not answer: {exc}"
        if pod is None or pod.uid != args.pod_uid:
            self._context.state.release(args.pod_uid)
            return f"there is no pod {args.pod_namespace}/{args.pod_name} with UID {args.pod_uid}"
        return pod

    def _bound_to(self, pod: PodFacts) -> str:
        """Return the pod's node, also if the API took its binding and the watch has not reported it yet."""
        reservation = self._context.state.reservations.get(pod.uid)
        if reservation is not None and reservation.stage is Stage.BOUND:
            return reservation.node
        return pod.node_name

    async def _wait_for_gang(self, pod: PodFacts, node: str) -> str:
        """Wait until the pod's gang may start, if it has one. Returns: why it must not be bound yet; empty if it may be."""
        gang = gang_or_error(pod)
        if isinstance(gang, RequestError):
            return str(gang)
        return "" if gang is None else await self._context.gangs.admit(pod, gang, node)

    def _plan(self, pod: PodFacts, node: str) -> PodAssignment | str | None:
        """Choose devices; None for a pod without GPUs, a sentence if it gets no devices there."""
        request = self._context.verdicts.requests.of(pod)
        if request is None:
            return None
        if isinstance(request, RequestError):
            return str(request)
        gpu = self._context.state.gpu_node(node)
        if gpu is None:
            return f"node {node} has no GPU that Aliquot manages"
        if lacking := not_offered(gpu, request):
            return f"node {node} does not offer {lacking}, which the pod requests"
        plan = self._context.state.plan(node, request, self._context.verdicts.default_policy, pod.uid)
        return plan.sentence if isinstance(plan, Refusal) else plan

    def _hold(self, pod: PodFacts, node: str, plan: PodAssignment | None) -> None:
        uses = {} if plan is None or pod.gpu is None else footprint(pod.gpu.containers, plan)
        demand = HostDemand(pod.cpu_milli, pod.memory_mib)
        self._context.state.reserve(Reservation(pod.uid, node, uses, demand, Stage.BINDING))

    async def _write(self, pod: PodFacts, annotations: Mapping[str, str], flight: _Flight) -> str:
        """Write, or look up what was written, until the outcome is known. Returns: the error for kube-scheduler; empty when bound."""
        extra = {"pod": f"{pod.namespace}/{pod.name}", "pod_uid": pod.uid, "node": flight.node}
        pause, flight.written_at = FIRST_RETRY_SECONDS, self._context.clock.monotonic()
        while True:
            flight.called.clear()
            outcome = await self._advance_safely(pod, annotations, flight, extra)
            if outcome is not None:
                logger.info("not bound: %s" if outcome else "bound%s", outcome, extra=extra)
                return outcome
            try:
                # Not wait_for: before Python 3.12 it ignores a cancellation that comes with the call, and ``stop`` would hang.
                async with asyncio.timeout(pause):
                    await flight.called.wait()
                pause = FIRST_RETRY_SECONDS
            except TimeoutError:
                pause = min(2 * pause, LAST_RETRY_SECONDS)

    async def _advance_safely(self, pod: PodFacts, annotations: Mapping[str, str], flight: _Flight, extra: Mapping[str, Any]) -> str | None:
        """Do one try; after an error the outcome stays open. An unexpected error is raised if no write was sent."""
        try:
            return await self._advance(pod, annotations, flight)
        except KubeApiError as exc:
            logger.warning("a binding has no outcome yet: %s", exc, extra=extra)
        except Exception:
            if not flight.is_sent:
                self._context.state.release(pod.uid)
                raise
            logger.exception("a binding has no outcome yet", extra=extra)
        return None

    async def _advance(self, pod: PodFacts, annotations: Mapping[str, str], flight: _Flight) -> str | None:
        """Write the binding while kube-scheduler waits for it, else look up the pod. Returns: the outcome, None while open.

        Raises: KubeApiError.
        """
        if flight.is_sent and flight.calls:
            await self._look_up_leader()  # the kube-scheduler that called may have ended since
        may_bind = self._may_bind()  # checked before each write: after the lease is lost, the next leader relies on silence here
        if not may_bind and not flight.is_sent:
            self._context.state.release(pod.uid)
            return "this replica does not lead; the leader binds the pod"
        if may_bind and flight.calls:
            flight.written_at, flight.is_sent = self._context.clock.monotonic(), True
            return await self._send(pod, flight.node, annotations)
        outcome = await self._look_up(pod, flight.node, annotations)
        if outcome is None and self._context.clock.monotonic() - flight.written_at > ARRIVAL_SECONDS:
            self._context.state.release(pod.uid)
            outcome = f"the API server did not take the binding within {ARRIVAL_SECONDS:.0f} s"
        return outcome

    async def _send(self, pod: PodFacts, node: str, annotations: Mapping[str, str]) -> str:
        """Write the binding; return "" when the API took it, and a sentence when it refused. Raises KubeApiError."""
        try:
            await self._api.bind(pod.namespace, pod.name, pod.uid, node, annotations)
        except KubeConflictError as exc:  # an earlier try may have succeeded without a reply
            outcome = await self._look_up(pod, node, annotations)
            if outcome is None:
                self._context.state.release(pod.uid)
                return f"the API server refused the binding: {exc}"
            return outcome
        except KubeRefusedError as exc:
            self._context.state.release(pod.uid)
            return f"the API server refused the binding: {exc}"
        self._confirm(pod)
        return ""

    async def _look_up(self, pod: PodFacts, node: str, annotations: Mapping[str, str]) -> str | None:
        """Query the pod: "" if it is bound as planned, a sentence if it will not be, None while it is unbound. Raises KubeApiError."""
        found = await self._api.get_pod(pod.namespace, pod.name)
        if found is None or found.uid != pod.uid:
            self._context.state.release(pod.uid)
            return "the pod was deleted"
        if not found.node_name:
            return None
        if found.node_name == node and (found.gpu is None or found.gpu.annotations.items() >= annotations.items()):
            self._confirm(pod)
            return ""
        self._context.state.release(pod.uid)
        if pod.uid in self._context.state.pods:  # otherwise the watch reported its end meanwhile, or has yet to report the pod
            self._context.state.set_pod(found)
        return f"another scheduler bound the pod to node {found.node_name}"

    def _confirm(self, pod: PodFacts) -> None:
        self._context.state.confirm(pod.uid, self._context.clock.monotonic() + CONFIRM_SECONDS)
        self._context.decisions.forget(pod.uid)
