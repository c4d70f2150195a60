# SPDX-License-Identifier: Apache-2.0
"""The node inventory as a Kubernetes object: the GPUs of a node as the agent reports them, and the cordons that administrators set.

Each node has one cluster-scoped ``GpuNode`` with the node's name. ``spec`` belongs to administrators (cordons), ``status`` to the node's
agent, so neither overwrites the other. Readers ignore unknown fields; a change that old readers must not miss gets a new API version.
The schema that the API server checks is deploy/daemonset/base/crd-gpunodes.yaml.

Invariants: decoding trusts no input, as in codec.py. For each value that the encoder accepts, decoding returns the same value.

Links are written as the square table that ``nvidia-smi topo -m`` prints: one row of words per GPU, in the order of ``devices``. A second
table, ``pcie``, has the PCIe path of each pair, including NVLink pairs, with more kinds of paths. The words of the first table never
change, for older readers that do not know the second.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Final, NoReturn

import msgspec

from aliquot import contract
from aliquot.contract import codec, units
from aliquot.contract.errors import ContractError, quote
from aliquot.contract.model import Allocation, Device, Isolation, Link, LinkKind, MediaEngines, MigInstance, Utilization

API_VERSION: Final = f"{contract.GPU_NODE_GROUP}/{contract.GPU_NODE_VERSION}"
MAX_DEVICES: Final = 64
"""The largest machines sold have 16; an object with more than four times that is not ours."""
MAX_INSTANCES_PER_DEVICE: Final = 64
"""A GPU has at most 8 instances; if the agent creates them on demand, each possible place is listed."""
MAX_UTILIZATIONS: Final = 64
"""Templates of pods on one node whose use is reported; further ones are left out."""
MAX_TEXT_CHARS: Final = 256
MAX_MINOR: Final = 4095
MAX_LANES: Final = 999
MAX_SHARES_PER_GPU: Final = 1000
MAX_OVERSUBSCRIPTION: Final = 10.0

MAX_IDLE_PODS: Final = 1024
"""As many as MAX_DEVICES GPUs have shares by default."""
MAX_SECONDS: Final = 1 << 40
"""The latest time that can be reported, in seconds since 1970."""

_MAX_MIB: Final = units.MAX_MEMORY_BYTES // units.MIB
_NODE_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_CAPABILITY: Final = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})", re.ASCII)
_NVLINK_WORD: Final = re.compile(r"NV(0|[1-9][0-9]{0,2})", re.ASCII)
_SELF_WORD: Final = "X"
_NO_LINK_WORD: Final = "-"
_PCIE_WORDS: Final[Mapping[LinkKind, str]] = {
    LinkKind.SAME_BOARD: "PSB",
    LinkKind.PCIE_SWITCH: "PIX",
    LinkKind.PCIE_SWITCHES: "PXB",
    LinkKind.HOST_BRIDGE: "PHB",
    LinkKind.NUMA_NODE: "NODE",
    LinkKind.SYSTEM: "SYS",
}
_KIND_OF_WORD: Final = {word: kind for kind, word in _PCIE_WORDS.items()}
_COARSE: Final[Mapping[LinkKind, LinkKind]] = {LinkKind.SAME_BOARD: LinkKind.PCIE_SWITCH, LinkKind.PCIE_SWITCHES: LinkKind.PCIE_SWITCH}
"""The word of the first table for paths that only the second table distinguishes."""


@dataclass(frozen=True, slots=True)
class Cordon:
    """Where an administrator allows no new work: the whole node, or single GPUs by UUID. Running containers stay."""

    node: bool = False
    devices: tuple[str, ...] = ()

    def covers(self, device_uuid: str) -> bool:
        """Whether this GPU may get no new work."""
        return self.node or device_uuid in self.devices


NO_CORDON: Final = Cordon()


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU of a node. ``trouble`` says why it gets no new work; empty while the GPU is healthy."""

    device: Device
    trouble: str = ""
    pcie_root: str = ""
    """The PCIe root complex, such as ``pci0000:17``; devices with the same one share a path to the host. Empty: unknown."""
    fabric_clique: str = ""
    """``<cluster UUID>.<clique id>`` of a multi-node NVLink fabric; empty without one."""
    state: str = ""
    """The GPU's health as the agent names it, for people only; programs read ``trouble``. Empty: unknown."""

    @property
    def healthy(self) -> bool:
        """Whether new work may be placed on it."""
        return not self.trouble


