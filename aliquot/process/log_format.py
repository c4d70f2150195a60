# SPDX-License-Identifier: Apache-2.0
"""Log lines on standard error: JSON for collectors, text for people, with the same keys."""

import faulthandler
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from aliquot.process.settings import LogFormat, LogLevel

_STANDARD_ERROR = 2
"""The descriptor: the stacks are written while Python's own files may be unusable."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, then keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]  # noqa: DTZ006 - people expect local time
        extra = "".join(f" {key}={value}" for key, value in _extra(record).items())
        line = f"{when} {record.levelname:<7} {record.getMessage()}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and value is not None}


def configure_logging(level: LogLevel, form: LogFormat) -> None:
    """Log to standard error, for the whole process. A crash in native code writes the stack of each thread there, as plain text."""
    faulthandler.enable(_STANDARD_ERROR)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
