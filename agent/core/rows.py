"""Values as files keep them: one line of JSON with a version and a digest of the content, so that a damaged file is recognised."""

import hashlib
from typing import Any, Generic, TypeVar

import msgspec

from agent.errors import StorageError

T = TypeVar("T")


class RowFormat(Generic[T]):
    """How values of one type are written and read back."""

    def __init__(self, name: str, field: str, content: type[T], version: int) -> None:
        """Args: name: what a row is called in errors. field: under which the content stands in the line."""
        self._name = name
        self._content = content
        self._version = version
        fields = [("version", int), ("sha256", str), ("content", msgspec.Raw)]
        self._row: Any = msgspec.defstruct("Row", fields, frozen=True, rename={"content": field})

    def encode(self, value: T) -> bytes:
        """Return a value as its line."""
        body = msgspec.json.encode(value)
        return msgspec.json.encode(self._row(self._version, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n"

    def decode(self, line: bytes) -> T:
        """Read a value back. Raises StorageError when the line is torn, damaged or of another version."""
        try:
            row = msgspec.json.decode(line, type=self._row)
            if row.version != self._version:
                raise StorageError(f"want a {self._name} of version {self._version}, found version {row.version}")
            if hashlib.sha256(bytes(row.content)).hexdigest() != row.sha256:
                raise StorageError(f"the content of this {self._name} does not fit its digest")
            return msgspec.json.decode(bytes(row.content), type=self._content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise StorageError(f"not a {self._name}: {exc}") from exc
