# SPDX-License-Identifier: Apache-2.0
"""Reads a shared library's dynamic symbols and their versions from the file.

No code of an image runs: an image's loader would run with the rights of the doctor's user.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF"
_CLASS_64, _LITTLE_ENDIAN = 2, 1
_DYNSYM, _STRTAB_LINK = 11, 24
_VERSYM, _VERNEED, _VERDEF = 0x6FFFFFFF, 0x6FFFFFFE, 0x6FFFFFFD
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_GLOBAL, _WEAK = 1, 2
_MACHINES = {62: "x86-64", 183: "arm64"}


class ElfError(Exception):
    """The file is not a valid 64-bit little-endian ELF library."""


@dataclass(frozen=True, slots=True)
class Library:
    """The symbols of one shared library. A symbol with a version is ``name@version``."""

    machine: str
    needs: frozenset[str]
    """Undefined symbols, without weak ones."""
    offers: frozenset[str]
    """Defined symbols, each with and without its version."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    count: int


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    version: str
    binding: int
    is_defined: bool


def read_library(path: Path) -> Library:
    """Read a library's dynamic symbols. Raises OSError or ElfError."""
    data = path.read_bytes()
    if data[:4] != _MAGIC or len(data) < 64 or data[4] != _CLASS_64 or data[5] != _LITTLE_ENDIAN:
        raise ElfError(f"{path}: expected a 64-bit little-endian ELF file")
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError, OverflowError) as exc:
        raise ElfError(f"{path}: its tables point outside the file") from exc


def _read(data: bytes) -> Library:
    (machine,) = struct.unpack_from("<H", data, 18)
    needs, offers = set[str](), set[str]()
    for symbol in _symbols(data):
        full = f"{symbol.name}@{symbol.version}" if symbol.version else symbol.name
        if symbol.is_defined:
            offers |= {symbol.name, full}
        elif symbol.binding == _GLOBAL:
            needs.add(full)
    return Library(_MACHINES.get(machine, str(machine)), frozenset(needs), frozenset(offers))


def _symbols(data: bytes) -> Iterator[_Symbol]:
    """Yield the global and weak symbols of the dynamic symbol table."""
    sections = list(_sections(data))
    table = next((one for one in sections if one.kind == _DYNSYM), None)
    if table is None:
        return
    strings = sections[table.link].offset
    names = _version_names(data, sections)
    versions = next((one for one in sections if one.kind == _VERSYM), None)
    for index in range(table.size // _SYMBOL.size):
        name_at, info, _, section, _, _ = _SYMBOL.unpack_from(data, table.offset + index * _SYMBOL.size)
        name, binding = _text(data, strings + name_at), info >> 4
        if name and binding in (_GLOBAL, _WEAK):
            yield _Symbol(name, _version(data, versions, names, index), binding, is_defined=section != 0)


def _version(data: bytes, versions: _Section | None, names: dict[int, str], index: int) -> str:
    if versions is None:
        return ""
    (number,) = struct.unpack_from("<H", data, versions.offset + 2 * index)
    return names.get(number & 0x7FFF, "")


def _sections(data: bytes) -> Iterator[_Section]:
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    for index in range(count):
        _, kind, _, _, at, length, link, info, _, _ = _SECTION.unpack_from(data, offset + index * size)
        yield _Section(kind, at, length, link, info)


def _version_names(data: bytes, sections: list[_Section]) -> dict[int, str]:
    names = {}
    for section in sections:
        if section.kind == _VERNEED:
            texts, at = sections[section.link].offset, section.offset
            for _ in range(section.count):
                _, entries, _, first, step = struct.unpack_from("<HHIII", data, at)
                entry = at + first
                for _ in range(entries):
                    _, _, number, name_at, following = struct.unpack_from("<IHHII", data, entry)
                    names[number & 0x7FFF] = _text(data, texts + name_at)
                    entry += following
                at += step
        elif section.kind == _VERDEF:
            texts, at = sections[section.link].offset, section.offset
            for _ in range(section.count):
                _, flags, number, _, _, first, step = struct.unpack_from("<HHHHIII", data, at)
                if not flags & 1:  # the first definition names the file and not a version
                    (name_at,) = struct.unpack_from("<I", data, at + first)
                    names[number & 0x7FFF] = _text(data, texts + name_at)
                at += step
    return names


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="replace")
