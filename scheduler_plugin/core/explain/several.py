# SPDX-License-Identifier: Apache-2.0
"""The smallest changes that would help a pod that columns cannot judge: one with several containers, or with MIG instances.

Placement's own search tries the changes, on the TRIED_NODES nodes that lack least, and with at most MAX_TRIES searches for each kind. So a
change is the smallest of its kind only if no more nodes than that can help. One container asks for less; the amounts that are tried are
those at which a device has no room left, with some of the other containers on it. Room to free is searched over all ways to place the
containers on a node's devices, MAX_LAYOUTS in all, but not for pods with init containers or MIG instances. The search is a value, because
it can take a second. ``one.victim_questions`` has the search for pods to end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from typing import Final, NamedTuple, TypeAlias

from aliquot.contract import units
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import ContainerRequest, Isolation, NumaMode, PodRequest, Policy, Preferences
from aliquot.placement.choose import choose_pod
from aliquot.placement.device import UNRESERVED_MIN_PERCENT, DeviceState
from aliquot.placement.fit import reject_reason
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.plan import FILTER_SEED, not_offered
from scheduler_plugin.core.fit.change import Change, Kind, Room, memory_text, room_text

TRIED_NODES: Final = 24
MAX_TRIES: Final = 1000
"""About half a second."""
MAX_LAYOUTS: Final = 20_000
PREFERENCES: Final = ("gpu_type", "gpu_type_not", "gpu_uuid", "gpu_uuid_not", "numa", "isolation", "memory_burst")
REPAIR: Final = 1000
"""The cost of healing a device; more than lifting any number of cordons."""
_MAX_OTHERS: Final = 4
"""Limit of other containers: amounts are tried with each subset of them on the device."""

_Smaller: TypeAlias = Callable[[ContainerRequest, int], ContainerRequest]


@dataclass(frozen=True, slots=True)
class TriedNode:
    """A node without the pod's own reservation."""

    gpu: GpuNode
    states: tuple[DeviceState, ...]


@dataclass(frozen=True, slots=True)
class SeveralQuestion:
    """The input of the search: a pod, and nodes on which it does not fit."""

    nodes: tuple[TriedNode, ...]
    request: PodRequest
    policy: Policy


def answer_several(question: SeveralQuestion) -> tuple[Change, ...]:
    """Return the smallest change of each kind. Pure, and slow."""
    trial = _Trial(question)
    found = (trial.less_memory(), trial.less_cores(), trial.fewer_gpus(), trial.free_room(), trial.lift_cordon())
    dropped = trial.dropped_preferences() if len(question.request.containers) > 1 else ()  # one.py has them for one container
    return (*(change for change in found if change is not None), *dropped)


