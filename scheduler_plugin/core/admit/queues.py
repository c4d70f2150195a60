# SPDX-License-Identifier: Apache-2.0
"""Queues of Kueue, reduced to the GPUs that their workloads can get (kueue.x-k8s.io/v1beta2).

Kueue counts a workload before it chooses the flavor. So a share of a GPU, or a whole one, has a fixed number of MiB only if all flavors of
its queue have GPUs of one size.

Source: apis/kueue/v1beta2 of Kueue 0.19.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract.model import Preferences
from scheduler_plugin.core.admit.kueue import Flavor
from scheduler_plugin.core.admit.nodes import NodeDirectory, NodeRules, Toleration, rules_of
from scheduler_plugin.core.cluster.objects import Metadata
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import device_sizes

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Of an object, with the name of a LocalQueue in its namespace."""
DEFAULT_QUEUE: Final = "default"
"""Kueue gives an object without the label to the LocalQueue of this name, if its namespace has one."""
_ANY_TAINT: Final = (Toleration(operator="Exists"),)
_MOST_KEPT: Final = 256
_NO_LABELS: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Queue:
    """What a ClusterQueue says about GPU memory."""

    name: str
    flavors: tuple[Mapping[str, str], ...]
    """Of each flavor that counts GPU memory, the labels of its nodes."""
    counts_percentages: bool = False
    """Whether it has a quota for percentages."""


class LocalQueue(msgspec.Struct, frozen=True):
    """A LocalQueue: the name of a ClusterQueue in one namespace."""

    namespace: str
    name: str
    cluster_queue: str

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name


class ResourceGroup(msgspec.Struct, frozen=True):
    """Resources that a ClusterQueue counts together, and their flavors."""

    resources: frozenset[str]
    flavors: tuple[str, ...]


class ClusterQueue(msgspec.Struct, frozen=True):
    """A ClusterQueue."""

    name: str
    groups: tuple[ResourceGroup, ...] = ()

    def queue(self, flavors: Mapping[str, Flavor]) -> Queue | None:
        """Return what it says about GPU memory; None if it counts none, or names a flavor that does not exist."""
        group = next((one for one in self.groups if contract.RESOURCE_VGPU_MEMORY in one.resources), None)
        if group is None or not all(name in flavors for name in group.flavors):
            return None
        percentages = any(contract.RESOURCE_VGPU_MEMORY_PERCENT in one.resources for one in self.groups)
        return Queue(self.name, tuple(flavors[name].labels for name in group.flavors), percentages)


class GpuSizes:
    """The memory sizes of the GPUs on which a pod can run. Kept until a node changes: the nodes of equal rules, as many pods have."""

    def __init__(self, state: ClusterState, directory: NodeDirectory) -> None:
        self._state = state
        self._directory = directory
        self._nodes: dict[NodeRules, frozenset[str]] = {}
        self._nodes_at = directory.version

    def __call__(self, spec: Mapping[str, Any], queue: Queue | None, preferences: Preferences) -> set[int]:
        """Return the sizes in MiB: of the nodes that the pod's own rules and one of the queue's flavors allow.

        If no GPU is known there, or none of one flavor, as of a node pool at zero, the GPUs of the whole cluster count.

        Args:
            spec: of the pod.
        """
        everywhere = device_sizes(self._state.columns, preferences)
        if len(everywhere) < 2:  # the usual cluster: no node's labels are read
            return everywhere
        try:
            own = replace(rules_of(spec), tolerations=_ANY_TAINT)
        except msgspec.ValidationError:  # the API server refuses this spec
            return everywhere
        flavors = queue.flavors if queue is not None else (_NO_LABELS,)
        if not any(flavors) and not own.selector and own.terms is None:
            return everywhere
        found = [self._on(own.narrowed(labels), preferences) for labels in flavors if own.agree_with(labels)]
        return set().union(*found) if found and all(found) else everywhere

    def _on(self, rules: NodeRules, preferences: Preferences) -> set[int]:
        if self._nodes_at != self._directory.version or len(self._nodes) >= _MOST_KEPT:
            self._nodes.clear()
            self._nodes_at = self._directory.version
        if rules not in self._nodes:
            self._nodes[rules] = self._directory.allowed(rules)
        rows = (self._state.row_of(name) for name in self._nodes[rules])
        return device_sizes(self._state.columns, preferences, [row for row in rows if row is not None])


# --- decoding ---


class _LocalQueueSpec(msgspec.Struct, rename="camel"):
    cluster_queue: str = ""


class _LocalQueueObject(msgspec.Struct):
    metadata: Metadata
    spec: _LocalQueueSpec = msgspec.field(default_factory=_LocalQueueSpec)


class _FlavorQuotas(msgspec.Struct):
    name: str


class _Group(msgspec.Struct, rename="camel"):
    covered_resources: frozenset[str] = frozenset()
    flavors: tuple[_FlavorQuotas, ...] = ()


class _ClusterQueueSpec(msgspec.Struct, rename="camel"):
    resource_groups: tuple[_Group, ...] | None = None


class _ClusterQueueObject(msgspec.Struct):
    metadata: Metadata
    spec: _ClusterQueueSpec = msgspec.field(default_factory=_ClusterQueueSpec)


def decode_local_queue(raw: bytes | msgspec.Raw) -> LocalQueue:
    """Read a LocalQueue. Raises msgspec.DecodeError."""
    item = msgspec.json.decode(raw, type=_LocalQueueObject)
    return LocalQueue(item.metadata.namespace, item.metadata.name, item.spec.cluster_queue)


def decode_cluster_queue(raw: bytes | msgspec.Raw) -> ClusterQueue:
    """Read a ClusterQueue. Raises msgspec.DecodeError."""
    item = msgspec.json.decode(raw, type=_ClusterQueueObject)
    groups = (ResourceGroup(one.covered_resources, tuple(flavor.name for flavor in one.flavors)) for one in item.spec.resource_groups or ())
    return ClusterQueue(item.metadata.name, tuple(groups))
