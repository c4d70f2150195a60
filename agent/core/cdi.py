# SPDX-License-Identifier: Apache-2.0
"""Builds the CDI spec of one grant: the host's NVIDIA spec for the granted devices, with the shim in front of the driver.

The runtime resolves the CDI name after PreStart, so the agent can choose the devices as late as that. NVIDIA's own spec (``nvidia-ctk cdi
generate``) has every device node, driver file and hook of this host. The agent takes the entries of the granted devices and changes only
where the driver's two libraries are found. The GPU Operator has no such spec, but one for its own pods. That one has the same driver files
and hooks, and all device nodes together, and works as well. Specs are plain JSON objects here, so unknown fields are kept.
Format: CDI specification 0.6.0 and later, https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from aliquot import contract

Edits = Mapping[str, Any]
"""A CDI ``containerEdits`` object."""

NO_EDITS: Edits = {}
_LISTS: Mapping[str, tuple[str, ...]] = {"env": (), "deviceNodes": ("path",), "mounts": ("hostPath", "containerPath"), "hooks": ("path",)}
"""The lists of containerEdits that the agent edits, with the text fields that each entry must have; entries of ``env`` are plain texts."""
_READ_ONLY = ("ro", "nosuid", "nodev", "bind")
_READ_WRITE = ("rw", "nosuid", "nodev", "noexec", "bind")
_COMPAT_HOOK = "enable-cuda-compat"
"""NVIDIA's hook that gives an image's own, newer libcuda precedence over the host's. It would have precedence over the shim, too."""
_GPU_NODE = re.compile(r"/dev/nvidia\d+")
_CAPABILITY_DIRECTORY = "/dev/nvidia-caps/"
_CAPABILITIES_OF_INSTANCE = 2
"""One node gives access to the GPU instance, one to its compute instance; a process needs both."""
_CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
_ALL = "all"
"""The only device in the GPU Operator's spec."""
HOST_SPEC_KINDS = (contract.NVIDIA_CDI_KIND, contract.NVIDIA_MANAGEMENT_CDI_KIND, contract.NVIDIA_PLUGIN_CDI_KIND)
"""In order of preference. NVIDIA's device plugin does not run next to this agent: its spec is a leftover, perhaps of an older driver."""


class Interposition(StrEnum):
    """How the shim gets into a container: in place of the driver's library, or by /etc/ld.so.preload."""

    FRONT = "front"
    PRELOAD = "preload"


@dataclass(frozen=True, slots=True)
class DriverLibrary:
    """A driver library that the shim replaces in containers."""

    front: str
    """File name of the front among the shim's artefacts."""
    driver_name: str
    """The name under which the front finds the real library."""
    pattern: re.Pattern[str]
    """The file names under which hosts mount it: the soname, or the name with the driver's version."""


