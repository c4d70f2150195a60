# SPDX-License-Identifier: Apache-2.0
"""The policies of a simulation: ours, and the published formulas of others on the same state.

frag, binpack, spread, topology   the scheduler's own, also with changed weights: ``frag:cpu_used=0``
kube-least-allocated              kube-scheduler's defaults: they count CPU and RAM, and the lowest GPUs that fit are taken
kube-most-allocated               NodeResourcesFit with MostAllocated over CPU, RAM and GPUs
hami-binpack                      HAMi with binpack for nodes and GPUs: the node, then the GPU, with the most in use
hami-default                      HAMi's defaults: binpack for nodes, spread for GPUs
kai-binpack                       KAI Scheduler: a GPU that is already shared first, then the node with the fewest idle GPUs
fgd, bestfit, ...                 the policies of FGD's evaluation (``aliquot_lab.simulate.baselines``)

HAMi's and KAI's are models of their formulas, not their programs. HAMi rates nodes by what is in use before the pod. Pods without GPUs go
where kube-scheduler's defaults send them; KAI packs them by CPU. Among equal nodes a hash decides, as for ours. A MIG instance is chosen
by the scheduler's plan on the node, for every policy.

Sources: HAMi pkg/scheduler/policy/{node,gpu}_policy.go; KAI pkg/scheduler/plugins/{nodeplacement,gpusharingorder,gpupack}.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from aliquot.placement.fit import reject_reason
from aliquot_lab.simulate import baselines
from aliquot_lab.simulate.engine import Bools, Floats, Ints
from aliquot_lab.simulate.kube_scores import default_scores, most_allocated_scores, used_parts
from aliquot_lab.simulate.run import PolicyError
from aliquot_lab.simulate.timeline.cluster import Choice, Chooser, Prepared, SimulatedCluster
from aliquot_lab.simulate.timeline.model import WHOLE_MILLI, PodKind, SimPod
from aliquot_lab.simulate.trace import PodClass, TraceNode, TracePod
from scheduler_plugin.core.fit.judge import best_row
from scheduler_plugin.core.fit.shapes import Verdict

_KAI_SHARED: Final = 1000
_KAI_DENSITY: Final = 9


class Scheduler:
    """Our own policies: the best score, and the plan on the node."""

    def __init__(self, cluster: SimulatedCluster, *, rates_cpu_pods: bool = True) -> None:
        self._cluster = cluster
        self._rates_cpu_pods = rates_cpu_pods

    def choose(self, pod: SimPod, prepared: Prepared, verdict: Verdict, rows: Ints) -> Choice | None:
        """Choose as prioritize and bind do."""
        uid = self._cluster.uid_of(pod)
        if pod.kind.has_gpu or self._rates_cpu_pods:
            return Choice(best_row(self._cluster.shapes, verdict, rows, uid))
        return Choice(_first_best(self._cluster, default_scores(self._cluster.state, rows, prepared.shape.demand), rows, uid))

    def hold(self, pod: SimPod, choice: Choice) -> None:
        """Do nothing: the cluster's state has all that counts."""

    def release(self, pod: SimPod) -> None:
        """Do nothing, as ``hold``."""


class Formula(Scheduler):
    """A formula for nodes on the columns of the state, and an order of the devices of the node. Subclasses state both."""

    def choose(self, pod: SimPod, prepared: Prepared, verdict: Verdict, rows: Ints) -> Choice | None:
        """Choose the row with the highest score, and the first of its devices that fit."""
        row = _first_best(self._cluster, self.score(pod.kind, prepared, rows), rows, self._cluster.uid_of(pod))
        if not pod.kind.gpus:
            return Choice(row)
        (container,), preferences = prepared.request.containers, prepared.request.preferences
        states = self._cluster.state.device_states(self._cluster.state.names[row])
        fitting = [column for column, state in enumerate(states) if reject_reason(state, container, preferences) is None]
        used = self.used(row)
        ordered = sorted(fitting, key=lambda column: (self.device_key(float(used[column])), column))
        return Choice(row, tuple(ordered[: pod.kind.gpus]))

    def score(self, kind: PodKind, prepared: Prepared, rows: Ints) -> Ints | Floats:
        """Score rows that fit; higher is better."""
        del kind
        return default_scores(self._cluster.state, rows, prepared.shape.demand)

    def device_key(self, used: float) -> float:
        """Return the key by which devices are taken, the lowest first. Args: used: how much of the device is in use."""
        del used
        return 0.0

    def used(self, row: int) -> Floats:
        """Return for each device of a row how much of it is in use: the sum of the parts of shares, compute and memory."""
        columns = self._cluster.state.columns
        shares = columns.used_shares[row] / np.maximum(columns.max_shares[row], 1)
        memory = columns.used_mib[row] / np.maximum(columns.capacity_mib[row], 1)
        total: Floats = shares + columns.used_cores[row] / 100 + memory
        return total

    def idle(self, rows: Ints) -> Bools:
        """Return which devices of rows have no pod."""
        columns = self._cluster.state.columns
        unused: Bools = columns.present[rows] & (columns.used_shares[rows] == 0) & (columns.used_instances[rows] == 0)
        return unused


