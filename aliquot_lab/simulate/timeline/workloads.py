# SPDX-License-Identifier: Apache-2.0
"""Groups pods into workloads, in the order in which these arrive. The seed orders those that arrive in the same second."""

import random
from collections.abc import Sequence

from aliquot_lab.simulate.timeline.model import Queue, SimPod, Workload
from aliquot_lab.simulate.trace import TraceError


def workloads_of(pods: Sequence[SimPod], seed: int) -> list[Workload]:
    """Return the workloads in the order of arrival."""
    gangs: dict[str, list[SimPod]] = {}
    for pod in pods:
        gangs.setdefault(f"gang {pod.gang}" if pod.gang else f"pod {pod.name}", []).append(pod)
    groups = list(gangs.values())
    random.Random(seed).shuffle(groups)  # noqa: S311 (random numbers of a simulation, not a secret)
    groups.sort(key=lambda members: max(pod.arrival_seconds for pod in members))
    return [
        Workload(members[0].gang or members[0].name, tuple(members), number, is_gang=bool(members[0].gang))
        for number, members in enumerate(groups)
    ]


def check_queues(pods: Sequence[SimPod], queues: Sequence[Queue]) -> None:
    """Check that each queue of a pod is known. Raises TraceError."""
    known = {queue.name for queue in queues}
    for pod in pods:
        if pod.queue and pod.queue not in known:
            listed = ", ".join(sorted(known)) or "no list given, use --queues"
            raise TraceError(f"pod {pod.name}, column queue: expected a name of the list of queues ({listed}), found {pod.queue!r}")
