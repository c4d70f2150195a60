# SPDX-License-Identifier: Apache-2.0
"""Advises kubelet which of the available IDs to allocate (GetPreferredAllocation).

This is advice only: PreStart decides what a container gets. But if kubelet's IDs name the granted GPUs, then PodResources, dcgm-exporter
and kubelet's per-device health are correct. The request names no pod, so advice is specific only if all waiting containers would get the
same devices.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from agent.core.identity import RememberedDevices, device_uuid_of
from agent.core.ledger import Ledger
from agent.core.planning import Node, count_of
from aliquot import contract
from aliquot.contract import codec
from aliquot.contract.errors import ContractError
from aliquot.contract.model import ContainerRequest, Pod, Preferences
from aliquot.placement.choose import Choice, choose
from aliquot.placement.request import RequestError, request_of_container


@dataclass(frozen=True, slots=True)
class Waiting:
    """A container of a pod on this node without a grant so far."""

    pod: Pod
    request: ContainerRequest
    preferences: Preferences


def waiting_containers(
    pods: Iterable[Pod], ledger: Ledger, resource: str, size: int, remembered: Iterable[RememberedDevices] = ()
) -> list[Waiting]:
    """Return the containers that may be the target of an allocation of ``size`` IDs of the resource, in the order of the pods.

    Args: remembered: what kubelet has already allocated, including to containers that have not started yet.
    """
    granted = {(grant.pod_uid, grant.container) for grant in ledger.grants.values()}
    granted |= {(one.pod_uid, one.container) for one in remembered if one.resource == resource}
    pending = [pod for pod in pods if pod.phase == "Pending" and not pod.deletion_requested]
    return [one for pod in pending for one in _waiting_in(pod, granted) if count_of(one.request, resource) == size]


def _waiting_in(pod: Pod, granted: Set[tuple[str, str]]) -> Iterator[Waiting]:
    """Yield the containers of a pod that request GPUs and are not granted. Args: granted: pod UIDs and container names."""
    for spec in pod.containers:
        if (pod.uid, spec.name) in granted or not any(name.startswith(contract.RESOURCE_DOMAIN) for name in spec.limits):
            continue
        try:
            request, preferences = request_of_container(pod, spec.name)
        except RequestError:  # PreStart refuses the container with this error
            continue
        yield Waiting(pod, request, preferences)


def devices_for(waiting: Sequence[Waiting], node: Node, *, first_come: bool = False) -> tuple[str, ...]:
    """Return the device UUIDs of the container that an allocation is for: the assigned ones, or the choice of local placement.

    Empty if several waiting containers would get different devices: the allocation may be for any of them.

    Args: first_come: assume that the allocation is for the first one; kubelet admits pods in the order in which they came.
    """
    candidates = waiting[:1] if first_come else waiting
    if node.local_policy is None:
        return _assigned_devices(candidates[0]) if len(candidates) == 1 else ()
    places, unassigned = set[tuple[str, ...]](), set[tuple[ContainerRequest, Preferences]]()
    for one in candidates:
        if devices := _assigned_devices(one):
            places.add(devices)
        else:
            unassigned.add((replace(one.request, container="", init=False), one.preferences))
    # one seed for all requests: among equally good devices each then gets the advised one
    places |= {_local_devices(request, preferences, node, candidates[0].pod.uid) for request, preferences in unassigned}
    return places.pop() if len(places) == 1 else ()


def _local_devices(request: ContainerRequest, preferences: Preferences, node: Node, seed: str) -> tuple[str, ...]:
    if node.local_policy is None:
        return ()
    states = node.ledger.states(node.inventory, node.shares_per_gpu)
    choice = choose(states, request, preferences, node.local_policy, links=node.inventory.links, seed=seed)
    return tuple(_named_by_ids(share.device_uuid) for share in choice.shares) if isinstance(choice, Choice) else ()


def _assigned_devices(waiting: Waiting) -> tuple[str, ...]:
    try:
        assignment = codec.decode_assignment(waiting.pod.annotations.get(contract.ANNOTATION_ASSIGNMENT, ""), pod_uid=waiting.pod.uid)
    except ContractError:  # PreStart refuses the container with this error
        return ()
    assigned = assignment.of(waiting.request.container)
    return tuple(_named_by_ids(share.device_uuid) for share in assigned.shares) if assigned is not None else ()


def _named_by_ids(share_name: str) -> str:
    """Return the name that device IDs use for a share: for a place of a MIG instance, its GPU."""
    place = codec.decode_place(share_name)
    return share_name if place is None else place.device_uuid


def prefer_ids(
    available: Sequence[str], must_include: Sequence[str], size: int, wanted: Sequence[str], held: Set[str], *, packing: bool = False
) -> tuple[str, ...]:
    """Choose ``size`` IDs, or as many as there are.

    Args:
        wanted: device UUIDs in the order of preference: the devices of the waiting container, from ``devices_for``.
        held: IDs of existing grants. Kubelet offers such IDs only if it lost its checkpoint; their container may still run, so they
            come last.
        packing: the placement policy fills devices one after another, so that the fullest device is the best guess.
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
    # With fewer devices than requested, kubelet still needs the number of IDs.
    chosen += [device_id for device_id in pool if device_id not in chosen]
    return tuple(chosen[:size])


def _by_free_ids(pool: Iterable[str]) -> list[str]:
    return [uuid for uuid, _ in Counter(device_uuid_of(device_id) for device_id in pool).most_common()]


def _first_of(uuid: str, pool: Iterable[str]) -> str | None:
    return next((device_id for device_id in pool if device_uuid_of(device_id) == uuid), None)
