"""What is to be done about the webhook's certificate, given what is kept of it and the time.

Kept are a certificate authority (CA) and a serving certificate that it signed. Every replica decides by these rules alone, so they need no
leader: whoever looks first acts, the others find it done. A new authority is put in front of the old one long before it signs anything: the
serving certificate is renewed first where both are due, and then not for weeks. So all callers trust an authority before it is used.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from proto import contract
from scheduler_plugin.errors import CertificateError

WEBHOOK_SERVICE: Final = f"{contract.PRODUCT}-webhook"
"""The Service by which the API server calls the webhook (deploy/daemonset/scheduler/webhook.yaml)."""
WEBHOOK_CONFIGURATION: Final = contract.PRODUCT
"""The name of the mutating and of the validating webhook configuration."""
AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "tls.crt", "tls.key"
"""What the Secret holds, as PEM: the trusted authorities, of which the first signs; its key; the serving certificate and its key."""
_KEYS: Final = frozenset({AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY})
LIFE_LEFT_AT_RENEWAL: Final = 1 / 3
"""Of ten years and of 90 days that is time enough to notice that a renewal fails."""


class Step(Enum):
    """What to do."""

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
        """Whether so little of its life is left that it is to be renewed."""
        return now >= self.ends_at - (self.ends_at - self.begins_at) * LIFE_LEFT_AT_RENEWAL


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is kept, as far as it can be used."""

    authority: Span | None = None
    """The authority that signs; None without one whose key is there."""
    certificate: Span | None = None
    """The serving certificate; None without one that has its key and was signed by an authority that is kept."""
    names: frozenset[str] = frozenset()
    """The host names that the serving certificate is for."""
    flaws: tuple[str, ...] = ()
    """What cannot be used and why."""

    def serves(self, now: float) -> bool:
        """Whether there is a certificate to serve with at this time."""
        return self.certificate is not None and now < self.certificate.ends_at


def host_names(namespace: str) -> tuple[str, ...]:
    """Return the names by which the webhook's Service is called; the API server uses the first."""
    name = f"{WEBHOOK_SERVICE}.{namespace}.svc"
    return name, f"{name}.cluster.local"


def check_ownership(data: Mapping[str, bytes]) -> None:
    """Refuse a Secret that somebody else fills: an empty one is ours to fill, else it has exactly our keys.

    Raises: CertificateError.
    """
    if data and data.keys() != _KEYS:
        raise CertificateError(
            f"it holds {', '.join(sorted(data))}, want {', '.join(sorted(_KEYS))} or nothing at all: somebody else fills this Secret, "
            "so name another one in webhookCertificateSecret, or mount it and set tlsCertFile and tlsKeyFile"
        )


def next_step(holdings: Holdings, names: Collection[str], now: float) -> Step:
    """Say what is to be done first; asked again after that, in the end it is KEEP."""
    if holdings.authority is None or now >= holdings.authority.ends_at:
        return Step.START_AFRESH
    if holdings.certificate is None or holdings.certificate.due(now) or not holdings.names.issuperset(names):
        return Step.RENEW_CERTIFICATE
    return Step.RENEW_AUTHORITY if holdings.authority.due(now) else Step.KEEP
