"""From "these IDs are about to start" to a grant, or the refusal that says why not.

Amounts come from the pod's spec alone; an assignment only says where. Fail closed: whatever does not add up is refused with a
sentence, never rounded to a whole GPU. A refusal at PreStart is retried by kubelet, so each says what the next attempt needs.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from agent.core.backends import Abilities, MigStrategy, backend_of, backend_trouble, offer_of, within_burst
from agent.core.identity import Holder, device_uuid_of
from agent.core.inventory import DeviceBoard
from agent.core.ledger import Grant, Ledger
from agent.core.mig import single_profile
from agent.core.refusal import Reason, Refusal
from placement import mig
from placement.choose import choose
from placement.device import DeviceState
from placement.fit import Reject, reject_reason, share_on
from placement.refusal import Refusal as NoRoom
from placement.refusal import refuse
from placement.request import RequestError, request_of_container
from proto import codec, contract, units
from proto.errors import ContractError, StaleAssignmentError
from proto.model import ContainerRequest, DeviceShare, Isolation, Pod, Policy, Preferences

NO_ABILITIES = Abilities()


@dataclass(frozen=True, slots=True)
class Ask:
    """What kubelet is about to start: the IDs, whose they are, and that pod."""

    grant_id: str
    resource: str
    device_ids: frozenset[str]
    holder: Holder
    pod: Pod


@dataclass(frozen=True, slots=True)
class Node:
    """What the decision rests on. ``local_policy`` None: devices come from the scheduler's assignment, and from nowhere else."""

    board: DeviceBoard
    ledger: Ledger
    shares_per_gpu: int
    boot_id: str
    local_policy: Policy | None
    pod_active: Callable[[str], bool]
    """Whether the pod of this UID may still run containers, as far as the API has told us."""
    abilities: Abilities = NO_ABILITIES
    live_grants: Set[str] = frozenset()
    """Ids of grants of other pods of which a process still runs, whatever became of the pod."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A grant that fits, and the grants it takes the place of."""

    grant: Grant
    superseded: tuple[Grant, ...]
    preferences: Preferences


def plan_grant(ask: Ask, node: Node) -> Planned | Refusal:
    """Decide what the container gets."""
    asked = _request(ask, node)
    if isinstance(asked, Refusal):
        return asked
    request, preferences = asked
    superseded = _superseded(ask, node)
    if isinstance(superseded, Refusal):
        return superseded
    others = node.ledger.releasing((ask.grant_id, *(grant.grant_id for grant in superseded)))
    shares = _assigned_shares(ask, node, others, request, preferences)
    if isinstance(shares, Refusal):
        return shares
    grant = Grant(
        grant_id=ask.grant_id,
        resource=ask.resource,
        device_ids=tuple(sorted(ask.device_ids)),
        namespace=ask.pod.namespace,
        pod=ask.pod.name,
        pod_uid=ask.pod.uid,
        container=ask.holder.container,
        shares=shares,
        boot_id=node.boot_id,
        isolation=backend_of(request, preferences),
    )
    return Planned(grant, superseded, preferences)


def _request(ask: Ask, node: Node) -> tuple[ContainerRequest, Preferences] | Refusal:
    """Read the container's request, narrowed to the resource that is being started."""
    try:
        request, preferences = request_of_container(ask.pod, ask.holder.container)
    except RequestError as exc:
        return Refusal(Reason.REQUEST_INVALID, str(exc))
    asked = count_of(request, ask.resource)
    if asked != len(ask.device_ids):
        return Refusal(
            Reason.REQUEST_DIFFERS,
            f"container {ask.holder} asks for {asked} {ask.resource}, and the kubelet starts it with {len(ask.device_ids)}: "
            "the pod known here is an earlier one of this name. It is asked again at the next retry",
        )
    if request.mig:
        profile = mig.profile_of_resource(ask.resource)
        request = replace(request, mig=((profile, len(ask.device_ids)),))
    elif node.abilities.mig_strategy is MigStrategy.SINGLE and (only := single_profile(node.board)) is not None:
        as_instances = _as_instances(request, preferences, only, node.board)
        if isinstance(as_instances, Refusal):
            return as_instances
        request = as_instances
    if _shares_before(ask, node.ledger):  # what it was granted may be more than the node allows since
        preferences = within_burst(preferences, node.abilities.most_memory_burst)
    if trouble := backend_trouble(request, preferences, offer_of(node.board, node.abilities), node.abilities.most_memory_burst):
        return Refusal(Reason.ISOLATION_UNAVAILABLE, trouble)
    return request, preferences


