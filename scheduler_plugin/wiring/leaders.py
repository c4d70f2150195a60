# SPDX-License-Identifier: Apache-2.0
"""Whether this replica may be called, and whether its decisions count.

Ready: the state was built from full lists, and, if replicas elect a leader, this one leads and has listed the pods since it does. Behind a
Service, readiness sends the calls to the leader.

Decides: ready, and the kube-scheduler in the same pod leads and the pods were listed since it does, and the claims where these share GPUs
with pods. With kube-scheduler on loopback no lease of our own is needed: all replicas are ready, for the webhook.
"""

import asyncio
import socket
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from aliquot.contract.model import Allocation
from scheduler_plugin.adapters.aiohttp_transport import KubeConnection
from scheduler_plugin.adapters.kube import KubeLease
from scheduler_plugin.errors import NotReadyError
from scheduler_plugin.services.cluster_watch import ClusterWatch, Source
from scheduler_plugin.services.leadership import FOLLOW_SECONDS, Following, Leadership
from scheduler_plugin.settings import Settings
from scheduler_plugin.wiring.cluster import Cluster

TAKEOVER_SECONDS: Final = 3.0
"""How long a call waits after a takeover until the pods are listed; kube-scheduler waits 5 s for a reply."""
LOOK_SECONDS: Final = 0.1
"""How long such a call waits at most between two looks."""


class Leaders:
    """This replica's own election, and the kube-scheduler in the same pod; each is optional."""

    def __init__(self, watch: ClusterWatch, leadership: Leadership | None, following: Following | None) -> None:
        self.leadership = leadership
        self.following = following
        self.is_ending = False
        """Whether the process has received SIGTERM."""
        self.is_prepared: Callable[[], bool] = lambda: True
        """Whether the seats of admitted workloads are held, so that other pods do not take them."""
        self.knows_claims: Callable[[float], bool] = lambda _: True
        """Whether the ResourceClaims were listed since a moment, where pods with vGPUs and with claims share GPUs."""
        self._watch = watch

    @property
    def leads(self) -> bool:
        """Whether this replica is the leader."""
        return self.leadership is None or self.leadership.leads

    @property
    def leads_beside_leader(self) -> bool:
        """Whether this replica is the leader, and the kube-scheduler in the same pod leads too."""
        return self.leads and self._is_beside_leader

    @property
    def ready(self) -> bool:
        """Whether this replica may be called."""
        if self.is_ending or not self._watch.synced or not self.leads:
            return False
        return self.leadership is None or self._has_listed_since(self.leadership.acquired_at)

    @property
    def decides(self) -> bool:
        """Whether decisions of this replica count."""
        since = self.term
        return since is not None and self.is_prepared() and self.knows_claims(since)

    @property
    def term(self) -> float | None:
        """The monotonic time since which this replica leads; None while it does not lead, or does not know all pods since then."""
        if not self.ready or not self._is_beside_leader:
            return None
        starts = [part.acquired_at for part in (self.leadership, self.following) if part is not None]
        known = self.following is None or self._has_listed_since(self.following.acquired_at)
        return max(starts, default=0.0) if known else None

    @property
    def trouble(self) -> str:
        """Why this replica is not ready or does not decide."""
        if self.is_ending:
            return "this replica is shutting down"
        if self._watch.trouble:
            return self._watch.trouble
        if not self.leads_beside_leader:
            return "another replica leads"
        if (since := self.term) is not None and not self.knows_claims(since):
            return "the ResourceClaims are being listed after the lease was acquired"
        if since is not None:
            return "the seats of workloads that Kueue admitted are being reserved again"
        return "the pods are being listed after the lease was acquired"

    def check_decides(self) -> None:
        """Raises: NotReadyError: this replica does not decide."""
        if not self.decides:
            raise NotReadyError(self.trouble)

    async def wait_until_deciding(self) -> None:
        """Note a call of kube-scheduler, and wait until the pods are listed after a takeover. Raises NotReadyError."""
        if self.following is not None:
            await self.following.called()
        with suppress(TimeoutError):
            async with asyncio.timeout(TAKEOVER_SECONDS):
                while self.ready and self._is_beside_leader and not self.decides:
                    with suppress(TimeoutError):  # that seats are reserved again is no event
                        async with asyncio.timeout(LOOK_SECONDS):
                            await self._watch.next_event()
        self.check_decides()

    async def look_up(self) -> None:
        """Look up which kube-scheduler leads."""
        if self.following is not None:
            await self.following.look()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops to run."""
        return [part.run() for part in (self.leadership, self.following) if part is not None]

    @property
    def _is_beside_leader(self) -> bool:
        return self.following is None or self.following.leads

    def _has_listed_since(self, moment: float) -> bool:
        return self._watch.caught_up_at(Source.PODS) >= moment


def make_leaders(settings: Settings, connection: KubeConnection, cluster: Cluster) -> Leaders:
    """Construct the elections that the settings name."""
    leadership: Leadership | None = None
    following: Following | None = None

    def relist() -> None:
        cluster.pods_stream.relist()
        if cluster.claims is not None:
            cluster.claims.relist()

    if settings.lease_name:
        lease = KubeLease(connection, settings.lease_namespace, settings.lease_name, cluster.clock)
        leadership = Leadership(lease, cluster.clock, f"{socket.gethostname()}_{uuid.uuid4()}")
        leadership.on_acquired = relist
    if settings.scheduler_lease:
        lease = KubeLease(connection, settings.lease_namespace, settings.scheduler_lease, cluster.clock, FOLLOW_SECONDS)
        following = Following(lease, cluster.clock, socket.gethostname(), lambda: cluster.watch.caught_up_at(Source.PODS))
        following.on_acquired = relist
    leaders = Leaders(cluster.watch, leadership, following)
    leaders.knows_claims = partial(_knows_claims, cluster)
    return leaders


def _knows_claims(cluster: Cluster, since: float) -> bool:
    """Whether it is known what claims have of the GPUs that pods with vGPUs can get. Without the feature gate no claim gets any."""
    if cluster.claims is None or cluster.claims.known_since(since):
        return True
    return all(node.allocation is not Allocation.BOTH for node in cluster.context.state.gpu_nodes())
