# SPDX-License-Identifier: Apache-2.0
"""Requests of the scheduler to the Kubernetes API: pods and bindings, events, the lease. ``aiohttp_transport`` says how they fail."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count, islice
from typing import Annotated, Any, Final

import msgspec

from aliquot import contract
from aliquot.contract.errors import AliquotError
from aliquot.kube import requests
from aliquot.kube.errors import KubeApiError, KubeNotFoundError, decode_reply
from aliquot.kube.requests import MERGE_PATCH, micro_timestamp, namespaced, object_path, pod_path, with_options
from scheduler_plugin.adapters.aiohttp_transport import REQUEST_SECONDS, KubeConnection
from scheduler_plugin.core.cluster.objects import ENDED, PodObject, PodStatus, pod_facts
from scheduler_plugin.core.cluster.pods import SUCCEEDED, PodFacts
from scheduler_plugin.ports import Clock, EndedPod, LeaseRecord

LIST_SECONDS: Final = 60.0
PAGE_SIZE: Final = 500
MAX_PAGES: Final = 25
"""Pages of ended pods: Kubernetes keeps 12,500 of them by default."""


class _PageMetadata(msgspec.Struct):
    continue_: str | None = msgspec.field(default=None, name="continue")


class _Ended(msgspec.Struct, rename="camel"):
    finished_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class _ContainerState(msgspec.Struct):
    terminated: _Ended | None = None


class _ContainerStatus(msgspec.Struct):
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)


class _EndedStatus(PodStatus, rename="camel"):
    container_statuses: list[_ContainerStatus] | None = None


class _EndedPod(PodObject):
    """A pod with the ends of its containers, which the pods of the watch are read without."""

    status: _EndedStatus = msgspec.field(default_factory=_EndedStatus)

    @property
    def ended_at(self) -> float | None:
        """When its last container ended, in seconds since 1970; None if unknown."""
        ends = [one.state.terminated.finished_at for one in self.status.container_statuses or () if one.state.terminated is not None]
        return max((end.timestamp() for end in ends if end is not None), default=None)


class _PodPage(msgspec.Struct):
    metadata: _PageMetadata
    items: list[_EndedPod] | None = None


class KubePods:
    """Implements ``ports.PodApi``, ``ports.NominationApi`` and ``ports.EndedPodApi``."""

    def __init__(self, connection: KubeConnection) -> None:
        self._connection = connection

    async def bind(self, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str]) -> None:
        """See ``ports.PodApi``."""
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "annotations": dict(annotations)},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._connection.request("POST", pod_path(namespace, name, "binding"), body=body)

    async def get_pod(self, namespace: str, name: str) -> PodFacts | None:
        """See ``ports.PodApi``."""
        try:
            data = await self._connection.request("GET", pod_path(namespace, name))
        except KubeNotFoundError:
            return None
        return _facts(decode_reply(data, PodObject, "a pod"))

    async def succeeded_pods(self, namespace: str) -> Sequence[PodFacts]:
        """See ``ports.PodApi``; the event loop runs on between pages."""
        return [_facts(item) async for page in self._pages(namespaced("pods", namespace), SUCCEEDED) for item in page]

    async def ended_pods(self) -> Sequence[EndedPod]:
        """See ``ports.EndedPodApi``; at most MAX_PAGES pages of each phase are read, and the event loop runs on between them."""
        found: list[EndedPod] = []
        for phase in ENDED:
            async for page in self._pages("/api/v1/pods", phase, MAX_PAGES):
                found += _with_gpus(page)
        return sorted(found, key=lambda one: one.ended_at)

    async def _pages(self, path: str, phase: str, most: int | None = None) -> AsyncIterator[Sequence[_EndedPod]]:
        """Yield the pods of a phase, page by page. Raises KubeApiError."""
        options = {"fieldSelector": f"status.phase={phase}", "limit": str(PAGE_SIZE)}
        for _ in islice(count(), most):
            data = await self._connection.request("GET", with_options(path, **options), seconds=LIST_SECONDS)
            page = decode_reply(data, _PodPage, "pods")
            yield page.items or ()
            if not page.metadata.continue_:
                return
            options["continue"] = page.metadata.continue_

    async def annotate(self, namespace: str, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """See ``ports.PodApi``."""
        patch = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        await self._connection.request("PATCH", pod_path(namespace, name), body=patch, content_type=MERGE_PATCH)

    async def nominate(self, namespace: str, name: str, uid: str, node: str) -> None:
        """See ``ports.NominationApi``."""
        patch = {"metadata": {"uid": uid}, "status": {"nominatedNodeName": node or None}}
        await self._connection.request("PATCH", pod_path(namespace, name, "status"), body=patch, content_type=MERGE_PATCH)

    async def evict(self, namespace: str, name: str, uid: str, *, dry_run: bool = False) -> None:
        """See ``ports.PodApi``."""
        body = requests.eviction(namespace, name, uid, dry_run=dry_run)
        await self._connection.request("POST", pod_path(namespace, name, "eviction"), body=body)


def _facts(item: PodObject) -> PodFacts:
    try:
        return pod_facts(item)
    except AliquotError as exc:
        raise KubeApiError(f"the API replied with a pod that cannot be read: {exc}") from exc


def _with_gpus(items: Sequence[_EndedPod]) -> Iterator[EndedPod]:
    """Yield the ended pods with GPUs; one that cannot be read is left out."""
    for item in items:
        with suppress(AliquotError):
            pod, ended_at = pod_facts(item), item.ended_at
            if pod.gpu is not None and ended_at is not None:
                yield EndedPod(ended_at, pod)


class KubeObjects:
    """Implements ``ports.ObjectApi``."""

    def __init__(self, connection: KubeConnection) -> None:
        self._connection = connection

    async def get_object(self, path: str) -> Mapping[str, Any] | None:
        """See ``ports.ObjectApi``."""
        try:
            data = await self._connection.request("GET", path)
        except KubeNotFoundError:
            return None
        return decode_reply(data, dict[str, Any], "an object")


class KubeEvents:
    """Implements ``ports.EventApi``."""

    def __init__(self, connection: KubeConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock

    async def post_event(self, namespace: str, name: str, uid: str, reason: str, message: str) -> None:
        """See ``ports.EventApi``."""
        metadata = {"generateName": f"{name}.", "namespace": namespace}
        involved = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid}
        now = self._clock.now()
        body = requests.event(metadata, involved, contract.SCHEDULER_NAME, now, type="Warning", reason=reason, message=message)
        await self._connection.request("POST", namespaced("events", namespace), body=body)


class _LeaseMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _LeaseSpec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct):
    metadata: _LeaseMetadata = msgspec.field(default_factory=_LeaseMetadata)
    spec: _LeaseSpec = msgspec.field(default_factory=_LeaseSpec)


class KubeLease:
    """Implements ``ports.LeaseApi`` with a Lease of coordination.k8s.io."""

    def __init__(self, connection: KubeConnection, namespace: str, name: str, clock: Clock, read_seconds: float = REQUEST_SECONDS) -> None:
        """Args: read_seconds: how long a read may take."""
        self._connection = connection
        self._read_seconds = read_seconds
        self._collection = namespaced("leases", namespace, "apis/coordination.k8s.io/v1")
        self._path = object_path(self._collection, name)
        self._name = name
        self._clock = clock

    async def read(self) -> LeaseRecord | None:
        """See ``ports.LeaseApi``."""
        try:
            return _record(await self._connection.request("GET", self._path, seconds=self._read_seconds))
        except KubeNotFoundError:
            return None

    async def write(self, holder: str, duration_seconds: float, transitions: int, version: str | None) -> LeaseRecord:
        """See ``ports.LeaseApi``."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, **({} if version is None else {"resourceVersion": version})},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": int(duration_seconds),
                "renewTime": micro_timestamp(self._clock.now()),
                "leaseTransitions": transitions,
            },
        }
        if version is None:
            return _record(await self._connection.request("POST", self._collection, body=body))
        return _record(await self._connection.request("PUT", self._path, body=body))


def _record(data: bytes) -> LeaseRecord:
    lease = decode_reply(data, _Lease, "a lease")
    spec = lease.spec
    return LeaseRecord(
        holder=spec.holder_identity or "",
        duration_seconds=float(spec.lease_duration_seconds or 0),
        renewals=spec.renew_time or "",
        transitions=spec.lease_transitions or 0,
        version=lease.metadata.resource_version,
    )
