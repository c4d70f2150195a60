# SPDX-License-Identifier: Apache-2.0
"""A cache of this node and its pods, as the Kubernetes API last sent them. On the event loop.

The watching threads hand over with ``call_soon_threadsafe``, so code on the loop sees one consistent state. During an outage the cache
keeps its last state; ``fresh`` says whether it is current.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from agent.ports.kube import GpuNodeState, NodeState
from agent.services.changes import Changes
from aliquot import contract
from aliquot.contract.model import Pod

logger = logging.getLogger(__name__)

PODS = "pods"


class PodCache:
    """Implements ``ports.KubeListener``; made on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._by_uid: dict[str, Pod] = {}
        self._by_name: dict[tuple[str, str], Pod] = {}
        self._trouble: dict[str, str] = {}
        self.synced = False
        """Whether the pods were listed at least once."""
        self.node: NodeState | None = None
        self.pod_changes = Changes()
        self.node_changes = Changes()
        self.gpu_node: GpuNodeState | None = None
        self.gpu_node_known = False
        """Whether the API has reported if this node has a gpunodes object."""
        self.gpu_node_changes = Changes()

    @property
    def fresh(self) -> bool:
        """Whether the pods are known and the last request to the API succeeded."""
        return self.synced and not self._trouble.get(PODS)

    @property
    def trouble(self) -> str:
        """Why the pods are not current; empty while they are."""
        return self._trouble.get(PODS, "") or ("" if self.synced else "the pods of this node have not been listed yet")

    @property
    def gpu_node_trouble(self) -> str:
        """Why the gpunodes object is not current; empty while it is, and before the first request."""
        return self._trouble.get(contract.GPU_NODE_PLURAL, "")

    @property
    def by_uid(self) -> Mapping[str, Pod]:
        """All known pods."""
        return self._by_uid

    def startable(self, namespace: str, name: str) -> Pod | None:
        """Return the pod of this name if its containers may start: not a pod that has ended or is being deleted."""
        pod = self._by_name.get((namespace, name))
        return pod if pod is not None and pod.active and not pod.deletion_requested else None

    def all_startable(self) -> tuple[Pod, ...]:
        """Return the pods that may start containers."""
        return tuple(pod for pod in self._by_name.values() if pod.active and not pod.deletion_requested)

    def is_active(self, uid: str) -> bool:
        """Whether the pod of this UID exists and has not ended."""
        pod = self._by_uid.get(uid)
        return pod is not None and pod.active

    async def wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait for a condition on the pods; False when the time is up first."""
        deadline = self._loop.time() + timeout_seconds
        while not condition():
            left = deadline - self._loop.time()
            if left <= 0:
                return False
            await self.pod_changes.after(self.pod_changes.count, left)
        return True

    # --- ports.KubeListener: called in the watching threads ---

    def pods_listed(self, pods: Sequence[Pod]) -> None:
        """See ``ports.KubeListener``."""
        self._hand_over(self._replace, pods)

    def pod_changed(self, pod: Pod) -> None:
        """See ``ports.KubeListener``."""
        self._hand_over(self._put, pod)

    def pod_deleted(self, pod: Pod) -> None:
        """See ``ports.KubeListener``."""
        self._hand_over(self._drop, pod)

    def node_changed(self, node: NodeState) -> None:
        """See ``ports.KubeListener``."""
        self._hand_over(self._take_node, node)

    def gpu_node_seen(self, gpu_node: GpuNodeState | None) -> None:
        """See ``ports.KubeListener``."""
        self._hand_over(self._take_gpu_node, gpu_node)

    def api_trouble(self, what: str, trouble: str) -> None:
        """See ``ports.KubeListener``."""
        self._hand_over(self._take_trouble, what, trouble)

    def _hand_over(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop was closed: the process is ending
            return

    # --- on the event loop ---

    def _replace(self, pods: Sequence[Pod]) -> None:
        self._by_uid = {pod.uid: pod for pod in pods}
        self._by_name = {(pod.namespace, pod.name): pod for pod in pods}
        self.synced = True
        self.pod_changes.notify()

    def _put(self, pod: Pod) -> None:
        key = (pod.namespace, pod.name)
        namesake = self._by_name.get(key)
        if namesake is not None and namesake.uid != pod.uid:
            self._by_uid.pop(namesake.uid, None)
        self._by_uid[pod.uid] = pod
        self._by_name[key] = pod
        self.pod_changes.notify()

    def _drop(self, pod: Pod) -> None:
        self._by_uid.pop(pod.uid, None)
        namesake = self._by_name.get((pod.namespace, pod.name))
        if namesake is not None and namesake.uid == pod.uid:
            del self._by_name[pod.namespace, pod.name]
        self.pod_changes.notify()

    def _take_node(self, node: NodeState) -> None:
        if node != self.node:
            self.node = node
            self.node_changes.notify()

    def _take_gpu_node(self, gpu_node: GpuNodeState | None) -> None:
        if gpu_node != self.gpu_node or not self.gpu_node_known:
            self.gpu_node, self.gpu_node_known = gpu_node, True
            self.gpu_node_changes.notify()
            self.pod_changes.notify()  # a waiting PreStart waits for this, too

    def _take_trouble(self, what: str, trouble: str) -> None:
        before = self._trouble.get(what, "")
        if bool(before) != bool(trouble):
            logger.log(logging.WARNING if trouble else logging.INFO, "watching %s: %s", what, trouble or "the API answers")
        self._trouble[what] = trouble
        if bool(before) != bool(trouble):
            self.pod_changes.notify()
