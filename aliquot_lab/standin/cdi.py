# SPDX-License-Identifier: Apache-2.0
"""Container Device Interface: reads specs and resolves device names, as container runtimes do.

Rules of CDI 1.1.0: a later directory wins over an earlier one. A name in two files of one directory is a conflict and cannot be resolved.
A spec with an unknown field, an invalid kind or a field newer than its ``cdiVersion`` is ignored as a whole. The edits of the spec apply
once, before those of its devices. ``runtime`` applies the edits to a container.
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
    """A device name that cannot be resolved; the message has the reason."""


class SpecError(Exception):
    """A spec file that runtimes do not accept."""


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
    """A file or directory of the host to mount in the container."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A program of the host that a runtime runs at a stage of the container's life."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


class ContainerEdits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Changes to a container."""

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
    """The devices in the spec directories at one moment."""

    devices: Mapping[str, tuple[Spec, Device]]
    conflicts: Mapping[str, tuple[Path, ...]]
    errors: Mapping[Path, str]
    """Ignored spec files, with the reason."""


def load_registry(directories: Sequence[Path]) -> Registry:
    """Read every ``.json`` and ``.yaml`` file of the directories, in rising order of precedence."""
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
    """Return the edits for a container with these devices, in order. Raises CdiError with every unresolvable device."""
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
    _check_names([device.name for device in spec.devices], path)
    needed = max((_needed_version(spec), *(_needed_version(device) for device in spec.devices)), key=VERSIONS.index)
    if VERSIONS.index(needed) > VERSIONS.index(spec.cdi_version):
        raise SpecError(f"{path}: uses fields of CDI {needed}, but has cdiVersion {spec.cdi_version}")


def _check_names(names: Sequence[str], path: Path) -> None:
    for name in names:
        if not DEVICE.fullmatch(name) or names.count(name) > 1:
            raise SpecError(f"{path}: device name {name!r} is invalid or used twice")


def _needed_version(part: Spec | Device) -> str:
    """Return the oldest CDI version that has all fields used in the spec or device."""
    edits = part.container_edits
    if edits.additional_gids:
        return "0.7.0"
    if part.annotations or _has_dotted_class(part):
        return "0.6.0"
    if any(node.host_path for node in edits.device_nodes) or _starts_with_digit(part):
        return "0.5.0"
    return "0.4.0" if any(mount.type for mount in edits.mounts) else "0.3.0"


def _has_dotted_class(part: Spec | Device) -> bool:
    return isinstance(part, Spec) and "." in part.kind.partition("/")[2]


def _starts_with_digit(part: Spec | Device) -> bool:
    return isinstance(part, Device) and not part.name[0].isalpha()


def _explain(registry: Registry, name: str) -> str:
    if paths := registry.conflicts.get(name):
        return f"{name} (in conflict: {', '.join(map(str, paths))})"
    return name


def encode_spec(spec: Spec) -> bytes:
    """Encode a spec as JSON, without empty fields."""
    return msgspec.json.format(msgspec.json.encode(_without_defaults(msgspec.to_builtins(spec))), indent=1)


def _without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_defaults(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (None, "", {}, [], 0)}
    if isinstance(value, (list, tuple)):
        return [_without_defaults(item) for item in value]
    return value
