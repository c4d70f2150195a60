# SPDX-License-Identifier: Apache-2.0
"""Each proposed change makes the pod fit, and no smaller one of its kind does: compared with trying everything on small clusters."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from aliquot import contract
from aliquot.contract import units
from aliquot.contract.gpunode import GpuDevice
from aliquot.contract.model import ContainerRequest, DeviceShare, Isolation, NumaMode, PodRequest, Policy, Preferences
from aliquot.placement.choose import choose_pod
from aliquot.placement.device import DeviceState
from aliquot.placement.fit import reject_reason, share_on
from aliquot.placement.refusal import Refusal
from aliquot_cli.explain.show import why_lines
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import OF_REJECT, NodeReason
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.explain.one import (
    ReasonCount,
    count_reasons,
    fewest_pods,
    several_question,
    smallest_changes,
    victim_questions,
)
from scheduler_plugin.core.explain.several import TRIED_NODES, answer_several
from scheduler_plugin.core.explain.why import completed, explain_pod
from scheduler_plugin.core.fit.change import Change, Kind
from scheduler_plugin.core.fit.kube_filters import Scope
from scheduler_plugin.core.fit.shapes import PodShape, Shapes
from scheduler_plugin.core.score.cost import DEFAULT_WEIGHTS, HostDemand
from tests.unit.scheduler_plugin.builders import make_device, make_node, make_pod, make_share, request_of

MOST_MIB = 30
NOTHING = Preferences()
MODELS = st.sampled_from(["A100", "H100"])


@st.composite
def clusters(draw: st.DrawFn) -> ClusterState:
    state = ClusterState()
    for name in ("n1", "n2")[: draw(st.integers(1, 2))]:
        devices = [
            make_device(
                name, minor, mib=draw(st.sampled_from([20, MOST_MIB])), model=draw(st.sampled_from(["A100", "H100"])), numa=minor // 2
            )
            for minor in range(draw(st.integers(1, 4)))
        ]
        node = make_node(name, devices, shares_per_gpu=draw(st.integers(2, 3)))
        entries = tuple(GpuDevice(entry.device, draw(st.sampled_from(["", "", "", "", "XID 79"]))) for entry in node.devices)
        cordoned = tuple(entry.device.uuid for entry in entries if draw(st.integers(0, 5)) == 0)
        offered = (Isolation.SHIM, Isolation.EXCLUSIVE) if draw(st.booleans()) else (Isolation.SHIM,)
        state.set_gpu_node(replace(node, devices=entries, cordoned_devices=cordoned, isolation=offered))
        for number in range(draw(st.integers(0, 5))):
            on = draw(st.lists(st.integers(0, len(devices) - 1), min_size=1, max_size=2, unique=True))
            mib, cores = draw(st.sampled_from([5, 10, 15])), draw(st.none() | st.sampled_from([30, 60]))
            shares = {"main": [make_share(name, minor, mib, cores) for minor in on]}
            state.set_pod(make_pod(f"{name}-{number}", node=name, shares=shares, vgpu="1", priority=draw(st.integers(0, 2))))
    return state


@st.composite
def shapes(draw: st.DrawFn) -> PodShape:
    vgpus = draw(st.sampled_from([1, 1, 2, 3]))
    mib, cores = draw(st.none() | st.integers(5, MOST_MIB)), draw(st.none() | st.sampled_from([20, 50, 100]))
    request = ContainerRequest("c0", vgpus, None if mib is None else mib * vgpus * units.MIB, None if cores is None else cores * vgpus)
    preferences = Preferences(
        gpu_type=draw(st.sampled_from([(), (), ("a100",)])),
        gpu_uuid_not=draw(st.sampled_from([(), (), ("GPU-n1-0",)])),
        numa=draw(st.sampled_from([None, None, NumaMode.STRICT])),
        isolation=draw(st.sampled_from([None, None, None, Isolation.EXCLUSIVE])),
    )
    return PodShape(PodRequest((request,), preferences), Policy.FRAG, HostDemand())


def counted(state: ClusterState, shape: PodShape) -> tuple[int, tuple[ReasonCount, ...]]:
    return count_reasons(state, Shapes(state, DEFAULT_WEIGHTS).verdict(shape), shape.demand, Scope.of(state))


def changes_for(state: ClusterState, shape: PodShape) -> tuple[Change, ...]:
    return smallest_changes(state, Shapes(state, DEFAULT_WEIGHTS), shape, Scope.of(state))


def ended_for(state: ClusterState, shape: PodShape) -> Change | None:
    return fewest_pods(victim_questions(state, Shapes(state, DEFAULT_WEIGHTS), shape, Scope.of(state)))


def fits(state: ClusterState, request: PodRequest) -> bool:
    return any(fits_on(state, node.name, state.device_states(node.name), request) for node in state.gpu_nodes())


def fits_on(state: ClusterState, node: str, devices: tuple[DeviceState, ...], request: PodRequest) -> bool:
    isolation, gpu = request.preferences.isolation, state.gpu_node(node)
    if isolation is not None and isolation not in gpu.isolation:
        return False
    return not isinstance(choose_pod(devices, request, Policy.FRAG), Refusal)


def with_container(request: PodRequest, **fields) -> PodRequest:
    return replace(request, containers=(replace(request.containers[0], **fields),))


def device_sets(state: ClusterState, request: PodRequest) -> Iterator[tuple[str, tuple[DeviceState, ...]]]:
    """Yield all sets of devices that the preferences about whole nodes allow."""
    isolation, vgpus = request.preferences.isolation, request.containers[0].vgpus
    for node in state.gpu_nodes():
        if isolation is not None and isolation not in node.isolation:
            continue
        for chosen in combinations(state.device_states(node.name), vgpus):
            strict = request.preferences.numa is NumaMode.STRICT and vgpus > 1
            if not strict or len({device.device.numa_node for device in chosen}) == 1:
                yield node.name, chosen


def most(state: ClusterState, request: PodRequest, kind: Kind) -> int | None:
    """Try all smaller amounts, from the largest down."""
    container = request.containers[0]
    vgpus, mib, cores = container.vgpus, container.memory_bytes_per_vgpu, container.cores_percent_per_vgpu
    if kind is Kind.ASK_LESS_MEMORY:
        tries = {m: with_container(request, memory_bytes=m * vgpus * units.MIB) for m in range(MOST_MIB, 0, -1)}
    elif kind is Kind.ASK_LESS_CORES:
        tries = {} if cores is None else {c: with_container(request, cores_percent=c * vgpus) for c in range(100, 0, -1)}
    else:
        tries = {}
        for n in range(vgpus - 1, 0, -1):
            tries[n] = with_container(request, vgpus=n, memory_bytes=mib and mib * n, cores_percent=cores and cores * n)
    if request.preferences.isolation is Isolation.EXCLUSIVE and kind is not Kind.ASK_FEWER_GPUS:
        return None  # an exclusive pod takes all of a device, whatever it asks for
    return next((amount for amount, smaller in tries.items() if fits(state, smaller)), None)


def least_room(state: ClusterState, request: PodRequest) -> tuple[int, int, int, int] | None:
    """Try all sets of devices, and on each device all amounts."""
    container, preferences = request.containers[0], request.preferences
    if preferences.isolation is Isolation.EXCLUSIVE:
        return None

    def after(device: DeviceState, mib: int, cores: int, shares: int) -> DeviceState:
        return replace(
            device,
            used_memory_bytes=device.used_memory_bytes - mib * units.MIB,
            used_cores_percent=device.used_cores_percent - cores,
            used_shares=device.used_shares - shares,
            unreserved_shares=max(0, device.unreserved_shares - shares),  # those go first
        )

    def enough(device: DeviceState, mib: int, cores: int, shares: int) -> bool:
        return reject_reason(after(device, mib, cores, shares), container, preferences) is None

    def least(device: DeviceState) -> tuple[int, int, int] | None:
        most_mib, most_cores = device.used_memory_bytes // units.MIB, device.used_cores_percent
        for shares in range(device.used_shares + 1):
            for mib in range(most_mib + 1):
                if enough(device, mib, most_cores, shares):
                    return mib, next(cores for cores in range(most_cores + 1) if enough(device, mib, cores, shares)), shares
        return None

    best: Any = None
    for _, chosen in device_sets(state, request):
        amounts = [least(device) for device in chosen]
        if None not in amounts:
            total = (*map(sum, zip(*amounts, strict=True)), sum(any(amount) for amount in amounts))
            best = total if best is None or total < best else best
    return best


def least_lifted(state: ClusterState, request: PodRequest) -> tuple[int, int] | None:
    container, preferences = request.containers[0], request.preferences
    best = None
    for _, chosen in device_sets(state, request):
        whole = [replace(device, healthy=True, cordoned=False) for device in chosen]
        if all(reject_reason(device, container, preferences) is None for device in whole):
            cost = (sum(not device.healthy for device in chosen), sum(device.healthy and device.cordoned for device in chosen))
            best = cost if best is None or cost < best else best
    return best


def fewest_ended(state: ClusterState, request: PodRequest) -> tuple[int, int, int] | None:
    """Try all sets of pods. The fewest pods are best, then a most important pod that matters least, then the least in sum."""
    best = None
    for node in [node.name for node in state.gpu_nodes()]:
        pods = list(state.pods_on(node))
        for chosen in chain.from_iterable(combinations(pods, size) for size in range(len(pods) + 1)):
            rank = importance(chosen)
            with state.without_all([pod.uid for pod in chosen]):
                if fits_on(state, node, state.device_states(node), request):
                    best = rank if best is None or rank < best else best
    return best


def importance(ended: Iterable[PodFacts]) -> tuple[int, int, int]:
    priorities = [pod.priority for pod in ended]
    return len(priorities), max(priorities, default=0), sum(priorities)


@given(clusters(), shapes())
def test_the_proposed_changes_are_the_smallest(state, shape):
    request = shape.request
    fitting, _ = counted(state, shape)
    assert bool(fitting) == fits(state, request)
    if fitting:
        return
    changes = {change.kind: change for change in changes_for(state, shape) if change.kind is not Kind.DROP_PREFERENCE}
    event(", ".join(sorted(changes)) or "nothing helps")
    for kind in (Kind.ASK_LESS_MEMORY, Kind.ASK_LESS_CORES, Kind.ASK_FEWER_GPUS):
        assert (changes[kind].amount if kind in changes else None) == most(state, request, kind), kind
    assert _room(changes.get(Kind.FREE_ROOM)) == least_room(state, request)
    assert _lifted(state, changes.get(Kind.LIFT_CORDON)) == least_lifted(state, request)
    ended = ended_for(state, shape)
    event("pods end" if ended else "no pods end")
    assert (None if ended is None else importance(state.pods[uid] for uid in ended.pods)) == fewest_ended(state, request)


def _room(change: Change | None) -> tuple[int, int, int, int] | None:
    if change is None:
        return None
    rooms = change.rooms
    return sum(r.memory_mib for r in rooms), sum(r.cores_percent for r in rooms), sum(r.shares for r in rooms), len(rooms)


def _lifted(state: ClusterState, change: Change | None) -> tuple[int, int] | None:
    if change is None:
        return None
    devices = {device.device.uuid: device for device in state.device_states(change.node)}
    sick = sum(not devices[uuid].healthy for uuid in change.devices)
    return sick, len(change.devices) - sick


@given(clusters(), shapes())
def test_a_preference_is_named_exactly_when_the_pod_fits_without_it(state, shape):
    if fits(state, shape.request):
        return
    named = {change.preference.replace("-", "_") for change in changes_for(state, shape) if change.preference}
    preferences = shape.request.preferences
    for name in ("gpu_type", "gpu_type_not", "gpu_uuid", "gpu_uuid_not", "numa", "isolation"):
        without = replace(shape.request, preferences=replace(preferences, **{name: getattr(NOTHING, name)}))
        helps = getattr(preferences, name) != getattr(NOTHING, name) and fits(state, without)
        assert (name in named) == helps, name


def test_reasons_are_counted_with_the_most_frequent_first():
    state = ClusterState()
    for name in ("a", "b", "c"):
        state.set_gpu_node(make_node(name, 1, cordoned=name == "c"))
        state.set_pod(make_pod(f"p-{name}", node=name, shares={"main": [make_share(name, 0, 900)]}, vgpu="1"))
    shape = PodShape(PodRequest((ContainerRequest("c0", 1, 500 * units.MIB),)), Policy.FRAG, HostDemand())
    fitting, counts = counted(state, shape)
    assert fitting == 0
    assert [(count.reason, count.nodes, count.examples) for count in counts] == [
        ("not enough free memory on one GPU", 2, ("a", "b")),
        ("GPUs cordoned or unhealthy", 1, ("c",)),
    ]


def test_changes_are_described_in_words():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 2))
    for minor in (0, 1):
        state.set_pod(make_pod(f"p{minor}", node="n1", shares={"main": [make_share("n1", minor, 700 + minor, 30)]}, vgpu="1"))
    shape = PodShape(PodRequest((ContainerRequest("c0", 1, 500 * units.MIB, 80),)), Policy.FRAG, HostDemand())
    (change,) = changes_for(state, shape)
    assert change.sentence == "free 200 MiB and 10 % of the cores on GPU-n1-0, on node n1"
    ended = ended_for(state, shape)
    assert ended.sentence == "end team/pod-p0 on node n1"


def test_whole_gpus_above_requested_memory_lack_memory_whichever_pod_ends():
    state = ClusterState()
    for name, mib in (("a", 1000), ("b", 2000), ("full", 1000)):
        state.set_gpu_node(make_node(name, [make_device(name, 0, mib=mib)]))
    state.set_pod(make_pod("held", node="full", shares={"main": [make_share("full", 0)]}, vgpu="1"))
    wishes = Preferences(isolation=Isolation.EXCLUSIVE)

    def shape(mib: int) -> PodShape:
        return PodShape(PodRequest((ContainerRequest("c0", 1, mib * units.MIB),), wishes), Policy.FRAG, HostDemand())

    fitting, counts = counted(state, shape(1))
    assert (fitting, [(count.reason, count.nodes) for count in counts]) == (0, [("not enough free memory on one GPU", 3)])
    assert [change.sentence for change in changes_for(state, shape(1))] == ["drop the annotation isolation: 3 nodes would fit"]
    assert ended_for(state, shape(1)) is None
    fitting, counts = counted(state, shape(1000))
    assert (fitting, {count.reason for count in counts}) == (1, {"not enough free memory on one GPU", "GPUs already in use"})
    assert counted(state, shape(2000))[0] == 2


@pytest.mark.parametrize(("cordoned", "reason", "verb"), [(("GPU-n1-0",), "", "uncordon"), ((), "XID 79", "heal or uncordon")])
def test_unused_whole_gpu_out_of_service_is_reported_as_helpful(cordoned, reason, verb):
    state = ClusterState()
    node = make_node("n1", 2, cordoned_devices=cordoned)
    state.set_gpu_node(replace(node, devices=(GpuDevice(node.devices[0].device, reason), node.devices[1])))
    state.set_pod(make_pod("held", node="n1", shares={"main": [make_share("n1", 1)]}, vgpu="1"))
    shape = PodShape(PodRequest((ContainerRequest("c0", 1),), Preferences(isolation=Isolation.EXCLUSIVE)), Policy.FRAG, HostDemand())
    sentences = [change.sentence for change in changes_for(state, shape)]
    assert f"{verb} GPU-n1-0 on node n1" in sentences


def test_a_burst_that_no_node_allows_is_named_as_what_to_drop():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", memory_oversubscription=1.5))
    pod = make_pod(vgpu="1", vgpu_memory="400", annotations={contract.ANNOTATION_MEMORY_BURST: "2"})
    shape = PodShape.of(request_of(pod), Policy.FRAG, HostDemand())
    assert [count.reason for count in counted(state, shape)[1]] == [NodeReason.ISOLATION.sentence]
    (change,) = changes_for(state, shape)
    assert (change.kind, change.preference) == (Kind.DROP_PREFERENCE, "memory-burst")


# --- several containers ---------------------------------------------------------------------------------------------


@st.composite
def requests_of_several(draw: st.DrawFn) -> PodRequest:
    containers = []
    for name in ("left", "right", "early")[: draw(st.integers(2, 3))]:
        vgpus = draw(st.sampled_from([1, 1, 2]))
        mib, cores = draw(st.none() | st.integers(5, MOST_MIB)), draw(st.none() | st.sampled_from([20, 50, 80]))
        memory = None if mib is None else mib * vgpus * units.MIB
        containers.append(ContainerRequest(name, vgpus, memory, None if cores is None else cores * vgpus, init=name == "early"))
    preferences = Preferences(
        gpu_type=draw(st.sampled_from([(), (), ("a100",)])), isolation=draw(st.sampled_from([None, None, Isolation.EXCLUSIVE]))
    )
    return PodRequest(tuple(containers), preferences)


def smaller(request: PodRequest, kind: Kind, position: int) -> Iterator[tuple[int, PodRequest]]:
    """Yield everything less of one container, with the reduction."""
    container = request.containers[position]
    vgpus, mib, cores = container.vgpus, container.memory_bytes_per_vgpu, container.cores_percent_per_vgpu

    def changed(**fields) -> PodRequest:
        return replace(
            request, containers=tuple(replace(one, **fields) if at == position else one for at, one in enumerate(request.containers))
        )

    if kind is Kind.ASK_LESS_MEMORY and mib is not None:
        for amount in range(1, mib // units.MIB):
            yield (mib // units.MIB - amount) * vgpus, changed(memory_bytes=amount * vgpus * units.MIB)
    elif kind is Kind.ASK_LESS_CORES and cores is not None:
        for amount in range(1, cores):
            yield (cores - amount) * vgpus, changed(cores_percent=amount * vgpus)
    elif kind is Kind.ASK_FEWER_GPUS:
        for amount in range(1, vgpus):
            yield vgpus - amount, changed(vgpus=amount, memory_bytes=mib and mib * amount, cores_percent=cores and cores * amount)


def reduced(request: PodRequest, change: Change) -> PodRequest:
    """Make a change of a request."""
    (position,) = [at for at, container in enumerate(request.containers) if container.container == change.container]
    container = request.containers[position]
    now: dict[str, Any] = {
        Kind.ASK_LESS_MEMORY: lambda: {"memory_bytes": change.amount * units.MIB * container.vgpus},
        Kind.ASK_LESS_CORES: lambda: {"cores_percent": change.amount * container.vgpus},
        Kind.ASK_FEWER_GPUS: lambda: {
            "vgpus": change.amount,
            "memory_bytes": container.memory_bytes_per_vgpu and container.memory_bytes_per_vgpu * change.amount,
            "cores_percent": container.cores_percent_per_vgpu and container.cores_percent_per_vgpu * change.amount,
        },
    }[change.kind]()
    after = [replace(one, **now) if at == position else one for at, one in enumerate(request.containers)]
    return replace(request, containers=tuple(after))


def reduction(request: PodRequest, change: Change) -> int:
    container = next(one for one in request.containers if one.container == change.container)
    whole = {
        Kind.ASK_LESS_MEMORY: (container.memory_bytes_per_vgpu or 0) // units.MIB,
        Kind.ASK_LESS_CORES: container.cores_percent_per_vgpu or 0,
        Kind.ASK_FEWER_GPUS: container.vgpus,
    }[change.kind]
    return (whole - change.amount) * (1 if change.kind is Kind.ASK_FEWER_GPUS else container.vgpus)


@given(clusters(), requests_of_several())
def test_the_changes_of_a_pod_of_several_containers_are_the_smallest(state, request):
    shape = PodShape.of(request, Policy.FRAG, HostDemand())
    if fits(state, request):
        return
    changes = {change.kind: change for change in answer_several(several_question(state, shape, request, Scope.of(state)))}
    event(", ".join(sorted(changes)) or "nothing helps")
    exclusive = request.preferences.isolation is Isolation.EXCLUSIVE
    kinds = (Kind.ASK_FEWER_GPUS,) if exclusive else (Kind.ASK_LESS_MEMORY, Kind.ASK_LESS_CORES, Kind.ASK_FEWER_GPUS)
    for kind in kinds:
        tried = [less for at in range(len(request.containers)) for less in smaller(request, kind, at)]
        best = min((amount for amount, tried_request in tried if fits(state, tried_request)), default=None)
        change = changes.get(kind)
        if change is not None:
            assert fits(state, reduced(request, change)), kind
            whole = (
                kind is Kind.ASK_LESS_MEMORY
                and next(one for one in request.containers if one.container == change.container).memory_bytes is None
            )
        if change is None or not whole:
            assert (None if change is None else reduction(request, change)) == best, kind
    assert _room(changes.get(Kind.FREE_ROOM)) == least_room_for_several(state, request)
    assert _lifted(state, changes.get(Kind.LIFT_CORDON)) == least_lifted_of_several(state, request)
    for name in ("gpu_type", "isolation"):
        without = replace(request, preferences=replace(request.preferences, **{name: getattr(NOTHING, name)}))
        named = changes.get(Kind.DROP_PREFERENCE)
        if named is not None and named.preference == name.replace("_", "-"):
            assert fits(state, without)


def less_used(device: DeviceState, mib: int, cores: int, shares: int) -> DeviceState:
    return replace(
        device,
        used_memory_bytes=device.used_memory_bytes - mib * units.MIB,
        used_cores_percent=device.used_cores_percent - cores,
        used_shares=device.used_shares - shares,
        unreserved_shares=max(0, device.unreserved_shares - shares),
    )


def carries_all(device: DeviceState, containers: list[ContainerRequest], preferences: Preferences) -> bool:
    for container in containers:
        if reject_reason(device, container, preferences) is not None:
            return False
        device = device.with_share(share_on(device.device, container, preferences))
    return True


def least_for(device: DeviceState, containers: list[ContainerRequest], preferences: Preferences) -> tuple[int, int, int] | None:
    """Try all amounts that could become free on a device."""
    most_mib, most_cores = device.used_memory_bytes // units.MIB, device.used_cores_percent
    for shares in range(device.used_shares + 1):
        for mib in range(most_mib + 1):
            if carries_all(less_used(device, mib, most_cores, shares), containers, preferences):
                fewer = (c for c in range(most_cores + 1) if carries_all(less_used(device, mib, c, shares), containers, preferences))
                return mib, next(fewer), shares
    return None


def least_room_for_several(state: ClusterState, request: PodRequest) -> tuple[int, int, int, int] | None:
    """Try all ways to lay the containers on devices, and keep those with which placement's search agrees."""
    isolation = request.preferences.isolation
    if isolation is not None or any(container.init for container in request.containers):
        return None
    best: Any = None
    for node in state.gpu_nodes():
        devices = state.device_states(node.name)
        for chosen in product(*(list(combinations(range(len(devices)), one.vgpus)) for one in request.containers)):
            on = {at: [c for c, ats in zip(request.containers, chosen, strict=True) if at in ats] for at in set(chain(*chosen))}
            amounts = {at: least_for(devices[at], containers, request.preferences) for at, containers in on.items()}
            if None in amounts.values():
                continue
            total = (*map(sum, zip(*amounts.values(), strict=True)), sum(any(amount) for amount in amounts.values()))
            after = tuple(less_used(device, *amounts.get(at, (0, 0, 0))) for at, device in enumerate(devices))
            if (best is None or total < best) and fits_on(state, node.name, after, request):
                best = total
    return best