@dataclass(frozen=True, slots=True)
class IdlePod:
    """A pod that has not used its GPUs lately, as the agent measures it. Times are whole seconds since 1970."""

    pod_uid: str
    since: int
    until: int
    """The agent renews the report before this time. Later it is unknown whether the pod is idle: the agent may be gone."""


@dataclass(frozen=True, slots=True)
class PodUtilization:
    """What one pod used of each of its GPUs lately, in the mean."""

    pod_uid: str
    used: Utilization


@dataclass(frozen=True, slots=True)
class GpuNode:
    """What placement needs to know about one node's GPUs, in the order of their minor numbers."""

    name: str
    devices: tuple[GpuDevice, ...] = ()
    links: tuple[Link, ...] = ()
    """At most one per pair, in the order of the pairs. ``a`` comes before ``b`` in ``devices``."""
    shares_per_gpu: int = 16
    isolation: tuple[Isolation, ...] = ()
    """The enforcement backends that the node's agent offers."""
    memory_oversubscription: float = 1.0
    """The largest memory burst of a container, as a ratio; 1 allows no burst. Older agents do not report it; that means 1."""
    driver_version: str = ""
    cuda_version: int = 0
    agent_version: str = ""
    allocation: Allocation = Allocation.PLUGIN
    """Whether pods get these GPUs by resources of the device plugin, or by ResourceClaims. Older agents do not report it."""
    cordoned: bool = False
    """Set by an administrator: no new work on any GPU of the node."""
    cordoned_devices: tuple[str, ...] = ()
    """UUIDs of single GPUs that an administrator cordoned."""
    idle: tuple[IdlePod, ...] = ()
    """The pods of the node that do not use their GPUs, each once, by UID. Older agents do not report them."""
    utilization: tuple[PodUtilization, ...] = ()
    """One pod for each template of pods on the node; empty unless the agent's feature gate Interference is open."""

    def is_cordoned(self, device_uuid: str) -> bool:
        """Whether an administrator allows no new work on this GPU."""
        return self.cordoned or device_uuid in self.cordoned_devices


# --- the wire form ------------------------------------------------------------------------------------------------

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
_Mib = Annotated[int, msgspec.Meta(ge=1, le=_MAX_MIB)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=MAX_MINOR)]
_Percent = Annotated[int, msgspec.Meta(ge=0, le=units.WHOLE_GPU_PERCENT)]


_Seconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_SECONDS)]


class _IdleV1(msgspec.Struct, rename="camel"):
    pod_uid: _Text
    since: _Seconds
    until: _Seconds


class _EnginesV1(msgspec.Struct, rename="camel", omit_defaults=True):
    decoders: _Small = 0
    encoders: _Small = 0
    jpegs: _Small = 0
    ofas: _Small = 0


class _InstanceV1(msgspec.Struct, rename="camel", omit_defaults=True):
    uuid: str
    profile: _Text
    memory_mib: _Mib
    gpu_instance: _Small
    compute_instance: _Small
    placement_start: _Small
    placement_size: _Small
    most_on_device: _Small = 0
    engines: _EnginesV1 | None = None


