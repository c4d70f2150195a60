# SPDX-License-Identifier: Apache-2.0
"""Which nodes a pod that waits or moves may use.

Where the labels and taints of nodes are known, the pod's selector, required affinity and tolerations decide. Elsewhere a pod that requires
labels is left out, and other pods use nodes that no taint closes. Two things are stricter than in kube-scheduler. While Kubernetes closes a
node for its condition, such as during a drain, it takes no pod, whatever the pod tolerates. And kube-scheduler alone checks what
``is_picky`` lists, so a pod with that is left out.
"""

from scheduler_plugin.core.cluster.nodes import NodeDirectory, NodeRules
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState


def unknown_because(pod: PodFacts, directory: NodeDirectory) -> str:
    """Say why it is unknown which nodes a pod may use; empty if it is known."""
    if pod.is_picky:
        return "its volumes, ports, claims, other resources or rules about other pods are known to kube-scheduler only"
    if pod.is_confined and _rules(pod, directory) is None:
        return "it requires labels of its node, which the scheduler has not read: featureGates: Consolidation=true makes it read them"
    return ""


class Reach:
    """The nodes for each pod of one state, which does not change its nodes meanwhile."""

    def __init__(self, state: ClusterState, directory: NodeDirectory) -> None:
        unknown = (state.pods[uid].node_name for uid in state.unaccounted if uid in state.pods)
        self._state = state
        self._directory = directory
        self._clear = frozenset(name for name in state.names if name).difference(unknown)
        """Nodes where it is known which GPUs every pod uses."""
        self.open = self._clear - state.closed_nodes
        """Those of them that no taint closes, except for the one of GPU nodes."""
        self._found: dict[NodeRules, frozenset[str]] = {}

    def nodes_for(self, pod: PodFacts) -> frozenset[str]:
        """Return the names of the nodes that a pod may use; none if that is unknown."""
        if unknown_because(pod, self._directory):
            return frozenset()
        rules = _rules(pod, self._directory)
        if rules is None:
            return self.open
        if rules not in self._found:
            self._found[rules] = self._directory.are_ready(self._directory.allowed(rules) & self._clear)
        return self._found[rules]


def _rules(pod: PodFacts, directory: NodeDirectory) -> NodeRules | None:
    """Return the rules of a pod, if it can be checked which nodes meet them."""
    return None if directory.is_empty else pod.nodes
