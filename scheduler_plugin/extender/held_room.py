# SPDX-License-Identifier: Apache-2.0
"""The room that is held for one waiting pod or gang: filter counts it as taken, except for pods that may use it."""

from math import inf
from typing import Final

from scheduler_plugin.core.backfill.hold import Hold, Outlook, may_use
from scheduler_plugin.core.backfill.lifetimes import Lifetimes
from scheduler_plugin.core.backfill.outlook import outlook_of
from scheduler_plugin.core.cluster.hold_uids import hold_uid
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.cluster.state import ClusterState, Reservation
from scheduler_plugin.core.fit.shapes import PodShape, Shapes

FRESH_SECONDS: Final = 1.0
"""How long an estimate counts for further pods."""


class HeldRoom:
    """At most one hold, as reservations in the state. Without the feature there is none, and every call does nothing."""

    def __init__(self, state: ClusterState, shapes: Shapes) -> None:
        self.lifetimes = Lifetimes()
        self.held: Hold | None = None
        self.outlook = Outlook()
        self._estimated_at = -inf
        self._state = state
        self._shapes = shapes

    def put(self, hold: Hold, expires_at: float, now: float) -> None:
        """Hold room, in place of what was held before. Args: expires_at: monotonic seconds. now: seconds since 1970."""
        self.drop()
        self.held = hold
        for place in hold.places:
            self._state.reserve(Reservation(hold_uid(place.pod_uid), place.node, place.footprint, place.demand, expires_at=expires_at))
        for uid in hold.owners:
            self._state.let_pass(uid, hold.uids)
        self.refresh(now)

    def renew(self, expires_at: float, now: float) -> bool:
        """Keep the room until a moment, and estimate again when it is free. Returns: whether it is still held."""
        if self.held is None or not self.held.uids <= self._state.reservations.keys():
            return False
        for uid in self.held.uids:
            self._state.renew(uid, expires_at)
        self.refresh(now)
        return True

    def refresh(self, now: float) -> None:
        """Estimate when the room is free. Args: now: seconds since 1970."""
        self._estimated_at = now
        self.outlook = Outlook() if self.held is None else outlook_of(self._state, self.held, self.lifetimes, now)

    def drop(self) -> None:
        """Hold nothing."""
        if self.held is None:
            return
        for uid in list(self._state.passes):
            self._state.let_pass(uid, frozenset())
        for uid in self.held.uids:
            self._state.release(uid)
        self.held, self.outlook = None, Outlook()

    def admit(self, pod: PodFacts, now: float) -> None:
        """Decide whether a pod may use the held room from now on. Args: now: seconds since 1970."""
        if self.held is not None and pod.gpu is not None:
            self._state.let_pass(pod.uid, self.held.uids if self.lets_pass(pod, now) else frozenset())

    def lets_pass(self, pod: PodFacts, now: float) -> bool:
        """Whether a pod may use the held room. Args: now: seconds since 1970."""
        if self.held is None:
            return False
        known = self.lifetimes.of(pod)
        most_seconds = None if known is None else known.most
        if not may_use(self.held, self.outlook, pod, most_seconds, now):
            return False
        if now - self._estimated_at < FRESH_SECONDS:
            return True
        self.refresh(now)  # a pod may have become overdue
        return may_use(self.held, self.outlook, pod, most_seconds, now)

    def kept_from(self, pod: PodFacts, shape: PodShape) -> frozenset[str]:
        """Return the nodes on which a pod would fit if nothing were held."""
        if self.held is None or pod.uid in self._state.passes:
            return frozenset()
        rows = [row for node in self.held.nodes if (row := self._state.row_of(node)) is not None]
        with self._state.without_all([pod.uid, *self.held.uids]):
            reason = self._shapes.verdict(shape).reason
            names = frozenset(self._state.names[row] for row in rows if reason[row] == NodeReason.FITS.value)
        with self._state.without(pod.uid):
            self._shapes.verdict(shape)  # callers go on to use the verdict with everything that is held
        return names

    def is_free(self, pod: PodFacts, shape: PodShape) -> bool:
        """Whether a pod fits on a node with held room now, if it may use that."""
        if self.held is None:
            return False
        with self._state.without(pod.uid):
            reason = self._shapes.verdict(shape).reason
            rows = (self._state.row_of(node) for node in self.held.nodes)
            return any(row is not None and reason[row] == NodeReason.FITS.value for row in rows)
