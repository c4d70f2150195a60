"""The cluster as the scheduler sees it: inventories, hosts, pods and reservations, and what they add up to in the columns.

Kept true: what a pod takes is counted once, from its assignment when it is bound and from its reservation before; what was counted is
remembered and taken back exactly, whatever happened to the inventory in between. Events may come in any order: a pod before its node, a
node before its inventory, a deletion twice. Not thread-safe; one owner, and every call leaves a consistent state.

A reservation says where a pod is expected, and its stage how surely. It ends when the watch shows the pod bound or gone, or as the stage
says.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import takewhile
from math import inf
from typing import Final

from placement.device import DeviceState
from placement.refusal import Refusal
from proto import codec, contract, units
from proto.errors import ContractError
from proto.gpunode import GpuNode
from proto.model import Isolation, PodAssignment, PodRequest, Policy
from scheduler_plugin.core.columns import Columns
from scheduler_plugin.core.gang import gang_of_pod
from scheduler_plugin.core.journal import MAX_EVENTS, Event, Held, Moment, Part, Picture
from scheduler_plugin.core.journal import Host as HostAmounts
from scheduler_plugin.core.links import matrix_of
from scheduler_plugin.core.plan import plan_on_node
from scheduler_plugin.core.pods import SUCCEEDED, Footprint, PodFacts, Use, footprint
from scheduler_plugin.core.score import Host, HostDemand, NodeView
from scheduler_plugin.core.wanted import Wanted

UNKNOWN_ROW: Final = -1
_NO_FOOTPRINT: Final[Footprint] = {}
_PLANS_KEPT: Final = 64
"""Pods that are on their way from being rated to being bound."""


class _RowsByName(dict[str, int]):
    """Answers for every name, so that thousands can be looked up without a branch for each."""

    def __missing__(self, name: str) -> int:
        return UNKNOWN_ROW


class Stage(Enum):
    """How sure a reservation is."""

    SOFT = auto()
    """A guess made while the pod is being scheduled: the last one counts, and its time runs out."""
    READY = auto()
    """kube-scheduler chose the node, and the pod's gang is not complete: like a soft one, but planning the others leaves it where it is."""
    STARTING = auto()
    """Its gang was complete and starts: the room is kept until the binding is sent. Its time runs out when nobody asks for that binding."""
    BINDING = auto()
    """The binding was sent and its outcome is open: ends by ``confirm`` or ``release`` only."""
    BOUND = auto()
    """The API took the binding. Ends when the pods have been seen as they were after that moment and the pod was not among them."""

    @property
    def is_firm(self) -> bool:
        """Whether the pod counts as placed there."""
        return self not in (Stage.SOFT, Stage.READY)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where a pod that has not been seen bound is expected."""

    pod_uid: str
    node: str
    footprint: Footprint
    demand: HostDemand
    stage: Stage = Stage.SOFT
    expires_at: float = inf
    """In seconds, on that of the pods' stream for a bound one, on the caller's clock for the others."""
    expires_early_at: float = inf
    """When it ends if kube-scheduler's attempt on the pod turns out to have failed, where it is kept for longer while that lasts."""


@dataclass(slots=True)
class _Node:
    """A node with an inventory."""

    row: int
    gpu: GpuNode
    column_of: dict[str, int] = field(default_factory=dict)
    column_of_instance: dict[str, int] = field(default_factory=dict)
    """By the UUID of a MIG instance or the name of a place for one: an agent lists its places whether or not it has made the instance."""
    instance_uses: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Holder:
    """A pod or reservation, as it counts: where, and what."""

    node: str
    footprint: Footprint
    demand: HostDemand


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was chosen for a pod on a node."""

    row_changed: int
    """The number of the row's last change: no other row has it, and with everything that is known of the node it changes."""
    request: PodRequest
    policy: Policy
    outcome: PodAssignment | Refusal

    def is_of(self, row_changed: int, request: PodRequest, policy: Policy) -> bool:
        return self.row_changed == row_changed and self.policy is policy and self.request == request


