"""What a shared library asks of the image it is loaded in: its undefined symbols and their versions, read from the file itself.

Nothing of an image is run: a tenant's loader must not get to run as whoever looks.
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
    """The file is not a 64-bit little-endian ELF library; the text says what it is instead."""


@dataclass(frozen=True, slots=True)
class Library:
    """One shared library. Symbols with a version are ``name@version``."""

    machine: str
    needs: frozenset[str]
    """Undefined symbols that must be found; weak ones may be missing."""
    offers: frozenset[str]
    """Defined symbols, each with and without its version."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    count: int


def read_library(path: Path) -> Library:
    """Read a library's dynamic symbols. Raises OSError or ElfError."""
    data = path.read_bytes()
    if data[:4] != _MAGIC or len(data) < 64 or data[4] != _CLASS_64 or data[5] != _LITTLE_ENDIAN:
        raise ElfError(f"{path}: want a 64-bit little-endian ELF file")
    try:
        return _read(data)
    except (struct.error, IndexError, ValueError, OverflowError) as exc:
        raise ElfError(f"{path}: its tables do not fit the file") from exc


def _read(data: bytes) -> Library:
    (machine,) = struct.unpack_from("<H", data, 18)
    sections = list(_sections(data))
    symbols = next((one for one in sections if one.kind == _DYNSYM), None)
    if symbols is None:
        return Library(_MACHINES.get(machine, str(machine)), frozenset(), frozenset())
    texts = sections[symbols.link]
    names = _version_names(data, sections)
    versions = next((one for one in sections if one.kind == _VERSYM), None)
    needs, offers = set[str](), set[str]()
    for index in range(symbols.size // _SYMBOL.size):
        name_at, kind, _, section, _, _ = _SYMBOL.unpack_from(data, symbols.offset + index * _SYMBOL.size)
        name = _text(data, texts.offset + name_at)
        if not name or kind >> 4 not in (_GLOBAL, _WEAK):
            continue
        version = ""
        if versions is not None:
            (number,) = struct.unpack_from("<H", data, versions.offset + 2 * index)
            version = names.get(number & 0x7FFF, "")
        full = f"{name}@{version}" if version else name
        if section:
            offers |= {name, full}
        elif kind >> 4 == _GLOBAL:
            needs.add(full)
    return Library(_MACHINES.get(machine, str(machine)), frozenset(needs), frozenset(offers))


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
