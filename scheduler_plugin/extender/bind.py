"""bind: commits a pod to the node kube-scheduler chose, and to devices on it, in one write.

The devices are planned now, on that node, against everything promised at this moment; what filter and prioritize expected binds nobody.
From the plan until the API has answered, the pod holds its devices firmly. A refused write gives them back. When no answer comes the
outcome is open and the devices stay held. The same write is repeated as long as kube-scheduler waits for it: it names the pod's UID, so it
can succeed once only. Then the API is only asked what became of the pod, because another kube-scheduler may lead by now, whose extender
knows nothing of this one's plans; kube-scheduler is told to try again, gets the same node from filter, and its call joins the one under
way. A pod that is still unbound long after the last write was not bound by it. That holds for errors that nobody thought of, too: what was
held is given back if nothing was sent, and else the outcome is looked up.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from placement.refusal import Refusal
from placement.request import RequestError
from proto import codec, contract
from proto.errors import ContractError
from proto.model import PodAssignment
from scheduler_plugin.core.plan import not_offered
from scheduler_plugin.core.pods import PodFacts, footprint
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.state import Reservation, Stage
from scheduler_plugin.errors import KubeApiError, KubeConflictError, KubeRefusedError
from scheduler_plugin.extender import wire
from scheduler_plugin.extender.desk import Desk
from scheduler_plugin.extender.gang import gang_asked
from scheduler_plugin.ports import PodApi

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 4.0
"""kube-scheduler waits 5 s by default; the answer must be there before."""
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0
BOUND = wire.bind_result()
"""The answer to a binding that succeeded."""
ARRIVAL_SECONDS = 60.0
"""After so long a write without an answer cannot take effect any more: the API server ends requests that take a minute."""
CONFIRM_SECONDS = 30.0
"""How far the pods' stream must have come beyond a binding before its absence there means that the pod is gone."""


async def _know() -> None:
    """Look nothing up: it is known who leads."""