def least_lifted_of_several(state: ClusterState, request: PodRequest) -> tuple[int, int] | None:
    best = None
    for node in state.gpu_nodes():
        devices = state.device_states(node.name)
        shut = [at for at, device in enumerate(devices) if device.cordoned or not device.healthy]
        for chosen in chain.from_iterable(combinations(shut, size) for size in range(1, len(shut) + 1)):
            after = tuple(replace(device, healthy=True, cordoned=False) if at in chosen else device for at, device in enumerate(devices))
            sick = sum(not devices[at].healthy for at in chosen)
            cost = sick, len(chosen) - sick
            if (best is None or cost < best) and fits_on(state, node.name, after, request):
                best = cost
    return best


def test_a_change_of_one_of_several_containers_names_it():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 1))
    request = PodRequest((ContainerRequest("serve", 1, 700 * units.MIB), ContainerRequest("log", 1, 400 * units.MIB)))
    question = several_question(state, PodShape.of(request, Policy.FRAG, HostDemand()), request, Scope.of(state))
    change, *_ = answer_several(question)
    assert change.sentence == "ask for at most 600 MiB of memory per vGPU in container serve instead of 700 MiB: it would fit on node n1"
    assert (change.kind, change.container, change.amount) == (Kind.ASK_LESS_MEMORY, "serve", 600)


