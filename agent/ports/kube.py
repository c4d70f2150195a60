# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API: what is watched, published and posted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent.core.publishing import NodeCondition
from aliquot.contract.gpunode import Cordon
from aliquot.contract.model import Pod


@dataclass(frozen=True, slots=True)
class NodeState:
    """The part of the Node object the agent watches."""

    uid: str
    capacity: Mapping[str, str]
    allocatable: Mapping[str, str]
    runtime_version: str = ""
    """Such as ``containerd://2.1.4``."""
    kubelet_version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus_healthy: NodeCondition | None = None
    """The condition that the agent publishes; None before it was published."""


@dataclass(frozen=True, slots=True)
class GpuNodeState:
    """This node's gpunodes object, as read from the API."""

    cordon: Cordon | None
    """None when it is invalid."""
    trouble: str
    """Why the cordon is invalid; empty when it is valid."""
    status: Mapping[str, object]
    """As decoded from JSON; empty before an agent published it."""


class KubeListener(Protocol):
    """Receives what list-watch reads. Called in the watching thread; implementations hand over to the event loop."""

    def pods_listed(self, pods: Sequence[Pod]) -> None:
        """Take all pods of the node. Pods that are not in the list have gone."""
        ...

    def pod_changed(self, pod: Pod) -> None:
        """A pod was added or changed."""
        ...

    def pod_deleted(self, pod: Pod) -> None:
        """A pod was deleted."""
        ...

    def node_changed(self, node: NodeState) -> None:
        """The node object was read or changed."""
        ...

    def gpu_node_seen(self, gpu_node: GpuNodeState | None) -> None:
        """The node's gpunodes object was read or changed; None when it does not exist."""
        ...

    def api_trouble(self, what: str, trouble: str) -> None:
        """List-watch of ``what`` fails with this error; empty when it works again."""
        ...


@dataclass(frozen=True, slots=True)
class PodEvent:
    """One event about a pod, for ``kubectl describe``."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    reason: str
    message: str
    warning: bool


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One event about this node, for ``kubectl describe``."""

    node: str
    node_uid: str
    reason: str
    message: str
    warning: bool


class KubeApi(Protocol):
    """Requests to the Kubernetes API, called in a thread. They raise KubeApiError."""

    def publish_capacity(self, node_name: str, capacity: Mapping[str, int]) -> None:
        """Set extended resources in the node's status."""
        ...

    def publish_condition(self, node_name: str, condition: NodeCondition, *, turned: bool) -> None:
        """Set the agent's condition in the node's status. ``turned``: whether it changes between true and false."""
        ...

    def create_gpu_node(self, node_name: str, node_uid: str) -> None:
        """Create the node's gpunodes object, owned by the node so that it is deleted with it."""
        ...

    def publish_gpu_node(self, node_name: str, status: Mapping[str, object]) -> Mapping[str, object]:
        """Replace the status of the node's gpunodes object; return it as the API stored it."""
        ...

    def post_event(self, event: PodEvent | NodeEvent, happened_at: float) -> None:
        """Create an event. Raises KubeRefusedError when a retry cannot succeed.

        Args: happened_at: in seconds since 1970.
        """
        ...

    def evict_pod(self, namespace: str, name: str, uid: str) -> None:
        """Evict a pod, if it still has this UID. The Eviction API respects disruption budgets."""
        ...


class KubeWatch(Protocol):
    """List-watch streams, each in its own thread."""

    def start(self, listener: KubeListener) -> None:
        """Start the streams; they run until ``stop`` or the end of the process."""
        ...

    def stop(self) -> None:
        """End the streams."""
        ...
