# SPDX-License-Identifier: Apache-2.0
"""Devices, states and pods with defaults, so that a test shows only what matters to it."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

from aliquot import contract
from aliquot.contract.model import ContainerRequest, ContainerSpec, Device, DeviceShare, Link, LinkKind, MigInstance, Pod, Preferences
from aliquot.contract.units import MIB
from aliquot.placement.device import DeviceState

ANYTHING = Preferences()


def make_device(
    minor: int = 0, *, mib: int = 1000, model: str = "NVIDIA H200", numa: int | None = 0, mig: tuple[MigInstance, ...] = ()
) -> Device:
    return Device(
        uuid=f"GPU-{minor}",
        model=model,
        minor=minor,
        pci_bus_id=f"00000000:{minor:02X}:00.0",
        memory_bytes=mib * MIB,
        numa_node=numa,
        mig_enabled=bool(mig),
        mig_instances=mig,
    )


def make_instance(parent: int, index: int, *, profile: str = "1g.10gb", mib: int = 100) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{parent}-{index}",
        parent_uuid=f"GPU-{parent}",
        profile=profile,
        memory_bytes=mib * MIB,
        gpu_instance_id=index,
        compute_instance_id=0,
        placement_start=index,
        placement_size=1,
    )


def share(device: int = 0, mib: int = 100, cores: int | None = 10) -> DeviceShare:
    return DeviceShare(f"GPU-{device}", mib * MIB, cores)


def make_states(count: int = 4, *used: DeviceShare, numa_nodes: int = 1, **settings: Any) -> list[DeviceState]:
    """Make a node: its devices are divided evenly over NUMA nodes and carry the given shares."""
    devices = [make_device(minor, numa=minor * numa_nodes // count) for minor in range(count)]
    return [DeviceState.of(device, used, **settings) for device in devices]


def ask(vgpus: int = 1, mib: int | None = 100, cores: int | None = None, *, name: str = "main", init: bool = False) -> ContainerRequest:
    """Ask for amounts per vGPU."""
    return ContainerRequest(name, vgpus, None if mib is None else mib * vgpus * MIB, None if cores is None else cores * vgpus, init=init)


def ask_mig(*profiles: tuple[str, int], name: str = "main") -> ContainerRequest:
    return ContainerRequest(name, mig=profiles)


def make_spec(name: str = "main", *, init: bool = False, sidecar: bool = False, **limits: Any) -> ContainerSpec:
    """Make a container; limits by the last part of their name: ``vgpu="1", vgpu_memory="4096"``."""
    full = {f"{contract.RESOURCE_DOMAIN}/{short.replace('_', '-')}": amount for short, amount in limits.items()}
    return ContainerSpec(name, full, init=init or sidecar, restartable=sidecar)


def make_pod(*containers: ContainerSpec, annotations: Mapping[str, str] | None = None) -> Pod:
    return Pod("team", "train", "uid-1", "node-1", "Pending", annotations or {}, containers)


def nvlinks(pairs: Iterable[tuple[int, int]], lanes: int = 18) -> list[Link]:
    return [Link(f"GPU-{a}", f"GPU-{b}", LinkKind.NVLINK, lanes) for a, b in pairs]


def all_to_all(count: int, lanes: int = 18) -> list[Link]:
    return nvlinks(combinations(range(count), 2), lanes)


def partitioned(parent: int, count: int, *used: int) -> DeviceState:
    device = make_device(parent, mig=tuple(make_instance(parent, index) for index in reversed(range(count))))
    return DeviceState.of(device, [DeviceShare(f"MIG-{parent}-{index}", MIB) for index in used])


def names(instances):
    return [instance.uuid for instance in instances]


SHAPES = {
    "1g.10gb": (1, 7, range(7)),
    "1g.10gb+me": (1, 1, range(7)),
    "2g.20gb": (2, 3, (0, 2, 4)),
    "3g.40gb": (4, 2, (0, 4)),
    "7g.80gb": (8, 1, (0,)),
}
"""Of an A100: size in memory slices, how many at most, where they may begin."""


def place(profile: str, start: int, parent: int = 0) -> MigInstance:
    size, most, _ = SHAPES[profile]
    return MigInstance(f"GPU-{parent}/{profile}@{start}", f"GPU-{parent}", profile, MIB, 0, 0, start, size, most)


def empty(parent: int = 0, *existing: MigInstance, used: Iterable[str] = ()) -> DeviceState:
    """A GPU on which instances are made on demand."""
    places = [place(profile, start, parent) for profile, (_, _, starts) in SHAPES.items() for start in starts]
    return DeviceState.of(make_device(parent, mig=(*existing, *places)), [DeviceShare(name, MIB) for name in used])


def starts(instances):
    return [instance.placement_start for instance in instances]
