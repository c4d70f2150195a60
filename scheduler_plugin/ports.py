"""What verbs and services ask of the outside world, in our own types. Adapters raise from ``errors`` only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from scheduler_plugin.core.certificate import Holdings, Step
from scheduler_plugin.core.pods import PodFacts


class Clock(Protocol):
    """Time, as an argument."""

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        ...

    def now(self) -> float:
        """Seconds since 1970."""
        ...


class PodApi(Protocol):
    """What is asked of the Kubernetes API about single pods."""

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        """Bind the pod of this UID to a node and set annotations, both or neither.

        Raises: KubeConflictError (bound already, or another pod of this name), KubeNotFoundError, KubeRefusedError: nothing was changed.
                KubeApiError: the outcome is open.
        """
        ...

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        """Return a pod as the API knows it now, or None. Raises KubeApiError."""
        ...

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        """Return the pods of a namespace that have succeeded. Raises KubeApiError."""
        ...

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """Set annotations of the pod of this UID. Raises KubeApiError."""
        ...

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        """Have the pod of this UID end, as far as its disruption budgets let it; or ask only whether it could.

        Raises: KubeNotFoundError, KubeConflictError: it is gone. KubeApiError: its budget refuses, or the outcome is open.
        """
        ...


class EventApi(Protocol):
    """Tells people something about a pod."""

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        """Write a warning event about a pod; a long message is cut. Raises KubeApiError."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The lease as it is stored. ``version`` lets a write fail when somebody else wrote in between."""

    holder: str
    duration_seconds: float
    renewals: str
    """Changes with every renewal; compared, never read as a time, because clocks differ."""
    transitions: int
    version: str


class LeaseApi(Protocol):
    """The lease of the scheduler's replicas. Calls raise KubeApiError."""

    async def read(self) -> LeaseRecord | None:
        """Return the lease, or None when there is none."""
        ...

    async def write(self, holder: str, duration_seconds: float, transitions: int, version: str | None) -> LeaseRecord:
        """Create the lease (version None) or take or renew it. Raises KubeConflictError when it changed since it was read."""
        ...


@dataclass(frozen=True, slots=True)
class SecretRecord:
    """A Secret as it is stored. ``version`` lets a write fail when somebody else wrote in between."""

    data: Mapping[str, bytes]
    version: str


class WebhookKind(Enum):
    """The two kinds of webhook configurations, as the API calls them."""

    MUTATING = "mutatingwebhookconfigurations"
    VALIDATING = "validatingwebhookconfigurations"


class CertificateApi(Protocol):
    """Where the webhook's certificate is kept, and who is to trust it. Calls raise KubeApiError."""

    async def read(self) -> SecretRecord | None:
        """Return the Secret, or None when there is none."""
        ...

    async def write(self, data: Mapping[str, bytes], version: str | None) -> None:
        """Create the Secret (version None) or set these keys of it. Raises KubeConflictError when it changed since it was read."""
        ...

    async def trust(self, kind: WebhookKind, authorities: bytes) -> bool:
        """Have the API server trust these PEM certificates when it calls our webhooks; return whether that was news to it.

        Raises: KubeNotFoundError: there is no such configuration.
        """
        ...


class Authority(Protocol):
    """Reads and makes certificates; what it makes is meant for the Secret."""

    def inspect(self, data: Mapping[str, bytes]) -> Holdings:
        """Say what of this can be used; nothing of it is no error."""
        ...

    def carry_out(self, step: Step, data: Mapping[str, bytes], names: Sequence[str], now: float) -> dict[str, bytes]:
        """Return what the Secret shall hold after a step."""
        ...

    def ends_at(self, data: Mapping[str, bytes]) -> float:
        """Return when the serving certificate ends, in seconds since 1970."""
        ...


class Serving(Protocol):
    """The webhook's TLS server."""

    def serve(self, certificate: bytes, key: bytes) -> None:
        """Use this PEM certificate and key from the next connection on. Raises CertificateError."""
        ...
