# SPDX-License-Identifier: Apache-2.0
"""Turns a container start with device IDs into a grant, or into a refusal with its reason.

Amounts come from the pod's spec alone; an assignment only says where. Planning fails closed: it refuses an inconsistent start with a
message and never falls back to a whole GPU. Kubelet retries a refused start, so each message says what the next attempt needs.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from agent.core.backends import Abilities, MigStrategy, backend_of, backend_trouble, offer_of, within_burst
from agent.core.identity import Holder, device_uuid_of
from agent.core.inventory import DeviceInventory
from agent.core.ledger import Grant, Ledger
from agent.core.mig import single_profile
from agent.core.owners import users_in
from agent.core.refusal import Reason, Refusal
from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.errors import ContractError, StaleAssignmentError
from aliquot.contract.model import ContainerRequest, DeviceShare, Isolation, Pod, Policy, Preferences
from aliquot.placement import mig
from aliquot.placement.choose import choose
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import Reject, reject_reason, share_on
from aliquot.placement.refusal import Refusal as NoFit
from aliquot.placement.refusal import refuse
from aliquot.placement.request import RequestError, request_of_container

NO_ABILITIES = Abilities()


@dataclass(frozen=True, slots=True)
class GrantRequest:
    """A container start: the device IDs, the container that owns them, its pod, and what the pod requests for it."""

    grant_id: str
    resource: str
    device_ids: frozenset[str]
    holder: Holder
    pod: Pod
    request: ContainerRequest
    preferences: Preferences


@dataclass(frozen=True, slots=True)
class Node:
    """The node's state for a decision. ``local_policy`` None: devices come only from the scheduler's assignment."""

    inventory: DeviceInventory
    ledger: Ledger
    shares_per_gpu: int
    boot_id: str
    local_policy: Policy | None
    pod_active: Callable[[str], bool]
    """Whether the pod with this UID may still run containers, according to the API."""
    abilities: Abilities = NO_ABILITIES
    live_grants: Set[str] = frozenset()
    """Ids of other pods' grants that still have a live process, even if the pod is deleted."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A grant that fits, and the grants that it replaces."""

    grant: Grant
    superseded: tuple[Grant, ...]
    preferences: Preferences


def read_request(pod: Pod, container: str) -> tuple[ContainerRequest, Preferences] | Refusal:
    """Parse what a pod requests for one container. PreStart does this once; all later steps use the values."""
    try:
        return request_of_container(pod, container)
    except RequestError as exc:
        return Refusal(Reason.REQUEST_INVALID, str(exc))


def plan_grant(ask: GrantRequest, node: Node) -> Planned | Refusal:
    """Decide what the container gets."""
    parsed = _request(ask, node)
    if isinstance(parsed, Refusal):
        return parsed
    request, preferences = parsed
    if (twice := _claim_trouble(ask, node.ledger)) is not None:
        return twice
    superseded = _superseded(ask, node)
    if isinstance(superseded, Refusal):
        return superseded
    others = node.ledger.releasing((ask.grant_id, *(grant.grant_id for grant in superseded)))
    shares = _assigned_shares(ask, node, others, request, preferences)
    if isinstance(shares, Refusal):
        return _with_unclear(shares, node.inventory, others)
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


def _claim_trouble(ask: GrantRequest, ledger: Ledger) -> Refusal | None:
    """Return a refusal if the container uses a claim too: it has one limits file, so the other GPUs would have no limit."""
    used = [grant.claim for grant in ledger.with_claims if ask.holder.container in users_in(grant, ask.pod)]
    if not used:
        return None
    return Refusal(
        Reason.REQUEST_INVALID,
        f"container {ask.holder} uses {used[0]} and requests {ask.resource}. A container can use one: remove the claim or the resource",
    )


