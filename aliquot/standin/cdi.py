"""Container Device Interface: reading specs and resolving device names, as container runtimes do.

Rules kept (CDI 1.1.0): the later directory wins over the earlier; a name that two files of one directory define is in conflict and cannot
be resolved; a spec with a field we do not know, a wrong kind or a field newer than its ``cdiVersion`` is left out as a whole; a spec's own
edits come once, before those of its devices. Applying the edits to a container is the runtime's part.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
VENDOR = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
CLASS = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


class CdiError(Exception):
    """A device name that cannot be resolved, with what stands in the way."""


class SpecError(Exception):
    """A spec file that runtimes would not accept."""


class DeviceNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A device node to create in the container."""

    path: str
    host_path: str = ""
    type: str = ""
    major: int = 0
    minor: int = 0
    file_mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


class Mount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A file or directory of the host to show in the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A program of the host that the runtime would run at a stage of the container's life."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class ContainerEdits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What is to be done to a container."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = msgspec.field(default=(), name="additionalGids")

    def __add__(self, other: "ContainerEdits") -> "ContainerEdits":
        return ContainerEdits(
            env=self.env + other.env,
            device_nodes=self.device_nodes + other.device_nodes,
            mounts=self.mounts + other.mounts,
            hooks=self.hooks + other.hooks,
            additional_gids=self.additional_gids + other.additional_gids,
        )


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One device of a spec."""

    name: str
    container_edits: ContainerEdits = ContainerEdits()
    annotations: dict[str, str] = {}


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One spec file."""

    cdi_version: str
    kind: str
    devices: tuple[Device, ...]
    container_edits: ContainerEdits = ContainerEdits()
    annotations: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Registry:
    """The devices of some directories at one moment."""

    devices: Mapping[str, tuple[Spec, Device]]
    conflicts: Mapping[str, tuple[Path, ...]]
    errors: Mapping[Path, str]
    """Spec files left out, and why."""


def load_registry(directories: Sequence[Path]) -> Registry:
    """Read every ``.json`` and ``.yaml`` file of the directories, the most important directory last."""
    devices: dict[str, tuple[Spec, Device]] = {}
    conflicts: dict[str, tuple[Path, ...]] = {}
    errors: dict[Path, str] = {}
    for directory in directories:
        origin: dict[str, list[Path]] = {}
        for path in sorted(directory.glob("*")):
            if path.suffix not in (".json", ".yaml"):
                continue
            try:
                spec = read_spec(path)
            except SpecError as exc:
                errors[path] = str(exc)
                continue
            for device in spec.devices:
                name = f"{spec.kind}={device.name}"
                origin.setdefault(name, []).append(path)
                devices[name] = (spec, device)
                conflicts.pop(name, None)
        conflicts.update({name: tuple(paths) for name, paths in origin.items() if len(paths) > 1})
    return Registry({name: found for name, found in devices.items() if name not in conflicts}, conflicts, errors)


def resolve(registry: Registry, names: Sequence[str]) -> ContainerEdits:
    """Return the edits for a container with these devices, in order. Raises CdiError naming every device that has none."""
    unresolved = [name for name in names if name not in registry.devices]
    if unresolved:
        raise CdiError(f"unresolvable CDI devices {', '.join(_explain(registry, name) for name in unresolved)}")
    edits = ContainerEdits()
    seen: list[Spec] = []
    for name in names:
        spec, device = registry.devices[name]
        if not any(spec is other for other in seen):
            seen.append(spec)
            edits += spec.container_edits
        edits += device.container_edits
    return edits


def read_spec(path: Path) -> Spec:
    """Read and check one spec file. Raises SpecError."""
    try:
        data = path.read_bytes()
        spec = msgspec.json.decode(data, type=Spec) if path.suffix == ".json" else msgspec.yaml.decode(data, type=Spec)
    except (OSError, msgspec.MsgspecError) as exc:
        raise SpecError(f"{path}: {exc}") from exc
    _check(spec, path)
    return spec


def _check(spec: Spec, path: Path) -> None:
    if spec.cdi_version not in VERSIONS:
        raise SpecError(f"{path}: cdiVersion {spec.cdi_version!r}: expected one of {', '.join(VERSIONS)}")
    vendor, _, class_name = spec.kind.partition("/")
    if not VENDOR.fullmatch(vendor) or not CLASS.fullmatch(class_name):
        raise SpecError(f"{path}: kind {spec.kind!r}: expected vendor/class")
    if not spec.devices:
        raise SpecError(f"{path}: no devices")
    names = [device.name for device in spec.devices]
    for name in names:
        if not DEVICE.fullmatch(name) or names.count(name) > 1:
            raise SpecError(f"{path}: device name {name!r} is malformed or used twice")
    needed = max((_needed_version(spec), *(_needed_version(device) for device in spec.devices)), key=VERSIONS.index)
    if VERSIONS.index(needed) > VERSIONS.index(spec.cdi_version):
        raise SpecError(f"{path}: uses fields of CDI {needed}, but says cdiVersion {spec.cdi_version}")


def _needed_version(part: Spec | Device) -> str:
    edits = part.container_edits
    if edits.additional_gids:
        return "0.7.0"
    if part.annotations or (isinstance(part, Spec) and "." in part.kind.partition("/")[2]):
        return "0.6.0"
    if any(node.host_path for node in edits.device_nodes) or (isinstance(part, Device) and not part.name[0].isalpha()):
        return "0.5.0"
    return "0.4.0" if any(mount.type for mount in edits.mounts) else "0.3.0"


def _explain(registry: Registry, name: str) -> str:
    if paths := registry.conflicts.get(name):
        return f"{name} (in conflict: {', '.join(map(str, paths))})"
    return name


def encode_spec(spec: Spec) -> bytes:
    """Write a spec as JSON, leaving out what is empty."""
    return msgspec.json.format(msgspec.json.encode(_without_defaults(msgspec.to_builtins(spec))), indent=1)


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_defaults(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, "", {}, [], 0)}
    if isinstance(value, (list, tuple)):
        return [_without_defaults(item) for item in value]
    return value
