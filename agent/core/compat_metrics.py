# SPDX-License-Identifier: Apache-2.0
"""Metrics under HAMi's names, for dashboards built on them, from the same snapshot as Aliquot's own (``compatMetrics: hami``).

Names and labels are those of HAMi 2.10 (its monitor, its scheduler and the older names of both). Units are what those dashboards expect:
utilisation and cores in percent of a device although the names say ratio, fractions of memory from 0 to 1. Three differences are
intended: every host family has the node as a label, series exist from the grant until the container has ended permanently, and
``container_index`` is the position in the pod's own list. Each agent reports its own node. Quotas belong to the scheduler and are missing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.inventory import InventoryDevice
from agent.core.ledger import Grant
from agent.core.metrics import Family, Kind, Snapshot, shares_on
from agent.core.mig import identity_of
from agent.core.usage import DeviceUsage
from aliquot.contract import PRODUCT, units
from aliquot.contract.model import DeviceShare

_PERCENT = 100
_BUILD = ("version", "revision", "build_date", "go_version", "compiler", "platform")
_ZONE = ("zone", "vGPU")
"""HAMi's scheduler puts this label on all of its metrics."""


class CompatMetrics(StrEnum):
    """The additional metric names that the agent serves."""

    NONE = "none"
    HAMI = "hami"


@dataclass(frozen=True, slots=True)
class CompatFacts:
    """Values that HAMi's metrics need in addition to the snapshot, by grant id, or by grant id and device UUID."""

    container_index: Mapping[str, int] = field(default_factory=dict)
    """The container's position in its pod."""
    idle_seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Time since a launch of the container was last seen."""


NO_FACTS = CompatFacts()

_Sample = tuple[tuple[str, ...], float]


def hami_families(snapshot: Snapshot, facts: CompatFacts = NO_FACTS) -> Iterable[Family]:
    """Return all families under HAMi's names, new and old."""
    yield from _host_families(snapshot)
    yield from _promise_families(snapshot)
    yield from _container_promises(snapshot, facts)
    yield from _container_usage(snapshot, facts)
    yield from _instances(snapshot)
    # only the version is known; Prometheus drops empty labels
    build = (f"{PRODUCT}-{snapshot.version}", *("" for _ in _BUILD[1:]))
    yield Family("hami_build_info", Kind.GAUGE, "Version of the agent.", _BUILD, ((build, 1.0),))


def _both(
    names: tuple[str, str], text: str, labels: tuple[str, ...], old_labels: tuple[str, ...], samples: Sequence[_Sample]
) -> list[Family]:
    """Return one family under its new and its old name. The old one may have fewer labels: it takes the first of the new ones."""
    new, old = names
    old_samples = tuple((values[: len(old_labels)], value) for values, value in samples)
    return [Family(new, Kind.GAUGE, text, labels, tuple(samples)), Family(old, Kind.GAUGE, text, old_labels, old_samples)]


def _with_zone(families: Iterable[Family]) -> Iterable[Family]:
    name, value = _ZONE
    for one in families:
        samples = tuple(((*labels, value), number) for labels, number in one.samples)
        yield Family(one.name, one.kind, one.help, (*one.labels, name), samples)


# --- GPUs, as HAMi's monitor reports them ---------------------------------------------------------------------------

_HOST = ("node", "device_index", "device_uuid", "device_type")
_OLD_HOST = ("nodeid", "deviceidx", "deviceuuid", "devicetype")


def _host_families(snapshot: Snapshot) -> Iterable[Family]:
    def samples(value_of: Callable[[InventoryDevice], float | None]) -> list[_Sample]:
        return [
            ((snapshot.node, str(entry.device.minor), entry.device.uuid, entry.device.model), value)
            for entry in snapshot.inventory.devices
            if (value := value_of(entry)) is not None
        ]

    yield from _both(
        ("hami_host_gpu_memory_used_bytes", "HostGPUMemoryUsage"),
        "Device memory in use, in bytes.",
        _HOST,
        _OLD_HOST,
        samples(lambda entry: entry.memory_used_bytes),
    )
    yield from _both(
        ("hami_host_gpu_utilization_ratio", "HostCoreUtilization"),
        "Percentage of recent time in which the device was busy.",
        _HOST,
        _OLD_HOST,
        samples(lambda entry: _percent(entry.utilization_ratio)),
    )
    yield Family(
        "hami_host_gpu_memory_controller_utilization_ratio",
        Kind.GAUGE,
        "Percentage of recent time in which the device's memory controller was busy.",
        _HOST,
        tuple(samples(lambda entry: _percent(entry.sensors.memory_utilization_ratio))),
    )


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else ratio * _PERCENT