class _Layout(NamedTuple):
    """What must become free on a node so that the containers fit on certain devices. Less to free compares as smaller."""

    memory_mib: int
    cores_percent: int
    shares: int
    device_count: int
    node_name: str
    rooms: tuple[Room, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Less:
    """One smaller request to try; sorted by the reduction, then by the name of the node."""

    reduction: int
    node_name: str
    position: int
    """Number of the container."""
    amount: int
    """Per vGPU, in MiB or percent, or the number of vGPUs or instances."""
    profile: str = ""
    """The MIG profile, for a smaller number of instances."""


class _Trial:
    def __init__(self, question: SeveralQuestion) -> None:
        self._question = question
        self._request = question.request
        self._nodes = {node.gpu.name: node for node in question.nodes}

    @property
    def _exclusive(self) -> bool:
        return self._request.preferences.isolation is Isolation.EXCLUSIVE

    def less_memory(self) -> Change | None:
        """Find the smallest reduction of one container's memory."""
        found = None if self._exclusive else self._first(self._memory_tries(), _with_memory)
        if found is None:
            return None
        container = self._request.containers[found.position]
        instead = memory_text(container)
        sentence = f"ask for at most {found.amount} MiB of memory per vGPU in container {container.container} instead of {instead}"
        return self._less(Kind.ASK_LESS_MEMORY, sentence, found)

    def less_cores(self) -> Change | None:
        """Find the smallest reduction of one container's cores."""
        found = None if self._exclusive else self._first(self._core_tries(), _with_cores)
        if found is None:
            return None
        container = self._request.containers[found.position]
        sentence = (
            f"ask for at most {found.amount} % of the cores per vGPU in container {container.container} instead of "
            f"{container.cores_percent_per_vgpu} %"
        )
        return self._less(Kind.ASK_LESS_CORES, sentence, found)

    def fewer_gpus(self) -> Change | None:
        """Find the smallest reduction of one container's vGPUs of the same size, or of its MIG instances of one profile."""
        found = self._first(self._count_tries(), _with_count)
        if found is None:
            return None
        container = self._request.containers[found.position]
        plural = "s" * (found.amount != 1)
        if found.profile:
            asked = dict(container.mig)[found.profile]
            instances = f"{found.amount} MIG instance{plural} {found.profile}"
            return self._less(Kind.ASK_FEWER_GPUS, f"ask for {instances} in container {container.container} instead of {asked}", found)
        sentence = f"ask for {found.amount} vGPU{plural} of this size in container {container.container} instead of {container.vgpus}"
        return self._less(Kind.ASK_FEWER_GPUS, sentence, found)

    def free_room(self) -> Change | None:
        """Find the devices on which the least memory, then cores, then shares must become free."""
        if self._exclusive or any(container.init or container.mig for container in self._request.containers):
            return None
        for layout in sorted(self._layouts(), key=lambda layout: layout[:-1])[:MAX_TRIES]:
            node, rooms = self._nodes[layout.node_name], {room.device_uuid: room for room in layout.rooms}
            freed = tuple(_freed(state, rooms.get(state.device.uuid)) for state in node.states)
            if self._fits(replace(node, states=freed), self._request):
                texts = "; ".join(map(room_text, layout.rooms))
                sentence = f"free {texts}, on node {layout.node_name}"
                return Change(Kind.FREE_ROOM, sentence, layout.node_name, rooms=layout.rooms)
        return None

    def lift_cordon(self) -> Change | None:
        """Find the fewest cordoned or unhealthy devices that would be enough; healing one counts more than any number of cordons."""
        for node, chosen, repairs in islice(self._liftings(), MAX_TRIES):
            lifted = tuple(replace(state, healthy=True, cordoned=False) if state in chosen else state for state in node.states)
            if self._fits(replace(node, states=lifted), self._request):
                name, devices = node.gpu.name, tuple(state.device.uuid for state in chosen)
                verb = "heal or uncordon" if repairs else "uncordon"
                return Change(Kind.LIFT_CORDON, f"{verb} {', '.join(devices)} on node {name}", name, devices=devices)
        return None

    def dropped_preferences(self) -> Iterator[Change]:
        """Yield each single preference without which the pod fits."""
        preferences, nothing = self._request.preferences, Preferences()
        for name in PREFERENCES:
            if getattr(preferences, name) == getattr(nothing, name):
                continue
            without = replace(self._request, preferences=replace(preferences, **{name: getattr(nothing, name)}))
            fitting = sorted(node.gpu.name for node in self._question.nodes if self._fits(node, without))
            if fitting:
                annotation = name.replace("_", "-")
                sentence = f"drop the annotation {annotation}: node {fitting[0]} would fit"
                yield Change(Kind.DROP_PREFERENCE, sentence, fitting[0], preference=annotation)

    # --- what is tried ---

    def _memory_tries(self) -> Iterator[_Less]:
        for position, container in self._vgpu_containers():
            others = [other for other in self._others(position) if not other.asks_whole_memory]
            for node, state in self._node_states():
                capacity_mib = state.capacity_bytes // units.MIB
                most = container.memory_mib_on(capacity_mib)
                taken_by_others = _sums([other.memory_mib_on(capacity_mib) for other in others])
                for amount in (state.free_memory_bytes // units.MIB - taken for taken in taken_by_others):
                    if 0 < amount < most:
                        yield _Less((most - amount) * container.vgpus, node.gpu.name, position, amount)

    def _core_tries(self) -> Iterator[_Less]:
        for position, container in self._vgpu_containers():
            asked = container.cores_percent_per_vgpu
            if asked is None:
                continue
            others = [other.cores_percent_per_vgpu for other in self._others(position)]
            taken_by_others = _sums([amount for amount in others if amount is not None])
            # With a share without reserved cores on the device, some cores must stay unreserved; both cases are tried.
            unreserved = (0, UNRESERVED_MIN_PERCENT)
            for node, state in self._node_states():
                free = units.WHOLE_GPU_PERCENT - state.used_cores_percent
                for amount in (free - taken - kept for taken, kept in product(taken_by_others, unreserved)):
                    if 0 < amount < asked:
                        yield _Less((asked - amount) * container.vgpus, node.gpu.name, position, amount)

    def _count_tries(self) -> Iterator[_Less]:
        for position, container in self._vgpu_containers():
            for node in self._question.nodes:
                for amount in range(1, container.vgpus):
                    yield _Less(container.vgpus - amount, node.gpu.name, position, amount)
        for position, container in enumerate(self._request.containers):
            for node, (profile, count) in product(self._question.nodes, container.mig):
                for amount in range(0 if len(container.mig) > 1 else 1, count):
                    yield _Less(count - amount, node.gpu.name, position, amount, profile)

    def _liftings(self) -> Iterator[tuple[TriedNode, tuple[DeviceState, ...], int]]:
        """Yield nodes with devices to return to use, the cheapest first, and how many of these are unhealthy."""
        most = sum(map(_device_count, self._request.containers))
        for (repairs, lifts), node in product(_repairs_and_lifts(most), self._question.nodes):
            unhealthy = [state for state in node.states if not state.healthy]
            cordoned = [state for state in node.states if state.healthy and state.cordoned]
            for healed, lifted in product(combinations(unhealthy, repairs), combinations(cordoned, lifts)):
                yield node, (*healed, *lifted), repairs

    def _layouts(self) -> Iterator[_Layout]:
        """Yield the ways to place the containers on devices that would work if enough room were free."""
        for node, chosen in islice(self._choices(), MAX_LAYOUTS):
            on_device: dict[str, list[ContainerRequest]] = {}
            for container, devices in zip(self._request.containers, chosen, strict=True):
                for state in devices:
                    on_device.setdefault(state.device.uuid, []).append(container)
            rooms = _rooms(node.states, on_device)
            if rooms is not None:
                yield _layout(node.gpu.name, rooms)

    def _choices(self) -> Iterator[tuple[TriedNode, Sequence[tuple[DeviceState, ...]]]]:
        """Yield devices of a node for each container, node by node."""
        for node in self._question.nodes:
            if not not_offered(node.gpu, self._request):
                ways = [self._device_sets(container, node.states) for container in self._request.containers]
                yield from ((node, chosen) for chosen in product(*ways))

    def _device_sets(self, container: ContainerRequest, states: Sequence[DeviceState]) -> list[tuple[DeviceState, ...]]:
        """Return the sets of devices that a container could have if no other container used them."""
        preferences = self._request.preferences
        usable = [state for state in states if reject_reason(_unused(state), container, preferences) is None]
        sets = combinations(usable, container.vgpus)
        if preferences.numa is not NumaMode.STRICT or container.vgpus == 1:
            return list(islice(sets, MAX_LAYOUTS))
        numa = (({state.device.numa_node for state in chosen}, chosen) for chosen in islice(sets, MAX_LAYOUTS))
        return [chosen for nodes, chosen in numa if len(nodes) == 1 and None not in nodes]

    def _vgpu_containers(self) -> Iterator[tuple[int, ContainerRequest]]:
        return ((position, container) for position, container in enumerate(self._request.containers) if not container.mig)

    def _node_states(self) -> Iterator[tuple[TriedNode, DeviceState]]:
        return ((node, state) for node in self._question.nodes for state in node.states)

    def _others(self, position: int) -> Sequence[ContainerRequest]:
        return [other for at, other in enumerate(self._request.containers) if at != position and not other.mig][:_MAX_OTHERS]

    # --- trying ---

    def _first(self, tries: Iterable[_Less], smaller: _Smaller) -> _Less | None:
        ordered = sorted(set(tries))[:MAX_TRIES]
        return next((less for less in ordered if self._fits(self._nodes[less.node_name], self._with(less, smaller))), None)

    def _with(self, less: _Less, smaller: _Smaller) -> PodRequest:
        containers = list(self._request.containers)
        whole = containers[less.position]
        fewer = _with_instances(whole, less.profile, less.amount) if less.profile else smaller(whole, less.amount)
        containers[less.position] = fewer
        return replace(self._request, containers=tuple(containers))

    def _fits(self, node: TriedNode, request: PodRequest) -> bool:
        if not_offered(node.gpu, request):
            return False
        choice = choose_pod(node.states, request, self._question.policy, links=node.gpu.links, seed=FILTER_SEED)
        return not isinstance(choice, Refusal)

    def _less(self, kind: Kind, sentence: str, found: _Less) -> Change:
        container = self._request.containers[found.position].container
        return Change(
            kind,
            f"{sentence}: it would fit on node {found.node_name}",
            found.node_name,
            found.amount,
            container=container,
            profile=found.profile,
        )


def _repairs_and_lifts(most: int) -> list[tuple[int, int]]:
    """Return the numbers of repairs and lifted cordons, 1 to ``most`` together, the cheapest first: without a repair, then with one."""
    return [(repairs, lifts) for repairs in range(most + 1) for lifts in range(most + 1 - repairs) if repairs + lifts]


def _rooms(states: Iterable[DeviceState], on_device: Mapping[str, Sequence[ContainerRequest]]) -> list[Room] | None:
    """Return what the devices lack for their containers; None if one of them could not carry its containers even when empty."""
    rooms: list[Room] = []
    for state in states:
        if state.device.uuid in on_device:
            room = _room(state, on_device[state.device.uuid])
            if room is None:
                return None
            rooms.append(room)
    return rooms


def _layout(node_name: str, rooms: Iterable[Room]) -> _Layout:
    lacking = tuple(room for room in rooms if room.memory_mib or room.cores_percent or room.shares)
    return _Layout(
        sum(room.memory_mib for room in lacking),
        sum(room.cores_percent for room in lacking),
        sum(room.shares for room in lacking),
        len(lacking),
        node_name,
        lacking,
    )


def _device_count(container: ContainerRequest) -> int:
    return container.vgpus or sum(count for _, count in container.mig)


def _memory_bytes(state: DeviceState, container: ContainerRequest) -> int:
    """Return the memory that one vGPU of a container takes of a device."""
    return units.mib_to_bytes(container.memory_mib_on(state.capacity_bytes // units.MIB))


def _room(state: DeviceState, containers: Sequence[ContainerRequest]) -> Room | None:
    """Return what a device lacks for one vGPU of each container; None if it could not carry them even when empty."""
    memory_bytes = sum(_memory_bytes(state, container) for container in containers)
    cores = sum(container.cores_percent_per_vgpu or 0 for container in containers)
    sharing = any(container.cores_percent is None for container in containers)
    if memory_bytes > state.capacity_bytes or len(containers) > state.max_shares:
        return None
    if cores + UNRESERVED_MIN_PERCENT * sharing > units.WHOLE_GPU_PERCENT:
        return None
    shares = max(0, len(containers) + state.used_shares - state.max_shares)
    if cores + UNRESERVED_MIN_PERCENT > units.WHOLE_GPU_PERCENT:
        # While a share without reserved cores is on the device, some cores must stay unreserved: all such shares must go.
        shares = max(shares, state.unreserved_shares)
    kept = UNRESERVED_MIN_PERCENT if sharing or state.unreserved_shares > shares else 0
    return Room(
        state.device.uuid,
        max(0, memory_bytes + state.used_memory_bytes - state.capacity_bytes) // units.MIB,
        max(0, cores + kept + state.used_cores_percent - units.WHOLE_GPU_PERCENT),
        shares,
    )


def _unused(state: DeviceState) -> DeviceState:
    return replace(state, used_memory_bytes=0, used_cores_percent=0, used_shares=0, unreserved_shares=0, used_instances=frozenset())


def _freed(state: DeviceState, room: Room | None) -> DeviceState:
    """Return a device after room was freed; shares without reserved cores are freed first."""
    if room is None:
        return state
    return replace(
        state,
        used_memory_bytes=state.used_memory_bytes - room.memory_mib * units.MIB,
        used_cores_percent=state.used_cores_percent - room.cores_percent,
        used_shares=state.used_shares - room.shares,
        unreserved_shares=max(0, state.unreserved_shares - room.shares),
    )


def _with_memory(container: ContainerRequest, mib: int) -> ContainerRequest:
    return replace(container, memory_bytes=mib * units.MIB * container.vgpus, memory_percent=None)


def _with_cores(container: ContainerRequest, percent: int) -> ContainerRequest:
    return replace(container, cores_percent=percent * container.vgpus)


def _with_count(container: ContainerRequest, vgpus: int) -> ContainerRequest:
    memory, cores = container.memory_bytes_per_vgpu, container.cores_percent_per_vgpu
    percent = container.memory_percent_per_vgpu
    return replace(
        container,
        vgpus=vgpus,
        memory_bytes=None if memory is None else memory * vgpus,
        memory_percent=None if percent is None else percent * vgpus,
        cores_percent=None if cores is None else cores * vgpus,
    )


def _with_instances(container: ContainerRequest, profile: str, count: int) -> ContainerRequest:
    mig = tuple((name, count if name == profile else asked) for name, asked in container.mig)
    return replace(container, mig=tuple((name, asked) for name, asked in mig if asked))


def _sums(amounts: Sequence[int]) -> set[int]:
    return {sum(chosen) for size in range(len(amounts) + 1) for chosen in combinations(amounts, size)}
