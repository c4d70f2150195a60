"""What the kubelet's device manager knows: advertised devices, who holds which, and the checkpoint that survives a restart.

Values in, values out; the calls to plugins are in ``plugins``. Kept true: a device ID is held by one pod at a time (a pod's app containers
may take over what its ordinary init containers held); every message of a plugin replaces its whole set; unhealthy devices count in
capacity, not in allocatable.
"""

import base64
import json
import random
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


class CheckpointError(Exception):
    """The checkpoint is not what was written; the kubelet then starts with nothing allocated."""


class AllocationError(Exception):
    """No devices for a container: its pod fails admission with this sentence."""


@dataclass(frozen=True, slots=True)
class PluginDevice:
    """One advertised device ID."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocation:
    """The devices of one container for one resource, with the plugin's answer as it came over the wire."""

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes


@dataclass(frozen=True, slots=True)
class Candidates:
    """From what a container's devices may be chosen: take all of ``must_include`` and ``missing`` more of ``pool``."""

    must_include: tuple[str, ...]
    pool: tuple[str, ...]
    missing: int


@dataclass
class DeviceTable:
    """Advertised devices and allocations."""

    advertised: dict[str, dict[str, PluginDevice]] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)

    def replace(self, resource: str, devices: Iterable[PluginDevice]) -> None:
        """Take a plugin's message: what it does not name is gone."""
        self.advertised[resource] = {device.id: device for device in devices}

    def mark_unhealthy(self, resource: str) -> None:
        """Keep a resource's devices in capacity but give none of them away: its plugin is gone."""
        devices = self.advertised.get(resource, {})
        self.replace(resource, [PluginDevice(device.id, healthy=False, numa_nodes=device.numa_nodes) for device in devices.values()])

    def capacity(self, resource: str) -> int:
        """Number of devices, healthy or not."""
        return len(self.advertised.get(resource, {}))

    def healthy(self, resource: str) -> set[str]:
        """IDs of the healthy devices."""
        return {device.id for device in self.advertised.get(resource, {}).values() if device.healthy}

    def held(self, pod_uid: str, container: str) -> list[Allocation]:
        """The allocations of one container."""
        return [item for item in self.allocations if (item.pod_uid, item.container) == (pod_uid, container)]

    def in_use(self, resource: str) -> set[str]:
        """IDs that some pod holds."""
        return {device_id for item in self.allocations if item.resource == resource for device_id in item.ids}

    def manages(self, resource: str) -> bool:
        """Whether the resource belongs to a device plugin, present or remembered."""
        return resource in self.advertised or any(item.resource == resource for item in self.allocations)

    def release_all_but(self, active_pod_uids: Collection[str]) -> None:
        """Free what ended pods held. Called lazily, before an allocation and before a listing, as the kubelet does."""
        self.allocations = [item for item in self.allocations if item.pod_uid in active_pod_uids]

    def candidates(
        self, allocation: Allocation, count: int, reusable: Collection[str], rng: random.Random, *, align: bool
    ) -> Candidates | None:
        """Say from what ``count`` devices for a container can be chosen; None when it already holds them.

        Args:   allocation: pod, container and resource that ask; its IDs are ignored.
                reusable:   what the pod's finished init containers hold of the resource.
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
    """Write allocations and the names of registered devices in the form of ``kubelet_internal_checkpoint``."""
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
    """Read a checkpoint back: allocations as they were, and every registered resource with no device until its plugin returns.

    Raises: CheckpointError.
    """
    try:
        document = json.loads(content)
        data = document["Data"]
        if document["Checksum"] != _checksum(data):
            raise CheckpointError("the checksum does not fit the data")
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
    """Return the available devices of the one NUMA node with the most that can serve ``count``, or all when none can."""
    by_node: dict[int, set[str]] = {}
    for device_id in available:
        for node in devices[device_id].numa_nodes:
            by_node.setdefault(node, set()).add(device_id)
    able = [(len(ids), -node) for node, ids in by_node.items() if len(ids) >= count]
    return by_node[-max(able)[1]] if able else available


def _by_numa_node(item: Allocation, devices: Mapping[str, PluginDevice]) -> dict[str, list[str]]:
    """Group IDs as the checkpoint does: by NUMA node, -1 for a device that names none."""
    groups: dict[str, list[str]] = {}
    for device_id in item.ids:
        nodes = devices[device_id].numa_nodes if device_id in devices else ()
        for node in nodes or (-1,):
            groups.setdefault(str(node), []).append(device_id)
    return groups


def _checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