def _request(ask: GrantRequest, node: Node) -> tuple[ContainerRequest, Preferences] | Refusal:
    """Return the container's request, narrowed to the resource of this start."""
    request, preferences = ask.request, ask.preferences
    count = count_of(request, ask.resource)
    if count != len(ask.device_ids):
        return Refusal(
            Reason.REQUEST_DIFFERS,
            f"container {ask.holder} requests {count} {ask.resource}, but kubelet starts it with {len(ask.device_ids)}: "
            "the agent still knows an earlier pod of this name. The agent checks again when kubelet retries",
        )
    if request.mig:
        profile = mig.profile_of_resource(ask.resource)
        request = replace(request, mig=((profile, len(ask.device_ids)),))
    elif node.abilities.mig_strategy is MigStrategy.SINGLE and (only := single_profile(node.inventory)) is not None:
        as_instances = _as_instances(request, preferences, only, node.inventory)
        if isinstance(as_instances, Refusal):
            return as_instances
        request = as_instances
    if _shares_before(ask, node.ledger):  # the node's allowed burst may be lower now than when the container got its grant
        preferences = within_burst(preferences, node.abilities.most_memory_burst)
    if trouble := backend_trouble(request, preferences, offer_of(node.inventory, node.abilities), node.abilities.most_memory_burst):
        return Refusal(Reason.ISOLATION_UNAVAILABLE, trouble)
    return request, preferences


def _as_instances(
    request: ContainerRequest, preferences: Preferences, profile: str, inventory: DeviceInventory
) -> ContainerRequest | Refusal:
    """Convert a request for vGPUs to MIG instances, on a node where each vGPU is an instance."""
    least_bytes = min(instance.memory_bytes for entry in inventory.devices for instance in entry.device.mig_instances)
    where = f"on this node each vGPU is a MIG instance {profile} with {units.format_memory(least_bytes)} (migStrategy: single)"
    if preferences.isolation not in (None, Isolation.MIG):
        return Refusal(
            Reason.ISOLATION_UNAVAILABLE,
            f"annotation {contract.ANNOTATION_ISOLATION}: {preferences.isolation} is not available on this node: {where}. "
            "Remove the annotation, or use another node",
        )
    if request.memory_percent is not None:
        return Refusal(
            Reject.MEMORY,
            f"container {request.container} requests a percentage of a GPU's memory, but {where}. "
            f"Request {contract.RESOURCE_VGPU_MEMORY} instead of {contract.RESOURCE_VGPU_MEMORY_PERCENT}, or use another node",
        )
    if (request.memory_bytes_per_vgpu or 0) > least_bytes:
        return Refusal(
            Reject.MEMORY,
            f"container {request.container} requests {units.format_memory(request.memory_bytes_per_vgpu or 0)} per vGPU, but {where}. "
            f"Request less {contract.RESOURCE_VGPU_MEMORY}, or use another node",
        )
    if request.cores_percent is not None:
        return Refusal(
            Reject.CORES,
            f"container {request.container} requests cores, but {where}, which has the compute of its profile. "
            f"Remove {contract.RESOURCE_VGPU_CORES}, or use another node",
        )
    return ContainerRequest(request.container, mig=((profile, request.vgpus),), init=request.init)


def count_of(request: ContainerRequest, resource: str) -> int:
    """Return the number of a resource's IDs that the container requests."""
    if resource == contract.RESOURCE_VGPU:
        return request.vgpus
    return dict(request.mig).get(mig.profile_of_resource(resource), 0)


def _superseded(ask: GrantRequest, node: Node) -> tuple[Grant, ...] | Refusal:
    """Return the grants that this start replaces: the container's own older ones, and those that lost their IDs to this container."""
    own = [
        grant
        for grant in node.ledger.grants.values()
        if (grant.pod_uid, grant.container, grant.resource) == (ask.pod.uid, ask.holder.container, ask.resource) and grant.claim is None
    ]
    result = {grant.grant_id: grant for grant in own if grant.grant_id != ask.grant_id}
    for grant in node.ledger.holding_any(ask.resource, ask.device_ids):
        if grant.pod_uid != ask.pod.uid and (refusal := _ids_held(ask, grant, node)) is not None:
            return refusal
        if grant.grant_id != ask.grant_id:
            result[grant.grant_id] = grant
    return tuple(result.values())


