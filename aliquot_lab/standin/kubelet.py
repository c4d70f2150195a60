# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the kubelet: admits the pods of its node, gives them devices, starts their containers and reports their state.

It has the interfaces that a GPU agent uses: device plugins (``plugins``), PodResources (``podresources``), CDI through a container runtime
(``runtime``), and pod status, node status and events in the API (``cluster``).

Invariant, as in the real kubelet: pods are admitted one after another. A failed ``Allocate`` ends the pod permanently; a refused start is
retried. ``restart`` keeps containers and the checkpoint, and drops connections. Extended resources without a plugin are counted from the
node's status, and set to zero only when the checkpoint is missing.

Left out: probes, volumes, images, cgroups, eviction and scheduling. The kubelet takes each pod with ``spec.nodeName`` of this node.
"""

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aliquot_lab.standin import workers
from aliquot_lab.standin.cluster import Change, ChangeType, Cluster, Kind, Object, timestamp
from aliquot_lab.standin.devices import AllocationError
from aliquot_lab.standin.errors import AlreadyExistsError, ConflictError, InvalidError, NotFoundError
from aliquot_lab.standin.plugins import Behaviour, DeviceManager, InterruptedCallError
from aliquot_lab.standin.podresources import PodResourcesServer
from aliquot_lab.standin.pods import (
    MIRROR,
    STATIC_UID,
    PodSpec,
    Role,
    is_active,
    is_extended_resource,
    parse_amount,
    read_pod,
    requested,
    uid_of,
)
from aliquot_lab.standin.runtime import Runtime

log = logging.getLogger(__name__)


class AdmissionError(Exception):
    """The pod is refused permanently; ``reason`` is the one in its status."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Kubelet:
    """One node's kubelet. It runs from ``start`` to ``shutdown``, with any number of calls of ``restart`` in between."""

    def __init__(
        self,
        cluster: Cluster,
        runtime: Runtime,
        node_name: str,
        *,
        plugin_dir: Path,
        pod_resources_socket: Path,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.cluster = cluster
        self.runtime = runtime
        self.node_name = node_name
        self.behaviour = behaviour or Behaviour()
        self.devices = DeviceManager(plugin_dir, self.behaviour, self._report_devices)
        self.pod_resources = PodResourcesServer(pod_resources_socket, lambda: self.devices.table, self._active_pods)
        self.up = asyncio.Event()
        """Set while the kubelet runs. It starts no container while it is down."""
        self._workers: dict[str, workers.PodWorker] = {}
        self._static: dict[str, Object] = {}
        """Manifests of static pods, by the UID under which they run."""
        self._queue: asyncio.Queue[Change] = asyncio.Queue()
        self._sync: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start: register the node, serve plugins and PodResources, then take the node's pods from the API."""
        self._register_node()
        fresh = not self.devices.checkpoint.exists()
        try:
            await self.devices.start()
            await self.pod_resources.start()
            if fresh:
                self._zero_extended_resources()
        except BaseException:  # also when the call is cancelled: a server that is not stopped outlives its loop
            await self._stop_serving()
            raise
        self.up.set()
        self._listen()
        self._sync = asyncio.create_task(self._sync_loop())

    async def stop(self) -> None:
        """Stop as a killed process does: connections break, sockets stay, containers continue."""
        self.up.clear()
        self._stop_listening()
        if self._sync is not None:
            self._sync.cancel()
            await asyncio.gather(self._sync, return_exceptions=True)
        self._queue = asyncio.Queue()
        await self._stop_serving()

    async def restart(self, *, downtime_seconds: float = 0.0, wipe_checkpoint: bool = False) -> None:
        """Stop and start again. All sockets in the plugin directory are removed, and every plugin must register again."""
        await self.stop()
        await asyncio.sleep(downtime_seconds)
        if wipe_checkpoint:
            self.devices.checkpoint.unlink(missing_ok=True)
        await self.start()

    async def _stop_serving(self) -> None:
        await self.devices.stop()
        await self.pod_resources.stop()

    async def shutdown(self) -> None:
        """Stop with the node, and kill every container."""
        if self.up.is_set():
            await self.stop()
        ending = [*self._endings, *(worker.task for worker in self._workers.values() if worker.task is not None)]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self.runtime.kill_all()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()

        def enqueue(change: Change) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, change)

        self._stop_listening = self.cluster.listen(enqueue)

    # --- the node object ---

    def _register_node(self) -> None:
        body = {
            "metadata": {"name": self.node_name, "labels": {"kubernetes.io/hostname": self.node_name}},
            "spec": {},
            "status": {
                "capacity": {"cpu": "64", "memory": "1056Gi", "pods": "110"},
                "allocatable": {"cpu": "64", "memory": "1056Gi", "pods": "110"},
                "nodeInfo": {
                    "kubeletVersion": self.behaviour.kubelet_version,
                    "containerRuntimeVersion": self.behaviour.runtime_version,
                },
                "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": timestamp()}],
            },
        }
        with suppress(AlreadyExistsError):
            self.cluster.create(Kind.NODE, body)

    def _report_devices(self) -> None:
        """Write the plugins' devices to the node's status, and copy the capacity of other extended resources to allocatable."""
        table = self.devices.table

        def change(node: dict[str, Any]) -> None:
            capacity, allocatable = node["status"]["capacity"], node["status"]["allocatable"]
            for resource in table.advertised:
                capacity[resource] = str(table.capacity(resource))
                allocatable[resource] = str(len(table.healthy(resource)))
            for resource in self.devices.removed:
                capacity[resource] = allocatable[resource] = "0"
            for resource, amount in capacity.items():
                if is_extended_resource(resource) and resource not in table.advertised:
                    allocatable[resource] = amount

        self.cluster.update(Kind.NODE, "", self.node_name, change)

    def _zero_extended_resources(self) -> None:
        def change(node: dict[str, Any]) -> None:
            for amounts in (node["status"]["capacity"], node["status"]["allocatable"]):
                for resource in filter(is_extended_resource, amounts):
                    amounts[resource] = "0"

        self.cluster.update(Kind.NODE, "", self.node_name, change)
        self._report_devices()

    # --- the sync loop: admission is serial, as in the kubelet ---

    async def _sync_loop(self) -> None:
        _, pods = self.cluster.list(Kind.POD, self._is_ours)
        for uid in self._workers.keys() - {uid_of(pod) for pod in pods}:
            self._end_worker(uid, grace_seconds=0.0)
        for pod in pods:
            await self._pod_present(pod, readmit=True)
        while True:
            change = await self._queue.get()
            if change.kind is Kind.NODE and change.object["metadata"]["name"] == self.node_name:
                self._report_devices()
            elif change.kind is Kind.POD and self._is_ours(change.object):
                await self._pod_changed(change)

    async def _pod_changed(self, change: Change) -> None:
        if uid_of(change.object) in self._static:
            await self._static_present(change)
        elif change.type is ChangeType.DELETED:
            self._end_worker(uid_of(change.object), grace_seconds=0.0)
        else:
            await self._pod_present(change.object, readmit=False)

    # --- static pods ---

    def run_static(self, manifest: Object) -> str:
        """Run a pod from a manifest on the node, with a mirror pod in the API; return the mirror's name."""
        name = f"{manifest['metadata']['name']}-{self.node_name}"
        uid = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
        annotations = {**manifest["metadata"].get("annotations", {}), MIRROR: uid, STATIC_UID: uid, "kubernetes.io/config.source": "file"}
        metadata = {**manifest["metadata"], "name": name, "annotations": annotations}
        self._static[uid] = {**manifest, "metadata": metadata, "spec": {**manifest["spec"], "nodeName": self.node_name}}
        self.cluster.create(Kind.POD, self._static[uid])
        return name

    async def _static_present(self, change: Change) -> None:
        """Recreate a deleted mirror. Deleting a mirror does not end the static pod."""
        metadata = change.object["metadata"]
        if change.type is ChangeType.DELETED:
            mirror = self.cluster.create(Kind.POD, self._static[uid_of(change.object)])
            if (worker := self._workers.get(uid_of(mirror))) is not None:
                worker.mirrored_by(mirror["metadata"]["uid"])
        elif "deletionTimestamp" in metadata:
            with suppress(NotFoundError, ConflictError):
                self.cluster.delete(Kind.POD, metadata["namespace"], metadata["name"], uid=metadata["uid"])
        else:
            await self._pod_present(change.object, readmit=False)

    def _is_ours(self, pod: Object) -> bool:
        return bool(pod["spec"].get("nodeName") == self.node_name)

    async def _pod_present(self, pod: Object, *, readmit: bool) -> None:
        uid = uid_of(pod)
        if "deletionTimestamp" in pod["metadata"]:
            self._end_worker(uid, grace_seconds=float(pod["metadata"].get("deletionGracePeriodSeconds", 30)))
            if uid not in self._workers:
                self._forget(pod)
        elif uid not in self._workers and is_active(pod):
            await self._take(pod)
        elif uid in self._workers and readmit:
            await self._readmit(self._workers[uid])

    async def _take(self, pod: Object) -> None:
        """Admit a new pod and run it, or fail it."""
        try:
            spec = read_pod(pod)
        except InvalidError as exc:
            self._fail(pod["metadata"], "UnexpectedAdmissionError", str(exc))
            return
        worker = workers.PodWorker(self, spec)
        self._workers[spec.uid] = worker
        try:
            self._check_node_fits(spec)
            await self._allocate(worker)
        except AdmissionError as exc:
            self._reject(worker, exc)
        except InterruptedCallError:
            del self._workers[spec.uid]
        else:
            worker.admit()

    async def _readmit(self, worker: workers.PodWorker) -> None:
        """Admit a pod again after a restart. Its running containers keep their devices without a call."""
        if not worker.active:
            return
        try:
            await self._allocate(worker)
        except AdmissionError as exc:
            self._reject(worker, exc)
        except InterruptedCallError:
            log.info("readmission interrupted: pod=%s", worker.spec.full_name)

    async def _allocate(self, worker: workers.PodWorker) -> None:
        """Give every container its devices. App containers first reuse those of the ordinary init containers."""
        spec = worker.spec
        reusable: dict[str, set[str]] = {}
        for container in spec.containers:
            if not worker.is_running(container.name):
                try:
                    await self.devices.allocate(
                        spec.uid, container.name, container.limits, reusable, {pod.uid for pod in self._active_pods()}
                    )
                except AllocationError as exc:
                    raise AdmissionError(
                        "UnexpectedAdmissionError", f"Pod was rejected: Allocate failed due to {exc}, which is unexpected"
                    ) from exc
            for item in self.devices.table.held(spec.uid, container.name):
                if container.role is Role.INIT:
                    reusable.setdefault(item.resource, set()).update(item.ids)
                else:
                    reusable.get(item.resource, set()).difference_update(item.ids)

    def _check_node_fits(self, spec: PodSpec) -> None:
        """Compare extended resources with the node's status. As in kubelet, resources that the node does not have are ignored."""
        status = self.cluster.get(Kind.NODE, "", self.node_name)["status"]
        others = [pod for pod in self._active_pods() if pod.uid != spec.uid]
        for resource, amount in requested(spec).items():
            if resource not in status["allocatable"]:
                continue
            allocatable = parse_amount(str(status["allocatable"][resource]))
            used = sum(requested(pod).get(resource, 0) for pod in others)
            if used + amount > allocatable:
                counts = f"requested: {amount}, used: {used}, capacity: {allocatable}"
                raise AdmissionError(f"OutOf{resource}", f"Pod was rejected: Node didn't have enough resource: {resource}, {counts}")

    def _reject(self, worker: workers.PodWorker, exc: AdmissionError) -> None:
        worker.reject()
        spec = worker.spec
        self._fail({"namespace": spec.namespace, "name": spec.name, "uid": spec.api_uid}, exc.reason, str(exc))

    def _fail(self, metadata: Mapping[str, Any], reason: str, message: str) -> None:
        def change(pod: dict[str, Any]) -> None:
            pod["status"] = {**pod.get("status", {}), "phase": "Failed", "reason": reason, "message": message}

        with suppress(NotFoundError, ConflictError):
            self.cluster.update(Kind.POD, metadata["namespace"], metadata["name"], change, uid=metadata["uid"])
        self.record_event(metadata, "Warning", reason, message)

    def _active_pods(self) -> list[PodSpec]:
        return [worker.spec for worker in self._workers.values() if worker.active]

    # --- the end of a pod ---

    def _end_worker(self, uid: str, *, grace_seconds: float) -> None:
        worker = self._workers.get(uid)
        if worker is None or worker.ending:
            return
        worker.ending = True
        ending = asyncio.create_task(self._finish(worker, grace_seconds))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _finish(self, worker: workers.PodWorker, grace_seconds: float) -> None:
        await worker.terminate(grace_seconds)
        del self._workers[worker.spec.uid]
        with suppress(NotFoundError, ConflictError):
            self.cluster.delete(Kind.POD, worker.spec.namespace, worker.spec.name, uid=worker.spec.api_uid)

    def _forget(self, pod: Object) -> None:
        """Remove a pod without running containers, such as one that failed admission before a restart."""
        metadata = pod["metadata"]
        with suppress(NotFoundError, ConflictError):
            self.cluster.delete(Kind.POD, metadata["namespace"], metadata["name"], uid=metadata["uid"])

    # --- calls from workers ---

    def record_event(self, involved: Mapping[str, Any], event_type: str, reason: str, message: str) -> None:
        """Post an event about a pod."""
        body = {
            "metadata": {"generateName": f"{involved['name']}.", "namespace": involved["namespace"]},
            "involvedObject": {
                "kind": "Pod",
                "apiVersion": "v1",
                "namespace": involved["namespace"],
                "name": involved["name"],
                "uid": involved["uid"],
            },
            "type": event_type,
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self.node_name},
            "firstTimestamp": timestamp(),
            "lastTimestamp": timestamp(),
            "count": 1,
        }
        self.cluster.create(Kind.EVENT, body)
