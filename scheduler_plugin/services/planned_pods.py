# SPDX-License-Identifier: Apache-2.0
"""Keeps the pods with claims that are allocated here: a stream of their own, of the pods with the label that the webhook gives them."""

from collections.abc import Callable
from typing import Final

from aliquot import contract
from aliquot.contract.model import Allocation
from scheduler_plugin.core.claims.planned import PlannedPod
from scheduler_plugin.services.claim_watch import Receiver

PATH: Final = (
    f"/api/v1/pods?labelSelector={contract.LABEL_ALLOCATION.replace('/', '%2F')}%3D{Allocation.PLANNED}"
    "&fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
)


class PlannedPods:
    """All of them that have not ended, by UID."""

    def __init__(self, by_uid: dict[str, PlannedPod], monotonic: Callable[[], float] = lambda: 0.0) -> None:
        """Args: by_uid: is kept up to date."""
        self.by_uid = by_uid
        self.change_count = 0
        """Grows with each change of a pod."""
        self.receiver: Receiver[PlannedPod] = Receiver(self._put, self._drop, self._replace, monotonic)

    def _put(self, pod: PlannedPod) -> None:
        self.change_count += 1
        if pod.facts.active:
            self.by_uid[pod.facts.uid] = pod
        else:
            self.by_uid.pop(pod.facts.uid, None)

    def _drop(self, pod: PlannedPod) -> None:
        self.change_count += 1
        self.by_uid.pop(pod.facts.uid, None)

    def _replace(self, pods: list[PlannedPod]) -> None:
        self.change_count += 1
        self.by_uid.clear()  # in place: others hold this mapping
        self.by_uid.update({pod.facts.uid: pod for pod in pods if pod.facts.active})