class _DeviceV1(msgspec.Struct, rename="camel", omit_defaults=True):
    uuid: str
    model: _Text
    minor: _Small
    pci_bus_id: _Text
    memory_mib: _Mib
    numa_node: _Small | None = None
    pcie_root: _Text = ""
    fabric_clique: _Text = ""
    compute_capability: _Text = ""
    mig_enabled: bool = False
    mig_instances: Annotated[list[_InstanceV1], msgspec.Meta(max_length=MAX_INSTANCES_PER_DEVICE)] = []
    state: _Text = ""
    trouble: _Text = ""


class _UtilizationV1(msgspec.Struct, rename="camel"):
    pod_uid: _Text
    sm_percent: _Percent
    dram_percent: _Percent


class _StatusV1(msgspec.Struct, rename="camel", omit_defaults=True):
    shares_per_gpu: Annotated[int, msgspec.Meta(ge=1, le=MAX_SHARES_PER_GPU)] = 16
    agent_version: _Text = ""
    driver_version: _Text = ""
    cuda_version: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    isolation: Annotated[list[_Text], msgspec.Meta(max_length=16)] = []
    memory_oversubscription: Annotated[float, msgspec.Meta(ge=1, le=MAX_OVERSUBSCRIPTION)] | None = None
    allocation: _Text = ""
    summary: _Text = ""
    """For people (``kubectl get gpunodes``); written, never read."""
    devices: Annotated[list[_DeviceV1], msgspec.Meta(max_length=MAX_DEVICES)] = []
    links: Annotated[list[str], msgspec.Meta(max_length=MAX_DEVICES)] = []
    pcie: Annotated[list[str], msgspec.Meta(max_length=MAX_DEVICES)] = []
    idle: Annotated[list[_IdleV1], msgspec.Meta(max_length=MAX_IDLE_PODS)] = []
    utilization: Annotated[list[_UtilizationV1], msgspec.Meta(max_length=MAX_UTILIZATIONS)] = []


class _SpecV1(msgspec.Struct, rename="camel", omit_defaults=True):
    cordoned: bool = False
    cordoned_devices: Annotated[list[str], msgspec.Meta(max_length=MAX_DEVICES)] = []


class _Metadata(msgspec.Struct):
    name: str


