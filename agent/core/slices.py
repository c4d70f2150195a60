# SPDX-License-Identifier: Apache-2.0
"""What this node offers by ResourceSlices: a device for each GPU, which several claims may share, or the MIG instances of a GPU.

A claim consumes ``memory``, ``cores`` and ``shares`` of a device; what it does not state has a default. Without memory it takes all of it,
so a claim without amounts has the GPU alone. Without cores it reserves none, and takes 1 percent in the slices: the ledger keeps 1 percent
of a GPU for containers without reserved cores, so what fits the slices also fits the ledger.

Fixed shares are devices of their own, for manifests that state no amounts (``nvidia.com/vgpu-20g``). They draw on counters of their GPU.
Any share of the GPU itself takes all of these, so a GPU has shares of one kind at a time.

A GPU in MIG mode offers its instances and, where the agent can make one with all slices of the GPU, shares that use this instance
together. Both draw on the same counters. So such a GPU has either shares or other instances.

Order matters: kube-scheduler takes the first device that fits, in the order of the list. GPUs are listed by their minor number.
Source: https://pkg.go.dev/k8s.io/api/resource/v1#ResourceSliceSpec
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent.core.health import HealthState
from agent.core.inventory import DeviceInventory, InventoryDevice
from agent.core.mig_devices import TYPE_MIG, as_quantities, counters_of, draws_of, mig_name, offered_instances
from aliquot import contract
from aliquot.contract import units
from aliquot.contract.model import MigInstance
from aliquot.placement.device import whole_instance

API_VERSION: Final = "resource.k8s.io/v1"
MOST_DEVICES: Final = 64
"""Devices in one slice; the API allows no more where a device has taints."""
MOST_COUNTER_SETS: Final = 8
"""In one slice; the API allows no more."""
CAPACITY_MEMORY: Final = "memory"
CAPACITY_CORES: Final = "cores"
CAPACITY_SHARES: Final = "shares"
TAINT_HEALTH: Final = "aliquot.dev/unhealthy"
TAINT_CORDON: Final = "aliquot.dev/cordoned"
TYPE_SHARED_INSTANCE: Final = "shared-mig"
"""The attribute ``type`` of a GPU in MIG mode that claims share. It has a class of its own: a program can use one instance only, without
NVLink, and where instances are in use no claim for *all* devices of the class fits."""
TYPE_FIXED: Final = "fixed"
"""The attribute ``type`` of a fixed share; a GPU's is ``gpu``."""
NVIDIA_DOMAIN: Final = "gpu.nvidia.com"
"""Attributes and memory are published under this domain too, so that claims written for NVIDIA's driver find them."""
NVIDIA_MEMORY: Final = f"{NVIDIA_DOMAIN}/{CAPACITY_MEMORY}"
"""The whole memory under that name: selectors can read it, and no claim can consume it."""
MAX_NAME_CHARS: Final = 253
"""Of an object."""
MAX_STRING_CHARS: Final = 64
"""Of an attribute's value."""

_PROFILE_DEVICE: Final = re.compile(r"(?P<gpu>gpu-[0-9]+)-(?P<gib>[1-9][0-9]*)g-[0-9]+")

Attributes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Pool:
    """The node as a pool of devices, and how its slices are named."""

    node_name: str
    node_uid: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What is configured about the devices."""

    shares_per_gpu: int
    evicts_from_lost: bool = False
    """Whether Kubernetes deletes the pods of a lost GPU."""
    profiles_gib: tuple[int, ...] = ()
    """Sizes of fixed shares that are offered beside the GPUs."""
    mig: bool = True
    """Whether instances of GPUs in MIG mode are offered."""
    planned: bool = False
    """Whether a taint keeps kube-scheduler from allocating, so that only Aliquot's scheduler does."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a pool's slices."""

    devices: Sequence[Mapping[str, Any]] = ()
    """In the order in which kube-scheduler tries them."""
    counters: Sequence[Mapping[str, Any]] = ()
    """What devices on one GPU draw from. In slices of their own: the API allows no devices beside them."""


def device_name(entry: InventoryDevice) -> str:
    """Return the name of a GPU in slices and allocations, as NVIDIA's driver names it."""
    return f"gpu-{entry.device.minor}"


