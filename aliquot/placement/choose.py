# SPDX-License-Identifier: Apache-2.0
"""Chooses the devices of one node for a container, or for all containers of a pod.

Invariant: the choice is a pure function of its arguments. Equal inputs give equal devices, and a hash of the seed breaks ties, so that a
decision can be replayed. search.py says which set of devices is better; score.py what a device costs by each policy.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aliquot.contract import units
from aliquot.contract.model import ContainerAssignment, ContainerRequest, DeviceShare, Link, PodRequest, Policy, Preferences
from aliquot.placement import mig, score
from aliquot.placement.demand import GENERIC, Demand
from aliquot.placement.device import AccountingError, DeviceState
from aliquot.placement.fit import Reject, reject_reason, share_on
from aliquot.placement.partition import choose_instances
from aliquot.placement.refusal import Refusal, refuse
from aliquot.placement.search import Candidate, Search
from aliquot.placement.together import Layout, lay_out
from aliquot.placement.topology import LinkTable


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices of one container, in the order of their minor numbers, which is the order CUDA numbers them in."""

    container: str
    shares: tuple[DeviceShare, ...]

    def assignment(self) -> ContainerAssignment:
        """Return the choice as a part of an assignment."""
        return ContainerAssignment(self.container, self.shares)


@dataclass(frozen=True, slots=True)
class PodChoice:
    """The devices of each container of a pod that asks for GPUs, in spec order."""

    containers: tuple[Choice, ...]


def choose(
    states: Sequence[DeviceState],
    request: ContainerRequest,
    preferences: Preferences,
    policy: Policy,
    *,
    preferred_uuids: Collection[str] = (),
    familiar_uuids: Collection[str] = (),
    links: Iterable[Link] = (),
    seed: str = "",
    demand: Demand = GENERIC,
) -> Choice | Refusal:
    """Choose devices for one container.

    Args:    states: the node's devices, each once. policy: used unless the preferences name one.
             preferred_uuids: devices, or MIG instances, to take if they fit.
             familiar_uuids: devices to take among equally good ones. seed: breaks the remaining ties, such as the pod's UID.
             demand: the requests that are likely to follow, for the policy frag.
    Returns: distinct devices that have room for the shares, or the reason why there are not enough.
    """
    policy = preferences.policy or policy
    # The order decides between equally good devices: familiar ones first, then by the hash.
    ordered = sorted(states, key=lambda state: (state.device.uuid not in familiar_uuids, _tie_break(seed, state.device.uuid)))
    fitting = [state for state in ordered if reject_reason(state, request, preferences) is None]
    if request.mig:
        instances = _choose_instances(fitting, request, policy, preferred_uuids)
        return refuse(states, request, preferences) if instances is None else Choice(request.container, instances)
    if len(fitting) < request.vgpus:
        return refuse(states, request, preferences)
    shares = {state.device.uuid: share_on(state.device, request, preferences) for state in fitting}
    candidates = [_candidate(state, shares[state.device.uuid], policy, preferred_uuids, demand) for state in fitting]
    devices = [state.device for state in states]
    chosen = Search(candidates, lambda: LinkTable.of(links, devices), _open_others(states, shares)).best(request.vgpus, preferences.numa)
    if chosen is None:
        return refuse(states, request, preferences, Reject.NUMA)
    return Choice(request.container, _in_order(chosen, fitting, shares))


def _open_others(states: Iterable[DeviceState], candidates: Collection[str]) -> list[str]:
    """Return the empty, shareable devices that are not candidates: taking one end of a link to them makes it useless to later pods."""
    return [state.device.uuid for state in states if state.empty and state.shareable and state.device.uuid not in candidates]


def _in_order(chosen: Iterable[Candidate], fitting: Iterable[DeviceState], shares: Mapping[str, DeviceShare]) -> tuple[DeviceShare, ...]:
    """Return the shares of the chosen devices in the order of their minor numbers."""
    uuids = {candidate.device_uuid for candidate in chosen}
    devices = sorted((state.device for state in fitting if state.device.uuid in uuids), key=lambda device: device.minor)
    return tuple(shares[device.uuid] for device in devices)


def choose_pod(
    states: Sequence[DeviceState],
    pod: PodRequest,
    policy: Policy,
    *,
    links: Iterable[Link] = (),
    seed: str = "",
    demand: Demand = GENERIC,
) -> PodChoice | Refusal:
    """Choose devices for all containers of a pod; each container counts what the others take.

    Containers that ask for more are placed first, so that a small one does not take the only device on which a large one fits. If the best
    devices for one container leave no room for another, the first layout with room for all is taken (see together.py). That search skips
    containers with MIG instances, so the refusal of a pod with several profiles can be wrong.

    Ordinary init containers end before the app containers start. They count together with the sidecars declared before them only. They
    prefer the devices of the other containers, because kubelet passes the same IDs on.
    """
    placing = _Placing(tuple(states), pod, policy, tuple(links), seed, demand)
    lasting = sorted((request for request in pod.containers if not request.init), key=_demand, reverse=True)
    # Greedy first: it is fast, and usually finds the best devices for each container.
    chosen = placing.one_by_one(lasting)
    if isinstance(chosen, Refusal) and len(pod.containers) > 1 and placing.may_go_back:
        with_init = len(lasting) < len(pod.containers)
        layout, sets_tried = lay_out(states, lasting, pod.preferences, placing.has_room_before if with_init else None)
        if layout is None:
            return replace(chosen, sets_tried=sets_tried)
        chosen = placing.before({name: Choice(name, shares) for name, shares in layout.items()})
    return chosen if isinstance(chosen, Refusal) else PodChoice(tuple(chosen[request.container] for request in pod.containers))


