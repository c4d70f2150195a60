"""Which of the available IDs kubelet is advised to take (GetPreferredAllocation).

Advice only: what a container gets is decided at PreStart. But when kubelet's IDs name the GPUs that are really given, PodResources,
dcgm-exporter and kubelet's per-device health tell the truth. The request names no pod, so advice is only specific when it does not matter
which of the waiting containers is meant.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from agent.core.identity import RememberedDevices, device_uuid_of
from agent.core.ledger import Ledger
from agent.core.planning import Node, count_of
from placement.choose import Choice, choose
from placement.request import RequestError, request_of_container
from proto import codec, contract
from proto.errors import ContractError
from proto.model import ContainerRequest, Pod, Preferences


@dataclass(frozen=True, slots=True)
class Waiting:
    """A container of a pod on this node that has no grant yet."""

    pod: Pod
    request: ContainerRequest
    preferences: Preferences


def waiting_containers(
    pods: Iterable[Pod], ledger: Ledger, resource: str, size: int, remembered: Iterable[RememberedDevices] = ()
) -> list[Waiting]:
    """Return the containers that an allocation of ``size`` IDs of the resource can be for, in the order of the pods.

    Args: remembered: what kubelet has given away already, to containers that have not started yet among them.
    """
    granted = {(grant.pod_uid, grant.container) for grant in ledger.grants.values()}
    granted |= {(one.pod_uid, one.container) for one in remembered if one.resource == resource}
    found = []
    for pod in pods:
        if pod.phase != "Pending" or pod.deletion_requested:
            continue
        for spec in pod.containers:
            if (pod.uid, spec.name) in granted or not any(name.startswith(contract.RESOURCE_DOMAIN) for name in spec.limits):
                continue
            try:
                request, preferences = request_of_container(pod, spec.name)
            except RequestError:  # refused, with its sentence, when it starts
                continue
            if count_of(request, resource) == size:
                found.append(Waiting(pod, request, preferences))
    return found


def devices_for(waiting: Sequence[Waiting], node: Node, *, first_come: bool = False) -> tuple[str, ...]:
    """Return the device UUIDs of the container an allocation is for: assigned, or where local placement would put it now.

    Empty when several containers wait that would get different devices: the allocation can be for any of them.

    Args: first_come: take it for the first one's; kubelet admits pods in the order in which they came.
    """
    meant = waiting[:1] if first_come else waiting
    if node.local_policy is None:
        return _assigned_devices(meant[0]) if len(meant) == 1 else ()
    places, alike = set[tuple[str, ...]](), set[tuple[ContainerRequest, Preferences]]()
    for one in meant:
        if devices := _assigned_devices(one):
            places.add(devices)
        else:
            alike.add((replace(one.request, container="", init=False), one.preferences))
    # one seed for all: among equally good devices each would take the one that is advised now
    places |= {_local_devices(request, preferences, node, meant[0].pod.uid) for request, preferences in alike}
    return places.pop() if len(places) == 1 else ()


def _local_devices(request: ContainerRequest, preferences: Preferences, node: Node, seed: str) -> tuple[str, ...]:
    if node.local_policy is None:
        return ()
    states = node.ledger.states(node.board, node.shares_per_gpu)
    choice = choose(states, request, preferences, node.local_policy, links=node.board.links, seed=seed)
    return tuple(_named_by_ids(share.device_uuid) for share in choice.shares) if isinstance(choice, Choice) else ()


def _assigned_devices(waiting: Waiting) -> tuple[str, ...]:
    try:
        assignment = codec.decode_assignment(waiting.pod.annotations.get(contract.ANNOTATION_ASSIGNMENT, ""), pod_uid=waiting.pod.uid)
    except ContractError:  # refused, with its sentence, when it starts
        return ()
    assigned = assignment.of(waiting.request.container)
    return tuple(_named_by_ids(share.device_uuid) for share in assigned.shares) if assigned is not None else ()


def _named_by_ids(share_name: str) -> str:
    """Return what the IDs for a share name: of a place for a MIG instance, the GPU it is on."""
    place = codec.decode_place(share_name)
    return share_name if place is None else place.device_uuid


def prefer_ids(
    available: Sequence[str], must_include: Sequence[str], size: int, wanted: Sequence[str], held: Set[str], *, packing: bool = False
) -> tuple[str, ...]:
    """Choose ``size`` IDs, or as many as there are.

    Args:
        wanted: device UUIDs in the order of preference: those the one pending pod of this size was assigned.
        held: IDs that a grant still stands for. Kubelet offers such IDs only when it lost its checkpoint; the container that holds
            them may still run, so they come last.
        packing: containers are put together where they fit, so that the fullest device is the best guess.
    Returns: all of ``must_include``, then one ID per wanted device, then IDs of further distinct devices, the emptiest first, or
        the fullest with ``packing``.
    """
    chosen = list(dict.fromkeys(must_include))[:size]
    pool = [device_id for device_id in dict.fromkeys(available) if device_id not in chosen]
    pool.sort(key=lambda device_id: device_id in held)
    used = {device_uuid_of(device_id) for device_id in chosen}
    by_free_ids = _by_free_ids(pool)
    for uuid in [*wanted, *(reversed(by_free_ids) if packing else by_free_ids)]:
        if len(chosen) < size and uuid not in used and (found := _first_of(uuid, pool)) is not None:
            chosen.append(found)
            used.add(uuid)
    for device_id in pool:  # fewer devices than asked: kubelet wants the count all the same
        if len(chosen) < size and device_id not in chosen:
            chosen.append(device_id)
    return tuple(chosen)


def _by_free_ids(pool: Iterable[str]) -> list[str]:
    return [uuid for uuid, _ in Counter(device_uuid_of(device_id) for device_id in pool).most_common()]


def _first_of(uuid: str, pool: Iterable[str]) -> str | None:
    return next((device_id for device_id in pool if device_uuid_of(device_id) == uuid), None)
