# SPDX-License-Identifier: Apache-2.0
"""Module images as NVIDIA's compilers write them, without these compilers: cubins, fat binaries and their compressions.

The formats are those that simulated_driver/image_elf.c and image_fatbin.c read; this is a second description of them, so that tests compare
two. Code is zeros. Sizes and offsets are bytes.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

FATBIN_MAGIC, WRAPPER_MAGIC = 0xBA55ED50, 0x466243B1
_KIND_PTX, _KIND_ELF, _KIND_SEVERAL = 1, 2, 0x100
_ACCELERATOR_FLAG, _FAMILY_FLAG = 0x100000, 0x200000
_BLOCK = 65536
_TYPE_INFO, _TYPE_NOBITS, _TYPE_PROGBITS, _TYPE_SYMBOLS, _TYPE_STRINGS = 0x70000000, 8, 1, 2, 3
_ALLOC = 2


class Compression(Enum):
    """How an entry of a fat binary is compressed; the value is its flag."""

    NONE = 0
    LZ4 = 0x2000
    ZSTD = 0x8000


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel; parameters are given by their sizes and lie at multiples of 8."""

    name: str
    parameters: tuple[int, ...] = ()
    code_bytes: int = 128
    registers: int = 16
    shared_bytes: int = 0
    local_bytes: int = 0
    max_threads: int = 0
    cluster: tuple[int, int, int] = (0, 0, 0)

    def layout(self) -> list[tuple[int, int]]:
        """Offset and size of each parameter, in order."""
        offsets, at = [], 0
        for size in self.parameters:
            offsets.append((at, size))
            at += (size + 7) // 8 * 8
        return offsets


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of ``size`` bytes; without a value it is zeros. A constant has a value."""

    name: str
    size: int
    value: bytes = b""
    managed: bool = False
    constant: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a fat binary: a cubin or PTX for a compute capability (major * 10 + minor)."""

    capability: int
    image: bytes
    ptx: bool = False
    accelerator: bool = False
    """For sm_90a: this capability only."""
    family: bool = False
    """For sm_100f: this major version, from this minor version."""


class _Strings:
    def __init__(self) -> None:
        self.data = bytearray(b"\0")

    def add(self, text: str) -> int:
        at = len(self.data)
        self.data += text.encode() + b"\0"
        return at


@dataclass(slots=True)
class _Section:
    name: str
    kind: int
    data: bytes = b""
    size: int | None = None  # of a section without data in the file
    flags: int = 0
    info: int = 0
    link: int = 0


def _record(attribute: int, data: bytes) -> bytes:
    return struct.pack("<BBH", 4, attribute, len(data)) + data


def _kernel_info(kernel: Kernel) -> bytes:
    out = b""
    if kernel.max_threads:
        out += _record(0x05, struct.pack("<3I", kernel.max_threads, 1, 1))
    if any(kernel.cluster):
        out += struct.pack("<BBH", 1, 0x3E, 0) + _record(0x3D, struct.pack("<3I", *kernel.cluster))
    for ordinal, (offset, size) in reversed(list(enumerate(kernel.layout()))):  # the compiler's order
        if size < 1 << 14:
            out += _record(0x17, struct.pack("<IHHI", 0, ordinal, offset, size << 18 | 0x1F000))
        else:
            out += _record(0x45, struct.pack("<IHHI", 0, ordinal, offset, size))
    return out + _record(0x1C, struct.pack("<I", 16))  # an attribute that no reader needs


def _place(variables: Iterable[Variable]) -> tuple[bytes, dict[str, int]]:
    data, offsets = bytearray(), {}
    for variable in variables:
        data += bytes(-len(data) % 16)
        offsets[variable.name] = len(data)
        data += variable.value.ljust(variable.size, b"\0")
    return bytes(data), offsets


def _in_section(variable: Variable) -> str:
    if variable.constant:
        return ".nv.constant3"
    return ".nv.global.init" if variable.value else ".nv.global"