# --- MIG instances ---


@st.composite
def mig_clusters(draw: st.DrawFn) -> ClusterState:
    state = ClusterState()
    for name in ("n1", "n2")[: draw(st.integers(1, 2))]:
        counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        node = make_node(name, [make_device(name, minor, instances=count) for minor, count in enumerate(counts)])
        entries = tuple(GpuDevice(entry.device, draw(st.sampled_from(["", "", "XID 79"]))) for entry in node.devices)
        cordoned = tuple(entry.device.uuid for entry in entries if draw(st.integers(0, 2)) == 0)
        state.set_gpu_node(replace(node, devices=entries, cordoned_devices=cordoned))
        for instance in chain.from_iterable(entry.device.mig_instances for entry in entries):
            if draw(st.booleans()):
                shares = {"main": [DeviceShare(instance.uuid, instance.memory_bytes)]}
                state.set_pod(make_pod(f"on-{instance.uuid}", node=name, shares=shares, **MIG_LIMIT))
    return state


@given(mig_clusters(), st.lists(st.integers(1, 4), min_size=1, max_size=2), st.sampled_from([(), (), ("a100",)]))
def test_the_changes_of_a_pod_with_mig_instances_are_the_smallest(state, counts, gpu_type):
    containers = tuple(ContainerRequest(f"c{at}", mig=(("1g.10gb", count),)) for at, count in enumerate(counts))
    request = PodRequest(containers, Preferences(gpu_type=gpu_type))
    if fits(state, request):
        return
    changes = {
        change.kind: change
        for change in answer_several(several_question(state, PodShape.of(request, Policy.FRAG, HostDemand()), request, Scope.of(state)))
    }
    event(", ".join(sorted(changes)) or "nothing helps")
    assert set(changes) <= {Kind.ASK_FEWER_GPUS, Kind.LIFT_CORDON, Kind.DROP_PREFERENCE}

    def fewer(position: int, amount: int) -> PodRequest:
        less = replace(containers[position], mig=(("1g.10gb", amount),))
        return replace(request, containers=(*containers[:position], less, *containers[position + 1 :]))

    tried = [(count - amount, fewer(at, amount)) for at, count in enumerate(counts) for amount in range(1, count)]
    best = min((reduction for reduction, less in tried if fits(state, less)), default=None)
    change = changes.get(Kind.ASK_FEWER_GPUS)
    if change is None:
        assert best is None
    else:
        position = [container.container for container in containers].index(change.container)
        assert change.profile == "1g.10gb"
        assert fits(state, fewer(position, change.amount))
        assert counts[position] - change.amount == best
    assert _lifted(state, changes.get(Kind.LIFT_CORDON)) == least_lifted_of_several(state, request)


