# SPDX-License-Identifier: Apache-2.0
"""Reads a node's container runtime configuration: whether it uses NVIDIA's runtime by default, CDI, and SELinux."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from aliquot_cli.doctor.host import Host

_NVIDIA_RUNTIME = "nvidia-container-runtime"
_NVIDIA_HOOK = "oci-nvidia-hook.json"
_HOOK_DIRS = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d", "/run/containers/oci/hooks.d")


class Family(StrEnum):
    """The program that the configuration is for."""

    CONTAINERD = "containerd"
    CRI_O = "cri-o"
    DOCKER = "docker"


@dataclass(frozen=True, slots=True)
class Runtime:
    """One container runtime, with the paths of a distribution."""

    name: str
    socket: str
    family: Family
    configs: tuple[str, ...]
    """Its files. containerd reads the first that exists; CRI-O and Docker read all."""
    drop_ins: str = ""
    """Directory with further files, read after ``configs`` in the order of their names."""


RUNTIMES = (
    Runtime(
        "containerd of k3s or RKE2",
        "/run/k3s/containerd/containerd.sock",
        Family.CONTAINERD,
        ("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml"),
    ),
    Runtime(
        "containerd of k0s", "/run/k0s/containerd.sock", Family.CONTAINERD, ("/run/k0s/containerd-cri.toml", "/etc/k0s/containerd.toml")
    ),
    Runtime(
        "containerd of MicroK8s",
        "/var/snap/microk8s/common/run/containerd.sock",
        Family.CONTAINERD,
        ("/var/snap/microk8s/current/args/containerd.toml",),
    ),
    Runtime("containerd", "/run/containerd/containerd.sock", Family.CONTAINERD, ("/etc/containerd/config.toml",)),
    Runtime("CRI-O", "/run/crio/crio.sock", Family.CRI_O, ("/etc/crio/crio.conf",), "/etc/crio/crio.conf.d"),
    Runtime("Docker with cri-dockerd", "/run/cri-dockerd.sock", Family.DOCKER, ("/etc/docker/daemon.json",)),
)


class ConfigError(Exception):
    """A configuration file is invalid for the runtime; the message has its name and the reason."""


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """The values in the files. Empty without a file: the runtime then uses its defaults."""

    family: Family
    values: Mapping[str, Any] = field(default_factory=dict)
    has_nvidia_hook: bool = False
    """Whether CRI-O runs NVIDIA's hook for every container."""

    @property
    def cdi(self) -> bool | None:
        """Whether containerd's configuration turns CDI on; None where containerd's default applies."""
        found = _containerd_section(self.values).get("enable_cdi")
        return None if found is None else bool(found)

    @property
    def nvidia_by_default(self) -> bool:
        """Whether NVIDIA's runtime or hook handles the containers of pods without a RuntimeClass."""
        if self.family is Family.CRI_O:
            return self.has_nvidia_hook or "nvidia" in str(_crio_section(self.values).get("default_runtime", ""))
        if self.family is Family.DOCKER:
            return "nvidia" in str(self.values.get("default-runtime", ""))
        section = _table(_containerd_section(self.values), "containerd")
        name = str(section.get("default_runtime_name", "runc"))
        program = _table(_table(_table(section, "runtimes"), name), "options").get("BinaryName", "")
        return "nvidia" in name or _NVIDIA_RUNTIME in str(program)

    @property
    def knows_nvidia(self) -> bool:
        """Whether a pod can use NVIDIA's runtime: by default, or through a RuntimeClass."""
        if self.family is Family.CRI_O:
            known = _table(_crio_section(self.values), "runtimes")
        elif self.family is Family.DOCKER:
            known = _table(self.values, "runtimes")
        else:
            known = _table(_table(_containerd_section(self.values), "containerd"), "runtimes")
        return self.nvidia_by_default or any("nvidia" in name or _NVIDIA_RUNTIME in str(runtime) for name, runtime in known.items())

    @property
    def confines_by_selinux(self) -> bool:
        """Whether SELinux confines containers where it is on. This is CRI-O's default."""
        if self.family is Family.CRI_O:
            return bool(_crio_section(self.values).get("selinux", True))
        if self.family is Family.DOCKER:
            return bool(self.values.get("selinux-enabled", False))
        return bool(_containerd_section(self.values).get("enable_selinux", False))


def read_config(host: Host, runtime: Runtime) -> RuntimeConfig:
    """Read a runtime's files, and merge imports and drop-ins into them. Raises ConfigError, UnreadableError."""
    existing = [name for name in runtime.configs if host.exists(name)]
    if runtime.family is Family.DOCKER:
        return RuntimeConfig(Family.DOCKER, _parse_json(host, existing[0]) if existing else {})
    if runtime.family is Family.CRI_O:
        names = [*existing, *(f"{runtime.drop_ins}/{name}" for name in host.names(runtime.drop_ins))]
        hooked = any(host.exists(f"{directory}/{_NVIDIA_HOOK}") for directory in _HOOK_DIRS)
        return RuntimeConfig(Family.CRI_O, _all_of(host, names), hooked)
    return RuntimeConfig(Family.CONTAINERD, _with_imports(host, existing[0]) if existing else {})


def _with_imports(host: Host, name: str) -> Mapping[str, Any]:
    """Parse containerd's file, and merge the files that it imports into it."""
    config = _parse_toml(host, name)
    imported = [found for pattern in config.get("imports", ()) for found in _matching(host, name, str(pattern))]
    return _merged(config, _all_of(host, imported))


def _all_of(host: Host, names: list[str]) -> Mapping[str, Any]:
    config: Mapping[str, Any] = {}
    for name in names:
        config = _merged(config, _parse_toml(host, name))
    return config


def _parse_toml(host: Host, name: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(host.text(name) or "")
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{name} is not TOML: {exc}") from exc


def _parse_json(host: Host, name: str) -> Mapping[str, Any]:
    try:
        found = json.loads(host.text(name) or "{}")
    except ValueError as exc:
        raise ConfigError(f"{name} is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: expected a JSON object, found {type(found).__name__}")
    return found


def _matching(host: Host, beside: str, pattern: str) -> Iterator[str]:
    path = PurePosixPath(beside).parent / pattern
    expression = re.compile(re.escape(path.name).replace(r"\*", ".*"))
    return (str(path.parent / name) for name in host.names(str(path.parent)) if expression.fullmatch(name))


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return merged


def _containerd_section(values: Mapping[str, Any]) -> Mapping[str, Any]:
    plugins = _table(values, "plugins")
    return _table(plugins, "io.containerd.cri.v1.runtime") or _table(plugins, "io.containerd.grpc.v1.cri")


def _crio_section(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return _table(_table(values, "crio"), "runtime")


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}
