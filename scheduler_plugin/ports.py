"""What verbs and services ask of the outside world, in our own types. Adapters raise from ``errors`` only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

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

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """Set annotations of the pod of this UID. Raises KubeApiError."""
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
