"""The scheduler's configuration as one table: each field of ``Settings`` is a row with its default, meaning and bounds.

A setting's three spellings follow from the field's name: ``soft_seconds`` is ``softSeconds`` in the file (YAML or JSON),
``ALIQUOT_SOFT_SECONDS`` in the environment and ``--soft-seconds`` on the command line. A flag beats the environment, which beats the
file, which beats the default. Weights are a mapping and stand in the file only.
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

from proto import contract
from proto.model import Policy
from scheduler_plugin.core.score import DEFAULT_WEIGHTS, Weights
from scheduler_plugin.errors import SettingsError

ENV_PREFIX = "ALIQUOT_"
CONFIG_ENV = "ALIQUOT_SCHEDULER_CONFIG"
WEIGHTS_KEY = "weights"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be configured. Durations are in seconds."""

    extender_address: Annotated[str, Row("host:port of the extender; loopback beside kube-scheduler, or any address with TLS")] = (
        "127.0.0.1:9410"
    )
    webhook_address: Annotated[str, Row("host:port of the admission webhook; empty: none here")] = "0.0.0.0:9411"
    metrics_address: Annotated[str, Row("host:port of /metrics, /healthz and /readyz; port 0 chooses a free one")] = "0.0.0.0:9412"
    tls_cert_file: Annotated[str, Row("certificate of webhook and extender; read again when it changes")] = ""
    tls_key_file: Annotated[str, Row("its key")] = ""
    client_ca_file: Annotated[str, Row("CA of the extender's clients: mutual TLS; needed beyond loopback")] = ""
    policy: Annotated[Policy, Row("placement of pods that name none")] = Policy.FRAG
    soft_seconds: Annotated[float, Row("how long a pod is expected on a node without being bound", 0.1, 600)] = 10.0
    max_body_mib: Annotated[int, Row("largest request body; the autoscaler sends full nodes", 1, 1024)] = 128
    adopt_nvidia_gpu: Annotated[bool, Row("also take over pods that ask for plain nvidia.com/gpu, as whole GPUs")] = False
    lease_name: Annotated[str, Row("lease by which replicas elect a leader; empty: this is the only replica")] = ""
    lease_namespace: Annotated[str, Row("namespace of the lease")] = "aliquot-system"
    kube_api_url: Annotated[str, Row("Kubernetes API server (default: the in-cluster service)")] = ""
    kube_token_file: Annotated[str, Row("bearer token for the API (default: the in-cluster service account's)")] = ""
    kube_ca_file: Annotated[str, Row("CA bundle of the API (default: the in-cluster service account's)")] = ""
    scheduler_name: Annotated[str, Row("schedulerName that the webhook gives to GPU pods")] = contract.SCHEDULER_NAME
    log_level: Annotated[LogLevel, Row("least severity that is logged")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Row("form of the log lines")] = LogFormat.JSON
    weights: Mapping[Policy, Weights] = dataclasses.field(default_factory=lambda: dict(DEFAULT_WEIGHTS))

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> "Settings":
        """Read flags, environment and file. Raises SettingsError with one sentence; SystemExit(0) after printing help."""
        flags = _parser().parse_args(argv)
        config_path = flags.config or environ.get(CONFIG_ENV, "")
        values: dict[str, Any] = _from_file(Path(config_path)) if config_path else {}
        for setting in SETTINGS:
            if (text := environ.get(setting.env)) is not None:
                values[setting.name] = setting.parse(text, f"environment variable {setting.env}")
            if (text := getattr(flags, setting.name)) is not None:
                values[setting.name] = setting.parse(text, f"flag {setting.flag}")
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self) -> None:
        host, _ = split_address("extenderAddress", self.extender_address)
        split_address("metricsAddress", self.metrics_address)
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise SettingsError("tlsCertFile and tlsKeyFile belong together: set both or neither")
        if host not in ("127.0.0.1", "::1", "localhost") and not (self.tls_cert_file and self.client_ca_file):
            raise SettingsError(
                f"extenderAddress {self.extender_address} is reachable from elsewhere, and whoever reaches it can bind pods: "
                "set tlsCertFile, tlsKeyFile and clientCaFile, or listen on 127.0.0.1"
            )
        if self.webhook_address:
            split_address("webhookAddress", self.webhook_address)
            if not self.tls_cert_file:
                raise SettingsError(
                    "the API server calls webhooks over TLS only: set tlsCertFile and tlsKeyFile, or webhookAddress to nothing"
                )


def split_address(key: str, address: str) -> tuple[str, int]:
    """Split ``host:port`` (or ``[v6]:port``). Raises SettingsError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{key} {address!r}: want host:port, such as 127.0.0.1:9410")
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
            return "a text"
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
        return converted


def _table() -> tuple[_Setting, ...]:
    hints = get_type_hints(Settings, include_extras=True)
    return tuple(
        _Setting(entry.name, *_type_and_row(hints[entry.name], entry.default))
        for entry in dataclasses.fields(Settings)
        if entry.name != WEIGHTS_KEY
    )


def _type_and_row(hint: Any, default: Any) -> tuple[type, Any, Row]:
    wanted, row = get_args(hint)
    return wanted, default, row


SETTINGS = _table()


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        document = msgspec.json.decode(content) if path.suffix == ".json" else msgspec.yaml.decode(content)
    except OSError as exc:
        raise SettingsError(f"configuration file {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise SettingsError(f"configuration file {path}: {' '.join(str(exc).split())}") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"configuration file {path}: want a mapping of settings, found {type(document).__name__}")
    by_key = {setting.key: setting for setting in SETTINGS}
    values: dict[str, Any] = {}
    for key, value in document.items():
        source = f"configuration file {path}"
        if key == WEIGHTS_KEY:
            values[WEIGHTS_KEY] = _weights(value, source)
        elif key in by_key:
            values[by_key[key].name] = by_key[key].parse(value, source)
        else:
            near = difflib.get_close_matches(str(key), [*by_key, WEIGHTS_KEY], n=1)
            raise SettingsError(f"{source}: unknown setting {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return values


def _weights(value: Any, source: str) -> Mapping[Policy, Weights]:
    """Overlay single weights of single policies, ``{frag: {host: 2.0}}``, on the defaults."""
    try:
        overlays = msgspec.convert(value, dict[Policy, dict[str, float]])
        return {policy: dataclasses.replace(weights, **overlays.get(policy, {})) for policy, weights in DEFAULT_WEIGHTS.items()}
    except (msgspec.ValidationError, TypeError) as exc:
        terms = ", ".join(field.name for field in dataclasses.fields(Weights))
        raise SettingsError(f"{source}: weights: {exc}; want policies ({', '.join(Policy)}) with numbers for {terms}") from exc


class _Parser(argparse.ArgumentParser):
    """argparse prints usage and exits by itself; a wrong flag is a settings error like any other."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="scheduler_plugin",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Places pods on shares of GPUs, beside kube-scheduler, and admits what they ask for.",
        epilog=f"settings (flag over environment over file over default; file: --config or {CONFIG_ENV}, YAML or JSON):\n\n{table()}",
        allow_abbrev=False,
        usage="python -m scheduler_plugin [--config FILE] [--SETTING VALUE ...]",
    )
    parser.add_argument("--config", metavar="FILE", help="settings file")
    for setting in SETTINGS:
        optional_value: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.type is bool else {}
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