MIG_LIMIT: dict[str, Any] = {"mig-1g.10gb": "1"}


def mig_why(state: ClusterState, **limits: Any) -> tuple[str, ...]:
    why, questions = explain_pod(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, make_pod("late", **limits))
    return tuple(change.sentence for change in completed(why, questions.answered(), "").changes)


def test_cordon_is_reported_for_mig_pod_among_many_nodes_without_mig():
    state = ClusterState()
    for number in range(TRIED_NODES + 1):
        state.set_gpu_node(make_node(f"a{number}", 1))
    state.set_gpu_node(make_node("n1", [make_device("n1", 0, instances=1)], cordoned_devices=("GPU-n1-0",)))
    assert mig_why(state, **{"mig-1g.10gb": "1"}) == ("uncordon GPU-n1-0 on node n1",)


def test_fewer_mig_instances_are_proposed_where_there_are_not_as_many():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", [make_device("n1", 0, instances=1)]))
    sentence = "ask for 1 MIG instance 1g.10gb in container main instead of 2: it would fit on node n1"
    assert mig_why(state, **{"mig-1g.10gb": "2"}) == (sentence,)


# --- reasons that do not mislead ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pinned", "vgpus", "reason"),
    [
        (("GPU-n1-0",), 1, NodeReason.MEMORY),
        (("GPU-n1-1",), 1, NodeReason.UNAVAILABLE),
        (("GPU-n1-0", "GPU-n1-1"), 1, NodeReason.UNAVAILABLE),
        (("GPU-n1-0",), 2, NodeReason.UNWANTED),
        (("GPU-elsewhere",), 1, NodeReason.UNWANTED),
        ((), 1, NodeReason.MEMORY),
    ],
    ids=["full", "cordoned", "one full, one cordoned", "too few are named", "not here", "none named"],
)
def test_excluded_devices_are_reason_only_when_no_others_are_left(pinned, vgpus, reason):
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 4, cordoned_devices=("GPU-n1-1",)))
    for minor in (0, 2, 3):
        state.set_pod(make_pod(f"p{minor}", node="n1", shares={"main": [make_share("n1", minor, 900)]}, vgpu="1"))
    container, preferences = ContainerRequest("c0", vgpus, vgpus * 500 * units.MIB), Preferences(gpu_uuid=pinned)
    shape = PodShape(PodRequest((container,), preferences), Policy.FRAG, HostDemand())
    _, (count,) = counted(state, shape)
    assert count.reason == reason.sentence
    refusal = choose_pod(state.device_states("n1"), shape.request, Policy.FRAG)
    assert isinstance(refusal, Refusal)
    assert OF_REJECT[refusal.reason] is reason, refusal.sentence


