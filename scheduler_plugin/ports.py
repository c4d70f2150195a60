# SPDX-License-Identifier: Apache-2.0
"""The outside world as verbs and services use it, in our own types. Adapters raise only the errors of ``errors``."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from scheduler_plugin.core.certificate import Holdings, Step
from scheduler_plugin.core.claims.stored import StoredClaim
from scheduler_plugin.core.claims.templates import ClaimTemplate
from scheduler_plugin.core.cluster.pods import PodFacts


class Clock(Protocol):
    """The time."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...

    def now(self) -> float:
        """Return seconds since 1970."""
        ...


class Annotator(Protocol):
    """The part of ``PodApi`` that sets annotations."""

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """Set annotations of the pod of this UID. Raises KubeApiError."""
        ...


class EvictionApi(Protocol):
    """The part of ``PodApi`` that ends pods."""

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        """Evict the pod of this UID, within its disruption budgets. Args: dry_run: only check whether that is possible.

        Raises: KubeNotFoundError, KubeConflictError: the pod is gone. KubeApiError: a budget refuses, or the outcome is open.
        """
        ...


class PodApi(Annotator, EvictionApi, Protocol):
    """The Kubernetes API for single pods."""

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        """Bind the pod of this UID to a node and set annotations, both or neither.

        Raises: KubeConflictError (already bound, or another pod of this name), KubeNotFoundError, KubeRefusedError: the API changed
                nothing. KubeApiError: the outcome is open.
        """
        ...

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        """Return a pod as it is in the API now; None if there is no such pod. Raises KubeApiError."""
        ...

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        """Return the pods of a namespace that have succeeded. Raises KubeApiError."""
        ...


class NominationApi(Protocol):
    """Nominations of pods that are not bound yet."""

    async def nominate(self, namespace: str, name: str, uid: str, node: str) -> None:
        """Write the node that kube-scheduler tries first for the pod of this UID. Args: node: empty to clear the field.

        Raises: KubeRefusedError: the pod is bound or gone. KubeApiError.
        """
        ...


class EndedPod(NamedTuple):
    """A pod that ended by itself."""

    ended_at: float
    """In seconds since 1970."""
    pod: PodFacts


class EndedPodApi(Protocol):
    """The pods that have ended and that the API still keeps."""

    async def ended_pods(self) -> Sequence[EndedPod]:
        """Return those with GPUs, in the order of their ends. Raises KubeApiError."""
        ...


class ObjectApi(Protocol):
    """Reads single objects of any kind."""

    async def get_object(self, path: str) -> Mapping[str, Any] | None:
        """Return the object at a path of the API; None if there is no such object or kind. Raises KubeApiError."""
        ...


class EventApi(Protocol):
    """Writes events of pods."""

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        """Write a warning event of a pod; a long message is cut. Raises KubeApiError."""
        ...


@dataclass(frozen=True, slots=True)
class CheckAnswer:
    """An answer to the admission checks of a workload of Kueue."""

    namespace: str
    name: str
    version: str
    """Of the workload for which the answer was found."""
    checks: tuple[str, ...]
    """Names of the checks, all with the same answer."""
    state: str
    message: str
    holds: Mapping[str, str]
    """By pod set, the value of the annotation ``aliquot.dev/hold`` on its pods."""


class CheckApi(Protocol):
    """The API of Kueue, as an admission check needs it. Calls raise KubeApiError."""

    async def activate(self, name: str, generation: int) -> None:
        """Report that an admission check is Active: before that Kueue admits nothing through it."""
        ...

    async def answer(self, answer: CheckAnswer) -> None:
        """Write an answer. Raises KubeConflictError if the workload changed since the version of the answer."""
        ...


class BoostApi(Protocol):
    """The API of Kueue, as a longest wait needs it. Calls raise KubeApiError."""

    async def boost(self, namespace: str, name: str, version: str, amount: int) -> None:
        """Add an amount to the priority of a workload. Raises KubeConflictError if the workload changed since this version."""
        ...


@dataclass(frozen=True, slots=True)
class TemplateRecord:
    """A ResourceClaimTemplate that the webhook made, as it is stored."""

    namespace: str
    name: str
    version: str
    last_used: float
    """In seconds since 1970; 0 where it does not say."""
    spec: Any
    """Of the claims, as JSON."""