DRIVER_LIBRARIES = (
    DriverLibrary(contract.CUDA_SONAME, contract.CUDA_DRIVER_SONAME, re.compile(r"libcuda\.so(\.[0-9.]+)?")),
    DriverLibrary(contract.NVML_SONAME, contract.NVML_DRIVER_SONAME, re.compile(r"libnvidia-ml\.so(\.[0-9.]+)?")),
)
PRELOAD_ARTEFACT = contract.CONTAINER_PRELOAD.rpartition("/")[2]
PRELOAD_LIST_ARTEFACT = contract.LD_SO_PRELOAD.rpartition("/")[2]
SHIM_LIBRARIES = (*(library.front for library in DRIVER_LIBRARIES), PRELOAD_ARTEFACT)
"""File names of the shim's libraries."""
PRELOAD_LIST = f"{contract.CONTAINER_PRELOAD}\n".encode()
"""A file that names the preload library; it becomes the container's /etc/ld.so.preload."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """The parts of the host's NVIDIA CDI spec that the agent uses."""

    source: str
    """Where it was read from, for messages."""
    version: str
    devices: Mapping[str, Edits]
    edits: Edits
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Every device node in the spec, by the path in the container."""

    def node(self, path: str) -> Mapping[str, Any]:
        """Return the entry for a device node.

        A node that is not listed has the same root on the host as the listed ones: a containerised driver has its nodes below its own root.
        """
        if path in self.nodes:
            return self.nodes[path]
        sources = ((name, str(entry.get("hostPath") or name)) for name, entry in self.nodes.items() if _GPU_NODE.fullmatch(name))
        root = next((source.removesuffix(name) for name, source in sources), "")
        return {"path": path, "hostPath": f"{root}{path}"} if root else {"path": path}

    def lacks_capabilities(self, uuid: str) -> bool:
        """Whether the spec gives a MIG instance the GPU's node without the instance's own nodes.

        ``nvidia-ctk`` omits nodes that are not in /dev. Such a container would see the GPU but no instance on it.
        """
        paths = [node["path"] for node in self.devices[uuid].get("deviceNodes") or ()]
        capabilities = sum(path.startswith(_CAPABILITY_DIRECTORY) for path in paths)
        return any(_GPU_NODE.fullmatch(path) for path in paths) and capabilities < _CAPABILITIES_OF_INSTANCE

    @property
    def has_driver(self) -> bool:
        """Whether it mounts libcuda, which the front must replace."""
        return any(
            _library_of(mount) is DRIVER_LIBRARIES[0]
            for edits in (self.edits, *self.devices.values())
            for mount in edits.get("mounts") or ()
        )


@dataclass(frozen=True, slots=True)
class CapabilityNode:
    """A device node that gives access to a part of a GPU in MIG mode."""

    minor: int
    """The number of the capability, which is also part of its name."""
    major: int | None = None
    """The major number that this kernel assigned to the driver's capabilities; None if it has not assigned one."""
    mode: int | None = None
    """The node's permissions from the driver; None if unknown."""

    def described(self) -> Mapping[str, Any]:
        """Return the node for a spec.

        Instances that a container creates through NVML have no nodes on the host, at most in that container. If a spec has the numbers, a
        runtime creates the container's node without reading the host's.
        Source: ``DeviceNode.fillMissingInfo``, https://github.com/cncf-tags/container-device-interface/blob/main/pkg/cdi
        """
        node: dict[str, Any] = {"path": f"{_CAPABILITY_DIRECTORY}nvidia-cap{self.minor}"}
        if self.major is not None:
            node |= {"type": "c", "major": self.major, "minor": self.minor}
        if self.mode is not None:
            node["fileMode"] = self.mode
        return node


@dataclass(frozen=True, slots=True)
class InjectedDevice:
    """A granted device as the container needs it: its UUID, and its device nodes if no host spec lists them."""

    uuid: str
    minor: int
    capability_nodes: tuple[CapabilityNode, ...] = ()
    """For a MIG instance: the nodes that grant access to its GPU instance and compute instance."""


@dataclass(frozen=True, slots=True)
class PriorityPage:
    """The node's priority page, as one container sees it."""

    path: str
    writable: bool
    """Containers of high priority write to request a device; those of low priority read it."""


@dataclass(frozen=True, slots=True)
class ShimFiles:
    """Host paths of what the shim needs in one container."""

    copies: Mapping[str, str]
    """The container's own copies of the shim's libraries, by the library's name."""
    limits: str
    region: str
    interposition: Interposition
    priority: PriorityPage | None = None
    """For a container with a high or low priority."""
    turns: str | None = None
    """The node's time-slot page, for a container that may hold more memory than it is guaranteed."""

    @property
    def preload_list(self) -> str:
        """The container's own ``ld.so.preload``, next to its limits."""
        return f"{self.limits.rpartition('/')[0]}/{PRELOAD_LIST_ARTEFACT}"


class HostSpecError(ValueError):
    """The host's NVIDIA CDI spec lacks something that the agent needs."""


def is_host_spec(document: Any) -> bool:
    """Whether a parsed CDI document describes this host's NVIDIA GPUs and their driver."""
    return isinstance(document, dict) and document.get("kind") in HOST_SPEC_KINDS