def _as_instances(request: ContainerRequest, preferences: Preferences, profile: str, board: DeviceBoard) -> ContainerRequest | Refusal:
    """Read vGPUs as MIG instances, on a node where each vGPU is one."""
    least_bytes = min(instance.memory_bytes for entry in board.devices for instance in entry.device.mig_instances)
    where = f"on this node each vGPU is a MIG instance {profile} with {units.format_memory(least_bytes)} (migStrategy: single)"
    if preferences.isolation not in (None, Isolation.MIG):
        return Refusal(
            Reason.ISOLATION_UNAVAILABLE,
            f"annotation {contract.ANNOTATION_ISOLATION}: {preferences.isolation} is not available on this node: {where}. "
            "Remove the annotation, or use another node",
        )
    if (request.memory_bytes_per_vgpu or 0) > least_bytes:
        return Refusal(
            Reject.MEMORY,
            f"container {request.container} asks for {units.format_memory(request.memory_bytes_per_vgpu or 0)} per vGPU, and {where}. "
            f"Ask for less {contract.RESOURCE_VGPU_MEMORY}, or use another node",
        )
    if request.cores_percent is not None:
        return Refusal(
            Reject.CORES,
            f"container {request.container} asks for cores, and {where}, which has the compute of its profile. "
            f"Remove {contract.RESOURCE_VGPU_CORES}, or use another node",
        )
    return ContainerRequest(request.container, mig=((profile, request.vgpus),), init=request.init)


def count_of(request: ContainerRequest, resource: str) -> int:
    """Return how many IDs of a resource the container asks for."""
    if resource == contract.RESOURCE_VGPU:
        return request.vgpus
    return dict(request.mig).get(mig.profile_of_resource(resource), 0)


def _superseded(ask: Ask, node: Node) -> tuple[Grant, ...] | Refusal:
    """Return the grants this one replaces: those whose IDs kubelet has given to this container since."""
    own = [
        grant
        for grant in node.ledger.grants.values()
        if (grant.pod_uid, grant.container, grant.resource) == (ask.pod.uid, ask.holder.container, ask.resource)
    ]
    result = {grant.grant_id: grant for grant in own if grant.grant_id != ask.grant_id}
    for grant in node.ledger.holding_any(ask.resource, ask.device_ids):
        if grant.pod_uid != ask.pod.uid and node.pod_active(grant.pod_uid):
            return Refusal(
                Reason.IDS_HELD,
                f"the kubelet gave {ask.holder} IDs that {grant.holder} still holds, which happens when its checkpoint is lost. "
                "Delete this pod so that it gets others, or wait for the other to end",
            )
        if grant.pod_uid != ask.pod.uid and grant.grant_id in node.live_grants:
            return Refusal(
                Reason.IDS_HELD,
                f"the kubelet gave {ask.holder} IDs of {grant.holder}, whose pod is gone and of which a process still runs and holds its "
                "memory. It is asked again at the next retry; a process that does not end at all hangs in the driver, see dmesg",
            )
        if grant.grant_id != ask.grant_id:
            result[grant.grant_id] = grant
    return tuple(result.values())