def _variable_sections(variables: Sequence[Variable]) -> tuple[list[_Section], dict[str, tuple[str, int]]]:
    """Sections of variables, and the section and offset of each variable."""
    sections: list[_Section] = []
    places: dict[str, tuple[str, int]] = {}
    for name in (".nv.global", ".nv.global.init", ".nv.constant3"):
        data, offsets = _place(v for v in variables if _in_section(v) == name)
        if name == ".nv.global":
            sections.append(_Section(name, _TYPE_NOBITS, size=len(data), flags=_ALLOC | 1))
        else:
            sections.append(_Section(name, _TYPE_PROGBITS, data, flags=_ALLOC))
        places |= {variable: (name, offset) for variable, offset in offsets.items()}
    return sections, places


def _symbol(name: int, kind: int, other: int, section: int, value: int, size: int) -> bytes:
    return struct.pack("<IBBHQQ", name, 1 << 4 | kind, other, section, value, size)


def _kernel_sections(kernel: Kernel, first: int, capability: int) -> list[_Section]:
    reserved = 1024 if capability >= 90 and kernel.shared_bytes else 0
    return [
        _Section(f".text.{kernel.name}", _TYPE_PROGBITS, bytes(kernel.code_bytes), flags=_ALLOC | 4),
        _Section(f".nv.info.{kernel.name}", _TYPE_INFO, _kernel_info(kernel), info=first),
        _Section(f".nv.shared.{kernel.name}", _TYPE_NOBITS, size=kernel.shared_bytes + reserved, flags=_ALLOC | 1, info=first),
    ]


def cubin(
    capability: int,
    kernels: Sequence[Kernel] = (),
    variables: Sequence[Variable] = (),
    *,
    abi: int = 7,
    accelerator: bool = False,
    calls: Sequence[str] = (),
) -> bytes:
    """An ELF file for a compute capability (major * 10 + minor), in the ABI of CUDA 12 (7) or 13 (8).

    Args: calls: functions of the driver that the code calls, such as ``malloc``.
    """
    sections = [_Section("", 0), *(_Section(name, _TYPE_STRINGS) for name in (".shstrtab", ".strtab")), _Section(".symtab", _TYPE_SYMBOLS)]
    sections[3].link = 2
    of_variables, places = _variable_sections(variables)
    sections += of_variables
    index = {section.name: number for number, section in enumerate(sections)}
    strings, symbols, common = _Strings(), bytearray(24), b""
    for variable in variables:
        section, offset = places[variable.name]
        symbols += _symbol(strings.add(variable.name), 1, 4 if variable.managed else 0, index[section], offset, variable.size)
    for kernel in kernels:
        number, first = len(symbols) // 24, len(sections)
        symbols += _symbol(strings.add(kernel.name), 2, 0x10, first, 0, kernel.code_bytes)
        common += _record(0x2F, struct.pack("<II", number, kernel.registers)) + _record(
            0x11, struct.pack("<II", number, kernel.local_bytes)
        )
        sections += _kernel_sections(kernel, first, capability)
    for name in calls:
        symbols += _symbol(strings.add(name), 2, 0, 0, 0, 0)
    sections.append(_Section(".nv.info", _TYPE_INFO, common))
    if abi == 8:
        sections.append(_Section(".nv.compat", 0x70000086, struct.pack("<BBH", 2, 0x09, int(accelerator))))
    sections[2].data, sections[3].data = bytes(strings.data), bytes(symbols)
    flags = capability << 8 | 0x06000004 if abi == 8 else capability | 0x500 | capability << 16 | (0x800 if accelerator else 0)
    return _elf(sections, 0x41 if abi == 8 else 0x33, abi, flags)


def _elf(sections: list[_Section], os_abi: int, abi: int, flags: int) -> bytes:
    names = _Strings()
    name_offsets = [names.add(section.name) for section in sections]
    sections[1].data = bytes(names.data)
    body, headers = bytearray(64), b""
    for section, name in zip(sections, name_offsets, strict=True):
        body += bytes(-len(body) % 16)
        size = len(section.data) if section.size is None else section.size
        headers += struct.pack("<IIQQQQIIQQ", name, section.kind, section.flags, 0, len(body), size, section.link, section.info, 1, 0)
        body += section.data
    body += bytes(-len(body) % 8)
    ident = b"\x7fELF" + bytes([2, 1, 1, os_abi, abi]) + bytes(7)
    body[:64] = ident + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, len(body), flags, 64, 0, 0, 64, len(sections), 1)
    return bytes(body) + headers


