"""One replica leads: only it binds. The others keep their state warm and take over when the leader's lease runs out.

Safe without synchronised clocks: whoever watches measures from the moment it saw the last renewal, so it waits at least a whole lease from
then. The leader falls silent RENEW_SECONDS after its last successful renewal began; a request of before can still arrive within
adapters.kube.REQUEST_SECONDS, and all of that ends before the lease does. A new leader does not bind before it has listed the pods again,
after it got the lease: what the earlier one bound last is in that list.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from scheduler_plugin.errors import KubeApiError, KubeConflictError
from scheduler_plugin.ports import Clock, LeaseApi, LeaseRecord

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
RENEW_SECONDS = 10.0
"""Without a successful renewal for so long, a leader stops."""
FOLLOW_SECONDS = 6.0
"""How long a read of kube-scheduler's lease may take: kube-scheduler allows itself 5 s for one, and leads on while the API is that slow."""
AGAIN_SECONDS = 20.0
"""kube-scheduler asks again sooner after a call in vain: it waits 5 s for the answer, and 10 s before it tries a pod again."""
LOOK_SECONDS = 1.0
"""How long a call waits for a look at the lease; kube-scheduler waits 5 s for its answer."""
LOOK_PAUSE_SECONDS = 0.2
"""Between two looks at the lease for the sake of calls."""


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
    """Whether the kube-scheduler beside this process leads, by the lease that it takes part in, and since when.

    What another leader's extender bound last may not have been told here yet, so nothing is decided before the pods were listed after
    ``acquired_at``: the moment at which another holder or another transition of the lease was first seen.

    A call is evidence too, because kube-scheduler asks its extender only while it leads. So a lease that cannot be read stops nobody: a
    call that comes while it is not known who leads begins a time of leading, and is answered once the pods are listed again. While they
    are, and until kube-scheduler had time to ask once more, further calls begin nothing anew: where the API is slow, a list can take
    longer than the time between two calls. A lease that then names the same holder and transition as before says that nobody else led,
    and what was listed before the call is enough. One that names somebody else, or nobody, is believed against a call: the call is one of
    the last of a kube-scheduler that ends.
    """

    def __init__(self, api: LeaseApi, clock: Clock, host: str, pods_told_at: Callable[[], float], retry_seconds: float = 2.0) -> None:
        """Make it; ``run`` begins.

        Args: host: its name, with which kube-scheduler's identity begins. pods_told_at: the monotonic time up to which all of the pods is
              known. retry_seconds: from one look at the lease to the next.
        """
        self._api = api
        self._clock = clock
        self._identity_prefix = f"{host}_"
        self._pods_told_at = pods_told_at
        self._retry_seconds = retry_seconds
        self._led_at = float("-inf")
        self._term: tuple[str, int] | None = None
        """Holder and transitions of the lease when last read, if that was the kube-scheduler beside this process."""
        self._term_since = float("inf")
        """Monotonic time at which that was first read."""
        self._stands = False
        """Whether nobody else was seen to lead since ``acquired_at``."""
        self._unanswered_at = float("-inf")
        """When a call last came before the pods were listed."""
        self._unknown = True
        """Whether the lease could not be read when that was last tried."""
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()
        """Held by who reads the lease."""
        self.acquired_at = float("inf")
        """Monotonic time at which it was first known to lead as it does now."""
        self.on_acquired: Callable[[], None] = lambda: None
        """Told when that changed."""

    @property
    def leads(self) -> bool:
        """Whether it did not long ago."""
        return self._clock.monotonic() - self._led_at < RENEW_SECONDS

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            async with self._lock:
                await self._read()
            await asyncio.sleep(self._read_at + self._retry_seconds - self._clock.monotonic())

    async def called(self) -> None:
        """Note that the kube-scheduler beside this process asks something; look at the lease first where it is not known to lead."""
        now = self._clock.monotonic()
        if not self.leads:
            await self.look()
            if self._unknown and not self.leads:
                if self._goes_on(now):
                    self._led_at = now
                else:
                    self._begin("calls come, and its lease says nothing")
        if self.leads:
            self._led_at = max(self._led_at, now)
            if self._is_listing:
                self._unanswered_at = now

    @property
    def _is_listing(self) -> bool:
        """Whether the pods are not listed yet as they were when it began to lead, or later."""
        return self._pods_told_at() < self.acquired_at

    def _goes_on(self, now: float) -> bool:
        """Whether a call that comes now belongs to what an earlier one began."""
        return self._stands and (self._is_listing or now - self._unanswered_at < AGAIN_SECONDS)

    async def look(self) -> None:
        """Learn who leads at this moment or later, if the API answers soon."""
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
            self._begin(f"it is {lease.holder}")
            self._term_since = self.acquired_at
        self.acquired_at = self._term_since
        self._led_at = max(self._led_at, begun)

    def _begin(self, why: str) -> None:
        self.acquired_at = self._led_at = self._clock.monotonic()
        self._stands = True
        logger.info("the kube-scheduler beside this process leads now: %s", why)
        self.on_acquired()
