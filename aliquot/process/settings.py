# SPDX-License-Identifier: Apache-2.0
"""Configuration as one table: each field of a program's settings class is a row with its default, meaning and bounds.

A setting's three spellings follow from the field's name: ``shares_per_gpu`` is ``sharesPerGpu`` in the file (YAML or JSON),
``ALIQUOT_SHARES_PER_GPU`` in the environment and ``--shares-per-gpu`` on the command line. A flag beats the environment, which
beats the file, which beats the default. A program reads its table once, at its start.
"""

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import msgspec

from aliquot.contract.errors import AliquotError

ENV_PREFIX = "ALIQUOT_"


class SettingsError(AliquotError):
    """A setting is unknown, malformed or out of range. Programs print the sentence and exit with 2."""


class LogLevel(StrEnum):
    """Lowest severity that is logged."""

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
    """Meaning and bounds of one setting; name, type and default come from the field."""

    meaning: str
    least: float | None = None
    most: float | None = None
    absolute: bool = False
    """The text is an absolute path."""
    advanced: bool = False
    """The default is right for every cluster that follows the manifests; the documentation has a table of its own for these."""


@dataclass(frozen=True, slots=True)
class FileOnly:
    """A setting that is too large for a flag, so that only the file has it. ``parse(value, source)`` raises SettingsError."""

    parse: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of a table, made from a field."""

    name: str
    type: type
    default: Any
    row: Row

    @property
    def key(self) -> str:
        """The spelling in the file."""
        return _camel_case(self.name)

    @property
    def env(self) -> str:
        """The spelling in the environment."""
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def wanted(self) -> str:
        """What a value must be, for people."""
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
        if isinstance(value, bool) and issubclass(self.type, StrEnum) and {"on", "off"} <= set(self.type):
            value = "on" if value else "off"  # YAML reads an unquoted on or off as a boolean
        try:
            converted = msgspec.convert(value, self.type, strict=not isinstance(value, str))
        except msgspec.ValidationError:
            raise SettingsError(f"{source}: {value!r} is not valid for {self.key}; want {self.wanted}") from None
        if not self._is_in_range(converted):
            raise SettingsError(f"{source}: {value!r} is out of range for {self.key}; want {self.wanted}")
        if self.row.absolute and not converted.startswith("/"):
            raise SettingsError(f"{source}: {value!r} is not valid for {self.key}; want {self.wanted}")
        return converted

    def _is_in_range(self, value: Any) -> bool:
        least, most = self.row.least, self.row.most
        return (least is None or value >= least) and (most is None or value <= most)


class Table:
    """The settings of one program.

    Args:
        settings: a dataclass; its fields are ``Annotated`` with a ``Row`` or with ``FileOnly``.
        program: the module that ``python -m`` starts.
        purpose: what the program does, in one sentence.
        config_env: environment variable that names the file if ``--config`` is not given.
    """

    def __init__(self, settings: type, *, program: str, purpose: str, config_env: str) -> None:
        hints = get_type_hints(settings, include_extras=True)
        fields = [(field, *get_args(hints[field.name])) for field in dataclasses.fields(settings)]
        self.settings = tuple(Setting(field.name, kind, field.default, row) for field, kind, row in fields if isinstance(row, Row))
        self._file_only = {field.name: row.parse for field, _, row in fields if isinstance(row, FileOnly)}
        self._program = program
        self._purpose = purpose
        self._config_env = config_env

    def read(self, argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
        """Read flags, environment and file; return what they set, by field name.

        Raises: SettingsError with one sentence; SystemExit(0) after printing help.
        """
        flags = self._parser().parse_args(argv)
        config_path = flags.config or environ.get(self._config_env, "")
        values = self._from_file(Path(config_path)) if config_path else {}
        for setting in self.settings:
            if (text := environ.get(setting.env)) is not None:
                values[setting.name] = setting.parse(text, f"environment variable {setting.env}")
            if (text := getattr(flags, setting.name)) is not None:
                values[setting.name] = setting.parse(text, f"flag {setting.flag}")
        return values

    def text(self) -> str:
        """Return the table for people, one block per row."""
        lines = []
        for setting in self.settings:
            default = str(setting.default).lower() if isinstance(setting.default, bool) else f"{setting.default}"
            allowed = "" if setting.type is str else f" [{setting.wanted}]"
            lines.append(f"  {setting.flag}  {setting.env}  {setting.key}")
            lines.append(f"      {setting.row.meaning}{allowed}" + (f"; default {default}" if default else ""))
        return "\n".join(lines)

    def _from_file(self, path: Path) -> dict[str, Any]:
        source = f"configuration file {path}"
        parsers: dict[str, tuple[str, Callable[[Any, str], Any]]] = {s.key: (s.name, s.parse) for s in self.settings}
        parsers |= {_camel_case(name): (name, parse) for name, parse in self._file_only.items()}
        values = {}
        for key, value in _read_mapping(path).items():
            if key not in parsers:
                near = difflib.get_close_matches(str(key), parsers, n=1)
                raise SettingsError(f"{source}: unknown setting {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
            name, parse = parsers[key]
            values[name] = parse(value, source)
        return values

    def _parser(self) -> argparse.ArgumentParser:
        order = f"flag over environment over file over default; file: --config or {self._config_env}, YAML or JSON"
        parser = _Parser(
            prog=self._program,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description=self._purpose,
            epilog=f"settings ({order}):\n\n{self.text()}",
            allow_abbrev=False,
            usage=f"python -m {self._program} [--config FILE] [--SETTING VALUE ...]",
        )
        parser.add_argument("--config", metavar="FILE", help="settings file")
        for setting in self.settings:
            optional_value: dict[str, Any] = {"nargs": "?", "const": "true"} if setting.type is bool else {}
            parser.add_argument(setting.flag, dest=setting.name, help=argparse.SUPPRESS, **optional_value)
        return parser


def split_address(key: str, address: str) -> tuple[str, int]:
    """Split ``host:port`` (or ``[v6]:port``), the value of the setting ``key``. Raises SettingsError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{key} {address!r}: want host:port, such as 127.0.0.1:9402")
    return host.strip("[]"), int(port)


class _Parser(argparse.ArgumentParser):
    """Raises SettingsError for a wrong flag, where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _camel_case(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def _read_mapping(path: Path) -> dict[Any, Any]:
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise SettingsError(f"configuration file {path}: {exc.strerror}") from exc
    try:
        document = msgspec.json.decode(content) if path.suffix == ".json" else msgspec.yaml.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"configuration file {path}: {' '.join(str(exc).split())}") from exc
    except RecursionError as exc:
        raise SettingsError(f"configuration file {path}: its values are nested too deeply") from exc
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"configuration file {path}: want a mapping of settings, found {type(document).__name__}")
    return document