def find_device(inventory: DeviceInventory, name: str) -> InventoryDevice | None:
    """Return the GPU that a name in an allocation is on now; None if there is no such GPU."""
    found = _PROFILE_DEVICE.fullmatch(name)
    gpu = found["gpu"] if found is not None else name
    return next((entry for entry in inventory.devices if device_name(entry) == gpu), None)


def profile_bytes(name: str) -> int | None:
    """Return the memory of a fixed share by its name in an allocation; None for a GPU."""
    found = _PROFILE_DEVICE.fullmatch(name)
    return int(found["gib"]) << 30 if found is not None else None


def contents_of(inventory: DeviceInventory, offer: Offer) -> Contents:
    """Return what the slices have: the GPUs, then their fixed shares."""
    whole = [entry for entry in inventory.devices if not entry.device.mig_enabled]
    gpus = [_device(entry, inventory, offer) for entry in whole]
    fixed = [one for entry in whole for one in _fixed_shares(entry, offer)]
    counters = [_counter_set(entry, offer) for entry in whole] if offer.profiles_gib else []
    parted = _contents_of_parted(inventory, offer)
    return Contents([*gpus, *fixed, *parted.devices], [*counters, *parted.counters])


def _contents_of_parted(inventory: DeviceInventory, offer: Offer) -> Contents:
    """Return what GPUs in MIG mode have."""
    entries = [entry for entry in inventory.devices if entry.device.mig_enabled] if offer.mig else []
    shared = [_shared_instance(entry, whole, inventory, offer) for entry in entries if (whole := whole_instance(entry.device)) is not None]
    instances = [_mig_device(entry, instance, inventory, offer) for entry in entries for instance in offered_instances(entry)]
    return Contents([*shared, *instances], [_mig_counter_set(entry) for entry in entries if counters_of(entry)])


def names_on(entry: InventoryDevice, offer: Offer) -> Sequence[str]:
    """Return the names of all devices on a GPU."""
    if entry.device.mig_enabled:
        shared = [device_name(entry)] if whole_instance(entry.device) is not None else []
        return [*shared, *(mig_name(device_name(entry), instance) for instance in offered_instances(entry))] if offer.mig else []
    return [device_name(entry), *(one["name"] for one in _fixed_shares(entry, offer))]


def slice_specs(contents: Contents, pool: Pool, generation: int) -> Mapping[str, Mapping[str, Any]]:
    """Return the ``spec`` of each slice by the slice's name."""
    parts = [
        *({"sharedCounters": part} for part in _in_parts(contents.counters, MOST_COUNTER_SETS)),
        *({"devices": part} for part in _in_parts(contents.devices, MOST_DEVICES)),
    ]
    return {
        _slice_name(pool.node_name, number): {
            "driver": contract.DRA_DRIVER,
            "nodeName": pool.node_name,
            "pool": {"name": pool.node_name, "generation": generation, "resourceSliceCount": len(parts)},
            **part,
        }
        for number, part in enumerate(parts)
    }


def _in_parts(items: Sequence[Mapping[str, Any]], most: int) -> Sequence[list[Mapping[str, Any]]]:
    return [list(items[start : start + most]) for start in range(0, len(items), most)]


def _slice_name(node_name: str, number: int) -> str:
    """Return a name that is unique in the cluster. A long node name is shortened, with a hash of the whole."""
    end = f"-{contract.DRA_DRIVER}-{number}"
    if len(node_name) + len(end) <= MAX_NAME_CHARS:
        return f"{node_name}{end}"
    end = f"-{hashlib.sha256(node_name.encode()).hexdigest()[:12]}{end}"
    return node_name[: MAX_NAME_CHARS - len(end)].rstrip(".-") + end


