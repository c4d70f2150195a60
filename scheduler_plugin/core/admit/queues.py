# SPDX-License-Identifier: Apache-2.0
"""Queues of Kueue, reduced to the GPUs that their workloads can get (kueue.x-k8s.io/v1beta2).

Kueue counts a workload before it chooses the flavor. So a share of a GPU, or a whole one, has a fixed number of MiB only if all flavors of
its queue have GPUs of one size.

Source: apis/kueue/v1beta2 of Kueue 0.19.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from aliquot import contract
from aliquot.contract.model import Preferences
from scheduler_plugin.core.admit.kueue import Flavor
from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeRules, Toleration, rules_of
from scheduler_plugin.core.cluster.objects import Metadata
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.fit.columnar import device_sizes

QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Of an object, with the name of a LocalQueue in its namespace."""
_ANY_TAINT: Final = (Toleration(operator="Exists"),)


@dataclass(frozen=True, slots=True)
class Queue:
    """What a ClusterQueue says about GPU memory."""

    name: str
    flavors: tuple[Flavor, ...]
    """Those that count GPU memory."""
    counts_percentages: bool = False
    """Whether it has a quota for percentages."""

    def flavors_for(self, rules: NodeRules) -> Sequence[Flavor]:
        """Return the flavors that Kueue may choose for a pod: it tolerates their taints, and its rules allow their labels.

        The rules count for all keys that any of the flavors has.
        """
        keys = {key for flavor in self.flavors for key in flavor.labels}
        return [
            flavor
            for flavor in self.flavors
            if rules.agree_with(flavor.labels, keys) and rules.narrowed({}, flavor.tolerations).tolerate(flavor.taints)
        ]


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
        return Queue(self.name, tuple(flavors[name] for name in group.flavors), percentages)


class GpuSizes:
    """The memory sizes of the GPUs on which a pod can run."""

    def __init__(self, state: ClusterState, directory: NodeDirectory) -> None:
        self._state = state
        self._directory = directory

    def __call__(self, spec: Mapping[str, Any], queue: Queue | None, preferences: Preferences) -> set[int]:
        """Return the sizes in MiB: of the nodes that the pod's own rules and one of the queue's flavors allow.

        Empty if they are not known: a flavor of the queue has no GPU now, as of a node pool at zero, and the pod names no model.

        Args:
            spec: of the pod.
        """
        everywhere = device_sizes(self._state.columns, preferences)
        try:
            rules = rules_of(spec)
        except msgspec.ValidationError:  # the API server refuses this spec
            return everywhere
        if queue is None:
            return self._on(rules, preferences) or everywhere
        found = [self._on(rules.narrowed(flavor.labels), preferences) for flavor in queue.flavors_for(rules)]
        if found and all(found):
            return set().union(*found)
        return everywhere if preferences.gpu_type else set()

    def _on(self, rules: NodeRules, preferences: Preferences) -> set[int]:
        """Return the sizes on the nodes with the labels that some rules require. Taints do not count: a cordon changes no size."""
        if not rules.selector and rules.terms is None:
            return device_sizes(self._state.columns, preferences)
        names = self._directory.allowed(replace(rules, tolerations=_ANY_TAINT))
        rows = (self._state.row_of(name) for name in names)
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
