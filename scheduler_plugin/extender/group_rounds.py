# SPDX-License-Identifier: Apache-2.0
"""Ends the reservations of a group of Kubernetes (``spec.schedulingGroup``) that kube-scheduler takes apart again.

kube-scheduler calls filter for each member of a group in turn, and then binds all of them or none. The members need reservations during
that round, because each must see the room that the others take. If the group fails, no call says so, and kube-scheduler tries it again and
again. Without an end, these reservations would keep room from pods that fit.

kube-scheduler runs one round at a time. So a round is over at the first call for another pod, or at a second call for the same member:

- If a member was refused, the group failed, unless a member's binding came already.
- If no member was refused here, the bindings are on their way, or another filter of kube-scheduler refused a member. The reservations
  stay for BINDING_SECONDS. A group without a binding in its latest round gets no such time again.

Source: podGroupCycle of kube-scheduler 1.36.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.state import ClusterState, Stage
from scheduler_plugin.extender.cache import keep

BINDING_SECONDS: Final = 2.0
"""How long the room of a group without a refused member is kept for its bindings, which follow within milliseconds."""
MAX_GROUPS: Final = 1024
"""Groups without a binding that are kept; each costs a few hundred bytes."""

_GroupKey: TypeAlias = tuple[str, str]
"""Namespace and name."""


@dataclass(slots=True)
class _Round:
    """One pass of kube-scheduler over the members of a group."""

    group: _GroupKey
    fits: dict[str, bool] = field(default_factory=dict)
    """Whether each member that was filtered has a node, by UID."""
    binds: bool = False
    """Whether a binding of a member came."""


class GroupRounds:
    """The round under way, and the groups without a binding in their latest round."""

    def __init__(self, state: ClusterState, monotonic: Callable[[], float]) -> None:
        self._state = state
        self._monotonic = monotonic
        self._round: _Round | None = None
        self._unbound: OrderedDict[_GroupKey, bool] = OrderedDict()

    def begin(self, pod: PodFacts) -> None:
        """Note a filter call: it may end a round and begin another one."""
        self.end_for(pod)
        if self._round is not None and pod.uid in self._round.fits:
            self._release(self._round)
            self._round = None
        if self._round is None and pod.scheduling_group:
            self._round = _Round(_key(pod))

    def end_for(self, pod: PodFacts) -> None:
        """End the round if this pod is in no group or in another one."""
        if self._round is not None and self._round.group != _key(pod):
            self._end(self._round)
            self._round = None

    def note_result(self, pod: PodFacts, *, fits: bool) -> None:
        """Note whether a member of the round's group has a node."""
        if self._round is not None and self._round.group == _key(pod):
            self._round.fits[pod.uid] = fits

    def note_binding(self, pod: PodFacts) -> None:
        """Note that kube-scheduler binds a pod: the round of its group succeeded."""
        if not pod.scheduling_group:
            return
        self._unbound.pop(_key(pod), None)
        if self._round is not None and self._round.group == _key(pod):
            self._round.binds = True

    def _end(self, over: _Round) -> None:
        if over.binds:
            return
        if not all(over.fits.values()) or over.group in self._unbound:
            self._release(over)
            return
        keep(self._unbound, over.group, True, MAX_GROUPS)
        until = self._monotonic() + BINDING_SECONDS
        for uid in over.fits:
            known = self._state.reservations.get(uid)
            if known is not None and known.stage is Stage.SOFT and not self._is_prepared(uid):
                self._state.reserve(replace(known, expires_at=min(known.expires_at, until)))

    def _is_prepared(self, uid: str) -> bool:
        """Whether kube-scheduler creates volumes or claims for a pod before it binds it, which can take minutes."""
        pod = self._state.pods.get(uid)
        return pod is not None and pod.needs_preparing

    def _release(self, over: _Round) -> None:
        """Drop the reservations of a round that led to no binding."""
        for uid in over.fits:
            known = self._state.reservations.get(uid)
            if known is not None and known.stage is Stage.SOFT:
                self._state.release(uid)


def _key(pod: PodFacts) -> _GroupKey:
    """Return the group of a pod; one without a name if it is in no group."""
    return pod.namespace, pod.scheduling_group