def slice_object(name: str, spec: Mapping[str, Any], pool: Pool) -> Mapping[str, Any]:
    """Return a ResourceSlice that is deleted with its node."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": pool.node_name, "uid": pool.node_uid, "controller": True}
    metadata = {"name": name, "ownerReferences": [owner]}
    return {"apiVersion": API_VERSION, "kind": "ResourceSlice", "metadata": metadata, "spec": spec}


@dataclass(frozen=True, slots=True)
class FoundSlice:
    """A ResourceSlice of this node, as read from the API."""

    name: str
    resource_version: str
    spec: Mapping[str, Any]

    @property
    def generation(self) -> int:
        """The generation of its pool."""
        return int(self.spec.get("pool", {}).get("generation", 0))


@dataclass(frozen=True, slots=True)
class SliceChanges:
    """What to write so that the API has the wanted slices."""

    create: Sequence[Mapping[str, Any]] = ()
    replace: Sequence[tuple[str, str, Mapping[str, Any]]] = ()
    """Name, resource version and object."""
    delete: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.create or self.replace or self.delete)


def changes_to(contents: Contents, pool: Pool, found: Iterable[FoundSlice], pruned: Mapping[str, tuple[Any, Any]]) -> SliceChanges:
    """Compare the API with what should be there.

    A change of one slice alone keeps the pool's generation: the API server writes it as a whole. Otherwise all slices get the next
    generation, so that kube-scheduler never combines old and new ones.

    Args: pruned: by name, a spec as it was written and as the API stored it: an older API server drops fields that it does not know.
    """
    present = {one.name: one for one in found}
    newest = max((one.generation for one in present.values()), default=0)
    wanted = slice_specs(contents, pool, newest or 1)
    if _are_stored(wanted, present, pruned):
        return SliceChanges()
    if newest and (len(wanted) > 1 or len(present) > 1):
        wanted = slice_specs(contents, pool, newest + 1)
    return _writes(wanted, present, pool)


def _writes(wanted: Mapping[str, Mapping[str, Any]], present: Mapping[str, FoundSlice], pool: Pool) -> SliceChanges:
    """Return what replaces the present slices with the wanted ones."""
    objects = {name: slice_object(name, spec, pool) for name, spec in wanted.items()}
    return SliceChanges(
        create=[objects[name] for name in wanted if name not in present],
        replace=[(name, present[name].resource_version, objects[name]) for name in wanted if name in present],
        delete=sorted(present.keys() - wanted.keys()),
    )


def _are_stored(wanted: Mapping[str, Mapping[str, Any]], present: Mapping[str, FoundSlice], pruned: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether the API has the wanted slices and no other."""
    return present.keys() == wanted.keys() and all(_is_stored(name, spec, present[name], pruned) for name, spec in wanted.items())


def _is_stored(name: str, spec: Mapping[str, Any], found: FoundSlice, pruned: Mapping[str, tuple[Any, Any]]) -> bool:
    written, stored = pruned.get(name, (None, None))
    return found.spec == (stored if written == spec else spec)


def _device(entry: InventoryDevice, inventory: DeviceInventory, offer: Offer) -> Mapping[str, Any]:
    attributes, of_nvidia = _attributes(entry, inventory), _nvidia_attributes(entry, inventory)
    uses = {"consumesCounters": [_whole(entry, offer)]} if offer.profiles_gib else {}
    return _shareable(entry, offer, entry.device.memory_bytes, attributes, of_nvidia, uses)


def _shared_instance(entry: InventoryDevice, whole: MigInstance, inventory: DeviceInventory, offer: Offer) -> Mapping[str, Any]:
    """Return a GPU in MIG mode as a device for shares. The first share takes all counters, and the last one gives them back."""
    attributes = {**_nvidia_attributes(entry, inventory), "type": _text(TYPE_SHARED_INSTANCE), "profile": _text(whole.profile)}
    uses = {"consumesCounters": [{"counterSet": device_name(entry), "counters": as_quantities(counters_of(entry))}]}
    return _shareable(entry, offer, whole.memory_bytes, attributes, attributes, uses)


