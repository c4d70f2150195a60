# SPDX-License-Identifier: Apache-2.0
"""Keeps ``extender.claims`` equal to the API's ResourceSlices, DeviceClasses and ResourceClaims, and has refused pods tried again.

kube-scheduler tries a pod again when a claim is free or a slice changes. Its event can come before ours, and then the extender refuses the
pod with what it knew. So each refused pod that fits now gets an annotation, which makes kube-scheduler try it at once.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final, Generic, TypeVar

import msgspec

from aliquot.kube.errors import KubeApiError, KubeRefusedError
from scheduler_plugin.core.claims.stored import StoredClaim
from scheduler_plugin.core.cluster.pods import PodFacts
from scheduler_plugin.core.cluster.reasons import NodeReason
from scheduler_plugin.core.fit.judge import reasons_for
from scheduler_plugin.extender.claims import ClaimVerdicts, Refusal
from scheduler_plugin.extender.context import ExtenderContext
from scheduler_plugin.ports import Annotator
from scheduler_plugin.services.retry_mark import RetryMark

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.25
FAILED_SECONDS: Final = 5.0
"""Until the next try after the API server did not take an annotation."""
SHOWN_SECONDS: Final = 60.0
"""After this time the watch has shown each pod that kube-scheduler asked about, if it exists."""
_T = TypeVar("_T")
_Json = Mapping[str, Any]


def decode_object(raw: msgspec.Raw) -> _Json:
    """Decode a ResourceSlice or DeviceClass of a stream."""
    found: _Json = msgspec.json.decode(raw, type=dict[str, Any])
    return found


class Receiver(Generic[_T]):
    """Takes the objects of one kind. Implements the listener of a stream."""

    def __init__(
        self,
        put: Callable[[_T], None],
        drop: Callable[[_T], None],
        replace: Callable[[list[_T]], None],
        monotonic: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Args: monotonic: for ``listed_from``."""
        self._put = put
        self._drop = drop
        self._replace = replace
        self._monotonic = monotonic
        self._trouble = ""
        self._is_listed = False
        self._listing_from = -inf
        self.listed_from = -inf
        """When the latest complete list began, on the monotonic clock: it shows everything from before."""
        self.on_state: Callable[[], None] = lambda: None
        """Called when ``is_current`` may have changed."""

    @property
    def is_current(self) -> bool:
        """Whether its objects are known and followed. Without that a pod must not be refused: kube-scheduler may know better."""
        return self._is_listed and not self._trouble

    @property
    def was_listed(self) -> bool:
        """Whether its objects were listed at least once."""
        return self._is_listed

    def listing(self) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._listing_from = self._monotonic()

    def listed(self, items: list[_T]) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._replace(items)
        self._is_listed, self.listed_from = True, self._listing_from
        self.opened()

    def opened(self) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._trouble = ""
        self.on_state()

    def changed(self, item: _T) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._put(item)

    def deleted(self, item: _T) -> None:
        """See ``adapters.kube_watch.Listener``."""
        self._drop(item)

    def current(self, *, bookmark: bool) -> None:
        """See ``adapters.kube_watch.Listener``."""

    def trouble(self, sentence: str, *, is_missing: bool = False) -> None:
        """See ``adapters.kube_watch.Listener``."""
        del is_missing
        if not self._trouble:
            logger.warning("watching %s", sentence)
        self._trouble = sentence
        self.on_state()


class ClaimWatch:
    """The receivers of the three streams."""

    def __init__(self, claims: ClaimVerdicts, monotonic: Callable[[], float] = lambda: 0.0) -> None:
        pools, holds = claims.pools, claims.holds
        self._claims = claims
        self.slices: Receiver[_Json] = Receiver(holds.set_slice, holds.drop_slice, holds.replace_slices)
        self.classes: Receiver[_Json] = Receiver(pools.set_class, pools.drop_class, pools.replace_classes)
        self.claims: Receiver[StoredClaim] = Receiver(holds.set_claim, holds.drop_claim, holds.replace_claims, monotonic)
        for one in self._receivers:
            one.on_state = self._note_state

    @property
    def _receivers(self) -> "tuple[Receiver[Any], ...]":
        return self.slices, self.classes, self.claims

    def _note_state(self) -> None:
        self._claims.is_current = all(one.is_current for one in self._receivers)


class ClaimRetry:
    """The loop that has refused pods tried again."""

    def __init__(self, context: ExtenderContext, api: Annotator, leads: Callable[[], bool]) -> None:
        """Args: leads: whether this replica decides."""
        self._context = context
        self._api = api
        self._leads = leads
        self._seen_count = -1
        self._rests_until = 0.0
        self._mark = RetryMark(context)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.step()

    async def step(self) -> None:
        """Look once."""
        state, claims = self._context.state, self._context.claims
        change_count = state.columns.change_count
        now = self._context.clock.monotonic()
        if not claims.refused or not self._leads() or change_count == self._seen_count or now < self._rests_until:
            return
        self._seen_count = change_count  # a change from now on, during calls to the API too, is seen in the next step
        for uid, refusal in list(claims.refused.items()):
            if claims.refused.get(uid) is refusal and self._may_start(refusal):
                del claims.refused[uid]
                if not await self._retry(refusal.pod):
                    claims.refused.setdefault(uid, refusal)  # after the others
                    self._seen_count, self._rests_until = -1, now + FAILED_SECONDS
                    return
            await asyncio.sleep(0)

    def _may_start(self, refusal: Refusal) -> bool:
        """Whether a pod fits now on a node that kube-scheduler offered. One that no longer waits is forgotten."""
        claims, known = self._context.claims, self._context.state.pods.get(refusal.pod.uid)
        is_late = known is None and self._context.clock.monotonic() - refusal.at < SHOWN_SECONDS  # the watch may still show it
        if not is_late and (known is None or known.node_name):
            del claims.refused[refusal.pod.uid]
            return False
        verdict = claims.verdict(refusal.pod)
        return verdict is None or bool((reasons_for(verdict, refusal.rows) == NodeReason.FITS.value).any())

    async def _retry(self, pod: PodFacts) -> bool:
        """Have a pod tried again; return False if the API server may take the same request later."""
        try:
            await self._api.annotate(pod.namespace, pod.name, pod.uid, self._mark.annotations())
        except KubeApiError as exc:
            logger.warning("pod not tried again: %s", exc, extra={"pod": f"{pod.namespace}/{pod.name}", "pod_uid": pod.uid})
            return isinstance(exc, KubeRefusedError)
        return True
