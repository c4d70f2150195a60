"""Keeps the webhook's certificate: makes it, renews it in time, has the API server trust it and serves it.

It lives in a Secret that every replica reads and any may write; a write fails where another wrote in between, so all serve the same one.
What is read is first made trusted and then served. While the API is away, what was served is served on, with a warning, and the metric of
its end tells how long that can last.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from scheduler_plugin.core.certificate import AUTHORITIES, CERTIFICATE, KEY, Step, check_ownership, next_step
from scheduler_plugin.errors import CertificateError, KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.ports import Authority, CertificateApi, Clock, Serving, WebhookKind

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 5.0
"""How soon a certificate of another replica is served and a webhook configuration applied anew is trusted again: three small reads each."""
MAX_STEPS: Final = 5
"""Writes in one period: what is to be done takes two; the others are lost to replicas that wrote first."""


class CertificateKeeper:
    """The loop of one replica."""

    def __init__(self, api: CertificateApi, authority: Authority, serving: Serving, clock: Clock, names: Sequence[str]) -> None:
        """Args: names: the host names to be certified."""
        self._api = api
        self._authority = authority
        self._serving = serving
        self._clock = clock
        self._names = names
        self._served: tuple[bytes, bytes] | None = None
        self._ends_at = 0.0
        self.trouble = ""
        """What stands in the way, or nothing."""

    @property
    def serves(self) -> bool:
        """Whether there has been a certificate to serve."""
        return self._served is not None

    def ends_at(self) -> float:
        """When the certificate that is served ends, in seconds since 1970; 0 without one."""
        return self._ends_at

    async def run(self) -> None:
        """Keep it until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(PERIOD_SECONDS)

    async def step(self) -> None:
        """Look once."""
        troubles: list[str] = []
        try:
            data = await self._kept(troubles)
            if self._served is None:  # untrusted is better than nothing
                self._serve(data)
            await self._trust(data[AUTHORITIES], troubles)
            self._serve(data)
        except (KubeApiError, CertificateError) as exc:
            troubles.append(str(exc))
        self._report("; ".join(troubles))

    async def _kept(self, troubles: list[str]) -> Mapping[str, bytes]:
        """Return what the Secret holds after everything that is due was done, or could not be done while it still serves."""
        for _ in range(MAX_STEPS):
            secret = await self._api.read()
            data = {} if secret is None else secret.data
            check_ownership(data)
            holdings, now = self._authority.inspect(data), self._clock.now()
            step = next_step(holdings, self._names, now)
            if step is Step.KEEP:
                return data
            made = self._authority.carry_out(step, data, self._names, now)
            try:
                await self._api.write(made, None if secret is None else secret.version)
            except KubeConflictError:
                continue
            except KubeApiError as exc:
                if not holdings.serves(now):
                    raise
                troubles.append(f"due was to {step.value}: {exc}")
                return data
            flaws = f" because of {'; '.join(holdings.flaws)}" if holdings.flaws else ""
            logger.log(logging.WARNING if flaws else logging.INFO, "the webhook's certificate: %s: done%s", step.value, flaws)
        raise CertificateError(f"what is kept changed under each of {MAX_STEPS} writes; does anybody else write that Secret?")

    async def _trust(self, authorities: bytes, troubles: list[str]) -> None:
        """Have the API server trust them. A configuration that is missing does not hold up the other: nobody calls us by it."""
        for kind in WebhookKind:
            try:
                if await self._api.trust(kind, authorities):
                    logger.info("the authority of the webhook's certificate was written into %s", kind.value)
            except KubeNotFoundError as exc:
                troubles.append(str(exc))

    def _serve(self, data: Mapping[str, bytes]) -> None:
        wanted = data[CERTIFICATE], data[KEY]
        if wanted == self._served:
            return
        self._serving.serve(*wanted)
        self._served, self._ends_at = wanted, self._authority.ends_at(data)
        logger.info("the webhook serves a certificate that ends at %s", _date(self._ends_at))

    def _report(self, trouble: str) -> None:
        """Say what is wrong once, and when it is over."""
        if trouble and trouble != self.trouble:
            left = f"the one served meanwhile ends at {_date(self._ends_at)}" if self.serves else "none is served, so GPU pods are refused"
            logger.warning("the webhook's certificate cannot be kept: %s; %s", trouble, left)
        elif self.trouble and not trouble:
            logger.info("the webhook's certificate is kept again")
        self.trouble = trouble


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