@dataclass(slots=True)
class _Flight:
    node: str
    calls: int = 0
    """How many calls of kube-scheduler wait for the outcome."""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each of them."""
    outcome: "asyncio.Future[str]" = field(default_factory=asyncio.Future)
    """The error for kube-scheduler; empty when the pod is bound."""


class Binder:
    """All bindings under way, by pod UID."""

    def __init__(self, desk: Desk, api: PodApi, may_bind: Callable[[], bool], look: Callable[[], Awaitable[None]] = _know) -> None:
        """Args: may_bind: whether this replica leads, asked before every write. look: has that looked up, before a write is repeated."""
        self._desk = desk
        self._api = api
        self._may_bind = may_bind
        self._look_who_leads = look
        self._flights: dict[str, _Flight] = {}

    @property
    def open_bindings(self) -> int:
        """How many bindings have no outcome yet."""
        return len(self._flights)

    async def bind(self, body: bytes) -> bytes:
        """Answer one bind call. Raises WireError."""
        args = wire.decode(body, wire.BindingArgs)
        return wire.bind_result(await self._bound(args))

    async def stop(self) -> None:
        """Give up on open outcomes: the process ends."""
        for flight in list(self._flights.values()):
            flight.outcome.cancel()
        await asyncio.gather(*(flight.outcome for flight in self._flights.values()), return_exceptions=True)

    async def _bound(self, args: wire.BindingArgs) -> str:
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
            return await asyncio.wait_for(asyncio.shield(flight.outcome), ANSWER_SECONDS)
        except TimeoutError:
            return "the API server has not answered yet: what became of the binding is looked up"
        finally:
            flight.calls -= 1

    async def _run(self, args: wire.BindingArgs, flight: _Flight) -> str:
        try:
            pod = self._desk.state.pods.get(args.pod_uid) or await self._api.get_pod(args.pod_namespace, args.pod_name)
        except KubeApiError as exc:
            return f"the pod is not known here yet, and the API server did not answer: {exc}"
        if pod is None or pod.uid != args.pod_uid:
            self._desk.state.release(args.pod_uid)
            return f"there is no pod {args.pod_namespace}/{args.pod_name} with UID {args.pod_uid}"
        if bound_to := self._bound_to(pod):
            return "" if bound_to == args.node else f"the pod is bound to node {bound_to} already"
        gang = gang_asked(pod)
        if isinstance(gang, RequestError):
            return str(gang)
        if gang is not None and (waits := await self._desk.gangs.admit(pod, gang, args.node)):
            return waits
        plan = self._plan(pod, args.node)
        if isinstance(plan, str):
            return plan
        try:
            annotations = {} if plan is None else {contract.ANNOTATION_ASSIGNMENT: codec.encode_assignment(plan)}
        except ContractError as exc:
            return f"the assignment cannot be written down: {exc}"
        self._hold(pod, args.node, plan)
        try:
            return await self._write(pod, annotations, flight)
        except asyncio.CancelledError:
            logger.warning("stopped while a binding had no outcome", extra={"pod": f"{pod.namespace}/{pod.name}", "node": args.node})
            raise

    def _bound_to(self, pod: PodFacts) -> str:
        """Return the pod's node, also when the API took its binding and the watch has not told it yet."""
        reservation = self._desk.state.reservations.get(pod.uid)
        if reservation is not None and reservation.stage is Stage.BOUND:
            return reservation.node
        return pod.node_name

    def _plan(self, pod: PodFacts, node: str) -> PodAssignment | str | None:
        """Choose devices; None for a pod without GPUs, a sentence when there are none."""
        request = self._desk.request_of(pod)
        if request is None:
            return None
        if isinstance(request, RequestError):
            return str(request)
        gpu = self._desk.state.gpu_node(node)
        if gpu is None:
            return f"node {node} has no GPU that Aliquot manages"
        if lacking := not_offered(gpu, request):
            return f"node {node} does not offer {lacking} that the pod asks for"
        plan = self._desk.state.plan(node, request, self._desk.default_policy, pod.uid)
        return plan.sentence if isinstance(plan, Refusal) else plan

    def _hold(self, pod: PodFacts, node: str, plan: PodAssignment | None) -> None:
        uses = {} if plan is None or pod.gpu is None else footprint(pod.gpu.containers, plan)
        demand = HostDemand(pod.cpu_milli, pod.memory_mib)
        self._desk.state.reserve(Reservation(pod.uid, node, uses, demand, Stage.BINDING))

    async def _write(self, pod: PodFacts, annotations: Mapping[str, str], flight: _Flight) -> str:
        extra = {"pod": f"{pod.namespace}/{pod.name}", "pod_uid": pod.uid, "node": flight.node}
        pause, written_at, is_sent = FIRST_RETRY_SECONDS, self._desk.monotonic(), False
        while True:
            flight.called.clear()
            outcome: str | None = None
            try:
                if is_sent and flight.calls:
                    await self._look_who_leads()  # who asked may have ended since
                may_bind = self._may_bind()  # also between tries: the next leader counts on our silence once the lease is lost
                if not may_bind and not is_sent:
                    self._desk.state.release(pod.uid)
                    return "this replica does not lead; another one binds"
                if may_bind and flight.calls:
                    written_at, is_sent = self._desk.monotonic(), True
                    outcome = await self._try(pod, flight.node, annotations)
                else:
                    outcome = await self._look(pod, flight.node, annotations)
                    if outcome is None and self._desk.monotonic() - written_at > ARRIVAL_SECONDS:
                        self._desk.state.release(pod.uid)
                        outcome = "the API server did not take the binding"
            except KubeApiError as exc:
                logger.warning("a binding has no outcome yet: %s", exc, extra=extra)
            except Exception:
                if not is_sent:
                    self._desk.state.release(pod.uid)
                    raise
                logger.exception("a binding has no outcome yet", extra=extra)
            if outcome is not None:
                logger.info("not bound: %s" if outcome else "bound%s", outcome, extra=extra)
                return outcome
            try:
                await asyncio.wait_for(flight.called.wait(), pause)
                pause = FIRST_RETRY_SECONDS
            except TimeoutError:
                pause = min(2 * pause, LAST_RETRY_SECONDS)

    async def _try(self, pod: PodFacts, node: str, annotations: Mapping[str, str]) -> str:
        """Write the binding; return "" when the API took it, and a sentence when it refused. Raises KubeApiError."""
        try:
            await self._api.bind(pod.namespace, pod.name, pod.uid, node, annotations)
        except KubeConflictError as exc:  # an earlier try can have succeeded without our hearing of it
            outcome = await self._look(pod, node, annotations)
            if outcome is None:
                self._desk.state.release(pod.uid)
                return f"the API server refused the binding: {exc}"
            return outcome
        except KubeRefusedError as exc:
            self._desk.state.release(pod.uid)
            return f"the API server refused the binding: {exc}"
        self._confirm(pod)
        return ""

    async def _look(self, pod: PodFacts, node: str, annotations: Mapping[str, str]) -> str | None:
        """Ask what became of a pod: "" when it is bound as we meant it, a sentence when it will not be, None while it is unbound.

        Raises: KubeApiError.
        """
        found = await self._api.get_pod(pod.namespace, pod.name)
        if found is None or found.uid != pod.uid:
            self._desk.state.release(pod.uid)
            return "the pod was deleted"
        if not found.node_name:
            return None
        if found.node_name == node and (found.gpu is None or found.gpu.annotations.items() >= annotations.items()):
            self._confirm(pod)
            return ""
        self._desk.state.release(pod.uid)
        if pod.uid in self._desk.state.pods:  # or its end was told meanwhile, or it is yet to be told of
            self._desk.state.set_pod(found)
        return f"the pod was bound to node {found.node_name} by somebody else"

    def _confirm(self, pod: PodFacts) -> None:
        self._desk.state.confirm(pod.uid, self._desk.monotonic() + CONFIRM_SECONDS)
        self._desk.decisions.forget(pod.uid)