def parse_host_spec(document: Mapping[str, Any], source: str) -> HostSpec:
    """Parse the host's spec.

    Raises: HostSpecError with the file and the malformed part.
    """
    devices = _checked_devices(document.get("devices") or [], source)
    version = _checked_version(document.get("cdiVersion"), source)
    edits = _checked_edits(document.get("containerEdits"), source)
    nodes = {entry["path"]: entry for part in (edits, *devices.values()) for entry in part.get("deviceNodes") or ()}
    if document.get("kind") != contract.NVIDIA_MANAGEMENT_CDI_KIND:
        return HostSpec(source, version, devices, edits, nodes)
    if _ALL not in devices:
        raise HostSpecError(f"{source}: want a device {_ALL}, found {', '.join(devices) or 'none'}")
    return _split_by_gpu(HostSpec(source, version, devices, edits, nodes))


def _split_by_gpu(host: HostSpec) -> HostSpec:
    """Return the GPU Operator's spec with a device for each GPU's node; each container gets the control nodes."""
    control = [host.nodes[path] for path in _CONTROL_NODES if path in host.nodes]
    gpus = {path: {"deviceNodes": [entry]} for path, entry in host.nodes.items() if _GPU_NODE.fullmatch(path)}
    return replace(host, devices=gpus, edits=merge_edits([host.edits, {"deviceNodes": control}]))


def _checked_version(version: Any, source: str) -> str:
    """Return the version of a spec's format. Raises HostSpecError."""
    if not isinstance(version, str) or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise HostSpecError(f"{source}: want cdiVersion such as {contract.CDI_VERSION}, found {version!r}")
    return version


def _checked_devices(listed: Any, source: str) -> dict[str, Edits]:
    """Return the edits of each device of a spec by the device's name. Raises HostSpecError."""
    if not isinstance(listed, list):
        raise HostSpecError(f"{source}: want devices to be a list, found {type(listed).__name__}")
    devices = {}
    for entry in listed:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise HostSpecError(f"{source}: every entry of devices needs a name, found {entry!r:.80}")
        devices[entry["name"]] = _checked_edits(entry.get("containerEdits"), f"{source}: device {entry['name']}")
    return devices


def _checked_edits(edits: Any, where: str) -> Edits:
    if edits is None:
        return {}
    if not isinstance(edits, dict):
        raise HostSpecError(f"{where}: want containerEdits to be an object, found {type(edits).__name__}")
    for name, texts in _LISTS.items():
        entries = edits.get(name) or []
        if not isinstance(entries, list):
            raise HostSpecError(f"{where}: want containerEdits.{name} to be a list, found {type(entries).__name__}")
        for entry in entries:
            if not _is_whole(entry, texts):
                want = f"objects with {' and '.join(texts)}" if texts else "texts"
                raise HostSpecError(f"{where}: want the entries of containerEdits.{name} to be {want}, found {entry!r:.80}")
    return edits


def _is_whole(entry: Any, texts: Sequence[str]) -> bool:
    """Whether an entry of a list has the fields that the agent reads."""
    if not texts:
        return isinstance(entry, str)
    return isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in texts) and isinstance(entry.get("args") or [], list)


