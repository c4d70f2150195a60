# SPDX-License-Identifier: Apache-2.0
"""Reads name and version of a container runtime through the CRI's ``RuntimeService/Version``, without generated code."""

from pathlib import Path

import grpc

_METHOD = "/runtime.v1.RuntimeService/Version"
_SECONDS = 3.0
_NAME_FIELD = 2
_VERSION_FIELD = 3
_LENGTH_DELIMITED = 2


def runtime_version(socket: Path) -> tuple[str, str] | None:
    """Return name and version of the runtime on a socket, such as ``("containerd", "v2.0.1")``, or None when it does not answer."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            fields = decode_strings(call(b"", timeout=_SECONDS))
        except (grpc.RpcError, ValueError):
            return None
    return fields.get(_NAME_FIELD, ""), fields.get(_VERSION_FIELD, "")


def decode_strings(message: bytes) -> dict[int, str]:
    """Decode a protobuf message that has only string fields: string by field number. Raises ValueError."""
    fields, at = {}, 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 != _LENGTH_DELIMITED:
            raise ValueError(f"expected string fields only, found wire type {tag & 7}")
        length, at = _varint(message, at)
        if at + length > len(message):
            raise ValueError("the message is truncated")
        fields[tag >> 3] = message[at : at + length].decode(errors="replace")
        at += length
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("the message is truncated")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