# --- GPUs, as HAMi's scheduler reports them -------------------------------------------------------------------------

_DEVICE = ("node", "device_uuid", "device_index", "device_type")
_OLD_DEVICE = ("nodeid", "deviceuuid", "deviceidx", "devicetype")


def _promise_families(snapshot: Snapshot) -> Iterable[Family]:
    return _with_zone(_promises(snapshot))


def _promises(snapshot: Snapshot) -> Iterable[Family]:
    entries = snapshot.inventory.devices
    promised = {entry.device.uuid: shares_on(entry, snapshot.grants) for entry in entries}
    whole = str(units.WHOLE_GPU_PERCENT)

    def memory(entry: InventoryDevice) -> float:
        return sum(share.memory_bytes for share in promised[entry.device.uuid])

    def cores(entry: InventoryDevice) -> float:
        return sum(share.cores_percent or 0 for share in promised[entry.device.uuid])

    def samples(value_of: Callable[[InventoryDevice], float], *further: Callable[[InventoryDevice], str]) -> list[_Sample]:
        return [
            (
                (
                    snapshot.node,
                    entry.device.uuid,
                    str(entry.device.minor),
                    *(text_of(entry) for text_of in further),
                    entry.device.model,
                ),
                value_of(entry),
            )
            for entry in entries
        ]

    yield from _both(
        ("hami_gpu_memory_limit_bytes", "GPUDeviceMemoryLimit"),
        "Device memory available to containers, in bytes.",
        _DEVICE,
        _OLD_DEVICE,
        samples(lambda entry: entry.device.memory_bytes),
    )
    yield from _both(
        ("hami_gpu_core_limit_ratio", "GPUDeviceCoreLimit"),
        "Percentage of compute available to containers.",
        _DEVICE,
        _OLD_DEVICE,
        samples(lambda _: units.WHOLE_GPU_PERCENT),
    )
    yield from _both(
        ("hami_gpu_memory_allocated_bytes", "GPUDeviceMemoryAllocated"),
        "Device memory granted to containers, in bytes.",
        (*_DEVICE[:-1], "device_cores", _DEVICE[-1]),
        (*_OLD_DEVICE[:-1], "devicecores", _OLD_DEVICE[-1]),
        samples(memory, lambda _: whole),
    )
    yield from _both(
        ("hami_gpu_shared_count", "GPUDeviceSharedNum"),
        "Number of containers that share the device.",
        _DEVICE,
        _OLD_DEVICE,
        samples(lambda entry: len(promised[entry.device.uuid])),
    )
    yield from _both(
        ("hami_gpu_core_allocated_ratio", "GPUDeviceCoreAllocated"),
        "Percentage of compute granted to containers.",
        _DEVICE,
        _OLD_DEVICE,
        samples(cores),
    )
    yield from _both(
        ("hami_node_gpu_overview", "nodeGPUOverview"),
        "Device memory granted to containers, in bytes, with facts about the device in the labels.",
        (*_DEVICE[:-1], "device_cores", "device_memory_limit", _DEVICE[-1]),
        (*_OLD_DEVICE[:-1], "devicecores", "devicememorylimit", _OLD_DEVICE[-1]),
        samples(memory, lambda _: whole, lambda entry: str(units.bytes_to_mib(entry.device.memory_bytes))),
    )
    yield from _both(
        ("hami_node_gpu_memory_allocated_ratio", "nodeGPUMemoryPercentage"),
        "Fraction of the device's memory granted to containers, from 0 to 1.",
        _DEVICE,
        _OLD_DEVICE[:-1],
        samples(lambda entry: memory(entry) / entry.device.memory_bytes),
    )