class TemplateApi(Protocol):
    """The ResourceClaimTemplates that the webhook makes. Calls raise KubeApiError."""

    async def read(self, namespace: str, name: str) -> TemplateRecord | None:
        """Return a template; None if there is no such template."""
        ...

    async def create(self, namespace: str, template: ClaimTemplate, now: float) -> None:
        """Create a template that was used now. Raises KubeConflictError if it exists."""
        ...

    async def touch(self, namespace: str, name: str, now: float) -> None:
        """Write that a template was used now. Raises KubeNotFoundError if it is gone."""
        ...

    async def listed(self) -> Sequence[TemplateRecord]:
        """Return the templates of all namespaces."""
        ...

    async def used(self, namespace: str) -> Set[str]:
        """Return the names of the templates that pods of a namespace name."""
        ...

    async def delete(self, record: TemplateRecord) -> None:
        """Delete a template, if it is still the same version. Raises KubeConflictError if it is not."""
        ...


class ClaimApi(Protocol):
    """The ResourceClaims that are allocated here. Calls raise KubeApiError.

    Writes raise KubeConflictError if the claim changed since the given state, and KubeNotFoundError if it is gone. They return the claim
    as it is then.
    """

    async def read(self, claim: StoredClaim) -> StoredClaim | None:
        """Return a claim as it is in the API now; None if there is no claim of this name."""
        ...

    async def protect(self, claim: StoredClaim) -> StoredClaim:
        """Add the finalizer without which an allocated claim could be deleted while its devices are in use."""
        ...

    async def allocate(self, claim: StoredClaim, allocation: Mapping[str, Any], pod: PodFacts) -> StoredClaim:
        """Write an allocation, and that a pod uses the claim."""
        ...

    async def free(self, claim: StoredClaim) -> StoredClaim:
        """Remove the allocation, and the pods that use the claim."""
        ...

    async def open_gate(self, pod: PodFacts) -> None:
        """Remove our scheduling gate from a pod."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The lease as it is stored. With ``version`` a write fails if another client wrote in between."""

    holder: str
    duration_seconds: float
    renewals: str
    """Changes with every renewal; compared, never read as a time, because clocks differ."""
    transitions: int
    version: str


class LeaseApi(Protocol):
    """The lease of the scheduler's replicas. Calls raise KubeApiError."""

    async def read(self) -> LeaseRecord | None:
        """Return the lease; None if it does not exist."""
        ...

    async def write(self, holder: str, duration_seconds: float, transitions: int, version: str | None) -> LeaseRecord:
        """Create the lease (version None), or acquire or renew it. Raises KubeConflictError if it changed since it was read."""
        ...


@dataclass(frozen=True, slots=True)
class SecretRecord:
    """A Secret as it is stored. With ``version`` a write fails if another client wrote in between."""

    data: Mapping[str, bytes]
    version: str


class WebhookKind(Enum):
    """The two kinds of webhook configurations, as the API calls them."""

    MUTATING = "mutatingwebhookconfigurations"
    VALIDATING = "validatingwebhookconfigurations"


class CertificateApi(Protocol):
    """The Secret of the webhook's certificate, and the webhook configurations that trust it. Calls raise KubeApiError."""

    async def read(self) -> SecretRecord | None:
        """Return the Secret; None if it does not exist."""
        ...

    async def write(self, data: Mapping[str, bytes], version: str | None) -> None:
        """Create the Secret (version None) or set these keys of it. Raises KubeConflictError if it changed since it was read."""
        ...

    async def trust(self, kind: WebhookKind, authorities: bytes) -> bool:
        """Make the API server trust these PEM certificates when it calls our webhooks; return whether that changed the configuration.

        Raises: KubeNotFoundError: there is no such configuration.
        """
        ...


class Authority(Protocol):
    """Reads and creates certificates for the Secret."""

    def inspect(self, data: Mapping[str, bytes]) -> Holdings:
        """Return what of this data can be used. Unusable data raises no error."""
        ...

    def carry_out(self, step: Step, data: Mapping[str, bytes], names: Sequence[str], now: float) -> dict[str, bytes]:
        """Return the Secret's data after a step."""
        ...

    def ends_at(self, data: Mapping[str, bytes]) -> float:
        """Return when the serving certificate expires, in seconds since 1970."""
        ...


class Serving(Protocol):
    """The webhook's TLS server."""

    def serve(self, certificate: bytes, key: bytes) -> None:
        """Use this PEM certificate and key from the next connection on. Raises CertificateError."""
        ...