class KubeMostAllocated(Formula):
    """See the module's docstring."""

    def score(self, kind: PodKind, prepared: Prepared, rows: Ints) -> Ints:
        """Score by CPU, RAM and GPU memory."""
        columns, state = self._cluster.state.columns, self._cluster.state
        gpu = np.full(len(rows), np.nan)
        if kind.has_gpu:
            capacity = np.maximum(columns.capacity_mib[rows].sum(axis=1), 1)
            each = np.array([kind.memory_mib_on(int(most)) for most in columns.capacity_mib[rows].max(axis=1)])
            gpu = np.minimum(1.0, (columns.used_mib[rows].sum(axis=1) + kind.gpus * each) / capacity)
        return most_allocated_scores(state, rows, prepared.shape.demand, gpu)


class Hami(Formula):
    """See the module's docstring."""

    def score(self, kind: PodKind, prepared: Prepared, rows: Ints) -> Ints | Floats:
        """Score by the sums of shares, compute and memory in use."""
        if not kind.has_gpu:
            return super().score(kind, prepared, rows)
        columns = self._cluster.state.columns
        devices = np.maximum(columns.devices[rows], 1)
        shares = columns.used_shares[rows].sum(axis=1) / (devices * np.maximum(columns.max_shares[rows], 1))
        cores = columns.used_cores[rows].sum(axis=1) / (devices * 100)
        memory = columns.used_mib[rows].sum(axis=1) / np.maximum(columns.capacity_mib[rows].sum(axis=1), 1)
        total: Floats = 10 * (shares + cores + memory)
        return total

    def device_key(self, used: float) -> float:
        """Take the emptiest first: HAMi's default for GPUs is spread."""
        return used


class HamiBinpack(Hami):
    """See the module's docstring."""

    def device_key(self, used: float) -> float:
        """Take the fullest first."""
        return -used


class KaiBinpack(Formula):
    """See the module's docstring."""

    def score(self, kind: PodKind, prepared: Prepared, rows: Ints) -> Floats:
        """Score by the density of GPUs, or of CPU; a shared GPU with room counts more than any density."""
        state, columns = self._cluster.state, self._cluster.state.columns
        if not kind.has_gpu:
            return _density(1.0 - used_parts(state, rows, prepared.shape.demand)[0])
        idle = self.idle(rows)
        density = _density(idle.sum(axis=1).astype(np.float64))
        if not kind.shared:
            return density
        wanted = columns.capacity_mib[rows] * (kind.memory_percent or 0) // 100 if kind.memory_mib is None else kind.memory_mib
        memory = columns.free_mib[rows] >= np.maximum(wanted, 1)
        cores = columns.free_cores[rows] >= (kind.cores_percent or 0)
        reuses = (columns.shareable[rows] & ~idle & memory & cores & (columns.free_shares[rows] > 0)).any(axis=1)
        scores: Floats = density + _KAI_SHARED * reuses
        return scores

    def device_key(self, used: float) -> float:
        """Take the fullest first."""
        return -used


