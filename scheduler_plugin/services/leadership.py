"""One replica leads: only it binds. The others keep their state warm and take over when the leader's lease runs out.

Safe without synchronised clocks: whoever watches measures from the moment it saw the last renewal, so it waits at least a whole lease from
then. The leader falls silent RENEW_SECONDS after its last successful renewal began; a request of before can still arrive within
adapters.kube.REQUEST_SECONDS, and all of that ends before the lease does. A new leader does not bind before it has listed the pods again,
after it got the lease: what the earlier one bound last is in that list.
"""

import asyncio
import logging
from collections.abc import Callable

from scheduler_plugin.errors import KubeApiError, KubeConflictError
from scheduler_plugin.ports import Clock, LeaseApi, LeaseRecord

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
RENEW_SECONDS = 10.0
"""Without a successful renewal for so long, a leader stops."""


class Leadership:
    """This replica's part in the election."""

    def __init__(self, api: LeaseApi, clock: Clock, identity: str, retry_seconds: float = 2.0) -> None:
        """Args: identity: unique to this process. retry_seconds: between two looks at the lease."""
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
        """Take part until cancelled, then let go of the lease so that another need not wait."""
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
            logger.info("this replica leads now")
            self.on_acquired()

    def _has_run_out(self, lease: LeaseRecord) -> bool:
        """Whether nobody renewed the lease for as long as it lasts, by our own clock."""
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
            logger.warning("the lease stays until it runs out: %s", exc)


class Following:
    """Whether the kube-scheduler beside this process leads, by the lease that it takes part in.

    It alone asks this extender for decisions. What the extender does unasked, on decisions of before, is for the leader's extender only.
    """

    def __init__(self, api: LeaseApi, clock: Clock, host: str, retry_seconds: float = 2.0) -> None:
        """Args: host: its name, with which kube-scheduler's identity begins. retry_seconds: between two looks at the lease."""
        self._api = api
        self._clock = clock
        self._identity_prefix = f"{host}_"
        self._retry_seconds = retry_seconds
        self._led_at = float("-inf")
        self._other_led = False
        self.on_acquired: Callable[[], None] = lambda: None
        """Told when it took over from another: what that one did last may not have been told here yet."""

    @property
    def leads(self) -> bool:
        """Whether it did when the lease was last read, not long ago."""
        return self._clock.monotonic() - self._led_at < RENEW_SECONDS

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                lease = await self._api.read()
            except KubeApiError as exc:
                logger.warning("the lease of kube-scheduler cannot be read: %s", exc)
            else:
                beside = lease is not None and lease.holder.startswith(self._identity_prefix)
                self._led_at = self._clock.monotonic() if beside else float("-inf")
                if beside and self._other_led:
                    logger.info("the kube-scheduler beside this process leads now")
                    self.on_acquired()
                self._other_led = not beside
            await asyncio.sleep(self._retry_seconds)