def _assigned_shares(
    ask: Ask, node: Node, others: Ledger, request: ContainerRequest, preferences: Preferences
) -> tuple[DeviceShare, ...] | Refusal:
    before = _shares_before(ask, node.ledger)
    to_be_assigned = node.local_policy is None and (contract.ANNOTATION_ASSIGNMENT in ask.pod.annotations or not before)
    if to_be_assigned or is_assigned(ask.pod, ask.holder.container):
        return _from_annotation(ask, node, others, before, request, preferences)
    trouble = _check_shares(before, _own_states(node, others, before, before), request, preferences, ask.holder.container)
    if trouble is None:  # a restarting container comes back where it was
        return before
    if node.local_policy is None:  # it was placed while placement was local, and assignments bind by now
        return trouble
    named = [device_uuid_of(device_id) for device_id in sorted(ask.device_ids)]
    choice = choose(
        others.states(node.board, node.shares_per_gpu),
        request,
        preferences,
        node.local_policy,
        # an ID of a MIG resource is the instance itself; of a vGPU it is one of many on a GPU, and says nothing better than the policy
        preferred_uuids=named if request.mig else (),
        familiar_uuids=named,
        links=node.board.links,
        seed=ask.pod.uid,
    )
    return Refusal(choice.reason, choice.sentence) if isinstance(choice, NoRoom) else choice.shares


def is_assigned(pod: Pod, container: str) -> bool:
    """Whether a scheduler has assigned devices to this very container: then local placement has nothing to choose."""
    try:
        assignment = codec.decode_assignment(pod.annotations.get(contract.ANNOTATION_ASSIGNMENT, ""), pod_uid=pod.uid)
    except ContractError:
        return False
    return assignment.of(container) is not None


def _shares_before(ask: Ask, ledger: Ledger) -> tuple[DeviceShare, ...]:
    """Return what a restarting container had before; nothing for one that is new."""
    before = ledger.grants.get(ask.grant_id)
    if before is None or (before.pod_uid, before.container) != (ask.pod.uid, ask.holder.container):
        return ()
    return before.shares


def _own_states(node: Node, others: Ledger, before: Sequence[DeviceShare], wanted: Sequence[DeviceShare]) -> tuple[DeviceState, ...]:
    """Return the GPUs as a container finds them that had ``before`` and is to have ``wanted``.

    What keeps new work off a GPU does not keep a container from where it was: neither a cordon, nor a lower ``sharesPerGpu``.
    """
    board = node.board.without_cordon(share.device_uuid for share in before)
    if tuple(wanted) != tuple(before):
        return others.states(board, node.shares_per_gpu)
    return others.states(board, max(node.shares_per_gpu, sum(len(grant.shares) for grant in node.ledger.grants.values())))


def _from_annotation(
    ask: Ask, node: Node, others: Ledger, before: Sequence[DeviceShare], request: ContainerRequest, preferences: Preferences
) -> tuple[DeviceShare, ...] | Refusal:
    text = ask.pod.annotations.get(contract.ANNOTATION_ASSIGNMENT)
    if text is None:
        return Refusal(
            Reason.ASSIGNMENT_MISSING,
            f"pod {ask.pod.namespace}/{ask.pod.name} has no annotation {contract.ANNOTATION_ASSIGNMENT}: it was not placed by "
            f"{contract.SCHEDULER_NAME}. "
            f"Set schedulerName: {contract.SCHEDULER_NAME} in the pod, or run the agent with placement: local",
        )
    try:
        assignment = codec.decode_assignment(text, pod_uid=ask.pod.uid)
    except StaleAssignmentError as exc:
        return Refusal(Reason.ASSIGNMENT_STALE, f"annotation {contract.ANNOTATION_ASSIGNMENT}: {exc}")
    except ContractError as exc:
        return Refusal(Reason.ASSIGNMENT_INVALID, f"annotation {contract.ANNOTATION_ASSIGNMENT}: {exc}")
    assigned = assignment.of(ask.holder.container)
    if assigned is None:
        named = ", ".join(container.container for container in assignment.containers)
        return Refusal(
            Reason.ASSIGNMENT_INVALID,
            f"annotation {contract.ANNOTATION_ASSIGNMENT} has no devices for container {ask.holder.container}, only for {named}. "
            "Delete the pod so that it is placed anew",
        )
    shares = assigned.shares if not request.mig else _of_profile(assigned.shares, node.board, request.mig[0][0])
    refusal = _check_shares(shares, _own_states(node, others, before, shares), request, preferences, ask.holder.container)
    if refusal is None:
        return shares
    holders = [holder for share in shares for holder in others.holders_on(share.device_uuid)]
    promised = f" Promised on these devices: {', '.join(holders)}." if holders else ""
    return Refusal(refusal.reason, f"annotation {contract.ANNOTATION_ASSIGNMENT}: {refusal.message}{promised}")