class Published(Scheduler):
    """A policy of FGD's evaluation. It keeps its own arrays, in parts of GPUs: of memory and compute the larger counts.

    Several shares of a pod count as whole GPUs, because these policies know no others. So it may see no room where the scheduler does.
    """

    def __init__(self, cluster: SimulatedCluster, policy: str, pods: list[SimPod], seed: int) -> None:
        super().__init__(cluster)
        self._memory = _memory_size(cluster, policy)
        names = list(cluster.nodes)
        nodes = [
            TraceNode(node.name, node.cpu_milli, node.ram_mib, 0 if node.mig else node.gpus, node.model) for node in cluster.nodes.values()
        ]
        listed = [TracePod(pod.name, self._class_of(pod.kind)) for pod in pods]
        self._engine = baselines.make(policy, nodes, listed, seed)
        self._rows = [cluster.state.rows_by_name[name] for name in names]
        self._number = {row: number for number, row in enumerate(self._rows)}

    def choose(self, pod: SimPod, prepared: Prepared, verdict: Verdict, rows: Ints) -> Choice | None:
        """Choose by the policy's arrays; for a MIG instance the first node by name."""
        if pod.kind.mig:
            return Choice(int(rows[0]))
        best = self._engine.best_place(self._class_of(pod.kind))
        if best is None or self._rows[best[0]] not in rows:
            return None
        node, gpus = best
        if not pod.kind.gpus:
            return Choice(self._rows[node])
        return Choice(self._rows[node], tuple(gpus.tolist())) if self._fits(prepared, self._rows[node], gpus) else None

    def hold(self, pod: SimPod, choice: Choice) -> None:
        """Count the pod in the arrays."""
        gpus = np.array(choice.columns or (), dtype=np.int64)
        self._engine.hold(pod.name, self._class_of(pod.kind), self._number[choice.row], gpus)

    def release(self, pod: SimPod) -> None:
        """Count the pod no longer."""
        self._engine.release(pod.name)

    def _fits(self, prepared: Prepared, row: int, gpus: Ints) -> bool:
        """Whether the scheduler's rules let the pod use these devices: the arrays do not know the number of shares."""
        (container,), preferences = prepared.request.containers, prepared.request.preferences
        states = self._cluster.state.device_states(self._cluster.state.names[row])
        return all(reject_reason(states[gpu], container, preferences) is None for gpu in gpus.tolist())

    def _class_of(self, kind: PodKind) -> PodClass:
        if not kind.gpus:
            return PodClass(kind.cpu_milli, kind.ram_mib, 0, 0, frozenset())
        milli = WHOLE_MILLI
        if kind.gpus == 1 and kind.shared:
            memory = -(-WHOLE_MILLI * kind.memory_mib_on(self._memory) // self._memory)
            milli = min(WHOLE_MILLI, max(memory, (kind.cores_percent or 0) * 10))
        return PodClass(kind.cpu_milli, kind.ram_mib, kind.gpus, milli, self._models(kind))

    def _models(self, kind: PodKind) -> frozenset[str]:
        """Return the models of nodes that a pod accepts, by parts of their names as in the scheduler; empty: any."""
        known = {node.model for node in self._cluster.nodes.values()}
        return frozenset(model for model in known if any(part.lower() in model.lower() for part in kind.models))


def _memory_size(cluster: SimulatedCluster, policy: str) -> int:
    sizes = sorted({node.gpu_memory_mib for node in cluster.nodes.values() if node.gpus and not node.mig})
    if len(sizes) != 1:
        found = ", ".join(f"{size} MiB" for size in sizes) or "none"
        raise PolicyError(f"policy {policy} knows parts of GPUs only: expected GPUs of one memory size outside MIG mode, found {found}")
    return sizes[0]


def _density(free: Floats) -> Floats:
    """Return KAI's score of density: the most for the row with the least free."""
    least, most = float(free.min()), float(free.max())
    scores: Floats = np.zeros(len(free)) if most == least else _KAI_DENSITY * (1 - (free - least) / (most - least))
    return scores


def _first_best(cluster: SimulatedCluster, scores: Ints | Floats, rows: Ints, uid: str) -> int:
    best = rows[scores == scores.max()]
    return int(best[cluster.shapes.tie_break(best, uid)])


FORMULAS: Final[Mapping[str, type[Formula]]] = {
    "kube-least-allocated": Formula,
    "kube-most-allocated": KubeMostAllocated,
    "hami-binpack": HamiBinpack,
    "hami-default": Hami,
    "kai-binpack": KaiBinpack,
}


def make_chooser(cluster: SimulatedCluster, policy: str, pods: list[SimPod], seed: int, *, rates_cpu_pods: bool) -> Chooser:
    """Create the chooser of a policy. Raises PolicyError: it does not suit the nodes."""
    if policy in FORMULAS:
        return FORMULAS[policy](cluster)
    if policy in baselines.BASELINES:
        return Published(cluster, policy, pods, seed)
    return Scheduler(cluster, rates_cpu_pods=rates_cpu_pods)
