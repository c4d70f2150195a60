# SPDX-License-Identifier: Apache-2.0
"""The cluster as the scheduler sees it: inventories, hosts, pods and reservations, with their sums in the columns.

Invariant: each pod counts once, by its assignment once it is bound, and by its reservation before. Events may come in any order: a pod
before its node, a node before its inventory, a deletion twice. Not thread-safe: the state has one owner. Each call leaves it consistent.

A reservation says on which node a pod is expected; its stage says how certain that is. It ends when the watch shows that the pod is bound
or gone, or as the stage says. What pods take is added up in ``holders``, the members of gangs are in ``members``.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import repeat, takewhile
from math import inf
from typing import Final

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.errors import ContractError
from aliquot.contract.gpunode import GpuNode
from aliquot.contract.model import Device, Isolation, PodAssignment, PodRequest, Policy, Utilization
from aliquot.placement.device import DeviceState
from aliquot.placement.refusal import Refusal
from scheduler_plugin.core.cluster.columns import Columns
from scheduler_plugin.core.cluster.domains import domain_of
from scheduler_plugin.core.cluster.holders import NO_FOOTPRINT, Holder, Holders, InventoriedNode
from scheduler_plugin.core.cluster.journal import MAX_EVENTS, Event, Held, Moment, Part, Pass, Picture, Place
from scheduler_plugin.core.cluster.journal import Host as HostAmounts
from scheduler_plugin.core.cluster.members import GangKey, GangMembers, Loss
from scheduler_plugin.core.cluster.plan import PlanCache, plan_on_node
from scheduler_plugin.core.cluster.pods import Footprint, PodFacts, Use, footprint
from scheduler_plugin.core.cluster.soft import SoftWishes
from scheduler_plugin.core.cluster.utilizations import Utilizations
from scheduler_plugin.core.cluster.wanted import Wanted
from scheduler_plugin.core.score.cost import Host, HostDemand, NodeView
from scheduler_plugin.core.score.interference import NO_AVERSION, Aversion
from scheduler_plugin.core.score.links import matrix_of

UNKNOWN_ROW: Final = -1
_NODES_PER_STEP: Final = 50
_PODS_PER_STEP: Final = 200


class _RowsByName(dict[str, int]):
    """Has a value for every name, so that looking up thousands needs no branch for each."""

    def __missing__(self, name: str) -> int:
        return UNKNOWN_ROW


class Stage(Enum):
    """How certain a reservation is."""

    SOFT = auto()
    """A guess while the pod is being scheduled: the last one counts, and it expires."""
    READY = auto()
    """kube-scheduler chose the node, and the pod's gang is not complete: like a soft one, but planning other members does not move it."""
    STARTING = auto()
    """The pod's gang is complete and starts: the room is kept until the binding is sent. Expires if kube-scheduler requests no binding."""
    BINDING = auto()
    """The binding was sent and its result is unknown: ends by ``confirm`` or ``release`` only."""
    BOUND = auto()
    """The API server accepted the binding. Ends when the watch has passed that moment and did not show the pod."""

    @property
    def is_firm(self) -> bool:
        """Whether the pod counts as placed there."""
        return self not in (Stage.SOFT, Stage.READY)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where a pod is expected that the watch has not shown as bound."""

    pod_uid: str
    node: str
    footprint: Footprint
    demand: HostDemand
    stage: Stage = Stage.SOFT
    expires_at: float = inf
    """In seconds: for stage BOUND on the clock of the pods' watch, for the others on the caller's clock."""
    expires_early_at: float = inf
    """When it ends if kube-scheduler's attempt on the pod fails. Until then it is kept for as long as the attempt lasts."""


