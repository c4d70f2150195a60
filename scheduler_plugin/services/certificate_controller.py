# SPDX-License-Identifier: Apache-2.0
"""Maintains the webhook's certificate: creates it, renews it in time, makes the API server trust it, and serves it.

It is in a Secret that each replica reads and may write. A write fails if another replica wrote in between, so all replicas serve the same
certificate. New data is first made trusted and then served. While the API is unavailable, the old certificate stays in use, with a warning,
and the metric of its expiry shows how long that can last.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from aliquot.kube.errors import KubeApiError, KubeConflictError, KubeNotFoundError
from scheduler_plugin.core.certificate import AUTHORITIES, CERTIFICATE, KEY, Step, check_ownership, next_step
from scheduler_plugin.errors import CertificateError
from scheduler_plugin.ports import Authority, CertificateApi, Clock, Serving, WebhookKind

logger = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 5.0
"""How soon another replica's certificate is served, and a webhook configuration that was applied again trusts it: three small reads."""
MAX_STEPS: Final = 5
"""Writes in one period: the work takes two; the others are for conflicts with replicas that wrote first."""


class CertificateController:
    """The loop of one replica."""

    def __init__(self, api: CertificateApi, authority: Authority, serving: Serving, clock: Clock, names: Sequence[str]) -> None:
        """Args: names: the host names of the certificate."""
        self._api = api
        self._authority = authority
        self._serving = serving
        self._clock = clock
        self._names = names
        self._served: tuple[bytes, bytes] | None = None
        self._ends_at = 0.0
        self.trouble = ""
        """Why the certificate cannot be maintained; empty without a problem."""

    @property
    def serves(self) -> bool:
        """Whether there has been a certificate to serve."""
        return self._served is not None

    def ends_at(self) -> float:
        """When the certificate that is served ends, in seconds since 1970; 0 without one."""
        return self._ends_at

    async def run(self) -> None:
        """Maintain the certificate until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(PERIOD_SECONDS)

    async def step(self) -> None:
        """Look once."""
        troubles: list[str] = []
        try:
            data = await self._kept(troubles)
            if self._served is None:  # an untrusted certificate is better than no server
                self._serve(data)
            await self._trust(data[AUTHORITIES], troubles)
            self._serve(data)
        except (KubeApiError, CertificateError) as exc:
            troubles.append(str(exc))
        self._report("; ".join(troubles))

    async def _kept(self, troubles: list[str]) -> Mapping[str, bytes]:
        """Do what is due and return the Secret's data. If a write fails and the old certificate is valid, ``troubles`` gets the error."""
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
                troubles.append(f"it is time to {step.value}, which failed: {exc}")
                return data
            flaws = f" because of {'; '.join(holdings.flaws)}" if holdings.flaws else ""
            logger.log(logging.WARNING if flaws else logging.INFO, "the webhook's certificate: %s: done%s", step.value, flaws)
        raise CertificateError(f"the Secret changed during each of {MAX_STEPS} writes: check whether another program writes it")

    async def _trust(self, authorities: bytes, troubles: list[str]) -> None:
        """Make the API server trust the authorities. A missing configuration does not block the other: the API server does not use it."""
        for kind in WebhookKind:
            try:
                if await self._api.trust(kind, authorities):
                    logger.info("wrote the authority of the webhook's certificate into %s", kind.value)
            except KubeNotFoundError as exc:
                troubles.append(str(exc))

    def _serve(self, data: Mapping[str, bytes]) -> None:
        wanted = data[CERTIFICATE], data[KEY]
        if wanted == self._served:
            return
        self._serving.serve(*wanted)
        self._served, self._ends_at = wanted, self._authority.ends_at(data)
        logger.info("the webhook serves a certificate that expires at %s", _date(self._ends_at))

    def _report(self, trouble: str) -> None:
        """Log a problem once, and its end."""
        if trouble and trouble != self.trouble:
            served = f"the one served meanwhile expires at {_date(self._ends_at)}"
            left = served if self.serves else "no certificate is served, so GPU pods are refused"
            logger.warning("the webhook's certificate cannot be maintained: %s; %s", trouble, left)
        elif self.trouble and not trouble:
            logger.info("the webhook's certificate is maintained again")
        self.trouble = trouble


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
