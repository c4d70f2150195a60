# SPDX-License-Identifier: Apache-2.0
"""Decides when to renew the webhook's certificate, given the stored one and the time.

Stored are a certificate authority (CA) and a serving certificate that it signed. All replicas decide by these rules alone, so they need no
leader: the first replica acts, and the others find the work done. A new authority is put in front of the old one long before it signs: if
both are due, the serving certificate is renewed first, and then not for weeks. So all callers trust an authority before it is used.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from aliquot import contract
from scheduler_plugin.errors import CertificateError

WEBHOOK_SERVICE: Final = f"{contract.PRODUCT}-webhook"
"""The Service by which the API server calls the webhook (deploy/daemonset/scheduler/webhook.yaml)."""
WEBHOOK_CONFIGURATION: Final = contract.PRODUCT
"""The name of the mutating and of the validating webhook configuration."""
AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
"""The keys of the Secret, in PEM: the trusted authorities (the first one signs), its key, the serving certificate and its key."""
_KEYS: Final = frozenset({AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY})
LIFE_LEFT_AT_RENEWAL: Final = 1 / 3
"""Of ten years and of 90 days, this leaves enough time to notice a failing renewal."""


class Step(Enum):
    """The next action."""

    KEEP = "keep what is there"
    RENEW_CERTIFICATE = "sign a new serving certificate"
    RENEW_AUTHORITY = "put a new authority in front; the serving certificate stays"
    START_AFRESH = "make a new authority and a serving certificate"


@dataclass(frozen=True, slots=True)
class Span:
    """When a certificate is valid, in seconds since 1970."""

    begins_at: float
    ends_at: float

    def due(self, now: float) -> bool:
        """Whether less than a third of its life is left, so that it must be renewed."""
        return now >= self.ends_at - (self.ends_at - self.begins_at) * LIFE_LEFT_AT_RENEWAL


@dataclass(frozen=True, slots=True)
class Holdings:
    """The usable parts of what is stored."""

    authority: Span | None = None
    """The authority that signs; None if there is no authority with its key."""
    certificate: Span | None = None
    """The serving certificate; None if its key is missing or no stored authority signed it."""
    names: frozenset[str] = frozenset()
    """The host names of the serving certificate."""
    flaws: tuple[str, ...] = ()
    """Which parts cannot be used, and why."""

    def serves(self, now: float) -> bool:
        """Whether there is a valid certificate at this time."""
        return self.certificate is not None and now < self.certificate.ends_at


def host_names(namespace: str) -> tuple[str, ...]:
    """Return the host names of the webhook's Service; the API server uses the first."""
    name = f"{WEBHOOK_SERVICE}.{namespace}.svc"
    return name, f"{name}.cluster.local"


def check_ownership(data: Mapping[str, bytes]) -> None:
    """Refuse a Secret of another owner: ours is empty or has exactly our keys.

    Raises: CertificateError.
    """
    if data and data.keys() != _KEYS:
        raise CertificateError(
            f"the Secret has the keys {', '.join(sorted(data))}, expected {', '.join(sorted(_KEYS))} or no key: another program fills it, "
            "so set webhookCertificateSecret to another Secret, or mount this one and set tlsCertFile and tlsKeyFile"
        )


def next_step(holdings: Holdings, names: Collection[str], now: float) -> Step:
    """Return the next action. After it, call again until the result is KEEP."""
    if holdings.authority is None or now >= holdings.authority.ends_at:
        return Step.START_AFRESH
    if holdings.certificate is None or holdings.certificate.due(now) or not holdings.names.issuperset(names):
        return Step.RENEW_CERTIFICATE
    return Step.RENEW_AUTHORITY if holdings.authority.due(now) else Step.KEEP