def container_spec(
    names: Sequence[str],
    devices: Sequence[InjectedDevice],
    host: HostSpec | None,
    shim: ShimFiles | None,
    present_nodes: Iterable[str] = (),
    *,
    added: Edits = NO_EDITS,
) -> dict[str, Any]:
    """Return the CDI document that gives a container these devices, by any of the names.

    Args:
        host: the host's NVIDIA spec. Without one, the spec lists device nodes directly, and the NVIDIA runtime adds the driver's files.
        shim: None if another backend enforces the shares.
        present_nodes: the /dev/nvidia* nodes of the host, for use without a host spec.
        added: what another backend needs in the container; takes precedence over the host's spec.
    Raises: HostSpecError if the host spec lacks a device, or the driver library that the front must replace.
    """
    edits = _host_edits(devices, host) if host is not None else _bare_edits(devices, frozenset(present_nodes))
    edits = merge_edits([edits, added])
    if shim is not None:
        edits = _with_front(edits, shim, host) if shim.interposition is Interposition.FRONT else _with_preload(edits, shim)
        edits["mounts"] += [_mount(shim.limits, contract.CONTAINER_LIMITS), _mount(shim.region, contract.CONTAINER_REGION, _READ_WRITE)]
        if shim.priority is not None:
            options = _READ_WRITE if shim.priority.writable else _READ_ONLY
            edits["mounts"].append(_mount(shim.priority.path, contract.CONTAINER_PRIORITY, options))
        if shim.turns is not None:
            edits["mounts"].append(_mount(shim.turns, contract.CONTAINER_TURNS, _READ_WRITE))
    version = _newer(contract.CDI_VERSION, host.version if host else contract.CDI_VERSION)
    return {"cdiVersion": version, "kind": contract.CDI_KIND, **_named(names, {key: value for key, value in edits.items() if value})}


def _named(names: Sequence[str], edits: Edits) -> Mapping[str, Any]:
    """Return the part of a document that gives a container the edits once, however many of the names kubelet passes on."""
    if len(names) == 1:
        return {"devices": [{"name": names[0], "containerEdits": edits}]}
    least = {"env": edits["env"][:1]}  # a device without edits is not valid
    return {"devices": [{"name": name, "containerEdits": least} for name in names], "containerEdits": edits}


def _host_edits(devices: Sequence[InjectedDevice], host: HostSpec) -> dict[str, Any]:
    edits = merge_edits([host.edits, *(_device_edits(host, device) for device in devices)])
    if not any(entry.startswith(f"{contract.ENV_NVIDIA_VISIBLE_DEVICES}=") for entry in edits["env"]):
        # an NVIDIA runtime in the chain must not add the devices that the image's environment requests
        edits["env"].append(f"{contract.ENV_NVIDIA_VISIBLE_DEVICES}={contract.NO_VISIBLE_DEVICES}")
    return edits


def _device_edits(host: HostSpec, device: InjectedDevice) -> Edits:
    described = [node.described() for node in device.capability_nodes]
    capabilities = {"deviceNodes": [entry if "type" in entry else host.node(entry["path"]) for entry in described]}
    if device.uuid in host.devices:
        return merge_edits([host.devices[device.uuid], capabilities])
    node = f"/dev/nvidia{device.minor}"
    if device.capability_nodes:  # an instance made after the host's spec: only its nodes identify it
        return merge_edits([{"deviceNodes": [host.node(node)]}, capabilities])
    edits = _with_only(node, host) if not device.uuid.startswith("MIG-") else None
    if edits is not None:
        return edits
    raise HostSpecError(
        f"{host.source} has no device {device.uuid} ({node}), only {', '.join(host.devices) or 'an empty list'}. Generate it again: "
        "nvidia-ctk cdi generate, or delete the GPU Operator's container-toolkit pod on this node"
    )


def _with_only(node: str, host: HostSpec) -> Edits | None:
    """Return the edits of the device with this GPU's node and no other GPU's, for specs that do not name UUIDs; None if there is none."""
    for edits in host.devices.values():
        gpu_nodes = [entry["path"] for entry in edits.get("deviceNodes") or () if _GPU_NODE.fullmatch(entry["path"])]
        if gpu_nodes == [node]:
            return edits
    return None


def _bare_edits(devices: Sequence[InjectedDevice], present: frozenset[str]) -> dict[str, Any]:
    gpus = dict.fromkeys(f"/dev/nvidia{device.minor}" for device in devices)
    capabilities = dict.fromkeys(node for device in devices for node in device.capability_nodes)
    control = [node for node in _CONTROL_NODES if node in present]
    nodes = [*({"path": path} for path in gpus), *(node.described() for node in capabilities), *({"path": path} for path in control)]
    env = [
        f"{contract.ENV_NVIDIA_VISIBLE_DEVICES}={','.join(device.uuid for device in devices)}",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ]
    # the NVIDIA runtime reads requested devices from such mounts if it is configured to prefer them to the environment
    requests = [_mount(contract.NVIDIA_DEVICES_SOURCE, f"{contract.NVIDIA_DEVICES_DIR}/{device.uuid}") for device in devices]
    return {"env": env, "deviceNodes": nodes, "mounts": requests, "hooks": []}


