# SPDX-License-Identifier: Apache-2.0
"""The container runtime: whether it resolves CDI names, whether NVIDIA's CDI spec is current, and how the toolkit is configured."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from agent.core.cdi import is_host_spec
from aliquot import contract
from aliquot_cli.doctor import selinux
from aliquot_cli.doctor.cri import runtime_version
from aliquot_cli.doctor.driver import module_version
from aliquot_cli.doctor.findings import Finding, error, info, ok, warning
from aliquot_cli.doctor.host import Host, UnreadableError
from aliquot_cli.doctor.options import DoctorOptions
from aliquot_cli.doctor.packages import installed_version
from aliquot_cli.doctor.runtime_config import RUNTIMES, ConfigError, Family, Runtime, RuntimeConfig, read_config

OPERATOR_TOOLKIT_CONFIG = "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
"""The GPU Operator writes it at each start of its container-toolkit pod, and its programs read no other file."""
TOOLKIT_CONFIGS = (OPERATOR_TOOLKIT_CONFIG, "/etc/nvidia-container-runtime/config.toml")
_ENVVAR = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_MOUNTS = "accept-nvidia-visible-devices-as-volume-mounts"
_TOOLKIT_PACKAGE = "nvidia-container-toolkit"
SAFE_TOOLKIT = (1, 17, 8)
"""The first version without CVE-2025-23266, which lets an image run code as root on the node."""
_CDI_DEFAULT_SINCE = (2, 0)
_CDI_SINCE = (1, 7)


def check(host: Host, options: DoctorOptions) -> Iterator[Finding]:
    """Check runtime, CDI, SELinux and toolkit."""
    runtime = next((one for one in RUNTIMES if host.is_socket(one.socket)), None)
    config: RuntimeConfig | None = None
    if runtime is None:
        yield error("runtime.socket", "there is no socket of a known container runtime on this node", "start containerd or CRI-O")
    else:
        version = runtime_version(host.path(runtime.socket)) if host.answers(runtime.socket) else None
        yield _runtime(runtime, version)
        try:
            config = read_config(host, runtime)
            yield _resolves_cdi(runtime, config, version)
        except ConfigError as exc:
            yield error("runtime.cdi", str(exc), "correct the file: the runtime does not start with it")
    yield from _cdi_specs(host, options, config)
    labels = selinux.finding(host, options, None if config is None else config.confines_by_selinux)
    if labels is not None:
        yield labels
    yield from _toolkit(host, config)


def _runtime(runtime: Runtime, version: tuple[str, str] | None) -> Finding:
    if version is None:
        return warning("runtime.socket", f"{runtime.name} does not answer on {runtime.socket}", "start it, or run doctor as root")
    return ok("runtime.socket", f"{version[0]} {version[1]} answers on {runtime.socket}")


def _resolves_cdi(runtime: Runtime, config: RuntimeConfig, version: tuple[str, str] | None) -> Finding:
    if runtime.family is Family.CRI_O:
        return ok("runtime.cdi", "CRI-O resolves CDI names")
    if runtime.family is Family.DOCKER:
        return error(
            "runtime.cdi", f"{runtime.name} does not resolve CDI names", "use containerd 1.7 or CRI-O, or set deviceInjection: legacy"
        )
    number = _number(version[1]) if version is not None else None
    if number is not None and number < _CDI_SINCE:
        return error(
            "runtime.cdi",
            f"containerd {version[1] if version else ''} does not support CDI",
            "upgrade containerd to 1.7 or later, or set deviceInjection: legacy",
        )
    enabled = config.cdi
    if enabled is None:
        enabled = number >= _CDI_DEFAULT_SINCE if number is not None else config.values.get("version", 2) >= 3
    if enabled:
        return ok("runtime.cdi", "containerd resolves CDI names")
    return error(
        "runtime.cdi",
        "CDI is off in containerd: containers get no devices",
        'set enable_cdi = true under [plugins."io.containerd.grpc.v1.cri"] (containerd 1.7) and restart containerd, '
        "or set deviceInjection: legacy",
    )


def _number(version: str) -> tuple[int, ...] | None:
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part) for part in match.groups() if part is not None) if match else None


# --- CDI specs ------------------------------------------------------------------------------------------------------

_OPERATOR_GENERATES = "delete the GPU Operator's container-toolkit pod of this node: the new pod writes the spec at its start"
_PERSISTENT_SPEC = "/etc/cdi/nvidia.yaml"
"""A spec made by hand stays here after a reboot."""


def _generate(output: str) -> str:
    return (
        f"nvidia-ctk cdi generate --output={output}, and repeat it after each driver upgrade "
        "(since toolkit 1.18, nvidia-cdi-refresh.service does this in /var/run/cdi)"
    )


def _cdi_specs(host: Host, options: DoctorOptions, config: RuntimeConfig | None) -> Iterator[Finding]:
    if not any(host.exists(directory) for directory in options.cdi_dirs):
        yield warning("cdi.directories", f"no CDI directory exists: {', '.join(options.cdi_dirs)}", f"mkdir -p {options.cdi_dirs[-1]}")
    specs = {}
    for name in _spec_files(host, options):
        try:
            document = msgspec.yaml.decode(host.text(name) or "")
        except msgspec.DecodeError as exc:
            yield error("cdi.spec", f"{name} cannot be read: {str(exc).splitlines()[0]}", f"remove or correct {name}; runtimes ignore it")
            continue
        if is_host_spec(document):
            specs[name] = document
    if not specs:
        yield _no_spec(config)
    for name, document in specs.items():
        yield _check_files(host, name, document)


def _spec_files(host: Host, options: DoctorOptions) -> list[str]:
    return [f"{directory}/{name}" for directory in options.cdi_dirs for name in host.names(directory) if name.endswith((".json", ".yaml"))]


def _no_spec(config: RuntimeConfig | None) -> Finding:
    found = (
        "there is no CDI spec of NVIDIA's: the agent gives containers device nodes only, and NVIDIA's runtime must add the driver's files"
    )
    fix = f"install nvidia-container-toolkit and run {_generate(_PERSISTENT_SPEC)}; with the GPU Operator, set cdi.enabled=true"
    if config is None:
        return warning("cdi.nvidia", f"{found}; it is unknown whether that is the default runtime", fix)
    if config.nvidia_by_default:
        return warning("cdi.nvidia", f"{found}. It is the default runtime", fix)
    return error("cdi.nvidia", f"{found}. It is not the default runtime: containers have no driver", fix)


def _check_files(host: Host, name: str, document: Mapping[str, Any]) -> Finding:
    """Check that every file which the spec mounts exists: after a driver upgrade, an old spec names removed files."""
    missing = sorted(path for path in _mounted_files(document) if not host.exists(path))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        fix = _OPERATOR_GENERATES if document["kind"] == contract.NVIDIA_MANAGEMENT_CDI_KIND else f"run {_generate(name)}"
        return error("cdi.nvidia", f"{name} is for another driver: it mounts {missing[0]}{more}, which does not exist", fix)
    count = len(document.get("devices") or ())
    version = module_version(host)
    return ok(
        "cdi.nvidia", f"{name} has {count} devices, and every file that it mounts exists" + (f" (driver {version})" if version else "")
    )


def _mounted_files(document: Mapping[str, Any]) -> set[str]:
    """Return the host paths that a CDI spec mounts for any of its devices."""
    edits = [document.get("containerEdits") or {}, *((one.get("containerEdits") or {}) for one in document.get("devices") or ())]
    return {str(mount.get("hostPath")) for one in edits for mount in one.get("mounts") or ()}


# --- NVIDIA's container toolkit -------------------------------------------------------------------------------------


def _toolkit(host: Host, runtime: RuntimeConfig | None) -> Iterator[Finding]:
    nvidia_by_default = runtime is not None and runtime.nvidia_by_default
    name = next((name for name in TOOLKIT_CONFIGS if host.exists(name)), None)
    if name is None:
        if runtime is None:
            yield info("toolkit.config", "NVIDIA's container toolkit has no configuration here; it is unknown whether the runtime uses it")
        elif runtime.knows_nvidia:  # the toolkit uses its defaults
            yield _envvar(TOOLKIT_CONFIGS[-1], {}, nvidia_by_default=nvidia_by_default, there=False)
            yield from _toolkit_version(host)
        else:
            yield info("toolkit.config", "the container runtime does not use NVIDIA's runtime: pods cannot reach GPUs by environment")
        return
    try:
        config = tomllib.loads(host.text(name) or "")
    except tomllib.TOMLDecodeError as exc:
        yield error("toolkit.config", f"{name} is not TOML: {exc}", "correct the file, or remove it to use the defaults")
        return
    yield _envvar(name, config, nvidia_by_default=nvidia_by_default)
    yield from _toolkit_version(host)


def _envvar(name: str, config: Mapping[str, Any], *, nvidia_by_default: bool, there: bool = True) -> Finding:
    """Check the toolkit's configuration. Without a file, ``config`` is empty and ``name`` is its usual path."""
    settings = ((_ENVVAR, "false"), (_MOUNTS, "true"))
    if name == OPERATOR_TOOLKIT_CONFIG:
        variables = " and ".join(f"{key.replace('-', '_').upper()}={value}" for key, value in settings)
        fix = f"set in the GPU Operator's ClusterPolicy, under toolkit.env: {variables}"
    else:
        fix = f"set in {name}: {' and '.join(f'{key} = {value}' for key, value in settings)}"
    if not config.get(_ENVVAR, True):
        if config.get(_MOUNTS, False):
            return ok("toolkit.envvar", f"{name}: an unprivileged pod cannot reach GPUs by NVIDIA_VISIBLE_DEVICES")
        return error("toolkit.envvar", f"{name}: no unprivileged pod can reach GPUs, by variable or by mount. The agent is such a pod", fix)
    where = name if there else f"{name} does not exist, so the toolkit uses its default"
    found = f"{where}: an unprivileged pod reaches all GPUs of the node by NVIDIA_VISIBLE_DEVICES=all, without any limit"
    if nvidia_by_default:
        return error("toolkit.envvar", f"{found}. NVIDIA's runtime is the default, so any pod can do this", fix)
    return warning("toolkit.envvar", f"{found}, if it can name a RuntimeClass with NVIDIA's runtime", fix)


def _toolkit_version(host: Host) -> Iterator[Finding]:
    wanted = ".".join(map(str, SAFE_TOOLKIT))
    try:
        version = installed_version(host, _TOOLKIT_PACKAGE)
    except UnreadableError as exc:
        fix = f"run rpm -q {_TOOLKIT_PACKAGE} on the node: expected {wanted} or later"
        yield info("toolkit.version", f"the version of {_TOOLKIT_PACKAGE} is unknown: {exc}", fix)
        return
    number = _number(version) if version is not None else None
    if version is None or number is None:
        return
    if number < SAFE_TOOLKIT:
        yield error(
            "toolkit.version",
            f"{_TOOLKIT_PACKAGE} {version} lets an image run code as root on the node (CVE-2025-23266)",
            f"upgrade it to {wanted} or later",
        )
    else:
        yield ok("toolkit.version", f"{_TOOLKIT_PACKAGE} {version}")