# --- containers -----------------------------------------------------------------------------------------------------

_PROMISE = ("namespace", "node", "pod", "container_index", "device_uuid")
_OLD_PROMISE = ("podnamespace", "nodename", "podname", "containeridx", "deviceuuid")
_CONTAINER = ("namespace", "pod", "container", "vdevice_index", "device_uuid")
_OLD_CONTAINER = ("podnamespace", "podname", "ctrname", "vdeviceid", "deviceuuid")


def _container_promises(snapshot: Snapshot, facts: CompatFacts) -> Iterable[Family]:
    parents = _gpu_of(snapshot)

    def samples(value_of: Callable[[DeviceShare], float]) -> list[_Sample]:
        return [
            ((grant.namespace, snapshot.node, grant.pod, str(index), parents.get(share.device_uuid, share.device_uuid)), value_of(share))
            for grant in snapshot.containers
            if (index := facts.container_index.get(grant.grant_id)) is not None
            for share in grant.shares
        ]

    return _with_zone(
        [
            *_both(
                ("hami_vgpu_memory_allocated_bytes", "vGPUMemoryAllocated"),
                "Device memory granted to the container, in bytes.",
                _PROMISE,
                _OLD_PROMISE,
                samples(lambda share: share.memory_bytes),
            ),
            *_both(
                ("hami_vgpu_core_allocated_ratio", "vGPUCoreAllocated"),
                "Percentage of compute granted to the container.",
                _PROMISE,
                _OLD_PROMISE,
                samples(lambda share: share.cores_percent or 0),
            ),
        ]
    )


def _container_usage(snapshot: Snapshot, facts: CompatFacts) -> Iterable[Family]:
    parents = _gpu_of(snapshot)
    of_instances = {uuid: used for entry in snapshot.inventory.devices for uuid, used in entry.instances_used_bytes.items()}

    def usage_of(grant: Grant, position: int, share: DeviceShare) -> DeviceUsage | None:
        used = snapshot.usage.get(grant.grant_id)
        if used is not None:
            return used.devices[position]
        used_bytes = of_instances.get(share.device_uuid)
        if used_bytes is None and not grant.under_shim:
            used_bytes = snapshot.holdings.used_bytes(grant.grant_id, share.device_uuid)
        return None if used_bytes is None else DeviceUsage(used_bytes)

    def samples(value_of: Callable[[Grant, DeviceShare, DeviceUsage | None], float | None]) -> list[_Sample]:
        return [
            (
                (grant.namespace, grant.pod, grant.container, str(position), parents.get(share.device_uuid, share.device_uuid)),
                value,
            )
            for grant in snapshot.containers
            for position, share in enumerate(grant.shares)
            if (value := value_of(grant, share, usage_of(grant, position, share))) is not None
        ]

    used = samples(lambda _grant, _share, usage: usage.used_bytes if usage is not None else None)
    yield from _both(
        ("hami_vgpu_memory_used_bytes", "vGPU_device_memory_usage_in_bytes"),
        "Device memory held by the container's processes, in bytes.",
        _CONTAINER,
        _OLD_CONTAINER,
        used,
    )
    yield from _both(
        ("hami_vgpu_memory_limit_bytes", "vGPU_device_memory_limit_in_bytes"),
        "Device memory granted to the container, in bytes.",
        _CONTAINER,
        _OLD_CONTAINER,
        samples(lambda _grant, share, _usage: share.memory_bytes),
    )
    yield from _both(
        ("hami_container_device_memory_bytes", "Device_memory_desc_of_container"),
        "Device memory held by the container's processes, in bytes.",
        _CONTAINER,
        _OLD_CONTAINER,
        used,
    )
    yield from _both(
        ("hami_container_device_utilization_ratio", "Device_utilization_desc_of_container"),
        "Percentage of the device's recent time that the container used.",
        _CONTAINER,
        _OLD_CONTAINER,
        samples(lambda grant, share, _usage: _percent(snapshot.utilization.get((grant.grant_id, share.device_uuid)))),
    )
    yield from _both(
        ("hami_container_last_kernel_elapsed_seconds", "Device_last_kernel_of_container"),
        "Seconds since a launch of the container was last seen, as exact as the time between scrapes.",
        _CONTAINER,
        _OLD_CONTAINER,
        samples(lambda grant, share, _usage: facts.idle_seconds.get((grant.grant_id, share.device_uuid))),
    )
    parts: Mapping[str, Callable[[DeviceUsage], int]] = {
        "context": lambda usage: usage.context_bytes,
        "module": lambda usage: usage.module_bytes,
        "buffer": lambda usage: max(0, usage.used_bytes - usage.context_bytes - usage.module_bytes),
    }
    for part, bytes_of in parts.items():

        def counted(
            grant: Grant, _share: DeviceShare, usage: DeviceUsage | None, of: Callable[[DeviceUsage], int] = bytes_of
        ) -> float | None:
            return of(usage) if usage is not None and grant.under_shim else None

        name, text = f"hami_vgpu_memory_{part}_bytes", f"Part of the memory in use: {part}, in bytes."
        yield Family(name, Kind.GAUGE, text, _CONTAINER, tuple(samples(counted)))


