# SPDX-License-Identifier: Apache-2.0
"""Records what filter and prioritize decided, with the inputs that explanations and replays need."""

from collections.abc import Callable
from dataclasses import replace

from scheduler_plugin.core.cluster.decisions import Choice, Decision, Decisions, GangDecision, QueriedNodes, Record
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.extender.node_list import NodeList, NodeLists


class DecisionLog:
    """Writes to ``decisions``."""

    def __init__(self, state: ClusterState, nodes: NodeLists) -> None:
        self.decisions = Decisions()
        self.on_decision: Callable[[Decision], None] = lambda _: None
        """Called with each decision."""
        self.on_invalid: Callable[[], None] = lambda: None
        """Called for each filter call that is refused because the pod's GPU request or gang annotation is invalid. There is no decision
        then."""
        self._state = state
        self._nodes = nodes

    def record(self, decision: Decision, nodes: NodeList, gang: GangDecision | None = None) -> None:
        """Keep filter's decision and the nodes of the call. Args: gang: for a gang member, what its decision depended on."""
        if not decision.fitting:
            decision = replace(decision, asked=QueriedNodes.of(nodes.known, self._nodes.naming))
        self.on_decision(decision)
        moment = self._state.moment() if gang is None else gang.moment
        self.decisions.record(decision, Record(decision, moment, self._nodes.names_by_row, nodes.known, gang=gang))

    def note_choice(self, pod_uid: str, nodes: NodeList, row: int, score: int) -> None:
        """Add prioritize's best node, its score and the nodes of the call to a pod's decision."""
        choice = Choice(self._state.names[row], score, self._state.moment(), self._nodes.names_by_row, nodes.known)
        self.decisions.chose(pod_uid, choice)