def test_no_part_of_a_gang_is_proposed_to_end():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 3))
    gang = {contract.ANNOTATION_GANG: "g", contract.ANNOTATION_GANG_MIN: "2"}
    for minor, annotations in enumerate([gang, gang, None]):
        shares = {"main": [make_share("n1", minor, 900)]}
        state.set_pod(make_pod(f"p{minor}", node="n1", shares=shares, annotations=annotations, priority=10 * (minor == 2), vgpu="1"))
    shape = PodShape(PodRequest((ContainerRequest("c0", 1, 500 * units.MIB),)), Policy.FRAG, HostDemand())
    assert ended_for(state, shape).pods == ("p2",)
    state.set_gpu_node(make_node("n1", 3, cordoned_devices=("GPU-n1-2",)))
    assert ended_for(state, shape).pods == ("p0", "p1"), "the gang as a whole"


def test_node_with_mig_vgpus_states_why_it_gets_no_pod():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", [make_device("n1", 0, instances=7)]))
    shape = PodShape(PodRequest((ContainerRequest("c0", 1),)), Policy.FRAG, HostDemand())
    _, (count,) = counted(state, shape)
    assert count.reason == "GPUs in MIG mode, available as instances only (nvidia.com/mig-<profile>, migStrategy mixed)"


def test_two_wrong_preferences_leave_several_changes_possible():
    state = ClusterState()
    state.set_gpu_node(make_node("n1", 1))
    annotations = {contract.ANNOTATION_GPU_TYPE: "a100", contract.ANNOTATION_GPU_UUID: "GPU-elsewhere"}
    why, questions = explain_pod(state, Shapes(state, DEFAULT_WEIGHTS), Policy.FRAG, make_pod("late", annotations=annotations, vgpu="1"))
    complete = completed(why, questions.answered(), "")
    assert complete.changes == ()
    assert any("combine several" in line for line in why_lines(complete))