# --- MIG ------------------------------------------------------------------------------------------------------------

_IDENTITY = ("mig_uuid", "profile", "gpu_instance_id", "compute_instance_id")


def _instances(snapshot: Snapshot) -> Iterable[Family]:
    granted = {share.device_uuid: (grant, position) for grant in snapshot.grants for position, share in enumerate(grant.shares)}
    of_containers, of_nodes, old_of_containers, old_of_nodes = list[_Sample](), list[_Sample](), list[_Sample](), list[_Sample]()
    for entry in snapshot.inventory.devices:
        device = entry.device
        for one in device.mig_instances:
            if one.uuid not in granted:
                continue
            grant, position = granted[one.uuid]
            numbered = identity_of(one, snapshot.made_for(grant, grant.shares[position]))
            if numbered is None:
                continue
            mig_uuid, gpu_instance_id, compute_instance_id = numbered
            identity = (mig_uuid, one.profile, gpu_instance_id, compute_instance_id)
            holder = (grant.namespace, grant.pod, grant.container, str(position), device.uuid)
            node = (snapshot.node, device.uuid, str(device.minor))
            if grant.grant_id not in snapshot.ended:
                of_containers.append(((*holder, *identity), 1.0))
                old_of_containers.append(((*holder, gpu_instance_id), 1.0))
            of_nodes.append(((*node, *identity, str(one.placement_start), str(one.placement_size)), 1.0))
            old_of_nodes.append(((*node, f"{one.profile}-{gpu_instance_id}"), 1.0))
    yield Family(
        "hami_mig_device_info", Kind.GAUGE, "MIG instance of the container, in the labels.", (*_CONTAINER, *_IDENTITY), tuple(of_containers)
    )
    yield Family(
        "MigInfo", Kind.GAUGE, "MIG instance of the container, in the labels.", (*_OLD_CONTAINER, "instanceid"), tuple(old_of_containers)
    )
    labels = (*_DEVICE[:-1], *_IDENTITY, "placement_start", "placement_size")
    yield from _with_zone(
        [
            Family(
                "hami_node_gpu_mig_instance_info",
                Kind.GAUGE,
                "MIG instance that a container holds, in the labels.",
                labels,
                tuple(of_nodes),
            ),
            Family(
                "nodeGPUMigInstance",
                Kind.GAUGE,
                "MIG instance that a container holds, in the labels.",
                (*_OLD_DEVICE[:-1], "migname"),
                tuple(old_of_nodes),
            ),
        ]
    )


def _gpu_of(snapshot: Snapshot) -> Mapping[str, str]:
    """Return the GPU of every MIG instance by UUID."""
    return {one.uuid: entry.device.uuid for entry in snapshot.inventory.devices for one in entry.device.mig_instances}
