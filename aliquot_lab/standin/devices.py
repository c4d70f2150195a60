# SPDX-License-Identifier: Apache-2.0
"""The state of the kubelet's device manager: advertised devices, allocations, and the checkpoint that survives a restart.

Invariant: one pod at a time holds a device ID; its app containers reuse the IDs of its ordinary init containers. Every message of a plugin
replaces its whole set of devices. Unhealthy devices count in capacity and not in allocatable.

Values in, values out; the calls to plugins are in ``plugins``.
"""

import base64
import json
import random
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


class CheckpointError(Exception):
    """The checkpoint is damaged; the kubelet then starts without allocations."""


class AllocationError(Exception):
    """No devices for a container; its pod fails admission with this message."""


@dataclass(frozen=True, slots=True)
class PluginDevice:
    """One advertised device ID."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices of one container for one resource, with the plugin's encoded reply."""

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes


@dataclass(frozen=True, slots=True)
class Candidates:
    """The choice for a container: all of ``must_include``, and ``missing`` more from ``pool``."""

    must_include: tuple[str, ...]
    pool: tuple[str, ...]
    missing: int


@dataclass
class DeviceTable:
    """Advertised devices and allocations."""

    advertised: dict[str, dict[str, PluginDevice]] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)

    def replace(self, resource: str, devices: Iterable[PluginDevice]) -> None:
        """Replace the resource's devices by those of a plugin's message."""
        self.advertised[resource] = {device.id: device for device in devices}

    def mark_unhealthy(self, resource: str) -> None:
        """Mark all devices of a resource as unhealthy, because its plugin has disconnected."""
        devices = self.advertised.get(resource, {})
        self.replace(resource, [PluginDevice(device.id, healthy=False, numa_nodes=device.numa_nodes) for device in devices.values()])

    def capacity(self, resource: str) -> int:
        """Return the number of devices, healthy or not."""
        return len(self.advertised.get(resource, {}))

    def healthy(self, resource: str) -> set[str]:
        """Return the IDs of the healthy devices."""
        return {device.id for device in self.advertised.get(resource, {}).values() if device.healthy}

    def held(self, pod_uid: str, container: str) -> list[Allocation]:
        """Return the allocations of one container."""
        return [item for item in self.allocations if (item.pod_uid, item.container) == (pod_uid, container)]

    def in_use(self, resource: str) -> set[str]:
        """Return the IDs that pods hold."""
        return {device_id for item in self.allocations if item.resource == resource for device_id in item.ids}

    def manages(self, resource: str) -> bool:
        """Whether a connected plugin or an allocation has the resource."""
        return resource in self.advertised or any(item.resource == resource for item in self.allocations)

    def release_all_but(self, active_pod_uids: Collection[str]) -> None:
        """Free the devices of ended pods. The kubelet does this lazily, before an allocation and before a listing."""
        self.allocations = [item for item in self.allocations if item.pod_uid in active_pod_uids]

    def candidates(
        self, allocation: Allocation, count: int, reusable: Collection[str], rng: random.Random, *, align: bool
    ) -> Candidates | None:
        """Return the choice of ``count`` devices for a container; None when it already holds them.

        Args:   allocation: pod, container and resource of the request; its IDs are ignored.
                reusable:   IDs of the resource that the pod's finished init containers hold.
                align:      prefer devices of as few NUMA nodes as can serve the whole request.
        Raises: AllocationError, with the kubelet's reasons.
        """
        resource = allocation.resource
        present = next((item for item in self.held(allocation.pod_uid, allocation.container) if item.resource == resource), None)
        self._check_present(allocation, present, count)
        if present is not None:
            return None
        available = self.healthy(resource) - self.in_use(resource)
        reused = sorted(self.healthy(resource).intersection(reusable))
        rng.shuffle(reused)
        missing = max(0, count - len(reused))
        if len(available) < missing:
            raise AllocationError(
                f"requested number of devices unavailable for {resource}. Requested: {missing}, Available: {len(available)}"
            )
        pool = sorted(_aligned(self.advertised[resource], available, missing) if align else available)
        rng.shuffle(pool)
        return Candidates(tuple(reused[:count]), tuple(pool), missing)

    def _check_present(self, allocation: Allocation, present: Allocation | None, count: int) -> None:
        resource = allocation.resource
        if present is not None and len(present.ids) != count:
            raise AllocationError(
                f"container {allocation.container} changed its request for {resource} from {len(present.ids)} to {count} while admitted"
            )
        if resource not in self.advertised:
            raise AllocationError(f"cannot allocate unregistered device {resource}")
        healthy = self.healthy(resource)
        if not healthy:
            raise AllocationError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if present is not None and not healthy.issuperset(present.ids):
            raise AllocationError(f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}")


def encode_checkpoint(table: DeviceTable) -> bytes:
    """Encode allocations and registered devices in the format of ``kubelet_internal_checkpoint``."""
    entries = [
        {
            "PodUID": item.pod_uid,
            "ContainerName": item.container,
            "ResourceName": item.resource,
            "DeviceIDs": _by_numa_node(item, table.advertised.get(item.resource, {})),
            "AllocResp": base64.b64encode(item.response).decode(),
        }
        for item in table.allocations
    ]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {name: sorted(table.healthy(name)) for name in table.advertised}}
    return json.dumps({"Data": data, "Checksum": _checksum(data)}).encode()


def decode_checkpoint(content: bytes) -> DeviceTable:
    """Decode a checkpoint: the allocations, and every registered resource without devices until its plugin registers again.

    Raises: CheckpointError.
    """
    try:
        document = json.loads(content)
        data = document["Data"]
        if document["Checksum"] != _checksum(data):
            raise CheckpointError("the checksum does not match the data")
        allocations = [
            Allocation(
                pod_uid=entry["PodUID"],
                container=entry["ContainerName"],
                resource=entry["ResourceName"],
                ids=tuple(sorted({device_id for ids in entry["DeviceIDs"].values() for device_id in ids})),
                response=base64.b64decode(entry["AllocResp"]),
            )
            for entry in data["PodDeviceEntries"]
        ]
        return DeviceTable(advertised={name: {} for name in data["RegisteredDevices"]}, allocations=allocations)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"not a device manager checkpoint: {exc!r}") from exc


def _aligned(devices: Mapping[str, PluginDevice], available: Collection[str], count: int) -> Collection[str]:
    """Return the available devices of the NUMA node that has the most, if they are at least ``count``; otherwise all."""
    by_node: dict[int, set[str]] = {}
    for device_id in available:
        for node in devices[device_id].numa_nodes:
            by_node.setdefault(node, set()).add(device_id)
    able = [(len(ids), -node) for node, ids in by_node.items() if len(ids) >= count]
    return by_node[-max(able)[1]] if able else available


def _by_numa_node(item: Allocation, devices: Mapping[str, PluginDevice]) -> dict[str, list[str]]:
    """Group IDs as the checkpoint does: by NUMA node, -1 for a device without one."""
    groups: dict[str, list[str]] = {}
    for device_id in item.ids:
        nodes = devices[device_id].numa_nodes if device_id in devices else ()
        for node in nodes or (-1,):
            groups.setdefault(str(node), []).append(device_id)
    return groups


def _checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