@dataclass(frozen=True, slots=True)
class _Placing:
    """The inputs of one call of ``choose_pod``."""

    states: tuple[DeviceState, ...]
    pod: PodRequest
    policy: Policy
    links: tuple[Link, ...]
    seed: str
    demand: Demand

    def one_by_one(self, lasting: Iterable[ContainerRequest]) -> dict[str, Choice] | Refusal:
        """Place one container after the other, each on the best devices for it alone, and then the init containers."""
        chosen: dict[str, Choice] = {}
        left: Sequence[DeviceState] = self.states
        for request in lasting:
            choice = self._choose(left, request)
            if isinstance(choice, Refusal):
                return _counting(chosen, choice)
            chosen[request.container] = choice
            left = with_shares(left, choice.shares)
        return self.before(chosen)

    def before(self, chosen: Mapping[str, Choice]) -> dict[str, Choice] | Refusal:
        """Place the init containers, given the devices of the containers that run after them."""
        theirs = {share.device_uuid for choice in chosen.values() for share in choice.shares}
        placed, left = dict(chosen), list(self.states)
        for request in self.pod.containers:
            if not request.init:
                left = with_shares(left, chosen[request.container].shares)
                continue
            choice = self._choose(left, request, theirs)
            if isinstance(choice, Refusal):
                return choice
            placed[request.container] = choice
        return placed

    def has_room_before(self, layout: Layout) -> bool:
        """Whether each init container finds devices if the other containers have this layout."""
        return not isinstance(self.before({name: Choice(name, shares) for name, shares in layout.items()}), Refusal)

    @property
    def may_go_back(self) -> bool:
        """Whether another layout may help: the pod has no MIG instances, and no init container lacks room by itself."""
        return not any(
            request.mig or (request.init and isinstance(self._choose(self.states, request), Refusal)) for request in self.pod.containers
        )

    def _choose(self, states: Sequence[DeviceState], request: ContainerRequest, preferred_uuids: Collection[str] = ()) -> Choice | Refusal:
        return choose(
            states,
            request,
            self.pod.preferences,
            self.policy,
            preferred_uuids=preferred_uuids,
            links=self.links,
            seed=self.seed,
            demand=self.demand,
        )


def with_shares(states: Iterable[DeviceState], shares: Iterable[DeviceShare]) -> list[DeviceState]:
    """Promise shares on their devices. Raises AccountingError if a device has no room, or does not exist."""
    after = list(states)
    for share in shares:
        position = next((i for i, state in enumerate(after) if state.carries(share)), None)
        if position is None:
            raise AccountingError(f"expected a device that carries {share}, found {[state.device.uuid for state in after]}")
        after[position] = after[position].with_share(share)
    return after


def _tie_break(seed: str, device_uuid: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{device_uuid}".encode(errors="surrogatepass"), digest_size=16).digest()


def _candidate(state: DeviceState, share: DeviceShare, policy: Policy, preferred_uuids: Collection[str], demand: Demand) -> Candidate:
    after = state.with_share(share)
    return Candidate(
        device_uuid=state.device.uuid,
        numa_node=state.device.numa_node,
        preferred=state.device.uuid in preferred_uuids,
        cost=score.cost_of_change(policy, state, after, demand),
        empty=state.empty,
        after=after,
    )


def _choose_instances(
    fitting: Sequence[DeviceState], request: ContainerRequest, policy: Policy, preferred_uuids: Collection[str]
) -> tuple[DeviceShare, ...] | None:
    """Choose instances of each profile, the largest profile first, so that small instances do not take the only room for it."""
    size = {profile: size for state in fitting for profile, size in mig.sizes(state.device.mig_instances).items()}
    shares: dict[str, list[DeviceShare]] = {}
    states = list(fitting)
    for profile, count in sorted(request.mig, key=lambda asked: -size.get(asked[0], 0)):
        instances = choose_instances(states, profile, count, policy, preferred_uuids=preferred_uuids)
        if instances is None:
            return None
        shares[profile] = [DeviceShare(instance.uuid, units.floor_to_mib(instance.memory_bytes)) for instance in instances]
        states = with_shares(states, shares[profile])
    return tuple(share for profile, _ in request.mig for share in shares[profile])


def _counting(chosen: Mapping[str, Choice], refusal: Refusal) -> Refusal:
    """Add to a refusal that the pod's own containers count as users of the devices."""
    if not chosen:
        return refusal
    note = f" The devices of this pod's other containers ({', '.join(chosen)}) count as used."
    return replace(refusal, sentence=refusal.sentence + note)


def _demand(request: ContainerRequest) -> tuple[bool, int, int, int, int]:
    """Rank a request by how hard it is to place."""
    whole = request.vgpus > 0 and request.asks_whole_memory
    memory = request.memory_percent_per_vgpu or 0, request.memory_bytes_per_vgpu or 0
    return whole, *memory, request.cores_percent_per_vgpu or 0, request.vgpus
