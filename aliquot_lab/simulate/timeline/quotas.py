# SPDX-License-Identifier: Apache-2.0
"""Quotas of queues, in a simple form of Kueue's admission: one resource (GPUs), one flavour, one cohort that all queues share.

A workload with a queue needs quota before the scheduler sees it. It gets quota if its queue stays within its own, or borrows what others do
not use. What is admitted keeps its quota until it ends, also while no node has room. A queue that reclaims ends workloads of queues above
their quota, the least important and youngest first, until its own quota suffices.

Not modelled: several flavours and cohorts, fair sharing, preemption within a queue, workloads with partial admission, requeue delays.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from aliquot_lab.simulate.timeline.model import Queue, Workload
from aliquot_lab.simulate.timeline.waiting import Waiting

_Group: TypeAlias = tuple[str, int, int]
"""Queue, priority and demand: all that decides whether a workload can be admitted."""


@dataclass(slots=True)
class _Usage:
    """What a queue uses."""

    queue: Queue
    milli: int = 0
    admitted: dict[int, tuple[int, Workload]] = field(default_factory=dict)
    """By number, with the position in the order of admission over all queues."""


class Quotas:
    """The queues and what waits for them."""

    def __init__(self, queues: Sequence[Queue], gpu_memory_mib: int) -> None:
        """Args: gpu_memory_mib: of a GPU, which turns memory into parts of GPUs; the largest of the cluster."""
        self._usage = {queue.name: _Usage(queue) for queue in queues}
        self._total = sum(queue.quota_milli for queue in queues)
        self._admissions = 0
        self._gpu_memory_mib = gpu_memory_mib
        self.waiting = Waiting[_Group]()
        """Workloads without quota."""

    def used_milli(self) -> dict[str, int]:
        """Return the used thousandths of GPUs by queue."""
        return {name: usage.milli for name, usage in self._usage.items()}

    def add(self, workload: Workload) -> None:
        """Let a workload wait for quota."""
        self.waiting.add(self._group(workload), workload)

    def release(self, workload: Workload) -> None:
        """Return the quota of a workload that ended."""
        usage = self._usage.get(workload.queue)
        if usage is not None and usage.admitted.pop(workload.number, None) is not None:
            usage.milli -= self._demand(workload)

    def admit(self) -> tuple[list[Workload], list[Workload]]:
        """Admit what has quota. Returns: the admitted workloads, and those that lose their quota for them."""
        admitted: list[Workload] = []
        reclaimed: list[Workload] = []
        blocked: set[_Group] = set()
        while (workload := self._next(blocked)) is not None:
            victims = self._victims_for(workload)
            if victims is None:
                blocked.add(self._group(workload))
                continue
            for victim in victims:
                self.release(victim)
            usage = self._usage[workload.queue]
            usage.milli += self._demand(workload)
            self._admissions += 1
            usage.admitted[workload.number] = (self._admissions, workload)
            self.waiting.remove(self._group(workload), workload)
            admitted.append(workload)
            reclaimed += victims
        again = {victim.number for victim in reclaimed}
        for victim in reclaimed:
            self.add(victim)
        return [workload for workload in admitted if workload.number not in again], reclaimed

    def _next(self, blocked: Container[_Group]) -> Workload | None:
        """Return what is admitted next: within the own quota before borrowing, by priority, by arrival."""
        left = (workload for group, workload in self.waiting.heads() if group not in blocked)
        return min(left, key=lambda workload: (self._borrows(workload), -workload.priority, workload.number), default=None)

    def _victims_for(self, workload: Workload) -> list[Workload] | None:
        """Return the workloads that must lose their quota first; None if the workload cannot be admitted now."""
        usage, demand = self._usage[workload.queue], self._demand(workload)
        after = usage.milli + demand
        limit = usage.queue.borrow_milli
        if limit is not None and after > usage.queue.quota_milli + limit:
            return None
        lacking = sum(other.milli for other in self._usage.values()) + demand - self._total
        if lacking <= 0:
            return []
        if not usage.queue.reclaims or after > usage.queue.quota_milli:
            return None
        return self._borrowed(workload.queue, lacking)

    def _borrowed(self, but: str, lacking: int) -> list[Workload] | None:
        """Choose workloads of queues above their quota until this much is free; None if there are too few."""
        milli = {name: usage.milli for name, usage in self._usage.items() if name != but}
        chosen: list[Workload] = []
        admitted = [found for name in milli for found in self._usage[name].admitted.values()]
        candidates = [(workload.priority, -position, workload) for position, workload in admitted]
        for _, _, workload in sorted(candidates, key=lambda candidate: candidate[:2]):
            if lacking <= 0:
                break
            if milli[workload.queue] > self._usage[workload.queue].queue.quota_milli:
                chosen.append(workload)
                milli[workload.queue] -= self._demand(workload)
                lacking -= self._demand(workload)
        return chosen if lacking <= 0 else None

    def _borrows(self, workload: Workload) -> bool:
        usage = self._usage[workload.queue]
        return usage.milli + self._demand(workload) > usage.queue.quota_milli

    def _group(self, workload: Workload) -> _Group:
        return workload.queue, workload.priority, self._demand(workload)

    def _demand(self, workload: Workload) -> int:
        return workload.demand_milli(self._gpu_memory_mib)