class _GpuNodeV1(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    metadata: _Metadata
    spec: _SpecV1 = msgspec.field(default_factory=_SpecV1)
    status: _StatusV1 = msgspec.field(default_factory=_StatusV1)


def encode_gpu_node(node: GpuNode) -> bytes:
    """Encode the object as JSON. The API server takes ``spec`` or ``status`` of it, depending on the path of the call.

    Raises: ContractError: a value that no node can have, memory that is not whole MiB, or links in the wrong order.
    """
    check_gpu_node(node)
    form = _GpuNodeV1(
        API_VERSION,
        contract.GPU_NODE_KIND,
        _Metadata(node.name),
        _SpecV1(node.cordoned, list(node.cordoned_devices)),
        _StatusV1(
            shares_per_gpu=node.shares_per_gpu,
            agent_version=node.agent_version,
            driver_version=node.driver_version,
            cuda_version=node.cuda_version,
            isolation=[str(backend) for backend in node.isolation],
            memory_oversubscription=None if node.memory_oversubscription == 1 else node.memory_oversubscription,
            allocation="" if node.allocation is Allocation.PLUGIN else str(node.allocation),
            summary=_summary(node),
            devices=[_device_form(entry) for entry in node.devices],
            links=_table(node, _link_word) if node.links else [],
            pcie=_table(node, _pcie_word) if any(_pcie_says_more(link) for link in node.links) else [],
            idle=[_IdleV1(pod.pod_uid, pod.since, pod.until) for pod in node.idle],
            utilization=[_UtilizationV1(entry.pod_uid, *entry.used) for entry in node.utilization],
        ),
    )
    return msgspec.json.encode(form)


def decode_cordon(spec: bytes | msgspec.Raw) -> Cordon:
    """Decode the ``spec`` of an object alone. Raises ContractError if it is invalid."""
    try:
        form = msgspec.json.decode(spec, type=_SpecV1)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise ContractError(f"expected the spec of a {contract.GPU_NODE_KIND} in JSON: {exc}") from exc
    for uuid in form.cordoned_devices:
        codec.check_device_uuid(uuid)
    return Cordon(form.cordoned, tuple(dict.fromkeys(form.cordoned_devices)))


def decode_gpu_node(data: bytes | msgspec.Raw) -> GpuNode:
    """Decode one object of the API server. Raises ContractError if no node can have these values."""
    try:
        form = msgspec.json.decode(data, type=_GpuNodeV1)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise ContractError(f"expected a {contract.GPU_NODE_KIND} in JSON: {exc}") from exc
    if (form.api_version, form.kind) != (API_VERSION, contract.GPU_NODE_KIND):
        raise ContractError(
            f"expected a {contract.GPU_NODE_KIND} of {API_VERSION}, found {quote(form.kind)} of {quote(form.api_version)}: "
            f"upgrade the older of agent and scheduler"
        )
    status = form.status
    known = {str(backend): backend for backend in Isolation}
    devices = tuple(_device_of(device) for device in status.devices)
    node = GpuNode(
        name=form.metadata.name,
        devices=devices,
        links=_links_of(status.links, status.pcie, devices),
        shares_per_gpu=status.shares_per_gpu,
        isolation=tuple(known[name] for name in status.isolation if name in known),
        memory_oversubscription=status.memory_oversubscription or 1.0,
        driver_version=status.driver_version,
        cuda_version=status.cuda_version,
        agent_version=status.agent_version,
        allocation=_allocation(status.allocation),
        cordoned=form.spec.cordoned,
        cordoned_devices=tuple(form.spec.cordoned_devices),
        idle=tuple(IdlePod(pod.pod_uid, pod.since, pod.until) for pod in status.idle),
        utilization=tuple(PodUtilization(one.pod_uid, Utilization(one.sm_percent, one.dram_percent)) for one in status.utilization),
    )
    check_gpu_node(node)
    return node


def in_order(devices: Sequence[Device], links: Sequence[Link]) -> tuple[Link, ...]:
    """Sort links as a GpuNode requires. Raises ContractError for an unknown device, or for two links of one pair."""
    position = {device.uuid: index for index, device in enumerate(devices)}
    by_pair: dict[tuple[int, int], Link] = {}
    for link in links:
        a, b = position.get(link.a_uuid), position.get(link.b_uuid)
        if a is None or b is None or a == b:
            raise ContractError(f"expected a link between two GPUs of the node, found {link}")
        pair = (min(a, b), max(a, b))
        if pair in by_pair:
            raise ContractError(f"expected one link for a pair, found {by_pair[pair]} and {link}")
        by_pair[pair] = replace(link, a_uuid=devices[pair[0]].uuid, b_uuid=devices[pair[1]].uuid)
    return tuple(by_pair[pair] for pair in sorted(by_pair))


# --- checks -------------------------------------------------------------------------------------------------------


def check_gpu_node(node: GpuNode) -> None:
    """Raise ContractError unless decoding the encoded value returns the same value."""
    if _NODE_NAME.fullmatch(node.name) is None:
        raise ContractError(f"expected a node name (lower-case DNS name), found {quote(node.name)}")
    if len(node.devices) > MAX_DEVICES or len(node.cordoned_devices) > MAX_DEVICES:
        _refuse(node, f"expected at most {MAX_DEVICES} GPUs, found {len(node.devices)}, and {len(node.cordoned_devices)} cordoned ones")
    _check_limits(node)
    _check_uuids(node)
    for entry in node.devices:
        _check_device(node, entry)
    for text in (node.driver_version, node.agent_version):
        _check_text(node, text)
    _check_links(node)
    _check_idle(node)
    _check_utilization(node)


def _check_idle(node: GpuNode) -> None:
    uids = [pod.pod_uid for pod in node.idle]
    if len(uids) > MAX_IDLE_PODS or len(set(uids)) != len(uids):
        _refuse(node, f"expected at most {MAX_IDLE_PODS} idle pods, each once, found {len(uids)}, {len(set(uids))} of them different")
    for pod in node.idle:
        _check_text(node, pod.pod_uid)
        if not 0 <= pod.since <= pod.until <= MAX_SECONDS:
            _refuse(node, f"expected times from 0 to {MAX_SECONDS}, the end last, found {pod}")


def _check_utilization(node: GpuNode) -> None:
    if len(node.utilization) > MAX_UTILIZATIONS:
        _refuse(node, f"expected at most {MAX_UTILIZATIONS} pods with their use, found {len(node.utilization)}")
    for entry in node.utilization:
        _check_text(node, entry.pod_uid)
        if not all(0 <= percent <= units.WHOLE_GPU_PERCENT for percent in entry.used):
            _refuse(node, f"expected 0 to {units.WHOLE_GPU_PERCENT} percent of a GPU, found {entry}")


def _check_uuids(node: GpuNode) -> None:
    uuids = [uuid for entry in node.devices for uuid in (entry.device.uuid, *(i.uuid for i in entry.device.mig_instances))]
    for uuid in (*uuids, *node.cordoned_devices):
        codec.check_device_uuid(uuid)
    for named in (uuids, node.cordoned_devices):
        if len(set(named)) != len(named):
            _refuse(node, f"expected every UUID once, found {quote(Counter(named).most_common(1)[0][0])} twice")


def _check_links(node: GpuNode) -> None:
    devices = [entry.device for entry in node.devices]
    if in_order(devices, node.links) != node.links:
        _refuse(node, "expected the links in the order of the GPUs; aliquot.contract.gpunode.in_order makes it")
    for link in node.links:
        if not 0 <= link.lanes <= MAX_LANES or (link.lanes and link.kind is not LinkKind.NVLINK):
            _refuse(node, f"expected 0 to {MAX_LANES} lanes, and lanes for NVLinks only, found {link}")
        if link.pcie is not None and (link.pcie is LinkKind.NVLINK or link.kind is not LinkKind.NVLINK):
            _refuse(node, f"expected a PCIe path for NVLinks only, found {link}")


def _check_limits(node: GpuNode) -> None:
    if not 1 <= node.shares_per_gpu <= MAX_SHARES_PER_GPU:
        _refuse(node, f"expected 1 to {MAX_SHARES_PER_GPU} shares per GPU, found {node.shares_per_gpu}")
    if not 1 <= node.memory_oversubscription <= MAX_OVERSUBSCRIPTION:
        _refuse(node, f"expected a memory oversubscription from 1 to {MAX_OVERSUBSCRIPTION:g}, found {node.memory_oversubscription}")


def _check_device(node: GpuNode, entry: GpuDevice) -> None:
    device = entry.device
    for text in (device.model, device.pci_bus_id, entry.state, entry.trouble, entry.pcie_root, entry.fabric_clique):
        _check_text(node, text)
    for memory_bytes in (device.memory_bytes, *(instance.memory_bytes for instance in device.mig_instances)):
        if not 1 <= units.bytes_to_mib(memory_bytes) <= _MAX_MIB:
            _refuse(node, f"expected 1 to {_MAX_MIB} MiB on {device.uuid}, found {memory_bytes} bytes")
    _check_instances(node, device)
    numbers = [device.minor, device.numa_node or 0]
    for instance in device.mig_instances:
        numbers += _numbers_of(instance)
    if not all(0 <= number <= MAX_MINOR for number in numbers):
        _refuse(node, f"expected numbers from 0 to {MAX_MINOR} on {device.uuid}, found {numbers}")
    _check_capability(node, device)


def _check_instances(node: GpuNode, device: Device) -> None:
    if len(device.mig_instances) > MAX_INSTANCES_PER_DEVICE:
        _refuse(node, f"expected at most {MAX_INSTANCES_PER_DEVICE} MIG instances on {device.uuid}, found {len(device.mig_instances)}")
    for instance in device.mig_instances:
        _check_text(node, instance.profile)
        if instance.parent_uuid != device.uuid:
            _refuse(node, f"expected instances of {device.uuid}, found one of {quote(instance.parent_uuid)}")


def _numbers_of(instance: MigInstance) -> list[int]:
    """Return all numbers of an instance that must lie between 0 and MAX_MINOR."""
    ids = [instance.gpu_instance_id, instance.compute_instance_id, instance.placement_start, instance.placement_size]
    return [*ids, instance.most_on_device, *(instance.engines or ())]


def _check_capability(node: GpuNode, device: Device) -> None:
    if device.compute_capability is not None and not all(0 <= part <= 999 for part in device.compute_capability):
        _refuse(node, f"expected a compute capability on {device.uuid}, found {device.compute_capability}")


def _check_text(node: GpuNode, text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        _refuse(node, f"expected texts of at most {MAX_TEXT_CHARS} characters, found {quote(text)}")


def _refuse(node: GpuNode, sentence: str) -> NoReturn:
    raise ContractError(f"{contract.GPU_NODE_KIND} {node.name}: {sentence}")


# --- parts --------------------------------------------------------------------------------------------------------


def _device_form(entry: GpuDevice) -> _DeviceV1:
    device = entry.device
    return _DeviceV1(
        uuid=device.uuid,
        model=device.model,
        minor=device.minor,
        pci_bus_id=device.pci_bus_id,
        memory_mib=units.bytes_to_mib(device.memory_bytes),
        numa_node=device.numa_node,
        pcie_root=entry.pcie_root,
        fabric_clique=entry.fabric_clique,
        compute_capability="" if device.compute_capability is None else "{}.{}".format(*device.compute_capability),
        mig_enabled=device.mig_enabled,
        mig_instances=[
            _InstanceV1(
                instance.uuid,
                instance.profile,
                units.bytes_to_mib(instance.memory_bytes),
                instance.gpu_instance_id,
                instance.compute_instance_id,
                instance.placement_start,
                instance.placement_size,
                instance.most_on_device,
                None if instance.engines is None else _EnginesV1(*instance.engines),
            )
            for instance in device.mig_instances
        ],
        state=entry.state,
        trouble=entry.trouble,
    )


def _device_of(form: _DeviceV1) -> GpuDevice:
    instances = tuple(
        MigInstance(
            uuid=instance.uuid,
            parent_uuid=form.uuid,
            profile=instance.profile,
            memory_bytes=units.mib_to_bytes(instance.memory_mib),
            gpu_instance_id=instance.gpu_instance,
            compute_instance_id=instance.compute_instance,
            placement_start=instance.placement_start,
            placement_size=instance.placement_size,
            most_on_device=instance.most_on_device,
            engines=None if instance.engines is None else MediaEngines(*msgspec.structs.astuple(instance.engines)),
        )
        for instance in form.mig_instances
    )
    device = Device(
        uuid=form.uuid,
        model=form.model,
        minor=form.minor,
        pci_bus_id=form.pci_bus_id,
        memory_bytes=units.mib_to_bytes(form.memory_mib),
        numa_node=form.numa_node,
        compute_capability=_capability_of(form.compute_capability),
        mig_enabled=form.mig_enabled,
        mig_instances=instances,
    )
    return GpuDevice(device, form.trouble, form.pcie_root, form.fabric_clique, form.state)


def _capability_of(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    match = _CAPABILITY.fullmatch(text)
    if match is None:
        raise ContractError(f"expected a compute capability such as 9.0, found {quote(text)}")
    return int(match[1]), int(match[2])


def _table(node: GpuNode, word_of: Callable[[Link], str]) -> list[str]:
    position = {entry.device.uuid: index for index, entry in enumerate(node.devices)}
    words = [[_SELF_WORD if i == j else _NO_LINK_WORD for j in range(len(position))] for i in range(len(position))]
    for link in node.links:
        i, j = position[link.a_uuid], position[link.b_uuid]
        words[i][j] = words[j][i] = word_of(link)
    return [" ".join(row) for row in words]


def _link_word(link: Link) -> str:
    return f"NV{link.lanes}" if link.kind is LinkKind.NVLINK else _PCIE_WORDS[_COARSE.get(link.kind, link.kind)]


def _pcie_word(link: Link) -> str:
    kind = link.pcie if link.kind is LinkKind.NVLINK else link.kind
    return _NO_LINK_WORD if kind is None else _PCIE_WORDS[kind]


def _pcie_says_more(link: Link) -> bool:
    return link.pcie is not None or link.kind in _COARSE


def _links_of(rows: Sequence[str], pcie_rows: Sequence[str], devices: Sequence[GpuDevice]) -> tuple[Link, ...]:
    if not rows:
        return ()
    table = _words_of(rows, len(devices))
    pcie = _words_of(pcie_rows, len(devices)) if pcie_rows else [[_NO_LINK_WORD] * len(devices)] * len(devices)
    links = []
    for i, j in combinations(range(len(devices)), 2):
        kind, lanes = _kind_of(table[i][j])
        path = _pcie_kind_of(pcie[i][j])
        if path is not None and kind not in (LinkKind.NVLINK, _COARSE.get(path, path)):
            raise ContractError(f"expected the same PCIe path in both tables of links, found {quote(table[i][j])} and {quote(pcie[i][j])}")
        if kind is LinkKind.NVLINK:
            links.append(Link(devices[i].device.uuid, devices[j].device.uuid, kind, lanes, path))
        elif kind is not None:
            links.append(Link(devices[i].device.uuid, devices[j].device.uuid, path or kind))
    return tuple(links)


def _words_of(rows: Sequence[str], count: int) -> list[list[str]]:
    """Split a square table into words. Raises ContractError."""
    table = [row.split(" ") for row in rows if len(row) <= MAX_DEVICES * len("NV999 ")]
    if len(table) != count or any(len(row) != count for row in table):
        raise ContractError(f"expected {count} rows of {count} words for the links, found {quote(repr(rows))}")
    for i, j in combinations(range(count), 2):
        if table[i][j] != table[j][i]:
            raise ContractError(
                f"expected the same word for both directions of a link, found {quote(table[i][j])} and {quote(table[j][i])}"
            )
    return table


def _allocation(word: str) -> Allocation:
    """Read a node's allocation; a word of a later version counts as the device plugin."""
    return Allocation(word) if word in tuple(Allocation) else Allocation.PLUGIN


def _kind_of(word: str) -> tuple[LinkKind | None, int]:
    if (nvlink := _NVLINK_WORD.fullmatch(word)) is not None:
        return LinkKind.NVLINK, int(nvlink[1])
    return _pcie_kind_of(word), 0


def _pcie_kind_of(word: str) -> LinkKind | None:
    if word != _NO_LINK_WORD and word not in _KIND_OF_WORD:
        raise ContractError(f"expected NV<lanes>, {', '.join(_KIND_OF_WORD)} or {_NO_LINK_WORD} for a link, found {quote(word)}")
    return _KIND_OF_WORD.get(word)


def _summary(node: GpuNode) -> str:
    """Summarise the GPUs: ``8 x NVIDIA H200``, and how many are unhealthy."""
    models = Counter(entry.device.model for entry in node.devices)
    parts = [f"{count} x {model}" for model, count in sorted(models.items())]
    troubled = sum(not entry.healthy for entry in node.devices)
    parts += [f"{troubled} unhealthy"] if troubled else []
    return (", ".join(parts) or "no GPU")[:MAX_TEXT_CHARS]