# --- fat binaries -----------------------------------------------------------------------------------------------


def lz4(data: bytes) -> bytes:
    """An LZ4 block of literals, with one match where the data ends in a run of one byte."""
    run = len(data) - len(data.rstrip(data[-1:])) if data else 0
    literals = data[: len(data) - run + 1] if run >= 32 else data
    out = bytearray([min(len(literals), 15) << 4])
    if len(literals) >= 15:
        out += _long(len(literals) - 15)
    out += literals
    if run >= 32:  # all of the run but its first byte and the last twelve, which stay literals in this format
        match = run - 1 - 12
        out[0] |= min(match - 4, 15)
        out += struct.pack("<H", 1) + (_long(match - 4 - 15) if match - 4 >= 15 else b"")
        out += bytes([12 << 4]) + data[-12:]
    return bytes(out)


def _long(rest: int) -> bytes:
    return bytes([255]) * (rest // 255) + bytes([rest % 255])


def zstd(data: bytes) -> bytes:
    """A zstd frame of raw blocks, and of run-length blocks where 64 KiB are one byte."""
    frame = bytearray(b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", len(data)))
    blocks = [data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK)] or [b""]
    for number, block in enumerate(blocks):
        is_run = len(block) > 1 and block == block[:1] * len(block)
        header = int(number == len(blocks) - 1) | int(is_run) << 1 | len(block) << 3
        frame += header.to_bytes(3, "little") + (block[:1] if is_run else block)
    return bytes(frame)


def _uncompressed(data: bytes) -> bytes:
    return data


_PACK: dict[Compression, Callable[[bytes], bytes]] = {Compression.NONE: _uncompressed, Compression.LZ4: lz4, Compression.ZSTD: zstd}


def _flags(entry: Entry) -> int:
    return 0x11 | (_ACCELERATOR_FLAG if entry.accelerator else 0) | (_FAMILY_FLAG if entry.family else 0)


def _header(kind: int, second: int, size: int, packed: int, capability: int, flags: int, unpacked: int) -> bytes:
    return struct.pack("<HHIQIIIIIIQQQ", kind, 0x0101, second, size, packed, 0, 0x10008, capability, 0, 0, flags, 0, unpacked)


def _entry(entry: Entry, compression: Compression) -> bytes:
    packed = _PACK[compression](entry.image)
    payload = packed + bytes(-len(packed) % 8)
    is_packed = compression is not Compression.NONE
    kind = _KIND_PTX if entry.ptx else _KIND_ELF
    sizes = (len(packed), len(entry.image)) if is_packed else (0, 0)
    return _header(kind, 64, len(payload), sizes[0], entry.capability, _flags(entry) | compression.value, sizes[1]) + payload


def _several(entries: Sequence[Entry], compression: Compression) -> bytes:
    """One entry that compresses all images together."""
    headers, images = b"", b""
    for entry in entries:
        kind = _KIND_PTX if entry.ptx else _KIND_ELF
        headers += _header(kind, len(images), len(entry.image), 0, entry.capability, _flags(entry), 0)
        images += entry.image + bytes(-len(entry.image) % 8)
    packed = _PACK[compression](images)
    table = struct.pack("<II", len(entries), 8 + len(headers)) + headers
    head = _header(_KIND_SEVERAL, 64 + len(table), len(packed), len(packed), 0, 0x11 | compression.value, len(images))
    return head + table + packed


def fatbin(entries: Sequence[Entry], compression: Compression = Compression.NONE, *, together: bool = False) -> bytes:
    """A fat binary; ``together`` compresses all images as one, as ``fatbinary --concat`` does."""
    body = _several(entries, compression) if together else b"".join(_entry(entry, compression) for entry in entries)
    return struct.pack("<IHHQ", FATBIN_MAGIC, 1, 16, len(body)) + body


def wrapper(address: int) -> bytes:
    """What a program has around a fat binary at ``address``."""
    return struct.pack("<IIQQ", WRAPPER_MAGIC, 1, address, 0)