def _of_profile(shares: Sequence[DeviceShare], board: DeviceBoard, profile: str) -> tuple[DeviceShare, ...]:
    """Return the shares that are instances of a profile; the container's other profiles are started by calls of their own."""
    uuids = {instance.uuid for entry in board.devices for instance in entry.device.mig_instances if instance.profile == profile}
    known = {instance.uuid for entry in board.devices for instance in entry.device.mig_instances}
    return tuple(share for share in shares if share.device_uuid in uuids or share.device_uuid not in known)


def _check_shares(
    shares: Sequence[DeviceShare], states: Sequence[DeviceState], request: ContainerRequest, preferences: Preferences, container: str
) -> Refusal | None:
    """Say why these shares are not what the container asks, or do not fit; None when all is well."""
    wanted = request.mig[0][1] if request.mig else request.vgpus
    if len(shares) != wanted:
        return Refusal(
            Reason.ASSIGNMENT_INVALID,
            f"expected {wanted} devices for container {container}, found {len(shares)}. Delete the pod so that it is placed anew",
        )
    for share in shares:
        state = next((state for state in states if state.carries(share)), None)
        if state is None:
            offered = ", ".join(state.device.uuid for state in states) or "none"
            return Refusal(
                Reason.DEVICE_UNKNOWN,
                f"this node has no device {share.device_uuid}, only {offered}. Delete the pod so that it is placed anew",
            )
        refusal = _check_instance(share, state, request, preferences) if request.mig else _check_share(share, state, request, preferences)
        if refusal is not None:
            return refusal
    return None


def _check_share(share: DeviceShare, state: DeviceState, request: ContainerRequest, preferences: Preferences) -> Refusal | None:
    asked = share_on(state.device, request, preferences)
    if share != asked:
        return Refusal(
            Reason.ASSIGNMENT_INVALID,
            f"it gives container {request.container} {_describe(share)} of {share.device_uuid}, and the pod's spec asks for "
            f"{_describe(asked)}. "
            "Delete the pod so that it is placed anew",
        )
    if reject_reason(state, request, preferences) is None:
        return None
    no_room = refuse((state,), request, preferences)
    return Refusal(no_room.reason, f"{state.device.uuid} cannot take it: {no_room.sentence}")


def _check_instance(share: DeviceShare, state: DeviceState, request: ContainerRequest, preferences: Preferences) -> Refusal | None:
    profile = request.mig[0][0]
    if reject_reason(state, request, preferences) is not None:
        no_room = refuse((state,), request, preferences)
        return Refusal(no_room.reason, f"MIG instance {share.device_uuid}: {no_room.sentence}")
    if all(instance.uuid != share.device_uuid for instance in mig.free_instances(state, profile)):
        return Refusal(
            Reject.MIG_PROFILE,
            f"MIG instance {share.device_uuid} is in use or no {profile} instance. Delete the pod so that it is placed anew",
        )
    return None


def _describe(share: DeviceShare) -> str:
    cores = "no reserved cores" if share.cores_percent is None else f"{share.cores_percent} percent of the cores"
    return f"{units.format_memory(share.memory_bytes)} and {cores}"