_IDENTITIES: Mapping[str, Callable[[Any], str]] = {
    "env": lambda entry: entry.partition("=")[0],
    "deviceNodes": lambda entry: entry["path"],
    "mounts": lambda entry: entry["containerPath"],
    "hooks": repr,
}
"""By list of containerEdits: what is the same in two entries when the later one replaces the earlier."""


def merge_edits(parts: Sequence[Edits]) -> dict[str, Any]:
    """Merge several containerEdits. If two parts set the same variable, node or mount point, the later one takes precedence."""
    merged: dict[str, Any] = {}
    for key, identity in _IDENTITIES.items():
        by_identity = {identity(entry): entry for part in parts for entry in part.get(key) or ()}
        merged[key] = list(by_identity.values())
    for part in parts:
        for key, value in part.items():
            if key not in _IDENTITIES:
                merged[key] = _extended(merged.get(key, []), value) if isinstance(value, list) else value
    return merged


def _extended(known: list[Any], more: list[Any]) -> list[Any]:
    return [*known, *(entry for entry in more if entry not in known)]


def _library_of(mount: Mapping[str, Any]) -> DriverLibrary | None:
    name = mount.get("containerPath", "").rpartition("/")[2]
    return next((library for library in DRIVER_LIBRARIES if library.pattern.fullmatch(name)), None)


def _with_front(edits: Mapping[str, Any], shim: ShimFiles, host: HostSpec | None) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = []
    moved: dict[str, str] = {}
    for mount in edits["mounts"]:
        library = _library_of(mount)
        if library is None:
            mounts.append(mount)
            continue
        moved.setdefault(library.driver_name, mount["hostPath"])
        mounts.append(_mount(shim.copies[library.front], mount["containerPath"]))
    if contract.CUDA_DRIVER_SONAME not in moved:
        raise HostSpecError(
            f"{host.source if host else 'no NVIDIA CDI spec on this host'} mounts no libcuda.so, so the shim cannot replace it. "
            "Generate the spec again: nvidia-ctk cdi generate, or set interposition: preload"
        )
    mounts += [_mount(path, f"{contract.CONTAINER_DRIVER_DIR}/{name}") for name, path in moved.items()]
    hooks = [hook for hook in edits["hooks"] if _COMPAT_HOOK not in (hook.get("args") or ())]
    return {**edits, "mounts": mounts, "hooks": hooks}


def _with_preload(edits: Mapping[str, Any], shim: ShimFiles) -> dict[str, Any]:
    added = [
        _mount(shim.copies[PRELOAD_ARTEFACT], contract.CONTAINER_PRELOAD),
        _mount(shim.preload_list, contract.LD_SO_PRELOAD),
    ]
    return {**edits, "mounts": [*edits["mounts"], *added]}


def _mount(host_path: str, container_path: str, options: tuple[str, ...] = _READ_ONLY) -> dict[str, Any]:
    return {"hostPath": host_path, "containerPath": container_path, "options": list(options)}


def _newer(a: str, b: str) -> str:
    return max(a, b, key=lambda version: tuple(int(part) for part in version.split(".")))


def file_name(grant_id: str) -> str:
    """Return the name of a grant's spec file: one grant per file, so that two grants never conflict."""
    return f"{contract.CDI_FILE_PREFIX}{grant_id}.json"


def grant_id_of_file(name: str) -> str | None:
    """Return the grant id of one of our spec files, or None for any other file."""
    if name.startswith(contract.CDI_FILE_PREFIX) and name.endswith(".json"):
        return name[len(contract.CDI_FILE_PREFIX) : -len(".json")]
    return None
