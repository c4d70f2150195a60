"""Which devices of one node a container gets, and those of a whole pod.

The choice is a pure function of its arguments: equal inputs give equal devices, and ties are broken by a hash of the seed, so
that a decision can be replayed. What makes one set of devices better than another is in search.py; what a device costs by
each policy in score.py.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from placement import mig, score
from placement.demand import GENERIC, Demand
from placement.device import AccountingError, DeviceState
from placement.fit import Reject, reject_reason, share_on
from placement.refusal import Refusal, refuse
from placement.search import Candidate, Search
from placement.together import Layout, lay_out
from placement.topology import LinkTable
from proto import units
from proto.model import ContainerAssignment, ContainerRequest, DeviceShare, Link, PodRequest, Policy, Preferences


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices of one container, in the order of their minor numbers, which is the order CUDA numbers them in."""

    container: str
    shares: tuple[DeviceShare, ...]

    def assignment(self) -> ContainerAssignment:
        """Return the choice as the part of an assignment it becomes."""
        return ContainerAssignment(self.container, self.shares)


@dataclass(frozen=True, slots=True)
class PodChoice:
    """The devices of every requesting container of a pod, in spec order."""

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
             preferred_uuids: devices, or MIG instances, to take when they fit.
             familiar_uuids: devices to take among those that are equally good. seed: breaks the ties left; the pod's UID serves.
             demand: what else is likely to come, for the policy frag.
    Returns: distinct devices whose states admit the shares, or why there are none.
    """
    policy = preferences.policy or policy
    ordered = sorted(states, key=lambda state: (state.device.uuid not in familiar_uuids, _tie_break(seed, state.device.uuid)))
    fitting = [state for state in ordered if reject_reason(state, request, preferences) is None]
    if request.mig:
        shares = _choose_instances(fitting, request, policy, preferred_uuids)
        return refuse(states, request, preferences) if shares is None else Choice(request.container, shares)
    if len(fitting) < request.vgpus:
        return refuse(states, request, preferences)
    shares_by_uuid = {state.device.uuid: share_on(state.device, request, preferences) for state in fitting}
    candidates = [_candidate(state, shares_by_uuid[state.device.uuid], policy, preferred_uuids, demand) for state in fitting]
    open_others = [state.device.uuid for state in states if state.empty and state.shareable and state.device.uuid not in shares_by_uuid]
    search = Search(candidates, lambda: LinkTable.of(links, (state.device for state in states)), open_others)
    chosen = search.best(request.vgpus, preferences.numa)
    if chosen is None:
        return refuse(states, request, preferences, Reject.NUMA)
    chosen_uuids = {candidate.device_uuid for candidate in chosen}
    in_order = sorted((state.device for state in fitting if state.device.uuid in chosen_uuids), key=lambda device: device.minor)
    return Choice(request.container, tuple(shares_by_uuid[device.uuid] for device in in_order))


def choose_pod(
    states: Sequence[DeviceState],
    pod: PodRequest,
    policy: Policy,
    *,
    links: Iterable[Link] = (),
    seed: str = "",
    demand: Demand = GENERIC,
) -> PodChoice | Refusal:
    """Choose devices for all containers of a pod, each counting what the others take.

    Containers that ask for more are placed first, so that a small one does not take the only device a large one fits on. Where what
    the policy likes best for one leaves no room for another, the first layout is taken that has room for all (see together).
    Containers with MIG instances are not gone back over: of a pod with several profiles a refusal can be wrong.

    Ordinary init containers end before the app containers start. They count beside the sidecars declared before them only, and
    prefer the devices of the others, because the kubelet hands the same IDs on.
    """
    placing = _Placing(tuple(states), pod, policy, tuple(links), seed, demand)
    lasting = sorted((request for request in pod.containers if not request.init), key=_demand, reverse=True)
    chosen = placing.in_turn(lasting)
    if isinstance(chosen, Refusal) and len(pod.containers) > 1 and placing.may_go_back:
        with_init = len(lasting) < len(pod.containers)
        layout, sets_tried = lay_out(states, lasting, pod.preferences, placing.has_room_before if with_init else None)
        if layout is None:
            return replace(chosen, sets_tried=sets_tried)
        chosen = placing.before({name: Choice(name, shares) for name, shares in layout.items()})
    return chosen if isinstance(chosen, Refusal) else PodChoice(tuple(chosen[request.container] for request in pod.containers))


@dataclass(frozen=True, slots=True)
class _Placing:
    """One question about a pod."""

    states: tuple[DeviceState, ...]
    pod: PodRequest
    policy: Policy
    links: tuple[Link, ...]
    seed: str
    demand: Demand

    def in_turn(self, lasting: Iterable[ContainerRequest]) -> dict[str, Choice] | Refusal:
        """Place one container after the other, each where it is best for it alone, and then the init containers."""
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
        """Place the init containers before the others, which are placed."""
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
        """Whether every init container finds devices before the others, when those are laid out so."""
        return not isinstance(self.before({name: Choice(name, shares) for name, shares in layout.items()}), Refusal)

    @property
    def may_go_back(self) -> bool:
        """Whether another layout of the containers that last may help: no init container lacks room by itself."""
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
    """Promise shares on the devices that carry them. Raises AccountingError when one has no room, or is not there."""
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
    """Choose instances of each profile, those of the largest first, so that small ones do not take the only room for them."""
    size = {profile: size for state in fitting for profile, size in mig.sizes(state.device.mig_instances).items()}
    shares: dict[str, list[DeviceShare]] = {}
    states = list(fitting)
    for profile, count in sorted(request.mig, key=lambda asked: -size.get(asked[0], 0)):
        instances = mig.choose_instances(states, profile, count, spread=policy is Policy.SPREAD, preferred_uuids=preferred_uuids)
        if instances is None:
            return None
        shares[profile] = [DeviceShare(instance.uuid, units.floor_to_mib(instance.memory_bytes)) for instance in instances]
        states = with_shares(states, shares[profile])
    return tuple(share for profile, _ in request.mig for share in shares[profile])


def _counting(chosen: Mapping[str, Choice], refusal: Refusal) -> Refusal:
    """Say in a refusal that the pod's own containers are among those that use the devices."""
    if not chosen:
        return refusal
    note = f" What this pod's {', '.join(chosen)} would get counts as used."
    return replace(refusal, sentence=refusal.sentence + note)


def _demand(request: ContainerRequest) -> tuple[bool, int, int, int]:
    """Rank a request by how hard it is to place."""
    whole = request.vgpus > 0 and request.memory_bytes is None
    return whole, request.memory_bytes_per_vgpu or 0, request.cores_percent_per_vgpu or 0, request.vgpus
