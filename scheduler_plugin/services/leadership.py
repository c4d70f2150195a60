# SPDX-License-Identifier: Apache-2.0
"""One replica leads: only it binds. The others keep their state up to date and take over when the leader's lease expires.

This is safe without synchronised clocks. A replica that watches the lease measures from the moment it saw the last renewal, so it waits at
least a whole lease from then. The leader stops RENEW_SECONDS after its last successful renewal began. A request sent before that can still
arrive within adapters.aiohttp_transport.REQUEST_SECONDS, and all of that ends before the lease does. A new leader does not bind before it
has listed the pods again, after it got the lease: the last bindings of the previous leader are in that list.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from aliquot.kube.errors import KubeApiError, KubeConflictError
from scheduler_plugin.ports import Clock, LeaseApi, LeaseRecord

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
RENEW_SECONDS = 10.0
"""A leader stops after this time without a successful renewal."""
FOLLOW_SECONDS = 6.0
"""How long a read of kube-scheduler's lease may take. kube-scheduler itself waits 5 s, and still leads while the API is that slow."""
AGAIN_SECONDS = 20.0
"""After a failed call kube-scheduler calls again within this time: it waits 5 s for the reply, and 10 s before it retries a pod."""
LOOK_SECONDS = 1.0
"""How long a call waits for a read of the lease; kube-scheduler waits 5 s for its reply."""
LOOK_PAUSE_SECONDS = 0.2
"""Between two reads of the lease that calls cause."""


class Leadership:
    """This replica's part in the election."""

    def __init__(self, api: LeaseApi, clock: Clock, identity: str, retry_seconds: float = 2.0) -> None:
        """Args: identity: unique to this process. retry_seconds: between two reads of the lease."""
        self._api = api
        self._clock = clock
        self._identity = identity
        self._retry_seconds = retry_seconds
        self._silent_from = float("-inf")
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0
        self.acquired_at = float("-inf")
        """Monotonic time at which this replica last became the leader."""
        self.on_acquired: Callable[[], None] = lambda: None

    @property
    def leads(self) -> bool:
        """Whether this replica may act as the leader, at this moment."""
        return self._clock.monotonic() < self._silent_from

    async def run(self) -> None:
        """Take part until cancelled, then release the lease so that the next leader need not wait."""
        try:
            while True:
                await self._step()
                await asyncio.sleep(self._retry_seconds)
        finally:
            await self._let_go()

    async def _step(self) -> None:
        begun = self._clock.monotonic()
        try:
            lease = await self._api.read()
            if lease is None:
                await self._take(None, 0, begun)
            elif lease.holder == self._identity:
                await self._take(lease.version, lease.transitions, begun)
            elif self._has_run_out(lease):
                await self._take(lease.version, lease.transitions + 1, begun)
        except KubeConflictError:
            logger.debug("another replica wrote the lease first")
        except KubeApiError as exc:
            logger.warning("the lease cannot be renewed: %s", exc)

    async def _take(self, version: str | None, transitions: int, begun: float) -> None:
        led = self.leads
        await self._api.write(self._identity, LEASE_SECONDS, transitions, version)
        self._silent_from = begun + RENEW_SECONDS
        if not led:
            self.acquired_at = self._clock.monotonic()
            logger.info("this replica is the leader now")
            self.on_acquired()

    def _has_run_out(self, lease: LeaseRecord) -> bool:
        """Whether the lease was not renewed for as long as it lasts, by the clock of this process."""
        now = self._clock.monotonic()
        if not lease.holder:
            return True
        if self._seen is None or (lease.holder, lease.renewals) != (self._seen.holder, self._seen.renewals):
            self._seen, self._seen_at = lease, now
        return now - self._seen_at >= max(lease.duration_seconds, LEASE_SECONDS)

    async def _let_go(self) -> None:
        if not self.leads:
            return
        self._silent_from = float("-inf")
        try:
            lease = await self._api.read()
            if lease is not None and lease.holder == self._identity:
                await self._api.write("", LEASE_SECONDS, lease.transitions, lease.version)
        except KubeApiError as exc:
            logger.warning("the lease cannot be released, and expires by itself: %s", exc)


