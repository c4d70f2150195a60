"""What kube-scheduler's own filters mean for an explanation or a trial, as far as it can be told here.

Filter leaves them out: kube-scheduler applies them before it asks. Nobody does before an explanation or a trial, so these count the free
CPU and RAM of hosts themselves, look only at the nodes that kube-scheduler last asked about where that is known, and say what they cannot
see.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from scheduler_plugin.core.columns import Bools, Columns, Rows
from scheduler_plugin.core.decisions import AskedNodes
from scheduler_plugin.core.score import HostDemand
from scheduler_plugin.core.state import ClusterState

NO_HOST_ROOM: Final = "not enough free CPU or RAM on the host"
LEFT_OUT: Final = "left out by kube-scheduler's own filters (selectors, affinity, taints, CPU, RAM, GPU amounts of the whole node, ...)"
SENTENCES: Final = (NO_HOST_ROOM, LEFT_OUT)
"""What an explanation says beside the reasons of ``NodeReason``: all that there is."""
NOT_CHECKED: Final = "node selectors, affinity, taints, readiness of nodes, topology spread, volumes, ports and number of pods"
"""What only kube-scheduler knows of a node."""


def host_has_room(columns: Columns, rows: Rows, demand: HostDemand) -> Bools:
    """Say which rows have the CPU and RAM free that a pod requests, as plugin NodeResourcesFit does: requests against allocatable.

    Who requests none of one fits whatever is free of it; a host of which nothing is known has room. Derived columns must be up to date.
    """
    room = np.ones(len(rows), dtype=np.bool_)
    if demand.cpu_milli:
        room &= columns.cpu_free_milli[rows] >= demand.cpu_milli
    if demand.ram_mib:
        room &= columns.ram_free_mib[rows] >= demand.ram_mib
    return room


@dataclass(frozen=True, slots=True)
class Scope:
    """The nodes with an inventory, as they come into question for one pod."""

    judged: Rows
    left_out: Rows | None = None
    """What kube-scheduler's own filters left out when it last asked; None where it has not asked."""

    @classmethod
    def of(cls, state: ClusterState, asked: AskedNodes | None = None) -> "Scope":
        """Divide all nodes. Those that came after kube-scheduler asked are judged: it has not left them out."""
        rows = np.array([row for row, name in enumerate(state.names) if name], dtype=np.int64)
        if asked is None:
            return cls(rows)
        later = np.array(state.named_at, dtype=np.int64)[rows] > asked.naming
        judged = later | np.isin(rows, asked.rows())
        return cls(rows[judged], rows[~judged])

    def with_host_room(self, columns: Columns, demand: HostDemand) -> Rows:
        """Return the judged rows whose host has room."""
        return self.judged[host_has_room(columns, self.judged, demand)]
