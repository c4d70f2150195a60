# SPDX-License-Identifier: Apache-2.0
"""The effect of kube-scheduler's own filters on explanations and trials, as far as it is known here.

filter does not need them: kube-scheduler applies them before it calls. An explanation or a trial has no such call. So it checks the free
CPU and RAM of hosts itself, checks only the nodes of kube-scheduler's last call if that is known, and lists what it cannot check.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from scheduler_plugin.core.cluster.columns import Bools, Columns, Rows
from scheduler_plugin.core.cluster.decisions import QueriedNodes
from scheduler_plugin.core.cluster.state import ClusterState
from scheduler_plugin.core.score.cost import HostDemand

NO_HOST_ROOM: Final = "not enough free CPU or RAM on the host"
LEFT_OUT: Final = "excluded by kube-scheduler's own filters (selectors, affinity, taints, CPU, RAM, GPU amounts of the whole node, ...)"
SENTENCES: Final = (NO_HOST_ROOM, LEFT_OUT)
"""All reasons of an explanation besides those of ``NodeReason``."""
NOT_CHECKED: Final = "node selectors, affinity, taints, readiness of nodes, topology spread, volumes, ports and number of pods"
"""What only kube-scheduler can check."""


def host_has_room(columns: Columns, rows: Rows, demand: HostDemand) -> Bools:
    """Return which rows have enough free CPU and RAM for a pod, as plugin NodeResourcesFit does: requests against allocatable.

    A resource that the pod does not request is not checked. An unknown host has room. Derived columns must be up to date.
    """
    room = np.ones(len(rows), dtype=np.bool_)
    if demand.cpu_milli:
        room &= columns.cpu_free_milli[rows] >= demand.cpu_milli
    if demand.ram_mib:
        room &= columns.ram_free_mib[rows] >= demand.ram_mib
    return room


@dataclass(frozen=True, slots=True)
class Scope:
    """The nodes with an inventory, split by whether one pod may use them."""

    judged: Rows
    left_out: Rows | None = None
    """The nodes that kube-scheduler's own filters excluded at its last call; None if it has not called."""

    @classmethod
    def of(cls, state: ClusterState, asked: QueriedNodes | None = None) -> "Scope":
        """Split all nodes. Nodes that came after kube-scheduler's call are judged: it did not exclude them."""
        rows = np.array([row for row, name in enumerate(state.names) if name], dtype=np.int64)
        if asked is None:
            return cls(rows)
        later = np.array(state.named_at, dtype=np.int64)[rows] > asked.naming
        judged = later | np.isin(rows, asked.rows())
        return cls(rows[judged], rows[~judged])

    def with_host_room(self, columns: Columns, demand: HostDemand) -> Rows:
        """Return the judged rows with enough CPU and RAM."""
        return self.judged[host_has_room(columns, self.judged, demand)]