class ClusterState:
    """All that the scheduler knows of the cluster; see the module."""

    def __init__(self) -> None:
        self.columns = Columns()
        self.wanted = Wanted()
        self.soft = SoftWishes()
        self.utilizations = Utilizations()
        self.freed_count = 0
        """Grows when a pod may fit that did not fit before: a pod ended, a reservation expired, an inventory changed, a gang got enough
        members, or one more of its members succeeded."""
        self.pod_change_count = 0
        """Grows when preemption may help on a node where it did not help before (``pods_changed_at``)."""
        self.unaccounted: dict[str, str] = {}
        """Bound pods with unknown devices, by UID, and why they are unknown: their use is not counted."""
        self.names: list[str] = []
        """Node names by row; empty for a row without node."""
        self.rows_by_name = _RowsByName()
        """The row of each node name; UNKNOWN_ROW for other names."""
        self.naming_count = 0
        """Grows when a row gets another name."""
        self.named_at: list[int] = []
        """By row, the ``naming_count`` when the row got its name."""
        self.plugin_resources: dict[str, frozenset[str]] = {}
        """By node, the extended resources that device plugins give out there."""
        self.closed_nodes: set[str] = set()
        """Names of nodes with taints that keep pods without a toleration away. Only consolidation needs them: kube-scheduler checks them
        for the pods of its calls."""
        self._nodes: dict[str, InventoriedNode] = {}
        self._hosts: dict[str, tuple[int, int]] = {}
        self._most_pods: dict[str, int] = {}
        self._places: dict[str, Mapping[str, str]] = {}
        """By node, the labels that say where it is."""
        self._pods_changed: dict[str, int] = {}
        """By node with an inventory, the ``pod_change_count`` of the last change of its pods, in the order of these changes."""
        self._pods: dict[str, PodFacts] = {}
        self._holders = Holders(self.columns, self._nodes)
        self._reservations: dict[str, Reservation] = {}
        self._passes: dict[str, frozenset[str]] = {}
        """By pod UID, the UIDs of reservations that do not count where room for the pod is judged."""
        self._members = GangMembers()
        self._plans = PlanCache()
        self._part = Part()
        self._unread: set[str] = set()
        """Nodes with reports of what pods use that were not read yet."""

    # --- what is known ---

    @property
    def pods(self) -> Mapping[str, PodFacts]:
        """All pods that have not ended, by UID."""
        return self._pods

    @property
    def reservations(self) -> Mapping[str, Reservation]:
        """All reservations, by pod UID."""
        return self._reservations

    @property
    def passes(self) -> Mapping[str, frozenset[str]]:
        """By the UID of a pod that may use held room, the UIDs of the reservations that hold it."""
        return self._passes

    @property
    def node_count(self) -> int:
        """How many nodes have an inventory."""
        return len(self._nodes)

    def row_of(self, node: str) -> int | None:
        """Return the row of a node with an inventory."""
        row = self.rows_by_name[node]
        return None if row == UNKNOWN_ROW else row

    def gpu_node(self, node: str) -> GpuNode | None:
        """Return a node's inventory."""
        known = self._nodes.get(node)
        return None if known is None else known.gpu

    def gpu_nodes(self) -> Iterable[GpuNode]:
        """Return all inventories."""
        return (node.gpu for node in self._nodes.values())

    def domain_of(self, node: str, level: str) -> str:
        """Return the domain of a node on a level (``core.cluster.domains``)."""
        return domain_of(node, self.gpu_node(node), self._places.get(node, {}), level)

    def footprint_of(self, pod_uid: str) -> Footprint:
        """Return what a pod, bound or expected, takes of devices."""
        return self._holders.footprint_of(pod_uid)

    def footprints_on(self, node: str) -> Mapping[str, Footprint]:
        """Return what is taken of a node's devices, by the UID of the pod, claim or hold that takes it."""
        return {uid: self._holders.footprint_of(uid) for uid in self._holders.uids_on(node)}

    def pods_on(self, node: str) -> Iterable[PodFacts]:
        """Return the bound pods of a node; pods that are only expected there are in ``reservations``."""
        known = (self._pods.get(uid) for uid in self._holders.uids_on(node))
        return (pod for pod in known if pod is not None and pod.node_name == node)

    def pod_capacity_of(self, node: str) -> int:
        """Return how many pods a node can run; 0 if unknown."""
        return self._most_pods.get(node, 0)

    def pods_changed_at(self, node: str) -> int:
        """Return the ``pod_change_count`` of the last change after which preemption on a node may help.

        That is a change of the inventory, of a bound pod with GPUs (it came, changed or went), or the expiry of a reservation there.
        """
        return self._pods_changed.get(node, 0)

    def pods_changed_since(self, count: int) -> list[str]:
        """Return the nodes that changed after ``pod_change_count`` had this value, in the order of their last change."""
        latest_first = takewhile(lambda node: self._pods_changed[node] > count, reversed(self._pods_changed))
        return list(latest_first)[::-1]

    def gang_members(self, key: GangKey) -> Iterable[PodFacts]:
        """Return the known pods of a gang that have not ended."""
        return self._members.of(key)

    @property
    def has_gangs(self) -> bool:
        """Whether any pod is in a gang."""
        return bool(self._members)

    def take_losses(self) -> list[Loss]:
        """Return the losses of gangs that restart whole since the previous call."""
        return self._members.take_losses()

    def succeeded_members(self, key: GangKey) -> Mapping[str, PodFacts]:
        """Return the pods of a gang that succeeded, by UID. They are forgotten when another member is deleted or all have ended."""
        return self._members.succeeded(key)

    def device_states(self, node: str, aversion: Aversion = NO_AVERSION) -> tuple[DeviceState, ...]:
        """Return the devices of a node in the scalar form of placement; empty for a node without inventory.

        Args: aversion: that of the pod to place.
        """
        known = self._nodes.get(node)
        if known is None:
            return ()
        columns, row, gpu = self.columns, known.row, known.gpu
        sums = (array[row].tolist() for array in (columns.used_mib, columns.used_cores, columns.used_shares, columns.unreserved))
        averted = repeat(0) if aversion is NO_AVERSION else map(aversion.cost_ppm, self._slowdowns_ppm(known, aversion))
        return tuple(
            DeviceState(
                entry.device,
                used_memory_bytes=units.mib_to_bytes(used_mib),
                used_cores_percent=used_cores,
                used_shares=used_shares,
                unreserved_shares=unreserved,
                used_instances=frozenset([i.uuid for i in entry.device.mig_instances if known.instance_uses[i.uuid]]),
                max_shares=gpu.shares_per_gpu,
                healthy=entry.healthy,
                cordoned=gpu.is_cordoned(entry.device.uuid),
                aversion_ppm=aversion_ppm,
            )
            for entry, used_mib, used_cores, used_shares, unreserved, aversion_ppm in zip(gpu.devices, *sums, averted, strict=False)
        )  # columns are padded

    def _slowdowns_ppm(self, known: InventoriedNode, aversion: Aversion) -> Iterable[int]:
        """Return for each device of a node how much slower the pod would be there because of other pods."""
        columns, row, count = self.columns, known.row, len(known.gpu.devices)
        busy = zip(columns.busy_sm[row, :count].tolist(), columns.busy_dram[row, :count].tolist(), strict=True)
        return [aversion.slowdown_ppm(Utilization(*used)) for used in busy]

    def view(self, node: str, aversion: Aversion = NO_AVERSION) -> NodeView:
        """Return a node in the form of the scalar score. Args: aversion: that of the pod to rate."""
        known = self._nodes[node]
        columns, row = self.columns, known.row
        host = Host(
            int(columns.cpu_milli[row]), int(columns.cpu_used_milli[row]), int(columns.ram_mib[row]), int(columns.ram_used_mib[row])
        )
        matrix = matrix_of([entry.device for entry in known.gpu.devices], known.gpu.links)
        table = columns.demand_table
        slowdowns_ppm = () if aversion is NO_AVERSION else tuple(self._slowdowns_ppm(known, aversion))
        states = self.device_states(node, aversion)
        return NodeView(states, matrix, host, table.demand, table.scarcity_of_kind, table.seat_values, slowdowns_ppm)

    def plan(self, node: str, request: PodRequest, policy: Policy, pod_uid: str) -> PodAssignment | Refusal:
        """Choose devices for a pod on a node, as if the pod held nothing there yet. Cached until the node changes."""
        known, columns = self._nodes.get(node), self.columns
        if known is None:
            return plan_on_node((), request, policy, (), pod_uid)
        cached = self._plans.get(pod_uid, int(columns.changed[known.row]), request, policy)
        if cached is not None:
            return cached
        with columns.unchanged(self._holders.rows_of({pod_uid, *self._passes.get(pod_uid, ())})), self.without(pod_uid):
            demand = columns.demand_table.demand
            used = self.utilizations.of(self._pods.get(pod_uid))
            aversion = self.utilizations.aversion(used, request.preferences.policy or policy)
            outcome = plan_on_node(self.device_states(node, aversion), request, policy, known.gpu.links, pod_uid, demand)
        self._plans.put(pod_uid, int(columns.changed[known.row]), request, policy, outcome)
        return outcome

    def nominal_footprint(self, node: str, request: PodRequest, columns: Iterable[int]) -> Footprint:
        """Return what one container takes of the devices in these columns, one vGPU of each."""
        (container,), exclusive = request.containers, request.preferences.isolation is Isolation.EXCLUSIVE
        cores = units.WHOLE_GPU_PERCENT if exclusive else container.cores_percent_per_vgpu
        entries = self._nodes[node].gpu.devices

        def mib_on(device: Device) -> int:
            capacity_mib = device.memory_bytes // units.MIB
            return capacity_mib if exclusive else container.memory_mib_on(capacity_mib)

        return {
            device.uuid: Use(mib_on(device), cores or 0, 1, int(cores is None)) for device in (entries[column].device for column in columns)
        }

    def without(self, pod_uid: str) -> AbstractContextManager[None]:
        """Do not count a pod inside the block, so that it does not compete with itself, nor the held room that it may use."""
        passed = self._passes.get(pod_uid)
        return self._holders.without(pod_uid) if passed is None else self._without_held(pod_uid, passed)

    @contextmanager
    def _without_held(self, pod_uid: str, passed: frozenset[str]) -> Iterator[None]:
        with ExitStack() as stack:
            for uid in {pod_uid, *passed}:
                stack.enter_context(self._holders.without(uid))
            yield

    @contextmanager
    def without_all(self, pod_uids: Iterable[str]) -> Iterator[None]:
        """Do not count several pods inside the block."""
        with ExitStack() as stack:
            for uid in set(pod_uids):
                stack.enter_context(self.without(uid))
            yield

    # --- history ---

    def moment(self) -> Moment:
        """Return this moment, from which the present state can be rebuilt."""
        return Moment(self._part, len(self._part.events), self.columns.demand_table.demand)

    def picture(self) -> Picture:
        """Return the present content, without its history."""
        nodes = {name: node.gpu for name, node in self._nodes.items()}
        held = {uid: _held(reservation) for uid, reservation in self._reservations.items()}
        pods = dict(self._pods)
        for succeeded in self._members.all_succeeded():
            pods |= succeeded  # last, because they count only for gangs with other pods
        return Picture(nodes, dict(self._hosts), pods, held, dict(self._places), dict(self._passes))

    def _note(self, event: Event) -> None:
        """Add an event to the history. Call it before the change: a new picture must not contain it."""
        if len(self._part.events) >= MAX_EVENTS:
            self._part = Part(self.picture())
        self._part.events.append(event)

    # --- events ---

    def set_gpu_node(self, gpu: GpuNode) -> None:
        """Store a new or changed inventory."""
        known = self._nodes.get(gpu.name)
        if known is not None and known.gpu == gpu:
            return
        self._note(Event(node=gpu))
        if gpu.utilization:
            self._unread.add(gpu.name)
        if known is not None and replace(known.gpu, utilization=gpu.utilization) == gpu:
            known.gpu = gpu
            return
        with self._holders.uncounted_on(gpu.name):
            if known is None:
                row = self.columns.add_row()
                self._name_row(row, gpu.name)
            else:
                row = known.row
            self._nodes[gpu.name] = InventoriedNode.of(row, gpu)
            self.columns.set_host(row, *self._hosts.get(gpu.name, (0, 0)))  # first: the kinds of devices depend on it
            self.columns.set_inventory(row, gpu)
        self.freed_count += 1
        self.note_pods_changed(gpu.name)

    def drop_gpu_node(self, name: str) -> None:
        """Forget an inventory; the pods of the node are kept."""
        known = self._nodes.get(name)
        if known is None:
            return
        self._note(Event(node_gone=name))
        with self._holders.uncounted_on(name):
            self.columns.drop_row(known.row)
            self._name_row(known.row, "")
            del self._nodes[name]
        self._pods_changed.pop(name, None)

    def set_host(self, name: str, cpu_milli: int, ram_mib: int, most_pods: int = 0) -> None:
        """Store a node's allocatable CPU and RAM, and its number of pods; 0 if unknown."""
        self._most_pods[name] = most_pods
        if self._hosts.get(name) == (cpu_milli, ram_mib):
            return
        self._note(Event(host=HostAmounts(name, cpu_milli, ram_mib)))
        self._hosts[name] = (cpu_milli, ram_mib)
        if (known := self._nodes.get(name)) is not None:
            self.columns.set_host(known.row, cpu_milli, ram_mib)

    def set_place(self, name: str, labels: Mapping[str, str]) -> None:
        """Store the labels that say where a node is."""
        if self._places.get(name, {}) == labels:
            return
        self._note(Event(place=Place(name, labels)))
        self._places[name] = labels
        self.freed_count += 1

    def set_closed(self, name: str, *, closed: bool) -> None:
        """Store whether taints close a node to pods without a toleration."""
        if closed:
            self.closed_nodes.add(name)
        else:
            self.closed_nodes.discard(name)

    def set_plugin_resources(self, name: str, resources: frozenset[str]) -> None:
        """Store which extended resources device plugins give out on a node."""
        if self.plugin_resources.get(name, frozenset()) == resources:
            return
        self.plugin_resources[name] = resources
        if (known := self._nodes.get(name)) is not None:
            self.columns.touch(known.row)

    def drop_host(self, name: str) -> None:
        """Forget a node's CPU and RAM, and where it is."""
        self.plugin_resources.pop(name, None)
        self._most_pods.pop(name, None)
        self.set_place(name, {})
        self._places.pop(name, None)
        self.soft.set_tainted(name, tainted=False)
        self.set_closed(name, closed=False)
        self._note(Event(host=HostAmounts(name)))
        if self._hosts.pop(name, None) is not None and (known := self._nodes.get(name)) is not None:
            self.columns.set_host(known.row, 0, 0)

    def set_pod(self, pod: PodFacts) -> None:
        """Store a new or changed pod."""
        if not pod.active:
            self.drop_pod(pod.uid)
            self._keep_if_succeeded(pod)
            return
        before = self._pods.get(pod.uid)
        if self._is_no_news(before, pod):
            return
        self._note(Event(pod=pod))
        self._pods[pod.uid] = pod
        if before is None or before.gpu != pod.gpu:
            self.wanted.see(pod)
        if self._members.set(before, pod):
            self.freed_count += 1
        if _attempt_failed(before, pod):
            self.end_attempt(pod.uid)
        if pod.node_name:
            self._set_bound(pod)

    def _is_no_news(self, before: PodFacts | None, pod: PodFacts) -> bool:
        """Whether a pod is older than what is known of it, or the same."""
        if before is not None and before.node_name and not pod.node_name:
            return True  # a bound pod never becomes unbound
        return before == pod and (not pod.node_name or pod.uid in self._holders)  # a list repeats thousands of pods

    def _set_bound(self, pod: PodFacts) -> None:
        """Count a bound pod, in place of its reservation."""
        if pod.gpu is not None:
            self.note_pods_changed(pod.node_name)
        self.soft.put(pod)
        self._reservations.pop(pod.uid, None)
        self._passes.pop(pod.uid, None)
        demand = HostDemand(pod.cpu_milli, pod.memory_mib)
        self._hold(pod.uid, Holder(pod.node_name, self._footprint(pod), demand, self.utilizations.of(pod)))

    def drop_pod(self, uid: str) -> None:
        """Forget a pod that ended or was deleted; its room is free."""
        self._note(Event(pod_gone=uid))
        pod = self._pods.pop(uid, None)
        if pod is not None:
            self._members.leave(pod)
            if pod.gpu is not None and pod.node_name:
                self.note_pods_changed(pod.node_name)
        self.wanted.forget(uid)
        self.soft.drop(uid)
        self.unaccounted.pop(uid, None)
        self._reservations.pop(uid, None)
        self._passes.pop(uid, None)
        self._drop_holder(uid)

    def _keep_if_succeeded(self, pod: PodFacts) -> None:
        """Count a pod that succeeded for its gang, as long as the gang has other pods."""
        if self._members.is_new_success(pod):
            self._note(Event(pod=pod))
            self._members.add_success(pod)
            self.freed_count += 1

    def replace_gpu_nodes(self, nodes: Iterable[GpuNode]) -> None:
        """Store a full list: nodes that are not in it are gone."""
        listed = {node.name: node for node in nodes}
        for name in self._nodes.keys() - listed.keys():
            self.drop_gpu_node(name)
        for node in listed.values():
            self.set_gpu_node(node)

    def replace_hosts(self, hosts: Mapping[str, tuple[int, int] | tuple[int, int, int]]) -> None:
        """Store a full list: nodes that are not in it are gone."""
        for name in self._hosts.keys() - hosts.keys():
            self.drop_host(name)
        for name, amounts in hosts.items():
            self.set_host(name, *amounts)

    def replace_pods(self, pods: Iterable[PodFacts]) -> None:
        """Store a full list: pods that are not in it are gone. Their reservations stay for a moment: they can be newer than the list."""
        listed = {pod.uid: pod for pod in pods}
        for uid in self._pods.keys() - listed.keys():
            reservation = self._reservations.get(uid)
            self.drop_pod(uid)
            if reservation is not None:
                self.reserve(reservation)
                self.end_attempt(uid)
        for pod in listed.values():
            self.set_pod(pod)

    def note_pods_changed(self, node: str) -> None:
        """Note that preemption may have new victims on a node."""
        if node in self._nodes:
            self.pod_change_count += 1
            self._pods_changed.pop(node, None)
            self._pods_changed[node] = self.pod_change_count

    def read_utilization(self) -> None:
        """Learn from the agents' reports since the last call, and count all pods by what is known now."""
        for _ in self.utilization_steps():
            pass

    def utilization_steps(self) -> Iterator[None]:
        """Do the same in pieces of about a millisecond. Between two of them the state may change."""
        for number, name in enumerate([*self._unread], 1):
            node = self._nodes.get(name)
            if node is None or self._learn_from(node.gpu):
                self._unread.discard(name)
            if number % _NODES_PER_STEP == 0:
                yield
        if not self.utilizations.settle():
            return
        self._plans.clear()
        for number, uid in enumerate([*self._holders.uids()], 1):
            self._holders.set_used(uid, self.utilizations.of(self._pods.get(uid)))
            if number % _PODS_PER_STEP == 0:
                yield

    def _learn_from(self, gpu: GpuNode) -> bool:
        """Learn from the report of one node about its own pods; return whether all pods of the report are known as bound.

        The watches of nodes and pods are two: a report can come before the binding of its pod, and is read again then.
        """
        found = [(self._pods.get(entry.pod_uid), entry.used) for entry in gpu.utilization]
        for pod, used in found:
            if pod is not None and pod.node_name == gpu.name:
                self.utilizations.learn(pod, used)
        return all(pod is not None and pod.node_name for pod, _ in found)

    # --- reservations ---

    def reserve(self, reservation: Reservation) -> None:
        """Expect a pod on a node, in place of its earlier reservation. For a bound pod this does nothing."""
        pod = self._pods.get(reservation.pod_uid)
        if pod is not None and pod.node_name:
            return
        self._note(Event(held=_held(reservation)))
        self._reservations[reservation.pod_uid] = reservation
        used = self.utilizations.of(pod)
        self._hold(reservation.pod_uid, Holder(reservation.node, reservation.footprint, reservation.demand, used))

    def release(self, pod_uid: str) -> None:
        """Drop a pod's reservation."""
        if self._reservations.pop(pod_uid, None) is not None:
            self._note(Event(let_go=pod_uid))
            self._drop_holder(pod_uid)

    def renew(self, pod_uid: str, expires_at: float) -> None:
        """Keep a pod's reservation at least until a moment."""
        known = self._reservations.get(pod_uid)
        if known is not None and known.expires_at < expires_at:
            self._reservations[pod_uid] = replace(known, expires_at=expires_at)

    def let_pass(self, pod_uid: str, holds: frozenset[str]) -> None:
        """Let a pod use the room of these reservations, and of no others."""
        if self._passes.get(pod_uid, frozenset()) == holds:
            return
        self._note(Event(let_pass=Pass(pod_uid, holds)))
        self._passes.pop(pod_uid, None)
        if holds:
            self._passes[pod_uid] = holds
        self._plans.forget(pod_uid)

    def end_attempt(self, pod_uid: str) -> None:
        """Note that kube-scheduler's attempt on a pod is over, so that a reservation kept for the attempt expires as others do."""
        known = self._reservations.get(pod_uid)
        if known is not None:
            self._reservations[pod_uid] = replace(known, expires_at=min(known.expires_at, known.expires_early_at))

    def confirm(self, pod_uid: str, expires_at: float) -> None:
        """Note that the API server accepted a binding. Does nothing if the watch has shown the pod bound or gone in the meantime."""
        reservation = self._reservations.get(pod_uid)
        if reservation is not None:
            self._reservations[pod_uid] = replace(reservation, stage=Stage.BOUND, expires_at=expires_at)

    def expire(self, now: float, pods_current_at: float) -> int:
        """Drop the expired reservations; return how many.

        Args: pods_current_at: the moment up to which the watch has shown all changes of pods.
        """
        clock = {Stage.BOUND: pods_current_at, Stage.BINDING: -inf}
        due = [uid for uid, reservation in self._reservations.items() if reservation.expires_at <= clock.get(reservation.stage, now)]
        for uid in due:
            self.note_pods_changed(self._reservations[uid].node)
            self.release(uid)
        return len(due)

    # --- counting ---

    def _footprint(self, pod: PodFacts) -> Footprint:
        self.unaccounted.pop(pod.uid, None)
        if pod.gpu is None:
            return NO_FOOTPRINT
        text = pod.gpu.annotations.get(contract.ANNOTATION_ASSIGNMENT)
        if text is None:
            self.unaccounted[pod.uid] = "it has no assignment, because another scheduler bound it"
            return NO_FOOTPRINT
        try:
            return footprint(pod.gpu.containers, codec.decode_assignment(text, pod_uid=pod.uid))
        except ContractError as exc:
            self.unaccounted[pod.uid] = str(exc)
            return NO_FOOTPRINT

    def _hold(self, uid: str, holder: Holder) -> None:
        if self._holders.put(uid, holder):
            self.freed_count += 1

    def _drop_holder(self, uid: str) -> None:
        if self._holders.drop(uid):
            self.freed_count += 1

    def _name_row(self, row: int, name: str) -> None:
        while len(self.names) <= row:
            self.names.append("")
            self.named_at.append(0)
        self.naming_count += 1
        self.named_at[row] = self.naming_count
        self.rows_by_name.pop(self.names[row], None)
        if name:
            self.rows_by_name[name] = row
        self.names[row] = name
        self.columns.tie[row] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def _attempt_failed(before: PodFacts | None, pod: PodFacts) -> bool:
    """Whether a change of a pod shows that kube-scheduler's attempt on it failed.

    If an attempt fails with the same message as the one before, only the nominated node that is cleared shows it; before 1.35 nothing does.
    Source: handleSchedulingFailure and updatePod of kube-scheduler.
    """
    if before is None:
        return bool(pod.failure)
    has_new_failure = bool(pod.failure) and before.failure != pod.failure
    return has_new_failure or (bool(before.nominated_node) and not pod.nominated_node)


def _held(reservation: Reservation) -> Held:
    stage = reservation.stage
    return Held(
        reservation.pod_uid, reservation.node, reservation.footprint, reservation.demand, firm=stage.is_firm, ready=stage is Stage.READY
    )