def _shareable(
    entry: InventoryDevice, offer: Offer, memory_bytes: int, attributes: Attributes, of_nvidia: Attributes, uses: Mapping[str, Any]
) -> Mapping[str, Any]:
    taints = _taints(entry, offer)
    return {
        "name": device_name(entry),
        "attributes": {**_named("", attributes), **_named(f"{NVIDIA_DOMAIN}/", of_nvidia), **_standard_attributes(entry)},
        "capacity": _capacity(memory_bytes, offer.shares_per_gpu),
        "allowMultipleAllocations": True,
        **uses,
        **({"taints": taints} if taints else {}),
    }


def _fixed_shares(entry: InventoryDevice, offer: Offer) -> Sequence[Mapping[str, Any]]:
    """Return the fixed shares of a GPU. Each takes its memory, and one share, from what the GPU has."""
    taints = _taints(entry, offer)
    whole_gib = entry.device.memory_bytes >> 30
    own = {
        "type": _text(TYPE_FIXED),
        "parentUUID": _text(entry.device.uuid),
        "productName": _text(entry.device.model),
    }
    return [
        {
            "name": f"{device_name(entry)}-{gib}g-{number}",
            "attributes": {**own, "profile": _text(f"{gib}g"), **_standard_attributes(entry)},
            "capacity": {CAPACITY_MEMORY: {"value": f"{gib}Gi"}},
            "consumesCounters": [{"counterSet": device_name(entry), "counters": _counters(gib << 10, 1)}],
            **({"taints": taints} if taints else {}),
        }
        for gib in offer.profiles_gib
        for number in range(min(whole_gib // gib, offer.shares_per_gpu))
    ]


def _mig_device(entry: InventoryDevice, instance: MigInstance, inventory: DeviceInventory, offer: Offer) -> Mapping[str, Any]:
    taints = _taints(entry, offer)
    attributes = {
        **{name: value for name, value in _nvidia_attributes(entry, inventory).items() if name != "uuid"},
        "type": _text(TYPE_MIG),
        "parentUUID": _text(entry.device.uuid),
        "profile": _text(instance.profile),
        **({} if instance.on_demand else {"uuid": _text(instance.uuid)}),
    }
    draws = as_quantities(draws_of(instance, counters_of(entry))) if instance.on_demand else {}
    memory = {"value": f"{instance.memory_bytes // units.MIB}Mi"}
    return {
        "name": mig_name(device_name(entry), instance),
        "attributes": {**_named("", attributes), **_named(f"{NVIDIA_DOMAIN}/", attributes), **_standard_attributes(entry)},
        "capacity": {CAPACITY_MEMORY: memory, NVIDIA_MEMORY: memory},
        **({"consumesCounters": [{"counterSet": device_name(entry), "counters": draws}]} if draws else {}),
        **({"taints": taints} if taints else {}),
    }


def _mig_counter_set(entry: InventoryDevice) -> Mapping[str, Any]:
    return {"name": device_name(entry), "counters": as_quantities(counters_of(entry))}


def _counter_set(entry: InventoryDevice, offer: Offer) -> Mapping[str, Any]:
    return {"name": device_name(entry), "counters": _whole(entry, offer)["counters"]}


def _whole(entry: InventoryDevice, offer: Offer) -> Mapping[str, Any]:
    """Return all that a GPU has. The first share of any size takes it, and the last one gives it back: then fixed shares fit."""
    return {"counterSet": device_name(entry), "counters": _counters(entry.device.memory_bytes // units.MIB, offer.shares_per_gpu)}


def _counters(memory_mib: int, shares: int) -> Mapping[str, Any]:
    return {CAPACITY_MEMORY: {"value": f"{memory_mib}Mi"}, CAPACITY_SHARES: {"value": str(shares)}}


def _capacity(memory_bytes: int, shares_per_gpu: int) -> Mapping[str, Any]:
    memory, step = f"{memory_bytes // units.MIB}Mi", "1Mi"
    whole = str(units.WHOLE_GPU_PERCENT)
    return {
        CAPACITY_MEMORY: {
            "value": memory,
            "requestPolicy": {"default": memory, "validRange": {"min": step, "max": memory, "step": step}},
        },
        CAPACITY_CORES: {"value": whole, "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": whole, "step": "1"}}},
        CAPACITY_SHARES: {"value": str(shares_per_gpu), "requestPolicy": {"default": "1", "validValues": ["1"]}},
        # Without a policy the first claim would consume all of it, and no second one would fit.
        NVIDIA_MEMORY: {"value": memory, "requestPolicy": {"default": "0", "validValues": ["0"]}},
    }


def _attributes(entry: InventoryDevice, inventory: DeviceInventory) -> Attributes:
    found = dict(_nvidia_attributes(entry, inventory))
    if entry.fabric_clique:
        found["linkGroup"] = _text(entry.fabric_clique)
    return found


def _nvidia_attributes(entry: InventoryDevice, inventory: DeviceInventory) -> Attributes:
    """Return attributes by the names of NVIDIA's driver, where the driver's answer has the form of their type."""
    device = entry.device
    found = {
        "type": _text("gpu"),
        "uuid": _text(device.uuid),
        "productName": _text(device.model),
        "architecture": _text(entry.architecture),
        "brand": _text(entry.brand),
        "driverVersion": _version(inventory.driver_version),
        "cudaDriverVersion": _version(f"{inventory.cuda_version // 1000}.{inventory.cuda_version % 1000 // 10}"),
    }
    if device.compute_capability is not None:
        found["cudaComputeCapability"] = _version(".".join(map(str, device.compute_capability)))
    return {name: value for name, value in found.items() if value}


def _standard_attributes(entry: InventoryDevice) -> Attributes:
    found: dict[str, Mapping[str, Any]] = {}
    if entry.pcie_root:
        found["resource.kubernetes.io/pcieRoot"] = _text(entry.pcie_root)
    if entry.device.pci_bus_id:
        found["resource.kubernetes.io/pciBusID"] = _text(_short_bus_id(entry.device.pci_bus_id))
    if entry.device.numa_node is not None:
        found["resource.kubernetes.io/numaNode"] = {"int": entry.device.numa_node}
    return found


def _short_bus_id(nvml: str) -> str:
    """Return a PCI address with a domain of four digits, as Linux writes it; NVML writes eight."""
    domain, _, rest = nvml.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _named(prefix: str, attributes: Attributes) -> Attributes:
    return {f"{prefix}{name}": value for name, value in attributes.items()}


def _text(value: str) -> Mapping[str, Any]:
    return {"string": value[:MAX_STRING_CHARS]} if value else {}


def _version(text: str) -> Mapping[str, Any]:
    """Return a semantic version: three numbers without leading zeros. Empty where the text has another form."""
    parts = text.split(".")
    if not re.fullmatch(r"\d+(\.\d+){0,2}", text):
        return {}
    return {"version": ".".join(str(int(part)) for part in [*parts, "0", "0"][:3])}


def _taints(entry: InventoryDevice, offer: Offer) -> Sequence[Mapping[str, str]]:
    """Return what keeps new claims off the GPU. Running pods stay, unless the policy is to evict those of a lost GPU."""
    taints = [{"key": contract.PLANNED, "effect": "NoSchedule"}] if offer.planned else []
    if not entry.healthy:
        state = entry.state if entry.state is not HealthState.HEALTHY else HealthState.QUARANTINED
        evicted = state is HealthState.LOST and offer.evicts_from_lost
        taints.append({"key": TAINT_HEALTH, "value": str(state), "effect": "NoExecute" if evicted else "NoSchedule"})
    if entry.cordoned:
        taints.append({"key": TAINT_CORDON, "effect": "NoSchedule"})
    return taints