class Following:
    """Whether the kube-scheduler next to this process leads, by the lease that it uses, and since when.

    The latest bindings of another leader's extender may not have arrived here yet. So no decision is made before the pods were listed
    after ``acquired_at``: the moment at which another holder or another transition of the lease was first seen.

    A call is evidence too, because kube-scheduler calls its extender only while it leads. So an unreadable lease stops no scheduling. A
    call while the leader is unknown begins a term, and gets its reply once the pods are listed again. During that list, and until
    kube-scheduler had time for another call, further calls do not begin another term: with a slow API a list can take longer than the time
    between two calls. If the lease then names the same holder and transition as before, no other scheduler led, and the earlier list is
    enough. A lease with another holder, or without one, is trusted more than a call: the call is one of the last of a kube-scheduler that
    ends.
    """

    def __init__(self, api: LeaseApi, clock: Clock, host: str, pods_caught_up_at: Callable[[], float], retry_seconds: float = 2.0) -> None:
        """Make it; ``run`` starts the loop.

        Args: host: its name, with which kube-scheduler's identity begins. pods_caught_up_at: the monotonic time up to which all pods are
              known. retry_seconds: from one read of the lease to the next.
        """
        self._api = api
        self._clock = clock
        self._identity_prefix = f"{host}_"
        self._pods_caught_up_at = pods_caught_up_at
        self._retry_seconds = retry_seconds
        self._led_at = float("-inf")
        self._term: tuple[str, int] | None = None
        """Holder and transitions of the lease at the last read, if its holder was the kube-scheduler next to this process."""
        self._term_since = float("inf")
        """Monotonic time at which these were first read."""
        self._stands = False
        """Whether no other leader was seen since ``acquired_at``."""
        self._unanswered_at = float("-inf")
        """When a call last came before the pods were listed."""
        self._unknown = True
        """Whether the last read of the lease failed."""
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()
        """Held while the lease is read."""
        self.acquired_at = float("inf")
        """Monotonic time at which its current term was first known."""
        self.on_acquired: Callable[[], None] = lambda: None
        """Called when ``acquired_at`` changed."""

    @property
    def leads(self) -> bool:
        """Whether that kube-scheduler was the leader within the last RENEW_SECONDS."""
        return self._clock.monotonic() - self._led_at < RENEW_SECONDS

    async def run(self) -> None:
        """Read the lease until cancelled."""
        while True:
            async with self._lock:
                await self._read()
            await asyncio.sleep(self._read_at + self._retry_seconds - self._clock.monotonic())

    async def called(self) -> None:
        """Note a call of the kube-scheduler next to this process; read the lease first if it is not known to lead."""
        now = self._clock.monotonic()
        if not self.leads:
            await self.look()
            if self._unknown and not self.leads:
                if self._goes_on(now):
                    self._led_at = now
                else:
                    self._begin("it calls, and its lease cannot be read")
        if self.leads:
            self._led_at = max(self._led_at, now)
            if self._is_listing:
                self._unanswered_at = now

    @property
    def _is_listing(self) -> bool:
        """Whether the pods are not listed yet as they were at the beginning of its term or later."""
        return self._pods_caught_up_at() < self.acquired_at

    def _goes_on(self, now: float) -> bool:
        """Whether a call that comes now belongs to a term that an earlier call began."""
        return self._stands and (self._is_listing or now - self._unanswered_at < AGAIN_SECONDS)

    async def look(self) -> None:
        """Read the lease as it is now or later, if the API answers soon."""
        now = self._clock.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS), self._lock:
                if self._read_at < now:
                    await asyncio.sleep(self._read_at + LOOK_PAUSE_SECONDS - now)
                    await self._read()

    async def _read(self) -> None:
        begun = self._read_at = self._clock.monotonic()
        self._unknown = True
        try:
            lease = await self._api.read()
        except KubeApiError as exc:
            logger.warning("the lease of kube-scheduler cannot be read: %s", exc)
            return
        if lease is None:
            return
        self._unknown = False
        before, self._term = self._term, None
        if not lease.holder.startswith(self._identity_prefix):
            self._led_at, self._stands = float("-inf"), False
            return
        self._term = lease.holder, lease.transitions
        if self._term != before:
            self._begin(f"the lease names {lease.holder}")
            self._term_since = self.acquired_at
        self.acquired_at = self._term_since
        self._led_at = max(self._led_at, begun)

    def _begin(self, why: str) -> None:
        self.acquired_at = self._led_at = self._clock.monotonic()
        self._stands = True
        logger.info("the kube-scheduler next to this process is the leader now: %s", why)
        self.on_acquired()