def _ids_held(ask: GrantRequest, grant: Grant, node: Node) -> Refusal | None:
    """Return a refusal while another pod's grant is in use; None if its IDs may go to this container."""
    if node.pod_active(grant.pod_uid):
        return Refusal(
            Reason.IDS_HELD,
            f"kubelet gave {ask.holder} IDs that {grant.holder} still holds. This happens when kubelet loses its checkpoint. "
            "Delete this pod so that it gets other IDs, or wait for the other pod to end",
        )
    if grant.grant_id in node.live_grants:
        return Refusal(
            Reason.IDS_HELD,
            f"kubelet gave {ask.holder} IDs of {grant.holder}. That pod is deleted, but one of its processes still runs and holds "
            "memory. The agent checks again when kubelet retries. A process that never ends hangs in the driver: see dmesg",
        )
    return None


def _with_unclear(refusal: Refusal, inventory: DeviceInventory, others: Ledger) -> Refusal:
    """Return a refusal that also names the GPUs that unclear grants close; no cordon is the cause there."""
    closed = [entry.device.uuid for entry in inventory.devices if not entry.cordoned and others.unclear_on(entry.grantable_uuids)]
    if not closed:
        return refusal
    reason = Reason.LEDGER_DAMAGED if refusal.reason is Reject.CORDONED else refusal.reason
    return Refusal(
        reason,
        f"nothing more is granted on {', '.join(closed)}: the ledger row of a container that may run there is damaged, and so is its copy. "
        f"aliquot drift shows damaged-grant; delete the pod it names. {refusal.message}",
    )


def _assigned_shares(
    ask: GrantRequest, node: Node, others: Ledger, request: ContainerRequest, preferences: Preferences
) -> tuple[DeviceShare, ...] | Refusal:
    before = _shares_before(ask, node.ledger)
    to_be_assigned = node.local_policy is None and (contract.ANNOTATION_ASSIGNMENT in ask.pod.annotations or not before)
    if to_be_assigned or is_assigned(ask.pod, ask.holder.container):
        return _from_annotation(ask, node, others, before, request, preferences)
    trouble = _check_shares(before, _own_states(node, others, before, before), request, preferences, ask.holder.container)
    if trouble is None:  # a restarting container keeps its devices
        return before
    if node.local_policy is None:  # it was placed locally, and now only assignments count
        return trouble
    named = [device_uuid_of(device_id) for device_id in sorted(ask.device_ids)]
    choice = choose(
        others.states(node.inventory, node.shares_per_gpu),
        request,
        preferences,
        node.local_policy,
        # an ID of a MIG resource is the instance itself; a vGPU's ID is one of many on a GPU, and the policy chooses better
        preferred_uuids=named if request.mig else (),
        familiar_uuids=named,
        links=node.inventory.links,
        seed=ask.pod.uid,
    )
    return Refusal(choice.reason, choice.sentence) if isinstance(choice, NoFit) else choice.shares


def is_assigned(pod: Pod, container: str) -> bool:
    """Whether a scheduler has assigned devices to this container; then local placement is skipped."""
    try:
        assignment = codec.decode_assignment(pod.annotations.get(contract.ANNOTATION_ASSIGNMENT, ""), pod_uid=pod.uid)
    except ContractError:
        return False
    return assignment.of(container) is not None


def _shares_before(ask: GrantRequest, ledger: Ledger) -> tuple[DeviceShare, ...]:
    """Return the shares that a restarting container had before; empty for a new container."""
    before = ledger.grants.get(ask.grant_id)
    if before is None or (before.pod_uid, before.container) != (ask.pod.uid, ask.holder.container):
        return ()
    return before.shares


def _own_states(node: Node, others: Ledger, before: Sequence[DeviceShare], wanted: Sequence[DeviceShare]) -> tuple[DeviceState, ...]:
    """Return the GPUs as seen by a container that had ``before`` and should get ``wanted``.

    A restarting container may return to its GPU despite a cordon or a lower ``sharesPerGpu``: those only keep off new work.
    """
    inventory = node.inventory.without_cordon(share.device_uuid for share in before)
    if tuple(wanted) != tuple(before):
        return others.states(inventory, node.shares_per_gpu)
    known = others.with_unclear({})  # likewise a GPU that an unclear grant closes
    return known.states(inventory, max(node.shares_per_gpu, sum(len(grant.promised) for grant in node.ledger.grants.values())))


