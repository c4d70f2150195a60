"""The agent's configuration as one table: each field of ``Settings`` is a row with its default, meaning and bounds.

A setting's three spellings follow from the field's name: ``shares_per_gpu`` is ``sharesPerGpu`` in the file (YAML or JSON),
``ALIQUOT_SHARES_PER_GPU`` in the environment and ``--shares-per-gpu`` on the command line. A flag beats the environment, which
beats the file, which beats the default. Configuration is read once, here, and is a value from then on.
"""

import argparse
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import msgspec

from agent.core.cdi import Interposition
from agent.core.limits import FailPolicy
from agent.errors import SettingsError
from proto import contract
from proto.model import Policy

ENV_PREFIX = "ALIQUOT_"
CONFIG_ENV = "ALIQUOT_CONFIG"


class Placement(StrEnum):
    """Who chooses the devices of a pod."""

    ASSIGNED = "assigned"
    LOCAL = "local"


class LogLevel(StrEnum):
    """Least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Form of the log lines on standard error."""

    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Row:
    """What the table says of one setting besides its name, type and default."""

    meaning: str
    least: float | None = None
    most: float | None = None
    absolute: bool = False
    """The text is an absolute path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be configured. Paths are absolute; durations are in seconds."""

    node_name: Annotated[str, Row("name of this Kubernetes node (default: the host name)")] = ""
    kubelet_device_plugin_dir: Annotated[str, Row("directory of the kubelet's and the plugins' sockets", absolute=True)] = (
        contract.KUBELET_DEVICE_PLUGIN_DIR
    )
    pod_resources_socket: Annotated[str, Row("the kubelet's PodResources socket", absolute=True)] = contract.POD_RESOURCES_SOCKET
    cdi_dir: Annotated[str, Row("directory for the CDI specs written for containers", absolute=True)] = contract.CDI_DYNAMIC_DIR
    cdi_static_dir: Annotated[str, Row("second directory searched for the host's NVIDIA CDI spec", absolute=True)] = contract.CDI_STATIC_DIR
    state_dir: Annotated[str, Row("node secret, ledger and installed shims; kept over reboots", absolute=True)] = contract.STATE_DIR
    runtime_dir: Annotated[str, Row("limits and usage regions of containers; gone after a reboot", absolute=True)] = contract.RUNTIME_DIR
    shim_dir: Annotated[
        str, Row("directory with the shim's libraries (default: build/lib/shim of a source tree, else /usr/local/lib/aliquot)")
    ] = ""
    shares_per_gpu: Annotated[int, Row("virtual GPUs offered per physical GPU", least=1, most=1000)] = 16
    placement: Annotated[Placement, Row("who chooses devices: the scheduler (by annotation), or this agent")] = Placement.ASSIGNED
    placement_policy: Annotated[Policy, Row("how local placement chooses among GPUs that fit")] = Policy.FRAG
    publish_node_capacity: Annotated[bool, Row("publish vgpu-memory and vgpu-cores in the node's capacity")] = True
    metrics_address: Annotated[str, Row("host:port of /metrics, /healthz and /readyz; port 0 chooses a free one")] = "0.0.0.0:9402"
    nvml_library: Annotated[str, Row("path of libnvidia-ml.so.1 (default: the loader's)")] = ""
    simulate: Annotated[str, Row("profile name or topology file of a simulated node to make and use")] = ""
    kube_api_url: Annotated[str, Row("Kubernetes API server (default: the in-cluster service)")] = ""
    kube_token_file: Annotated[str, Row("bearer token for the API (default: the in-cluster service account's)")] = ""
    kube_ca_file: Annotated[str, Row("CA bundle of the API (default: the in-cluster service account's)")] = ""
    interposition: Annotated[Interposition, Row("how the shim enters containers")] = Interposition.FRONT
    fail_policy: Annotated[FailPolicy, Row("when the shim cannot read its limits: refuse to run, or pass through")] = FailPolicy.CLOSED
    nvml_timeout_seconds: Annotated[float, Row("how long one call into the driver may take before it counts as hung", 0.05, 600)] = 5.0
    driver_poll_seconds: Annotated[float, Row("period of reading the GPUs' health and use", 0.05, 600)] = 5.0
    reconcile_seconds: Annotated[
        float, Row("period of comparing ledger, pods and files; bounds how long a dead pod's share is held", 0.05, 3600)
    ] = 15.0
    pod_wait_seconds: Annotated[
        float,
        Row("how long PreStart waits for a pod to appear; the kubelet gives it 30 s", 0, contract.PRESTART_TIMEOUT_SECONDS - 5),
    ] = 20.0
    log_level: Annotated[LogLevel, Row("least severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("form of the log lines")] = LogFormat.JSON

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file.

        Raises: SettingsError with one sentence; SystemExit(0) after printing help.
        """
        flags = _parser().parse_args(argv)
        config_path = flags.config or environ.get(CONFIG_ENV, "")
        values: dict[str, Any] = {}
        if config_path:
            values.update(_from_file(Path(config_path)))
        for setting in SETTINGS:
            if (text := environ.get(setting.env)) is not None:
                values[setting.name] = setting.parse(text, f"environment variable {setting.env}")
            if (text := getattr(flags, setting.name)) is not None:
                values[setting.name] = setting.parse(text, f"flag {setting.flag}")
        settings = cls(**values)
        split_address(settings.metrics_address)
        return settings

    @property
    def metrics_host_port(self) -> tuple[str, int]:
        """The listening address, split."""
        return split_address(self.metrics_address)


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` (or ``[v6]:port``); raises SettingsError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"metricsAddress {address!r}: want host:port, such as 0.0.0.0:9402")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True)
class _Setting:
    """One row of the table, read off the class above."""

    name: str
    type: type
    default: Any
    row: Row

    @property
    def key(self) -> str:
        head, *tail = self.name.split("_")
        return head + "".join(part.capitalize() for part in tail)

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def wanted(self) -> str:
        if issubclass(self.type, StrEnum):
            return "one of " + ", ".join(self.type)
        if self.type is bool:
            return "true or false"
        if self.type is str:
            return "an absolute path" if self.row.absolute else "a text"
        return f"{'an integer' if self.type is int else 'a number'} from {self.row.least:g} to {self.row.most:g}"

    def parse(self, value: Any, source: str) -> Any:
        """Convert and check a value from outside. Raises SettingsError."""
        converted: Any
        try:
            converted = msgspec.convert(value, self.type, strict=not isinstance(value, str))
        except msgspec.ValidationError:
            raise SettingsError(f"{source}: {value!r} is not valid for {self.key}; want {self.wanted}") from None
        least, most = self.row.least, self.row.most
        if (least is not None and converted < least) or (most is not None and converted > most):
            raise SettingsError(f"{source}: {value!r} is out of range for {self.key}; want {self.wanted}")
        if self.row.absolute and not converted.startswith("/"):
            raise SettingsError(f"{source}: {value!r} is not valid for {self.key}; want {self.wanted}")
        return converted


def _table() -> tuple[_Setting, ...]:
    hints = get_type_hints(Settings, include_extras=True)
    rows = []
    for entry in dataclasses.fields(Settings):
        wanted, row = get_args(hints[entry.name])
        rows.append(_Setting(entry.name, wanted, entry.default, row))
    return tuple(rows)


SETTINGS = _table()


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise SettingsError(f"configuration file {path}: {exc.strerror}") from exc
    try:
        document = msgspec.json.decode(content) if path.suffix == ".json" else msgspec.yaml.decode(content)
    except msgspec.DecodeError as exc:
        raise SettingsError(f"configuration file {path}: {' '.join(str(exc).split())}") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"configuration file {path}: want a mapping of settings, found {type(document).__name__}")
    by_key = {setting.key: setting for setting in SETTINGS}
    values = {}
    for key, value in document.items():
        if key not in by_key:
            near = difflib.get_close_matches(str(key), by_key, n=1)
            raise SettingsError(f"configuration file {path}: unknown setting {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
        values[by_key[key].name] = by_key[key].parse(value, f"configuration file {path}")
    return values


class _Parser(argparse.ArgumentParser):
    """argparse prints usage and exits by itself; a wrong flag is a settings error like any other."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="agent",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Offers this node's GPUs as shares to the kubelet and gives each container what its pod was assigned.",
        epilog=f"settings (flag over environment over file over default; file: --config or {CONFIG_ENV}, YAML or JSON):\n\n{table()}",
        allow_abbrev=False,
        usage="python -m agent [--config FILE] [--SETTING VALUE ...]",
    )
    parser.add_argument("--config", metavar="FILE", help="settings file")
    for setting in SETTINGS:
        boolean = setting.type is bool
        optional_value: dict[str, Any] = {"nargs": "?", "const": "true"} if boolean else {}
        parser.add_argument(setting.flag, dest=setting.name, help=argparse.SUPPRESS, **optional_value)
    return parser


def table() -> str:
    """Return the settings as text, one block per row."""
    lines = []
    for setting in SETTINGS:
        default = str(setting.default).lower() if isinstance(setting.default, bool) else f"{setting.default}"
        allowed = "" if setting.type is str else f" [{setting.wanted}]"
        lines.append(f"  {setting.flag}  {setting.env}  {setting.key}")
        lines.append(f"      {setting.row.meaning}{allowed}" + (f"; default {default}" if default else ""))
    return "\n".join(lines)
