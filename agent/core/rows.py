# SPDX-License-Identifier: Apache-2.0
"""The file format of stored values: one line of JSON with a version and a digest of the content, which detects a damaged file."""

import hashlib
from typing import Any, Generic, TypeVar

import msgspec

from agent.errors import StorageError

T = TypeVar("T")


class RowFormat(Generic[T]):
    """Encodes and decodes values of one type."""

    def __init__(self, name: str, field: str, content: type[T], version: int) -> None:
        """Args: name: the row's name in error messages. field: the JSON field of the content."""
        self._name = name
        self._content = content
        self._version = version
        fields = [("version", int), ("sha256", str), ("content", msgspec.Raw)]
        self._row: Any = msgspec.defstruct("Row", fields, frozen=True, rename={"content": field})

    def encode(self, value: T) -> bytes:
        """Return the line for a value."""
        body = msgspec.json.encode(value)
        return msgspec.json.encode(self._row(self._version, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n"

    def decode(self, line: bytes) -> T:
        """Return the value of a line. Raises StorageError if the line is incomplete, damaged or of another version."""
        try:
            row = msgspec.json.decode(line, type=self._row)
            if row.version != self._version:
                raise StorageError(f"want a {self._name} of version {self._version}, found version {row.version}")
            if hashlib.sha256(bytes(row.content)).hexdigest() != row.sha256:
                raise StorageError(f"the content of this {self._name} does not match its digest")
            return msgspec.json.decode(bytes(row.content), type=self._content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise StorageError(f"not a {self._name}: {exc}") from exc
        except RecursionError as exc:
            raise StorageError(f"not a {self._name}: its values are nested too deeply") from exc