def _from_annotation(
    ask: GrantRequest, node: Node, others: Ledger, before: Sequence[DeviceShare], request: ContainerRequest, preferences: Preferences
) -> tuple[DeviceShare, ...] | Refusal:
    text = ask.pod.annotations.get(contract.ANNOTATION_ASSIGNMENT)
    if text is None:
        return Refusal(
            Reason.ASSIGNMENT_MISSING,
            f"pod {ask.pod.namespace}/{ask.pod.name} has no annotation {contract.ANNOTATION_ASSIGNMENT}: {contract.SCHEDULER_NAME} did "
            "not place it. "
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
            "Delete the pod so that it is placed again",
        )
    shares = assigned.shares if not request.mig else _of_profile(assigned.shares, node.inventory, request.mig[0][0])
    refusal = _check_shares(shares, _own_states(node, others, before, shares), request, preferences, ask.holder.container)
    if refusal is None:
        return shares
    holders = [holder for share in shares for holder in others.holders_on(share.device_uuid)]
    promised = f" Already granted on these devices: {', '.join(holders)}." if holders else ""
    return Refusal(refusal.reason, f"annotation {contract.ANNOTATION_ASSIGNMENT}: {refusal.message}{promised}")


def _of_profile(shares: Sequence[DeviceShare], inventory: DeviceInventory, profile: str) -> tuple[DeviceShare, ...]:
    """Return the shares that are instances of a profile. Kubelet starts the container's other profiles by separate calls."""
    uuids = {instance.uuid for entry in inventory.devices for instance in entry.device.mig_instances if instance.profile == profile}
    known = {instance.uuid for entry in inventory.devices for instance in entry.device.mig_instances}
    return tuple(share for share in shares if share.device_uuid in uuids or share.device_uuid not in known)


def _check_shares(
    shares: Sequence[DeviceShare], states: Sequence[DeviceState], request: ContainerRequest, preferences: Preferences, container: str
) -> Refusal | None:
    """Return a refusal if these shares differ from the container's request or do not fit; None otherwise."""
    wanted = request.mig[0][1] if request.mig else request.vgpus
    if len(shares) != wanted:
        return Refusal(
            Reason.ASSIGNMENT_INVALID,
            f"expected {wanted} devices for container {container}, found {len(shares)}. Delete the pod so that it is placed again",
        )
    check = _check_instance if request.mig else _check_share
    for share in shares:
        state = next((state for state in states if state.carries(share)), None)
        refusal = _unknown_device(share, states) if state is None else check(share, state, request, preferences)
        if refusal is not None:
            return refusal
    return None


def _unknown_device(share: DeviceShare, states: Sequence[DeviceState]) -> Refusal:
    offered = ", ".join(state.device.uuid for state in states) or "none"
    sentence = f"this node has no device {share.device_uuid}, only {offered}. Delete the pod so that it is placed again"
    return Refusal(Reason.DEVICE_UNKNOWN, sentence)


def _check_share(share: DeviceShare, state: DeviceState, request: ContainerRequest, preferences: Preferences) -> Refusal | None:
    requested = share_on(state.device, request, preferences)
    if share != requested:
        return Refusal(
            Reason.ASSIGNMENT_INVALID,
            f"it gives container {request.container} {_describe(share)} of {share.device_uuid}, but the pod's spec requests "
            f"{_describe(requested)}. "
            "Delete the pod so that it is placed again",
        )
    if reject_reason(state, request, preferences) is None:
        return None
    no_room = refuse((state,), request, preferences)
    return Refusal(no_room.reason, f"it does not fit on {state.device.uuid}: {no_room.sentence}")


def _check_instance(share: DeviceShare, state: DeviceState, request: ContainerRequest, preferences: Preferences) -> Refusal | None:
    profile = request.mig[0][0]
    if reject_reason(state, request, preferences) is not None:
        no_room = refuse((state,), request, preferences)
        return Refusal(no_room.reason, f"MIG instance {share.device_uuid}: {no_room.sentence}")
    if all(instance.uuid != share.device_uuid for instance in mig.free_instances(state, profile)):
        return Refusal(
            Reject.MIG_PROFILE,
            f"MIG instance {share.device_uuid} is in use or has another profile than {profile}. Delete the pod so that it is placed again",
        )
    return None


def _describe(share: DeviceShare) -> str:
    cores = "no reserved cores" if share.cores_percent is None else f"{share.cores_percent} percent of the cores"
    return f"{units.format_memory(share.memory_bytes)} and {cores}"