class ClusterState:
    """See the module."""

    def __init__(self) -> None:
        self.columns = Columns()
        self.wanted = Wanted()
        self.freed_count = 0
        """Goes up whenever something may fit that did not: a pod ended, a reservation expired, an inventory changed, a gang has
        enough members now, or one more that succeeded."""
        self.pod_change_count = 0
        """Goes up whenever the end of others may help on a node where it did not (``pods_changed_on``)."""
        self.unaccounted: dict[str, str] = {}
        """Bound pods whose devices are not known, and why: what they use is not counted."""
        self.names: list[str] = []
        """Node names by row; empty for a row without node."""
        self.rows_by_name = _RowsByName()
        """The reverse, UNKNOWN_ROW for other names."""
        self.naming_count = 0
        """Goes up whenever a name gets another row."""
        self.named_at: list[int] = []
        """What it was when a row got its name."""
        self._nodes: dict[str, _Node] = {}
        self._hosts: dict[str, tuple[int, int]] = {}
        self._most_pods: dict[str, int] = {}
        self._pods_changed: dict[str, int] = {}
        """Of each node with an inventory the ``pod_change_count`` when its pods changed last, the latest last."""
        self._pods: dict[str, PodFacts] = {}
        self._holders: dict[str, _Holder] = {}
        self._uids_on: dict[str, set[str]] = {}
        self._reservations: dict[str, Reservation] = {}
        self._gangs: dict[tuple[str, str], set[str]] = {}
        self._succeeded: dict[tuple[str, str], dict[str, PodFacts]] = {}
        self._plans: OrderedDict[str, _Plan] = OrderedDict()
        """The latest, by pod UID."""
        self._part = Part()

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

    def footprint_of(self, pod_uid: str) -> Footprint:
        """Return what a pod, bound or expected, counts with."""
        holder = self._holders.get(pod_uid)
        return _NO_FOOTPRINT if holder is None else holder.footprint

    def pods_on(self, node: str) -> Iterable[PodFacts]:
        """Return the bound pods of a node; those that are only expected there are in ``reservations``."""
        known = (self._pods.get(uid) for uid in self._uids_on.get(node, ()))
        return (pod for pod in known if pod is not None and pod.node_name == node)

    def most_pods_of(self, node: str) -> int:
        """Return how many pods a node takes; 0 where that is not known."""
        return self._most_pods.get(node, 0)

    def pods_changed_at(self, node: str) -> int:
        """Return the ``pod_change_count`` when the pods of a node, or its inventory, changed last: others may be worth ending there since.

        Bound pods that ask for GPUs count, because only those can be ended: one came, changed or went, or a reservation there expired.
        """
        return self._pods_changed.get(node, 0)

    def pods_changed_since(self, count: int) -> list[str]:
        """Return the nodes whose pods changed after ``pod_change_count`` had a value, in the order in which they did last."""
        latest_first = takewhile(lambda node: self._pods_changed[node] > count, reversed(self._pods_changed))
        return list(latest_first)[::-1]

    def gang_members(self, key: tuple[str, str]) -> Iterable[PodFacts]:
        """Return the known pods of a gang, by namespace and name."""
        return (self._pods[uid] for uid in self._gangs.get(key, ()))

    @property
    def has_gangs(self) -> bool:
        """Whether any pod is in a gang."""
        return bool(self._gangs)

    def succeeded_members(self, key: tuple[str, str]) -> Mapping[str, PodFacts]:
        """Return the pods of a gang that are known to have succeeded, by UID: until one is to be deleted, or none is left that has not."""
        return self._succeeded.get(key, {})

    def device_states(self, node: str) -> tuple[DeviceState, ...]:
        """Return the devices of a node in the form placement reasons about; none for a node without inventory."""
        known = self._nodes.get(node)
        if known is None:
            return ()
        columns, row, gpu = self.columns, known.row, known.gpu
        sums = (array[row].tolist() for array in (columns.used_mib, columns.used_cores, columns.used_shares, columns.unreserved))
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
            )
            for entry, used_mib, used_cores, used_shares, unreserved in zip(gpu.devices, *sums, strict=False)  # columns are padded
        )

    def view(self, node: str) -> NodeView:
        """Return a node in the form the scalar score reasons about."""
        known = self._nodes[node]
        columns, row = self.columns, known.row
        host = Host(
            int(columns.cpu_milli[row]), int(columns.cpu_used_milli[row]), int(columns.ram_mib[row]), int(columns.ram_used_mib[row])
        )
        matrix = matrix_of([entry.device for entry in known.gpu.devices], known.gpu.links)
        table = columns.demand_table
        return NodeView(self.device_states(node), matrix, host, table.demand, table.scarcity_of_kind)

    def plan(self, node: str, request: PodRequest, policy: Policy, pod_uid: str) -> PodAssignment | Refusal:
        """Choose devices for a pod on a node, as if the pod held nothing there yet. What nothing has changed since is not chosen anew."""
        known, columns, planned = self._nodes.get(node), self.columns, self._plans.get(pod_uid)
        if known is None:
            return plan_on_node((), request, policy, (), pod_uid)
        if planned is not None and planned.is_of(int(columns.changed[known.row]), request, policy):
            return planned.outcome
        with self.without(pod_uid):
            demand = columns.demand_table.demand
            outcome = plan_on_node(self.device_states(node), request, policy, known.gpu.links, pod_uid, demand)
        self._plans[pod_uid] = _Plan(int(columns.changed[known.row]), request, policy, outcome)
        if len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)
        return outcome

    def nominal_footprint(self, node: str, request: PodRequest, columns: Iterable[int]) -> Footprint:
        """Say what one container takes of the devices in these columns, one vGPU of each."""
        (container,), exclusive = request.containers, request.preferences.isolation is Isolation.EXCLUSIVE
        memory = None if exclusive else container.memory_bytes_per_vgpu
        cores = units.WHOLE_GPU_PERCENT if exclusive else container.cores_percent_per_vgpu
        entries = self._nodes[node].gpu.devices
        return {
            device.uuid: Use((device.memory_bytes if memory is None else memory) // units.MIB, cores or 0, 1, int(cores is None))
            for device in (entries[column].device for column in columns)
        }

    @contextmanager
    def without(self, pod_uid: str) -> Iterator[None]:
        """Leave out what a pod holds inside the block, so that it does not compete with itself."""
        holder = self._holders.get(pod_uid)
        if holder is None:
            yield
            return
        self._count(holder, -1)
        try:
            yield
        finally:
            self._count(holder, +1)

    @contextmanager
    def without_all(self, pod_uids: Iterable[str]) -> Iterator[None]:
        """Leave out what several pods hold inside the block."""
        with ExitStack() as stack:
            for uid in set(pod_uids):
                stack.enter_context(self.without(uid))
            yield

    # --- history ---

    def moment(self) -> Moment:
        """Return this moment, from which the state as it is can be made again."""
        return Moment(self._part, len(self._part.events), self.columns.demand_table.demand)

    def _note(self, event: Event) -> None:
        """Add to the history; called before the change is made."""
        if len(self._part.events) >= MAX_EVENTS:
            nodes = {name: node.gpu for name, node in self._nodes.items()}
            held = {uid: _held(reservation) for uid, reservation in self._reservations.items()}
            pods = dict(self._pods)
            for succeeded in self._succeeded.values():
                pods |= succeeded  # the last, because they count for what is there
            self._part = Part(Picture(nodes, dict(self._hosts), pods, held))
        self._part.events.append(event)

    # --- events ---

    def set_gpu_node(self, gpu: GpuNode) -> None:
        """Take a new or changed inventory."""
        known = self._nodes.get(gpu.name)
        if known is not None and known.gpu == gpu:
            return
        self._note(Event(node=gpu))
        holders = [self._holders[uid] for uid in self._uids_on.get(gpu.name, ())]
        for holder in holders:
            self._count(holder, -1)
        if known is None:
            row = self.columns.add_row()
            self._name_row(row, gpu.name)
        else:
            row = known.row
        node = self._nodes[gpu.name] = _Node(row, gpu)
        for column, entry in enumerate(gpu.devices):
            node.column_of[entry.device.uuid] = column
            node.column_of_instance.update(dict.fromkeys((instance.uuid for instance in entry.device.mig_instances), column))
        self.columns.set_inventory(row, gpu)
        self.columns.set_host(row, *self._hosts.get(gpu.name, (0, 0)))
        for holder in holders:
            self._count(holder, +1)
        self.freed_count += 1
        self.note_pods_changed(gpu.name)

    def drop_gpu_node(self, name: str) -> None:
        """Forget an inventory; the pods of the node stay known."""
        known = self._nodes.get(name)
        if known is None:
            return
        self._note(Event(node_gone=name))
        for uid in self._uids_on.get(name, ()):
            self._count(self._holders[uid], -1)
        self.columns.drop_row(known.row)
        self._name_row(known.row, "")
        del self._nodes[name]
        self._pods_changed.pop(name, None)

    def set_host(self, name: str, cpu_milli: int, ram_mib: int, most_pods: int = 0) -> None:
        """Take a node's allocatable CPU and RAM, and how many pods it takes, 0 where that is not known."""
        self._most_pods[name] = most_pods
        if self._hosts.get(name) == (cpu_milli, ram_mib):
            return
        self._note(Event(host=HostAmounts(name, cpu_milli, ram_mib)))
        self._hosts[name] = (cpu_milli, ram_mib)
        if (known := self._nodes.get(name)) is not None:
            self.columns.set_host(known.row, cpu_milli, ram_mib)

    def drop_host(self, name: str) -> None:
        """Forget a node's CPU and RAM."""
        self._most_pods.pop(name, None)
        self._note(Event(host=HostAmounts(name)))
        if self._hosts.pop(name, None) is not None and (known := self._nodes.get(name)) is not None:
            self.columns.set_host(known.row, 0, 0)

    def set_pod(self, pod: PodFacts) -> None:
        """Take a new or changed pod."""
        if not pod.active:
            self.drop_pod(pod.uid)
            self._keep_if_succeeded(pod)
            return
        before = self._pods.get(pod.uid)
        if before is not None and before.node_name and not pod.node_name:
            return  # an older picture of it: a bound pod never becomes unbound
        if before == pod and (not pod.node_name or pod.uid in self._holders):
            return  # a list tells thousands of pods again
        self._note(Event(pod=pod))
        gang = gang_of_pod(pod)
        self._pods[pod.uid] = pod
        if before is None or before.gpu != pod.gpu:
            self.wanted.see(pod)
            if before is not None and gang_of_pod(before) != gang:
                self._leave_gang(before)  # annotations change while a pod lives
            if gang is not None:
                self._gangs.setdefault(gang.key, set()).add(pod.uid)
        if gang is not None and pod.deletion_requested and not (before is not None and before.deletion_requested):
            self._succeeded.pop(gang.key, None)  # it may be restarted, and must start whole then
        if self._completes_gang(before, pod):
            self.freed_count += 1
        if _tells_failure(before, pod):
            self.end_attempt(pod.uid)
        if pod.node_name:
            if pod.gpu is not None:
                self.note_pods_changed(pod.node_name)
            self._reservations.pop(pod.uid, None)
            self._hold(pod.uid, _Holder(pod.node_name, self._footprint(pod), HostDemand(pod.cpu_milli, pod.memory_mib)))

    def drop_pod(self, uid: str) -> None:
        """Forget a pod that ended or was deleted; what it held is free."""
        self._note(Event(pod_gone=uid))
        pod = self._pods.pop(uid, None)
        if pod is not None:
            self._leave_gang(pod)
            if pod.gpu is not None and pod.node_name:
                self.note_pods_changed(pod.node_name)
        self.wanted.forget(uid)
        self.unaccounted.pop(uid, None)
        self._reservations.pop(uid, None)
        self._let_go(uid)

    def _completes_gang(self, before: PodFacts | None, pod: PodFacts) -> bool:
        """Whether a pod that came or changed is why its gang has enough members that may start."""
        gang = gang_of_pod(pod)
        if gang is None or pod.node_name or not pod.may_start:
            return False
        counted = before is not None and before.may_start
        counted_for = gang_of_pod(before) if before is not None and counted else None
        if counted_for == gang:
            return False
        count = len(self.succeeded_members(gang.key)) + sum(other.may_start for other in self.gang_members(gang.key))
        return count >= gang.minimum if counted_for is not None else count == gang.minimum

    def _leave_gang(self, pod: PodFacts) -> None:
        gang = gang_of_pod(pod)
        if gang is None:
            return
        self._gangs[gang.key].discard(pod.uid)
        if not self._gangs[gang.key]:
            del self._gangs[gang.key]
            self._succeeded.pop(gang.key, None)

    def _keep_if_succeeded(self, pod: PodFacts) -> None:
        """Count a pod that succeeded for its gang as long as this has others."""
        gang = gang_of_pod(pod)
        if gang is None or pod.gpu is None or pod.gpu.phase != SUCCEEDED or gang.key not in self._gangs:
            return
        known = self._succeeded.setdefault(gang.key, {})
        if pod.uid not in known:
            self._note(Event(pod=pod))
            known[pod.uid] = pod
            self.freed_count += 1

    def replace_gpu_nodes(self, nodes: Iterable[GpuNode]) -> None:
        """Take a full list: what is not in it is gone."""
        listed = {node.name: node for node in nodes}
        for name in self._nodes.keys() - listed.keys():
            self.drop_gpu_node(name)
        for node in listed.values():
            self.set_gpu_node(node)

    def replace_hosts(self, hosts: Mapping[str, tuple[int, int] | tuple[int, int, int]]) -> None:
        """Take a full list: what is not in it is gone."""
        for name in self._hosts.keys() - hosts.keys():
            self.drop_host(name)
        for name, amounts in hosts.items():
            self.set_host(name, *amounts)

    def replace_pods(self, pods: Iterable[PodFacts]) -> None:
        """Take a full list: what is not in it is gone. Reservations stay for a moment, because the list can be older than they are."""
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
        """Note that other pods may be worth ending on a node than before."""
        if node in self._nodes:
            self.pod_change_count += 1
            self._pods_changed.pop(node, None)
            self._pods_changed[node] = self.pod_change_count

    # --- reservations ---

    def reserve(self, reservation: Reservation) -> None:
        """Expect a pod on a node, in place of where it was expected before. A pod that is bound stays where it is."""
        pod = self._pods.get(reservation.pod_uid)
        if pod is not None and pod.node_name:
            return
        self._note(Event(held=_held(reservation)))
        self._reservations[reservation.pod_uid] = reservation
        self._hold(reservation.pod_uid, _Holder(reservation.node, reservation.footprint, reservation.demand))

    def release(self, pod_uid: str) -> None:
        """Expect a pod nowhere."""
        if self._reservations.pop(pod_uid, None) is not None:
            self._note(Event(let_go=pod_uid))
            self._let_go(pod_uid)

    def renew(self, pod_uid: str, expires_at: float) -> None:
        """Expect a pod where it is expected for at least as long."""
        known = self._reservations.get(pod_uid)
        if known is not None and known.expires_at < expires_at:
            self._reservations[pod_uid] = replace(known, expires_at=expires_at)

    def end_attempt(self, pod_uid: str) -> None:
        """Note that kube-scheduler's attempt on a pod is over: a reservation that was kept for as long as it lasts ends as others do."""
        known = self._reservations.get(pod_uid)
        if known is not None:
            self._reservations[pod_uid] = replace(known, expires_at=min(known.expires_at, known.expires_early_at))

    def confirm(self, pod_uid: str, expires_at: float) -> None:
        """Note that the API took a binding. Nothing happens when the pod has been seen bound or gone in the meantime."""
        reservation = self._reservations.get(pod_uid)
        if reservation is not None:
            self._reservations[pod_uid] = replace(reservation, stage=Stage.BOUND, expires_at=expires_at)

    def expire(self, now: float, pods_current_at: float) -> int:
        """Drop the reservations whose time is up; return how many.

        Args: pods_current_at: the moment up to which the pods' stream has told everything.
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
            return _NO_FOOTPRINT
        text = pod.gpu.annotations.get(contract.ANNOTATION_ASSIGNMENT)
        if text is None:
            self.unaccounted[pod.uid] = "it has no assignment: another scheduler bound it"
            return _NO_FOOTPRINT
        try:
            return footprint(pod.gpu.containers, codec.decode_assignment(text, pod_uid=pod.uid))
        except ContractError as exc:
            self.unaccounted[pod.uid] = str(exc)
            return _NO_FOOTPRINT

    def _hold(self, uid: str, holder: _Holder) -> None:
        if self._holders.get(uid) == holder:
            return
        self._let_go(uid)
        self._holders[uid] = holder
        self._uids_on.setdefault(holder.node, set()).add(uid)
        self._count(holder, +1)

    def _let_go(self, uid: str) -> None:
        holder = self._holders.pop(uid, None)
        if holder is None:
            return
        self._count(holder, -1)
        self._uids_on[holder.node].discard(uid)
        if not self._uids_on[holder.node]:
            del self._uids_on[holder.node]
        if holder.footprint:
            self.freed_count += 1

    def _count(self, holder: _Holder, sign: int) -> None:
        """Add what a holder takes to its node's row, or take it back. What the inventory does not have, now, is not counted."""
        node = self._nodes.get(holder.node)
        if node is None:
            return
        self.columns.add_host_use(node.row, sign * holder.demand.cpu_milli, sign * holder.demand.ram_mib)
        for uuid, use in holder.footprint.items():
            if (column := node.column_of.get(uuid)) is not None:
                self.columns.add_use(node.row, column, use, sign)
            elif uuid in node.column_of_instance:
                self._count_instance(node, uuid, sign)

    def _count_instance(self, node: _Node, uuid: str, sign: int) -> None:
        column = node.column_of_instance[uuid]
        before = node.instance_uses[uuid]
        node.instance_uses[uuid] = before + sign
        if bool(before) != bool(before + sign):
            self.columns.set_instance_used(node.row, column, uuid, used=sign > 0)

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


def _tells_failure(before: PodFacts | None, pod: PodFacts) -> bool:
    """Whether a pod shows that kube-scheduler's attempt on it failed.

    An attempt that fails just as the one before shows only in the choice of a node that is undone, and before 1.35 in nothing.
    Source: handleSchedulingFailure and updatePod of kube-scheduler.
    """
    if before is None:
        return bool(pod.failure)
    fails_otherwise = bool(pod.failure) and before.failure != pod.failure
    return fails_otherwise or (bool(before.nominated_node) and not pod.nominated_node)


def _held(reservation: Reservation) -> Held:
    stage = reservation.stage
    return Held(
        reservation.pod_uid, reservation.node, reservation.footprint, reservation.demand, firm=stage.is_firm, ready=stage is Stage.READY
    )
